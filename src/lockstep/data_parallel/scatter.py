"""Scatter and gather: a call's tensors are split into micro-batches, and the outputs joined.

    argument     samples 0-10   ──> samples 0-2 | 3-5 | 6-8 | 9-10     one part per micro-batch
    output       0-dimensional  ──> the mean over the batch, added along the tree
                 floating point
                 other scalars  ──> a vector with one entry per micro-batch
                 otherwise      ──> concatenated in the order of the samples

Tensors are found in nested tuples, lists and mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.data.microbatch import map_tensors
from lockstep.kernel.errors import UsageError
from lockstep.kernel.tree import Node, add_present, total

__all__ = ["SplitGradient", "count_samples", "join_outputs", "list_tensors", "take_part"]

SplitGradient = Callable[[torch.Tensor, int], torch.Tensor]
"""A function of the gradient of a joined tensor and a micro-batch that returns the gradient of the
micro-batch's tensor, on its device."""


def count_samples(args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> int:
    """Return the number of samples of a call: the size of its tensors in dimension `dim`.

    Raises:
        UsageError: No tensor has this dimension, or the sizes differ.
    """
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    sizes = {
        path: tensor.shape[dim]
        for name, value in named.items()
        for path, tensor in _walk(value, f"argument {name}")
        if tensor.dim() > dim
    }
    if not sizes:
        raise UsageError(
            f"ls.DataParallel found no tensor with a dimension {dim} in the arguments, so it "
            "cannot split the batch: pass the samples in tensors, in tuples, lists or mappings"
        )
    (first, size), *others = sizes.items()
    for name, other in others:
        if other != size:
            raise UsageError(
                f"{first} has {size} samples in dimension {dim}, but {name} has {other}: all "
                "tensors of a call are split in the same way"
            )
    if size == 0:
        raise UsageError(f"{first} has no samples in dimension {dim}")
    return size


def list_tensors(data: Any) -> list[torch.Tensor]:
    """Return the tensors in nested data, in order."""
    return [tensor for _, tensor in _walk(data, "")]


def take_part(data: Any, span: range, dim: int, device: torch.device) -> Any:
    """Return the arguments of one micro-batch on its device.

    Tensors without the dimension are copied whole; other values are shared. A tensor that occurs
    twice is one tensor in the part, too.

    Args:
        data: The arguments of the call.
        span: The samples of the micro-batch.
        dim: The dimension of the samples.
        device: The device of the micro-batch.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _samples(tensor, span, dim).to(device, copy=True)
        return copies[id(tensor)]

    return map_tensors(copy, data)


def join_outputs(
    parts: Mapping[int, torch.Tensor],
    shares: Mapping[int, float],
    leaves: int,
    dim: int,
    device: torch.device,
) -> tuple[torch.Tensor, SplitGradient]:
    """Join one output tensor of all micro-batches, without a graph.

    Args:
        parts: The tensors of the micro-batches by their indices.
        shares: The share of each micro-batch in a mean over the batch.
        leaves: The number of micro-batches of the batch.
        dim: The dimension of the samples.
        device: The device of the result.

    Returns:
        The joined tensor, and a function that splits its gradient.

    Raises:
        UsageError: The shapes do not fit together.
    """
    devices = {index: part.device for index, part in parts.items()}
    moved = {index: part.detach().to(device) for index, part in parts.items()}
    first = next(iter(moved.values()))  # every micro-batch returns the same dtype
    if first.dim() == 0 and first.is_floating_point():
        mean = _compute_mean(moved, shares, leaves).to(first.dtype)
        return mean, lambda gradient, index: gradient.to(devices[index]) * shares[index]
    if first.dim() == 0:  # integers, which have no gradient
        return torch.stack(list(moved.values())), lambda gradient, index: gradient[index]
    spans: dict[int, tuple[int, int]] = {}
    start = 0
    for index, part in moved.items():
        if part.dim() <= dim:
            raise UsageError(
                f"an output of shape {tuple(part.shape)} has no dimension {dim}, along which "
                "ls.DataParallel joins the micro-batches: return samples in this dimension, or a "
                "scalar that is a mean over the samples"
            )
        spans[index] = start, part.shape[dim]
        start += part.shape[dim]
    try:
        joined = torch.cat(list(moved.values()), dim)
    except RuntimeError as error:
        shapes = sorted({tuple(part.shape) for part in moved.values()})
        raise UsageError(
            f"the micro-batches return tensors of shapes {', '.join(map(str, shapes))}, which "
            f"cannot be joined along dimension {dim}"
        ) from error

    def split(gradient: torch.Tensor, index: int) -> torch.Tensor:
        part = gradient.narrow(dim, *spans[index])
        return part.to(devices[index], copy=True, memory_format=torch.contiguous_format)

    return joined, split


def _compute_mean(
    values: Mapping[int, torch.Tensor], shares: Mapping[int, float], leaves: int
) -> torch.Tensor:
    """Return the weighted mean of scalars along the tree, in float64."""
    terms: dict[Node, torch.Tensor | None] = {(index, index + 1): None for index in range(leaves)}
    for index, value in values.items():
        terms[index, index + 1] = value.to(torch.float64) * shares[index]
    mean = total(terms, leaves, add_present)
    assert mean is not None
    return mean


def _samples(tensor: torch.Tensor, span: range, dim: int) -> torch.Tensor:
    """Return the samples of a micro-batch, without a graph."""
    tensor = tensor.detach()
    return tensor.narrow(dim, span.start, len(span)) if tensor.dim() > dim else tensor


def _walk(data: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested data, with the expressions for them."""
    if isinstance(data, torch.Tensor):
        yield name, data
    elif isinstance(data, (Mapping, tuple, list)):
        entries = data.items() if isinstance(data, Mapping) else enumerate(data)
        for entry, part in entries:
            yield from _walk(part, f"{name}[{entry!r}]")
