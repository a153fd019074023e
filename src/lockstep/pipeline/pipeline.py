"""The pipeline: a schedule's actions on this rank, one after another.

    rank 0   stage 0   F0 F1 .. B0 F2 B1 ...       F forward, B backward of a micro-batch
    rank 1   stage 1      F0 B0 F1 B1 ...

It only does what the schedule says (`lockstep.pipeline.schedules`). What an action needs
from another rank it waits for, the next page already asked for; what others need it
sends without waiting. The links and their order follow from the schedule, so no two
messages can be taken for each other. A stage that fails says so to its neighbours;
every rank of the world hears of it in the ledger, and the step is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from lockstep.model.parallel_context import ParallelContext
from lockstep.model.side_effects import SideEffects
from lockstep.pipeline.p2p import Receiver, Sender
from lockstep.pipeline.schedules import Action, build_schedule
from lockstep.pipeline.stage import Stage
from lockstep.pipeline.tied_weights import Tie

__all__ = ["Pipeline"]

FIRST_TAG = 1 << 20  # above what a user's own messages are likely to have
_next_tag: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

actions_of = lru_cache(maxsize=64)(build_schedule)


def new_tags(group: Any, count: int) -> int:
    """Return the first of `count` tags that no pipeline on `group` had before.

    All ranks make and remake their pipelines in the same order. A message of a step that
    was broken off, or of another trainer, is then never taken for one's own.
    """
    first = _next_tag.get(group, FIRST_TAG)
    _next_tag[group] = first + count
    return first


@dataclass
class Ends:
    """The links of one stage, None where there is no neighbour."""

    inputs: Receiver | None = None
    outputs: Sender | None = None
    gradients: Receiver | None = None
    to_inputs: Sender | None = None


class Pipeline:
    """The stages of this rank, with their links to the ranks of the same replica.

    Parameters:
        parallel: the layout, with this rank's place in it.
        stages: this rank's stages.
        name: of the schedule.
        stages_per_rank: stages a rank; more than one only if the schedule is interleaved.
        ties: of all stages; each gets its links here.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        stages: Sequence[Stage],
        name: str,
        stages_per_rank: int,
        ties: Sequence[Tie],
    ) -> None:
        self.parallel, self.name, self.stages_per_rank = parallel, name, stages_per_rank
        self.stages = {stage.number: stage for stage in stages}
        self.number = parallel.stages * stages_per_rank
        here = self.stages.keys()
        self.ties = [tie for tie in ties if tie.later in here or tie.earlier in here]
        self._all_ties = list(ties)
        modules = {name: block for stage in stages for name, block in stage.named.items()}
        self.side_effects = SideEffects(
            modules | (parallel.loss_module() if self.last in here else {})
        )
        self._former: list[Any] = []
        self.ends: dict[int, Ends] = {}
        self.connect()

    @property
    def last(self) -> int:
        """The number of the stage that has the loss."""
        return self.number - 1

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage of this replica."""
        return self.parallel.replica * self.parallel.stages + stage % self.parallel.stages

    def connect(self) -> None:
        """Make the links; made anew, they have nothing to do with messages of the old ones.

        Those are kept: what was under way may still be written into their memory.
        """
        self._former += [self.ends, [vars(tie).copy() for tie in self.ties]] if self.ends else []
        group, device = dist.group.WORLD, self.parallel.device
        base = new_tags(group, 2 * (self.number + 1 + len(self._all_ties)))

        def sender(stage: int, tag: int) -> Sender:
            return Sender(group, self.rank_of(stage), base + tag)

        def receiver(stage: int, tag: int) -> Receiver:
            return Receiver(group, self.rank_of(stage), base + tag, device)

        self.ends = {}
        for stage in self.stages:
            ends = self.ends[stage] = Ends()
            if stage > 0:
                ends.inputs = receiver(stage - 1, 2 * stage)
                ends.to_inputs = sender(stage - 1, 2 * stage + 1)
            if stage < self.last:
                ends.outputs = sender(stage + 1, 2 * stage + 2)
                ends.gradients = receiver(stage + 1, 2 * stage + 3)
        for number, tie in enumerate(self._all_ties):
            tag = 2 * (self.number + 1 + number)
            local = self.rank_of(tie.later) == self.rank_of(tie.earlier)
            later, earlier = tie.later in self.stages, tie.earlier in self.stages
            tie.held = {}
            tie.up = sender(tie.earlier, tag) if later and not local else None
            tie.down = receiver(tie.later, tag) if earlier and not local else None
            tie.down_sender = sender(tie.later, tag + 1) if earlier and not local else None
            tie.up_receiver = receiver(tie.earlier, tag + 1) if later and not local else None

    def ties_up(self, stage: int) -> list[Tie]:
        """Return the ties by which a stage hands its sums on."""
        return [tie for tie in self.ties if tie.later == stage]

    def ties_down(self, stage: int) -> list[Tie]:
        """Return the ties by which a stage is handed the sums of later ones."""
        return [tie for tie in self.ties if tie.earlier == stage]

    def tied_parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage that other stages have too."""
        ties = [tie for tie in self.ties if stage in (tie.later, tie.earlier)]
        return [parameter for tie in ties for parameter in tie.parameters]

    def actions(self, microbatches: int) -> Sequence[Action]:
        """Return what this rank does of so many micro-batches."""
        if not microbatches:
            return ()
        stages_per_rank = self.stages_per_rank if self.name == "interleaved" else None
        plan = actions_of(self.name, self.parallel.stages, microbatches, stages_per_rank)
        return plan[self.parallel.position]

    def fail(self, sentence: str, attempt: int) -> None:
        """Tell the neighbours that this rank sends nothing more in this step."""
        for ends in self.ends.values():
            for sender in (ends.outputs, ends.to_inputs):
                if sender is not None:
                    sender.fail(sentence, attempt)
        for tie in self.ties:
            for sender in (tie.up, tie.down_sender):
                if sender is not None:
                    sender.fail(sentence, attempt)

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Give the sums of shared parameters to all their stages, the owner's first."""
        for tie in reversed(self.ties):
            if tie.later in self.stages:
                tie.hear(attempt)
            if tie.earlier in self.stages:
                tie.tell(attempt)
