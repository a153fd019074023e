"""LSTM layers in portable mode: against float64, each sample alone, and every kind of kernel."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm import backend
from lockstep.comm.native_module import load_native
from lockstep.portable.products import use_portable_products

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

States = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    threads = torch.get_num_threads()
    use_portable_products()
    yield
    use_portable_products()
    torch.set_num_threads(threads)


class Names(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def make_layer(**options: Any) -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True, **options)


def make_rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, 6, generator=draw).to(dtype)


def compute(layer: nn.LSTM, rows: torch.Tensor, states: States | None = None) -> list[torch.Tensor]:
    """Return the results, and the gradients of inputs and parameters."""
    rows = rows.detach().requires_grad_()
    given = [] if states is None else [one.detach().requires_grad_() for one in states]
    outputs, (hidden, cell) = layer(rows, (given[0], given[1]) if given else None)
    # In wider types, and so that each gradient of the three is another one.
    parts = (outputs.float().square(), hidden.float(), cell.float().square())
    total = torch.stack([part.sum() for part in parts]).sum()
    gradients = torch.autograd.grad(total, [rows, *given, *layer.parameters()])
    return [outputs, hidden, cell, *gradients]


class Case:
    """A layer with its inputs."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.steps = draw(st.integers(1, 9))
        self.samples = draw(st.integers(1, 37))
        self.options: dict[str, Any] = {
            "input_size": draw(st.integers(1, 35)),
            "hidden_size": draw(st.integers(1, 70)),
            "num_layers": draw(st.integers(1, 2)),
            "bias": draw(st.booleans()),
            "bidirectional": draw(st.booleans()),
        }
        torch.manual_seed(draw(st.integers(0, 1000)))
        self.layer = nn.LSTM(**self.options)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.mul_(draw(st.sampled_from([1, 2])))
        self.rows = torch.randn(self.steps, self.samples, self.options["input_size"])
        self.states: States | None = None
        if draw(st.booleans()):
            count = self.options["num_layers"] * (1 + self.options["bidirectional"])
            hidden, cell = torch.randn(2, count, self.samples, self.options["hidden_size"])
            self.states = hidden, cell

    def compute_in_float64(self) -> list[torch.Tensor]:
        layer = nn.LSTM(**self.options).double()
        layer.load_state_dict(self.layer.state_dict())
        states = self.states and (self.states[0].double(), self.states[1].double())
        return compute(layer, self.rows.double(), states)

    def compute_sample(self, number: int) -> list[torch.Tensor]:
        part = slice(number, number + 1)
        states = self.states and (self.states[0][:, part], self.states[1][:, part])
        return compute(self.layer, self.rows[:, part], states)


cases = st.composite(Case)()


@given(cases)
def test_the_results_are_those_of_float64(case):
    results = compute(case.layer, case.rows, case.states)
    for one, expected in zip(results, case.compute_in_float64(), strict=True):
        scale = expected.abs().max().item() + 1
        assert (one - expected).abs().max().item() <= 2e-5 * scale


@given(cases)
def test_no_kernel_and_no_number_of_threads_has_other_bits(case):
    found = {}
    for name in ("", "plain", "avx2", "avx512"):
        try:
            load_native().use_portable_kernels(True, kernels=name)
        except ValueError:
            continue  # not for this processor
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found[name, threads] = compute(case.layer, case.rows, case.states)
    use_portable_products()
    expected = found.pop(("plain", 1))
    assert found
    assert all(all(map(torch.equal, expected, one)) for one in found.values())


@given(cases, st.data())
def test_a_sample_has_the_bits_that_it_has_alone(case, data):
    number = data.draw(st.integers(0, case.samples - 1))
    together = compute(case.layer, case.rows, case.states)
    alone = case.compute_sample(number)
    rows = 4 if case.states is None else 6  # results with one row per sample, and gradients
    for all_of_them, one in zip(together[:rows], alone[:rows], strict=True):
        assert torch.equal(all_of_them[:, number : number + 1], one)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e4, torch.inf, -torch.inf, torch.nan])
