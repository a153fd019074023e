"""The check of the loss: whether the losses of micro-batches add up to that of the batch.

    the loss of a micro-batch                            must be, up to rounding,
    the losses of its halves, times their shares         the sum of these

If it is not, neither is the loss of the batch that of its micro-batches, and the gradients are not
those of the batch: the loss adds its samples up, divides by something else than their number, or
compares them with each other.

The check runs in the first three steps and in every thousandth, before the loss itself. It changes
nothing that the step depends on, and has no verdict where it cannot be certain: if the loss draws
random numbers, changes buffers, calls a module of the trainer or raises, or if outputs or targets
are not one row per sample. Micro-batches of one sample are joined in pairs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from operator import mul
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.data.microbatch import Microbatch, halve_samples, join_samples, map_tensors
from lockstep.kernel.loss_weights import is_sum
from lockstep.kernel.seeds import isolated
from lockstep.kernel.step_context import StepContext, StepObserver
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.forward import compute_loss, split_targets
from lockstep.model.generator_states import state_of_all
from lockstep.model.target_weights import loss_name

__all__ = ["LossCheck", "LossCheckHook"]

FIRST = 3
EVERY = 1000
"""The steps that are checked: the first FIRST steps, and each multiple of EVERY."""

TOLERANCE = 1e-3
"""The largest difference of equal losses, relative to the largest of them, in float32."""


class LossCheckHook(StepHook):
    """The hook that checks the trainer's loss in some steps.

    Args:
        modules: The modules that a step calls, which the check must not call.
    """

    first = FIRST
    every = EVERY

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def begin(self, step: StepContext, batch: Any) -> None:
        """Check the losses of the step."""
        step.observers.append(LossCheck(step, self._modules))


LossPart = tuple[Any, Any]
"""The outputs of some samples, and their part of the batch."""


class LossCheck(StepObserver):
    """The check of one step on this rank.

    Args:
        step: The context of the step.
        modules: The modules that the step calls, which the check must not call.
    """

    def __init__(self, step: StepContext, modules: Mapping[str, nn.Module]) -> None:
        self._step = step
        self._parallel = step.parallel
        self._modules = {part for module in modules.values() for part in module.modules()}
        self._single: LossPart | None = None  # a micro-batch of one sample
        self._has_warned = False

    def watch_loss(
        self, loss: Callable[..., Any], microbatch: Microbatch, data: Any
    ) -> Callable[..., Any]:
        """Return the loss; it is checked when it is called."""
        if self._step.has_warned("ignored_targets"):
            return loss

        def checked(outputs: Any, targets: Any) -> Any:
            if not self._has_warned:
                given = (None, targets) if self._parallel.loss_weight is None else data
                with suppress(Exception), torch.no_grad():  # the step reports what the loss raises
                    self._check(microbatch, (outputs, given))
            return loss(outputs, targets)

        checked.__name__ = loss_name(loss)
        return checked

    def _check(self, microbatch: Microbatch, whole: LossPart) -> None:
        half = max(2, microbatch.size) // 2
        if microbatch.size > 1:
            parts = halve_samples(whole, microbatch.size)
        elif self._single is None:
            self._single = map_tensors(torch.clone, whole)
            return
        else:
            parts = [self._single, whole]
            self._single = None
            whole = join_samples(*parts)
        sizes = [max(2, microbatch.size) - half, half]
        weights = list(map(self._weigh, parts, sizes))
        counted = [part for part, weight in zip(parts, weights, strict=True) if weight]
        values = self._compute([whole, *counted])
        if values is None or not math.isfinite(values[0]):
            return
        loss, *losses = values
        added = sum(map(mul, filter(None, weights), losses))
        mean = added if is_sum(self._parallel.loss) else added / sum(weights)
        limit = self._find_limit(values, whole)
        # A half has no finite mean if all of its targets are ignored.
        if not all(map(math.isfinite, losses)) or abs(loss - mean) > limit:
            self._has_warned = True
            self._step.warn(
                self._step.place(microbatch.index),
                f"the loss {loss_name(self._parallel.loss)} of a micro-batch is not the sum of the "
                "losses of its halves times their shares, so the gradient is not that of the whole "
                "batch: "
                'return a mean over the samples, set the attribute reduction = "sum" of a loss '
                "that adds them up, or pass loss_weight= a function that returns what the loss of "
                "a micro-batch divides by; for a loss that compares samples with each other or "
                'divides by several numbers, see "Losses over the whole batch" in the guide to '
                "training",
                "not_additive",
            )

    def _weigh(self, part: LossPart, size: int) -> float:
        if is_sum(self._parallel.loss):
            return 1.0
        weight = self._parallel.loss_weight
        return float(size) if weight is None else float(weight(part[1]))

    def _compute(self, parts: Sequence[LossPart]) -> list[float] | None:
        """Return the losses of some parts; None if the loss depends on more than these."""
        device = self._parallel.device
        loss = self._parallel.loss
        losses = []
        with self._undisturbed(), isolated(device, everything=True):
            before = state_of_all(device)
            for outputs, data in parts:
                shared = loss.parameters() if isinstance(loss, nn.Module) else ()
                copy = deepcopy(loss, {id(parameter): parameter for parameter in shared})
                assert copy is not None
                targets = split_targets(data, "")[1]
                # A loss may write into what it is given.
                own, known = map_tensors(torch.clone, (outputs, targets))
                losses.append(float(compute_loss(copy, {}, own, known, "")[0]))
                if isinstance(loss, nn.Module) and isinstance(copy, nn.Module):
                    pairs = zip(loss.buffers(), copy.buffers(), strict=True)
                    if not all(torch.equal(*pair) for pair in pairs):
                        return None
            if state_of_all(device) != before:
                return None
        return losses

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Call no module of the trainer, compile nothing and record nothing in the body."""

        def refuse(module: nn.Module, _: object) -> None:
            if module in self._modules or isinstance(module, _BatchNorm):
                raise RuntimeError("the loss calls a module whose state a call may change")

        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            if "torch._dynamo.eval_frame" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(register_module_forward_pre_hook(refuse).remove)
            yield

    def _find_limit(self, losses: Sequence[float], whole: LossPart) -> float:
        """Return the largest difference that rounding explains."""
        floats: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() and tensor.numel():
                floats.append(tensor)
            return tensor

        map_tensors(collect, whole[0])
        dtypes = [
            self._parallel.autocast_dtype or torch.float32,
            *(tensor.dtype for tensor in floats),
        ]
        epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
        largest = max((float(tensor.abs().max()) for tensor in floats), default=0.0)
        # Parts are rounded in proportion to themselves, and may cancel in the loss.
        return max(TOLERANCE, epsilon) * max(map(abs, losses)) + max(1e-6, epsilon / 4) * largest
