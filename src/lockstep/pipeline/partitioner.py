"""The partitioner: decides how a model is partitioned into stages.

    Trainer(..., pipeline=PipelineConfig(stages=2))     the request
    first batch, on rank 0                              blocks are profiled, a schedule is planned
    all ranks                                           receive the plan, free the other stages

With `balance` nothing has to be measured, and an `nn.Sequential` is partitioned at once. Any
other model waits for the first batch, which shows whether the blocks make up its forward.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.call_checks import check_kinds, read_kinds
from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.microbatch import Microbatch
from lockstep.kernel.errors import LayoutError
from lockstep.kernel.seeds import isolated
from lockstep.model.activation_checkpointing import check_blocks
from lockstep.model.blocks import Blocks, is_sequence
from lockstep.model.compilation import is_compiled
from lockstep.model.forward import split_targets
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.composition import Composition
from lockstep.pipeline.partition import Partition
from lockstep.pipeline.profiler import profile_blocks, record_outputs
from lockstep.pipeline.schedule_planner import choose_schedule, make_ranges, plan_schedule
from lockstep.pipeline.schedules import NAMES

__all__ = ["Partitioner", "PipelineConfig", "StagePlan"]

DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True)
class PipelineConfig:
    """The split of a model into stages on several ranks. Only `blocks` affects the bits.

    Attributes:
        stages: The number of ranks per replica, each of which holds one part of the model. The
            world size must be a multiple of it. The model is partitioned with the first batch, or
            at once for an `nn.Sequential` with `balance`. Then the parts of other ranks are on the
            meta device.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble". None: "1f1b" with `balance`,
            otherwise the fastest one in a simulation with the measured times of the blocks.
        blocks: The modules, or their attribute paths, that the model's forward calls one after
            another. Each is a unit of random numbers and of activation checkpointing, for any
            number of stages. Required unless the model is an `nn.Sequential` or has a method
            `blocks()`.
        balance: The number of blocks of each stage, in order. None: the partition whose slowest
            stage is fastest, according to a measurement.
        stages_per_rank: The number of stages per rank for the schedule "interleaved". None: 2.
    """

    stages: int = 1
    schedule: str | None = None
    blocks: Blocks = None
    balance: Sequence[int] | None = None
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        """Check the kinds of the values."""
        check_kinds("ls.PipelineConfig", read_kinds(type(self).__annotations__), vars(self))


@dataclass(frozen=True)
class StagePlan:
    """A plan: the partition, the name of the schedule, and the number of stages per rank.

    `composition` is the check of the model's forward, on rank 0 only.
    """

    partition: Partition
    schedule: str
    stages_per_rank: int
    composition: Composition | None = None


@dataclass(frozen=True)
class Partitioner:
    """Plans the stages that the user requested.

    Attributes:
        parallel: The layout.
        block_names: The names of the model's blocks.
        schedule: The name of the schedule; None as in `PipelineConfig`.
        balance: The number of blocks of each stage; None for a measured partition.
        stages_per_rank: Stages per rank, for the schedule "interleaved"; None for 2.
        is_chain: Whether forward is known to call the blocks one after another.
    """

    parallel: ParallelContext
    block_names: tuple[str, ...]
    schedule: str | None = None
    balance: tuple[int, ...] | None = None
    stages_per_rank: int | None = None
    is_chain: bool = True

    @classmethod
    def from_config(
        cls,
        parallel: ParallelContext,
        model: nn.Module,
        block_names: Sequence[str],
        config: PipelineConfig,
    ) -> Partitioner:
        """Check a request, and return its partitioner.

        Raises:
            LayoutError: The request cannot work with any data.
        """
        schedule = config.schedule
        balance = config.balance
        stages_per_rank = config.stages_per_rank
        kind = type(model).__name__
        if parallel.stages > 1 and is_compiled(model):
            raise LayoutError(
                f"a compiled model cannot be split into {parallel.stages} stages: compile its "
                "blocks one by one instead, for instance by block.compile()"
            )
        if parallel.stages > 1 and not block_names:
            if isinstance(model, torch.fx.GraphModule):
                raise LayoutError(
                    f"a traced or exported model is one graph, which is not split into "
                    f"{parallel.stages} stages: pass the model that was traced, or train without "
                    "pipeline="
                )
            is_own = isinstance(model, nn.Sequential)
            reason = "overrides forward and does not" if is_own else "does not"
            raise LayoutError(
                f"{kind} {reason} define how to split it into {parallel.stages} stages: pass a "
                "torch.nn.Sequential, define a method blocks(), pass blocks=[...] with the modules "
                "that its forward calls one after another, or pass a list of stages as the model"
            )
        if parallel.activation_checkpointing:
            check_blocks(model, block_names)
        if schedule is not None and schedule not in NAMES:
            raise LayoutError(f"there is no schedule {schedule!r}; choose from {', '.join(NAMES)}")
        if stages_per_rank is not None and schedule != "interleaved":
            raise LayoutError(
                f'stages_per_rank={stages_per_rank} needs schedule="interleaved", where each rank '
                "has several stages"
            )
        sizes = None if balance is None else tuple(balance)
        # Given a list of blocks, the model setup passes an empty sequence as the model.
        is_chain = is_sequence(model) and list(model._modules) in ([], list(block_names))
        made = cls(parallel, tuple(block_names), schedule, sizes, stages_per_rank, is_chain)
        made._check()
        return made

    @property
    def stages(self) -> int:
        """The number of stages of the schedule."""
        return self.parallel.stages * self._stages_per_rank

    @property
    def _stages_per_rank(self) -> int:
        return (self.stages_per_rank or 2) if self.schedule == "interleaved" else 1

    def _check(self) -> None:
        if self.parallel.stages == 1:
            return
        names = self.block_names
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise LayoutError(
                f"block {repeated[0]} is called {names.count(repeated[0])} times, and stages "
                "need a name for each call: register the module under another name too"
            )
        if len(names) < self.stages:
            raise LayoutError(
                f"{len(names)} blocks cannot be split into {self.stages} stages: each stage needs "
                "at least one block"
            )
        if self.balance is not None and (
            len(self.balance) != self.stages
            or sum(self.balance) != len(names)
            or min(self.balance) < 1
        ):
            raise LayoutError(
                f"balance={list(self.balance)} must hold the number of blocks of each of "
                f"{self.stages} stages, {len(names)} blocks in total"
            )

    def plan_without_data(self, model: nn.Module | None = None) -> StagePlan | None:
        """Return the plan if no data is needed for it; `model` is the model, once it is built."""
        if self.balance is None or not self.is_chain:
            return None
        composition = None
        if model is not None and self.parallel.rank == 0:
            composition = Composition(model, self.block_names, None, self.parallel.device)
        return self._plan_balance(self.balance, composition)

    def find_local_blocks(self) -> list[int]:
        """Return the numbers of this rank's blocks; all of them if the plan needs data."""
        plan = self.plan_without_data() if self.parallel.stages > 1 else None
        if plan is None:
            return list(range(len(self.block_names)))
        spans = plan.partition.ranges[self.parallel.position :: self.parallel.stages]
        return [number for span in spans for number in span]

    def plan(self, model: nn.Module, microbatch: Microbatch | None) -> StagePlan:
        """Return the plan that rank 0 makes with a micro-batch. A collective call.

        Args:
            model: The whole model.
            microbatch: A micro-batch; only rank 0 needs it.

        Raises:
            LayoutError: On every rank, if the blocks do not make up the model.
        """
        own: StagePlan | None = None
        failure: Exception | None = None
        message: dict[str, Any] = {}
        if self.parallel.rank == 0:
            try:
                own = self._plan_on_rank_0(model, microbatch)
                message = {"schedule": own.schedule, "stages_per_rank": own.stages_per_rank}
                message["sizes"] = [len(span) for span in own.partition.ranges]
            except Exception as error:  # any error: the other ranks wait for the result
                failure = error
                is_clear = isinstance(error, LayoutError)
                said = f"{error}" if is_clear else f"rank 0 could not measure the blocks: {error}"
                message = {"failure": said}
        about = "partitioning the model into stages"
        messages = all_gather_bytes(json.dumps(message).encode(), about, self.parallel.group)
        if failure is not None:
            raise failure
        if own is not None:
            return own
        message = json.loads(messages[0])
        if "failure" in message:
            raise LayoutError(message["failure"])
        partition = Partition(self.block_names, tuple(make_ranges(message["sizes"])))
        return StagePlan(partition, message["schedule"], message["stages_per_rank"])

    def _plan_on_rank_0(self, model: nn.Module, microbatch: Microbatch | None) -> StagePlan:
        assert microbatch is not None
        parallel = self.parallel
        data = parallel.move_to_device(microbatch.data)
        if parallel.loss is not None:
            data = split_targets(data, "the first micro-batch")[0]
        blocks = {name: model.get_submodule(name) for name in self.block_names}
        outputs = record_outputs(blocks, data, parallel, microbatch.size)
        composition = Composition(model, self.block_names, outputs, parallel.device)
        with isolated(parallel.device, everything=True), parallel.autocast():
            composition.check(data)
        if self.balance is not None:
            return self._plan_balance(self.balance, composition)
        report = partial(print, file=sys.stderr)
        begun = time.perf_counter()
        costs = profile_blocks(blocks, data, parallel, report, microbatch.size)
        count = -(-parallel.microbatches // parallel.replicas)
        if self.schedule is None:
            plan = choose_schedule(costs, parallel.stages, count)
        else:
            plan = plan_schedule(self.schedule, costs, parallel.stages, count, self.stages_per_rank)
        *counts, last = [str(len(span)) for span in plan.ranges]
        report(
            f"measured {len(blocks)} blocks in {time.perf_counter() - begun:.1f} s: "
            f"{', '.join(counts)} and {last} blocks per stage, schedule {plan.name}"
        )
        partition = Partition(self.block_names, plan.ranges)
        return StagePlan(partition, plan.name, plan.stages_per_rank, composition)

    def _plan_balance(self, balance: Sequence[int], composition: Composition | None) -> StagePlan:
        """Return the stages with these numbers of blocks."""
        partition = Partition(self.block_names, tuple(make_ranges(balance)))
        schedule = self.schedule or DEFAULT_SCHEDULE
        return StagePlan(partition, schedule, self._stages_per_rank, composition)
