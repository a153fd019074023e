"""The reduce-scatter of torch's `fully_shard`, with the additions in the order of the tree.

torch calls it in backward, once for each group of parameters and micro-batch:

    rank r, micro-batch jR + r       | shard 0 | shard 1 | ...         the whole gradients
    announcement                     the group and its parameters with a gradient
    all-to-all                       rank s gets shard s of the leaves jR, ..., jR + R - 1
    addition on rank s               shard s of the node (jR, (j + 1)R)

If copies of the shards are on other hosts, torch would add each turn over the copies in an order
of its own. This is switched off: the sums of all turns are added at the end of the step.

The leaves travel in the dtype of the policy (`reduce_dtype`), and are added in that of the
parameters: which additions are rounded to which dtype does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.activity import Waiting
from lockstep.comm.collectives import all_gather_bytes
from lockstep.data_parallel.named_all_gather import NamedAllGather
from lockstep.kernel.errors import UsageError
from lockstep.kernel.tree import add_present, total

__all__ = ["CallOrder", "TreeReduceScatter"]


class CallOrder:
    """The order in which the sharded modules were called, which all ranks must share."""

    def __init__(self) -> None:
        self._hash = 0

    def note(self, number: int) -> None:
        """Note a call."""
        self._hash = (self._hash * 1_000_003 + number + 1) % (1 << 32)

    def __str__(self) -> str:
        """Return a text that differs after other calls."""
        return f"{self._hash:08x}"


# It has many attributes: what is known of each whole parameter between its gathering and the end
# of a micro-batch, which torch's own objects do not keep.
class TreeReduceScatter:
    """The reduce-scatter of the parameters of one sharded module, or of several in one group.

    Args:
        name: The name of the module, for messages.
        number: Its number among the sharded modules.
        module: The module.
        calls: The order of the calls of all sharded modules.
        numbers: The numbers of the model's parameters.
        note: A function that is called with the number of a parameter and its whole gradient in a
            micro-batch, before that is added to others.

    Attributes:
        name: The name of the module.
        state: What torch keeps for the modules of the group.
    """

    def __init__(
        self,
        name: str,
        number: int,
        module: Any,
        calls: CallOrder,
        numbers: Mapping[torch.Tensor, int],
        note: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.name = name
        self._number = number
        self._module = module
        self._calls = calls
        self.state = module._get_fsdp_state()
        self._parts = [part for g in self.state._fsdp_param_groups for part in g.fsdp_params]
        self._numbers = [numbers[part.sharded_param] for part in self._parts]
        self._note = note
        # Another dimension of the mesh has the copies of each shard.
        self._has_copies = any(part.sharded_param.device_mesh.ndim > 1 for part in self._parts)
        self._used = [False] * len(self._parts)
        self._present: list[bool] | None = None
        self._watched: set[int] = set()  # the parameters whose gradients are noted
        # Which parameters were trained when they were gathered, now and first in the step.
        self._trained: dict[int, bool] = {}
        self._trained_first: dict[int, bool] = {}
        self._versions: dict[int, int] = {}  # of the whole parameters
        self._allocations = 0

    def install(self) -> None:
        """Let torch call this object."""
        # torch's own hooks are not compiled either; the order of calls would be a guard.
        note: Any = torch.compiler.disable(self._note_call)
        for module in self.state._modules:
            module.register_forward_pre_hook(note)
        if self._parts:
            for group in self.state._fsdp_param_groups:
                group._all_gather_comm = NamedAllGather(self.name, group._all_gather_comm)
            self._module.set_custom_reduce_scatter(self)
            self._module.set_gradient_divide_factor(1.0)
            self._module.set_force_sum_reduction_for_comms(True)
            # A parameter without a gradient on one rank only has a place in the exchange, too.
            self._module.set_reduce_scatter_unused_params(True, recurse=False)
        if self._has_copies:
            self._module.set_requires_all_reduce(False, recurse=False)

    def begin_step(self) -> None:
        """Begin a step."""
        self._trained_first = {}

    def reshard(self) -> None:
        """Free the parameters of the group if they are gathered."""
        self._keep_switches()
        self._trained = {}
        for module in self.state._modules:
            module.reshard()

    def end_microbatch(self) -> list[int]:
        """End a micro-batch; return the parameters without a gradient on any rank."""
        used = self._present or self._used
        self._used = [False] * len(self._parts)
        self._present = None
        self._allocations = 0
        for group in self.state._fsdp_param_groups:
            group._partial_reduce_output = None  # to which torch would add the next micro-batch
        return [number for number, is_used in zip(self._numbers, used, strict=True) if not is_used]

    def has_group(self, group: Any) -> bool:
        """Return whether torch gathers the parameters of this object in a group."""
        return group in self.state._fsdp_param_groups

    def find_written(self) -> list[int]:
        """Return the parameters that were written since the last call, whose writes are lost."""
        before = self._versions
        self._versions = {}
        for index, part in enumerate(self._parts):
            if index in before or hasattr(part, "_unsharded_param"):
                self._versions[index] = part.unsharded_param._version
        return [self._numbers[index] for index in before if before[index] != self._versions[index]]

    def find_switched(self) -> list[int]:
        """Return the parameters that were frozen or thawed since the first micro-batch of a step.

        Each rank has added other micro-batches by then.
        """
        switched = self._keep_switches()
        for index, is_trained in self._trained.items():
            if self._trained_first.setdefault(index, is_trained) != is_trained:
                switched.append(self._numbers[index])
        self._trained = {}
        return switched

    def _keep_switches(self) -> list[int]:
        """Return the parameters that were frozen or thawed while they were gathered.

        What `module.parameters()` then has is the gathered parameter; torch forgets what is set
        there, and takes the value of the shard the next time.
        """
        switched = []
        for index, was_trained in self._trained.items():
            part = self._parts[index]
            if part.unsharded_param.requires_grad != was_trained:
                part.sharded_param.requires_grad_(not was_trained)
            if part.sharded_param.requires_grad != was_trained:
                switched.append(self._numbers[index])
        return switched

    def find_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the parameters that are trained."""
        return {
            part.sharded_param.dtype for part in self._parts if part.sharded_param.requires_grad
        }

    def _list_members(self) -> list[int]:
        """Return the parameters whose gradients torch passes in this micro-batch.

        Not those whose shard requires a gradient: a script may have changed that since.
        """
        return [
            index
            for index, part in enumerate(self._parts)
            if self._used[index]
            or (hasattr(part, "_unsharded_param") and part.unsharded_param.requires_grad)
        ]

    def _note_call(self, _module: nn.Module, _inputs: Any) -> None:
        """Note a call, and watch the whole parameters, which torch has gathered for it."""
        self._calls.note(self._number)
        for index, part in enumerate(self._parts):
            self._versions.setdefault(index, part.unsharded_param._version)
            self._trained.setdefault(index, part.unsharded_param.requires_grad)
            if part.unsharded_param.requires_grad and index not in self._watched:
                self._watched.add(index)
                note = partial(self._note_gradient, index)
                part.unsharded_param.register_post_accumulate_grad_hook(note)

    def _note_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # frozen since forward, which `find_switched` tells
            return
        self._used[index] = True
        self._note(self._numbers[index], parameter.grad)

    # --- called by torch ----------------------------------------------------------------------

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory: first for the gradients, then for this rank's shard of their sum."""
        self._allocations += 1
        if self._allocations > 2:
            raise UsageError(
                f"{self.name} was called several times in a micro-batch, and torch adds the "
                "gradients of each call over the ranks: call it once, or call fully_shard with a "
                "module that contains all calls instead"
            )
        if self._allocations == 1:
            return torch.empty(*size, dtype=dtype, device=device)
        # Of the parameters that are trained: the others may have a dtype of their own.
        members = [self._parts[index] for index in self._list_members()]
        (kind,) = {part.sharded_param.dtype for part in members}
        shards = torch.empty(*size, dtype=kind, device=device)
        if self._has_copies:
            self._set_gradients(shards, members)
        return shards

    def _set_gradients(self, shards: torch.Tensor, trained: Sequence[Any]) -> None:
        """Let `.grad` be this rank's shards, as torch does if it adds them over all copies."""
        lengths = [part.padded_sharded_param_size.numel() for part in trained]
        for part, vector in zip(trained, shards.split(lengths), strict=True):
            rows = vector[: part.sharded_size.numel()].view(part.sharded_size)
            part.sharded_param.grad = part.to_sharded_dtensor(rows)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add the gradients of all ranks, and return when this rank's shard is complete.

        Raises:
            DisagreementError: The ranks have called other modules.
            UsageError: They train other parameters of this one. Both are raised on every rank.
        """
        about = f"adding the gradients of {self.name} after the calls {self._calls}"
        trained = self._list_members()
        is_trained = [index in trained for index in range(len(self._parts))]
        mine = bytes([*self._used, *is_trained])
        flags = all_gather_bytes(mine, about, group)
        if any(rank[len(self._parts) :] != mine[len(self._parts) :] for rank in flags):
            raise UsageError(
                f"the ranks train different parameters of {self.name} in the same turn of "
                "micro-batches: change requires_grad between two steps, on all ranks"
            )
        columns = [*zip(*(rank[: len(self._parts)] for rank in flags), strict=True)]
        self._present = [any(column) for column in columns]
        received = torch.empty_like(input_tensor)
        with Waiting(f"reduce_scatter of the gradients of {self.name}"):
            dist.all_to_all_single(received, input_tensor, group=group)
        rows = [row.to(output_tensor.dtype) for row in received.chunk(len(flags))]
        if all(all(columns[index]) for index in trained):
            output_tensor.copy_(_add(rows))
            return
        lengths = [self._parts[index].padded_sharded_param_size.numel() for index in trained]
        members = zip(*[row.split(lengths) for row in rows], strict=True)
        sums = output_tensor.zero_().split(lengths)
        for index, values, into in zip(trained, members, sums, strict=True):
            if self._present[index]:
                pairs = zip(values, columns[index], strict=True)
                into.copy_(_add([value if is_used else None for value, is_used in pairs]))


def _add(values: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the sum of leaves along the tree; None is absent, and does not count as zero."""
    leaves = {(leaf, leaf + 1): value for leaf, value in enumerate(values)}
    added = total(leaves, len(leaves), add_present)
    assert added is not None
    return added
