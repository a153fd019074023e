"""Whether one pass over several micro-batches has the bits of separate passes.

    separate passes, whose results count      the losses and gradients are noted
    a pass over the first micro-batch         its operators are recorded
    a pass over the last micro-batch          the same operators, or there is no joint pass
    a pass over all micro-batches             recorded; which operators add up samples is planned
    the planned pass                          all bits are compared with those noted

Later trials of a kind of micro-batches repeat the last line only. What has been found is kept by
kind: a number of micro-batches, and the shapes of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.repetition_trace import StateWatch
from lockstep.checksum import checksum
from lockstep.comm.native_module import load_native
from lockstep.kernel.batch import Microbatch
from lockstep.kernel.buffers import Buffers, have_same_bits
from lockstep.kernel.step_context import StepContext
from lockstep.malloc import release_freed_memory
from lockstep.training.one_pass.call_comparison import CannotJoin, UnknownOrder
from lockstep.training.one_pass.grouped_passes import HashNode, PassResults
from lockstep.training.one_pass.pass_attempt import (
    UNCUT,
    PassAttempt,
    list_calls,
    list_names,
    make_recorded,
    take_calls,
)
from lockstep.training.one_pass.pass_plan import PlannedCalls, count_bytes, plan_pass

__all__ = ["JoinedPass", "KnownPasses", "PassKind", "Trial", "discard_results"]

SCHEDULE = AuditConfig()
"""The steps in which a pass is compared with separate passes again."""

MOST_BYTES = 128 << 20
"""The bytes that a pass may keep for its backward pass: with more of them per micro-batch, the time
of a pass is that of its kernels, not of calling them."""

MOST_TRIALS = 8
"""The number of kinds of micro-batches, such as lengths of sequences, that are tried."""

MOST_CHANGES = 3
"""How often a pass of a kind is planned again, because the model has called other operators."""

DOUBT = (
    ", so unless the model was changed, the bits of earlier steps may be others than those of "
    "separate passes"
)

CHANGED = "{} was not called as in the first step"


class PassKind(NamedTuple):
    """The properties of micro-batches for which a pass is planned.

    Attributes:
        segments: The number of micro-batches.
        shapes: The shapes of each, from `describe_shapes`.
    """

    segments: int
    shapes: Any


class JoinedPass:
    """A pass over micro-batches with the shapes of those for which it was planned.

    Args:
        forward: The operators of the forward pass.
        backward: Those of the backward pass.
        segments: The number of micro-batches.
        joins_losses: Whether the losses are computed together, in the forward pass.

    Attributes:
        written: The buffers that forward has written with the bits of separate passes.
    """

    def __init__(
        self, forward: PlannedCalls, backward: PlannedCalls, segments: int, *, joins_losses: bool
    ) -> None:
        self.joins_losses = joins_losses
        self.written: set[str] = set()
        make = load_native().SegmentedCalls
        self.forward = make(forward, segments, joins_losses)
        self.backward = make(backward, segments, joins_losses)

    def attempt(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> PassAttempt:
        """Return a pass, in which the first operators are expected again."""
        self.forward.restart()
        self.backward.restart()
        return PassAttempt(
            step, buffers, group, self.forward, self.backward, joins_losses=self.joins_losses
        )

    def require_written(self, names: Collection[str]) -> None:
        """Raise CannotJoin if buffers were written that were not when bits were compared."""
        if new := sorted(set(names) - self.written):
            raise CannotJoin(f"forward writes the buffer {new[0]}, and did not in the first step")

    def find_reason(self, error: Exception) -> str:
        """Return why the pass cannot be computed, which may be a difference before the error.

        Numbers that another operator has drawn are no reason of their own.
        """
        name = self.find_difference()
        return CHANGED.format(name) if name else str(error)

    def find_difference(self) -> str:
        """Return the operator in forward that was not called as planned; "" if there is none."""
        return "" if self.forward.reads_statistics else self.forward.find_difference()

    def require_same(self) -> None:
        """Raise CannotJoin unless the passes have called the operators of the plan."""
        self.require_same_forward()
        self.require_same_backward()

    def require_same_forward(self) -> None:
        """Raise CannotJoin unless the forward pass has called the operators of the plan."""
        if self.forward.reads_statistics:
            raise CannotJoin("forward uses running statistics after batch norm has changed them")
        if name := self.forward.find_difference():
            raise CannotJoin(CHANGED.format(name))

    def require_same_backward(self) -> None:
        """Raise CannotJoin unless the backward pass has called the operators of the plan."""
        if name := self.backward.find_difference():
            raise CannotJoin(CHANGED.format(name))


class KnownPasses:
    """The results of trials.

    Attributes:
        note: Why micro-batches are computed one by one; "" if they are not.
    """

    def __init__(self) -> None:
        self._joined: dict[PassKind, JoinedPass | None] = {}  # None: computed one by one
        self._bytes: dict[Any, int] = {}  # that a micro-batch keeps, by its shapes
        self._tried: set[PassKind] = set()
        self._changes = Counter[PassKind]()
        self._separate_losses: set[PassKind] = set()
        self._steps = Counter[PassKind]()
        self.note = ""

    def find(self, kind: PassKind) -> JoinedPass | None:
        """Return the pass of a kind; None: there is none, or it is not known yet."""
        return self._joined.get(kind)

    def is_known(self, kind: PassKind) -> bool:
        """Return whether a trial of a kind has ended."""
        return kind in self._joined

    def keep(self, kind: PassKind, joined: JoinedPass | None) -> None:
        """Keep what a trial has found; None: the micro-batches are computed one by one."""
        self._joined[kind] = joined

    def forget(self, kind: PassKind) -> None:
        """Plan a pass of a kind again in the next step, unless it has often changed.

        What has changed may be the loss, so the next pass is planned without it.
        """
        joined = self._joined[kind]
        may_be_loss = joined is not None and joined.joins_losses
        if may_be_loss and kind not in self._separate_losses:
            self._separate_losses.add(kind)
            del self._joined[kind]
            return
        if self.allow_repetition(kind):
            del self._joined[kind]
        else:
            self._joined[kind] = None

    def may_join_losses(self, kind: PassKind) -> bool:
        """Return whether no pass of a kind with all losses has changed."""
        return kind not in self._separate_losses

    def set_bytes(self, shapes: Any, size: int) -> None:
        """Keep the number of bytes that a micro-batch keeps for its backward pass."""
        self._bytes[shapes] = size

    def find_bytes(self, shapes: Any) -> int | None:
        """Return the number of bytes that a micro-batch keeps; None: it is not known."""
        return self._bytes.get(shapes)

    def fits(self, kind: PassKind) -> bool:
        """Return whether a pass keeps little enough memory, as far as this is known."""
        return self._bytes.get(kind.shapes, 0) * kind.segments <= MOST_BYTES

    def allow_trial(self, kind: PassKind) -> bool:
        """Return whether a kind may be tried, which is counted."""
        if len(self._tried | {kind}) > MOST_TRIALS:
            return False
        self._tried.add(kind)
        return True

    def allow_repetition(self, kind: PassKind) -> bool:
        """Return whether a pass may be planned again in the next step, which is counted."""
        self._changes[kind] += 1
        return self._changes[kind] <= MOST_CHANGES

    def withdraw_trial(self, kind: PassKind) -> None:
        """Count a trial no more, which has ended before all micro-batches were computed."""
        self._tried.discard(kind)

    def count_step(self, kind: PassKind) -> None:
        """Count a step in which micro-batches were compared, or computed together."""
        self._steps[kind] += 1

    def is_due(self, kind: PassKind) -> bool:
        """Return whether a pass is compared again, by the number of steps that were counted."""
        return SCHEDULE.is_audited(self._steps[kind])

    def explain(self, reason: str) -> None:
        """Set the note, unless there is one."""
        self.note = self.note or reason


# It has many attributes: the results of separate passes, and what the passes are computed with.
class Trial:
    """The results of separate passes, with which those of one pass are compared.

    Args:
        known: What earlier trials have found.
        kind: The kind of the micro-batches.
        perform: Computes a pass that the trial yields.
        modules: The modules that a step calls.
        parameters: Their parameters.
        step: The context of the step.
        buffers: The buffers of the step.
        group: The micro-batches.
        loss_modes: Whether the losses may be computed together, in the order in which this is
            tried.

    Attributes:
        is_new: Whether the pass has to be planned.
        words: How a difference of something that is noted by name is described.
        alone: The pass over the first micro-batch, if it is recorded already.
        last: The pass over the last one, too.
    """

    def __init__(
        self,
        known: KnownPasses,
        kind: PassKind,
        perform: Callable[[PassAttempt], None],
        modules: Mapping[str, nn.Module],
        parameters: Sequence[nn.Parameter],
        step: StepContext,
        buffers: Buffers,
        group: Sequence[Microbatch],
        *,
        loss_modes: Sequence[bool],
    ) -> None:
        self._known = known
        self._kind = kind
        self._perform = perform
        self._modules = modules
        self._parameters = parameters
        self._step = step
        self._buffers = buffers
        self._group = group
        self._loss_modes = loss_modes
        self._joins_losses = False
        self.words = "the metric {!r}"
        self.is_new = not known.is_known(kind)
        self.alone: PassAttempt | None = None
        self.last: PassAttempt | None = None
        self._versions = _read_versions(group)
        self._losses: list[torch.Tensor] = []
        self._metrics: list[Mapping[str, torch.Tensor]] = []
        self._checksums: Mapping[torch.Tensor, int] = {}

    def note(
        self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], hash_node: HashNode
    ) -> None:
        """Keep the results of a micro-batch: checksums of gradients, which may need much memory.

        Args:
            loss: The loss.
            metrics: Its metrics.
            hash_node: Returns the checksums of the sums of all micro-batches, after the last one.
        """
        self._losses.append(loss.detach())
        self._metrics.append({**metrics})
        first = self._group[0].index
        if len(self._losses) == len(self._group):
            self._checksums = hash_node((first, first + len(self._group)))

    def record(
        self,
        group: Sequence[Microbatch],
        *,
        restores: bool = True,
        first: PassAttempt | None = None,
        last: PassAttempt | None = None,
    ) -> PassAttempt:
        """Return a pass over some of the micro-batches, whose operators are recorded.

        Args:
            group: The micro-batches.
            restores: Whether the generator is restored after the pass.
            first: The recorded pass over the first micro-batch; None: this is the one.
            last: That over the last one; None: this is the one, or the first one.
        """
        before = last or first
        forward: Any = None if before is None else before.forward
        backward: Any = first.backward if first and last else None
        joins_losses = self._joins_losses
        make = partial(make_recorded, restores, joins_losses=joins_losses)
        return PassAttempt(
            self._step,
            self._buffers,
            group,
            make(keeps=False, first=forward),
            make(keeps=first is None, first=backward),
            joins_losses=joins_losses,
        )

    def finish(self) -> None:
        """Compute the same micro-batches together, and compare the bits."""
        for attempt in self.list_passes():
            self._perform(attempt)

    def list_passes(self) -> Iterator[PassAttempt]:
        """Yield the passes that have to be computed, and compare the bits of the last one."""
        known = self._known
        watch = StateWatch(self._modules)
        watch.begin()
        joined = None
        try:
            if _read_versions(self._group) != self._versions:
                # A joint pass writes into copies, and the script may pass the batch again.
                raise CannotJoin("the inputs of the batch are written")
            joined = yield from self._find(watch)
        except UnknownOrder as reason:
            if known.allow_repetition(self._kind):
                return
            known.explain(str(reason))
        except CannotJoin as reason:
            joined = None
            known.explain(str(reason))
            if not self.is_new and DOUBT not in known.note:
                known.note += DOUBT
        except Exception as error:  # the separate passes had none
            joined = None
            known.explain(f"several micro-batches raise {type(error).__name__}: {error}")
        finally:
            self._discard()
        if self.is_new:  # planning takes more memory than any later pass
            release_freed_memory()
        if joined is None and not known.fits(self._kind):
            return  # fewer micro-batches are tried in the next step
        known.keep(self._kind, joined)

    def _find(self, watch: StateWatch) -> Generator[PassAttempt, None, JoinedPass | None]:
        """Compare the known pass, or plan one: with all losses, or else with each on its own."""
        known = self._known
        joined = known.find(self._kind)
        if joined is not None:
            try:
                return (yield from self._compare(watch, joined))
            except Exception:  # a model that has changed may raise anything in the old plan
                if not joined.find_difference():
                    raise
                known.forget(self._kind)
                if known.is_known(self._kind):
                    raise
            self._discard()
            self.is_new = True
        *earlier, last = self._loss_modes
        for joins_losses in earlier if known.may_join_losses(self._kind) else ():
            self._joins_losses = joins_losses
            try:
                return (yield from self._compare(watch, (yield from self._plan())))
            except Exception:  # which may be that of a loss
                self._discard()
        self._joins_losses = last
        return (yield from self._compare(watch, (yield from self._plan())))

    def _compare(
        self, watch: StateWatch, joined: JoinedPass | None
    ) -> Generator[PassAttempt, None, JoinedPass | None]:
        """Return a pass after comparing its bits; None if it would keep too much memory.

        Raises:
            CannotJoin: They are others.
        """
        if joined is None:
            return None
        attempt = joined.attempt(self._step, self._buffers, self._group)
        yield attempt
        try:
            results = attempt.take()
        except CannotJoin as error:
            raise CannotJoin(joined.find_reason(error)) from error
        joined.require_same()
        if difference := self._find_difference(results):
            raise CannotJoin(f"{difference} has other bits for several micro-batches")
        if changed := watch.list_changes():
            raise CannotJoin(f"forward changes {changed[0]}")
        joined.written |= attempt.list_written()
        return joined

    def _plan(self) -> Generator[PassAttempt, None, JoinedPass | None]:
        """Record the passes over one micro-batch and over all; None if they keep too much."""
        group = self._group
        alone = self.alone
        if alone is None:
            alone = self.record(group[:1])
            yield alone
        one = take_calls(alone)
        self._discard()
        self._known.set_bytes(self._kind.shapes, count_bytes(one[0]))
        if not self._known.fits(self._kind):
            self._known.withdraw_trial(self._kind)
            return None
        last = self.last
        if last is None:
            last = self.record(group[-1:], first=alone)
            yield last
        if list_names(take_calls(last)) != list_names(one):
            raise CannotJoin("other operators are called for another micro-batch")
        self._discard()
        together = self.record(group, first=alone, last=last)
        plans: list[PlannedCalls] = []
        together.before_backward = lambda: plans.append(self._plan_pass(alone, together))
        yield together
        together.before_backward = None  # whose reference to the pass would keep its tensors
        together.take()
        if together.outputs != alone.outputs:
            raise CannotJoin("the model returns another value or shape for several micro-batches")
        if not together.is_in_order:
            raise CannotJoin(UNCUT)
        self._discard()
        plans.append(self._plan_pass(alone, together, is_backward=True))
        forward, backward = plans
        return JoinedPass(forward, backward, len(group), joins_losses=self._joins_losses)

    def _plan_pass(
        self, alone: PassAttempt, together: PassAttempt, *, is_backward: bool = False
    ) -> PlannedCalls:
        """Return the operators of the forward or of the backward pass."""
        one: Any = alone.backward if is_backward else alone.forward
        several: Any = together.backward if is_backward else together.forward
        if one.reads != several.reads:
            raise CannotJoin("values of samples are read by numpy() or tolist()")
        group = self._group
        forward: Any = together.forward
        return plan_pass(
            list_calls(one),
            list_calls(several),
            len(group),
            group[0].size,
            load_native().SegmentRule,
            forward.recorded.orders if is_backward else None,
        )

    def _discard(self) -> None:
        discard_results(self._parameters, self._buffers)

    def _find_difference(self, results: PassResults) -> str:
        """Return which result of one pass has other bits; "" if none has."""
        if not all(have_same_bits([*zip(self._losses, results.losses, strict=True)])):
            return "the loss"
        for own, joined in zip(self._metrics, results.metrics, strict=False):
            if own.keys() != joined.keys():
                return "what is logged"
            for name, value in own.items():
                is_tensor = isinstance(value, torch.Tensor)
                if is_tensor and not all(have_same_bits([(value, joined[name])])):
                    return self.words.format(name)
        for part, written in zip(self._group, results.buffers, strict=True):
            if name := self._buffers.find_difference(part.index, written):
                return f"the buffer {name}"
        for parameter in self._parameters:
            found = None if parameter.grad is None else checksum(parameter.grad)
            if found != self._checksums.get(parameter):
                return f"the gradient of a parameter of the shape {tuple(parameter.shape)}"
        return ""


def discard_results(parameters: Iterable[nn.Parameter], buffers: Buffers) -> None:
    """Discard the gradients of a pass, and the buffers that it may have written."""
    for parameter in parameters:
        parameter.grad = None
    for slot in buffers.slots:
        slot.copy = None


def _read_versions(group: Sequence[Microbatch]) -> list[int]:
    """Return how often the tensors of micro-batches have been written."""
    tensors = [leaf for part in group for leaf in tree_leaves(part.data)]
    return [
        tensor._version
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    ]
