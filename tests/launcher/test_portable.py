"""Portable arithmetic: verified bits, and the run that keeps them."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import lockstep as ls
import pytest_lockstep
from lockstep.comm import backend, portable_products
from lockstep.kernel.errors import UsageError
from lockstep.launcher import kernel_variables, portable
from lockstep.launcher.kernel_variables import OF_TORCH, find_missing_variables
from lockstep.launcher.run_folder import command_words
from lockstep.tools.commands.run import command
from processes import restoring_handlers

pytestmark = pytest.mark.skipif(not backend.available(), reason="it needs the extension")

MINOR = ".".join(torch.__version__.split(".")[:2])
CPU = torch.device("cpu")
MEANING = (
    "this processor, or this build of torch, does not compute the bits that every x86-64 processor "
    "with AVX2 must compute in portable mode; if the kernels changed on purpose, write what "
    "`python -m lockstep.launcher.portable` prints into portable.CONSTANTS"
)


def on_a_new_rank(function):
    """Call a function in a process in which torch has not chosen its kernels."""
    return pytest_lockstep.run(lambda rank: function(), 1, init=False)[0]


@pytest.mark.skipif(MINOR not in portable.CONSTANTS, reason=f"no constant for torch {MINOR}")
def test_the_bits_are_those_of_every_processor():
    def measure():
        with mock.patch.dict(portable.CONSTANTS, clear=True):
            ls.init(portable=True)
        return portable.measure_of_torch()

    assert on_a_new_rank(measure) == portable.CONSTANTS[MINOR], MEANING


@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="without AVX-512, torch computes by the kernels of portable arithmetic anyway",
)
def test_a_rank_that_has_computed_before_is_refused():
    def fail():
        torch.ones(9, 9) @ torch.ones(9, 9)
        torch.ones(9).exp()
        with pytest.raises(UsageError) as raised:
            ls.init(portable=True)
        return str(raised.value), OF_TORCH.keys() & os.environ.keys()

    message, left = on_a_new_rank(fail)
    assert "elementwise functions with other bits than portable arithmetic, because" in message
    assert "start the script with `lockstep run --portable`" in message
    assert not left


def test_the_variable_is_the_argument():
    def activate():
        os.environ["LOCKSTEP_PORTABLE"] = "1"
        ls.init()
        from torch.backends.cpu import get_cpu_capability  # torch.backends cannot be pickled

        return get_cpu_capability(), os.environ["MKL_CBWR"]

    assert on_a_new_rank(activate) == ("AVX2", "COMPATIBLE")


@pytest.mark.skipif(MINOR not in portable.CONSTANTS, reason=f"no constant for torch {MINOR}")
def test_kernels_that_no_variable_explains_are_named():
    def fail():
        os.environ.update(
            find_missing_variables(os.environ, {"LOCKSTEP_PORTABLE": "1", **OF_TORCH})
        )
        other = portable.CONSTANTS["2.13"].replace("softmax=", "softmax=0")
        with (
            mock.patch.dict(portable.CONSTANTS, {MINOR: other}),
            pytest.raises(UsageError) as raised,
        ):
            ls.init()
        return str(raised.value)

    message = on_a_new_rank(fail)
    assert message.startswith("this process computes softmax with other bits than portable arith")
    assert f"this build of torch ({torch.__version__}) has other kernels" in message


def test_another_torch_is_not_verified(capsys):
    portable._note_unknown.cache_clear()
    try:
        with mock.patch.dict(portable.CONSTANTS, clear=True):
            portable.choose_kernels(True, CPU, lambda name, value: None)
    finally:
        portable.restore_kernels()
    assert f"the bits of portable arithmetic with torch {MINOR} are not known" in (
        capsys.readouterr().err
    )


def test_the_compiled_module_is_needed(monkeypatch):
    monkeypatch.setattr(portable_products, "reason_unavailable", lambda: "run `lockstep build`")
    with pytest.raises(UsageError, match=r"needs the compiled backend.*: run `lockstep build`"):
        portable.choose_kernels(True, CPU, lambda name, value: pytest.fail(name))


def test_an_accelerator_is_an_error():
    with pytest.raises(
        UsageError, match="those of the CPU, and this rank computes on cuda:1: pass"
    ):
        portable.choose_kernels(True, torch.device("cuda:1"), lambda name, value: pytest.fail(name))


def test_a_variable_with_another_value_is_an_error():
    environ = {"MKL_CBWR": "AVX2"}
    with pytest.raises(UsageError, match=r"MKL_CBWR=AVX2 contradicts portable .* needs COMPATIBLE"):
        find_missing_variables(environ, OF_TORCH)
    assert find_missing_variables({"MKL_CBWR": "compatible"}, OF_TORCH).keys() == {*OF_TORCH} - {
        "MKL_CBWR"
    }


def test_a_processor_without_avx2_is_an_error(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    kernel_variables._find_problem.cache_clear()
    try:
        with pytest.raises(UsageError, match="an x86-64 processor with AVX2: this is aarch64"):
            find_missing_variables({}, OF_TORCH)
    finally:
        kernel_variables._find_problem.cache_clear()


@pytest.fixture
def lockstep_run(tmp_path, monkeypatch):
    """Run a script with `lockstep run`; return its folder, and the kernels' variables of rank 0."""
    monkeypatch.chdir(tmp_path)
    Path("tell.py").write_text(
        "import json, os\n"
        "print(json.dumps([os.environ['LOCKSTEP_RUN'], os.environ.get('MKL_CBWR'),\n"
        "                  os.environ.get('NPY_DISABLE_CPU_FEATURES', '')[:6]]))\n"
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
    assert told == ["COMPATIBLE", "X86_V4"]
    assert json.loads(Path("runs", name, "launch.json").read_text())["portable"]
    assert lockstep_run("--resume", name) == (name, told)
    words = command_words({"LOCKSTEP_RUN": f"runs/{name}"}, [])
    assert words == ["lockstep", "run", "-n", "1", "--portable", "tell.py"]
    plain, told = lockstep_run("tell.py")
    assert told[0] is None
    with pytest.raises(UsageError, match=f"--portable: the run runs/{plain} was started without"):
        command.main(["--resume", plain, "--portable"], standalone_mode=False)


def test_the_newest_run_is_one_with_the_same_arithmetic(lockstep_run):
    auto = ("--resume", "auto", "tell.py")
    name, _ = lockstep_run("--portable", *auto, status=75)
    other, _ = lockstep_run(*auto, status=75)
    assert other != name
    with mock.patch.dict(os.environ, LOCKSTEP_PORTABLE="1"):
        assert lockstep_run(*auto, status=75) == (name, ["COMPATIBLE", "X86_V4"])
    assert lockstep_run(*auto)[0] == other
