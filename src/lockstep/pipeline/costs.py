"""Measured costs: what each block takes forward and backward, and what crosses behind it.

    block 0       block 1       block 2          on one real micro-batch, on one rank
    F 3.1 ms      F 8.0 ms      F 2.2 ms         forward
    B 5.9 ms      B 16.5 ms     B 4.1 ms         backward: whole, and in its two parts
          1.2 MiB       0.6 MiB                  the tensors between them

The measurement leaves no trace: generators, buffers and gradients are as before. The
first pass warms up; of the others each number's least counts, as whatever disturbs a
block makes it slower. Noise that is left moves the cut, which changes no bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.data.microbatch import map_tensors
from lockstep.errors import LayoutError, StateError
from lockstep.model.buffers import Buffers
from lockstep.model.forward import called
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.side_effects import SideEffects
from lockstep.pipeline.boundary import assembled, flattened
from lockstep.pipeline.graph_entry import Entry
from lockstep.pipeline.simulation import Costs
from lockstep.pipeline.split_backward import Split, splittable
from lockstep.randomness import isolated

__all__ = ["BYTES_PER_SECOND", "check_composition", "measured_costs"]

BYTES_PER_SECOND = 4e9
"""What a boundary is taken to let through: a copy from another process's memory."""

PASSES = 5  # the first one warms up
PATIENCE = 5.0  # seconds after which no further pass begins; two there always are


def measured_costs(
    blocks: Mapping[str, nn.Module],
    data: Any,
    parallel: ParallelContext,
    told: Callable[[str], None] = lambda line: None,
) -> Costs:
    """Return what the blocks cost on one micro-batch, in seconds and bytes.

    `data` is what the first block is given; `told` gets a line of progress. Raises
    LayoutError that names the block which cannot be called with what the one before
    returned.
    """
    buffers = Buffers(dict(blocks))
    rows: list[list[float]] = []
    begun = time.perf_counter()
    told(f"measuring {len(blocks)} blocks on one micro-batch, once, to cut the model evenly")
    again = parallel.recomputation(blocks).active(buffers)
    with isolated(parallel.device, everything=True), buffers.untouched(), again:
        for turn in range(PASSES):
            if turn > 1 and time.perf_counter() - begun > PATIENCE:
                break
            found = _passed(blocks, _copied(data), parallel)
            rows = found if turn <= 1 else _least(rows, found)
    for block in blocks.values():
        block.zero_grad(set_to_none=True)
    told(f"measured {len(blocks)} blocks in {time.perf_counter() - begun:.1f} s")
    forward, whole, inputs, weights, sizes = zip(*rows, strict=True)
    return Costs(
        forward,
        inputs,
        weights,
        tuple(size / BYTES_PER_SECOND for size in sizes[:-1]),
        backward=whole,
        held=tuple(sizes),
    )


def _least(rows: list[list[float]], others: list[list[float]]) -> list[list[float]]:
    """Return the lesser of each two numbers."""
    return [list(map(min, *pair)) for pair in zip(rows, others, strict=True)]


def _passed(
    blocks: Mapping[str, nn.Module], value: Any, parallel: ParallelContext
) -> list[list[float]]:
    """Run the blocks once, one after another; return each one's times and bytes."""
    rows = []
    for number, (name, block) in enumerate(blocks.items()):
        value, row = _measured(name, block, value, parallel, first=number == 0)
        rows.append(row)
    return rows


def _measured(
    name: str, block: nn.Module, data: Any, parallel: ParallelContext, first: bool
) -> tuple[Any, list[float]]:
    """Return a block's output, without history, and its times and the output's bytes."""
    entry = None if first else _entered(data)
    arguments = data if entry is None else (assembled(flattened(data)[0], entry.tensors),)
    begun = time.perf_counter()
    try:
        with parallel.autocast():
            value = called(block, arguments, f"block {name}")
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise LayoutError(
            f"block {name} cannot be called with what the block before it returned ({said}): the "
            "blocks, one after another, must make up the model's forward"
        ) from error
    forward = time.perf_counter() - begun
    pattern, outputs = flattened(value)
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in roots]
    whole = inputs = weights = 0.0
    anchor = None if entry is None or not roots or not splittable(roots) else entry.anchor
    if roots:
        retain = anchor is not None
        whole = _timed(partial(torch.autograd.backward, roots, ones, retain_graph=retain))
        inputs = whole
    if anchor is not None:
        split = Split(roots, anchor)
        inputs, weights = _timed(partial(split.first, ones)), _timed(split.second)
    size = float(sum(tensor.nbytes for tensor in outputs))
    detached = assembled(pattern, [tensor.detach() for tensor in outputs])
    return detached, [forward, whole, inputs, weights, size]


def _entered(data: Any) -> Entry:
    """Return copies of a block's inputs, behind an entry: the block may write into them."""
    copies = [each.clone(memory_format=torch.preserve_format) for each in flattened(data)[1]]
    return Entry(copies, [each.is_floating_point() for each in copies])


def _timed(work: Callable[[], Any]) -> float:
    """Do it, and return the seconds it took."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def check_composition(
    model: nn.Module, blocks: Mapping[str, nn.Module], data: Any, parallel: ParallelContext
) -> None:
    """Check that the blocks, one after another, give what the model gives.

    Both passes begin with the same buffers and the same generators: a module may write and
    draw in evaluation mode too.

    Raises:
        LayoutError: They give something else.
        StateError: Forward writes a parameter or draws from a generator of its own, so that
            no two passes agree.
    """
    place = "the first micro-batch"
    alike = partial(isolated, parallel.device, everything=True)
    effects = SideEffects({"": model})
    effects.begin(step=0)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with alike(), Buffers(dict(blocks)).untouched(), torch.no_grad():
            expected = flattened(called(model, _copied(data), place))[1]
        effects.finish()
        if effects.failure:
            raise StateError(f"rank {parallel.rank}, {place}: {effects.failure}")
        with alike(), Buffers(dict(blocks)).untouched(), torch.no_grad():
            value = _copied(data)
            for number, block in enumerate(blocks.values()):
                value = called(block, value if number == 0 else (value,), place)
    finally:
        for module, mode in modes.items():
            module.training = mode
    given = flattened(value)[1]
    if len(given) != len(expected) or not all(
        torch.equal(*pair) for pair in zip(given, expected, strict=True)
    ):
        raise LayoutError(
            f"the blocks of {type(model).__name__}, one after another, do not give what its "
            "forward gives: put what forward does besides into blocks too"
        )


def _copied(data: Any) -> Any:
    return map_tensors(torch.clone, data)
