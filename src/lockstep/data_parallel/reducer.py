"""The reducer: mean gradients over ranks, bucket by bucket, while backward runs.

    backward   (1) a parameter's gradient is complete: its hook marks it ready
               (2) a bucket whose members are ready is launched; buckets go in one
                   fixed order, the last parameters first, the same on every rank
               (3) the bucket before it is added and gathered meanwhile
    its end    (4) what is left is launched: members without a gradient are absent
               (5) sparse gradients, whose rows nobody knows before
               (6) the means are written into `.grad`, or `.grad` becomes a view of them

Where several wrapped modules live on one group, a backward may go through them
in another order on each rank. Then nothing is launched before its end; the ranks
tell each other whose turn it was, and (2) to (6) follow in the order in which
the wrappers were made.

Reentrant checkpointing runs a backward of its own inside the outer one for each of
its segments, and a parameter of two segments is complete only after the last. So
(2) waits for the outer end where that happens. The first backward shows it: none
of its buckets is launched before its end. Which one is the outer is known because
the gradient of the model's output comes first of all.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.bucket import Bucket, plan
from lockstep.comm.exact import ExactSum, in_format_of, in_layout_of
from lockstep.comm.sparse import sparse_means
from lockstep.comm.transfer import all_gather_bytes
from lockstep.data_parallel.comm_hook import Hook, HookedSum
from lockstep.errors import GradientError

__all__ = ["Reducer"]

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
_numbers = itertools.count()


class _Backward:
    """A backward that runs."""


class Reducer:
    """Averages gradients during backward; see the steps at the top of the file.

    Parameters:
        named: all parameters of the model by name, in the model's order.
        sparse: those whose gradients are sparse tensors.
        bucket_bytes: how many bytes of gradients travel in one message.
        group: the ranks that average, the whole world if None.
        as_view: let `.grad` be a view of the means instead of a copy.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        sparse: Collection[torch.Tensor],
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
        as_view: bool,
    ) -> None:
        self.enabled = True
        self.scale = 1.0  # of the means, where ranks have no more data (Join)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._as_view = as_view
        trained = [n for n, parameter in enumerate(self._parameters) if parameter.requires_grad]
        self._sparse = [n for n in trained if self._parameters[n] in sparse]
        dense = [n for n in trained if n not in self._sparse]
        self._buckets = plan(
            [self._parameters[n].numel() for n in dense],
            [self._parameters[n].dtype for n in dense],
            bucket_bytes,
            indices=dense,
        )
        self._bucket_of = {m.index: n for n, each in enumerate(self._buckets) for m in each.members}
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._node = (self._rank, self._rank + 1)
        holders = [[(each, each + 1)] for each in range(self._ranks)]
        self._sums: list[ExactSum] | list[HookedSum] = [
            ExactSum(
                bucket, holders, self._ranks, self._parameters[0].device, group, divisor=self._ranks
            )
            for bucket in self._buckets
        ]
        self._group = group or dist.group.WORLD
        self._number = next(_numbers)
        self._touched: set[int] = set()  # gradients that are not averaged yet
        self._early = False  # may buckets be launched before backward ends?
        self._together = False  # are there several, which must wait for each other?
        self._hooked = False
        self._rest()
        self._join()
        for n in trained:
            self._parameters[n].register_post_accumulate_grad_hook(_hook(weakref.ref(self), n))

    @property
    def _alone(self) -> bool:
        return self._ranks == 1 and not self._hooked

    @property
    def together(self) -> bool:
        """Whether several reducers live on this group."""
        return self._together

    def use(self, hook: Hook, state: object) -> None:
        """Let a communication hook do the averaging of the dense gradients."""
        self._hooked = True
        last, sums = len(self._buckets) - 1, list[HookedSum]()
        for n, bucket in enumerate(self._buckets):
            before = sums[-1] if sums else None
            sums.append(HookedSum(bucket, n, n == last, self._parameters, hook, state, before))
        self._sums = sums

    def reset(self) -> None:
        """Forget a backward that was broken off; what it launched must end first."""
        if self._launched:
            self._sums[self._launched - 1].combine()
        for each in self._sums[: self._launched]:
            each.gather()
        if self._active:
            self._touched.clear()
        self._rest()

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Notice the backward that begins at these outputs of the model."""
        if self._alone:
            return
        here = weakref.ref(self)

        def begin(_: torch.Tensor) -> None:
            owner = here()
            if owner is not None and owner.enabled:
                owner._call_back()

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(begin)

    def shadow(self) -> None:
        """Take part in the others' average without a gradient of one's own."""
        self._touched.clear()
        self._absent = True
        self._finish()

    def _rest(self) -> None:
        """Be ready for the next backward."""
        self._ready: set[int] = set()  # complete in this backward
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._launched = 0
        # Those that run now, one inside the other. Torch alone holds them, so they go with an
        # exception too.
        self._backwards = weakref.WeakValueDictionary[int, _Backward]()
        self._active, self._nested, self._absent = False, False, False

    def mark(self, index: int) -> None:
        """Note (1) that a gradient is complete, and launch what can be launched."""
        if self._alone:
            return
        if not self.enabled:
            self._touched.add(index)
            return
        self._call_back()
        self._check(index)
        self._touched.add(index)
        self._active = True
        if index in self._bucket_of and index not in self._ready:
            self._missing[self._bucket_of[index]] -= 1
        self._ready.add(index)
        if self._early and not self._together:
            while self._launched < len(self._buckets) and not self._missing[self._launched]:
                self._launch()

    def _check(self, index: int) -> None:
        """Refuse what would give a wrong gradient."""
        gradient, name = self._parameters[index].grad, self._names[index]
        if gradient is not None and gradient.requires_grad:
            raise GradientError(
                "backward(create_graph=True) cannot go through DistributedDataParallel: the mean "
                f"in the gradient of {name} would have the graph of this rank's part alone; use "
                "torch.autograd.grad(..., create_graph=True), and backward for what is made of it"
            )
        if index in self._ready and self._bucket_of.get(index, self._launched) < self._launched:
            raise GradientError(
                f"parameter {name} got a gradient again in one backward, after the first had "
                "been averaged: use checkpoint(..., use_reentrant=False)"
            )

    def _call_back(self) -> None:
        """Have `_end_backward` called, once, when the backward that runs now ends."""
        number = torch._C._current_graph_task_id()
        if number in self._backwards:
            return
        if not self._backwards:
            self.reset()  # there may have been one that raised
        running = self._backwards[number] = _Backward()
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._end_backward, number, running))

    @torch.no_grad()
    def _launch(self) -> None:
        """Do (2) and (3)."""
        number, self._launched = self._launched, self._launched + 1
        bucket = self._buckets[number]
        # A gradient of before that nobody touched this time has its part in the mean of others.
        stale = {member.index for member in bucket.members} - self._touched
        self._sums[number].launch({self._node: self._gradients(bucket, stale)}, stale)
        if number:
            self._sums[number - 1].combine()

    def _gradients(self, bucket: Bucket, stale: set[int]) -> dict[int, torch.Tensor | None]:
        """Return the bucket's gradients by index, None where there is none to average."""
        if self._absent:
            return {member.index: None for member in bucket.members}
        gradients: dict[int, torch.Tensor | None] = {}
        for member in bucket.members:
            parameter = self._parameters[member.index]
            if self._as_view and member.index in stale and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # it may stay, while the bucket changes
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                raise GradientError(
                    f"parameter {self._names[member.index]} has a sparse gradient, and only those "
                    "of Embedding and EmbeddingBag made with sparse=True are expected: make it "
                    "with one of them, or with sparse=False"
                )
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = in_format_of(gradient, parameter)
            gradients[member.index] = gradient
        return gradients

    def _join(self) -> None:
        """Find out, with the other ranks, whether there are several on this group."""
        _reducers.add(self)
        here = [each for each in _reducers if each._group is self._group]
        message = str(len(here)).encode()
        counts = all_gather_bytes(
            message, "wrapping a module in DistributedDataParallel", self._group
        )
        for each in here:
            each._together = max(map(int, counts)) > 1

    def _end_backward(self, number: int, running: _Backward) -> None:
        """Finish this one, or all whose turn it was, in the order in which they were made."""
        self._backwards.pop(number, None)
        if not self._active:
            return  # nothing was averaged, or another one's call has finished it
        if self._backwards:  # the end of a segment, inside the outer backward
            self._nested = True
            return
        if not self._together:
            return self._finish()
        here = {each._number: each for each in _reducers if each._group is self._group}
        message = json.dumps([number for number, each in here.items() if each._active]).encode()
        turns = all_gather_bytes(message, "averaging gradients at the end of backward", self._group)
        for number in sorted({number for turn in turns for number in json.loads(turn)}):
            here[number]._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Do (4), (5) and (6)."""
        while self._launched < len(self._buckets):
            self._launch()
        if self._sums:
            self._sums[-1].combine()
        self._write(pair for each in self._sums for pair in each.gather())
        if self._sparse:
            self._write_sparse()
        self._early = not self._nested
        self._touched.clear()
        self._rest()

    def _write(self, pairs: Iterable[tuple[int, torch.Tensor | None]]) -> None:
        """Put the means into `.grad`; in its own memory, unless a view is wanted."""
        new = self._new_anywhere() if self._hooked else None
        for index, mean in pairs:
            if mean is None or (new is not None and index not in new):
                continue
            parameter = self._parameters[index]
            value = in_layout_of(mean, parameter)
            if self.scale != 1.0:
                value.mul_(self.scale)
            if self._as_view:
                parameter.grad = value
            elif parameter.grad is None:
                parameter.grad = value.clone()
            else:
                parameter.grad.copy_(value)

    def _new_anywhere(self) -> set[int]:
        """Return which parameters have a new gradient on some rank; hooks do not say."""
        message = json.dumps(sorted(self._touched)).encode()
        lists = all_gather_bytes(message, "averaging gradients by a hook", self._group)
        return {index for each in lists for index in json.loads(each)}

    def _write_sparse(self) -> None:
        """Average the sparse gradients, which are replaced: a sparse tensor has no place."""
        values = {n: None if self._absent else self._parameters[n].grad for n in self._sparse}
        models = {n: self._parameters[n] for n in self._sparse}
        for index, mean in sparse_means(values, self._touched, models, self._group).items():
            parameter = self._parameters[index]
            parameter.grad = mean if self.scale == 1.0 else mean * self.scale


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    """Return a parameter's hook; it does nothing once its DistributedDataParallel is gone."""

    def mark(parameter: torch.Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.mark(index)

    return mark
