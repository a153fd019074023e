"""What a step says of its kernels: operators whose bits are not portable."""

import contextlib
import io
import json
import sys
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep as ls
import pytest_lockstep
from lockstep.comm import backend
from lockstep.kernel.errors import UsageError
from lockstep.training import step_environment

pytestmark = pytest.mark.skipif(not backend.available(), reason="portable bits need the extension")


class Composed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, inputs):
        if isinstance(self.function, nn.Module):
            return self.function(self.layer(inputs)[:, None])[0][:, 0]
        return self.function(self.layer, inputs)


MODELS = {
    "plain": (lambda layer, x: layer(x), []),
    "LAPACK": (lambda layer, x: x @ torch.linalg.qr(layer.weight).Q, ["linalg_qr"]),
    "FFT": (lambda layer, x: torch.fft.rfft(layer(x)).abs(), ["_fft_r2c"]),
    "LSTM": (nn.LSTM(8, 8), []),
    "bfloat16": (lambda layer, x: (x.bfloat16() @ layer.weight.bfloat16()).float(), []),
    "complex": (
        lambda layer, x: (layer(x) * (1 + 1j) @ torch.eye(8, dtype=torch.complex64)).real,
        ["products of complex numbers"],
    ),
}


def lines_of(name, folder):
    """Train three steps; return the lines about operators, and what was printed."""
    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model = Composed(MODELS[name][0])
        trainer = ls.Trainer(
            model,
            nn.CrossEntropyLoss(),
            partial(torch.optim.SGD, lr=0.1),
            loggers=folder,
            progress=False,
        )
        for _ in range(3):
            trainer.step((torch.randn(16, 8), torch.arange(16) % 3))
        trainer.finish()
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "portability"]
    return [(line["step"], line["operators"]) for line in found], said.getvalue()


def test_operators_that_are_not_portable_are_named_once(ranks, tmp_path):
    def train_all():
        torch.linalg.inv(torch.eye(3))  # no part of a training
        found = {name: lines_of(name, tmp_path / name) for name in MODELS}
        with mock.patch.dict(sys.modules, {"torch._inductor.graph": sys}):  # as if it had compiled
            return found | {"compiled": lines_of("plain", tmp_path / "compiled")}

    (found,) = ranks(train_all, 1)
    expected = {name: operators for name, (_, operators) in MODELS.items()}
    for name, operators in (expected | {"compiled": ["torch.compile"]}).items():
        lines, said = found[name]
        begin = "other processors compute other bits of this training, because of"
        assert said.count(begin) == bool(operators), (name, said)
        assert len(lines) == bool(operators)
        for step, listed in lines:
            assert step == 0
            assert {*operators} <= {*listed}
            assert f"{begin} {', '.join(listed)}" in said


@pytest.mark.parametrize(
    ("model", "portable", "count"),
    [("bfloat16", None, 1), ("plain", None, 0), ("bfloat16", True, 0)],
)
def test_bfloat16_that_is_slower_is_said_once_by_default(ranks, tmp_path, model, portable, count):
    def train():
        find = mock.patch.object(
            step_environment, "find_bfloat16_instructions", return_value="amx_bf16"
        )
        with find:
            return lines_of(model, tmp_path)

    ((_, said),) = ranks(train, 1, portable=portable)
    assert said.count("do not use this processor's instructions for them (amx_bf16)") == count


def test_an_lstm_does_not_depend_on_the_threads(ranks):
    def train_both():
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            model = nn.LSTM(48, 96, 2, batch_first=True)
            inputs = torch.randn(32, 30, 48, requires_grad=True)
            outputs = model(inputs)[0]
            outputs.square().sum().backward()
            found.append([outputs.detach(), inputs.grad, *(p.grad for p in model.parameters())])
        return [all(map(torch.equal, found[0], each)) for each in found]

    assert ranks(train_both, 1) == [[True] * 3]


def test_nothing_is_said_without_portable_bits(ranks, tmp_path):
    ((lines, said),) = ranks(lambda: lines_of("LAPACK", tmp_path), 1, portable=False)
    assert lines == []
    assert "other processors" not in said


def train_with_flushed_subnormals(when):
    """Set it before `ls.init` or after it; return the error, or a sum of subnormal numbers."""
    if when == "before":
        torch.set_flush_denormal(True)
    ls.init(threads=3)
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    trainer = ls.Trainer(nn.Linear(8, 3), nn.CrossEntropyLoss(), optimizer, loggers=())
    if when == "after":
        torch.set_flush_denormal(True)
    try:
        trainer.step((torch.randn(16, 8), torch.arange(16) % 3))
    except UsageError as error:
        return str(error)
    return float((torch.full((1 << 20,), 1e-30) * 1e-9).sum())


def test_subnormal_numbers_are_flushed_by_all_threads_or_by_none():
    found = {
        when: pytest_lockstep.run(train_with_flushed_subnormals, when, ranks=1, init=False)[0]
        for when in ("before", "after", "never")
    }
    assert found["before"] == 0
    assert found["never"] > 0
    assert "torch.set_flush_denormal was called after lockstep.init()" in found["after"]
