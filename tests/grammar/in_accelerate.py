"""A random training in a loop with Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
    """Draw what only loops with Accelerate do."""
    return {
        "accumulates": draw.chance(0.5),
        "prepares_together": draw.chance(0.5),
        "has_critic": draw.chance(0.2),
        "draws": draw.chance(0.3),
        "gathers": draw.pick("loss", "object", "pair"),
    }


def train(drawn: Case, of: Habit) -> dict[str, Any]:
    """Train, and return what must be equal on any number of ranks."""
    from accelerate.state import AcceleratorState, GradientState

    from lockstep.integrations.accelerate import ExactAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(of.seed)
    options = of.options
    precision = "bf16" if of.has_half else "no"
    accelerator = ExactAccelerator(
        cpu=True, microbatches=of.microbatches, seed=of.seed, mixed_precision=precision
    )
    network = drawn.model.build(of.seed)
    loss = drawn.loss.build(drawn.model.dtype)
    optimizer: Any = make_optimizer(of, network.parameters())
    drops = {} if of.source == "buckets" else {"drop_last": of.drop_last}
    columns = make_columns(drawn, of, of.samples, 0)
    loader = make_loader(of, of.source, columns, shuffle=True, **drops)
    held_out = None
    if options["prepares_together"]:
        model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    else:
        loader = accelerator.prepare(loader)
        model = accelerator.prepare(network)
        optimizer = accelerator.prepare(optimizer)
    if of.validated:
        held_out = accelerator.prepare(
            make_loader(of, of.validated, make_columns(drawn, of, of.held_out, 1))
        )
    critic, of_critic = make_critic(accelerator) if options["has_critic"] else (None, None)
    steps = len(loader) * of.epochs if of.source != "endless stream" else 6
    scheduler: Any = make_schedule(of, optimizer, steps)
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
    found: list[Any] = []
    scale = 1.0
    for epoch in range(of.epochs):
        loader.set_epoch(epoch)
        for batch in loader:

            def compute(batch: Any = batch, scale: float = scale) -> None:
                if critic is not None:
                    guess = critic(torch.randn(len(batch[0]), 3))
                    accelerator.backward(guess.square().mean())
                    of_critic.step()
                    of_critic.zero_grad()
                accelerator.backward(scale * loss_of(loss, model, batch))
                if of.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), of.clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()

            if options["accumulates"] or critic is not None:
                with accelerator.accumulate(*filter(None, (model, critic))):
                    compute()
            else:
                compute()
            if accelerator.sync_gradients and options["draws"]:
                scale = 0.5 + torch.rand(()).item()
        if held_out is not None:
            found.append(evaluate(of, accelerator, model, loss, held_out))
            if of.follows and len(found) > 1 and found[-1] > found[-2]:
                break
    return {
        "digest": ls.digest(network),
        "critic": ls.digest(critic) if critic is not None else "",
        "found": found,
        "rates": [group["lr"] for group in optimizer.param_groups],
        "drawn": torch.rand(()).item(),
    }


def make_critic(accelerator: Any) -> Any:
    """Return another model, with its optimizer."""
    critic = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    return accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), 0.1))


def evaluate(of: Habit, accelerator: Any, model: Any, loss: Any, loader: Any) -> Any:
    """Return what is gathered from an evaluation."""
    model.eval()
    gathered: list[Any] = []
    for batch in loader:
        with torch.no_grad():
            value = loss_of(loss, model, batch).float()
        if of.options["gathers"] == "object":
            gathered += accelerator.gather_for_metrics([value.item()] * len(batch[0]))
            continue
        losses = value.repeat(len(batch[0]))
        if of.options["gathers"] == "pair":
            losses, _ = accelerator.gather_for_metrics((losses, batch[-1]))
        else:
            losses = accelerator.gather_for_metrics(losses)
        gathered += losses.tolist()
    model.train()
    return gathered
