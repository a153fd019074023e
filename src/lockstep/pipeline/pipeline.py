"""The pipeline: this rank's stage and its links to the neighboring stages.

    rank 0   stage 0   F0 F1 .. B0 F2 B1 ...       F forward, B backward of a micro-batch
    rank 1   stage 1      F0 B0 F1 B1 ...

`lockstep.pipeline.schedule_executor` executes the schedule. An action waits for its inputs from
another rank, whose receive is already posted; outputs are sent without waiting. The schedule
determines the order of the messages on each link, so messages cannot be confused. A stage that
fails notifies its neighbors; the exchange of the ranks' status notifies all other ranks, and the
step is rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.link_groups import make_groups
from lockstep.pipeline.p2p import Receiver, Sender
from lockstep.pipeline.stage import Stage
from lockstep.pipeline.tied_weights import TiedParameters

__all__ = ["Pipeline"]

FIRST_TAG = 1 << 20  # above the tags that user code is likely to use
_next_tag: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def reserve_tags(group: Any, count: int) -> int:
    """Return the first of `count` tags that no pipeline on `group` has used before.

    All ranks connect and reconnect their pipelines in the same order, so they reserve the same
    tags. Messages of an aborted step or of another trainer have other tags.
    """
    first = _next_tag.get(group, FIRST_TAG)
    _next_tag[group] = first + count
    return first


@dataclass
class StageLinks:
    """The links of one stage; None where it has no neighbor."""

    inputs: Receiver | None = None
    outputs: Sender | None = None
    gradients: Receiver | None = None
    to_inputs: Sender | None = None


class Pipeline:
    """The stage of this rank, with its links to the ranks of the same replica.

    Args:
        parallel: The layout.
        stage: This rank's stage.
        ties: The tied parameters of all stages; each gets its links here.
    """

    def __init__(
        self, parallel: ParallelContext, stage: Stage, ties: Sequence[TiedParameters]
    ) -> None:
        self.parallel, self.stage = parallel, stage
        self.ties = [tie for tie in ties if stage.number in (tie.later, tie.earlier)]
        self._all_ties = list(ties)
        self.failure = ""
        """The reason why no step can be computed; "" if there is none."""
        self._old_links: list[Any] = []
        self.links = StageLinks()
        self.connect()

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last one, which computes the loss."""
        return self.stage.number == self.parallel.stages - 1

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that this rank calls in a step, by their names in messages."""
        return self.stage.blocks | (self.parallel.loss_module() if self.is_last else {})

    def find_view(self, released: Mapping[str, torch.Tensor]) -> None:
        """Set `failure` if a block or the loss refers to the memory of a tensor of another rank."""
        if (kept := self.stage.inspector.state.find_view(released)) is not None:
            view, name = kept
            self.failure = (
                f"{view} is a view of {name}, which is in another pipeline stage, and would "
                "keep its first values: make the view in forward, in a block of that stage"
            )

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage of this replica."""
        return self.parallel.replica * self.parallel.stages + stage

    def connect(self) -> None:
        """Create new links, which never receive messages of the old ones.

        The old links are kept, because messages in transit may still be written into their
        memory.
        """
        self._old_links += [self.links, [vars(tie).copy() for tie in self.ties]]
        device, stages, stage = self.parallel.device, self.parallel.stages, self.stage.number
        groups = make_groups(self._list_links(), device)
        base = reserve_tags(dist.group.WORLD, 2 * (stages + 1 + len(self._all_ties)))

        def sender(stage: int, tag: int) -> Sender:
            return Sender(groups[tag], self.rank_of(stage), base + tag, device)

        def receiver(stage: int, tag: int) -> Receiver:
            return Receiver(groups[tag], self.rank_of(stage), base + tag, device)

        self.links = links = StageLinks()
        if stage > 0:
            links.inputs = receiver(stage - 1, 2 * stage)
            links.to_inputs = sender(stage - 1, 2 * stage + 1)
        if not self.is_last:
            links.outputs = sender(stage + 1, 2 * stage + 2)
            links.gradients = receiver(stage + 1, 2 * stage + 3)
        for number, tie in enumerate(self._all_ties):
            tag = 2 * (stages + 1 + number)
            if stage == tie.later:
                tie.gradient_sender = sender(tie.earlier, tag)
                tie.reduced_receiver = receiver(tie.earlier, tag + 1)
            elif stage == tie.earlier:
                tie.gradient_receiver = receiver(tie.later, tag)
                tie.reduced_sender = sender(tie.later, tag + 1)

    def _list_links(self) -> dict[int, tuple[int, int]]:
        """Return the two ranks of each link of this replica, by its tag."""
        stages = self.parallel.stages
        ends = {2 * later: (later - 1, later) for later in range(1, stages)}
        for number, tie in enumerate(self._all_ties, stages + 1):
            ends[2 * number] = tie.earlier, tie.later
        return {
            tag + way: (self.rank_of(earlier), self.rank_of(later))
            for tag, (earlier, later) in ends.items()
            for way in (0, 1)
        }

    @property
    def ties_to_earlier(self) -> list[TiedParameters]:
        """The tied parameters whose sums this stage sends to an earlier one."""
        return [tie for tie in self.ties if tie.later == self.stage.number]

    @property
    def ties_to_later(self) -> list[TiedParameters]:
        """The tied parameters whose sums this stage receives from a later one."""
        return [tie for tie in self.ties if tie.earlier == self.stage.number]

    def fail(self, reason: str, attempt: int) -> None:
        """Send the neighbors the reason why this rank sends no further values in this step."""
        senders = [self.links.outputs, self.links.to_inputs]
        for tie in self.ties:
            senders += [tie.gradient_sender, tie.reduced_sender]
        for sender in senders:
            if sender is not None:
                sender.fail(reason, attempt)

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Send the reduced gradients of tied parameters from the owner to the other holders."""
        for tie in reversed(self.ties):
            tie.receive_reduced(attempt)
            tie.send_reduced(attempt)
