"""Gradients of a model that torch's `fully_shard` has divided over the ranks.

    micro-batch jR + r on rank r     backward ──tree reduce-scatter──> shard of node j in `.grad`
    the next turns                   shards of nodes are added along the tree of M / R leaves
    end of the step                  shards of the nodes of all copies, along the rest of the tree

R is a power of two that divides M, and in turn j the R ranks compute the micro-batches jR to
jR + R - 1. The shards therefore have the bits of one rank that adds all M leaves by itself. If
there are copies of the shards (hybrid sharding), each one has its own R ranks, and a range of the
micro-batches. torch gathers parameters and frees them; nothing but the order of the additions is
Lockstep's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep.checksum import checksum
from lockstep.comm.collectives import all_gather_bytes
from lockstep.comm.reproducible_all_reduce import ReproducibleAllReduce, reproducible_all_reduce
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data.assignment import Hosts, assign_nodes, on_one_host
from lockstep.data_parallel.block_inputs import find_reordered_sum
from lockstep.data_parallel.planned_buckets import BucketPlanner, StepTree
from lockstep.data_parallel.sharded_draws import draw_alike
from lockstep.data_parallel.tree_reduce_scatter import CallOrder, TreeReduceScatter
from lockstep.kernel.errors import UsageError
from lockstep.kernel.rng_scopes import is_in_backward
from lockstep.kernel.tree import TensorList, TreeAccumulator
from lockstep.malloc import return_large_blocks
from lockstep.model.gradient_hashes import NO_HASHES
from lockstep.model.watched_calls import ComputeAgain
from lockstep.sharded_tensors import is_sharded, local_part

__all__ = [
    "ShardedGradients",
    "ShardingMesh",
    "find_hook",
    "find_mesh",
    "free_gathered",
    "is_fully_sharded",
]

SAMPLED = 64
"""The number of elements of each gradient that are compared to find changes of all of them."""


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@dataclass(frozen=True)
class ShardingMesh:
    """The ranks of a sharded model, as seen by this rank.

    Attributes:
        ranks: All of them; None for the default group.
        shards: Those over which this rank's copy is sharded.
        copies: Those with the same shard of each copy; None if there is one copy.
        hosts: The ranks of each copy, which is usually on one host.
    """

    ranks: dist.ProcessGroup | None
    shards: dist.ProcessGroup
    copies: dist.ProcessGroup | None
    hosts: Hosts


def find_mesh(module: nn.Module) -> ShardingMesh:
    """Return the ranks of a sharded model.

    Raises:
        UsageError: A parameter is sharded in a way that cannot be exact, or not at all.
    """
    groups: list[dist.ProcessGroup] = []
    for name, parameter in module.named_parameters():
        sharded: Any = parameter
        if not is_sharded(parameter):
            raise UsageError(
                f"the parameter {name} is not sharded: call fully_shard(model) with the whole "
                "model, after its blocks, and without ignored_params"
            )
        mesh = sharded.device_mesh
        placements = sharded.placements
        own = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        groups = groups or own
        hosts = tuple(map(tuple, mesh.mesh.reshape(-1, mesh.size(-1)).tolist()))
        is_whole = mesh.size() == dist.get_world_size() and all(
            [*ranks] == sorted(ranks) for ranks in hosts
        )
        if (
            own != groups
            or mesh.ndim > 2
            or not placements[-1].is_shard(0)
            or (mesh.ndim == 2 and not (placements[0].is_replicate() and is_whole))
        ):
            raise UsageError(
                f"the parameter {name} has the placements {placements} on {mesh}: call fully_shard "
                "with one mesh, of one dimension or of two (replicate, shard) with all ranks in "
                "ascending order, and without shard_placement_fn"
            )
        if parameter.device.type != mesh.device_type:
            raise UsageError(
                f"the parameter {name} is kept on {parameter.device.type}: leave offload_policy out"
            )
    if len(groups) == 1:
        return ShardingMesh(groups[0], groups[0], None, on_one_host(dist.get_world_size(groups[0])))
    return ShardingMesh(None, groups[1], groups[0], hosts)


def free_gathered(module: nn.Module) -> None:
    """Free the parameters that earlier calls of a sharded model have gathered, as to evaluate it.

    Raises:
        UsageError: A block was called before the model.
    """
    for name, part in module.named_modules():
        if not is_fully_sharded(part):
            continue
        sharded: Any = part
        if part is not module and sharded._get_fsdp_state()._is_root:
            raise UsageError(
                f"{name} was called before the model that contains it, and fully_shard takes the "
                "first module that is called for the whole model: call the model first, or "
                "ls.exact before both"
            )
        sharded.reshard()


def find_hook(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return what is wrong with a hook on a parameter, or "".

    torch drops such a hook, or calls it in each turn.
    """
    for name, parameter in parameters:
        hooks: Any = parameter._backward_hooks
        if hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return (
                f"the parameter {name} has a hook, which a sharded model does not call with whole "
                "gradients: leave it out, or do not shard the model"
            )
    return ""


