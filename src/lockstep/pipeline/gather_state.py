"""Gathers the state of a model that is distributed over pipeline stages.

    rank 0   blocks 0-4         ──┐
    rank 1   blocks 5-9         ──┴──> all names, in the model's order, on every rank

Tensors that a rank does not hold are on the meta device, with shape and dtype. Tensors that it
holds are never overwritten, so replicas that diverged keep different digests. Every rank of the
world must call the public functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_bytes, broadcast_tensors

__all__ = ["gather_model_state", "gather_optimizer_state"]

Source = Callable[[str], int]


def gather_model_state(
    state: Mapping[str, Any], source: Source, device: torch.device
) -> dict[str, Any]:
    """Return the state dict of the whole model.

    Args:
        state: This rank's state dict; tensors of other ranks are on the meta device.
        source: A function that returns the rank that sends a tensor, by its name.
        device: The device for received tensors.
    """
    result = {
        name: torch.empty_like(value, device=device)
        if isinstance(value, torch.Tensor) and value.is_meta
        else value
        for name, value in state.items()
    }
    tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    _broadcast(tensors, source, {name for name in tensors if result[name] is state[name]})
    return result


def gather_optimizer_state(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str], source: Source, device: torch.device
) -> dict[str, Any]:
    """Return the optimizer's state dict with the state of every parameter.

    Args:
        optimizer: An optimizer of all parameters, in the same order on every rank.
        names: The names of the parameters.
        source: A function that returns the rank that sends the state of a parameter, by its name.
        device: The device for received tensors.
    """
    packed = optimizer.state_dict()
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    order = [names[tensor] for tensor in parameters]
    rank = dist.get_rank()
    # Ignore the local state of parameters on other ranks: it may hold a stale step counter.
    here = {n: state for n, state in packed["state"].items() if not parameters[n].is_meta}
    mine = {
        index: {entry: _describe(value) for entry, value in state.items()}
        for index, state in packed["state"].items()
        if source(order[index]) == rank
    }
    message = json.dumps(mine).encode()
    everyone = all_gather_bytes(message, "gathering the state of the optimizer")
    states: dict[int, dict[str, Any]] = {}
    for described in map(json.loads, everyone):
        for text, entries in described.items():
            ours = here.get(int(text), {})
            states[int(text)] = {
                entry: _allocate(
                    description, ours.get(entry), device, source(order[int(text)]) == rank
                )
                for entry, description in entries.items()
            }
    tensors = {
        f"{index}/{entry}{part}": tensor
        for index in sorted(states)
        for entry, value in states[index].items()
        if isinstance(value, torch.Tensor)
        for part, tensor in _parts(value).items()
    }
    held = {f"{index}/{entry}" for index, state in here.items() for entry in state}
    _broadcast(tensors, lambda name: source(order[int(name.partition("/")[0])]), held)
    return {**packed, "state": {index: states[index] for index in sorted(states)}}


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the dense tensors that represent a tensor, by the suffix of their names."""
    if tensor.is_sparse:
        return {"/indices": tensor._indices(), "/values": tensor._values()}
    return {"": tensor}


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    if value.is_sparse:
        parts = [_describe(part) for part in _parts(value).values()]
        return {"parts": parts, "shape": list(value.shape), "coalesced": value.is_coalesced()}
    dtype = str(value.dtype).removeprefix("torch.")
    layout = {"dtype": dtype, "shape": list(value.shape), "strides": list(value.stride())}
    # Counters of steps are on the CPU, beside moments on the device.
    return layout | {"is_on_cpu": value.device.type == "cpu"}


def _allocate(
    description: Mapping[str, Any], here: Any, device: torch.device, is_source: bool
) -> Any:
    """Return a value; for a tensor, the local one or a new one to receive it.

    A sparse tensor is received into a new one, because the local one may have another number of
    rows.
    """
    if "parts" in description:
        if is_source:
            return here
        indices, values = (
            _allocate(part, None, device, is_source=False) for part in description["parts"]
        )
        return torch.sparse_coo_tensor(
            indices.zero_(),  # valid indices, until the real ones are received
            values,
            description["shape"],
            check_invariants=False,
            is_coalesced=description["coalesced"],
        )
    if "dtype" not in description:
        return description["value"]
    if isinstance(here, torch.Tensor) and not here.is_meta:
        return here
    dtype = getattr(torch, description["dtype"])
    shape, strides = description["shape"], description["strides"]
    device = torch.device("cpu") if description["is_on_cpu"] else device
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _broadcast(tensors: Mapping[str, torch.Tensor], source: Source, held: Set[str]) -> None:
    """Receive each tensor from its source, except those that are held here."""
    rank = dist.get_rank()
    groups: dict[int, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        unread = name in held and source(name) != rank
        groups.setdefault(source(name), []).append(torch.empty_like(tensor) if unread else tensor)
    for sender in sorted(groups):
        broadcast_tensors(groups[sender], None, sender)
