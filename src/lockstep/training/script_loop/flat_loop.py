"""A loop over micro-batches that is not nested in one over batches, as frameworks write it.

    for inputs, targets in exact.microbatches(loader):      begin of micro-batch m
        loss = loss_function(model(inputs), targets)
        exact.weigh(loss).backward()                        its end: leaf m of the tree
        if exact.is_complete:                               after the last one: all gradients
            optimizer.step()

Autograd tells when a backward pass has ended (`lockstep.model.backward_watch`). The batch sampler
of the loader says which micro-batch comes next, before its data are loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import TypeVar

import torch
from torch import nn

from lockstep.comm.activity import Waited
from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.assignment import ReplicaShare
from lockstep.data.checked_loading import load_checked
from lockstep.data.microbatch import align_tensors
from lockstep.data.microbatch_sampler import LoadedHere, MicrobatchSource, PlannedMicrobatch
from lockstep.kernel.batch import Batch, BatchIdentity, Microbatch
from lockstep.kernel.errors import UsageError
from lockstep.messages import log
from lockstep.model.backward_watch import BackwardWatch
from lockstep.model.forward import require_number
from lockstep.model.generator_states import state_of_all
from lockstep.model.loss_root import warn_of_denominator
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.watched_calls import Arguments
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.script_loop.given_weights import read_number
from lockstep.training.script_loop.loop_watch import LoopWatch
from lockstep.training.script_loop.script_steps import ScriptSteps

__all__ = ["FlatLoop"]

Item = TypeVar("Item")

ADVICE = (
    "write `for batch in exact.batches(dataset, batch_size=...)`, or give the DataLoader "
    "batch_sampler=exact.sampler(dataset, batch_size=...)"
)


# It has many attributes: what the script leaves open between two of its calls.
class FlatLoop:
    """The micro-batches of a loop that is not nested, in the order in which they are computed.

    Args:
        model: The model as the script calls it, perhaps in DistributedDataParallel.
        parallel: The layout.
        steps: The steps of the handle.

    Attributes:
        next_position: The epoch and the batch after the last complete step.
    """

    def __init__(self, model: nn.Module, parallel: ParallelContext, steps: ScriptSteps) -> None:
        self._model = model
        self._parallel = parallel
        self._steps = steps
        self._loop: MicrobatchLoop | None = None
        self._sampler: MicrobatchSource | None = None
        self._planned: deque[PlannedMicrobatch] = deque()
        self._current: PlannedMicrobatch | None = None
        self._watched: LoopWatch  # of the open step
        self._remaining = 0  # micro-batches of this rank in the open step
        self._index: dict[int, Microbatch] = {}
        self._has_gradients = False  # whether a backward of the open step has begun
        self._is_weighed = True
        self._has_warned = False
        self._loading = 0.0  # seconds for the data of the micro-batch that begins
        # After the last micro-batch, if a forward began it.
        self._generators: tuple[object, ...] | None = None
        self.next_position = (0, 0)
        self._watch = BackwardWatch(model, self)

    # --- data ---------------------------------------------------------------------------------

    def follow(self, sampler: MicrobatchSource) -> None:
        """Train on the micro-batches of a sampler, whose next iteration begins at the position."""
        sampler.attach(self)
        self._sampler = sampler
        self._planned.clear()

    def go_to(self, position: tuple[int, int]) -> None:
        """Continue at an epoch and a batch."""
        self.next_position = position
        if self._sampler is not None:
            self._sampler.epoch, self._sampler.start = position

    def begin_epoch(self) -> None:
        """Discard the micro-batches that an earlier iteration over the sampler has planned."""
        self._planned.clear()

    def plan(self, microbatch: PlannedMicrobatch) -> None:
        """Expect a micro-batch; the sampler calls this."""
        self._planned.append(microbatch)

    def iterate(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a loader, each of which is a micro-batch; `begin` each of them.

        Tensors that are views into larger ones are copied, since kernels may round differently
        where memory is not aligned.
        """
        if self._sampler is None and hasattr(loader, "dataset"):
            raise UsageError(
                f"{self._steps.place}: exact.microbatches got a {type(loader).__name__} that "
                "ls.exact does not divide over the ranks, which would train on the same samples, "
                f"or on others than one rank: {ADVICE}"
            )
        gather = None
        if self._parallel.replicas > 1:
            gather = partial(all_gather_bytes, group=self._parallel.group)
        begun = perf_counter() - Waited.seconds
        with closing(load_checked(loader, gather)) as items:
            for item in items:
                self._loading = perf_counter() - Waited.seconds - begun
                self.begin()
                try:
                    yield align_tensors(item)
                except GeneratorExit:  # after `break`, or an exception in the body of the loop
                    self.leave()
                    raise
                begun = perf_counter() - Waited.seconds
        self._require_backward()
        self._steps.settle()

    def _require_backward(self) -> None:
        """Raise UsageError if the last micro-batch has had none, as after `continue`."""
        if self._current is not None:
            raise UsageError(
                f"{self._steps.place} had no backward that reached a parameter: call "
                "loss.backward() once per micro-batch"
            )

    def leave(self) -> None:
        """Undo a step that was left before its last micro-batch."""
        self._loop = None
        self._current = None
        self._remaining = 0
        self._steps.leave()

    def _next(self) -> PlannedMicrobatch:
        """Return the next micro-batch of this rank."""
        if self._sampler is not None:
            if not self._planned:
                raise UsageError(
                    f"{self._steps.place}: a micro-batch begins, and the sampler of ls.exact has "
                    "yielded no other one: train on each item of the DataLoader once"
                )
            return self._planned.popleft()
        count = self._parallel.microbatches
        own = self._parallel.share.pieces(count)
        index, _ = own[-self._remaining if self._remaining else 0]
        return PlannedMicrobatch(index, 1, count, count)

    # --- a micro-batch ------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a micro-batch, so that random numbers before the model's forward depend on it.

        Raises:
            UsageError: The last micro-batch had no backward, or the sampler has yielded no other.
        """
        self._require_backward()
        LoadedHere.end()
        planned = self._next()
        loop = self._loop
        if loop is None:
            loop = self._open(planned)
        else:
            loop.step.times.loading += self._loading
        self._loading = 0.0
        batch = loop.step.batch
        assert batch is not None
        if self._sampler is not None and (batch.epoch, batch.identity.position) != planned[4:6]:
            self.leave()
            raise UsageError(
                f"{self._steps.place}: batch {batch.identity.position} of epoch {batch.epoch} was "
                "left before its last micro-batch: train on all micro-batches of a batch"
            )
        self._current = planned
        self._is_weighed = False
        self._generators = None
        self._watched.begin()
        loop.begin(self._index[planned.number])

    def _open(self, planned: PlannedMicrobatch) -> MicrobatchLoop:
        """Begin a step with the first micro-batch of a batch."""
        loop = self._steps.begin(is_repeatable=False)
        loop.step.may_overflow = True  # whether losses are scaled is not known
        share: ReplicaShare = self._parallel.share
        pieces = share.pieces(planned.samples)
        microbatches = tuple(Microbatch(index, len(piece), None) for index, piece in pieces)
        identity = BatchIdentity(planned.epoch, planned.batch, planned.order)
        batch = Batch(
            planned.samples,
            planned.leaves,
            microbatches,
            planned.epoch,
            self._loading,
            identity=identity,
        )
        loop.start(batch)
        self._has_gradients = False
        self._index = {microbatch.index: microbatch for microbatch in microbatches}
        self._remaining = len(microbatches)
        self._loop = loop
        self._watched = LoopWatch(loop.step)
        return loop

    def weigh(
        self, loss: torch.Tensor, share: float | None, weight: float | None, divisor: float
    ) -> torch.Tensor:
        """Return the part of a micro-batch's loss in the loss of the batch."""
        loop = self._loop
        current = self._current
        if loop is None or loop.current is None or current is None:
            raise UsageError(
                f"{self._steps.place}: call exact.weigh(loss) between the model's forward and "
                f"backward, in a loop over exact.microbatches(loader); {ADVICE}"
            )
        self._is_weighed = True
        if share is None and weight is None:
            size = loop.current.microbatch.size
            warn_of_denominator(loop.step, loss, size, "exact.weigh(loss)")
        if share is not None:
            share = read_number(loop, "share= of exact.weigh", share)
        require_number(f"{loop.place}: divisor= of exact.weigh", divisor)
        if weight is not None:
            share = read_number(loop, "weight= of exact.weigh", weight)
            self._steps.weights.given[current.number] = share
        elif share is None:
            share = loop.step.shares[current.number]
        loop.note_loss(loss, share)
        part = (loss.float() if loss.dtype is torch.float16 else loss) * share
        for observer in loop.step.observers:
            observer.record_graph(part, (loop.step.number, current.number))
        if divisor == 1:
            return part
        if torch.ones((), dtype=part.dtype).div(divisor).mul(divisor) != 1:
            raise UsageError(
                f"{loop.place}: the loss is divided by {divisor} on this number of ranks, which "
                f"cannot be undone exactly in {part.dtype}: use another number of ranks or of "
                "micro-batches"
            )
        return part * divisor

    # --- what autograd and the model call ------------------------------------------------------

    @property
    def _is_nested(self) -> bool:
        """Whether the open step is that of a nested loop, with the same handle."""
        opened = self._steps.opened
        return opened is not None and opened.prepared is None and self._loop is None

    def before_forward(self, arguments: Arguments) -> Arguments | None:
        """Begin a micro-batch at its first forward in training, unless `begin` was called."""
        if not torch.is_grad_enabled() or not self._steps.is_trainable or self._is_nested:
            return None
        if self._current is None and self._model.training and self._sampler is not None:
            is_here = LoadedHere.restore is None  # otherwise loading has seeded the generators
            before = self._generators if self._remaining and is_here else None
            if before is not None and before != state_of_all(self._parallel.device):
                raise UsageError(
                    f"{self._steps.place}: random numbers were drawn between two micro-batches, "
                    "before the model was called: iterate over exact.microbatches(loader), or call "
                    "exact.begin() first"
                )
            self.begin()
            self._generators = ()
        if self._current is None:
            return None
        return align_tensors(arguments[0]), align_tensors(arguments[1])

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Do nothing: the audit watches the model itself."""

    def begin_backward(self) -> None:
        """Refuse a second backward of a micro-batch."""
        if self._current is None and not self._is_nested:
            raise UsageError(
                f"{self._steps.place}: a second backward began after that of a micro-batch: add "
                "its losses, and call backward once"
            )
        loop = self._loop
        if loop is not None and self._current is not None:
            for check in loop.step.backward_checks:
                check(self._current.number)
        if loop is not None and not self._has_gradients:
            # Only now, since frameworks call zero_grad() after the micro-batch has begun.
            self._steps.require_no_gradients()
            assert loop.step.batch is not None
            loop.open(loop.step.batch)
            self._has_gradients = True

    def end_backward(self) -> None:
        """End the micro-batch, unless this was `torch.autograd.grad`; the last one ends a step."""
        if self._loop is None or self._current is None or not self._steps.has_gradients:
            return
        try:
            self._end(self._loop, self._current)
        except BaseException as error:
            self._loop = None
            self._steps.fail(error)

    @torch.no_grad()
    def _end(self, loop: MicrobatchLoop, current: PlannedMicrobatch) -> None:
        if not self._is_weighed and not self._has_warned and self._parallel.rank == 0:
            self._has_warned = True
            log(
                "ls.exact adds the losses of all micro-batches as they are: write "
                "exact.weigh(loss).backward(), or divide each loss by the number of micro-batches "
                "of the whole batch, which does not depend on the number of ranks"
            )
        self._watched.end()
        self._current = None
        self._remaining -= 1
        if self._steps.weights.given.get(current.number) == 0:
            loop.skip()
        else:
            loop.end()
        if self._remaining:
            if self._generators is not None:
                self._generators = state_of_all(self._parallel.device)
            return
        self._generators = None
        self._loop = None
        loop.close_sums()
        self._steps.finish()
        is_end = current.batch + 1 == current.batches
        self.next_position = (
            (current.epoch + 1, 0) if is_end else (current.epoch, current.batch + 1)
        )
