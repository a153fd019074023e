"""Gathers the state of a model that is distributed over pipeline stages.

    rank 0   blocks 0-4         ──┐
    rank 1   blocks 5-9         ──┴──> all names, in the model's order, on every rank

Tensors that a rank does not hold are on the meta device, with shape and dtype. Tensors that it
holds are never overwritten, so replicas that diverged keep different digests. Every rank of the
world must call the public functions.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_bytes, broadcast_tensors, message_device

__all__ = ["gather_model_state", "gather_optimizer_state"]

FindSource = Callable[[str], int]


def gather_model_state(
    state: Mapping[str, Any], source: FindSource, device: torch.device
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
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    source: FindSource,
    device: torch.device,
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
    sources = [source(names[tensor]) for tensor in parameters]
    # Ignore the local state of parameters on other ranks: it may hold a stale step counter.
    here = {n: state for n, state in packed["state"].items() if not parameters[n].is_meta}
    states: dict[int, dict[str, Any]] = {}
    for sender in sorted(set(sources)):
        mine = {n: _to_cpu(state) for n, state in here.items() if sources[n] == sender}
        received = _broadcast_object(mine if dist.get_rank() == sender else None, sender)
        states |= {n: _to_device(state, device) for n, state in received.items()}
    states = {n: here.get(n, state) for n, state in states.items()}
    return {**packed, "state": {n: states[n] for n in sorted(states)}}


def _to_cpu(state: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Return entries with tensors on the CPU, and whether each is on a device."""
    return {
        entry: (value.cpu(), value.device.type != "cpu")
        if isinstance(value, torch.Tensor)
        else (value, False)
        for entry, value in state.items()
    }


def _to_device(state: Mapping[str, tuple[Any, bool]], device: torch.device) -> dict[str, Any]:
    # Counters of steps are on the CPU, beside moments on the device.
    return {entry: value.to(device) if moves else value for entry, (value, moves) in state.items()}


def _broadcast_object(value: Any, sender: int) -> Any:
    """Return the object of a rank, which consists of tensors and plain values."""
    file = io.BytesIO()
    torch.save(value, file)
    about = "gathering the state of the optimizer"
    sizes = all_gather_bytes(str(file.tell()).encode(), about)
    if dist.get_rank() == sender:
        packed = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    else:
        packed = torch.empty(int(sizes[sender]), dtype=torch.uint8)
    message = packed.to(message_device())
    broadcast_tensors([message], None, sender)
    return torch.load(io.BytesIO(message.cpu().numpy().tobytes()))


def _broadcast(tensors: Mapping[str, torch.Tensor], source: FindSource, held: Set[str]) -> None:
    """Receive each tensor from its source, except those that are held here."""
    rank = dist.get_rank()
    groups: dict[int, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        unread = name in held and source(name) != rank
        groups.setdefault(source(name), []).append(torch.empty_like(tensor) if unread else tensor)
    for sender in sorted(groups):
        broadcast_tensors(groups[sender], None, sender)
