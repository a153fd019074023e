"""The steps of a script's own loop, whose optimizers the script calls.

    begin ── micro-batches ──> finish ── optimizer.step() ──> settle
                               gradients of the whole         counted and recorded, at the
                               batch, on every rank           next request of the loop

A step that is left early is undone, and the next one says so.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.comm.activity import Waited
from lockstep.kernel.errors import UsageError
from lockstep.kernel.parts import SharedUpdate
from lockstep.kernel.step import PreparedStep
from lockstep.model.held_parameters import explain_stranger, is_trained
from lockstep.sharded_tensors import local_part
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.script_loop.given_weights import GivenWeights
from lockstep.training.step_operation import OpenStep, StepOperation

__all__ = ["ScriptSteps", "ScriptUpdate"]

CLOSURE = (
    "computes the loss several times per step, and ls.exact has the gradients of one pass over the "
    "batch: choose an optimizer that steps once per gradient, such as "
    "torch.optim.AdamW or SGD, and call optimizer.step() without a closure"
)

NOT_DIVIDED = (
    "optimizer.step() was called, and no batch of ls.exact has been computed since the last one, "
    "so the gradients are those of this rank alone: iterate over exact.batches(dataset, "
    "batch_size), or over exact.microbatches(loader) with a DataLoader that has "
    "batch_sampler=exact.sampler(dataset, batch_size)"
)

SHARED = (
    "optimizer.step() was called after a batch of one handle of ls.exact, and another handle has "
    "some of the same parameters, whose gradients it has not added over the ranks: put both "
    "models into one module, and train it with one handle"
)

DELAYED = (
    "optimizer.step() was called after the next batch was requested, and a run that is resumed "
    "between the two would lose this step: call it directly after the loop over the batch"
)


NESTED = (
    "a step was taken in the loop over the micro-batches of another handle, which has a different "
    "number of them on each rank: take it after that loop"
)

_handles: weakref.WeakSet[ScriptSteps] = weakref.WeakSet()
"""The steps of all handles, to find one that is taken inside of another."""


class ScriptUpdate:
    """The update of a step whose optimizers the script calls.

    Attributes:
        rate: The learning rate of the latest step.
        shared: None: each rank has its own parameters, or shards of them.
    """

    shared: SharedUpdate | None = None

    def __init__(self) -> None:
        self.rate = float("nan")

    def step_shared(self, about: str) -> None:
        """Do nothing: no parameters are shared."""

    def step(self) -> None:
        """Do nothing: the script has stepped its optimizers."""


# It has many attributes: what torch's hooks of optimizers tell it between two calls of the loop.
class ScriptSteps:
    """The steps of one handle of `ls.exact`.

    Args:
        operation: The steps of the training.
        update: The update of these steps.
        weights: The weights that the script gives to micro-batches.
        parameters: The parameters of the model.
        sample: A function that returns some elements of their gradients, to find changes that
            depend on the number of ranks; None if each rank has whole gradients.
        wrapper: The DistributedDataParallel around the model; None: there is none.
        follow: A function that is called with each optimizer of the model before its first step.
        saved: The registered objects of a run that may be continued; None: it may not.

    Attributes:
        opened: The step that was begun and is not settled; None: there is none.
        is_complete: Whether `.grad` has the gradients of a whole batch, until the next step begins.
    """

    def __init__(
        self,
        operation: StepOperation,
        update: ScriptUpdate,
        weights: GivenWeights,
        parameters: Sequence[nn.Parameter],
        sample: Callable[[], torch.Tensor] | None,
        wrapper: DistributedDataParallel | None,
        follow: Callable[[Optimizer], None],
        saved: Sequence[Any] | None = None,
    ) -> None:
        self._saved = saved
        self._operation = operation
        self._update = update
        self.weights = weights
        self._parameters = parameters
        self._own = set(parameters)
        self._sample = sample
        self._wrapper = wrapper
        self._follow = follow
        self._known = weakref.WeakSet[Optimizer]()
        self._left: UsageError | None = None
        self._sampled: torch.Tensor | None = None  # of the gradients of the whole batch
        self._is_stepped = False  # an optimizer, since the gradients are complete
        self._is_delayed = False  # the step of an optimizer, until after a safe point
        self._entered = 0.0  # when an optimizer began its step
        # The open steps of other nested loops when this one began, with their micro-batches.
        self._around: list[tuple[OpenStep, object]] = []
        _handles.add(self)
        self.opened: OpenStep | None = None
        self.is_complete = False
        self._watch_optimizers()
        self._keep_idle()

    def require_saved(self, scaler: torch.amp.GradScaler) -> None:
        """Raise UsageError if a continued run would begin with another scale than this one had."""
        if self._saved is None or not scaler.is_enabled() or any(s is scaler for s in self._saved):
            return
        raise UsageError(
            "a GradScaler that ls.exact does not know would begin again when the run is "
            'continued: pass it, as in ls.exact(model, optimizer, stateful={"scaler": scaler})'
        )

    # --- a step -------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """The rank, the step and the micro-batch, for messages."""
        if self.opened is not None and self.opened.prepared is None:
            loop: MicrobatchLoop = self.opened.loop
            return loop.place if loop.current is not None else loop.step.where
        return f"{self._operation.where}, step {self._operation.number}"

    @property
    def is_trainable(self) -> bool:
        """Whether a parameter is trained now; a GAN may freeze one of its models for a while."""
        return any(parameter.requires_grad for parameter in self._parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def begin(self, *, is_repeatable: bool) -> MicrobatchLoop:
        """Begin a step, and return the loop over its micro-batches.

        Args:
            is_repeatable: Whether the script computes the micro-batches again if `finish` returns
                False.

        Raises:
            UsageError: The last step was left early.
        """
        self.settle()
        if self.opened is not None:
            self.leave()
        if (left := self._left) is not None:
            self._left = None
            raise left
        self._keep_idle()
        self.is_complete = False
        self._is_stepped = False
        self._is_delayed = False
        self._around = [
            (other.opened, other.opened.loop.current)
            for other in _handles
            if is_repeatable and other.opened is not None and other.opened.step.is_repeatable
        ]
        self.opened = self._operation.open(is_repeatable=is_repeatable, keeps_work=is_repeatable)
        loop: MicrobatchLoop = self.opened.loop
        return loop

    def finish(self) -> bool:
        """Add the gradients of all ranks after this rank's last micro-batch.

        Returns:
            Whether `.grad` has those of the whole batch; otherwise the step has to be repeated.
        """
        opened = self.opened
        assert opened is not None
        around = self._around
        self._around = []
        for other, current in around:
            if current is not None and other.loop.current is current:
                self.fail(UsageError(f"{self.place}: {NESTED}"))
        try:
            is_prepared = opened.prepare()
        except BaseException:
            self.opened = None
            raise
        if not is_prepared:
            self.opened = None
            return False
        if self.weights.total is not None:
            self._divide(opened, self.weights.total)
        self.is_complete = True
        self.note_gradients()
        opened.step.times.left = time.perf_counter()
        opened.step.times.waited = Waited.seconds
        return True

    def settle(self) -> None:
        """Count and record the step whose gradients are complete, if there is one."""
        opened = self.opened
        if opened is None or opened.prepared is None:
            return
        self.opened = None
        opened.commit()
        opened.report()

    @property
    def is_logged(self) -> bool:
        """Whether another process may continue the script between two batches."""
        return self._operation.is_logged

    def pass_batch(self) -> None:
        """Note that the script requests another batch, before which a checkpoint may be saved."""
        self._is_delayed = self.is_complete and not self._is_stepped and self.is_logged

    def leave(self) -> None:
        """Undo a step that was left before its last micro-batch; the next `begin` says so."""
        opened = self.opened
        if opened is None or opened.prepared is not None:
            return
        self.opened = None
        loop: MicrobatchLoop = opened.loop
        error = UsageError(
            f"{loop.place}: the loop was left before the last micro-batch of the batch, by break "
            "or an exception: train on all micro-batches of each batch, on every rank"
        )
        with suppress(UsageError):
            opened.fail(error)
        self._left = error

    def forget_left(self) -> None:
        """Let the next step begin, though the last one was left early."""
        self._left = None

    def fail(self, error: BaseException) -> None:
        """Undo the step after an exception, and raise it, unless the step has to be repeated."""
        opened = self.opened
        self.opened = None
        if opened is None:
            raise error
        opened.fail(error)

    @torch.no_grad()
    def _divide(self, opened: OpenStep, total: float) -> None:
        """Divide the gradients and the losses by the sum of the weights."""
        assert opened.prepared is not None
        step, summary, norm = opened.prepared
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).div_(total)
        # Divided after the sum, since the nodes that ranks hold depend on their number.
        loss = summary.sum_losses() / total
        summary = summary._replace(nodes=[(0, summary.leaves, loss)])
        opened.prepared = PreparedStep(step, summary, norm / total)

    def note_gradients(self) -> None:
        """Note the gradients of the whole batch, which were perhaps scaled on all ranks alike."""
        if self._sample is not None:
            self._sampled = self._sample()

    def require_no_gradients(self) -> None:
        """Raise UsageError if gradients are left from before the step."""
        for parameter in self._parameters:
            if parameter.grad is not None and _has_nonzero(local_part(parameter.grad)):
                raise UsageError(
                    f"{self.place}: gradients are left from before the step: call "
                    "optimizer.zero_grad() once per batch; to add up several batches, let the "
                    "batch_size and the number of micro-batches be larger"
                )

    def _keep_idle(self) -> None:
        """Let torch's reducer exchange nothing."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = False
            self._wrapper.require_forward_param_sync = False
            # Otherwise it would connect all outputs, and the graph of a loss would contain others.
            self._wrapper.find_unused_parameters = False
            if self._wrapper.static_graph:
                self._wrapper._static_graph_delay_allreduce_enqueued = True

    # --- the optimizers -----------------------------------------------------------------------

    def _watch_optimizers(self) -> None:
        own = weakref.ref(self)

        def enter(optimizer: Optimizer, arguments: Any, options: Any) -> None:
            this = own()
            if this is not None and this._is_own(optimizer):
                closure = arguments[1:] or options.get("closure")
                this._enter_optimizer(optimizer, has_closure=bool(closure))

        def leave(optimizer: Optimizer, arguments: Any, options: Any) -> None:
            this = own()
            if this is not None and this._is_own(optimizer):
                this._leave_optimizer()

        # They may also see a trainer's optimizer.
        vars(enter)["lockstep_elementwise"] = True
        vars(leave)["lockstep_elementwise"] = True
        weakref.finalize(self, register_optimizer_step_pre_hook(enter).remove)
        weakref.finalize(self, register_optimizer_step_post_hook(leave).remove)

    def _is_own(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has a parameter of the model."""
        groups = optimizer.param_groups
        return any(parameter in self._own for group in groups for parameter in group["params"])

    def _enter_optimizer(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Refuse a step with gradients that are not those of a whole batch."""
        # Lightning passes a closure that returns the loss which it has computed.
        if isinstance(optimizer, LBFGS) or (has_closure and not self.is_complete):
            raise UsageError(f"{self.place}: {type(optimizer).__name__} {CLOSURE}")
        if self.opened is not None and self.opened.prepared is None:
            raise UsageError(
                f"{self.place}: optimizer.step() was called before the last micro-batch of the "
                "batch: call it after the loop over the batch, or if exact.is_complete"
            )
        if self._left is not None:
            raise self._left
        if not self.is_complete or self._is_delayed:
            # Without gradients, a step initializes the state of an optimizer.
            given = [p.grad for p in self._parameters if p.grad is not None]
            if any(_has_nonzero(local_part(gradient)) for gradient in given):
                reason = DELAYED if self._is_delayed else NOT_DIVIDED
                complete = [other._own for other in _handles if other.is_complete]
                if not self.is_complete and not self._own.isdisjoint(chain(*complete)):
                    reason = SHARED
                raise UsageError(f"{self.place}: {reason}")
            return
        if optimizer not in self._known:
            self._require_trained(optimizer)
            self._follow(optimizer)
            self._known.add(optimizer)
        known = self._sampled
        if (
            self._sample is not None
            and known is not None
            and not torch.equal(self._sample(), known)
        ):
            raise UsageError(
                f"{self.place}: the gradients were changed after backward, and what is computed "
                "from the shards of several ranks, such as their norm, depends on the number of "
                "ranks: clip them by exact.clip_grad_norm_(max_norm), and scale the loss instead "
                "of the gradients"
            )
        self._update.rate = float(optimizer.param_groups[0]["lr"])
        self._entered = time.perf_counter()

    def _leave_optimizer(self) -> None:
        """Count the time of an optimizer as one of the step whose gradients are complete."""
        self._is_stepped |= self.is_complete
        if self.opened is not None and self.is_complete:
            seconds = time.perf_counter() - self._entered
            self.opened.step.times.updated += seconds
            self.opened.step.times.left += seconds

    def _require_trained(self, optimizer: Optimizer) -> None:
        """Refuse a gradient of a parameter that is in no model of a training."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not is_trained(parameter):
                    raise UsageError(f"{self.place}: {explain_stranger(parameter)}")


def _has_nonzero(gradient: torch.Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else gradient).any())
