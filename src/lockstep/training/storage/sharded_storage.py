"""Sharded storage: torch's `fully_shard` divides parameters, gradients and optimizer state.

    the model              a unit per block, and one for the rest
    a unit's parameters    cut by rows over all ranks, or over those of a host; gathered for forward
                           and backward
    the average            cut in the same way

A block is left to the rest if it has no parameters, or shares one with another part of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from lockstep.data.assignment import Hosts
from lockstep.data_parallel.sharded_gradients import find_hook
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.sharded_tensors import is_sharded, local_part, local_rows, name_storage

__all__ = [
    "make_mesh",
    "require_shardable_model",
    "shard_copy",
    "shard_model",
    "shard_optimizer_state",
    "shard_state",
]


_meshes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""For each world, the mesh of hosts and their ranks, whose groups live as long."""


def make_mesh(hosts: Hosts, device: torch.device) -> Any:
    """Return the mesh of the ranks, or of hosts and their ranks if there are several."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise LayoutError(f'storage="sharded" needs torch 2.13, and this is {torch.__version__}')
    world = dist.group.WORLD
    assert world is not None
    if len(hosts) == 1:
        return DeviceMesh.from_group(world, device.type)
    if world not in _meshes:
        _meshes[world] = DeviceMesh(device.type, hosts, mesh_dim_names=("replicate", "shard"))
    return _meshes[world]


def require_shardable_model(module: nn.Module, mesh: Any, name: str = "") -> None:
    """Raise UsageError if `fully_shard` cannot divide the parameters of a model.

    Args:
        module: The model, or a block of it.
        mesh: The mesh of the ranks.
        name: The name of the block.
    """
    storage = name_storage(mesh)
    named = [*module.named_parameters(name)]
    if failure := find_hook(named):
        raise UsageError(failure)
    for name, parameter in named:
        if not parameter.dim():
            raise UsageError(
                f'storage="{storage}" cannot divide the parameter {name}, which has no dimension: '
                "let it be a vector of one element"
            )
        if not parameter.is_contiguous():
            raise UsageError(
                f'storage="{storage}" cannot divide the parameter {name} with strides '
                f"{parameter.stride()}: leave out memory_format, or call .contiguous() on it"
            )


def _require_one_dtype(parts: Sequence[nn.Module], module: nn.Module, mesh: Any) -> None:
    """Raise UsageError if parameters that are exchanged together have different dtypes."""
    own = {id(parameter) for part in parts for parameter in part.parameters()}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in own]
    for parameters in [*(list(part.parameters()) for part in parts), rest]:
        dtypes = {str(parameter.dtype) for parameter in parameters if parameter.requires_grad}
        if len(dtypes) > 1:
            raise UsageError(
                f'storage="{name_storage(mesh)}" cannot divide parameters of several dtypes '
                f"({', '.join(sorted(dtypes))}) in one block: convert them to one dtype, or let "
                "them be in different blocks"
            )


def shard_model(
    module: nn.Module,
    blocks: Sequence[str],
    mesh: Any,
    initialized: Iterable[str] = (),
    prepare: Callable[[nn.Module], None] = lambda part: None,
) -> None:
    """Call `fully_shard` with the blocks of a model, and with the model.

    Args:
        module: The model.
        blocks: The names of its blocks.
        mesh: The mesh of `make_mesh`.
        initialized: The names of its modules, each of which gets its weights when its name is
            taken; last the model's, "".
        prepare: Called with each module before it is sharded.
    """
    from torch.distributed.fsdp import fully_shard

    units = _list_units(module, blocks)
    _require_one_dtype([module.get_submodule(name) for name in units], module, mesh)
    for name in initialized or [*units, ""]:
        if name in units or not name:
            part = module.get_submodule(name)
            prepare(part)
            fully_shard(part, mesh=mesh)


def _list_units(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the names of the blocks that are sharded by themselves."""
    names = {part: name for name, part in module.named_modules()}
    parts = dict.fromkeys(module.get_submodule(name) for name in blocks)
    uses = Counter(_list_uses(module))
    return [
        names[part]
        for part in parts
        if (own := Counter(_list_uses(part)))
        and part is not module
        and all(uses[parameter] == count for parameter, count in own.items())
    ]


@torch.no_grad()
def shard_copy(copy: nn.Module, module: nn.Module, blocks: Sequence[str]) -> None:
    """Shard a copy of a model, whose parameters are on the meta device, and copy the values."""
    first: Any = next(module.parameters())  # all have its mesh and its device
    shard_model(copy, blocks, first.device_mesh)
    kept = [(part, dict(part._buffers)) for part in copy.modules()]  # some may be the same tensor
    copy.to_empty(device=first.device)
    for part, buffers in kept:
        part._buffers.update(buffers)
    for name, parameter in copy.named_parameters():
        local_part(parameter).copy_(local_part(module.get_parameter(name)))
    for name, buffer in copy.named_buffers():
        buffer.copy_(module.get_buffer(name))


def _list_uses(module: nn.Module) -> list[int]:
    """Return the identities of a module's parameters, each as often as a name refers to it."""
    return [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]


def _shard_like(saved: torch.Tensor, sharded: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is divided as another one, without messages.

    Args:
        saved: The whole tensor, the same on every rank, or the rows of this rank.
        sharded: A sharded tensor of the same shape; another tensor: `saved` is returned.
    """
    if not is_sharded(sharded) or saved.shape not in (sharded.shape, local_part(sharded).shape):
        return saved
    divided = torch.empty_like(sharded, dtype=saved.dtype)
    rows = saved[local_rows(sharded)] if saved.shape == sharded.shape else saved
    with torch.no_grad():
        local_part(divided).copy_(rows)
    return divided


def shard_state(whole: Mapping[str, Any], here: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict of whole tensors, or of rows, that are divided as those here."""
    if not any(isinstance(value, torch.Tensor) and is_sharded(value) for value in here.values()):
        return whole
    return {
        name: _shard_like(value, here[name])
        if isinstance(value, torch.Tensor) and isinstance(here.get(name), torch.Tensor)
        else value
        for name, value in whole.items()
    }


def shard_optimizer_state(
    whole: Mapping[str, Any], parameters: Sequence[torch.Tensor]
) -> Mapping[str, Any]:
    """Return an optimizer's state dict, with tensors that are divided as its parameters."""
    if not any(map(is_sharded, parameters)):
        return whole
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    like = dict(zip(numbers, parameters, strict=False))
    state = {
        number: {
            key: _shard_like(value, like[number]) if isinstance(value, torch.Tensor) else value
            for key, value in entries.items()
        }
        for number, entries in whole["state"].items()
    }
    return {**whole, "state": state}
