"""DistributedDataParallel: mean gradients over ranks, for a training loop that exists already.

It sees whole batches, not micro-batches, so the digest depends on the number of
ranks, as it does with torch's. It guarantees equal bits on all ranks and from run to
run, for every bucket size: each element is added along the tree over the ranks
(`lockstep.data_parallel.reducer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep.comm.transfer import broadcast_tensors
from lockstep.data_parallel.comm_hook import Hook
from lockstep.data_parallel.gradients import BUCKET_BYTES
from lockstep.data_parallel.join import DDPJoinHook, last_joiner, meet
from lockstep.data_parallel.reducer import Reducer
from lockstep.errors import UsageError
from lockstep.launcher.world import world
from lockstep.model.agreement import give_weights, require_same
from lockstep.model.description import describe_tensors
from lockstep.model.units import in_backward

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a module so that backward leaves the mean gradient of all ranks in `.grad`.

    Use it as torch's: each rank computes its own part of the
    batch, of equal size, with a loss that is a mean. The state dict has the
    module's own names, without a prefix, also for a compiled module. Parameters
    that get no gradient on some ranks count as zero there; those that get none
    anywhere keep `.grad = None`. Frozen parameters are left alone. Sparse gradients
    of Embedding and EmbeddingBag stay sparse.

    Parameters:
        module: the model, on this rank's device; rank 0's weights are given to all.
        broadcast_buffers: give rank 0's buffers to all before each forward in
            training mode.
        bucket_bytes: how many bytes of gradients travel in one message.
        group: the ranks that average, the whole world if None.
        gradient_as_bucket_view: let `.grad` be a view of the bucket, which the next
            backward overwrites, instead of a copy in memory of its own: one pass
            over the gradients less, and the bucket is all the memory they take.

    Raises UsageError without `lockstep.init()`, DisagreementError where the ranks'
    models differ, GradientError in backward for `create_graph=True` and for sparse
    gradients of other modules.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        broadcast_buffers: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        device = world().device
        self.module = module
        origin = self._origin
        self._prefix = "module." if origin is module else "module._orig_mod."
        self._broadcast_buffers = broadcast_buffers
        self._group = group
        require_same(describe_tensors("model", origin), "build the same model on every rank", group)
        give_weights(origin, group, device)
        named = list(origin.named_parameters())
        self._frozen = [(name, each) for name, each in named if not each.requires_grad]
        self._reducer = Reducer(
            named, _sparse_weights(origin), bucket_bytes, group, gradient_as_bucket_view
        )
        self._hook: Hook | None = None
        self._original_divisor = True
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, in training with rank 0's buffers."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen when its model was wrapped in "
                    "DistributedDataParallel, and is not now; its gradient would not be averaged: "
                    "wrap the model after unfreezing"
                )
        begins = torch.is_grad_enabled() and not in_backward()
        if begins:
            self._begin()
        outputs = self.module(*args, **kwargs)
        if begins:
            self._reducer.watch(_tensors(outputs))
        return outputs

    def _begin(self) -> None:
        """Do what comes before a forward that a backward will follow."""
        averages = self._reducer.enabled
        buffers = self.training and averages and self._broadcast_buffers
        source = 0
        if self._join_config.enable:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
            source = self._meet(averages, buffers)
        if averages:
            self._reducer.reset()
        if buffers:
            broadcast_tensors(list(self._origin.buffers()), self._group, source)

    @property
    def _origin(self) -> nn.Module:
        """The module without the compiler's wrapper; no attribute, which would register it."""
        origin: nn.Module = getattr(self.module, "_orig_mod", self.module)
        return origin

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local in the context; the first backward outside averages their sum."""
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` average the dense gradients; call it on every rank.

        The hooks of `torch.distributed.algorithms.ddp_comm_hooks` fit. `bucket` has the
        calls of `torch.distributed.GradBucket`; the hook returns a future of the vector
        of means, as long as `bucket.buffer()`. One bucket's hook is called after the one
        before it is done. The same bits on all ranks are the hook's to promise.

        Raises UsageError the second time, DisagreementError where ranks name other hooks.
        """
        if self._hook is not None:
            raise UsageError(
                "this DistributedDataParallel has a communication hook; there can be one only"
            )
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        require_same(
            {"the communication hook": name}, "register the same hook on every rank", self._group
        )
        self._hook = hook
        self._reducer.use(hook, state)

    # --- uneven inputs: `lockstep.data_parallel.join` ---------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for a loop in which some ranks have fewer batches than others.

        Within it an iteration is one forward and one backward. A rank whose data is at
        its end takes part without a gradient, and at the end takes the model of one that
        was the last. The mean is over all ranks, or with `divide_by_initial_world_size`
        False over those that still have data.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what `Join` calls on a rank without data; UsageError beside other wrappers."""
        if self._reducer.together:
            raise UsageError(
                "Join goes with one DistributedDataParallel on a group, and when this one was made "
                "there was "
                "another: make it with a group of its own, group=torch.distributed.new_group()"
            )
        self._original_divisor = bool(kwargs.get("divide_by_initial_world_size", True))
        return DDPJoinHook(self._iterate, self._leave)

    @property
    def join_device(self) -> torch.device:
        """The device of the messages that `Join` exchanges."""
        return next(self._origin.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The ranks that average."""
        return self._group or dist.group.WORLD

    def _meet(self, averages: bool = False, buffers: bool = False, active: bool = True) -> int:
        """Begin an iteration together; return the rank whose buffers are taken."""
        now = meet(self._group, averages, buffers, active)
        if not self._original_divisor:
            self._reducer.scale = dist.get_world_size(self._group) / now.active
        if not active and now.buffers:
            broadcast_tensors(list(self._origin.buffers()), self._group, now.source)
        if not active and now.averages:
            self._reducer.shadow()
        return now.source

    def _iterate(self) -> None:
        self._meet(active=False)

    def _leave(self, is_last: bool) -> None:
        source = last_joiner(is_last, self._group)
        tensors = [*self._origin.parameters(), *self._origin.buffers()]
        broadcast_tensors(tensors, self._group, source)
        self._reducer.scale = 1.0
        # torch leaves it on, and each forward to come would ask who has data.
        self._join_config = type(self._join_config).construct_disabled_join_config()


def _sparse_weights(module: nn.Module) -> set[torch.Tensor]:
    """Return the parameters whose modules give them sparse gradients."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {each.weight for each in module.modules() if isinstance(each, kinds) and each.sparse}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Find the tensors in what a model returns: in lists, mappings and dataclasses too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        yield from _tensors(vars(value))


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Name the entries of a state dict as the wrapped module does."""
    assert isinstance(module, DistributedDataParallel)
    inner = prefix + module._prefix
    for name in list(state):
        value = state.pop(name)  # every entry, so that the order stays
        state[prefix + name[len(inner) :] if name.startswith(inner) else name] = value


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Accept the entries of a state dict by the wrapped module's names."""
    assert isinstance(module, DistributedDataParallel)
    inner = prefix + module._prefix
    for name in list(state):
        value = state.pop(name)
        ours = name.startswith(prefix) and not name.startswith(inner)
        state[inner + name[len(prefix) :] if ours else name] = value
