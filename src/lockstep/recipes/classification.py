"""The training of a classification recipe, which runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep.checkpoint.schedule import CheckpointConfig
from lockstep.errors import FileError
from lockstep.launcher.world import init
from lockstep.launcher.world import world as current_world
from lockstep.model.forward import accuracy
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.recipes.learning_rate import WarmupSchedule
from lockstep.record.loggers import create_logger
from lockstep.record.program import describe_program
from lockstep.record.progress import Progress
from lockstep.record.recorder import Recorder
from lockstep.training.optimization import OptimizerConfig
from lockstep.training.trainer import Trainer

__all__ = ["Data", "Options", "train"]

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    recipe: str
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    microbatches: int
    seed: int
    threads: int
    workers: int
    bf16: bool
    data: str | None
    download: bool
    quiet: bool
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    warmup: float = 0.0  # epochs
    lr_decay: str = "none"
    size: int | None = None  # pixels, for images that can be scaled
    stages: int = 1
    schedule: str | None = None
    activation_checkpointing: bool = False
    logger: tuple[str, ...] = ()
    checkpoint_every: int | None = None  # steps


@dataclass(frozen=True)
class Data:
    """The training set and the held-out set of a recipe, and the number of classes."""

    training: Dataset[Any]
    held_out: Dataset[Any]
    classes: int


Load = Callable[[Options], Data]
Network = Callable[[int], nn.Module]


def train(options: Options, load: Load, network: Network, folder: str) -> dict[str, Any]:
    """Train on this rank, evaluate after each epoch, and return the summary.

    Rank 0 writes the record and the weights. A run that was interrupted is continued if the
    variable LOCKSTEP_RESUME is set. The other ranks have the loggers too, because any of them may
    become rank 0 of an elastic run.

    Args:
        options: The options.
        load: The function that returns the data.
        network: The function that returns the model for a number of classes.
        folder: The folder of the run.
    """
    world = init(threads=options.threads)
    torch.manual_seed(options.seed)
    data = load(options)
    samples: int = len(data.training)  # type: ignore[arg-type]
    steps = -(-samples // options.batch_size)
    rate = WarmupSchedule.of(options.epochs, steps, options.warmup, options.lr_decay)
    dashboards = [create_logger(name, Path(folder)) for name in options.logger]
    record: list[Any] = [Path(folder), *dashboards]
    if world.rank == 0:
        title = f"{options.recipe}, {_layout(world.world_size, options)}, {world.backend}"
        progress = Progress(epochs=options.epochs, steps=steps, title=title, quiet=options.quiet)
        metadata = {
            "recipe": options.recipe,
            "program": describe_program("recipe", options.recipe),
            "options": asdict(options),
            "epochs": options.epochs,
            "steps_per_epoch": steps,
            "samples": samples,
        }
        record = [Recorder(Path(folder), metadata), progress, *dashboards]
    taken: list[int] = []  # the numbers of samples of the steps in this process
    begun = time.perf_counter()
    with Trainer(
        network(data.classes),
        nn.CrossEntropyLoss(label_smoothing=options.label_smoothing),
        OptimizerConfig(
            partial(
                torch.optim.SGD,
                lr=options.lr,
                momentum=options.momentum,
                weight_decay=options.weight_decay,
            ),
            scheduler=rate.scheduler if rate else None,
        ),
        microbatches=options.microbatches,
        pipeline=PipelineConfig(stages=options.stages, schedule=options.schedule),
        activation_checkpointing=options.activation_checkpointing,
        seed=options.seed,
        metrics={"accuracy": accuracy},
        autocast_dtype=torch.bfloat16 if options.bf16 else None,
        loggers=record,
        callbacks=lambda result: taken.append(result.samples),
        checkpoint=CheckpointConfig(every_steps=options.checkpoint_every),
        progress=False,  # rank 0 has one among its loggers
    ) as trainer:
        for epoch in range(options.epochs):
            for batch in trainer.batches(
                data.training, options.batch_size, epoch=epoch, num_workers=options.workers
            ):
                trainer.step(batch)
            evaluation = trainer.evaluate(
                data.held_out, options.batch_size, num_workers=options.workers
            )
        seconds, world = time.perf_counter() - begun, current_world()
        trainer.save_weights(Path(folder) / WEIGHTS)
        summary = {
            "recipe": options.recipe,
            "world_size": world.world_size,
            "replicas": world.world_size // options.stages,
            "stages": options.stages,
            "microbatches": options.microbatches,
            "epochs": options.epochs,
            "steps": trainer.steps,
            "samples": trainer.history.samples,
            "loss": evaluation.loss,
            "accuracy": evaluation.metrics["accuracy"],
            "held_out": evaluation.samples,
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


def _layout(ranks: int, options: Options) -> str:
    counts = {"replica": ranks // options.stages, "stage": options.stages}
    parts = [
        _counted(count, what) for what, count in counts.items() if what != "stage" or count > 1
    ]
    return ", ".join([" x ".join(parts), f"{options.microbatches} micro-batches"])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count > 1 else "")
