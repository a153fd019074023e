"""Steps that are undone and repeated, or committed after all, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import DistBackendError  # type: ignore[attr-defined]

import lockstep as ls
from lockstep.comm.backend import refuse_calls
from lockstep.elastic import membership as module
from lockstep.elastic.membership import Membership

LOST = DistBackendError("rank 0: barrier #3 on group default failed: rank 1 died (process 7 ...)")
STEPS = 6


class Left(BaseException):
    """The process has exited."""


class Calls:
    """Counts the calls of forward, from 1; those at which a peer is lost."""

    def __init__(self, lost_at: list[int]) -> None:
        self.count, self.lost_at = 0, lost_at

    def note(self) -> None:
        """Count one."""
        self.count += 1
        if self.count in self.lost_at:
            raise LOST


class Model(nn.Module):
    """A model with buffers and random numbers."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self.a, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.b = nn.Dropout(0.3), nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.note()
        hidden: torch.Tensor = self.b(self.drop(torch.relu(self.norm(self.a(inputs)))))
        return hidden


class Script:
    """A training in this process, whose barriers and forwards lose a peer where it says.

    Attributes:
        lost_at: The barriers at which a peer is lost, counted from 0, with the decision: whether
            the step is committed.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lost_at: dict[int, bool] = {}
        self.fails_at: list[int] = []
        self.barriers = 0
        self.commit = self.is_replaced = False
        self.results: list[int] = []
        self.member: Membership | None = None
        self._patch = patch

    def join(self) -> None:
        """Become a member of an elastic run of one."""
        ls.init()
        self._patch.setenv("LOCKSTEP_ELASTIC", "1")
        self._patch.setattr(module, "has_launcher", lambda: True)
        self._patch.setattr(module, "_membership", None)
        self._patch.setattr(module, "leave_round", lambda: None)
        self._patch.setattr(module, "receive_from_launcher", self.receive)
        self._patch.setattr(module, "exit_process", self.exit)
        self.member = module.membership()
        assert self.member is not None
        self._patch.setattr(self.member, "pass_barrier", self.barrier)
        self._patch.setattr(self.member, "_join_group", lambda new: None)

    def exit(self, status: int) -> None:
        raise Left

    def barrier(self) -> None:
        self.barriers += 1
        if (decision := self.lost_at.get(self.barriers - 1)) is not None:
            self.commit = decision
            raise LOST

    def receive(self, timeout: float | None) -> tuple[dict[str, Any], list[int]] | None:
        if timeout == 0:
            return None
        assert self.member is not None
        if self.is_replaced and not self.commit:
            order = {"operation": self.member.operation, "commit": False}
            return {"kind": "hand_over", "folder": "unused", **order}, []
        place = {"round": self.member.round + 1, "rank": 0, "world_size": 1, "store": ""}
        place |= {"operation": self.member.operation, "commit": self.commit}
        self.commit = False
        return {"kind": "round", **place}, []

    def train(self, take: Callable[[ls.Trainer, Model, Any], None]) -> list[str]:
        torch.manual_seed(0)
        model = Model(Calls(self.fails_at))
        optimizer = ls.OptimizerConfig(
            partial(torch.optim.AdamW, lr=0.01),
            scheduler=lambda each: torch.optim.lr_scheduler.StepLR(each, 2, 0.5),
        )
        trainer = ls.Trainer(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            microbatches=4,
            ema_decay=0.9,
            max_grad_norm=0.1,
            callbacks=lambda result: self.results.append(result.step),
            loggers=(),
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            inputs = torch.randn(16, 8, generator=generator)
            take(trainer, model, (inputs, (inputs[:, 0] > 0).long()))
            self.results.append(int(torch.randint(1000, ())))  # the script's own random numbers
        trainer.finish()
        assert trainer.ema_model is not None
        averaged = ls.digest(trainer.ema_model.state_dict())
        assert trainer.steps == STEPS
        return [trainer.digest(), trainer.optimizer_digest(), averaged]


def take_step(trainer: ls.Trainer, model: Model, batch: Any) -> None:
    trainer.step(batch)


def take_attempts(trainer: ls.Trainer, model: Model, batch: Any) -> None:
    results = []
    for attempt in trainer.attempts(batch):
        with attempt as step:
            for inputs, targets in step.microbatches():
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
        results.append(attempt.was_interrupted)
    assert results == [True] * (len(results) - 1) + [False]
    assert step.result.loss > 0


def take_manual_step(trainer: ls.Trainer, model: Model, batch: Any) -> None:
    with trainer.manual_step() as step:
        for inputs, targets in step.microbatches(batch):
            step.backward(nn.functional.cross_entropy(model(inputs), targets))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Return a script that has not begun; leave the world afterwards."""
    yield Script(monkeypatch)
    refuse_calls("")  # as the process would end
    ls.shutdown()


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Return what trains without being a member: digests, and what callbacks and script got."""

    def train(take: Callable[..., None]) -> tuple[Any, Any]:
        ls.init()
        one = Script(monkeypatch)
        try:
            return one.train(take), one.results
        finally:
            ls.shutdown()

    return train


@pytest.mark.parametrize("take", [take_step, take_attempts])
def test_steps_that_are_repeated_or_committed_have_the_same_bits(
    script: Script, undisturbed: Callable[..., tuple[Any, Any]], take: Callable[..., None]
) -> None:
    expected = undisturbed(take)
    script.join()
    # The first step is undone three times, after its forward, and in it; the last is committed.
    script.lost_at = {0: False, 1: False, 3: True, 5: False, 8: True}
    script.fails_at = [1, 7, 14, 15, 30]
    assert (script.train(take), script.results) == expected
    assert script.member is not None
    assert script.member.round == len(script.lost_at) + len(script.fails_at)
    assert script.barriers > max(script.lost_at)


def test_a_manual_step_is_not_repeated(script: Script) -> None:
    script.join()
    script.is_replaced = True
    script.lost_at = {0: True}  # prepared by all: committed
    script.fails_at = [6]
    with pytest.raises(Left):
        script.train(take_manual_step)
    assert script.member is not None
    assert script.member.operation == 1
    assert script.results[0] == 0


def test_attempts_are_one_outside_of_elastic_runs(
    undisturbed: Callable[..., tuple[Any, Any]],
) -> None:
    assert undisturbed(take_attempts)[0] == undisturbed(take_manual_step)[0]
