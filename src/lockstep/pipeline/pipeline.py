"""The pipeline: this rank's stages, their links to neighboring stages, and their schedule.

    rank 0   stage 0   F0 F1 .. B0 F2 B1 ...       F forward, B backward of a micro-batch
    rank 1   stage 1      F0 B0 F1 B1 ...

`lockstep.pipeline.schedule_executor` executes the schedule. An action waits for its inputs from
another rank, whose receive is already posted; outputs are sent without waiting. The schedule
determines the order of the messages on each link, so messages cannot be confused. A stage that
fails notifies its neighbors; the exchange of the ranks' status notifies all other ranks, and the
step is rolled back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from lockstep.devices import is_accelerator
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.grouping import (
    GroupSizeTuner,
    count_in_flight,
    divide_into_groups,
    find_schedule,
)
from lockstep.pipeline.p2p import Receiver, Sender
from lockstep.pipeline.schedules import Action, build_schedule
from lockstep.pipeline.stage import Stage
from lockstep.pipeline.tied_weights import TiedParameters

__all__ = ["Pipeline", "assign_groups", "make_groups"]

FIRST_TAG = 1 << 20  # above the tags that user code is likely to use
_next_tag: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

build_cached_schedule = lru_cache(maxsize=64)(build_schedule)


def reserve_tags(group: Any, count: int) -> int:
    """Return the first of `count` tags that no pipeline on `group` has used before.

    All ranks connect and reconnect their pipelines in the same order, so they reserve the same
    tags. Messages of an aborted step or of another trainer have other tags.
    """
    first = _next_tag.get(group, FIRST_TAG)
    _next_tag[group] = first + count
    return first


def assign_groups(links: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the number of the group of each link.

    Args:
        links: The two ranks of each link of the world, by its tag.

    Returns:
        Numbers from 0, by tag; no two links of one group connect the same two ranks.
    """
    used: Counter[tuple[int, ...]] = Counter()
    numbers = {}
    for tag, ranks in links.items():
        pair = tuple(sorted(ranks))
        numbers[tag] = used[pair]
        used[pair] += 1
    return numbers


def make_groups(links: Mapping[int, tuple[int, int]], device: torch.device) -> dict[int, Any]:
    """Return the group of each link by its tag; on the CPU, where tags count, the default group.

    NCCL and the backends like it run the messages between two ranks of a group one after another,
    in the order of the calls, and ignore their tags: two ranks that call in different orders wait
    for each other forever. The schedule fixes the order of the messages on one link, but not that
    of the links of two ranks: one sends activations while the other sends gradients. So each link
    between the same two ranks is in a group of its own, and has its own connection and stream.

    All ranks of the world must call this in the same order, because they create the groups
    together.
    """
    if not is_accelerator(device):
        return dict.fromkeys(links, dist.group.WORLD)
    numbers = assign_groups(links)
    groups = [dist.new_group() for _ in range(max(numbers.values(), default=-1) + 1)]
    return {tag: groups[number] for tag, number in numbers.items()}


@dataclass
class StageLinks:
    """The links of one stage; None where it has no neighbor."""

    inputs: Receiver | None = None
    outputs: Sender | None = None
    gradients: Receiver | None = None
    to_inputs: Sender | None = None


