"""Assertions about tensors: the same bits in two tensors, on all ranks, and for any width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.checksum import checksum
from lockstep.formatting import format_numbered
from pytest_lockstep.runner import run

__all__ = ["assert_same_bits", "assert_same_on_ranks", "assert_width_invariant"]

Tensors = torch.Tensor | torch.nn.Module | Mapping[Any, Any] | Sequence[Any]
"""A tensor, a module (its state dict), or mappings and sequences of them."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    """Assert that two tensors have the same dtype, shape and bits.

    0.0 and -0.0 differ; two NaNs are equal if their bits are.

    Args:
        actual: A tensor, a module (its state dict), or mappings and sequences of them.
        expected: The value to compare with.

    Raises:
        AssertionError: They differ. The message names the first tensor that differs, the number of
            different elements and the first of them.
    """
    __tracebackhide__ = True
    actual = _name_tensors(actual)
    expected = _name_tensors(expected)
    _check_names(actual, expected, "actual", "expected")
    for name, tensor in actual.items():
        if difference := _describe_difference(tensor, expected[name], "actual", "expected"):
            raise AssertionError(f"{name or 'the tensor'} differs: {difference}")


def assert_same_on_ranks(tensors: Tensors, group: dist.ProcessGroup | None = None) -> None:
    """Assert that tensors have the same bits on all ranks of a group; call it on each of them.

    Args:
        tensors: A tensor, a module (its state dict), or mappings and sequences of them.
        group: The group; None for the default one.

    Raises:
        AssertionError: They differ, on every rank. The message names the ranks.
    """
    __tracebackhide__ = True
    own = _name_tensors(tensors)
    sums = _gather({name: checksum(tensor) for name, tensor in own.items()}, group)
    if all(theirs == sums[0] for theirs in sums):
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for theirs, rank in zip(sums, ranks, strict=True):
        if theirs.keys() != sums[0].keys():
            names = ", ".join(map(repr, theirs.keys() ^ sums[0].keys()))
            raise AssertionError(f"ranks {ranks[0]} and {rank} have different tensors: {names}")
    name = next(name for name in own if any(theirs[name] != sums[0][name] for theirs in sums))
    values = _gather(own[name].detach().cpu(), group)
    others = [index for index, theirs in enumerate(sums) if theirs[name] != sums[0][name]]
    difference = _describe_difference(
        values[0], values[others[0]], f"rank {ranks[0]}", f"rank {ranks[others[0]]}"
    )
    who = format_numbered("rank", [ranks[index] for index in others])
    raise AssertionError(
        f"{name or 'the tensor'} on {who} differs from that on rank {ranks[0]}: {difference}"
    )


def assert_width_invariant(
    step: Callable[[], Tensors],
    widths: Sequence[int] = (1, 2, 4),
    *,
    rtol: float | None = None,
    atol: float | None = None,
    backend: str = "lockstep",
    timeout: float = 60.0,
) -> None:
    """Assert that a training step has the same result for several numbers of ranks.

    Call it in an ordinary test, without the marker `ranks`: it starts the ranks itself.

    Args:
        step: Computes the step in every rank, and returns the model or its parameters. It gets
            its rank from `torch.distributed.get_rank()`.
        widths: Numbers of ranks; the results of the others are compared with that of the first.
        rtol: Relative tolerance; None requires the same bits.
        atol: Absolute tolerance; None for 0 if `rtol` is given.
        backend: The backend of the groups.
        timeout: Deadline for each number of ranks, in seconds.

    Raises:
        AssertionError: A result differs. The message names the first parameter that differs, the
            size of the difference, and whether it exceeds a tolerance or is only in bits.
    """
    __tracebackhide__ = True
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "assert_width_invariant starts ranks itself: call it in a test without the marker ranks"
        )
    reference: dict[str, torch.Tensor] | None = None
    first = _format_width(widths[0])
    for width in widths:
        values = run(_collect, step, ranks=width, backend=backend, timeout=timeout)
        for rank, value in enumerate(values):
            reference = value if reference is None else reference
            place = f"rank {rank} of {_format_width(width)}"
            _check_names(value, reference, place, first)
            for name, tensor in reference.items():
                if _is_close(value[name], tensor, rtol, atol):
                    continue
                difference = _describe_difference(tensor, value[name], first, place)
                tolerance = _describe_tolerance(value[name], tensor, rtol, atol)
                raise AssertionError(
                    f"{name or 'the result'} on {place} differs from that on {first}, "
                    f"{tolerance}: {difference}"
                )


def _collect(step: Callable[[], Tensors]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in _name_tensors(step()).items()}


def _is_close(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None
) -> bool:
    if rtol is None and atol is None:
        return not _describe_difference(actual, expected, "", "")
    return _agrees(actual, expected, rtol or 0.0, atol or 0.0)


def _agrees(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None
) -> bool:
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    return True


def _describe_tolerance(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None
) -> str:
    if rtol is not None or atol is not None:
        return f"beyond the tolerance (rtol={rtol or 0.0:g}, atol={atol or 0.0:g})"
    if _agrees(actual, expected, None, None):
        return "only in bits (torch.testing.assert_close accepts it)"
    return "beyond the tolerance of torch.testing.assert_close"


def _format_width(width: int) -> str:
    return "1 rank" if width == 1 else f"{width} ranks"


def _name_tensors(value: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a value by their names in it; a single tensor has the name ""."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        parts = [(str(index), part) for index, part in enumerate(value)]
    else:
        raise TypeError(
            f"expected a tensor, a module, or mappings and sequences of them, not an object of "
            f"type {type(value).__name__}"
        )
    return {
        f"{key}.{name}" if name else key: tensor
        for key, part in parts
        for name, tensor in _name_tensors(part).items()
    }


def _check_names(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], this: str, that: str
) -> None:
    for name in [*actual, *expected]:
        if (name in actual) != (name in expected):
            there, not_there = (this, that) if name in actual else (that, this)
            raise AssertionError(f"{name!r} is in {there}, but not in {not_there}")


def _describe_difference(a: torch.Tensor, b: torch.Tensor, this: str, that: str) -> str:
    """Return how two tensors differ; "" if they have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (a, b)]
        return f"{kinds[0]} on {this}, {kinds[1]} on {that}".replace("torch.", "")
    if checksum(a) == checksum(b):
        return ""
    a, b = (tensor.detach().cpu().to_dense().contiguous() for tensor in (a, b))
    flat = [tensor.reshape(-1).view(torch.uint8).reshape(a.numel(), -1) for tensor in (a, b)]
    differs = (flat[0] != flat[1]).any(dim=1)
    first = int(differs.nonzero()[0])
    index = [int(each) for each in torch.unravel_index(torch.tensor(first), a.shape)]
    count = int(differs.sum())
    values = f"{a.reshape(-1)[first].item()!r} on {this}, {b.reshape(-1)[first].item()!r} on {that}"
    return (
        f"{count} of {a.numel()} elements{_describe_size(a, b)}; the first at "
        f"[{', '.join(map(str, index))}]: {values}"
    )


def _describe_size(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the largest difference of floating-point tensors, absolutely and in ULPs."""
    if not a.dtype.is_floating_point or a.itemsize not in INTEGERS:
        return ""
    distance = (a.double() - b.double()).abs()
    if not bool(distance.isfinite().all()):
        return ""
    if bool((a.signbit() != b.signbit()).any()):
        how = "opposite signs"
    else:
        steps = int((_number(a) - _number(b)).abs().max())
        how = f"{steps} ulp{'s' if steps > 1 else ''}"
    return f", by at most {distance.max().item():.3g} ({how})"


def _number(tensor: torch.Tensor) -> torch.Tensor:
    """Return the position of each floating-point number among all numbers of its dtype."""
    bits = tensor.view(INTEGERS[tensor.itemsize]).long()
    lowest = -(1 << (8 * tensor.itemsize - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
