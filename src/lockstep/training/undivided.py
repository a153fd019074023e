"""The undivided model of a trainer on this rank: trained by `Step`, evaluated as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.data.microbatch import Batch
from lockstep.data_parallel.gradients import Gradients
from lockstep.model.attempt import Attempt
from lockstep.model.buffers import Buffers
from lockstep.model.evaluation import Evaluation, evaluate
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.model.forward import Metric, forward
from lockstep.model.optimization import Optimization
from lockstep.model.parallel_context import Setting
from lockstep.model.sharing import share
from lockstep.model.side_effects import SideEffects
from lockstep.model.step import Step
from lockstep.model.turn import Turn
from lockstep.model.units import Units, units_of
from lockstep.model.update import Update

__all__ = ["Undivided"]


class Undivided:
    """The whole model on one rank; `blocks` names its units, if it has several.

    `called` is what a loop calls: the `module` itself, or what compiled it.
    `shared` and `elementwise` as of the Trainer.
    """

    def __init__(
        self,
        setting: Setting,
        called: nn.Module,
        module: nn.Module,
        blocks: Sequence[str],
        optimization: Optimization,
        metrics: Mapping[str, Metric],
        seed: int,
        clip_norm: float | None,
        shared: bool = False,
        elementwise: bool = False,
    ) -> None:
        self.setting = setting
        self._called, self._module, self._blocks = called, module, blocks
        self._optimization, self._metrics, self._seed = optimization, metrics, seed
        parameters = list(module.named_parameters())
        self._units = Units(units_of(called, blocks), called, seed, setting.device)
        self._recomputation = setting.recomputation(
            {name: called.get_submodule(name) for name in blocks}
        )
        self._side_effects = SideEffects(setting.modules_with(module))
        modules = list(setting.modules_with(called).values())
        if shared:
            self._gradients = share(parameters, modules, optimization, setting, elementwise)
        else:
            self._gradients = Gradients(parameters, setting.group, modules=modules)
        held = [each for _, each in parameters]
        self.update: Update | None = Update(setting, held, held, optimization, clip_norm)
        self.fingerprinter: Fingerprinter | None = None

    def step(self, attempt: Attempt, finish: Callable[[Turn], None]) -> Step:
        """Return a step for a loop of the user's own."""
        buffers = Buffers(self.setting.modules_with(self._module))
        how = (self._units, buffers, self._gradients, self._recomputation)
        step = Step(attempt, self.setting, *how, self._side_effects, finish)
        step.fingerprinter = self.fingerprinter
        return step

    def train(self, attempt: Attempt, batch: Any, finish: Callable[[Turn], None]) -> None:
        """Train on one batch."""
        with self.step(attempt, finish) as step:
            for data in step.microbatches(batch):
                loss, metrics = forward(
                    self._called, self.setting.loss, self._metrics, data, step.place
                )
                step.backward(loss, metrics=metrics, final=True)

    def evaluate(self, batches: Iterable[Batch], *, average: bool) -> Evaluation:
        """Return the evaluation of the model, or of its averaged weights."""
        averaged = self._optimization.average
        model = averaged.module if average and averaged is not None else self._called
        return evaluate(model, batches, self.setting, self._metrics, self._seed, self._blocks)
