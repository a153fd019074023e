"""Portable arithmetic: verified bits, and the run that keeps them."""

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import lockstep as ls
import pytest_lockstep
from lockstep.comm import backend
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import command_words
from lockstep.portable import kernels, products
from lockstep.portable.arithmetic import has_portable_bits
from lockstep.portable.variables import OF_TORCH, find_missing_variables
from lockstep.processor_core import divide_cores
from lockstep.tools.commands.run import command
from processes import restoring_handlers

pytestmark = pytest.mark.skipif(not backend.available(), reason="it needs the extension")

MINOR = ".".join(torch.__version__.split(".")[:2])
CPU = torch.device("cpu")
MEANING = (
    "this processor, or this build of torch, does not compute the bits that every x86-64 processor "
    "with AVX2 must compute in portable mode; if the kernels changed on purpose, write what "
    "`python -m lockstep.portable.kernels` prints into kernels.CONSTANTS"
)


@pytest.fixture
def kernels_of_torch():
    """Begin with torch's own kernels in this process."""
    kernels.restore_kernels()


HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
needs_avx512 = pytest.mark.skipif(
    not HAS_AVX512, reason="without AVX-512, torch computes by the kernels of portable bits anyway"
)


def on_a_new_rank(function, ranks=1):
    """Call a function in a process in which torch has not chosen its kernels."""
    return pytest_lockstep.run(function, ranks=ranks, init=False)[0]


def describe():
    """Return whether bits are portable here, the number of threads, and torch's kernels."""
    from torch.backends.cpu import get_cpu_capability  # torch.backends cannot be pickled

    return has_portable_bits(), torch.get_num_threads(), get_cpu_capability()


