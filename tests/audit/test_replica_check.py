"""What replicas hold: the only one that differs in few elements is restored from another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.audit.replica_check import find_odd_replica
from lockstep.kernel.errors import DisagreementError
from records import FindingLogger


def test_one_replica_that_differs_from_all_others_is_the_odd_one():
    same = {"a": 1, "b": 2}
    other = {"a": 1, "b": 3}
    assert find_odd_replica([same, other, same]) == (1, 0, ["b"])
    assert find_odd_replica([other, same, same]) == (0, 1, ["b"])


@pytest.mark.parametrize(
    "values", [[1, 1, 1], [1, 2], [1, 1, 2, 2], [1, 2, 3], [1, 1, 1, 2, 3], [1, None, 1]]
)
def test_otherwise_there_is_none(values):
    assert find_odd_replica([{} if each is None else {"a": each} for each in values]) is None


def spoil(trainer: Any, what: str) -> None:
    """Flip a bit on rank 1, or write to a whole tensor."""
    from bit_flips import flip_bit

    model = trainer.module
    if what == "parameter":
        flip_bit(model[0].weight, element=7)
    elif what == "buffer":
        flip_bit(model[1].running_mean, element=3)
    elif what == "optimizer state":
        flip_bit(trainer.optimizer.state[model[0].weight]["momentum_buffer"], element=9)
    elif what == "average":
        flip_bit(trainer.ema_model[0].weight, element=7)
    elif what == "whole tensor":
        model[0].weight.data.add_(1)


def train(what: str, storage: Any = "replicated") -> tuple[str, str, list[Any]]:
    torch.manual_seed(0)
    lines = FindingLogger()
    trainer = ls.Trainer(
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.MSELoss(),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9), microbatches=3,
        loggers=[lines] if ls.rank() == 0 else (), progress=False, storage=storage, ema_decay=0.5,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        if step == 2 and ls.rank() == 1:
            spoil(trainer, what)
        inputs = torch.randn(12, 6, generator=generator)
        try:
            trainer.step((inputs, inputs))
        except DisagreementError as error:
            return str(error), "", []
    average = ls.digest(trainer.ema_model)
    return trainer.digest() + average, trainer.optimizer_digest(), lines.findings


@pytest.mark.parametrize(
    ("what", "storage"),
    [
        ("parameter", "replicated"),
        ("buffer", "replicated"),
        ("optimizer state", "replicated"),
        ("average", "replicated"),
        ("buffer", "shared"),  # of the rest all ranks have one copy
        ("average", "shared"),
    ],
)
def test_a_bit_that_flips_in_memory_is_restored_before_a_step_uses_it(ranks, what, storage):
    found = ranks(train, 3, what, storage)
    assert {each[:2] for each in found} == {ranks(train, 1, "nothing")[0][:2]}
    (finding,) = found[0][2]
    assert (finding["step"], finding["rank"], finding["microbatch"]) == (2, 1, None)
    assert "restored from rank 0" in finding["message"]


@pytest.mark.parametrize(("n", "what"), [(3, "whole tensor"), (2, "optimizer state")])
def test_a_difference_that_cannot_be_a_fault_or_be_decided_is_an_error(ranks, n, what):
    for said, _, _ in ranks(train, n, what):
        assert "has other values on rank 1 than on rank 0 in step 2" in said
