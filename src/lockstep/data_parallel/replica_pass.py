"""One call of `ls.DataParallel`: forward and backward of all micro-batches on several devices.

    forward    scatter ─> replica after replica ─> merge buffers ─> gather
    backward   split the gradients of the outputs ─> replica after replica ─> add along the tree

All work is started by the calling thread, in the order of the micro-batches, so that code with a
state of its own runs in the same order on any number of devices. Accelerators compute what they
were given while the next ones get theirs. The generators of random numbers, which belong to the
process, are seeded for each micro-batch and scope as in the trainer (`lockstep.kernel.rng_scopes`).

A pass is connected to autograd by one function, whose inputs are the parameters of the module. Its
backward returns their sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lockstep.comm.sparse_gradients import add_sparse
from lockstep.data.assignment import assign_microbatches, on_one_host
from lockstep.data.microbatch import map_tensors
from lockstep.data_parallel.replica import Replica, replicate
from lockstep.data_parallel.scatter import (
    SplitGradient,
    count_samples,
    join_outputs,
    list_tensors,
    take_part,
)
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import GradientError, LossError, UsageError
from lockstep.kernel.loss_weights import WeightFunction, compute_shares, is_sum
from lockstep.kernel.rng_scopes import find_scopes
from lockstep.kernel.seeds import isolated
from lockstep.kernel.splitting import count_microbatches, split_evenly
from lockstep.kernel.tree import Node, TensorList, TreeAccumulator, add_present, nodes_of, total
from lockstep.model.native_seeder import make_rng_scopes

__all__ = ["Call", "ReplicaPass"]


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        module: The module.
        scope_names: The names of its blocks.
        devices: The devices; the first one gets outputs, buffers and sums.
        microbatches: The number of micro-batches of a batch.
        dim: The dimension of the samples.
        seed: The seed of all random numbers.
        step: The number of the step, from which the seeds of the RNG scopes are derived.
        args: The positional arguments; with a loss, the last one is the targets.
        kwargs: The arguments by name.
        loss: The loss function; None if the outputs of the module are the result.
        weight: The function of the weight of a micro-batch; None to count its samples.
    """

    module: nn.Module
    scope_names: Sequence[str]
    devices: Sequence[torch.device]
    microbatches: int
    dim: int
    seed: int
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None
    weight: WeightFunction | None


