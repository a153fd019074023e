"""Arrival: buckets that are launched while the last backward still runs.

    backward of the last micro-batch   ... layer 6 ─> layer 5 ─> layer 4 ...
    hooks of the parameters                w6, b6     w5, b5
    bucket 0, complete                     └─ launch 0 ─┘
    bucket 1, complete, after bucket 0                └─ launch 1 ─┘

A gradient is added to its place in the bucket while it is still in the cache, and
its memory serves for the next layer's. The buckets go in one order on all ranks,
whenever each rank is ready; what is not complete by itself follows when the
micro-batch ends. So ranks need not agree on who launches early.

Early is right only where a gradient comes whole. The caller promises one backward
(`final=True`). In one backward, reentrant checkpointing runs another one inside:
what arrives there waits for the end, and so does a parameter that was seen to get
several parts in an earlier step. A parameter that gets a second part after its
bucket has gone is a failure that the ledger tells to all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lockstep.comm.bucket import Bucket

if TYPE_CHECKING:
    from lockstep.step.gradients import Gradients

__all__ = ["Arrival"]


class Arrival:
    """Watches one backward at a time, and launches the buckets that it completes."""

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], gradients: Gradients
    ) -> None:
        self._parameters, self._gradients = list(parameters), gradients
        self._hooked: set[int] = set()
        self._watching, self._looked_on = False, False
        self._backward = -1  # the outermost one, by autograd's number
        self._seen: set[int] = set()
        self._parted: set[int] = set()  # came in several parts, in some step
        self._taken: set[int] = set()
        self._late = ""
        self._missing: list[int] = []  # of each bucket, how many members are not there yet
        self._bucket: dict[int, int] = {}

    @contextmanager
    def watch(self, loss: torch.Tensor, microbatch: int) -> Iterator[None]:
        """Take gradients as they arrive while the body runs backward from `loss`, once.

        For this rank's last micro-batch. The first time it only looks on.
        """
        self._hook()
        self._seen, self._taken = set(), set()
        handle = loss.register_hook(self._note)
        if self._looked_on:
            self._gradients.open(microbatch)
        self._count(self._gradients.buckets)
        self._watching = True
        try:
            yield
        finally:
            self._watching, self._looked_on = False, True
            handle.remove()

    def late(self) -> str:
        """Name the parameter that got another part of its gradient after it was taken; or ""."""
        name, self._late = self._late, ""
        return name

    def _count(self, buckets: Sequence[Bucket]) -> None:
        self._missing = [len(each.members) for each in buckets]
        self._bucket = {
            member.index: number for number, each in enumerate(buckets) for member in each.members
        }

    def _note(self, gradient: torch.Tensor) -> None:
        self._backward = torch._C._current_graph_task_id()

    def _hook(self) -> None:
        """Hook the parameters that take part in a backward for the first time."""
        this = weakref.ref(self)
        for number, (_, parameter) in enumerate(self._parameters):
            if parameter.requires_grad and number not in self._hooked:
                parameter.register_post_accumulate_grad_hook(_hook(this, number))
                self._hooked.add(number)

    def arrived(self, number: int) -> None:
        """Take in that autograd has added to a parameter's gradient."""
        if not self._watching:
            return
        if number in self._taken:
            self._late = self._parameters[number][0]
        if number in self._seen:
            self._parted.add(number)
        self._seen.add(number)
        inner = torch._C._current_graph_task_id() != self._backward
        if self._looked_on and not inner and number not in self._parted:
            self._take(number)

    def _take(self, number: int) -> None:
        """Take a gradient that is whole, and launch what is complete with it."""
        self._gradients.take_one(number)
        self._taken.add(number)
        if number not in self._bucket:
            return
        self._missing[self._bucket[number]] -= 1
        while (
            self._gradients.launched < len(self._missing)
            and not self._missing[self._gradients.launched]
        ):
            self._gradients.launch_next()


def _hook(arrival: weakref.ref[Arrival], number: int) -> Callable[[torch.Tensor], None]:
    """Return a parameter's hook; it does nothing once its Arrival is gone."""

    def arrived(parameter: torch.Tensor) -> None:
        owner = arrival()
        if owner is not None:
            owner.arrived(number)

    return arrived
