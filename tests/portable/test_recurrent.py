"""LSTM layers in portable mode: composed of portable products, instead of oneDNN's kernel."""

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
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm import backend
from lockstep.portable.products import use_portable_products

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    use_portable_products()
    yield
    use_portable_products(keeps_lstm=True)


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
    return torch.randn(3, 4, 6, generator=draw).to(dtype).requires_grad_()


def compute(layer: nn.LSTM, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the results and the gradients of a layer."""
    outputs, (hidden, cell) = layer(rows)
    total = outputs.float().square().sum() + hidden.float().sum() + cell.float().square().sum()
    gradients = torch.autograd.grad(total, [rows, *layer.parameters()])
    return [outputs, hidden, cell, *gradients]


def test_no_kernel_of_onednn_is_called():
    with Names() as called:
        compute(make_layer(), make_rows())
    assert any("mm" in name for name in called.names)
    assert not any("mkldnn" in name for name in called.names)
    use_portable_products(False)
    with Names() as called:
        compute(make_layer(), make_rows())
    assert "aten::mkldnn_rnn_layer" in called.names


def test_the_results_are_those_of_torch_without_onednn():
    portable = compute(make_layer(), make_rows())
    use_portable_products(False)
    use_portable_products()  # it replaces the kernels again
    torch._C._set_mkldnn_enabled(False)
    try:
        expected = compute(make_layer(), make_rows())
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert all(map(torch.equal, portable, expected))
    use_portable_products(False)
    for ours, torchs in zip(portable, compute(make_layer(), make_rows()), strict=True):
        assert torch.allclose(ours, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_need_no_instructions_for_them(dtype):
    results = compute(make_layer().to(dtype), make_rows(dtype))
    assert all(one.dtype == dtype and one.isfinite().all() for one in results)


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
    states = [torch.ones(1)] * 2
    with pytest.raises(IndexError):
        torch.lstm(torch.ones(2), states, [torch.ones(1)] * 4, True, 1, 0.0, False, False, False)
    assert torch._C._get_mkldnn_enabled()


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import torch, lockstep as ls
ls.init(portable=True)
from test_portable_recurrent import hash_results
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