def test_extreme_values_are_those_of_torch(value):
    layer = make_layer()
    rows = make_rows()
    rows[1, 2, 3] = value
    portable = layer(rows)[0]
    use_portable_products(False)
    torch.testing.assert_close(portable, layer(rows)[0], equal_nan=True, rtol=1e-5, atol=1e-6)


def test_layouts_do_not_matter():
    layer = make_layer()
    rows = torch.randn(3, 6, 4).transpose(1, 2)
    expected = compute(layer, rows.contiguous())
    assert all(map(torch.equal, compute(layer, rows), expected))
    one = torch.randn(1, 4, 6)
    expected = compute(layer, one.repeat(3, 1, 1))
    assert all(map(torch.equal, compute(layer, one.expand(3, 4, 6)), expected))


def test_nothing_is_kept_without_gradients():
    steps = 3
    rows = 2
    hidden = 5
    states = [torch.randn(rows, hidden) for _ in range(2)]
    weights = [torch.randn(4 * hidden, hidden) for _ in range(2)]
    given = [torch.randn(steps, rows, hidden), *weights, *weights, *states]
    with torch.no_grad():
        *_, kept = torch.ops.aten.mkldnn_rnn_layer(
            *given, False, [], 2, hidden, 1, False, False, False, True
        )
    assert kept is None


def test_second_derivatives_are_those_of_torch():
    def differentiate_twice() -> list[torch.Tensor]:
        layer = make_layer()
        rows = make_rows().requires_grad_()
        (first,) = torch.autograd.grad(layer(rows)[0].square().sum(), rows, create_graph=True)
        return [*torch.autograd.grad(first.square().sum(), [rows, *layer.parameters()])]

    portable = differentiate_twice()
    use_portable_products(False)
    for ours, torchs in zip(portable, differentiate_twice(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


def test_16_bits_are_composed_without_onednn():
    with Names() as called:
        results = compute(make_layer().bfloat16(), make_rows(torch.bfloat16))
    assert all(one.dtype == torch.bfloat16 and one.isfinite().all() for one in results)
    assert any("mm" in name for name in called.names)
    assert not any("mkldnn" in name for name in called.names)


def test_float16_needs_no_instructions_for_it():
    results = compute(make_layer().half(), make_rows(torch.float16))
    assert all(one.dtype == torch.float16 and one.isfinite().all() for one in results)


def test_autocast_computes_in_16_bits():
    with torch.autocast("cpu", torch.bfloat16):
        outputs, *others = compute(make_layer(), make_rows())
    assert outputs.isfinite().all()
    assert all(one.isfinite().all() for one in others)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_layer_has_the_same_bits():
    model = nn.Sequential(nn.Identity(), make_layer())
    outputs, _ = torch.jit.script(model)(make_rows())
    assert torch.equal(outputs, model(make_rows())[0])


def test_the_setting_of_onednn_is_restored_after_an_error():
    rows = torch.ones(2, dtype=torch.bfloat16)
    parts = [torch.ones(1, dtype=torch.bfloat16)] * 4
    with pytest.raises(IndexError):
        torch.lstm(rows, parts[:2], parts, True, 1, 0.0, False, False, False)
    assert torch._C._get_mkldnn_enabled()


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import torch, lockstep as ls
ls.init(portable=True)
from test_recurrent import hash_results
print(hash_results())
"""


def hash_results() -> str:
    """Return a hash of the bits of a layer in float32 and bfloat16."""
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for result in compute(make_layer().to(dtype), make_rows(dtype)):
            digest.update(result.detach().float().numpy().tobytes())
    with torch.autocast("cpu", torch.bfloat16):
        for result in compute(make_layer(), make_rows()):
            digest.update(result.detach().float().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.stress
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="apt install qemu-user")
@pytest.mark.timeout(900)
def test_an_emulated_processor_computes_the_same_bits():
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    found = []
    for emulator in ([], ["qemu-x86_64", "-cpu", "Haswell"]):
        command = [*emulator, sys.executable, "-c", program]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 0, ended.stderr
        found.append(ended.stdout.split()[-1])
    assert found[0] == found[1]