def init_and_hear():
    """Call `ls.init()`; return `describe()`, what it printed, and the variables that it set."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        ls.init()
    return describe(), said.getvalue(), OF_TORCH.keys() & os.environ.keys()


@pytest.mark.parametrize("ranks", [1, 2])
def test_portable_bits_are_the_default(ranks):
    (is_portable, threads, kernels), said, variables = on_a_new_rank(init_and_hear, ranks)
    assert is_portable
    assert threads == divide_cores(ranks)
    assert kernels == "AVX2"
    assert said == ""
    assert variables == OF_TORCH.keys()


@needs_avx512
def test_a_script_that_computes_before_keeps_the_kernels_of_torch_and_says_so():
    def compute_first():
        torch.ones(99).exp()
        return init_and_hear()

    described, said, variables = on_a_new_rank(compute_first)
    assert described == (False, 1, "AVX512")
    assert said == (
        "lockstep: bits depend on the kind of processor and on the number of threads, because "
        "torch had computed something before lockstep.init() and keeps the kernels that it chose "
        "then: call it at the beginning of the script; or choose this with "
        "lockstep.init(portable=False)\n"
    )
    assert not variables


def test_a_loop_without_init_keeps_its_threads_if_its_bits_are_not_portable():
    def make():
        os.environ["LOCKSTEP_PORTABLE"] = "0"
        torch.set_num_threads(3)
        model = torch.nn.Linear(2, 2)
        ls.exact(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return describe()[:2]

    assert on_a_new_rank(make) == (False, 3)


@pytest.mark.usefixtures("kernels_of_torch")
def test_without_the_compiled_module_the_default_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(kernels, "reason_unavailable", lambda: "it is not built: run it")
    said = []
    assert not kernels.choose_kernels(None, CPU, lambda name, value: pytest.fail(name), said.append)
    assert said == [
        "bits depend on the kind of processor and on the number of threads, because the compiled "
        "backend is not available: it is not built: run it; or choose this with "
        "lockstep.init(portable=False)"
    ]


@pytest.mark.usefixtures("kernels_of_torch")
def test_a_variable_of_the_user_decides_against_the_default(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    said = []
    assert not kernels.choose_kernels(None, CPU, lambda name, value: pytest.fail(name), said.append)
    assert "because MKL_CBWR=AVX2 contradicts portable arithmetic" in said[0]


@pytest.mark.parametrize(("machine", "device"), [("aarch64", "cpu"), ("x86_64", "cuda:1")])
@pytest.mark.usefixtures("kernels_of_torch")
def test_where_there_are_no_portable_bits_the_default_says_nothing(monkeypatch, machine, device):
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert not kernels.choose_kernels(
        None, torch.device(device), lambda name, value: pytest.fail(name), pytest.fail
    )


def test_torchs_own_kernels_can_be_chosen():
    def init():
        ls.init(portable=False)
        return describe()[:2]

    assert on_a_new_rank(init) == (False, 1)


@pytest.mark.skipif(MINOR not in kernels.CONSTANTS, reason=f"no constant for torch {MINOR}")
def test_the_bits_are_those_of_every_processor():
    def measure():
        with mock.patch.dict(kernels.CONSTANTS, clear=True):
            ls.init(portable=True)
        return kernels.measure_of_torch()

    assert on_a_new_rank(measure) == kernels.CONSTANTS[MINOR], MEANING


@needs_avx512
def test_a_rank_that_has_computed_before_is_refused():
    def fail():
        torch.ones(9, 9) @ torch.ones(9, 9)
        torch.ones(9).log1p()
        with pytest.raises(UsageError) as raised:
            ls.init(portable=True)
        return str(raised.value), OF_TORCH.keys() & os.environ.keys()

    message, left = on_a_new_rank(fail)
    assert "with other bits than portable arithmetic, because" in message
    assert "start the script with `lockstep run --portable`" in message
    assert not left


def test_the_variable_is_the_argument():
    def activate():
        os.environ["LOCKSTEP_PORTABLE"] = "1"
        ls.init()
        from torch.backends.cpu import get_cpu_capability  # torch.backends cannot be pickled

        return get_cpu_capability(), os.environ["MKL_CBWR"]

    assert on_a_new_rank(activate) == ("AVX2", "COMPATIBLE")


@pytest.mark.skipif(MINOR not in kernels.CONSTANTS, reason=f"no constant for torch {MINOR}")
def test_kernels_that_no_variable_explains_are_named():
    def fail():
        os.environ.update(
            find_missing_variables(os.environ, {"LOCKSTEP_PORTABLE": "1", **OF_TORCH})
        )
        other = kernels.CONSTANTS["2.13"].replace("softmax=", "softmax=0")
        with (
            mock.patch.dict(kernels.CONSTANTS, {MINOR: other}),
            pytest.raises(UsageError) as raised,
        ):
            ls.init()
        return str(raised.value)

    message = on_a_new_rank(fail)
    assert message.startswith("this process computes softmax with other bits than portable arith")
    assert f"this build of torch ({torch.__version__}) has other kernels" in message


def test_another_torch_is_not_verified():
    said = []
    try:
        with mock.patch.dict(kernels.CONSTANTS, clear=True):
            kernels.choose_kernels(True, CPU, lambda name, value: None, said.append)
    finally:
        kernels.restore_kernels()
    assert f"the bits of portable arithmetic with torch {MINOR} are not known" in said[0]


def test_the_compiled_module_is_needed(monkeypatch):
    monkeypatch.setattr(products, "reason_unavailable", lambda: "run `lockstep build`")
    with pytest.raises(UsageError, match=r"needs the compiled backend.*: run `lockstep build`"):
        kernels.choose_kernels(True, CPU, lambda name, value: pytest.fail(name))


def test_an_accelerator_is_an_error():
    with pytest.raises(
        UsageError, match="those of the CPU, and this rank computes on cuda:1: pass"
    ):
        kernels.choose_kernels(True, torch.device("cuda:1"), lambda name, value: pytest.fail(name))


def test_a_variable_with_another_value_is_an_error():
    environ = {"MKL_CBWR": "AVX2"}
    with pytest.raises(UsageError, match=r"MKL_CBWR=AVX2 contradicts portable .* needs COMPATIBLE"):
        find_missing_variables(environ, OF_TORCH)
    assert find_missing_variables({"MKL_CBWR": "compatible"}, OF_TORCH).keys() == {*OF_TORCH} - {
        "MKL_CBWR"
    }


def test_a_processor_without_avx2_is_an_error(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UsageError, match="an x86-64 processor with AVX2: this is aarch64"):
        find_missing_variables({}, OF_TORCH)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.linalg.qr(spread(300, 200)).R,
        lambda: torch.linalg.solve(spread(400, 400), spread(400, 3)),
        lambda: torch.linalg.svdvals(spread(200, 150)),
        lambda: torch.fft.rfft2(spread(4, 301, 210)).real,
        lambda: (spread(300, 3000) * (1 + 2j) @ (spread(3000, 40) * 1j)).real,
        lambda: spread(300, 3000).half() @ spread(3000, 40).half(),
        lambda: torch.conv2d(spread(8, 16, 30, 30).bfloat16(), spread(8, 16, 3, 3).bfloat16()),
        lambda: torch.conv1d(spread(8, 16, 900).half(), spread(8, 16, 3).half()),
    ],
)
def test_what_other_libraries_compute_does_not_depend_on_the_threads(compute):
    def count_results():
        ls.init()
        found = set()
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.add(compute().contiguous().view(torch.uint8).numpy().tobytes())
        return len(found)

    assert on_a_new_rank(count_results) == 1


def spread(*shape):
    """Return numbers from -1 to 1."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).sin()


