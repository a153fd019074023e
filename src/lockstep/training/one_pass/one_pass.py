"""Several micro-batches of a rank in one pass, with the bits of a pass for each.

    separate passes     forward  backward    forward  backward    forward  backward     ...
    one pass            forward of all samples
                        the loss of each micro-batch, and its gradient of the outputs
                        backward of all samples; gradients of parameters per micro-batch, added
                        along the tree

In portable mode the results for a sample do not depend on the samples beside it, so only what adds
up samples is computed for each micro-batch (`pass_plan.py`). The micro-batches of a pass are those
of a node of the tree. Which these are decides how fast a step is, and is never compared between
ranks.

A model may couple samples. So a pass is tried first, beside the separate ones whose results count,
and all bits are compared (`pass_trial.py`); this is repeated in the steps that are audited by
default. After a difference the micro-batches are computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.data.microbatch import join_samples
from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.kernel.tree import nodes_of, split
from lockstep.model.backward_hooks import has_foreign_hooks
from lockstep.model.compilation import find_compiled
from lockstep.model.forward import (
    Metric,
    call_model,
    compute_metrics,
    compute_results,
    find_inputs,
    split_targets,
)
from lockstep.model.loss_root import LossRoot
from lockstep.model.parallel_context import ParallelContext
from lockstep.portable.arithmetic import has_portable_bits
from lockstep.training.one_pass.call_comparison import CannotJoin
from lockstep.training.one_pass.grouped_passes import PassResults
from lockstep.training.one_pass.pass_attempt import (
    UNUSED,
    PassAttempt,
    RecordedPass,
    cut_rows,
    describe_shapes,
    differentiate,
    find_roots,
    run_from_roots,
)
from lockstep.training.one_pass.pass_trial import (
    SCHEDULE,
    KnownPasses,
    PassKind,
    Trial,
    discard_results,
)

__all__ = ["OnePass", "OnePassNotes", "can_join"]


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
        known: What trials have found.
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
        self._shapes: dict[int, Any] = {}
        self.known = KnownPasses()

    @property
    def loss_modes(self) -> Sequence[bool]:
        """Whether the losses may be computed together, in the order in which this is tried."""
        return [True] if self._parallel.loss is None else [True, False]

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
        return is_alike and self.known.fits(PassKind(len(group), shapes[0]))

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

    def _kind(self, group: Sequence[Microbatch]) -> PassKind:
        return PassKind(len(group), self._shapes[group[0].index])

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
    ) -> PassAttempt | None:
        """Return a pass over micro-batches, if it is known that their bits are the same."""
        if len(group) == 1 or step.observers or self._is_compared(step, group):
            return None
        joined = self.known.find(self._kind(group))
        return None if joined is None else joined.attempt(step, buffers, group)

    def close(self, attempt: PassAttempt) -> PassResults | None:
        """Return the results of a pass; None: its micro-batches are computed one by one."""
        joined = self.known.find(self._kind(attempt.group))
        assert joined is not None
        try:
            results = attempt.take()
            joined.require_same()
            joined.require_written(attempt.list_written())
        except Exception as error:  # one that is not ours is raised again by the separate passes
            self.forget(attempt, error)
            return None
        return results

    def forget(self, attempt: PassAttempt, error: Exception) -> None:
        """Discard the results of a pass that has failed, and plan it again in the next step."""
        kind = self._kind(attempt.group)
        joined = self.known.find(kind)
        assert joined is not None
        self.known.forget(kind)
        if isinstance(error, CannotJoin):
            self.known.explain(joined.find_reason(error))
        discard_results(self._parameters, attempt.buffers)

    def _is_compared(self, step: StepContext, group: Sequence[Microbatch]) -> bool:
        """Return whether a pass that is known is compared with separate ones again."""
        return SCHEDULE.is_audited(step.number)

    def perform(self, attempt: PassAttempt) -> None:
        """Compute micro-batches together."""
        try:
            attempt.results = self._compute(attempt)
        except Exception as error:
            # Its frames would keep the tensors of the pass.
            attempt.error = error.with_traceback(None)

    def _compute(self, attempt: PassAttempt) -> PassResults:
        """Compute micro-batches together.

        Raises:
            CannotJoin: They have to be computed one by one.
        """
        step = attempt.step
        group = attempt.group
        where = step.place(group[0].index)
        data = join_samples(*(part.data for part in group))
        inputs = find_inputs(self._parallel.loss, data, where)
        loss = None

        def call() -> Any:
            nonlocal loss
            outputs = call_model(self._called, inputs, where)
            if attempt.joins_losses:
                self._scopes.begin_loss()
                loss, _ = compute_results(self._parallel.loss, {}, outputs, data, where)
            return outputs

        attempt.note_samples(data)
        state = self.begin_forward(attempt)
        outputs = attempt.forward.run(call)
        self.end_forward(attempt, state)
        attempt.note_outputs(outputs)
        results = PassResults([], [], attempt.buffers_after)
        if attempt.joins_losses:
            root = self._find_root(attempt, loss)
            results.losses.extend(root[0].detach().reshape(-1).unbind())
            self._add_metrics(attempt, results, outputs)
            self.run_from_outputs(attempt, [root])
        else:
            used = self.differentiate_losses(attempt, results, outputs, self._scopes.last_call)
            self.run_from_outputs(attempt, used)
        return results

    def _find_root(self, attempt: PassAttempt, losses: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of micro-batches, and their gradient, which are their shares."""
        if not isinstance(losses, torch.Tensor) or not losses.is_floating_point():
            raise CannotJoin("the loss has no gradient")
        # That of all samples is recorded, too, to find the operator that combines them.
        is_recorded = isinstance(attempt.forward, RecordedPass) and losses.dim() == 0
        if not losses.requires_grad or not (is_recorded or losses.shape == (len(attempt.group),)):
            raise CannotJoin("the loss is not computed for each micro-batch")
        shares = losses.new_tensor([attempt.step.shares[part.index] for part in attempt.group])
        return losses, shares.sum() if is_recorded else shares

    def _cut_outputs(self, outputs: Any, segments: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Return different leaves of outputs, their parts, and the outputs of each micro-batch."""
        leaves, structure = tree_flatten(outputs)
        cuts = {id(leaf): cut_rows(leaf, segments) for leaf in leaves}
        own = [
            tree_unflatten([cuts[id(leaf)][n] for leaf in leaves], structure)
            for n in range(segments)
        ]
        # What is returned twice has one gradient.
        return [*{id(leaf): leaf for leaf in leaves}.values()], [*cuts.values()], own

    def _add_metrics(self, attempt: PassAttempt, results: PassResults, outputs: Any) -> None:
        """Compute the metrics of each micro-batch from its outputs, unless these do not count."""
        group = attempt.group
        if not self._metrics or isinstance(attempt.forward, RecordedPass):
            results.metrics.extend({} for _ in group)
            return
        _, _, parts = self._cut_outputs(outputs, len(group))
        last_call = self._scopes.last_call
        for number, (part, own) in enumerate(zip(group, parts, strict=True)):
            where = self._begin_loss(attempt.step, part, last_call)
            about = part.data
            if self._parallel.loss is not None:
                _, about = split_targets(about, where)
            with attempt.use_buffers(number):
                results.metrics.append(compute_metrics(self._metrics, own, about, where))

    def differentiate_losses(
        self, attempt: PassAttempt, results: PassResults, outputs: Any, last_call: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute the loss of each micro-batch; return the outputs used, with their gradients.

        Raises:
            CannotJoin: The micro-batches have to be computed one by one.
        """
        step = attempt.step
        group = attempt.group
        leaves, cuts, parts = self._cut_outputs(outputs, len(group))
        roots = []
        for number, (part, own) in enumerate(zip(group, parts, strict=True)):
            with attempt.use_buffers(number):
                loss, metrics = self._compute_loss(step, part, own, last_call)
            roots.append(self._roots.find(loss, step.shares[part.index]))
            results.losses.append(loss.detach())
            results.metrics.append(metrics)
        state = self._scopes.read_states()
        # Together, since to start the engine takes as long as a loss.
        differentiate(roots, chain.from_iterable(cuts), self._parameters)
        self._require_states(state)
        return find_roots(leaves, cuts)

    def begin_forward(self, attempt: PassAttempt, last_call: int = 0) -> object:
        """Prepare buffers and generators; return the states of the latter, which do not change.

        Args:
            attempt: The pass.
            last_call: The number of the last call of the first scope in earlier stages.
        """
        if attempt.buffers.slots:
            attempt.buffers.install_copies()
        indices = [part.index for part in attempt.group]
        seed = attempt.forward.seed
        self._scopes.begin_microbatches(attempt.step.number, indices, seed, last_call)
        return self._scopes.read_states()

    def end_forward(self, attempt: PassAttempt, state: object) -> None:
        """Keep the buffers of each micro-batch after a forward pass, which draws no numbers itself.

        What forward writes into other buffers than statistics of batch norm has to be the same for
        all micro-batches, which a trial finds out.

        Raises:
            CannotJoin: Forward has drawn, or a buffer has another shape.
        """
        if self._scopes.read_states() != state:
            raise CannotJoin(
                "the model draws random numbers that are not drawn by torch's operators"
            )
        segments = len(attempt.group)
        current = attempt.buffers.current()
        parts = []
        known = 0
        for slot in attempt.buffers.slots:
            tensor = current.get(slot.name)
            if tensor is None or tensor.shape != slot.tensor.shape:
                raise CannotJoin(f"the buffer {slot.name} changes its shape")
            own = attempt.forward.find_statistics(tensor)
            known += own is not None
            parts.append(own or [tensor] * segments)
        if attempt.forward.statistics != known:
            raise CannotJoin("batch norm writes running statistics that are no buffers")
        attempt.buffers_after = [[part[number] for part in parts] for number in range(segments)]

    def run_from_outputs(
        self, attempt: PassAttempt, used: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Run backward from outputs with their gradients.

        Raises:
            CannotJoin: The micro-batches have to be computed one by one.
        """
        if not used:
            raise CannotJoin(UNUSED)
        if attempt.before_backward is not None:
            attempt.before_backward()
        state = self._scopes.read_states()
        attempt.backward.run(lambda: run_from_roots(used))
        attempt.backward.finish(self._parameters)
        self._require_states(state)

    def _require_states(self, state: object) -> None:
        """Raise CannotJoin if the generators have other states after a backward pass."""
        if self._scopes.read_states() != state:
            raise CannotJoin("the backward pass draws random numbers")

    def _begin_loss(self, step: StepContext, part: Microbatch, last_call: int) -> str:
        """Seed the generators for the loss of a micro-batch; return its place, for messages."""
        self._scopes.begin_microbatch(step.number, part.index, last_call)
        self._scopes.begin_loss()
        return step.place(part.index)

    def _compute_loss(
        self, step: StepContext, part: Microbatch, outputs: Any, last_call: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of a micro-batch from its outputs."""
        where = self._begin_loss(step, part, last_call)
        loss, metrics = compute_results(
            self._parallel.loss, self._metrics, outputs, part.data, where
        )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise CannotJoin("the loss has no gradient")
        return loss, metrics

    def begin_trial(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> Trial | None:
        """Return what compares the separate passes of a group with one; None if it is not due."""
        if len(group) == 1:
            return None
        kind = self._kind(group)
        if self.known.is_known(kind):
            is_joined = self.known.find(kind) is not None
            if not is_joined or not self._is_compared(step, group):
                return None
        if not self.known.allow_trial(kind):
            return None
        return Trial(
            self.known,
            kind,
            self.perform,
            modules=self._modules,
            parameters=self._parameters,
            step=step,
            buffers=buffers,
            group=group,
            loss_modes=self.loss_modes,
        )


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


class OnePassNotes(StepHook):
    """Records once why micro-batches are computed one by one.

    Args:
        find_note: A function that returns the reason; "" for none.
        record: A function that records a line of a kind.
    """

    name = "one_pass"

    def __init__(self, find_note: Callable[[], str], record: Callable[..., None]) -> None:
        self._find_note = find_note
        self._record = record
        self._said = ""

    def report(self, committed: CommittedStep) -> None:
        """Record the note if it is new."""
        note = self._find_note()
        if note != self._said:
            self._said = note
            self._record("one_pass", step=committed.step.number, message=note)
