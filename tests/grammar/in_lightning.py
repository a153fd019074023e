"""A random training in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch

import lockstep as ls
from grammar import Case
from grammar.drawing import Draw
from grammar.frameworks import (
    Habit,
    loss_of,
    make_columns,
    make_loader,
    make_optimizer,
    make_schedule,
)


def draw_options(draw: Draw) -> dict[str, Any]:
    """Draw what only Lightning has."""
    options: dict[str, Any] = draw.some(
        limit_train_batches=[1, 2, 0.5],
        limit_val_batches=[1, 2, 0.5, 0],
        val_check_interval=[0.5, 1],
        overfit_batches=[0, 0, 1],
        max_steps=[-1, 3],
        check_val_every_n_epoch=[1, 2],
    )
    return {
        "trainer": options,
        "divides": draw.chance(0.8),
        "manual": draw.chance(0.15),
        "frequency": draw.pick(1, 2),
        "sampler": draw.chance(0.7),
        "predicts": draw.chance(0.2),
    }


def train(drawn: Case, of: Habit) -> dict[str, Any]:
    """Train, and return what must be equal on any number of ranks."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping

    from lockstep.integrations.lightning import ExactStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = drawn.model.build(of.seed)
            self.loss = drawn.loss.build(drawn.model.dtype)
            self.automatic_optimization = not of.options["manual"]

        def training_step(self, batch: Any, index: int) -> Any:
            loss = loss_of(self.loss, self.model, batch)
            self.log("train_loss", loss.float(), on_step=True, on_epoch=True)
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if of.clip is not None:
                self.clip_gradients(optimizer, of.clip, "norm")
            optimizer.step()
            if (scheduler := self.lr_schedulers()) is not None and of.schedule != "plateau":
                scheduler.step()
            return None

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", loss_of(self.loss, self.model, batch).float())
            self.log("val_largest", batch[0].float().max(), reduce_fx="max")

        def predict_step(self, batch: Any, index: int) -> Any:
            return loss_of(self.loss, self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(of, self.model.parameters())
            steps = self.trainer.estimated_stepping_batches if of.schedule == "linear" else 5
            scheduler: Any = make_schedule(of, optimizer, int(steps) if 0 < steps < 1e6 else 5)
            if of.schedule == "plateau":
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                return [optimizer], [{"scheduler": plateau, "monitor": "train_loss_epoch"}]
            if scheduler is None:
                return optimizer
            config = {"interval": "step", "frequency": of.options["frequency"]}
            return [optimizer], [{"scheduler": scheduler, **config}]

    module = Module()
    options = dict(of.options["trainer"])
    if of.source == "endless stream":
        options.pop("val_check_interval", None)
    if of.source in ("endless stream", "stream"):
        for name in ("limit_train_batches", "overfit_batches"):
            if isinstance(options.get(name), float):
                del options[name]
    if of.validated == "endless stream" and isinstance(options.get("limit_val_batches"), float):
        del options["limit_val_batches"]
    monitor = "val_loss" if of.validated and options.get("limit_val_batches") != 0 else "train_loss"
    stops = of.follows and options.get("check_val_every_n_epoch", 1) == 1
    callbacks = [EarlyStopping(monitor, patience=1, check_on_train_epoch_end=True)] if stops else []
    clips = of.clip is not None and not of.options["manual"]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ls.world_size(),
        strategy=ExactStrategy(of.microbatches, of.seed, of.options["divides"]),
        max_epochs=of.epochs,
        gradient_clip_val=of.clip if clips else None,
        precision="bf16-mixed" if of.has_half else "32-true",
        use_distributed_sampler=of.options["sampler"] and of.source != "buckets",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    columns = make_columns(drawn, of, of.samples, 0)
    drops = {} if of.source == "buckets" else {"drop_last": of.drop_last}
    loader = make_loader(of, of.source, columns, shuffle=True, **drops)
    held_out = None
    if of.validated:
        held_out = make_loader(of, of.validated, make_columns(drawn, of, of.held_out, 1))
    trainer.fit(module, loader, held_out)
    predicted = []
    if of.options["predicts"] and held_out is not None:
        predicted = [float(value) for value in trainer.predict(module, held_out) or []]
    metrics = {name: float(value).hex() for name, value in trainer.callback_metrics.items()}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {
        "digest": ls.digest(module.model),
        "metrics": dict(sorted(metrics.items())),
        "steps": trainer.global_step,
        "rates": rates,
        "predicted": predicted,
        "drawn": torch.rand(()).item(),
    }
