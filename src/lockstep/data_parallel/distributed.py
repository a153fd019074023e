"""DistributedDataParallel: mean gradients over ranks, for an existing training loop.

It works on whole batches, not micro-batches, so the digest depends on the number of ranks, as
with torch's class. It guarantees equal bits on all ranks and from run to run, for every bucket
size: each element is added along the tree over the ranks
(`lockstep.data_parallel.mean_reducer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep.comm.collectives import broadcast_tensors
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data_parallel.comm_hook import CommHook
from lockstep.data_parallel.join import DDPJoinHook, exchange_iteration, find_last_joiner
from lockstep.data_parallel.mean_reducer import MeanReducer
from lockstep.data_parallel.planned_buckets import BUCKET_BYTES
from lockstep.data_parallel.state_prefix import hide_prefix
from lockstep.kernel.errors import UsageError
from lockstep.kernel.rng_scopes import is_in_backward
from lockstep.launcher.world import world
from lockstep.model.across_ranks import broadcast_weights, verify_across_ranks
from lockstep.model.description import describe_tensors

__all__ = ["DistributedDataParallel"]

MIB = 1 << 20


UNUSED = {
    "device_ids": "the module stays on its device, and inputs must be there too",
    "output_device": "outputs stay on the module's device",
    "dim": "the ranks split the batch, not the module",
    "find_unused_parameters": "parameters without a gradient are always found",
    "static_graph": "each backward may differ from the one before",
}
"""The options of torch's class that do not exist here, with the reason."""


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a module so that backward leaves the mean gradient of all ranks in `.grad`.

    Use it like torch's class: each rank computes its own part of the batch, of equal size, with a
    loss that is a mean. The state dict has the module's own names, without a prefix, also for
    a compiled module. A parameter that has no gradient on some ranks counts as zero there; a
    parameter that has none on any rank keeps `.grad = None`. Frozen parameters are ignored. Sparse
    gradients of Embedding and EmbeddingBag stay sparse.

    Args:
        module: The model, on this rank's device; all ranks start with rank 0's weights.
        broadcast_buffers: Whether rank 0's buffers are broadcast before each forward in
            training mode.
        process_group: The ranks that average; None for the default group.
        bucket_cap_mb: The capacity of a bucket in MiB, 16 by default. It does not affect bits.
        gradient_as_bucket_view: Whether `.grad` is a view of the bucket, which the next backward
            overwrites, instead of a copy. A view saves memory and one pass over the gradients.
        others: Not used; an option of torch's class that does not apply here raises an error.

    Raises:
        UsageError: `lockstep.init()` has not been called, or an option does not exist.
        DisagreementError: The ranks' models differ.
        GradientError: In backward, for `create_graph=True` and for sparse gradients of other
            modules.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_BYTES / MIB,
        gradient_as_bucket_view: bool = False,
        **others: Never,
    ) -> None:
        for name in others:
            why = UNUSED.get(name)
            raise UsageError(
                f"DistributedDataParallel has no option {name}"
                + (f": omit it, because {why}" if why else "")
            )
        nn.Module.__init__(self)
        Joinable.__init__(self)
        device = world().device
        self.module = module
        origin = self._origin
        self._broadcast_buffers = broadcast_buffers
        self._group = process_group
        verify_across_ranks(
            "the model of a DistributedDataParallel",
            describe_tensors("model", origin),
            "build the same model on every rank",
            process_group,
        )
        broadcast_weights(origin, process_group, device)
        named = list(origin.named_parameters())
        self._frozen = [
            (name, parameter) for name, parameter in named if not parameter.requires_grad
        ]
        self._reducer = MeanReducer(
            named,
            sparse_weights(origin.modules()),
            int(bucket_cap_mb * MIB),
            process_group,
            gradient_as_bucket_view,
        )
        self._comm_hook: CommHook | None = None
        self._divides_by_world_size = True
        hide_prefix(self, "module." if origin is module else "module._orig_mod.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in training mode, rank 0's buffers are broadcast first."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen when its model was wrapped in "
                    "DistributedDataParallel, and is not now; its gradient would not be averaged: "
                    "wrap the model after unfreezing"
                )
        begins_pass = torch.is_grad_enabled() and not is_in_backward()
        if begins_pass:
            self._prepare_pass()
        outputs = self.module(*args, **kwargs)
        if begins_pass:
            self._reducer.watch_outputs(_tensors(outputs))
        return outputs

    def _prepare_pass(self) -> None:
        """Prepare a forward pass that is followed by a backward pass."""
        averages = self._reducer.is_enabled
        buffers = self.training and averages and self._broadcast_buffers
        source = 0
        if self._join_config.enable:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
            source = self._begin_iteration(averages, buffers)
        if averages:
            self._reducer.reset()
        if buffers:
            broadcast_tensors(list(self._origin.buffers()), self._group, source)

    @property
    def _origin(self) -> nn.Module:
        """The module without the compiler's wrapper; an attribute would register it twice."""
        origin: nn.Module = getattr(self.module, "_orig_mod", self.module)
        return origin

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the body; the next backward after it averages the sum."""
        before, self._reducer.is_enabled = self._reducer.is_enabled, False
        try:
            yield
        finally:
            self._reducer.is_enabled = before

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Average the dense gradients with `hook(state, bucket)`; call this on every rank.

        The hooks of `torch.distributed.algorithms.ddp_comm_hooks` work. `bucket` has the
        methods of `torch.distributed.GradBucket`; the hook returns a future of the vector of
        means, as long as `bucket.buffer()`. The hook is called for one bucket after another, each
        time after the previous future is done. Whether all ranks get the same bits depends on the
        hook.

        Raises:
            UsageError: A hook has been registered already.
            DisagreementError: The ranks registered different hooks.
        """
        if self._comm_hook is not None:
            raise UsageError(
                "this DistributedDataParallel has a communication hook already; register only one"
            )
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        verify_across_ranks(
            "the hook of a DistributedDataParallel",
            {"the communication hook": name},
            "register the same hook on every rank",
            self._group,
        )
        self._comm_hook = hook
        self._reducer.set_comm_hook(hook, state)

    # --- uneven inputs: `lockstep.data_parallel.join` ---------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for a loop in which some ranks have fewer batches than others.

        An iteration is one forward and one backward. A rank that has no more data takes part
        without gradients. At the end, all ranks get the model of a rank that finished last.

        Args:
            divide_by_initial_world_size: Whether the mean is over all ranks; otherwise it is over
                the ranks that still have data.
            enable: Whether the context has any effect.
            throw_on_early_termination: Whether all ranks raise an error when a rank has no more
                data.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that `Join` calls on a rank without data.

        Raises:
            UsageError: Several instances of `DistributedDataParallel` use this process group.
        """
        if self._reducer.shares_group:
            raise UsageError(
                "Join supports one DistributedDataParallel per process group, and the group of "
                "this one already had another: pass process_group=torch.distributed.new_group()"
            )
        self._divides_by_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return DDPJoinHook(self._take_part, self._leave_join)

    @property
    def join_device(self) -> torch.device:
        """The device of the messages that `Join` exchanges."""
        return next(self._origin.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The ranks over which gradients are averaged."""
        return self._group or dist.group.WORLD

    def _begin_iteration(
        self, averages: bool = False, buffers: bool = False, is_active: bool = True
    ) -> int:
        """Begin an iteration on all ranks; return the rank whose buffers are broadcast."""
        iteration = exchange_iteration(self._group, averages, buffers, is_active)
        if not self._divides_by_world_size:
            self._reducer.scale = dist.get_world_size(self._group) / iteration.active
        if not is_active and iteration.buffers:
            broadcast_tensors(list(self._origin.buffers()), self._group, iteration.source)
        if not is_active and iteration.averages:
            self._reducer.average_without_gradients()
        return iteration.source

    def _take_part(self) -> None:
        self._begin_iteration(is_active=False)

    def _leave_join(self, is_last: bool) -> None:
        source = find_last_joiner(is_last, self._group)
        tensors = [*self._origin.parameters(), *self._origin.buffers()]
        broadcast_tensors(tensors, self._group, source)
        self._reducer.scale = 1.0
        # torch leaves it enabled; each later forward would ask which ranks have data.
        self._join_config = type(self._join_config).construct_disabled_join_config()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the outputs of a model, including lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        yield from _tensors(vars(value))
