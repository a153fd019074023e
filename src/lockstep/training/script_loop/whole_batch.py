"""Values that a manual step computes from all micro-batches of its batch, the same on every rank.

backward_whole_batch    pass 1     the outputs of every micro-batch, without an effect
                        gathered   the loss of all outputs, and its gradients with respect to
                                   them and to parameters that it uses itself
                        pass 2     every micro-batch again, and backward from its outputs with
                                   their gradients; micro-batch 0 gets those of the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.data.microbatch import Microbatch, clone_tensors
from lockstep.kernel.errors import LossError, UsageError
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.script_loop.batch_rows import add_exactly, find_microbatch_rows, gather_rows

__all__ = ["add_counts", "backward_whole_batch", "gather_whole_batch"]


def add_counts(loop: MicrobatchLoop, count: Callable[[Any], float], *batches: Any) -> float:
    """Return the exact sum of a number of every micro-batch; see `ManualStep.total`."""
    loop.start(*batches)
    with CollectiveCallGuard(lambda: loop.place):
        values = [float(count(part.data)) for part in loop.own_microbatches()]
    return add_exactly(loop.step, values)


def gather_whole_batch(loop: MicrobatchLoop, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all micro-batches; see `ManualStep.gather`."""
    computed = [one.microbatch.index for one in loop.step.computed]
    is_complete = loop.step.batch is not None and loop.current is None
    if not is_complete or len(tensors) != len(computed):
        raise UsageError(
            f"{loop.step.where}: step.gather got {len(tensors)} tensors, and {len(computed)} "
            "micro-batches are complete: call it after the loop over step.microbatches(batch), "
            "with one tensor per micro-batch"
        )
    (rows,) = _gather(loop, {m: [part] for m, part in zip(computed, tensors, strict=True)})
    return rows


def _gather(loop: MicrobatchLoop, rows: Mapping[int, Sequence[Any]]) -> list[torch.Tensor]:
    assert loop.step.batch is not None
    is_part = len(loop.step.batch.microbatches) < len(loop.own_microbatches())
    return gather_rows(loop.step, rows, loop.parallel.device, is_part=is_part)


def backward_whole_batch(
    loop: MicrobatchLoop,
    encode: Callable[[Any], Any],
    loss: Callable[..., torch.Tensor],
    *batches: Any,
) -> torch.Tensor:
    """Run backward from a loss of the whole batch; see `ManualStep.backward_whole_batch`."""
    step = loop.step
    parallel = loop.parallel
    batch = loop.start(*batches)
    if len(step.shares) < batch.leaves:
        raise UsageError(
            f"{step.where}: micro-batches of weight 0 are not computed, and a loss over the whole "
            "batch needs all of them: pass no loss_weight= to the trainer"
        )
    outputs = _gather(
        loop, {part.index: _encode(loop, encode, part) for part in loop.own_microbatches()}
    )
    trained = [parameter for parameter in loop.parameters if parameter.requires_grad]
    used = [rows.requires_grad_() for rows in outputs if rows.is_floating_point()]
    # As after the last micro-batch: the same random numbers on every rank.
    loop.scopes.begin_microbatch(step.number, batch.leaves)
    with parallel.autocast():
        value = loss(*outputs)
    loop.record_mean(value)
    with parallel.without_autocast():
        root, gradient = loop.roots.find(value, 1.0)
        parts = torch.autograd.grad(root, [*used, *trained], gradient, allow_unused=True)
    gradients = {id(one): part for one, part in zip([*used, *trained], parts, strict=True)}
    spans = find_microbatch_rows(step)
    for data in loop.microbatches(*batches):
        index = loop.microbatch.index
        pairs = [(one, gradients[id(one)]) for one in trained if index == 0]
        for again, rows in zip(_list_outputs(encode(data)), outputs, strict=True):
            span = slice(spans[index].start, spans[index].stop)
            if not torch.equal(_view_bytes(again), _view_bytes(rows[span])):
                step.refuse(
                    f"micro-batch {index}: the second pass of step.backward_whole_batch computed "
                    "other outputs than the first: they depend on state in Python that encode or "
                    "the model changes; let them depend on the data, the weights and torch's "
                    "random numbers"
                )
            if again.requires_grad and (whole := gradients.get(id(rows))) is not None:
                pairs.append((again, whole[span]))
                for observer in step.observers:
                    observer.record_graph(again, (step.number, index))
        roots = [(one, part) for one, part in pairs if part is not None]
        if not any(one.grad_fn is not None for one, _ in roots):
            raise LossError(
                f"{loop.place}: no output of encode depends on a trainable parameter and is used "
                "by the loss: check whether they were computed under torch.no_grad() or detached"
            )
        loop.note_mean(value, batch.size)
        with parallel.without_autocast():
            torch.autograd.backward([one for one, _ in roots], [part for _, part in roots])
    # What the block draws afterwards must not follow from this rank's last micro-batch.
    loop.scopes.begin_microbatch(step.number, batch.leaves)
    return value.detach()


def _encode(loop: MicrobatchLoop, encode: Callable[[Any], Any], part: Microbatch) -> list[Any]:
    """Return the outputs of a micro-batch in the first pass, which has no effect."""
    loop.buffers.install_copies()
    loop.scopes.begin_microbatch(loop.step.number, part.index)
    data = loop.parallel.move_to_device(clone_tensors(part.data))
    try:
        with loop.parallel.autocast():  # and with a graph: kernels may differ without one
            outputs = _list_outputs(encode(data))
    except Exception as error:
        error.add_note(f"in {loop.step.place(part.index)}, in the first pass")
        raise
    for slot in loop.buffers.slots:
        slot.copy = None
    return [one.detach() if isinstance(one, torch.Tensor) else one for one in outputs]


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)


def _list_outputs(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
