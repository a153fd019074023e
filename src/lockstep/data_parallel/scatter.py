"""Scatter and gather: a call's tensors are split into micro-batches, and the outputs joined.

    argument     samples 0-10   ──> samples 0-2 | 3-5 | 6-8 | 9-10     one part per micro-batch
    output       0-dimensional  ──> the mean over the batch, added along the tree
                 floating point
                 other scalars  ──> a vector with one entry per micro-batch
                 otherwise      ──> concatenated in the order of the samples

Tensors are found in nested tuples, lists and mappings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.comm.reproducible_all_reduce import add_present
from lockstep.data.microbatch import map_tensors
from lockstep.kernel.errors import UsageError
from lockstep.kernel.tree import Node, total

__all__ = ["GatheredTensor", "Part", "count_samples", "list_tensors", "scatter"]


def count_samples(args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> int:
    """Return the number of samples of a call: the size of its tensors in dimension `dim`.

    Raises:
        UsageError: No tensor has this dimension, or the sizes differ.
    """
    sizes: dict[str, int] = {}
    named = [(f"argument {position}", each) for position, each in enumerate(args)]
    for name, value in [*named, *((f"argument {name}", each) for name, each in kwargs.items())]:
        for path, tensor in _walk(value, name):
            if tensor.dim() > dim:
                sizes[path] = tensor.shape[dim]
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


class Part:
    """The arguments of one micro-batch, on its device.

    Attributes:
        data: The arguments, with copies of their samples.
        leaves: For each source, the leaf that gets its gradient.
    """

    def __init__(
        self, data: Any, span: range, dim: int, device: torch.device, sources: Sequence[Any]
    ) -> None:
        self.leaves: list[torch.Tensor] = []
        copies: dict[int, torch.Tensor] = {}
        for source in sources:
            leaf = _samples(source.detach(), span, dim).requires_grad_()
            self.leaves.append(leaf)
            copies[id(source)] = leaf.to(device, copy=True)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = _samples(tensor.detach(), span, dim).to(device, copy=True)
            return copies[id(tensor)]

        self.data = map_tensors(copy, data)


def scatter(
    data: Any,
    spans: Sequence[range],
    dim: int,
    devices: Sequence[torch.device],
    sources: Sequence[torch.Tensor],
) -> list[Part]:
    """Return the arguments of each micro-batch.

    Tensors without the dimension are copied to each micro-batch; other values are shared. A tensor
    that occurs twice is one tensor in each part, too.

    Args:
        data: The arguments.
        spans: The samples of each micro-batch.
        dim: The dimension of the samples.
        devices: The device of each micro-batch.
        sources: The tensors among the arguments that need a gradient.
    """
    pairs = zip(spans, devices, strict=True)
    return [Part(data, span, dim, device, sources) for span, device in pairs]


def _samples(tensor: torch.Tensor, span: range, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, span.start, len(span)) if tensor.dim() > dim else tensor


def _walk(data: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested data, with the expressions for them."""
    if isinstance(data, torch.Tensor):
        yield name, data
    elif isinstance(data, Mapping):
        for entry, part in data.items():
            yield from _walk(part, f"{name}[{entry!r}]")
    elif isinstance(data, (tuple, list)):
        for position, part in enumerate(data):
            yield from _walk(part, f"{name}[{position}]")


class GatheredTensor:
    """One output tensor of all micro-batches, joined.

    Args:
        parts: The tensors of the micro-batches by their indices.
        shares: The share of each micro-batch in a mean over the batch.
        leaves: The number of micro-batches of the batch.
        dim: The dimension of the samples.
        device: The device of the result.

    Attributes:
        is_differentiable: Whether a gradient can flow to it.

    Raises:
        UsageError: The shapes do not fit together.
    """

    def __init__(
        self,
        parts: Mapping[int, torch.Tensor],
        shares: Mapping[int, float],
        leaves: int,
        dim: int,
        device: torch.device,
    ) -> None:
        first = next(iter(parts.values()))
        self.is_differentiable = any(each.requires_grad for each in parts.values())
        self._devices = {index: each.device for index, each in parts.items()}
        self._shares, self._dim = shares, dim
        self._is_scalar = first.dim() == 0
        self._is_mean = self._is_scalar and first.is_floating_point()
        self._spans: dict[int, tuple[int, int]] = {}
        self._value: torch.Tensor | None
        given = {index: each.detach().to(device) for index, each in parts.items()}
        if self._is_mean:
            self._value = _mean(given, shares, leaves).to(first.dtype)
            return
        if self._is_scalar:
            self._value = torch.stack(list(given.values()))
            return
        start = 0
        for index, each in given.items():
            if each.dim() <= dim:
                raise UsageError(
                    f"an output of shape {tuple(each.shape)} has no dimension {dim}, along which "
                    "ls.DataParallel joins the micro-batches: return samples in this dimension, "
                    "or a scalar that is a mean over the samples"
                )
            self._spans[index] = start, each.shape[dim]
            start += each.shape[dim]
        try:
            self._value = torch.cat(list(given.values()), dim)
        except RuntimeError as error:
            shapes = sorted({tuple(each.shape) for each in given.values()})
            raise UsageError(
                f"the micro-batches return tensors of shapes {', '.join(map(str, shapes))}, which "
                f"cannot be joined along dimension {dim}"
            ) from error

    def take_value(self) -> torch.Tensor:
        """Return the joined tensor, without a graph, and keep no reference to it.

        The result of a function of autograd must not be kept by the function, since neither would
        be freed.
        """
        value, self._value = self._value, None
        assert value is not None
        return value

    def split_gradient(self, gradient: torch.Tensor, microbatch: int) -> torch.Tensor:
        """Return the gradient of a micro-batch's tensor from that of the joined one."""
        device = self._devices[microbatch]
        if self._is_mean:
            return gradient.to(device) * self._shares[microbatch]
        part = gradient.narrow(self._dim, *self._spans[microbatch])
        return part.to(device, copy=True, memory_format=torch.contiguous_format)


def _mean(
    values: Mapping[int, torch.Tensor], shares: Mapping[int, float], leaves: int
) -> torch.Tensor:
    """Return the weighted mean of scalars along the tree, in float64."""
    terms: dict[Node, torch.Tensor | None] = {}
    for leaf in range(leaves):
        term = values[leaf].to(torch.float64) * shares[leaf] if leaf in values else None
        terms[leaf, leaf + 1] = term
    mean = total(terms, leaves, add_present)
    assert mean is not None
    return mean
