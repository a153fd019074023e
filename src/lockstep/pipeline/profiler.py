"""The profiler: measures the time and the output size of each block of a model.

    block 0       block 1       block 2          on one real micro-batch, on one rank
    F 3.1 ms      F 8.0 ms      F 2.2 ms         forward
    B 5.9 ms      B 16.5 ms     B 4.1 ms         backward: whole, and in its two parts
          1.2 MiB       0.6 MiB                  tensors between the blocks

Generators and buffers are restored afterwards, and gradients are cleared. The first pass is a
warm-up. The result is the minimum of each time over the other passes, because disturbances only
make a block slower. The remaining noise may move the boundaries of stages, which affects no bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.microbatch import map_tensors
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import LayoutError
from lockstep.kernel.seeds import isolated
from lockstep.model.forward import call_model
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.boundary import flatten, unflatten
from lockstep.pipeline.composition import hide_values
from lockstep.pipeline.simulation import Costs
from lockstep.pipeline.split_backward import GraphInput, SplitBackward, is_splittable

__all__ = ["BYTES_PER_SECOND", "profile_blocks", "record_outputs"]

BYTES_PER_SECOND = 4e9
"""The assumed bandwidth between stages, that of a copy from another process's memory."""

PASSES = 5
"""The number of passes; the first one is a warm-up."""

TIME_LIMIT = 5.0
"""Seconds after which no further pass starts; at least two passes run."""


def profile_blocks(
    blocks: Mapping[str, nn.Module],
    data: Any,
    parallel: ParallelContext,
    report: Callable[[str], None] = lambda line: None,
    samples: int = 0,
) -> Costs:
    """Return the costs of the blocks for one micro-batch, in seconds and bytes.

    Args:
        blocks: The blocks by name, in order.
        data: The arguments of the first block.
        samples: The number of samples of the micro-batch; 0 if unknown. Batch norm cannot train
            on a single sample; it is then measured in evaluation mode.
        parallel: The layout.
        report: A function that is called with each line of progress.

    Raises:
        LayoutError: A block cannot be called with the output of the previous one.
    """
    buffers = Buffers(dict(blocks))
    rows: list[list[float]] = []
    begun = time.perf_counter()
    report(f"measuring {len(blocks)} blocks with one micro-batch, once, to balance the stages")
    checkpointing = parallel.make_checkpointing(blocks).enable(buffers)
    modes = _freeze_batch_norm(blocks.values(), samples)
    with isolated(parallel.device, everything=True), buffers.preserve(), checkpointing, modes:
        for number in range(PASSES):
            if number > 1 and time.perf_counter() - begun > TIME_LIMIT:
                break
            measured = _run_pass(blocks, _copy_data(data), parallel)
            rows = measured if number <= 1 else _take_minimum(rows, measured)
    for block in blocks.values():
        block.zero_grad(set_to_none=True)
    forward, whole, inputs, weights, sizes = zip(*rows, strict=True)
    return Costs(
        forward,
        inputs,
        weights,
        tuple(size / BYTES_PER_SECOND for size in sizes[:-1]),
        backward=whole,
        held=tuple(sizes),
    )


def _take_minimum(rows: list[list[float]], others: list[list[float]]) -> list[list[float]]:
    """Return the element-wise minimum."""
    return [list(map(min, *pair)) for pair in zip(rows, others, strict=True)]


def _run_pass(
    blocks: Mapping[str, nn.Module], value: Any, parallel: ParallelContext
) -> list[list[float]]:
    """Run the blocks once, one after another; return the times and bytes of each."""
    rows = []
    for number, (name, block) in enumerate(blocks.items()):
        value, row = _measure_block(name, block, value, parallel, is_first=number == 0)
        rows.append(row)
    return rows


def _measure_block(
    name: str, block: nn.Module, data: Any, parallel: ParallelContext, is_first: bool
) -> tuple[Any, list[float]]:
    """Return a block's output, detached, with its times and the bytes of the output."""
    graph_input, arguments = _make_arguments(data, is_first)
    begun = time.perf_counter()
    value = _call_block(name, block, arguments, parallel)
    forward = time.perf_counter() - begun
    outputs = flatten(value)[1]
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in roots]
    whole = inputs = weights = 0.0
    anchor = (
        None if graph_input is None or not roots or not is_splittable(roots) else graph_input.anchor
    )
    if roots:
        retain = anchor is not None
        whole = _measure_seconds(partial(torch.autograd.backward, roots, ones, retain_graph=retain))
        inputs = whole
    if anchor is not None:
        split = SplitBackward(roots, anchor)
        inputs = _measure_seconds(partial(split.backward_inputs, ones))
        weights = _measure_seconds(split.backward_weights)
    size = float(sum(tensor.nbytes for tensor in outputs))
    return _detach(value), [forward, whole, inputs, weights, size]


def _call_block(name: str, block: nn.Module, arguments: Any, parallel: ParallelContext) -> Any:
    try:
        with parallel.autocast():
            return call_model(block, arguments, f"block {name}")
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        message = (str(error).splitlines() or [""])[0]
        raise LayoutError(
            f"block {name} cannot be called with the output of the previous block ({message}): "
            "the model's forward must be equivalent to calling the blocks one after another"
        ) from error


def _make_arguments(data: Any, is_first: bool) -> tuple[GraphInput | None, Any]:
    """Return the arguments of a block: copies, because the block may write into them in place."""
    if is_first:
        return None, data
    structure, tensors = flatten(data)
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    graph_input = GraphInput(copies, [tensor.is_floating_point() for tensor in copies])
    return graph_input, (unflatten(structure, graph_input.tensors),)


def _detach(value: Any) -> Any:
    structure, tensors = flatten(value)
    return unflatten(structure, [tensor.detach() for tensor in tensors])


def _measure_seconds(work: Callable[[], Any]) -> float:
    """Call `work`, and return the seconds it took."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def record_outputs(
    blocks: Mapping[str, nn.Module], data: Any, parallel: ParallelContext, samples: int = 0
) -> list[Any]:
    """Call the blocks once, one after another, and return the output of each.

    Generators and buffers are restored afterwards. Arguments are those of `profile_blocks`.

    Raises:
        LayoutError: A block cannot be called with the output of the previous one.
    """
    outputs: list[Any] = []
    modes = _freeze_batch_norm(blocks.values(), samples)
    with isolated(parallel.device, everything=True), Buffers(dict(blocks)).preserve(), modes:
        value = _copy_data(data)
        for number, (name, block) in enumerate(blocks.items()):
            _, arguments = _make_arguments(value, is_first=number == 0)
            value = _detach(_call_block(name, block, arguments, parallel))
            outputs.append(hide_values(value))
    return outputs


def _copy_data(data: Any) -> Any:
    return map_tensors(torch.clone, data)


@contextmanager
def _freeze_batch_norm(modules: Iterable[nn.Module], samples: int) -> Iterator[None]:
    """Make batch norm use its running statistics in the body if there is only one sample."""
    parts = [part for module in modules for part in module.modules() if samples == 1]
    changed = [part for part in parts if isinstance(part, _BatchNorm) and part.training]
    for norm in changed:
        norm.training = False
    try:
        yield
    finally:
        for norm in changed:
            norm.training = True
