"""The audit of `ls.exact`: each rank repeats one call of the model, and compares the bits.

    step 0, 1, 2, 5, ...     one micro-batch of this rank is recorded: `RecordedCall`
    after its last one       repeated on another core: equal in almost every step
    after a difference       repeated three times more, then operator by operator
    exchange of statuses     an error is raised on every rank, before gradients are added

Ranks audit their own micro-batches, all at the same time. A wrong result is reported, and is not
replaced, since it was in the loop's hands before.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.audit_plan import count_audited, is_audited, plan_audit
from lockstep.audit.microbatch_results import combine_hashes
from lockstep.audit.processor_core import find_core, on_another_core
from lockstep.audit.recorded_call import CannotRepeatError, RecordedCall
from lockstep.audit.repetition_trace import (
    RepetitionTrace,
    StateWatch,
    explain_state,
    find_difference,
    join_names,
)
from lockstep.audit.verdict import Computation, judge
from lockstep.kernel.errors import LockstepError, StateError, WorkError
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.messages import log
from lockstep.model.backward_watch import Arguments

__all__ = ["ExactAudit"]


class ExactAudit:
    """The audit of one handle of `ls.exact`.

    Args:
        config: The settings; None: no step is audited.
        rank: This rank.
        call: What is called: the model below DistributedDataParallel, perhaps compiled.
        module: The model itself.
        scopes: Its RNG scopes.
    """

    def __init__(
        self,
        config: AuditConfig | None,
        rank: int,
        call: Callable[..., Any],
        module: nn.Module,
        scopes: RngScopes,
    ) -> None:
        self._config, self._rank = config, rank
        self._call, self._module, self._scopes = call, module, scopes
        self._corrections, self._has_warned = 0, False
        self._step, self._chosen = 0, -1
        self._recorded: RecordedCall | None = None
        self._own: Computation | None = None

    def begin_step(self, number: int, microbatches: Sequence[int]) -> None:
        """Choose one of this rank's micro-batches, if the step is audited."""
        self._step, self._chosen, self._recorded, self._own = number, -1, None, None
        if self._config is None or not is_audited(number, self._config.every_steps):
            return
        turn = count_audited(number, self._config.every_steps)
        span = range(len(microbatches))
        self._chosen = microbatches[plan_audit(turn, [span], alone=True).microbatch]

    def begin_call(self, microbatch: int, arguments: Arguments | None) -> None:
        """Record a call of the model; without arguments, one that has no backward pass."""
        if microbatch == self._chosen:
            with self._recording():
                if self._recorded is not None or arguments is None:
                    raise CannotRepeatError("the model is called several times per micro-batch")
                self._recorded = RecordedCall(self._call, self._module, self._scopes, arguments)

    def end_call(self, microbatch: int, outputs: Sequence[torch.Tensor]) -> None:
        """Record the outputs of the call."""
        if microbatch == self._chosen:
            with self._recording() as recorded:
                recorded.end(outputs)

    def begin_backward(self, microbatch: int) -> None:
        """Record the beginning of the backward pass."""
        if microbatch == self._chosen:
            with self._recording() as recorded:
                recorded.begin_backward()

    def end_microbatch(self, microbatch: int) -> None:
        """Record the results of the micro-batch."""
        if microbatch == self._chosen:
            with self._recording() as recorded:
                self._own = self._describe(recorded.finish(), is_repeated=False)

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        """Run the body; if the call cannot be repeated, say so once, and audit nothing."""
        try:
            yield self._recorded
        except CannotRepeatError as error:
            self._chosen, self._recorded = -1, None
            if not self._has_warned and self._rank == 0:
                log(f"ls.exact cannot audit step {self._step}, nor others like it: {error}")
            self._has_warned = True

    def find_failure(
        self, fresh: Callable[[], AbstractContextManager[None]]
    ) -> LockstepError | None:
        """Repeat the call, and return the error that ends the training; None for none.

        Args:
            fresh: A function that returns a context in which the model has fresh buffers.
        """
        if self._recorded is None or self._own is None:
            return None
        self._fresh = fresh
        with self._recording():
            if (again := self._repeat(elsewhere=True)).bits != self._own.bits:
                return self._explain([self._own, again])
        self._recorded = None
        return None

    def _repeat(self, *, elsewhere: bool = False) -> Computation:
        assert self._recorded is not None
        with on_another_core() if elsewhere else nullcontext(), self._fresh():
            return self._describe(self._recorded.repeat(), is_repeated=True)

    def _describe(self, hashes: dict[str, int], *, is_repeated: bool) -> Computation:
        bits = combine_hashes(hashes)
        return Computation(self._rank, platform.node(), find_core(), bits, is_repeated)

    def _explain(self, computations: list[Computation]) -> LockstepError | None:
        """Return the error about results that differ; None if it was one wrong result."""
        watch = StateWatch({"": self._module})
        watch.begin()
        computations += [self._repeat(), self._repeat(elsewhere=True)]
        changed = join_names(watch.list_changes())
        verdict, place = judge(computations), f"step {self._step}, micro-batch {self._chosen}"
        if verdict.is_single and verdict.culprit is not None:
            return self._report(place, verdict.culprit, changed)
        trace = RepetitionTrace({"": self._module}, lambda: None)
        trace.note_turn()
        for _ in range(2):
            with trace.recording(self._chosen):
                self._repeat()
        encoded = trace.encode(self._chosen)
        difference = find_difference(encoded, encoded)
        if verdict.kind == "state" or not (difference is None or difference.is_fault):
            return StateError(f"rank {self._rank}, {place}: {explain_state(encoded, difference)}")
        one = computations[0]
        two = next(other for other in computations if other.bits != one.bits)
        return WorkError(
            f"{place}: {one.place} and {two.place} compute different results from the same inputs, "
            f"again and again{'' if difference is None else difference.where}; one of them is "
            "faulty: continue from the last checkpoint without these cores"
        )

    def _report(self, place: str, culprit: Computation, changed: str) -> WorkError | None:
        """Report one wrong result; return the error after too many of them."""
        assert self._config is not None
        self._corrections += 1
        is_own = culprit is self._own
        cause = f"{changed}, which forward changes" if changed else "what the loop sets around it"
        or_else = f" (or the call of the model depends on {cause})" if changed or is_own else ""
        log(
            f"{place}: {culprit.place} computed a wrong result{or_else}"
            f"{', which the gradients contain' if is_own else ''}: continue from an earlier "
            "checkpoint if you need the right bits"
        )
        if self._corrections <= self._config.max_corrections:
            return None
        excess = self._config.explain_excess(self._corrections)
        return WorkError(f"{culprit.place} {excess}; if they do the same, pass audit=False")
