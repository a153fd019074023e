"""Random loops with `ls.exact`: what a script has around its loop, drawn by one integer.

    exact.draw(1234)                the training of `grammar.case(1234)` in a loop of the script
    python -m grammar exact 1234    run it, and compare it with plain PyTorch on one process

    loop_scripts.py                 what the script has around the loop
    plain_exact.py                  the loop on one process, in plain PyTorch (accumulation.py)
    in_exact.py                     the loop with `ls.exact`

Model, loss, optimizers and data are those of the grammar; the form of the loop, the source of its
batches, and what it does between its steps are drawn here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from grammar import Case, Leg, case
from grammar.drawing import Draw
from grammar.layouts import Layout
from lockstep.kernel import spec

__all__ = ["Loop", "LoopLayout", "draw"]


@dataclass(frozen=True)
class LoopLayout(Layout):
    """A world, and how the script wraps its model."""

    is_wrapped: bool = False
    """Whether the model is in DistributedDataParallel."""
    shards_blocks: bool = False
    """Whether `fully_shard` is called on each block, too."""

    def __str__(self) -> str:
        """Describe the layout."""
        kind = " in DistributedDataParallel" if self.is_wrapped else ""
        if self.sharded:
            kind = " sharded by blocks" if self.shards_blocks else " sharded"
        return f"{self.world} x {self.backend}{kind}" + f" on {self.hosts} hosts" * (self.hosts > 1)


@dataclass(frozen=True)
class Loop:
    """A loop of the script's own, as it was drawn."""

    case: Case
    legs: tuple[Leg, ...]
    form: str
    """ "nested", or "flat", with a sampler, or "divided", flat without one."""
    has_loader: bool
    """Whether the batches come from a DataLoader."""
    is_endless: bool
    """Whether an iterable dataset has no length."""
    trained: tuple[tuple[int, int], ...]
    """The epoch and the number of each batch on which a step is taken."""
    ends: tuple[int | None, ...]
    """The batch before which an epoch is left, of each epoch; None: none."""
    is_managed: bool
    """Whether the handle has the optimizers."""
    has_checkpoints: bool
    """Whether the script is interrupted and resumed, instead of saving its state by itself."""
    clips_by_torch: bool
    has_critic: bool
    leaves: int | None
    """The step that is begun, left by `break`, and repeated."""
    has_cache: bool
    """Whether autocast keeps the weights that it has converted."""

    def __str__(self) -> str:
        """Describe the loop in a few lines, the first of which draws it again."""
        legs = ", then ".join(f"{leg.layout} for {leg.end - leg.begin} steps" for leg in self.legs)
        first, *lines = str(self.case).splitlines()[:-1]
        options = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if name not in ("case", "legs", "trained", "ends")
        ]
        return "\n".join(
            [
                first.replace("grammar.case", "grammar.exact.draw"),
                *lines,
                f"    loop       {', '.join(options)}",
                f"    steps      {list(self.trained)}, epochs end before {list(self.ends)}",
                f"    layout     {legs}",
            ]
        )

    @property
    def weight(self) -> Callable[[Any], float] | None:
        """The weight that the script gives with the loss of a micro-batch; None: none."""
        loss = self.case.loss.build(self.case.model.dtype)
        if getattr(loss, "reduction", "mean") == "sum":
            return None
        return self.case.loss.weight or spec.weight_of(loss)

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a sum over the samples."""
        loss = self.case.loss.build(self.case.model.dtype)
        return getattr(loss, "reduction", "mean") == "sum"

    @property
    def scopes(self) -> Callable[[nn.Module], list[Any]]:
        """The function that returns the RNG scopes of the model."""
        return (lambda model: [model]) if self.case.model.form == "named" else self.case.model.units


def fits(drawn: Case) -> bool:
    """Return whether a case has a loss without buffers, which `ls.exact` does not merge."""
    loss = drawn.loss.build(drawn.model.dtype)
    return not (isinstance(loss, nn.Module) and any(True for _ in loss.buffers()))


def draw(seed: int) -> Loop:
    """Return the loop that `seed` draws."""
    draw = Draw(f"exact {seed}")
    drawn = case(seed)
    number = seed
    while not fits(drawn):
        number += 100_000
        drawn = replace(case(number), seed=number)
    form = _draw_form(draw, drawn)
    if form != "nested":
        drawn = replace(drawn, loop="plain" if drawn.loop != "noisy_inputs" else drawn.loop)
    if form == "divided":
        count = drawn.microbatches
        sizes = tuple(max(1, size // count) * count for size in drawn.data.sizes)
        drawn = replace(drawn, data=replace(drawn.data, sizes=sizes))
    optimization = drawn.optimization
    if drawn.precision is torch.float16:  # a scaler skips the steps of each optimizer by itself
        optimization = replace(optimization, first=None, chosen=None, first_scheduler=None)
        # If torch's fused SGD skips its first step, it leaves its momentum uninitialized.
        kept = {k: v for k, v in optimization.optimizer.keywords.items() if k != "fused"}
        chosen = partial(optimization.optimizer.func, *optimization.optimizer.args, **kept)
        optimization = replace(optimization, optimizer=chosen)
    drawn = replace(drawn, optimization=optimization)
    ends: list[int | None] = []
    trained: list[tuple[int, int]] = []
    count = len(drawn.data.sizes)
    for epoch in range(max(1, drawn.data.epochs)):
        end = draw.randint(1, count) if draw.chance(0.15) else None
        ends.append(end)
        skipped = draw.randrange(count) if form == "nested" and draw.chance(0.15) else None
        numbers = [n for n in range(count if end is None else end) if n != skipped]
        trained += [(epoch, number) for number in numbers]
    if not trained:
        trained = [(0, 0)]
        ends = [1, *ends[1:]]
    is_sharded = draw.chance(0.2) and form != "divided"
    if is_sharded:  # torch copies no sharded model
        drawn = replace(drawn, optimization=replace(drawn.optimization, average=None))
    legs = _draw_legs(draw, drawn, len(trained), is_sharded)
    is_even = min(drawn.data.sizes) >= drawn.microbatches
    is_managed = is_sharded or (form == "nested" and draw.chance(0.7))
    return Loop(
        drawn,
        legs,
        form,
        draw.chance(0.4),
        draw.chance(0.4),
        tuple(trained),
        tuple(ends),
        is_managed,
        is_managed and form == "nested" and draw.chance(0.5),
        draw.chance(0.4) and not is_sharded and "sparse" not in str(drawn.model),
        form == "nested" and draw.chance(0.15),
        draw.randrange(len(trained)) if form == "nested" and is_even and draw.chance(0.1) else None,
        # The gradient of a weight that was converted before reaches a module's hook too late.
        draw.chance(0.5) and "module_hooked" not in str(drawn.model),
    )


def _draw_form(draw: Draw, drawn: Case) -> str:
    """Draw the form of a loop that the data allow."""
    if draw.chance(0.65):
        return "nested"
    if drawn.data.source in ("in memory", "subset", "augmented"):
        return "flat"
    is_even = min(drawn.data.sizes) >= drawn.microbatches
    return "divided" if drawn.data.source == "tensors" and is_even else "nested"


def _draw_legs(draw: Draw, drawn: Case, steps: int, is_sharded: bool) -> tuple[Leg, ...]:
    is_whole = steps < 2 or draw.chance(0.7)
    cuts = [0, steps] if is_whole else [0, draw.randint(1, steps - 1), steps]
    return tuple(
        Leg(_draw_layout(draw, drawn, is_sharded), begin, end) for begin, end in pairwise(cuts)
    )


def _draw_layout(draw: Draw, drawn: Case, is_sharded: bool) -> LoopLayout:
    count = drawn.microbatches
    world = draw.choices([1, 2, 3, 4], [2, 4, 3, 3])[0]
    if world > count and draw.chance(0.95):
        world = draw.randint(1, min(4, count))
    backend = draw.pick("lockstep", "lockstep", "gloo")
    fits = world != 3 and count % world == 0
    if is_sharded and (fits or draw.chance(0.05)):
        by_blocks = "tied" not in str(drawn.model) and draw.chance(0.7)
        hosts = 2 if fits and world > 1 and draw.chance(0.3) else 1
        return LoopLayout(world, backend, sharded=True, hosts=hosts, shards_blocks=by_blocks)
    return LoopLayout(world, backend, is_wrapped=draw.chance(0.4))
