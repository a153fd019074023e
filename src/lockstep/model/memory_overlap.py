"""Memory overlap: tensors that share memory.

    a   |--------|                 a and b overlap, and so do b and c
    b         |-----|-----|        adjacent or interleaved views of one storage
    c                  |-----|     do not overlap

Two parameters with the same memory (`b.weight.data = a.weight.data`) are tied until one of them
is moved. A tensor can also overlap itself: `torch.ones(1, 4).expand(8, 4)` has 32 elements in the
memory of 4, and no operation may write into it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.kernel.errors import UsageError

__all__ = ["allocate_repeated", "find_overlaps", "find_parameter_overlaps", "find_views"]

OWN_REFERENCES = 2
"""The references to the memory of a parameter: its own, and that of the storage object."""


def find_overlaps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the pairs of tensors, by position, that overlap in memory.

    Tensors without elements, on the meta device or of a sparse layout overlap no other.
    """
    extents = sorted(
        (str(tensor.device), tensor.data_ptr(), number)
        for number, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel()
    )
    pairs: list[tuple[int, int]] = []
    for index, (device, begin, number) in enumerate(extents):
        end = begin + _span(tensors[number])
        for other_device, other_begin, other in islice(extents, index + 1, None):
            if other_device != device or other_begin >= end:
                break
            if _meet(other_begin - begin, tensors[number], tensors[other]):
                pairs.append((min(number, other), max(number, other)))
    return sorted(pairs)


def find_parameter_overlaps(
    modules: Mapping[str, nn.Module], *, attributes: bool = False
) -> list[tuple[str, str]]:
    """Return the pairs of different tensors, by name, that overlap in memory.

    Args:
        modules: Modules by the prefix of their tensors' names.
        attributes: Whether to include tensors in plain attributes of the modules.

    Returns:
        The pairs with at least one parameter. A parameter with several names is one tensor.
    """
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for root, model in modules.items():
        for name, tensor in _tensors_of(model, attributes):
            named.setdefault(id(tensor), (".".join(filter(None, (root, name))), tensor))
    names, tensors = zip(*named.values(), strict=True) if named else ((), ())
    return [
        (names[one], names[other])
        for one, other in find_overlaps(tensors)
        if isinstance(tensors[one], nn.Parameter) or isinstance(tensors[other], nn.Parameter)
    ]


def find_views(model: nn.Module) -> list[str]:
    """Return the names of the parameters to whose memory other tensors or arrays refer."""

    def find() -> list[str]:
        return [
            name
            for name, parameter in model.named_parameters()
            # Not those of several parameters, such as the shared memory of an earlier trainer.
            if (storage := parameter.untyped_storage()).nbytes()
            == parameter.numel() * parameter.element_size()
            and torch._C._storage_Use_Count(storage._cdata) > OWN_REFERENCES
        ]

    if not find():
        return []
    gc.collect()  # of views in unreachable cycles
    return find()


@torch.no_grad()
def allocate_repeated(modules: Mapping[str, nn.Module]) -> None:
    """Give expanded and lazily conjugated tensors separate memory for every element.

    Exchanges between ranks, checkpoints and averages write into them. They remain the same tensor
    objects. The weight that `torch.nn.utils.spectral_norm` computes in forward is the original one
    until then; it gets its own memory, too.

    Args:
        modules: Modules by the prefix of their tensors' names.

    Raises:
        UsageError: A trainable parameter is expanded, or an expanded tensor shares its memory with
            another tensor.
    """
    for model in modules.values():
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, SpectralNorm):
                    computed = vars(module)[hook.name]
                    vars(module)[hook.name] = computed.detach().clone()
    named = {
        ".".join(filter(None, (root, name))): tensor
        for root, model in modules.items()
        for name, tensor in _tensors_of(model, attributes=False)
    }
    names = list(named)
    tensors = list(named.values())
    repeated = [number for number, tensor in enumerate(tensors) if _is_repeated(tensor)]
    overlaps = find_overlaps(tensors) if repeated else []
    for number in repeated:
        name = names[number]
        tensor = tensors[number]
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and 0 in tensor.stride():
            raise UsageError(
                f"the parameter {name} is an expanded tensor, whose elements an optimizer cannot "
                "update one by one: register the tensor before expand() as the parameter, and "
                "expand it in forward"
            )
        for pair in overlaps:
            others = {names[index] for index in pair if tensors[index] is not tensor}
            if number in pair and others:
                raise UsageError(
                    f"{name} is an expanded tensor over the memory of {min(others)}, and would no "
                    "longer change with it: expand it in forward, or give it separate memory "
                    "(.contiguous())"
                )
        tensor.data = tensor.data.resolve_conj().resolve_neg().contiguous()


def _is_repeated(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, or have values other than those in memory."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    is_expanded = any(n > 1 and not stride for n, stride in extents)
    return bool(tensor.numel()) and (is_expanded or tensor.is_conj() or tensor.is_neg())


def _tensors_of(model: nn.Module, attributes: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules() if attributes else ():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in extents)) * tensor.element_size()


def _meet(distance: int, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have a byte in common; `other` begins `distance` bytes later."""
    if not distance or (one.is_contiguous() and other.is_contiguous()):
        return True
    marks = torch.zeros(max(_span(one), distance + _span(other)), dtype=torch.bool)
    _bytes_of(marks, 0, one).fill_(True)
    return bool(_bytes_of(marks, distance, other).any())


def _bytes_of(marks: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of `marks` for a tensor's bytes; repeated elements are marked once."""
    size = tensor.element_size()
    strides = tensor.stride()
    shape = [n if stride else 1 for n, stride in zip(tensor.shape, strides, strict=True)]
    return marks.as_strided((*shape, size), (*(stride * size for stride in strides), 1), begin)