class ReplicaPass:
    """Forward and backward of one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._first = call.devices[0]
        samples = count_samples(call.args, call.kwargs, call.dim)
        self._spans = split_evenly(samples, count_microbatches(samples, call.microbatches))
        has_gradient = torch.is_grad_enabled()
        self._trained = [p for p in call.module.parameters() if p.requires_grad and has_gradient]
        tensors = list_tensors((call.args, call.kwargs))
        if has_gradient and any(tensor.requires_grad for tensor in tensors):
            raise UsageError(
                "ls.DataParallel computes gradients of parameters only, and an argument requires "
                "one: pass argument.detach(), or call the module itself"
            )
        self._shares = self._compute_shares()
        self._splits: list[SplitGradient] = []
        self._queues = self._make_queues()
        self._replicas = [replica for queue in self._queues for replica in queue]

    def _make_queues(self) -> list[list[Replica]]:
        """Return the micro-batches of each device, in ascending order, with new replicas."""
        call = self._call
        shares = self._shares
        parameters = list(call.module.parameters())
        buffers = list(call.module.buffers())
        assigned = assign_microbatches(len(self._spans), on_one_host(len(call.devices)))
        queues: list[list[Replica]] = []
        for number, (device, indices) in enumerate(zip(call.devices, assigned, strict=True)):
            values = {id(parameter): parameter.detach().to(device) for parameter in parameters}
            loss = call.loss
            queue = list[Replica]()
            if isinstance(loss, nn.Module) and device != self._first:
                loss = copy.deepcopy(loss).to(device)
            trained = [id(parameter) for parameter in self._trained]
            for index in (index for index in indices if index in shares):
                tensors: dict[int, torch.Tensor] = {
                    key: nn.Parameter(value, key in trained) for key, value in values.items()
                }
                leaves = [tensors[key] for key in trained]
                tensors |= {id(buffer): buffer.detach().to(device, copy=True) for buffer in buffers}
                module = replicate(call.module, tensors)
                span = self._spans[index]
                scopes = make_rng_scopes(
                    find_scopes(module, call.scope_names), module, call.seed, device
                )
                data = take_part((call.args, call.kwargs), span, call.dim, device)
                label = f"micro-batch {index} on {device} (device {number} of {len(call.devices)})"
                replica = Replica(
                    index=index,
                    size=len(span),
                    device=device,
                    label=label,
                    data=data,
                    module=module,
                    parameters=leaves,
                    scopes=scopes,
                    loss=loss,
                )
                queue.append(replica)
            queues.append(queue)
        return queues

    def _compute_shares(self) -> dict[int, float]:
        """Return the share of each micro-batch that is computed, by index."""
        call = self._call
        spans = self._spans
        if call.loss is not None and is_sum(call.loss):
            return dict.fromkeys(range(len(spans)), 1.0)
        if call.weight is None:
            return {index: len(span) / spans[-1].stop for index, span in enumerate(spans)}
        parts = (take_part(call.args, span, call.dim, self._first) for span in spans)
        weights = {index: float(call.weight(part)) for index, part in enumerate(parts)}
        if not sum(weights.values()) > 0:
            raise LossError(
                f"the weights of the batch's {len(spans)} micro-batches sum to "
                f"{sum(weights.values())}; check whether the targets of all samples are ignored"
            )
        return compute_shares(weights)

    # --- forward --------------------------------------------------------------------------------

    def forward(self) -> Any:
        """Compute all micro-batches, and return the joined outputs."""
        with self._isolated(), self._autocast(enabled=True):
            for replica in self._replicas:
                replica.forward(self._call.step)
        self._merge_buffers()
        values = self._join_outputs()
        if self._trained:
            columns = zip(*(replica.tensors for replica in self._replicas), strict=True)
            flags = [any(tensor.requires_grad for tensor in column) for column in columns]
            apply: Any = _ReplicaFunction.apply  # torch does not annotate it
            values = list(apply(self, values, flags, *self._trained))
        remaining = iter(values)
        return map_tensors(lambda _: next(remaining), self._replicas[0].outputs)

    def _merge_buffers(self) -> None:
        """Write the results of all micro-batches into the buffers of the module."""
        names = [name for name, _ in self._call.module.named_buffers()]
        if not names:
            return
        buffers = Buffers({"": self._call.module})
        leaves = len(self._spans)
        samples = sum(replica.size for replica in self._replicas)
        try:
            for replica in self._replicas:
                for slot, name in zip(buffers.slots, names, strict=True):
                    slot.install(_move(attrgetter(name)(replica.module), self._first))
                buffers.collect(replica.index, replica.size / samples)
        finally:
            buffers.restore()
        report = buffers.hash_results(is_alone=True)
        buffers.merge(report, [nodes_of(range(leaves), leaves)], leaves)

    def _join_outputs(self) -> list[torch.Tensor]:
        """Return the joined tensors of the outputs."""
        counts = {len(replica.tensors) for replica in self._replicas}
        if counts == {0} or len(counts) > 1:
            raise UsageError(
                f"{type(self._call.module).__name__} returned "
                f"{' or '.join(map(str, sorted(counts)))} tensors per micro-batch: return tensors, "
                "or tuples, lists or mappings of them, as many for each micro-batch"
            )
        joined = []
        for position in range(counts.pop()):
            parts = {replica.index: replica.tensors[position] for replica in self._replicas}
            joined.append(
                join_outputs(parts, self._shares, len(self._spans), self._call.dim, self._first)
            )
        self._splits = [split for _, split in joined]
        return [value for value, _ in joined]  # not kept here: autograd would never free them

    # --- backward -------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> TensorList:
        """Return the gradients of the parameters.

        Args:
            gradients: The gradients of the joined tensors.
        """
        if torch.is_grad_enabled():
            raise GradientError(
                "backward(create_graph=True) is not supported by ls.DataParallel, which computes "
                "gradients without a graph: use the module itself"
            )
        if not self._replicas:
            raise GradientError(
                "backward was called a second time through one call of ls.DataParallel: pass "
                "retain_graph=True to the first backward"
            )
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        with self._isolated(), self._autocast(enabled=False):
            for replica in self._replicas:
                replica.backward(self._splits, gradients, keeps_graph)
        leaves = len(self._spans)
        nodes: dict[Node, TensorList] = {
            (microbatch, microbatch + 1): [None] * len(self._trained)
            for microbatch in {*range(leaves)} - {*self._shares}
        }
        for queue in self._queues:
            sums: TreeAccumulator[TensorList] = TreeAccumulator(leaves, _add_gradients)
            for replica in queue:
                taken = [_take_gradient(parameter) for parameter in replica.parameters]
                sums.put((replica.index, replica.index + 1), taken)
            for node, values in sums.nodes.items():
                nodes[node] = [_move(value, self._first) for value in values]
        if not keeps_graph:
            # free their memory
            self._queues = []
            self._replicas = []
        return total(nodes, leaves, _add_gradients)

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Restore all generators after the body."""
        with ExitStack() as stack:
            for device in {*self._call.devices}:
                stack.enter_context(isolated(device, everything=True))
            yield

    @contextmanager
    def _autocast(self, *, enabled: bool) -> Iterator[None]:
        """Keep autocast in the body without its cache, or disable it for a backward.

        A cached weight would belong to the graph of one micro-batch.
        """
        with ExitStack() as stack:
            for kind in {device.type for device in self._call.devices}:
                if torch.is_autocast_enabled(kind):
                    dtype = torch.get_autocast_dtype(kind)
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


class _ReplicaFunction(torch.autograd.Function):
    """Connects a pass with the graph of the parameters."""

    @staticmethod
    def forward(ctx: Any, computed: ReplicaPass, values: Any, flags: Any, *trained: Any) -> Any:
        """Return the joined outputs, which have been computed."""
        ctx.computed = computed
        ctx.set_materialize_grads(False)
        pairs = zip(values, flags, strict=True)
        ctx.mark_non_differentiable(*(value for value, flag in pairs if not flag))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Return the gradients of the parameters."""
        return (None, None, None, *ctx.computed.backward(gradients))


def _move(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _take_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Remove and return the gradient of a tensor."""
    gradient = tensor.grad
    tensor.grad = None
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _add_gradients(left: TensorList, right: TensorList) -> TensorList:
    """Add two lists of gradients, the dense ones into the memory of the left one."""
    return [
        add_sparse(one, two)
        if one is not None and two is not None and (one.is_sparse or two.is_sparse)
        else add_present(one, two)
        for one, two in zip(left, right, strict=True)
    ]