class Pipeline:
    """The stages of this rank, with their links to the ranks of the same replica.

    Args:
        parallel: The layout.
        stages: This rank's stages.
        name: The name of the schedule.
        stages_per_rank: Stages per rank; more than one only for the schedule "interleaved".
        ties: The tied parameters of all stages; each gets its links here.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        stages: Sequence[Stage],
        name: str,
        stages_per_rank: int,
        ties: Sequence[TiedParameters],
    ) -> None:
        self.parallel = parallel
        self.name = name
        self.stages_per_rank = stages_per_rank
        self.stages = {stage.number: stage for stage in stages}
        self.number = parallel.stages * stages_per_rank
        here = self.stages.keys()
        self.ties = [tie for tie in ties if tie.later in here or tie.earlier in here]
        self._all_ties = list(ties)
        self.failure = ""
        """The reason why no step can be computed; "" if there is none."""
        self.group_sizes = GroupSizeTuner()
        self._old_links: list[Any] = []
        self.links: dict[int, StageLinks] = {}
        self.connect()

    @property
    def last(self) -> int:
        """The number of the last stage, which computes the loss."""
        return self.number - 1

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that this rank calls in a step, by their names in messages."""
        parts = (self.add_loss(stage.number, stage.blocks) for stage in self.stages.values())
        return {name: module for part in parts for name, module in part.items()}

    def add_loss(self, stage: int, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the blocks of a stage, and the loss if it is the last one."""
        return {**blocks, **(self.parallel.loss_module() if stage == self.last else {})}

    def find_views(self, released: Mapping[str, torch.Tensor]) -> None:
        """Set `failure` if a block or the loss refers to the memory of a tensor of another rank."""
        for stage in self.stages.values():
            if (kept := stage.inspector.state.find_view(released)) is not None:
                view, name = kept
                self.failure = (
                    f"{view} is a view of {name}, which is in another pipeline stage, and would "
                    "keep its first values: make the view in forward, in a block of that stage"
                )

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage of this replica."""
        return self.parallel.replica * self.parallel.stages + stage % self.parallel.stages

    def connect(self) -> None:
        """Create new links, which never receive messages of the old ones.

        The old links are kept, because messages in transit may still be written into their
        memory.
        """
        self._old_links += (
            [self.links, [vars(tie).copy() for tie in self.ties]] if self.links else []
        )
        device = self.parallel.device
        groups = make_groups(self._list_links(), device)
        base = reserve_tags(dist.group.WORLD, 2 * (self.number + 1 + len(self._all_ties)))

        def sender(stage: int, tag: int) -> Sender:
            return Sender(groups[tag], self.rank_of(stage), base + tag, device)

        def receiver(stage: int, tag: int) -> Receiver:
            return Receiver(groups[tag], self.rank_of(stage), base + tag, device)

        self.links = {}
        for stage in self.stages:
            links = StageLinks()
            self.links[stage] = links
            if stage > 0:
                links.inputs = receiver(stage - 1, 2 * stage)
                links.to_inputs = sender(stage - 1, 2 * stage + 1)
            if stage < self.last:
                links.outputs = sender(stage + 1, 2 * stage + 2)
                links.gradients = receiver(stage + 1, 2 * stage + 3)
        for number, tie in enumerate(self._all_ties):
            tag = 2 * (self.number + 1 + number)
            local = self.rank_of(tie.later) == self.rank_of(tie.earlier)
            later = tie.later in self.stages
            earlier = tie.earlier in self.stages
            tie.local_gradients = {}
            tie.gradient_sender = sender(tie.earlier, tag) if later and not local else None
            tie.gradient_receiver = receiver(tie.later, tag) if earlier and not local else None
            tie.reduced_sender = sender(tie.later, tag + 1) if earlier and not local else None
            tie.reduced_receiver = receiver(tie.earlier, tag + 1) if later and not local else None

    def _list_links(self) -> dict[int, tuple[int, int]]:
        """Return the two ranks of each link of this replica, by its tag."""
        ends = [(stage - 1, stage) for stage in range(1, self.number)]
        tags = [2 * later for _, later in ends]
        ends += [(tie.earlier, tie.later) for tie in self._all_ties]
        tags += [2 * (self.number + 1 + number) for number in range(len(self._all_ties))]
        return {
            tag + way: (self.rank_of(earlier), self.rank_of(later))
            for tag, (earlier, later) in zip(tags, ends, strict=True)
            for way in (0, 1)
        }

    def find_ties_to_earlier(self, stage: int) -> list[TiedParameters]:
        """Return the tied parameters whose sums a stage sends to an earlier one."""
        return [tie for tie in self.ties if tie.later == stage]

    def find_ties_to_later(self, stage: int) -> list[TiedParameters]:
        """Return the tied parameters whose sums a stage receives from a later one."""
        return [tie for tie in self.ties if tie.earlier == stage]

    def find_tied_parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage that other stages hold too."""
        ties = [tie for tie in self.ties if stage in (tie.later, tie.earlier)]
        return [parameter for tie in ties for parameter in tie.parameters]

    def get_actions(self, groups: int, size: int) -> Sequence[Action]:
        """Return the actions of this rank for a number of groups of micro-batches of a size."""
        name = find_schedule(self.name, size)
        stages_per_rank = self.stages_per_rank if name == "interleaved" else None
        plan = build_cached_schedule(name, self.parallel.stages, groups, stages_per_rank)
        return plan[self.parallel.position]

    def count_in_flight(self, stage: int, indices: Sequence[int], size: int) -> int:
        """Return how many groups of a size a stage holds at a time, of these micro-batches."""
        groups = divide_into_groups(indices, size)
        return count_in_flight(self.get_actions(len(groups), size), stage)

    def fail(self, reason: str, attempt: int) -> None:
        """Send the neighbors the reason why this rank sends no further values in this step."""
        for links in self.links.values():
            for sender in (links.outputs, links.to_inputs):
                if sender is not None:
                    sender.fail(reason, attempt)
        for tie in self.ties:
            for sender in (tie.gradient_sender, tie.reduced_sender):
                if sender is not None:
                    sender.fail(reason, attempt)

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Send the reduced gradients of tied parameters from the owner to the other holders."""
        for tie in reversed(self.ties):
            if tie.later in self.stages:
                tie.receive_reduced(attempt)
            if tie.earlier in self.stages:
                tie.send_reduced(attempt)
        for tie in self.ties:  # the next phase writes into the gradients: it removes a loss scale
            if tie.reduced_sender is not None:
                tie.reduced_sender.drain()
