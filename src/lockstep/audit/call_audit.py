"""The audit of calls: each rank repeats one call of its own, and compares the bits.

    step 0, 1, 2, 5, ...     one micro-batch of this rank is recorded: `RecordedCall`
    after its last one       repeated on another core: equal in almost every step
    after a difference       repeated on both cores, and after other calls, to find state
    exchange of statuses     an error is raised on every rank, before gradients are added

It audits the model in a loop with `ls.exact` or in a manual step, and pipeline stages. Ranks audit
their own micro-batches, all at the same time. A wrong result is not replaced, since it was in the
hands of the loop, or of another stage, before. Where the step can be computed again, it is. The
ranks of a sharded model gather its parameters together, so each repeats its call as often as any
other one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.audit_plan import plan_audit
from lockstep.audit.microbatch_results import combine_hashes, find_damaged
from lockstep.audit.recorded_call import CannotRepeatError, RecordedCall
from lockstep.audit.repetition_trace import RepetitionTrace, find_trace_difference, read_changes
from lockstep.audit.verdict import (
    Computation,
    explain_processor,
    explain_program,
    find_blame,
    join_names,
    judge,
)
from lockstep.kernel.errors import LockstepError, StateError, WorkError
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.messages import log
from lockstep.model.call_site import class_name
from lockstep.model.watched_calls import Arguments, ShardedModel, output_tensors
from lockstep.processor_core import find_core, on_another_core, on_core

__all__ = ["SEVERAL_CALLS", "CallAudit", "raise_by_name"]

SEVERAL_CALLS = "the model is called several times per micro-batch"


@dataclass(frozen=True)
class _Votes:
    """The computations of a call whose results differ.

    Attributes:
        computations: That of the loop, and three repetitions, on both cores in turn.
        here: Returns a context on the core of the loop.
        there: Returns a context on the other core.
        changed: The names of what has changed in Python, for messages; "" if nothing has.
        is_dependent: Whether the result was seen to depend on what was computed before.
    """

    computations: Sequence[Computation]
    here: Callable[[], AbstractContextManager[Any]]
    there: Callable[[], AbstractContextManager[Any]]
    changed: str
    is_dependent: bool


# It has many attributes: a call is recorded, repeated and compared at different moments of a
# step.
class CallAudit:
    """The audit of the calls of a model, or of the blocks of a stage.

    Args:
        config: The settings; None: no step is audited.
        rank: This rank.
        call: What is called, such as the model below DistributedDataParallel, perhaps compiled.
        modules: The modules, by the prefix of their tensors' names.
        scopes: Their RNG scopes.
        position: A function that returns the micro-batch and the stage that are being computed;
            None between them.
        who: What cannot audit a step, in messages.
        sharded: The gradients, if the model is sharded: ranks audit micro-batches of one turn, and
            all of them repeat theirs as often as any.

    Attributes:
        say: A function that takes a message, and the finding that it is about; None: the step
            cannot be audited.
        is_repeatable: Whether the step is computed again after a wrong result, whose finding then
            says that it is corrected.
    """

    def __init__(
        self,
        config: AuditConfig | None,
        rank: int,
        call: Callable[..., Any],
        modules: Mapping[str, nn.Module],
        scopes: RngScopes,
        position: Callable[[], tuple[int, int] | None],
        who: str,
        sharded: ShardedModel | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._who = who
        self._sharded = sharded
        self.say: Callable[[str, Mapping[str, Any] | None], None] = self._log
        self.is_repeatable = False
        self._call = call
        self._modules = modules
        self._scopes = scopes
        self._position = position
        self._corrections = 0
        self._has_warned = False
        self._step = 0
        self._chosen = -1
        self._recorded: RecordedCall | None = None
        self._own: Computation | None = None
        self._hashes: dict[str, int] = {}  # of the last computation

    def begin_step(self, number: int, microbatches: Sequence[int]) -> None:
        """Choose one of this rank's micro-batches, if the step is audited."""
        self._step = number
        self._chosen = -1
        self._recorded = None
        self._own = None
        if self._config is not None and self.is_due and microbatches:
            turn = self._config.count_audited(number)
            span = range(len(microbatches))
            self._chosen = microbatches[plan_audit(turn, [span], alone=True).microbatch]

    @property
    def is_due(self) -> bool:
        """Whether the current step is audited."""
        return self._config is not None and self._config.is_audited(self._step)

    def _log(self, message: str, finding: object) -> None:
        if self._rank == 0 or finding is not None:
            log(message)

    @property
    def _is_chosen(self) -> bool:
        """Whether the micro-batch that is being computed is repeated later."""
        position = self._position()
        return position is not None and position[0] == self._chosen

    def refuse(self, reason: str) -> None:
        """Do not audit the current micro-batch, if it was chosen, and say why."""
        with self._recording() if self._is_chosen else suppress(CannotRepeatError):
            raise CannotRepeatError(reason)

    def leave_out(self) -> None:
        """Repeat no call of the current step."""
        self._chosen = -1
        self._recorded = None

    def begin_call(self, arguments: Arguments) -> Arguments:
        """Record a call of the model."""
        if self._is_chosen:
            with self._recording():
                if self._recorded is not None or not torch.is_grad_enabled():
                    raise CannotRepeatError(SEVERAL_CALLS)
                self._recorded = RecordedCall(
                    self._call, self._modules, self._scopes, arguments, self._sharded
                )
        return arguments

    def end_call(self, outputs: Any) -> None:
        """Record the outputs of the call."""
        if self._is_chosen:
            with self._recording() as recorded:
                recorded.end(list(output_tensors(outputs)))

    def end_microbatch(
        self, inputs: Sequence[torch.Tensor | None] = (), is_of_script: bool = True
    ) -> None:
        """Record the results of the micro-batch, with the gradients of inputs that are known.

        A script may have written to gradients after its backward pass; a stage computes some
        later than others.
        """
        if self._is_chosen:
            with self._recording() as recorded:
                if recorded is None:
                    raise CannotRepeatError("the model is not called in each micro-batch")
                self._own = self._describe(recorded.finish(inputs, is_of_script), is_repeated=False)

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        """Run the body; if the call cannot be repeated, say so once, and audit nothing."""
        try:
            yield self._recorded
        except CannotRepeatError as error:
            self._chosen = -1
            self._recorded = None
            if not self._has_warned:
                says = f"{self._who} cannot audit step {self._step}, nor others like it: {error}"
                self.say(says, None)
            self._has_warned = True

    def find_failure(
        self, fresh: Callable[[], AbstractContextManager[None]]
    ) -> LockstepError | None:
        """Repeat the call, and return the error that ends the training; None for none.

        Args:
            fresh: A function that returns a context in which the model has fresh buffers.
        """
        self._fresh = fresh
        failure = None
        if not self._can_repeat():
            return None
        assert self._own is not None
        with self._recording():
            first = self._hashes
            again = self._repeat(on_another_core())
            if again.bits != self._own.bits:
                damaged = find_damaged(first, self._hashes)
                failure = self._explain(self._vote(self._own, again), damaged)
        while self._sharded is not None and self._sharded.find_any(False):
            self._compute(nullcontext())  # a rank needs all others to explain its results
        self._recorded = None
        return failure

    def _can_repeat(self) -> bool:
        """Return whether this rank can repeat a call, and all others can if the model is sharded.

        A collective call in an audited step of a sharded model.
        """
        if self._sharded is None or not self.is_due:
            return self._recorded is not None and self._own is not None
        with self._recording() as recorded, self._fresh():
            if recorded is not None:
                recorded.require_unchanged()
        return not self._sharded.find_any(self._recorded is None or self._own is None)

    def _repeat(self, somewhere: AbstractContextManager[Any], **how: bool) -> Computation:
        if self._sharded is not None:
            self._sharded.find_any(True)
        return self._compute(somewhere, **how)

    def _compute(self, somewhere: AbstractContextManager[Any], **how: bool) -> Computation:
        assert self._recorded is not None
        with somewhere, self._fresh():
            return self._describe(self._recorded.repeat(**how), is_repeated=True)

    def _call_otherwise(self) -> None:
        """Let the modules keep what they keep of other inputs."""
        if self._sharded is None:  # the other ranks would wait for one whose model raises
            with suppress(CannotRepeatError):  # the inputs may be invalid
                self._repeat(nullcontext(), is_reversed=True)

    def _describe(self, hashes: dict[str, int], *, is_repeated: bool) -> Computation:
        bits = combine_hashes(hashes)
        self._hashes = hashes
        return Computation(self._rank, platform.node(), find_core(), bits, is_repeated)

    def _explain(self, votes: _Votes, damaged: str | None) -> LockstepError | None:
        """Return the error about results that differ; None if it was one wrong result."""
        place = f"step {self._step}, micro-batch {self._chosen}"
        verdict = judge(votes.computations)
        if verdict.is_single and verdict.culprit is not None and not votes.is_dependent:
            return self._report(place, verdict.culprit, damaged, votes.changed)
        encoded = self._trace(votes)
        difference = find_trace_difference(encoded, encoded)
        blame = find_blame(verdict.votes, difference.evidence, is_dependent=votes.is_dependent)
        if blame == "program":
            changed = read_changes(encoded)
            reason = explain_program(difference.where, difference.evidence, changed)
            return StateError(f"rank {self._rank}, {place}: {reason}")
        computations = votes.computations
        reason = explain_processor(blame, place, verdict, computations, difference.where)
        cores = "this core" if blame == "one" else "these cores"
        message = f"{reason}: continue from the last checkpoint without {cores}"
        culprit = verdict.culprit or computations[0]._replace(core=-1)  # of both cores
        finding = culprit.describe_fault(self._step, self._chosen, message)
        finding |= {"module": difference.module, "operator": difference.operator}
        self.say(message, finding | {"count": self._corrections + 1})
        return WorkError(message)

    def _vote(self, first: Computation, again: Computation) -> _Votes:
        """Repeat the call on both cores, then after other calls, which shows hidden state."""
        assert self._recorded is not None
        watch = self._recorded.watch
        here = partial(on_core, first.core)
        there = partial(on_core, again.core)
        repeated = self._repeat(here())
        computations = [first, again, repeated, self._repeat(there())]
        changed = join_names(watch.list_changes())
        # Repetitions in a row agree if each begins with what the one before it has kept.
        with watch.restored():
            as_then = self._repeat(here())
        is_dependent = as_then.bits == first.bits != repeated.bits
        if judge(computations).votes != "state" and not is_dependent:
            self._call_otherwise()
            is_dependent = self._repeat(here()).bits != repeated.bits
        return _Votes(computations, here, there, changed, is_dependent)

    def _trace(self, votes: _Votes) -> bytes:
        """Repeat the call on both cores, as at first and after another call, with its operators."""
        assert self._recorded is not None
        watch = self._recorded.watch
        trace = RepetitionTrace(self._modules, lambda: None, watch)
        with watch.restored(), trace.recording(self._chosen):
            self._repeat(votes.here())
        self._call_otherwise()
        with trace.recording(self._chosen):
            self._repeat(votes.there())
        return trace.encode(self._chosen)

    def _report(
        self, place: str, culprit: Computation, damaged: str | None, changed: str
    ) -> WorkError | None:
        """Report one wrong result; return the error after too many of them."""
        assert self._config is not None
        self._corrections += 1
        is_own = culprit is self._own
        module = class_name(self._modules[""]) if damaged == "" else damaged
        is_corrected = is_own and self.is_repeatable
        where = "" if module is None else f" in {module}"
        cause = f"{changed}, which forward changes" if changed else "what the loop sets around it"
        has_other = bool(changed) or (is_own and not is_corrected)
        where += f" (or the call of the model depends on {cause})" if has_other else ""
        end = " when it was repeated; the gradients do not contain it"
        if is_own:
            end = ", which the gradients contain: continue from an earlier checkpoint if you need "
            end = "; the step is computed again" if is_corrected else f"{end}the right bits"
        message = f"{place}: {culprit.place} computed a wrong result{where}{end}"
        finding = culprit.describe_fault(self._step, self._chosen, message)
        finding |= {"module": module, "corrected": is_corrected, "count": self._corrections}
        self.say(message, finding)
        if self._corrections <= self._config.max_corrections:
            return None
        excess = self._config.explain_excess(self._corrections)
        return WorkError(f"{culprit.place} {excess}; if they do the same, pass audit=False")


def raise_by_name(kind: str, message: str) -> NoReturn:
    """Raise an error that `CallAudit.find_failure` has returned on a rank, by its type's name."""
    raise {"StateError": StateError, "WorkError": WorkError}[kind](message)
