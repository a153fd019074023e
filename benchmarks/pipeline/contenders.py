"""Contenders: training a model in two stages, each as its users write it.

    copies            two processes, each with the whole model: what computing alone costs
    rpc               the published tutorial's program, a master beside two workers
    torch-gloo        torch.distributed.pipelining, 1F1B, on Gloo
    torch-lockstep    the same on the backend "lockstep"; torch-zb with its zero-bubble
    lockstep-1        `lockstep.Trainer` in one process: whose digest the others must have
    lockstep-...      `lockstep.Trainer(stages=2)`: a schedule, the tutorial's cut or a measured one
    driver            `lockstep.Driver`: 1F1B by two workers that a process outside commands

One thread a rank, the same micro-batches, the same optimizer, one loss a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lockstep
from benchmarks.pipeline.case import Batch, Case
from examples.rpc_pipeline import Master

__all__ = ["ALONE", "CONTENDERS", "COPIES", "STAGES", "Contender", "Training"]

ALONE = "alone"
COPIES = "copies"
STAGES = 2


class Training(Protocol):
    """A model in training on this rank."""

    def step(self, batch: Batch) -> float | None:
        """Train on one global batch; return its loss, on a rank that has it."""

    def digest(self) -> str:
        """Return the digest of the weights; nothing where there is no guarantee."""


class Whole:
    """The whole model in this process, in a plain loop over the micro-batches."""

    def __init__(self, case: Case) -> None:
        self._model = case.build()
        self._splits = case.splits
        self._optimizer = case.optimizer()(self._model.parameters())

    def step(self, batch: Batch) -> float | None:
        """Train on one batch."""
        losses = []
        for inputs, targets in zip(*(each.chunk(self._splits) for each in batch), strict=True):
            loss = F.cross_entropy(self._model(inputs), targets) / self._splits
            loss.backward()
            losses.append(loss.item())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return math.fsum(losses)

    def digest(self) -> str:
        """Return nothing."""
        return ""


class Remote:
    """The tutorial's master; its workers serve in the background."""

    def __init__(self, case: Case) -> None:
        self._splits = case.splits
        # The shards and what they make belong to the workers: nothing to hold there.
        self._master = (
            Master(case.net.build, case.net.cut, case.net.rate) if lockstep.rank() == 0 else None
        )

    def step(self, batch: Batch) -> float | None:
        """Train on one batch, from the master."""
        return self._master.step(*batch, self._splits) if self._master else None

    def digest(self) -> str:
        """Return nothing."""
        return ""


class Stock:
    """A stage of torch.distributed.pipelining."""

    def __init__(self, case: Case, zero_bubble: bool = False) -> None:
        from torch.distributed import pipelining

        self._rank = dist.get_rank()
        blocks = pieces(case.build())
        cut = case.net.cut
        part = nn.Sequential(*(blocks[cut:] if self._rank else blocks[:cut]))
        self._optimizer = case.optimizer()(part.parameters())
        stage = pipelining.PipelineStage(part, self._rank, STAGES, torch.device("cpu"))
        if zero_bubble:
            self._schedule: Any = pipelining.ScheduleInterleavedZeroBubble(
                [stage], case.splits, loss_fn=F.cross_entropy
            )
        else:  # its 1F1B refuses fewer micro-batches than stages
            kind = pipelining.Schedule1F1B if case.splits >= STAGES else pipelining.ScheduleGPipe
            self._schedule = kind(stage, case.splits, loss_fn=F.cross_entropy)

    def step(self, batch: Batch) -> float | None:
        """Train on one batch."""
        losses: list[torch.Tensor] = []
        if self._rank == 0:
            self._schedule.step(batch[0])
        else:
            self._schedule.step(target=batch[1], losses=losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses) if losses else None

    def digest(self) -> str:
        """Return nothing."""
        return ""


class Ours:
    """Lockstep's trainer with stages, in the tutorial's cut or in one that it measures."""

    def __init__(self, case: Case, schedule: str | None = None, measured: bool = False) -> None:
        model = case.build()
        cut = case.net.cut
        stages = dist.get_world_size()
        options: dict[str, Any] = {}
        if stages > 1:
            balance = None if measured else [cut, len(pieces(model)) - cut]
            options = {
                "pipeline": lockstep.PipelineConfig(
                    stages=stages, schedule=schedule, balance=balance
                )
            }
        self._trainer = lockstep.Trainer(
            model, F.cross_entropy, case.optimizer(), microbatches=case.splits, **options
        )

    def step(self, batch: Batch) -> float | None:
        """Train on one batch."""
        return self._trainer.step(batch)

    def digest(self) -> str:
        """Return the digest of the whole model's weights."""
        return self._trainer.digest()


class Driven:
    """Lockstep's trainer on the workers of a driver, which is this process."""

    def __init__(self, case: Case) -> None:
        balance = [case.net.cut, len(pieces(case.build())) - case.net.cut]
        self._training = driver().trainer(
            case.build, F.cross_entropy, case.optimizer(), microbatches=case.splits,
            pipeline=lockstep.PipelineConfig(stages=STAGES, schedule="1f1b", balance=balance),
        )  # fmt: skip

    def step(self, batch: Batch) -> float | None:
        """Train on one batch."""
        return self._training.step(batch)

    def digest(self) -> str:
        """Return the digest of the whole model's weights."""
        return self._training.digest()


@cache
def driver() -> lockstep.Driver:
    """Return this process's driver, whose workers live through the run."""
    return lockstep.Driver(nprocs=STAGES)


@dataclass(frozen=True)
class Contender:
    """A contender: its ranks, what they talk through, and what trains on each.

    `always` says that it is measured with every number of splits, not with the largest alone.
    """

    name: str
    backend: str
    make: Callable[[Case], Training]
    ranks: int = STAGES
    always: bool = False


def pieces(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model."""
    blocks: Callable[[], list[nn.Module]] = model.blocks  # type: ignore[assignment]
    return blocks()


_ALL = (
    Contender(COPIES, "gloo", Whole, always=True),
    Contender("rpc", "", Remote, ranks=STAGES + 1, always=True),
    Contender("torch-gloo", "gloo", Stock, always=True),
    Contender("torch-lockstep", "lockstep", Stock, always=True),
    Contender("torch-zb", "lockstep", partial(Stock, zero_bubble=True)),
    Contender("lockstep-1", "lockstep", Ours, ranks=1),
    Contender("lockstep-1f1b", "lockstep", partial(Ours, schedule="1f1b"), always=True),
    Contender("lockstep-zb", "lockstep", partial(Ours, schedule="zero-bubble")),
    Contender("lockstep-1f1b-cut", "lockstep", partial(Ours, schedule="1f1b", measured=True)),
    Contender("lockstep-zb-cut", "lockstep", partial(Ours, schedule="zero-bubble", measured=True)),
    Contender("driver", "lockstep", Driven, ranks=1),
)
CONTENDERS = {contender.name: contender for contender in _ALL}
