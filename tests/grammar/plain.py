"""A case in plain PyTorch: the specification with what the case draws."""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import digests
from grammar import Case
from grammar.datasets import dataset_of, order_of, tensors
from grammar.loops import loop_of
from grammar.models import accumulation_hooked
from grammar.optimization import Several
from grammar.outcome import Outcome
from lockstep.kernel import spec
from lockstep.portable.kernels import choose_kernels

EVALUATED = 11
"""The batch size of an evaluation."""


def prepare() -> None:
    """Set what bits depend on, as `ls.init` does."""
    choose_kernels(None, torch.device("cpu"), os.environ.__setitem__)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def batches_of(case: Case, inputs: list[torch.Tensor], targets: torch.Tensor) -> list[Any]:
    """Return the global batches of all steps."""
    data = case.data
    if data.epochs:
        dataset = dataset_of(data, inputs, targets)
        return [
            batch
            for epoch in range(data.epochs)
            for batch in spec.epoch(
                dataset, data.batch_size, case.seed, epoch,
                shuffle=data.shuffle, sampler=order_of(data, epoch),
            )
        ]  # fmt: skip
    return tensor_batches(case, inputs, targets)


def tensor_batches(case: Case, inputs: list[torch.Tensor], targets: torch.Tensor) -> list[Any]:
    """Return the batches that are given as tensors."""
    ends = [sum(case.data.sizes[: number + 1]) for number in range(len(case.data.sizes))]
    spans = [slice(end - size, end) for end, size in zip(ends, case.data.sizes, strict=True)]
    if case.data.named:
        return [{"inputs": inputs[0][span], "targets": targets[span]} for span in spans]
    return [(*(each[span] for each in inputs), targets[span]) for span in spans]


def outcome_of(case: Case) -> Outcome:
    """Train the case from its first step to its last."""
    model = case.model.build(case.seed)
    loss = case.loss.build(case.model.dtype)
    optimization = case.optimization
    made: list[Any] = []
    first_schedulers: list[Any] = []

    def optimizer(parameters: Any) -> Any:
        made.append(optimization.make(optimization.grouped(model)))
        if optimization.scheduler:
            made.append(optimization.scheduler(made[0]))
        first = optimization.make_first(model)
        if first is None:
            return made[0]
        if optimization.first_scheduler:
            first_schedulers.append(optimization.first_scheduler(first))
        made[0] = Several(first, made[0])
        return made[0]

    inputs, targets = tensors(case.data, case.model, case.loss, case.microbatches, case.seed)
    average = None
    if optimization.average is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(optimization.average))
    losses = spec.train(
        model,
        loss,
        optimizer,
        batches_of(case, inputs, targets),
        case.microbatches,
        case.seed,
        optimization.clip_norm,
        scopes=case.model.units(model),
        weight=case.loss.weight,
        precision=case.precision,
        losses_of=loop_of(case.loop),
        after_step=_after_step(case, model, made, first_schedulers, average),
    )
    evaluation = None
    if case.evaluates:
        evaluated = model if average is None else average.module
        evaluation = spec.evaluate(
            evaluated,
            loss,
            spec.epoch(TensorDataset(*inputs, targets), EVALUATED, 0, 0, shuffle=False),
            case.microbatches,
            case.seed,
            scopes=case.model.units(evaluated),
            weight=case.loss.weight,
            precision=case.precision,
        ).hex()
    return Outcome(
        tuple(value.hex() for value in losses),
        digests.digest(model.state_dict()),
        digests.digest(digests.optimizer_state(made[0], model)),
        None if average is None else digests.digest(average.state_dict()),
        evaluation,
        float(made[0].param_groups[0]["lr"]).hex(),
    )


def hook_late(case: Case, model: Any) -> None:
    """Add the hooks that a training gets after its first step."""
    if case.hooked_late is not None:
        units = case.model.units(model)
        accumulation_hooked(case.hooked_late % len(units), units)


def change_model(case: Case, model: torch.nn.Module) -> None:
    """Change the model as the loop's body does after the first step."""
    if case.change == "freeze":
        next(model.parameters()).requires_grad_(False)
    for module in model.modules() if case.change in ("eval", "drop") else ():
        if case.change == "eval" and hasattr(module, "running_mean"):
            module.eval()
        elif case.change == "drop" and type(getattr(module, "p", None)) is float:
            module.p /= 2


def _after_step(
    case: Case, model: Any, made: list[Any], first_schedulers: list[Any], average: Any
) -> Callable[[float, bool], None]:
    """Return what moves the average and the schedule, after each step or epoch."""
    sizes = case.data.sizes
    done = []

    def after_step(loss: float, is_skipped: bool) -> None:
        done.append(Fraction(loss) * sizes[len(done) % len(sizes)])
        if average is not None and not is_skipped:
            average.update_parameters(model)
        if len(done) == 1:
            hook_late(case, model)
            change_model(case, model)
        for scheduler in [] if is_skipped else first_schedulers:
            scheduler.step()
        if len(made) < 2:
            return
        if case.optimization.scheduler_each == "step":
            made[1].step() if not is_skipped else None
        elif len(done) % len(sizes) == 0:
            mean = float(sum(done[-len(sizes) :]) / sum(sizes))
            made[1].step(mean) if isinstance(made[1], ReduceLROnPlateau) else made[1].step()

    return after_step
