"""A case in Lockstep: a leg of it on this rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import lockstep as ls
from grammar import Case, Leg
from grammar import case as draw
from grammar.blocks import Named
from grammar.datasets import dataset_of, order_of, tensors
from grammar.loops import loop_of
from grammar.outcome import Outcome
from grammar.plain import EVALUATED, change_model, hook_late, tensor_batches
from grammar.plain import outcome_of as reference_of
from grammar.refusals import possible_refusals, refusals
from lockstep.comm.hosts.identity import IDENTITY

__all__ = ["draw", "make_trainer", "outcome_of", "possible_refusals", "reference_of", "refusals"]


def outcome_of(case: Case, leg: Leg, folder: Path) -> Outcome:
    """Train a leg; one that is not the last leaves its state in `folder` for the next."""
    losses: list[float] = []
    trainer, loss = make_trainer(case, leg, losses)
    saved = folder / f"{case.seed}.pt"
    position: Any = None
    if leg.begin:
        hook_late(case, trainer.model)
        state = torch.load(saved, weights_only=False)
        trainer.load_state_dict(state["trainer"])
        position = state["batches"]
    where = None
    for batch, where in _batches(case, trainer, position, leg):  # noqa: B007
        if leg.layout.loop or case.loop != "plain":
            _loop(case, trainer, loss, batch)
        else:
            trainer.step(batch)
        if leg.begin + len(losses) == 1:
            hook_late(case, trainer.model)
            change_model(case, trainer.model)
    hexed = tuple(value.hex() for value in losses)
    evaluation = _evaluation(case, trainer) if case.evaluates else None
    if leg.end < case.data.steps:
        state = {"trainer": trainer.state_dict(), "batches": where and where()}
        if ls.rank() == 0:
            torch.save(state, saved)
        return Outcome(hexed)
    average = trainer.state_dict()["average"]
    return Outcome(
        hexed,
        trainer.digest(),
        trainer.optimizer_digest(),
        None if average is None else ls.digest(average),
        evaluation,
        float(trainer.optimizers[0].param_groups[0]["lr"]).hex(),
    )


def make_trainer(case: Case, leg: Leg, losses: list[float]) -> tuple[ls.Trainer, Any]:
    """Return the trainer, which notes its losses, and its loss function."""
    model: Any = case.model.build(case.seed)
    if case.model.form == "factories":
        model = case.model.factories()
    loss = case.loss.build(case.model.dtype)
    os.environ.pop(IDENTITY, None)
    if leg.layout.hosts > 1:
        os.environ[IDENTITY] = f"host {ls.rank() % leg.layout.hosts}"
    trainer = ls.Trainer(
        model,
        loss,
        microbatches=case.microbatches,
        seed=case.seed,
        loss_weight=case.loss.weight,
        autocast_dtype=case.precision,
        callbacks=[lambda result: losses.append(result.loss)],
        audit=ls.AuditConfig(every_steps=1 if case.seed % 2 else 100),
        pipeline=leg.layout.pipeline(Named.NAMES if case.model.form == "named" else None),
        **case.optimization.options(),
        **leg.layout.options(),
    )
    return trainer, loss


def _batches(case: Case, trainer: ls.Trainer, position: Any, leg: Leg) -> Iterator[tuple[Any, Any]]:
    """Give the batches of a leg, from a saved position, each with what tells the position."""
    data = case.data
    inputs, targets = tensors(data, case.model, case.loss, case.microbatches, case.seed)
    if not data.epochs:
        for batch in tensor_batches(case, inputs, targets)[leg.begin : leg.end]:
            yield batch, None
        return
    dataset = dataset_of(data, inputs, targets)
    step = leg.begin
    for epoch in range(trainer.epoch, data.epochs):
        options: dict[str, Any] = {"shuffle": data.shuffle, "num_workers": data.workers}
        if data.source == "sampler":
            options = {"sampler": order_of(data, epoch)}
        batches = trainer.batches(dataset, data.batch_size, epoch=epoch, **options)
        if position is not None:
            batches.load_state_dict(position)
            position = None
        for batch in batches:
            yield batch, batches.state_dict
            step += 1
            if step == leg.end < data.steps:
                return


def _evaluation(case: Case, trainer: ls.Trainer) -> str:
    """Return the loss over all samples, of the averaged weights where there are some."""
    inputs, targets = tensors(case.data, case.model, case.loss, case.microbatches, case.seed)
    dataset = TensorDataset(*inputs, targets)
    return trainer.evaluate(dataset, EVALUATED, ema=trainer.ema_model is not None).loss.hex()


def _loop(case: Case, trainer: ls.Trainer, loss: Any, batch: Any) -> None:
    """Do a step as a loop of the user's own does it."""
    with trainer.manual_step() as step:
        for part in step.microbatches(batch):
            for value in loop_of(case.loop)(trainer.model, loss, part):
                step.backward(value, retain_graph=True)
