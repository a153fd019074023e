"""DataParallel: averaged gradients for a loop that exists already.

    forward    rank 0's buffers for everybody
    backward   (1) a parameter's gradient is complete: its hook marks it ready
               (2) a bucket whose members are ready is launched; buckets go in one
                   fixed order, the last parameters first, the same on every rank
               (3) the bucket before it is added and gathered meanwhile
    its end    (4) what is left is launched: members without a gradient are absent
               (5) the means are written into `.grad`

Where several wrapped modules live on one group, a backward may go through them
in another order on each rank. Then nothing is launched before its end; the ranks
tell each other whose turn it was, and (2) to (5) follow in the order in which
the wrappers were made.

It sees whole batches, not micro-batches, so the digest depends on the number of
ranks, as it does with DistributedDataParallel. What it promises is equal bits on
all ranks and from run to run, whatever the bucket size: every element is added
along the tree over the ranks.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.bucket import Bucket, plan
from lockstep.comm.exact import ExactSum, in_format_of, in_layout_of
from lockstep.comm.transfer import all_gather_bytes, broadcast_tensors
from lockstep.errors import GradientError, UsageError
from lockstep.run.world import world
from lockstep.train.agreement import agree
from lockstep.train.gradients import BUCKET_BYTES
from lockstep.train.units import in_backward

__all__ = ["DataParallel"]


class DataParallel(nn.Module):
    """Wraps a module so that backward leaves the mean gradient of all ranks in `.grad`.

    Use it as DistributedDataParallel: each rank computes its own part of the
    batch, of equal size, with a loss that is a mean. The state dict has the
    module's own names, without a prefix, also for a compiled module. Parameters
    that get no gradient on some ranks count as zero there; those that get none
    anywhere keep `.grad = None`. Frozen parameters are left alone.

    Parameters:
        module: the model, on this rank's device; rank 0's weights are given to all.
        broadcast_buffers: give rank 0's buffers to all before each forward in
            training mode.
        bucket_bytes: how many bytes of gradients travel in one message.
        group: the ranks that average, the whole world if None.

    Raises UsageError without `lockstep.init()`, DisagreementError where the ranks'
    models differ, GradientError for sparse gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        broadcast_buffers: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        world()
        self.module = module
        origin = self._origin
        self._prefix = "module." if origin is module else "module._orig_mod."
        self._broadcast_buffers = broadcast_buffers
        self._group = group
        agree(origin, {}, group)
        named = list(origin.named_parameters())
        self._names = [name for name, _ in named]
        self._parameters_in_order = [parameter for _, parameter in named]
        self._trained = [parameter.requires_grad for parameter in self._parameters_in_order]
        self._averager = _Averager(
            self._parameters_in_order, self._names, self._trained, bucket_bytes, group
        )
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, in training with rank 0's buffers."""
        for name, parameter, trained in zip(
            self._names, self._parameters_in_order, self._trained, strict=True
        ):
            if parameter.requires_grad and not trained:
                raise UsageError(
                    f"parameter {name} was frozen when DataParallel was made and is not now; "
                    "its gradient would not be averaged: make DataParallel after unfreezing"
                )
        training = self.training and torch.is_grad_enabled()
        if training and self._averager.enabled and not in_backward():
            self._averager.reset()
            if self._broadcast_buffers:
                broadcast_tensors(list(self._origin.buffers()), self._group)
        return self.module(*args, **kwargs)

    @property
    def _origin(self) -> nn.Module:
        """The module without the compiler's wrapper; no attribute, which would register it."""
        origin: nn.Module = getattr(self.module, "_orig_mod", self.module)
        return origin

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local in the context; the first backward outside averages their sum."""
        before, self._averager.enabled = self._averager.enabled, False
        try:
            yield
        finally:
            self._averager.enabled = before


_averagers: weakref.WeakSet[_Averager] = weakref.WeakSet()
_numbers = itertools.count()


class _Averager:
    """Averages gradients during backward; see the steps at the top of the file."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: list[str],
        trained: list[bool],
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.enabled = True
        self._parameters, self._names = parameters, names
        indices = [index for index, is_trained in enumerate(trained) if is_trained]
        self._buckets = plan(
            [parameters[index].numel() for index in indices],
            [parameters[index].dtype for index in indices],
            bucket_bytes,
            indices=indices,
        )
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._alone = ranks == 1
        self._node = (rank, rank + 1)
        holders = [[(each, each + 1)] for each in range(ranks)]
        self._sums = [
            ExactSum(bucket, holders, ranks, parameters[0].device, group, divisor=ranks)
            for bucket in self._buckets
        ]
        self._group = group or dist.group.WORLD
        self._number = next(_numbers)
        self._touched: set[int] = set()  # gradients that are not averaged yet
        self._ready: set[int] = set()  # of those, the ones complete in this backward
        self._launched = 0
        self._active = False
        self._together = False  # are there several, which must wait for each other?
        self._join()
        for index in indices:
            parameters[index].register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))

    def reset(self) -> None:
        """Forget a backward that was broken off."""
        if self._active:
            self._touched.clear()
            self._ready.clear()
            self._launched, self._active = 0, False

    def mark(self, index: int) -> None:
        """Note (1) that a gradient is complete, and launch what can be launched."""
        if self._alone:
            return
        self._touched.add(index)
        if not self.enabled:
            return
        if not self._active:
            self._active = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        self._ready.add(index)
        while (
            not self._together
            and self._launched < len(self._buckets)
            and self._complete(self._launched)
        ):
            self._launch()

    def _complete(self, number: int) -> bool:
        return all(member.index in self._ready for member in self._buckets[number].members)

    @torch.no_grad()
    def _launch(self) -> None:
        """Do (2) and (3)."""
        number, self._launched = self._launched, self._launched + 1
        bucket = self._buckets[number]
        # A gradient of before that nobody touched this time has its part in the mean of others.
        stale = {member.index for member in bucket.members} - self._touched
        self._sums[number].launch({self._node: self._gradients(bucket)}, stale)
        if number:
            self._sums[number - 1].combine()

    def _gradients(self, bucket: Bucket) -> dict[int, torch.Tensor | None]:
        """Return the bucket's gradients by index, None where there is none to average."""
        gradients: dict[int, torch.Tensor | None] = {}
        for member in bucket.members:
            parameter = self._parameters[member.index]
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                raise GradientError(
                    f"parameter {self._names[member.index]} has a sparse gradient, which cannot be "
                    "averaged exactly: make its Embedding with sparse=False"
                )
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = in_format_of(gradient, parameter)
            gradients[member.index] = gradient
        return gradients

    def _join(self) -> None:
        """Find out, with the other ranks, whether there are several on this group."""
        _averagers.add(self)
        here = [each for each in _averagers if each._group is self._group]
        message = str(len(here)).encode()
        counts = all_gather_bytes(message, "wrapping a module in DataParallel", self._group)
        for each in here:
            each._together = max(map(int, counts)) > 1

    def _end_backward(self) -> None:
        """Finish this one, or all whose turn it was, in the order in which they were made."""
        if not self._active:
            return  # another one's call has finished it
        if not self._together:
            return self._finish()
        here = {each._number: each for each in _averagers if each._group is self._group}
        message = json.dumps([number for number, each in here.items() if each._active]).encode()
        turns = all_gather_bytes(message, "averaging gradients at the end of backward", self._group)
        for number in sorted({number for turn in turns for number in json.loads(turn)}):
            here[number]._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Do (4) and (5)."""
        while self._launched < len(self._buckets):
            self._launch()
        self._sums[-1].combine()
        for each in self._sums:
            for index, mean in each.gather():
                if mean is not None:
                    self._write(self._parameters[index], mean)
        self._touched.clear()
        self._ready.clear()
        self._launched, self._active = 0, False

    @staticmethod
    def _write(parameter: nn.Parameter, mean: torch.Tensor) -> None:
        """Put the mean into `.grad`, in its own memory: a user may hold on to it."""
        value = in_layout_of(mean, parameter)
        if parameter.grad is None:
            parameter.grad = value.clone()
        else:
            parameter.grad.copy_(value)


def _hook(averager: weakref.ref[_Averager], index: int) -> Callable[[torch.Tensor], None]:
    """Return a parameter's hook; it does nothing once its DataParallel is gone."""

    def mark(parameter: torch.Tensor) -> None:
        owner = averager()
        if owner is not None:
            owner.mark(index)

    return mark


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Name the entries of a state dict as the wrapped module does."""
    assert isinstance(module, DataParallel)
    inner = prefix + module._prefix
    for name in list(state):
        value = state.pop(name)  # every entry, so that the order stays
        state[prefix + name[len(inner) :] if name.startswith(inner) else name] = value


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Accept the entries of a state dict by the wrapped module's names."""
    assert isinstance(module, DataParallel)
    inner = prefix + module._prefix
    for name in list(state):
        value = state.pop(name)
        ours = name.startswith(prefix) and not name.startswith(inner)
        state[inner + name[len(prefix) :] if ours else name] = value