def test_convolutions_of_16_bits_are_those_of_float32_rounded():
    def compare():
        ls.init()
        found = []
        for dtype in (torch.bfloat16, torch.float16):
            given = [
                spread(3, 4, 9, 9).to(dtype),
                spread(5, 4, 3, 3).to(dtype),
                spread(5).to(dtype),
            ]
            results = []
            for kind in (dtype, torch.float32):
                leaves = [each.to(kind).clone().requires_grad_() for each in given]
                y = torch.conv2d(*leaves, padding=1)
                y.backward(torch.ones_like(y))
                results.append([y, *(leaf.grad for leaf in leaves)])
            found += [
                torch.equal(short, wide.to(dtype)) for short, wide in zip(*results, strict=True)
            ]
        return found

    assert all(on_a_new_rank(compare))


@pytest.fixture
def lockstep_run(tmp_path, monkeypatch):
    """Run a script with `lockstep run`; return its folder, and the kernels' variables of rank 0."""
    monkeypatch.chdir(tmp_path)
    Path("tell.py").write_text(
        "import json, os\n"
        "print(json.dumps([os.environ['LOCKSTEP_RUN'], os.environ.get('MKL_CBWR'),\n"
        "                  os.environ.get('NPY_DISABLE_CPU_FEATURES', '')[:6],\n"
        "                  os.environ.get('LOCKSTEP_PORTABLE')]))\n"
        "raise SystemExit(int(os.environ['STATUS']))\n"
    )

    def run(*words, status=0):
        with (
            mock.patch.dict(os.environ, {"STATUS": str(status)}),
            restoring_handlers(),
            pytest.raises(SystemExit),
        ):
            command.main([*words], standalone_mode=False)
        newest = max(Path("runs").iterdir(), key=lambda path: (path / "rank-0.log").stat().st_mtime)
        folder, *told = json.loads((newest / "rank-0.log").read_text().splitlines()[-1])
        return Path(folder).name, told

    return run


def test_a_run_is_portable_again_when_it_is_resumed(lockstep_run):
    name, told = lockstep_run("--portable", "tell.py")
    assert told == ["COMPATIBLE", "X86_V4", "1"]
    assert json.loads(Path("runs", name, "launch.json").read_text())["portable"]
    assert lockstep_run("--resume", name) == (name, told)
    words = command_words({"LOCKSTEP_RUN": f"runs/{name}"}, [])
    assert words == ["lockstep", "run", "-n", "1", "--portable", "tell.py"]
    plain, told = lockstep_run("tell.py")
    assert told[::2] == [None, None]
    with pytest.raises(UsageError, match=f"--portable: the run runs/{plain} was started without"):
        command.main(["--resume", plain, "--portable"], standalone_mode=False)


def test_a_run_without_portable_bits_is_continued_without(lockstep_run):
    name, told = lockstep_run("--no-portable", "tell.py", status=75)
    assert told[::2] == [None, "0"]
    words = command_words({"LOCKSTEP_RUN": f"runs/{name}"}, [])
    assert words == ["lockstep", "run", "-n", "1", "--no-portable", "tell.py"]
    with pytest.raises(UsageError, match=f"--portable: the run runs/{name} was started without"):
        command.main(["--resume", name, "--portable"], standalone_mode=False)
    file = Path("runs", name, "launch.json")
    earlier = json.loads(file.read_text())
    del earlier["portable"]  # as versions wrote it for which this was the default
    file.write_text(json.dumps(earlier))
    assert lockstep_run("--resume", name, status=75) == (name, told)
    assert lockstep_run("--resume", "auto", "tell.py", status=75) == (name, told)
    assert json.loads(file.read_text())["portable"] is False


def test_the_newest_run_is_one_with_the_same_arithmetic(lockstep_run):
    auto = ("--resume", "auto", "tell.py")
    name, _ = lockstep_run("--portable", *auto, status=75)
    other, _ = lockstep_run(*auto, status=75)
    assert other != name
    with mock.patch.dict(os.environ, LOCKSTEP_PORTABLE="1"):
        assert lockstep_run(*auto, status=75) == (name, ["COMPATIBLE", "X86_V4", "1"])
    assert lockstep_run(*auto)[0] == other


def test_onednn_has_chosen_its_instructions_when_init_returns():
    """It reads the variable in its first computation, which may come after `shutdown`."""

    def compute():
        os.environ.update(OF_TORCH)
        return torch.nn.functional.gelu(spread(512))

    def compute_after():
        ls.init()
        ls.shutdown()
        return torch.nn.functional.gelu(spread(512))

    assert torch.equal(on_a_new_rank(compute), on_a_new_rank(compute_after))