# It has many methods: a step, an audit and the script between steps each gather and free shards.
class ShardedGradients:
    """Adds the gradients of one step over its micro-batches and over the ranks.

    After `reduce`, each `.grad` is this rank's shard of the sum (`DTensor`).

    Args:
        parameters: Names and parameters, the same on every rank.
        module: The model, on which `fully_shard` was called.

    Attributes:
        mesh: The ranks.
        failure: Why the gradients of this step cannot be added; "" if they can.
        can_launch_early: Always False.
        is_observed: Whether whole gradients are hashed for `hash_current`.

    Raises:
        UsageError: torch is too old, or a parameter cannot be sharded exactly.
    """

    can_launch_early = False

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        module: nn.Module,
    ) -> None:
        if not hasattr(module, "set_reduce_scatter_unused_params"):
            raise UsageError(f"sharding needs torch 2.13: this is {torch.__version__}")
        if sparse := sparse_weights(module.modules()):
            (name, *_) = [name for name, parameter in parameters if parameter in sparse]
            raise UsageError(
                f"the parameter {name} gets sparse gradients, which torch does not shard: let its "
                "module have sparse=False"
            )
        if failure := find_hook(parameters):
            raise UsageError(failure)
        self._parameters = list(parameters)
        self._module = module
        self._is_open = False
        self.failure = ""
        self._is_computing = False
        self.is_observed = False
        self._hashes = dict[int, int]()
        self.mesh = find_mesh(module)
        sharded: Any = parameters[0][1]  # all have the same mesh
        draw_alike(sharded.device_mesh)
        self._shards = dist.get_world_size(self.mesh.shards)
        self._leaves = 1
        self._planned = tuple[Any, ...]()
        self._buckets: list[ReproducibleAllReduce] = []  # of the gradients that are planned
        numbers: dict[torch.Tensor, int] = {
            parameter: number for number, (_, parameter) in enumerate(parameters)
        }
        calls = CallOrder()
        states = set[Any]()
        self._units: list[TreeReduceScatter] = []
        for name, part in module.named_modules():
            if not is_fully_sharded(part):
                continue
            about = name or "the model"
            unit = TreeReduceScatter(about, len(states), part, calls, numbers, self._hash)
            if unit.state not in states:  # one group may have several modules
                states.add(unit.state)
                self._units.append(unit)
                unit.install()
        self._require_one_dtype()
        self._sums = TreeAccumulator[TensorList](1, _add_lists)
        self._roots: list[tuple[Any, int]] = []  # the outputs from which backward began
        root: Any = module
        if not any(parameter.is_meta for _, parameter in parameters):
            # Otherwise torch would take the first module that is called for the root.
            root._get_fsdp_state()._lazy_init()
        # First, before torch gathers the parameters.
        begin_call: Any = torch.compiler.disable(self._begin_call)
        module.register_forward_pre_hook(begin_call, prepend=True)
        module.register_forward_hook(torch.compiler.disable(self._end_call))
        if dist.get_rank() > 0:  # torch warns of outputs that are views, alike on every rank
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        return_large_blocks()  # gathered parameters, and the whole model before it was divided

    def begin(
        self, leaves: int, hosts: Hosts, announce: Callable[[], object] | None = None
    ) -> ShardedGradients:
        """Start a step and empty `.grad`; the arguments are those of `GradientReducer.begin`."""
        self.clear()
        for unit in self._units:  # which may be gathered: `ls.exact` begins a step in a call
            unit.begin_step()
        self._require_one_dtype()
        self._is_open = True
        self._leaves = leaves // self._shards
        self._sums = TreeAccumulator(self._leaves, _add_lists)
        return self

    def _require_one_dtype(self) -> None:
        """Raise UsageError if gradients that torch exchanges together have different dtypes."""
        for unit in self._units:
            dtypes = sorted(map(str, unit.find_dtypes()))
            if len(dtypes) > 1:
                raise UsageError(
                    f"{unit.name} has parameters of several dtypes ({', '.join(dtypes)}), whose "
                    "gradients are exchanged together: convert them to one dtype, or let them be "
                    "in different blocks, each of which is sharded by itself"
                )

    def clear(self) -> None:
        """Empty `.grad` of every parameter, and discard the accumulated gradients."""
        self._sums.nodes.clear()
        if self._is_open:  # an exception may have left torch in the middle of a pass
            self._reset_pass()
        self._is_open = False
        self.failure = ""
        self._hashes.clear()
        for _, parameter in self._parameters:
            parameter.grad = None
        for unit in self._units:
            unit.end_microbatch()

    def _reset_pass(self) -> None:
        """Let torch forget an unfinished pass."""
        root: Any = self._module
        if root._get_fsdp_state()._is_root is not None:  # otherwise the model was never called
            root.reset_iter_state()

    def reshard(self) -> None:
        """Free the parameters that are gathered, so that the next call gathers their new values.

        torch keeps those of the whole model after a call that no backward pass follows, such as an
        evaluation, and does not gather them again, even if the shards have been written to.
        """
        for unit in self._units:
            unit.reshard()

    def computing(self) -> AbstractContextManager[None]:
        """Free the parameters that are gathered; return the context of a step's micro-batches.

        In the body, backward follows a call of the model with gradients, and needs what it has
        gathered. A call outside of it leaves nothing: `module.parameters()` are the shards.
        """
        self.reshard()
        return self._computing()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False
            self.reshard()

    def _begin_call(self, _module: nn.Module, _inputs: Any) -> None:
        """Free what an earlier call of the model has left, before the parameters are gathered."""
        if not is_in_backward():  # which computes activations again, with the same parameters
            self.reshard()

    def _end_call(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Note the outputs of the model that get a gradient."""
        if self._is_computing and torch.is_grad_enabled():
            self._roots = []
        elif not is_in_backward():
            self.reshard()
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(partial(self._note_root, output.grad_fn, output.output_nr))

    def _note_root(self, node: Any, number: int, _: torch.Tensor) -> None:
        self._roots.append((node, number))

    def _find_failure(self) -> str:
        """Return why the gradients of a micro-batch differ from those of the whole model, or ""."""
        if failure := find_hook(self._parameters):  # also one that was added since
            return failure
        switched = [number for unit in self._units for number in unit.find_switched()]
        if switched:
            return (
                f"requires_grad of the parameter {self._parameters[switched[0]][0]} has changed "
                "while the micro-batches of a step were computed, which ranks do at different "
                "times: change it between two steps, on all ranks"
            )
        for unit in self._units:
            for number in unit.find_written():
                return (
                    f"the parameter {self._parameters[number][0]} was written during forward or "
                    "backward, which a sharded model forgets: update it after the step, on all "
                    "ranks"
                )
        node = find_reordered_sum([*dict.fromkeys(self._roots)])
        self._roots = []
        if node is None:
            return ""
        (name,) = (unit.name for unit in self._units if unit.has_group(node.param_group))
        return (
            f"fully_shard changes the sum of the gradients of an input of {name}, which does not "
            "use it, or is not the only one that does: call fully_shard with a module that "
            "contains all uses, or do not shard the model"
        )

    def enter_group(self) -> None:
        """Do nothing: nothing is planned for a group."""

    @contextmanager
    def hashing(self) -> Iterator[None]:
        """Hash whole gradients in the body."""
        was_observed = self.is_observed
        self.is_observed = True
        try:
            yield
        finally:
            self.is_observed = was_observed

    def _hash(self, number: int, gradient: torch.Tensor) -> None:
        if self.is_observed:
            self._hashes[number] = checksum(gradient)

    def hash_current(self) -> dict[str, int]:
        """Return hashes of the micro-batch's whole gradients by the names of their parameters."""
        return {
            self._parameters[number][0]: value for number, value in sorted(self._hashes.items())
        }

    @torch.no_grad()
    def accumulate(self, microbatch: int) -> None:
        """Move the shards in `.grad`, of the micro-batches of a turn, to a leaf of the tree."""
        gradients: TensorList = [parameter.grad for _, parameter in self._parameters]
        for unit in self._units:
            for number in unit.end_microbatch():
                gradients[number] = None
        self.failure = self.failure or self._find_failure()
        for _, parameter in self._parameters:
            parameter.grad = None
        self._hashes.clear()
        turn = microbatch // self._shards
        self._sums.put((turn, turn + 1), gradients)

    def hash_again(self, compute: ComputeAgain) -> tuple[dict[str, int], torch.Tensor]:
        """Compute a micro-batch again; return the hashes of its gradients, and its loss.

        They are hashed when they are whole, so none is freed.
        """
        _, loss = compute(lambda root: nullcontext(NO_HASHES))
        return self.hash_current(), loss

    def discard(self) -> None:
        """Forget a micro-batch that was computed again, also if an exception ended it."""
        self._reset_pass()
        for unit in self._units:
            unit.end_microbatch()
            unit.find_switched()
        self._roots = []
        self._hashes.clear()

    def find_any(self, value: bool) -> bool:
        """Return whether a value is true on any rank that gathers parameters with this one."""
        about = "agreeing on a repetition of a sharded model"
        with _disable_current_modes():  # which may record the operators of a repetition
            return any(map(any, all_gather_bytes(bytes([value]), about, self.mesh.shards)))

    def skip(self, microbatch: int) -> None:
        """Refuse the step: other ranks have added the gradients of this micro-batch to theirs."""
        self.failure = (
            f"micro-batch {microbatch} has a weight of 0, and a sharded model adds the gradients "
            "of all micro-batches: leave out samples without weight"
        )
        self.accumulate(microbatch)

    def pack(self) -> bytes:
        """Return nothing: gradients are exchanged in backward."""
        return b""

    def watch_backward(self, loss: torch.Tensor, microbatch: int) -> AbstractContextManager[None]:
        """Return a context without an effect."""
        return nullcontext()

    def launch_remaining(self) -> None:
        """Do nothing: nothing is launched early."""

    def used_parameter_mask(self) -> str:
        """Return, as a hex number, a mask whose bit n is set if parameter n has a gradient."""
        columns = zip(*self._sums.nodes.values(), strict=True)
        used = [n for n, column in enumerate(columns) if any(v is not None for v in column)]
        return f"{sum(1 << number for number in used):x}"

    def sample(self) -> torch.Tensor:
        """Return bytes of each shard in `.grad`, to find later changes of all its elements.

        The versions of sharded tensors do not tell: torch's loops over tensors leave them.
        """
        grads = [local_part(p.grad) for _, p in self._parameters if p.grad is not None]
        first = [grad.reshape(-1)[:SAMPLED].clone().view(torch.uint8) for grad in grads]
        return torch.cat(first) if first else torch.empty(0, dtype=torch.uint8)

    def reduce(self, mask: str, statuses: Sequence[bytes] = ()) -> None:
        """Set `.grad` of every parameter to this rank's shard of the sum over all micro-batches."""
        # Also after an audit that was given up.
        self._is_open = False
        self.is_observed = False
        if self.mesh.copies is not None:
            self._add_copies([n for n in range(len(self._parameters)) if int(mask, 16) >> n & 1])
            return
        (sums,) = self._sums.nodes.values()
        self._sums.nodes.clear()
        for (_, parameter), gradient in zip(self._parameters, sums, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def _add_copies(self, used: Sequence[int]) -> None:
        """Set the `.grad` of used parameters to the sums of the shards of all copies."""
        held = {
            node: {n: None if (grad := grads[n]) is None else local_part(grad) for n in used}
            for node, grads in self._sums.nodes.items()
        }
        self._sums.nodes.clear()
        if self._planned != (self._leaves, *used):
            self._planned = (self._leaves, *used)
            self._buckets = self._plan_buckets(used)
        sums = dict(reproducible_all_reduce(self._buckets, held))
        held.clear()
        for number in used:
            parameter = self._parameters[number][1]
            parameter.grad = torch.empty_like(parameter)
            if (vector := sums.get(number)) is not None:
                local_part(parameter.grad).view(-1).copy_(vector)

    def _plan_buckets(self, used: Sequence[int]) -> list[ReproducibleAllReduce]:
        """Return the sums over the copies of the gradients of these parameters."""
        mesh = self.mesh
        group = self.mesh.copies
        nodes = assign_nodes(self._leaves, on_one_host(len(mesh.hosts)))
        # The ranks of the group need not be in the order of the copies.
        copies = [
            next(number for number, ranks in enumerate(mesh.hosts) if rank in ranks)
            for rank in dist.get_process_group_ranks(group)
        ]
        parts = [(name, local_part(parameter)) for name, parameter in self._parameters]
        planner = BucketPlanner(parts, group, None)
        buckets = planner.plan([n for n in used if parts[n][1].numel()])
        return planner.make_sums(buckets, StepTree(self._leaves, [nodes[copy] for copy in copies]))


def _add_lists(left: TensorList, right: TensorList) -> TensorList:
    """Add the shards of two nodes, into the memory of the left one."""
    return [
        two if one is None else one if two is None else _add(one, two)
        for one, two in zip(left, right, strict=True)
    ]


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    local_part(left).add_(local_part(right))
    return left
