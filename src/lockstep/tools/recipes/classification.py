"""The training and the evaluation of a classification recipe, which run on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep.checkpoint.save_schedule import CheckpointConfig
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher import arithmetic
from lockstep.launcher.world import init
from lockstep.launcher.world import world as current_world
from lockstep.messages import log
from lockstep.model.evaluation import Evaluation
from lockstep.model.forward import Metric, accuracy
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.record.loggers import create_logger
from lockstep.record.program import describe_program
from lockstep.record.progress import Progress
from lockstep.record.recorder import Recorder
from lockstep.tools.recipes.learning_rate import WarmupSchedule
from lockstep.tools.recipes.mixup import Mixup
from lockstep.tools.recipes.pretrained import load_weights
from lockstep.training.history import StepResult
from lockstep.training.optimizer_config import OptimizerConfig, OptimizerFactory, ParameterGroups
from lockstep.training.trainer import Trainer

__all__ = ["EMA_WEIGHTS", "WEIGHTS", "Data", "Options", "Recipe", "evaluate", "train"]

WEIGHTS, EMA_WEIGHTS = "weights.safetensors", "weights-ema.safetensors"


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    recipe: str
    epochs: int
    batch_size: int
    lr: float
    microbatches: int
    seed: int
    threads: int
    workers: int
    bf16: bool
    data: str | None
    download: bool
    quiet: bool
    optimizer: str = "sgd"
    momentum: float = 0.0  # of SGD
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0  # parameter of the Beta distribution; 0 for none
    ema: float | None = None  # decay of the average of the weights
    warmup: float = 0.0  # epochs
    lr_decay: str = "none"
    lr_step_size: int = 30  # epochs
    lr_gamma: float = 0.1
    weights: str | None = None
    new_head: bool = False
    size: int | None = None  # pixels, for images that can be scaled
    stages: int = 1
    schedule: str | None = None
    activation_checkpointing: bool = False
    logger: tuple[str, ...] = ()
    checkpoint_every: int | None = None  # steps
    portable: bool | None = False  # None: where the machine can


@dataclass(frozen=True)
class Data:
    """The training set and the held-out set of a recipe, and the number of classes."""

    training: Dataset[Any]
    held_out: Dataset[Any]
    classes: int


@dataclass(frozen=True)
class Recipe:
    """A recipe of `lockstep train`.

    Attributes:
        name: The name on the command line.
        defaults: A function of the given options that returns the default options.
        load: A function of the options that returns the data.
        network: A function of the options and the number of classes that returns the model.
        head: The name of the classifier in the state dict of the model.
        parameter_groups: The function that selects the optimizer options of a parameter; None for
            one group.
        metrics: Functions of (outputs, targets) by name, among them "accuracy".
    """

    name: str
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]]
    load: Callable[[Options], Data]
    network: Callable[[Options, int], nn.Module]
    head: str
    parameter_groups: ParameterGroups | None = None
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": accuracy})


def train(options: Options, recipe: Recipe, folder: str) -> dict[str, Any]:
    """Train on this rank, evaluate after each epoch, and return the summary.

    With averaged weights, these are evaluated after each epoch, and the others at the end.

    Rank 0 writes the record and the weights. A run that was interrupted is continued if the
    variable LOCKSTEP_RESUME is set. The other ranks have the loggers too, because any of them may
    become rank 0 of an elastic run.

    Args:
        options: The options.
        recipe: The recipe.
        folder: The folder of the run.
    """
    options = _join(options)
    data, model = _prepare(options, recipe)
    samples: int = len(data.training)  # type: ignore[arg-type]
    steps = -(-samples // options.batch_size)
    is_averaged = options.ema is not None
    taken: list[int] = []  # the numbers of samples of the steps in this process
    begun = time.perf_counter()
    with _make_trainer(
        options,
        recipe,
        model,
        steps,
        loggers=_make_loggers(options, folder, steps, samples),
        callbacks=lambda result: taken.append(result.samples),
        checkpoint=CheckpointConfig(every_steps=options.checkpoint_every),
    ) as trainer:
        mixup = Mixup(options.mixup, data.classes) if options.mixup else None
        for epoch in range(options.epochs):
            for batch in trainer.batches(
                data.training,
                options.batch_size,
                epoch=epoch,
                num_workers=options.workers,
                collate_fn=mixup,
            ):
                trainer.step(batch)
            latest = _evaluate(trainer, data, options, ema=is_averaged)
        averaged = latest if is_averaged else None
        evaluation = _evaluate(trainer, data, options) if is_averaged else latest
        seconds = time.perf_counter() - begun
        trainer.save_weights(Path(folder) / WEIGHTS)
        if is_averaged:
            trainer.save_weights(Path(folder) / EMA_WEIGHTS, ema=True)
        summary = _summarize(options, evaluation, averaged) | {
            "epochs": options.epochs,
            "steps": trainer.steps,
            "samples": trainer.history.samples,
            "digest": trainer.digest(),
            "optimizer_digest": trainer.optimizer_digest(),
            "seconds": seconds,
            "samples_per_second": sum(taken) / seconds,
            "run": folder,
            "resumed_from_step": trainer.resumed_from,
        }
        try:
            trainer.finish()
        except FileError as error:  # the record is incomplete, but the training succeeded
            summary["failure"] = str(error)
        return summary


def evaluate(options: Options, recipe: Recipe, folder: str | None) -> dict[str, Any]:
    """Evaluate the weights of `options.weights` on this rank, and return the summary.

    Nothing is written.

    Args:
        options: The options.
        recipe: The recipe.
        folder: The folder of the run that the weights belong to; None if there is none.
    """
    options = _join(options)
    data, model = _prepare(options, recipe, is_trained=False)
    begun = time.perf_counter()
    with _make_trainer(options, recipe, model, steps=1, loggers=[]) as trainer:
        evaluation = _evaluate(trainer, data, options)
        seconds = time.perf_counter() - begun
        return _summarize(options, evaluation, None) | {
            "epochs": 0,
            "steps": 0,
            "samples": 0,
            "weights": options.weights,
            "digest": trainer.digest(),
            "seconds": seconds,
            "samples_per_second": evaluation.samples / seconds,
            "run": folder,
            "resumed_from_step": None,
        }


def _join(options: Options) -> Options:
    """Join the ranks, and return the options with the decision whether the bits are portable."""
    if options.portable is not False:
        try:
            init(threads=options.threads, device="cpu", portable=True)
            return replace(options, portable=True)
        except UsageError as error:
            if options.portable:
                raise
            reason = str(error)
    world = init(threads=options.threads, portable=False)
    if options.portable is None and world.rank == 0:
        log(f"the bits of this training are not portable to other processors: {reason}")
    return replace(options, portable=False)


def _prepare(
    options: Options, recipe: Recipe, *, is_trained: bool = True
) -> tuple[Data, nn.Module]:
    """Return the data and the model with its initial weights."""
    torch.manual_seed(options.seed)
    data = recipe.load(options)
    model = recipe.network(options, data.classes)
    if options.weights is not None:
        load_weights(
            model,
            options.weights,
            head=recipe.head,
            network=recipe.name,
            has_new_head=options.new_head,
            is_trained=is_trained,
        )
    return data, model


def _make_trainer(
    options: Options,
    recipe: Recipe,
    model: nn.Module,
    steps: int,
    loggers: list[Any],
    callbacks: Callable[[StepResult], None] | tuple[()] = (),
    checkpoint: CheckpointConfig | None = None,
) -> Trainer:
    """Return the trainer; `steps` is the number of steps per epoch."""
    rate = WarmupSchedule.of(
        options.epochs,
        steps,
        options.warmup,
        options.lr_decay,
        options.lr_step_size,
        options.lr_gamma,
    )
    return Trainer(
        model,
        nn.CrossEntropyLoss(label_smoothing=options.label_smoothing),
        OptimizerConfig(
            _choose_optimizer(options),
            parameter_groups=recipe.parameter_groups,
            scheduler=rate.scheduler if rate else None,
        ),
        microbatches=options.microbatches,
        pipeline=PipelineConfig(stages=options.stages, schedule=options.schedule),
        activation_checkpointing=options.activation_checkpointing,
        seed=options.seed,
        metrics=recipe.metrics,
        max_grad_norm=options.max_grad_norm,
        ema_decay=options.ema,
        autocast_dtype=torch.bfloat16 if options.bf16 else None,
        loggers=loggers,
        callbacks=callbacks,
        checkpoint=checkpoint,
        progress=False,  # rank 0 has one among its loggers
    )


def _choose_optimizer(options: Options) -> OptimizerFactory:
    if options.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=options.lr, weight_decay=options.weight_decay)
    return partial(
        torch.optim.SGD,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )


def _make_loggers(options: Options, folder: str, steps: int, samples: int) -> list[Any]:
    """Return the loggers of this rank, for epochs of `steps` steps and `samples` samples."""
    world = current_world()
    dashboards = [create_logger(name, Path(folder)) for name in options.logger]
    if world.rank != 0:
        return [Path(folder), *dashboards]
    title = f"{options.recipe}, {_layout(world.world_size, options)}, {world.backend}"
    shown = [] if options.quiet else [Progress(epochs=options.epochs, steps=steps, title=title)]
    metadata = {
        "recipe": options.recipe,
        "program": describe_program("recipe", options.recipe),
        "options": asdict(options),
        "epochs": options.epochs,
        "steps_per_epoch": steps,
        "samples": samples,
    }
    return [Recorder(Path(folder), metadata), *shown, *dashboards]


def _evaluate(trainer: Trainer, data: Data, options: Options, *, ema: bool = False) -> Evaluation:
    return trainer.evaluate(data.held_out, options.batch_size, ema=ema, num_workers=options.workers)


def _summarize(
    options: Options, evaluation: Evaluation, averaged: Evaluation | None
) -> dict[str, Any]:
    """Return the layout and the results on the held-out set, those of averaged weights too."""
    world = current_world()
    summary = {
        "recipe": options.recipe,
        "world_size": world.world_size,
        "replicas": world.world_size // options.stages,
        "stages": options.stages,
        "microbatches": options.microbatches,
        "portable": bool(options.portable),
        "arithmetic": arithmetic.measure(),
        "loss": evaluation.loss,
        **evaluation.metrics,
        "held_out": evaluation.samples,
    }
    if averaged is not None:
        summary["ema_loss"] = averaged.loss
        summary |= {f"ema_{name}": value for name, value in averaged.metrics.items()}
    return summary


def _layout(ranks: int, options: Options) -> str:
    counts = {"replica": ranks // options.stages, "stage": options.stages}
    parts = [
        _counted(count, what) for what, count in counts.items() if what != "stage" or count > 1
    ]
    return ", ".join([" x ".join(parts), f"{options.microbatches} micro-batches"])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count > 1 else "")
