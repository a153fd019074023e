"""A training program that uses the Trainer's options, checked by mypy and pyright."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep as ls
from lockstep.data.datasets import digits
from lockstep.model.deferred_init import build
from lockstep.training.history import EpochResult, StepResult


def decay(name: str, parameter: nn.Parameter) -> dict[str, float]:
    """Exempt vectors from weight decay."""
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {}


def print_loss(result: StepResult) -> None:
    """Print the loss of a step."""
    print(result.step, result.loss, result.metrics["accuracy"])


class Stopwatch:
    """A callback with both methods."""

    def on_step(self, result: StepResult) -> None:
        """Print the time of a step."""
        print(result.seconds)

    def on_epoch(self, result: EpochResult) -> None:
        """Print the time of an epoch."""
        print(result.seconds)


def train(folder: Path) -> float:
    """Train, evaluate, save and resume."""
    world = ls.init(threads=1)
    blocks: list[Callable[[], nn.Module]] = [
        nn.Flatten,
        partial(nn.Linear, 784, 16),
        nn.ReLU,
        partial(nn.Linear, 16, 10),
    ]
    ls.load_weights(build(blocks, seed=1), "weights")
    trainer = ls.Trainer(
        build(blocks, seed=1),
        nn.CrossEntropyLoss(),
        [
            ls.OptimizerConfig(
                partial(torch.optim.Muon, lr=1e-3), parameters=lambda name, p: p.ndim == 2
            ),
            ls.OptimizerConfig(
                partial(torch.optim.AdamW, lr=1e-3),
                parameter_groups=decay,
                scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=3),
                scheduler_interval="manual",
                restore_schedule=True,
            ),
        ],
        microbatches=4,
        loss_weight=ls.target_weight(nn.CrossEntropyLoss()),
        metrics={"accuracy": ls.accuracy, "mean": ls.DatasetMetric(lambda outputs, targets: 1.0)},
        max_grad_norm=1.0,
        ema_decay=0.999,
        autocast_dtype=torch.bfloat16,
        activation_checkpointing=world.world_size > 1,
        extra_modules=[nn.Dropout(0.1)],
        pipeline=ls.PipelineConfig(stages=1, schedule="1f1b", balance=None),
        storage="replicated",
        callbacks=[print_loss, Stopwatch()],
        loggers=[folder / "run", ls.loggers.TensorBoard(folder / "tensorboard")],
        checkpoint=ls.CheckpointConfig(every_steps=500, stateful={"dropout": nn.Dropout(0.1)}),
        progress=world.world_size > 1,
        audit=ls.AuditConfig(every_steps=10, max_corrections=1),
    )
    trainer.resume()
    resumed_from: int | None = trainer.resumed_from
    loss = 0.0
    with trainer:
        batches = trainer.batches(digits(), batch_size=64, seed=3, epoch=0, num_workers=2)
        for batch in batches:
            loss += trainer.step(batch)
        evaluation = trainer.evaluate(digits(), 64, ema=True)
        for batch in trainer.batches(DataLoader(digits(), 64, drop_last=True), epoch=1):
            loss += trainer.step(batch)
        evaluation = trainer.evaluate(DataLoader(digits(), 64))
        trainer.schedulers[1].step(evaluation.loss)
        trainer.save_weights(folder / "weights.safetensors")
        state = trainer.state_dict()
    trainer.load_state_dict(state)
    digest: str = trainer.digest()
    ema_model: nn.Module | None = trainer.ema_model
    outputs: torch.Tensor = trainer.predict(digits(), 64, ema=True)
    if not trainer.is_replaying:
        print(trainer.last_result.loss, trainer.folder / "outputs", outputs)
    trainer.log("ema", trainer.steps)
    print(digest, ema_model, resumed_from, evaluation.metrics["accuracy"])
    return loss + evaluation.loss


def train_manually(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Take a step with a loop of one's own."""
    trainer = ls.Trainer(model, None, partial(torch.optim.SGD, lr=0.1), callbacks=print_loss)
    with trainer.manual_step() as step:
        for inputs, targets in step.microbatches(batch):
            loss: torch.Tensor = nn.functional.cross_entropy(model(inputs), targets)
            step.backward(loss, metrics={"loss": loss.detach()}, final=True)
    mean: float = step.result.loss
    print(mean)
    for attempt in trainer.attempts(batch, batch):
        with attempt as step:
            count: float = step.total(lambda data: len(data[0]))
            for first, _ in step.microbatches():
                step.backward(model(first[0]).sum() / count, share=1)
            rows: torch.Tensor = step.gather([first[0] for first, _ in [(batch, batch)]])
            print(rows)
    with trainer.manual_step() as step:
        whole: torch.Tensor = step.backward_whole_batch(model, torch.mean, batch[0])
    print(whole)


def train_in_nested_loops(
    model: nn.Module, loader: DataLoader[tuple[torch.Tensor, torch.Tensor]], path: Path
) -> float:
    """Train in a loop over batches, with one over their micro-batches in it."""
    optimizer = torch.optim.AdamW(model.parameters())
    others = torch.optim.SGD(model.parameters())
    exact = ls.exact(
        model,
        [optimizer, others],
        8,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        checkpoint=ls.CheckpointConfig(folder=path),
        stateful={"average": torch.optim.swa_utils.AveragedModel(model)},
        loggers=[path],
        progress=False,
        audit=ls.AuditConfig(every_steps=10),
    )
    scaler = torch.amp.GradScaler("cpu")
    batches = exact.batches(loader, epoch=1)
    for batch in batches:
        for inputs, targets in batch:
            outputs = model(inputs)
            loss: torch.Tensor = nn.functional.cross_entropy(outputs, targets)
            batch.backward(loss, weight=len(inputs), scaler=scaler, final=True)
            batch.log("accuracy", ls.accuracy(outputs, targets), weight=2.0)
        norm: float = exact.clip_grad_norm_(1.0) + batch.norm
        mean: float = batch.loss + batch.metrics["accuracy"]
        samples: int = batch.size + batch.epoch + batch.number
        indices: torch.Tensor | None = batch.indices
        print(norm, mean, samples, indices)
        same = exact.use(batch)
        for inputs, _ in same:
            same.backward(model(inputs).sum(), share=1.0, final=False, retain_graph=True)
    steps: int = len(batches)
    batches.load_state_dict(batches.state_dict())
    exact.load_state_dict(exact.state_dict())
    evaluation = exact.evaluate(loader, loss=nn.CrossEntropyLoss(), metrics={"a": ls.accuracy})
    exact.finish()
    return evaluation.loss + evaluation.metrics["a"] + exact.last_result.loss + steps


def train_with_an_existing_loop(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Train with the same bits on any number of ranks."""
    exact = ls.exact(model, microbatches=4, seed=1)
    output = inputs
    for part in exact.microbatches([inputs]):
        output = model(part)
        exact.weigh(output.sum(), weight=3).backward()
    is_complete: bool = exact.is_complete
    print(is_complete)
    threads = ls.DataParallel(model, ["cpu", torch.device("cpu")], microbatches=4, seed=1)
    loss: torch.Tensor = threads.compute_loss(nn.MSELoss(), inputs, output.detach())
    loss.backward()
    return output
