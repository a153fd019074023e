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

Nothing is taken early while code of the user's may look at `.grad` during backward:
while a module has backward hooks, or a parameter has post-accumulate hooks besides
ours, and once a callback was queued for the end of a backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules import module as global_hooks

from lockstep.comm.bucket import Bucket

if TYPE_CHECKING:
    from lockstep.data_parallel.gradients import Gradients

__all__ = ["Arrival"]


class Arrival:
    """Watches one backward at a time, and launches the buckets that it completes.

    `modules` are those whose backward hooks could look at the gradients.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        gradients: Gradients,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self._parameters, self._gradients = list(parameters), gradients
        self._modules = list(modules)
        self._hooked: set[int] = set()
        self._watching, self._looked_on = False, False
        self._early = False  # whether gradients are taken in the backward that is watched
        self._has_callbacks = False
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
        self._early = self._looked_on and not self._is_observed()
        if self._early:
            self._gradients.open(microbatch)
        self._count(self._gradients.buckets)
        self._watching = True
        try:
            with _callbacks_noticed(self._note_callback):
                yield
        finally:
            self._watching, self._looked_on = False, True
            handle.remove()

    def late(self) -> str:
        """Return why a gradient was taken too early in this step, as a sentence, or ""."""
        sentence, self._late = self._late, ""
        return sentence

    def _is_observed(self) -> bool:
        """Return whether code of the user's may look at `.grad` while backward runs."""
        return (
            self._has_callbacks
            or bool(global_hooks._global_backward_hooks)
            or bool(global_hooks._global_backward_pre_hooks)
            or any(
                module._backward_hooks or module._backward_pre_hooks
                for root in self._modules
                for module in root.modules()
            )
            or any(_has_foreign_hooks(parameter) for _, parameter in self._parameters)
        )

    def _note_callback(self) -> None:
        self._has_callbacks = True
        if self._taken:
            self._late = (
                "a callback was queued for the end of backward (queue_callback), for the first "
                "time since training began, when gradients had left .grad already; queue it from "
                "the first step on"
            )

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
                parameter.register_post_accumulate_grad_hook(_Hook(this, number))
                self._hooked.add(number)

    def arrived(self, number: int) -> None:
        """Take in that autograd has added to a parameter's gradient."""
        if not self._watching:
            return
        if number in self._taken:
            self._late = (
                f"the gradient of {self._parameters[number][0]} came in two parts, and not in the "
                "steps before; if a part of the model is checkpointed, do it with "
                "use_reentrant=False"
            )
        if number in self._seen:
            self._parted.add(number)
        self._seen.add(number)
        inner = torch._C._current_graph_task_id() != self._backward
        if self._early and not inner and number not in self._parted:
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


class _Hook:
    """A parameter's post-accumulate hook; it does nothing once its Arrival is gone."""

    def __init__(self, arrival: weakref.ref[Arrival], number: int) -> None:
        self._arrival, self._number = arrival, number

    def __call__(self, parameter: torch.Tensor) -> None:
        owner = self._arrival()
        if owner is not None:
            owner.arrived(self._number)


def _has_foreign_hooks(parameter: nn.Parameter) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and any(type(hook) is not _Hook for hook in hooks.values())


class _NoticingEngine:
    """Autograd's engine, with a call of `noticed` for every callback that is queued on it."""

    def __init__(self, engine: Any, noticed: Callable[[], None]) -> None:
        self.engine, self._noticed = engine, noticed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Queue a callback for the end of the backward that runs."""
        self._noticed()
        self.engine.queue_callback(callback)


@contextmanager
def _callbacks_noticed(noticed: Callable[[], None]) -> Iterator[None]:
    """Call `noticed` where the body queues a callback; torch itself has no list of them."""
    holder: Any = Variable
    engine = _NoticingEngine(holder._execution_engine, noticed)
    holder._execution_engine = engine
    try:
        yield
    finally:
        # Another thread's backward may have put its own in front meanwhile.
        if holder._execution_engine is engine:
            holder._execution_engine = engine.engine
