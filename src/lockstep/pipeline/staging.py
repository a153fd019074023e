"""The staging: what was asked about stages, and the cut that comes of it.

    Trainer(..., stages=2)                  asked
    first batch, on rank 0                  the blocks are measured, the cut is planned
    all ranks                               hear of it, and let go of what is not theirs

With `balance` nothing needs to be measured, and an `nn.Sequential` is cut at once. Any
other model is cut with the first batch, on which its blocks are first seen to be it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.microbatch import Microbatch
from lockstep.errors import LayoutError
from lockstep.model.activation_checkpointing import check_blocks
from lockstep.model.forward import parts
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.balance import ranges
from lockstep.pipeline.choice import choose, plan
from lockstep.pipeline.config import PipelineConfig
from lockstep.pipeline.costs import check_composition, measured_costs
from lockstep.pipeline.cut import Cut
from lockstep.pipeline.schedules import NAMES

__all__ = ["Staging"]

DEFAULT = "1f1b"


@dataclass(frozen=True)
class Staging:
    """The stages that a trainer was asked for, of the blocks called `names`.

    Raises LayoutError, when made, for what cannot work whatever the data.
    """

    parallel: ParallelContext
    names: tuple[str, ...]
    schedule: str | None = None
    balance: tuple[int, ...] | None = None
    stages_per_rank: int | None = None
    is_chain: bool = True
    """Whether the model's forward is known to be its blocks, one after another."""

    @classmethod
    def of(
        cls,
        parallel: ParallelContext,
        model: nn.Module,
        names: Sequence[str],
        config: PipelineConfig,
    ) -> Staging:
        """Check what was requested, and return it."""
        schedule, balance, stages_per_rank = config.schedule, config.balance, config.stages_per_rank
        kind = type(model).__name__
        if parallel.stages > 1 and hasattr(model, "_orig_mod"):
            raise LayoutError(
                f"a compiled model cannot be cut into {parallel.stages} stages: compile its blocks "
                "one by one instead"
            )
        if parallel.stages > 1 and not names:
            raise LayoutError(
                f"{kind} does not say how to cut it into {parallel.stages} stages: give a "
                "torch.nn.Sequential, a method blocks(), blocks=[...] with the modules that its "
                "forward calls one after another, or a list of stages as the model"
            )
        if parallel.activation_checkpointing:
            check_blocks(model, names)
        if schedule is not None and schedule not in NAMES:
            raise LayoutError(f"there is no schedule {schedule!r}; there are {', '.join(NAMES)}")
        if stages_per_rank is not None and schedule != "interleaved":
            raise LayoutError(
                f'stages_per_rank={stages_per_rank} is for schedule="interleaved", where each '
                "rank has several stages"
            )
        sizes = None if balance is None else tuple(balance)
        is_chain = type(model) is nn.Sequential
        made = cls(parallel, tuple(names), schedule, sizes, stages_per_rank, is_chain)
        made._check()
        return made

    @property
    def stages(self) -> int:
        """How many stages the schedule cuts the model into."""
        return self.parallel.stages * self._stages_per_rank

    @property
    def _stages_per_rank(self) -> int:
        return (self.stages_per_rank or 2) if self.schedule == "interleaved" else 1

    def _check(self) -> None:
        if self.parallel.stages == 1:
            return
        repeated = [name for name in self.names if self.names.count(name) > 1]
        if repeated:
            raise LayoutError(
                f"block {repeated[0]} is called {self.names.count(repeated[0])} times, and stages "
                "need a name for each call: register the module under another name too"
            )
        if len(self.names) < self.stages:
            raise LayoutError(
                f"{len(self.names)} blocks cannot be cut into {self.stages} stages: each has at "
                "least one block"
            )
        if self.balance is not None and (
            len(self.balance) != self.stages
            or sum(self.balance) != len(self.names)
            or min(self.balance) < 1
        ):
            raise LayoutError(
                f"balance={list(self.balance)} must give each of {self.stages} stages its number "
                f"of blocks, of {len(self.names)} together"
            )

    def given(self) -> tuple[Cut, str, int] | None:
        """Return the cut, the schedule and the stages per rank, if no data is needed for them."""
        if self.balance is None or not self.is_chain:
            return None
        return (
            Cut(self.names, tuple(ranges(self.balance))),
            self.schedule or DEFAULT,
            self._stages_per_rank,
        )

    def held(self) -> list[int]:
        """Return the numbers of the blocks on this rank; of all, while the cut is not known."""
        given = self.given() if self.parallel.stages > 1 else None
        if given is None:
            return list(range(len(self.names)))
        spans = given[0].ranges[self.parallel.position :: self.parallel.stages]
        return [number for span in spans for number in span]

    def measured(self, model: nn.Module, microbatch: Microbatch | None) -> tuple[Cut, str, int]:
        """Return the cut, the schedule and its stages_per_rank that rank 0 plans on a micro-batch.

        Raises LayoutError on every rank where the blocks are not the model.
        """
        planned: dict[str, Any] = {}
        failure: Exception | None = None
        if self.parallel.rank == 0:
            try:
                planned = self._planned(model, microbatch)
            except Exception as error:  # whatever it is, the other ranks wait for the outcome
                failure = error
                planned = {"failure": f"rank 0 could not measure the blocks: {error}"}
        heard = all_gather_bytes(
            json.dumps(planned).encode(), "cutting the model into stages", self.parallel.group
        )
        if failure is not None:
            raise failure
        planned = json.loads(heard[0])
        if "failure" in planned:
            raise LayoutError(planned["failure"])
        bounds = [range(lo, hi) for lo, hi in planned["cut"]]
        return Cut(self.names, tuple(bounds)), planned["schedule"], planned["stages_per_rank"]

    def _planned(self, model: nn.Module, microbatch: Microbatch | None) -> dict[str, Any]:
        assert microbatch is not None
        parallel = self.parallel
        data = parallel.moved(microbatch.data)
        if parallel.loss is not None:
            data = parts(data, "the first micro-batch")[0]
        blocks = {name: model.get_submodule(name) for name in self.names}
        check_composition(model, blocks, data, parallel)
        if self.balance is not None:
            cut = [(span.start, span.stop) for span in ranges(self.balance)]
            return {
                "cut": cut,
                "schedule": self.schedule or DEFAULT,
                "stages_per_rank": self._stages_per_rank,
            }
        costs = measured_costs(blocks, data, parallel, partial(print, file=sys.stderr))
        count = -(-parallel.microbatches // parallel.replicas)
        if self.schedule is None:
            found = choose(costs, parallel.stages, count)
        else:
            found = plan(self.schedule, costs, parallel.stages, count, self.stages_per_rank)
        cut = [(span.start, span.stop) for span in found.cut]
        return {"cut": cut, "schedule": found.name, "stages_per_rank": found.stages_per_rank}
