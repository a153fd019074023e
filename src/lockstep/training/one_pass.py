"""Several micro-batches of a rank in one pass, with the bits of a pass for each.

    separate passes     forward  backward    forward  backward    forward  backward     ...
    one pass            forward of all samples
                        the loss of each micro-batch, and its gradient of the outputs
                        backward of all samples; gradients of parameters per micro-batch, added
                        along the tree

In portable mode the results for a sample do not depend on the samples beside it, so only what adds
up samples is computed for each micro-batch (`lockstep.training.pass_plan`). The micro-batches
of a pass are those of a node of the tree. Which these are decides how fast a step is, and is never
compared between ranks.

A model may couple samples. So a pass is tried first, beside the separate
ones whose results count, and all bits are compared; this is repeated in the steps that are audited
by default. After a difference the micro-batches are computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.repetition_trace import StateWatch
from lockstep.comm.native_module import load_native
from lockstep.data.microbatch import join_samples
from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers, have_same_bits
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.kernel.tree import TreeAccumulator, add_present, nodes_of, split
from lockstep.model.backward_hooks import has_foreign_hooks
from lockstep.model.compilation import find_compiled
from lockstep.model.forward import Metric, call_model, compute_loss, split_targets
from lockstep.model.loss_root import LossRoot, run_backward
from lockstep.model.parallel_context import ParallelContext
from lockstep.portable.arithmetic import has_portable_bits
from lockstep.training.grouped_passes import PassResults
from lockstep.training.pass_attempt import (
    Attempt,
    Pass,
    cut_rows,
    describe_shapes,
    join_gradients,
    list_names,
    list_reads,
    make_recorded,
    run_from_roots,
    take_calls,
)
from lockstep.training.pass_plan import (
    CannotJoin,
    PassPlan,
    count_bytes,
    plan_passes,
)

__all__ = [
    "JoinedPass",
    "OnePass",
    "OnePassNotes",
    "Trial",
    "can_join",
    "make_one_pass",
]

MOST_BYTES = 128 << 20
"""The bytes that a pass may keep for its backward pass: with more of them per micro-batch, the time
of a pass is that of its kernels, not of calling them."""

MOST_TRIALS = 8
"""The number of kinds of micro-batches, such as lengths of sequences, that are tried."""

CHANGED = "{} was not called as in the first step"

SCHEDULE = AuditConfig()
"""The steps in which a pass is compared with separate passes again."""

GradientList = list[torch.Tensor | None]


class JoinedPass:
    """A pass over micro-batches with the shapes of those for which it was planned.

    Args:
        plan: The operators.
        segments: The number of micro-batches.
    """

    def __init__(self, plan: PassPlan, segments: int) -> None:
        make = load_native().SegmentedCalls
        self.forward = make(plan.forward, segments)
        self.backward = make(plan.backward, segments)

    def restart(self) -> None:
        """Expect the first operators again."""
        self.forward.restart()
        self.backward.restart()

    def require_same(self) -> None:
        """Raise CannotJoin unless the passes have called the operators of the plan."""
        for calls in (self.forward, self.backward):
            if name := calls.find_difference():
                raise CannotJoin(CHANGED.format(name))


# It has many attributes: what a pass is computed with, and what is known about passes.
class OnePass:
    """Computes several micro-batches of a rank together.

    Args:
        parallel: The layout and the loss.
        called: The module that a step calls.
        modules: The model and the other modules that a step calls.
        metrics: Functions of (outputs, targets) by name.
        scopes: The RNG scopes of the model.
        roots: The roots of backward passes.

    Attributes:
        note: Why micro-batches are computed one by one; "" if they are not.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        called: nn.Module,
        modules: Mapping[str, nn.Module],
        metrics: Mapping[str, Metric],
        scopes: RngScopes,
        roots: LossRoot,
    ) -> None:
        self._parallel = parallel
        self._called = called
        self._modules = modules
        self._metrics = metrics
        self._scopes = scopes
        self._roots = roots
        self._every_module = [one for root in modules.values() for one in root.modules()]
        self._parameters = [*nn.ModuleList(modules.values()).parameters()]
        self._joined: dict[Any, JoinedPass | None] = {}  # None: computed one by one
        self._bytes: dict[Any, int] = {}  # of a micro-batch, by its shapes
        self._tried: set[Any] = set()
        self._shapes: dict[int, Any] = {}
        self.note = ""

    # --- which micro-batches ---------------------------------------------------------------------

    def divide(self, step: StepContext, batch: Batch) -> list[Sequence[Microbatch]]:
        """Return the micro-batches of this rank in groups, each of which is a node of the tree."""
        parts = batch.microbatches
        indices = [part.index for part in parts]
        is_range = len(parts) > 1 and indices == [*range(indices[0], indices[-1] + 1)]
        if not is_range or self._has_hooks():
            return [[part] for part in parts]
        self._shapes = {part.index: describe_shapes(part.data) for part in parts}
        by_index = {part.index: part for part in parts if part.index in step.shares}
        groups: list[Sequence[Microbatch]] = []

        def visit(lo: int, hi: int) -> None:
            group = [by_index[index] for index in range(lo, hi) if index in by_index]
            if hi - lo == 1 or (len(group) == hi - lo and self._fits(group)):
                groups.append(group or [part for part in parts if part.index == lo])
                return
            middle = split(lo, hi)
            visit(lo, middle)
            visit(middle, hi)

        for node in nodes_of(range(indices[0], indices[-1] + 1), batch.leaves):
            visit(*node)
        return groups

    def _fits(self, group: Sequence[Microbatch]) -> bool:
        """Return whether micro-batches are alike, and their pass does not keep too much memory."""
        shapes = [self._shapes[part.index] for part in group]
        is_alike = shapes[0] is not None and shapes.count(shapes[0]) == len(shapes)
        return is_alike and self._bytes.get(shapes[0], 0) * len(group) <= MOST_BYTES

    def _has_hooks(self) -> bool:
        """Return whether hooks of the user would be called less often, or get other tensors."""
        of_modules = any(
            one._forward_hooks
            or one._forward_pre_hooks
            or one._backward_hooks
            or one._backward_pre_hooks
            for one in self._every_module
        )
        return (
            of_modules
            or global_hooks._has_any_global_hook()
            or any(one._backward_hooks or has_foreign_hooks(one) for one in self._parameters)
        )

    def _key(self, group: Sequence[Microbatch]) -> Any:
        """Return what decides whether a pass was planned for micro-batches such as these."""
        return len(group), self._shapes[group[0].index]

    # --- a pass ----------------------------------------------------------------------------------

    def compute(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> PassResults | None:
        """Compute micro-batches together, if it is known that their bits are the same.

        Returns:
            The results; None if the micro-batches have to be computed one by one.
        """
        attempt = self.open(step, buffers, group)
        if attempt is None:
            return None
        self.perform(attempt)
        return self.close(attempt)

    def open(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> Attempt | None:
        """Return a pass over micro-batches, if it is known that their bits are the same."""
        if len(group) == 1 or step.observers or self._is_compared(step, group):
            return None
        joined = self._joined.get(self._key(group))
        if joined is None:
            return None
        joined.restart()
        return Attempt(step, buffers, group, joined.forward, joined.backward)

    def close(self, attempt: Attempt) -> PassResults | None:
        """Return the results of a pass; None: its micro-batches are computed one by one."""
        key = self._key(attempt.group)
        joined = self._joined[key]
        assert joined is not None
        try:
            results = attempt.take()
            joined.require_same()
        except Exception as error:  # one that is not ours is raised again by the separate passes
            del self._joined[key]  # it is planned again in the next step
            if isinstance(error, CannotJoin):
                # Numbers that another operator has drawn are no reason of their own.
                name = joined.forward.find_difference()
                reason = CHANGED.format(name) if name else str(error)
                self.note = self.note or reason
            self.clear(attempt.buffers)
            return None
        return results

    def _is_compared(self, step: StepContext, group: Sequence[Microbatch]) -> bool:
        """Return whether a pass that is known is compared with separate ones again."""
        return SCHEDULE.is_audited(step.number)

    def clear(self, buffers: Buffers) -> None:
        """Discard the gradients of a pass, and the buffers that it may have written."""
        for parameter in self._parameters:
            parameter.grad = None
        for slot in buffers.slots:
            slot.copy = None

    def perform(self, attempt: Attempt) -> None:
        """Compute micro-batches together."""
        try:
            attempt.results = self._compute(attempt)
        except Exception as error:
            attempt.error = error

    def _compute(self, attempt: Attempt) -> PassResults:
        """Compute micro-batches together.

        Raises:
            CannotJoin: They have to be computed one by one.
        """
        step = attempt.step
        group = attempt.group
        where = step.place(group[0].index)
        pairs = [split_targets(part.data, where) for part in group]
        columns = zip(*(inputs for inputs, _ in pairs), strict=True)
        inputs = [join_samples(*column) for column in columns]
        state = self.begin_forward(attempt)
        outputs = attempt.forward.run(lambda: call_model(self._called, inputs, where))
        self.end_forward(attempt, state)
        last_call = self._scopes.last_call
        leaves, structure = tree_flatten(outputs)
        cuts = [cut_rows(leaf, len(group)) for leaf in leaves]
        results = PassResults([], [])
        for number, (part, (_, targets)) in enumerate(zip(group, pairs, strict=True)):
            own = tree_unflatten([cut[number] for cut in cuts], structure)
            loss, metrics = self._compute_loss(step, part, own, targets, last_call)
            results.losses.append(loss)
            results.metrics.append(metrics)
        if any(parameter.grad is not None for parameter in self._parameters):
            raise CannotJoin("the loss uses parameters of the model")
        self.run_backward(attempt, leaves, cuts)
        return results

    def begin_forward(self, attempt: Attempt) -> object:
        """Prepare buffers and generators; return the states of the latter, which do not change."""
        if attempt.buffers.slots:
            attempt.buffers.install_copies()
        indices = [part.index for part in attempt.group]
        self._scopes.begin_microbatches(attempt.step.number, indices, attempt.forward.seed)
        return self._scopes.read_states()

    def end_forward(self, attempt: Attempt, state: object) -> None:
        """Require that a forward pass has left generators and buffers alone.

        Raises:
            CannotJoin: It has not.
        """
        if self._scopes.read_states() != state:
            raise CannotJoin(
                "the model draws random numbers that are not drawn by torch's operators"
            )
        buffers = attempt.buffers
        current = buffers.current()
        if not all(have_same_bits([(slot.tensor, current[slot.name]) for slot in buffers.slots])):
            raise CannotJoin("the model writes buffers")

    def run_backward(
        self, attempt: Attempt, leaves: Sequence[Any], cuts: Sequence[Sequence[Any]]
    ) -> None:
        """Run backward from the outputs, with the gradients of their parts.

        Raises:
            CannotJoin: The micro-batches have to be computed one by one.
        """
        roots = [(leaf, join_gradients(cut)) for leaf, cut in zip(leaves, cuts, strict=True)]
        used = [(leaf, gradient) for leaf, gradient in roots if gradient is not None]
        if not used:
            raise CannotJoin("the loss does not depend on the outputs")
        state = self._scopes.read_states()
        attempt.backward.run(lambda: run_from_roots(used))
        attempt.backward.finish(self._parameters)
        if self._scopes.read_states() != state:
            raise CannotJoin("the backward pass draws random numbers")

    def _compute_loss(
        self, step: StepContext, part: Microbatch, outputs: Any, targets: Any, last_call: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of a micro-batch from its outputs, and run backward to these."""
        where = step.place(part.index)
        assert self._parallel.loss is not None
        self._scopes.begin_microbatch(step.number, part.index, last_call)
        self._scopes.begin_loss()
        loss, metrics = compute_loss(self._parallel.loss, self._metrics, outputs, targets, where)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise CannotJoin("the loss has no gradient")
        root, gradient = self._roots.find(loss, step.shares[part.index])
        run_backward(root, gradient, retain_graph=False)
        return loss.detach(), metrics

    # --- a trial ---------------------------------------------------------------------------------

    def begin_trial(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> Trial | None:
        """Return what compares the separate passes of a group with one; None if it is not due."""
        if len(group) == 1:
            return None
        key = self._key(group)
        is_known = key in self._joined
        if is_known and (self._joined[key] is None or not self._is_compared(step, group)):
            return None
        if len(self._tried | {key}) > MOST_TRIALS:
            return None
        self._tried.add(key)
        return Trial(self, step, buffers, group, is_new=not is_known)

    def conclude(self, trial: Trial) -> Iterator[Attempt]:
        """Yield the passes that have to be computed, and compare the bits of the last one."""
        group = trial.group
        key = self._key(group)
        is_new = trial.is_new
        watch = StateWatch(self._modules)
        watch.begin()
        joined = None
        try:
            joined = (yield from self._plan(trial)) if is_new else self._joined[key]
            if joined is not None:
                joined.restart()
                attempt = trial.attempt(group, joined.forward, joined.backward)
                yield attempt
                results = attempt.take()
                joined.require_same()
                if difference := trial.find_difference(results, self._parameters):
                    raise CannotJoin(f"{difference} has other bits for several micro-batches")
                if changed := watch.list_changes():
                    raise CannotJoin(f"forward changes {changed[0]}")
        except CannotJoin as reason:
            joined = None
            self.note = self.note or str(reason)
            if not is_new:
                self.note += (
                    ", so the bits of earlier steps may be others than those of separate passes"
                )
        except Exception as error:  # the separate passes had none
            joined = None
            self.note = self.note or f"several micro-batches raise {type(error).__name__}: {error}"
        finally:
            self.clear(trial.buffers)
        shapes = self._shapes[group[0].index]
        if joined is None and self._bytes.get(shapes, 0) * len(group) > MOST_BYTES:
            return  # fewer micro-batches are tried in the next step
        self._joined[key] = joined

    def _plan(self, trial: Trial) -> Generator[Attempt, None, JoinedPass | None]:
        """Record the passes over one micro-batch and over all; None if they keep too much."""
        group = trial.group
        alone = trial.alone
        if alone is None:
            alone = trial.record(group[:1])
            yield alone
        one = take_calls(alone)
        self.clear(trial.buffers)
        shapes = self._shapes[group[0].index]
        self._bytes[shapes] = count_bytes(one[0])
        if self._bytes[shapes] * len(group) > MOST_BYTES:
            self._tried.discard(self._key(group))
            return None
        last = trial.last
        if last is None:
            last = trial.record(group[-1:], first=alone)
            yield last
        if list_names(take_calls(last)) != list_names(one):
            raise CannotJoin("other operators are called for another micro-batch")
        self.clear(trial.buffers)
        together = trial.record(group, first=alone, last=last)
        yield together
        several = take_calls(together)
        self.clear(trial.buffers)
        if list_reads(together) != list_reads(alone):
            raise CannotJoin("values of samples are read by numpy() or tolist()")
        rule = load_native().SegmentRule
        plan = plan_passes(one, several, len(group), group[0].size, rule)
        return JoinedPass(plan, len(group))


def make_one_pass(
    parallel: ParallelContext,
    called: nn.Module,
    modules: Mapping[str, nn.Module],
    metrics: Mapping[str, Metric],
    scopes: RngScopes,
    roots: LossRoot,
) -> OnePass | None:
    """Return what computes several micro-batches together; None where this is impossible.

    The arguments are those of `OnePass`.
    """
    is_possible = (
        parallel.loss is not None  # the loss of a micro-batch is computed from its outputs
        and can_join(parallel, called, modules)
    )
    if not is_possible:
        return None
    return OnePass(parallel, called, modules, metrics, scopes, roots)


def can_join(
    parallel: ParallelContext, called: nn.Module, modules: Mapping[str, nn.Module]
) -> bool:
    """Return whether several micro-batches may have the bits of separate passes."""
    return (
        has_portable_bits()
        and parallel.autocast_dtype is None
        and parallel.loss_scale is None
        and not parallel.is_sharded
        and not parallel.activation_checkpointing
        and not any(one for module in (called, *modules.values()) for one in find_compiled(module))
    )


class Trial:
    """The results of separate passes, with which those of one pass are compared.

    Args:
        owner: What computes the pass.
        step: The context of the step.
        buffers: The buffers of the step.
        group: The micro-batches.
        is_new: Whether the pass has to be planned.

    Attributes:
        alone: The pass over the first micro-batch, if it is recorded already.
        last: The pass over the last one, too.
    """

    def __init__(
        self,
        owner: OnePass,
        step: StepContext,
        buffers: Buffers,
        group: Sequence[Microbatch],
        *,
        is_new: bool,
    ) -> None:
        self._owner = owner
        self.is_new = is_new
        self.alone: Attempt | None = None
        self.last: Attempt | None = None
        self.step = step
        self.buffers = buffers
        self.group = group
        self._losses: list[torch.Tensor] = []
        self._metrics: list[Mapping[str, torch.Tensor]] = []
        self._sums = TreeAccumulator[GradientList](len(group), _add_lists)

    def note(
        self,
        loss: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        metrics: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Keep the loss of a micro-batch and its gradients, which are in `.grad`.

        Args:
            loss: The loss.
            parameters: The parameters with gradients.
            metrics: The metrics, if the script computes them from all samples of a pass.
        """
        if metrics is not None:
            self._metrics.append({**metrics})
        gradients = [None if one.grad is None else one.grad.clone() for one in parameters]
        number = len(self._losses)
        self._losses.append(loss.detach())
        self._sums.put((number, number + 1), gradients)

    def find_difference(self, results: PassResults, parameters: Sequence[nn.Parameter]) -> str:
        """Return which result of one pass has other bits; "" if none has."""
        if not all(have_same_bits([*zip(self._losses, results.losses, strict=True)])):
            return "the loss"
        for own, joined in zip(self._metrics, results.metrics, strict=False):
            if own.keys() != joined.keys():
                return "what is logged"
            for name, value in own.items():
                if not all(have_same_bits([(value, joined[name])])):
                    return f"the metric {name!r}"
        ((_, gradients),) = self._sums.nodes.items()
        for gradient, parameter in zip(gradients, parameters, strict=True):
            if gradient is None or parameter.grad is None:
                is_same = gradient is parameter.grad
            else:
                (is_same,) = have_same_bits([(gradient, parameter.grad)])
            if not is_same:
                return f"the gradient of a parameter of the shape {tuple(parameter.shape)}"
        return ""

    def attempt(self, group: Sequence[Microbatch], forward: Pass, backward: Pass) -> Attempt:
        """Return a pass over some of the micro-batches."""
        return Attempt(self.step, self.buffers, group, forward, backward)

    def record(
        self,
        group: Sequence[Microbatch],
        *,
        restores: bool = True,
        first: Attempt | None = None,
        last: Attempt | None = None,
    ) -> Attempt:
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
        return self.attempt(
            group,
            make_recorded(restores, keeps=False, first=forward),
            make_recorded(restores, keeps=first is None, first=backward),
        )

    def list_passes(self) -> Iterator[Attempt]:
        """Yield the passes that have to be computed, and compare the last one."""
        return self._owner.conclude(self)

    def finish(self) -> None:
        """Compute the same micro-batches together, and compare the bits."""
        for attempt in self.list_passes():
            self._owner.perform(attempt)


class OnePassNotes(StepHook):
    """Records once why micro-batches are computed one by one.

    Args:
        one_pass: What computes several of them together.
        record: A function that records a line of a kind.
    """

    name = "one_pass"

    def __init__(self, one_pass: OnePass, record: Callable[..., None]) -> None:
        self._one_pass = one_pass
        self._record = record
        self._said = ""

    def report(self, committed: CommittedStep) -> None:
        """Record the note if it is new."""
        note = self._one_pass.note
        if note != self._said:
            self._said = note
            self._record("one_pass", step=committed.step.number, message=note)


def _add_lists(left: GradientList, right: GradientList) -> GradientList:
    return [*map(add_present, left, right)]
