"""Random trainings for the determinism guarantee, drawn from a grammar by one integer.

    grammar.case(1234)              model, loss, optimizer, data and layout; print it
    python -m grammar 1234          run it, and compare it with the specification

Equal seeds draw equal cases, so a number is all that a report of a failure needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from grammar.datasets import Data, draw_data
from grammar.drawing import Draw
from grammar.layouts import Layout, draw_layout
from grammar.loops import LOOPS
from grammar.losses import Loss, draw_loss
from grammar.models import Model, draw_model
from grammar.optimization import Optimization, draw_additions, draw_optimization

__all__ = ["Case", "Leg", "case"]


@dataclass(frozen=True)
class Leg:
    """The steps from `begin` to `end` in one layout; a later leg goes on from a saved state."""

    layout: Layout
    begin: int
    end: int


@dataclass(frozen=True)
class Case:
    """One training, as it was drawn."""

    seed: int
    microbatches: int
    model: Model
    loss: Loss
    optimization: Optimization
    data: Data
    precision: torch.dtype | None
    loop: str
    """What the loop of one's own does with a micro-batch: a name of `grammar.loops.LOOPS`."""
    legs: tuple[Leg, ...]
    hooked_late: int | None
    """The unit that gets hooks on its parameters after the first step."""
    evaluates: bool
    """Whether each leg ends with an evaluation."""
    change: str | None
    """What the loop's body changes in the model after the first step."""

    def __str__(self) -> str:
        """Describe the case in a few lines, the first of which draws it again."""
        legs = ", then ".join(f"{leg.layout} for {leg.end - leg.begin} steps" for leg in self.legs)
        return "\n".join(
            [
                f"grammar.case({self.seed})  # M={self.microbatches}, {self.data}",
                f"    model      {self.model}",
                f"    loss       {self.loss}",
                f"    optimizer  {self.optimization}",
                f"    loop       {self.loop}"
                + (f", autocast to {self.precision}" if self.precision else "")
                + (f", unit {self.hooked_late} hooked late" if self.hooked_late is not None else "")
                + ", evaluation" * self.evaluates
                + (f", {self.change} after the first step" if self.change else ""),
                f"    layout     {legs}",
            ]
        )


def case(seed: int) -> Case:
    """Return the case that `seed` draws."""
    draw = Draw(seed)
    microbatches = draw.randint(1, 9)
    classes = draw.randint(3, 5)
    data = draw_data(draw, microbatches)
    loss = draw_loss(draw, classes)
    if loss.ignore is not None:
        data = data.in_order()
    inside = loss.part if loss.inside else None
    smallest = data.smallest(microbatches)
    model = draw_model(draw, smallest, classes, list(loss.tail), inside)
    if model.form.startswith("with loss") and data.source == "tensors" and draw.chance(0.5):
        data = data.with_names()
    has_complex = "ToComplex" in str(model)
    optimization = draw_optimization(draw, data.steps, data.epochs, has_complex)
    if "sparse=True" in str(model):
        optimization = optimization.for_sparse_gradients()
    half = model.dtype == torch.float32 and not has_complex and draw.chance(0.1)
    loops = [name for name, fits in LOOPS.items() if fits(model, loss)]
    loop = draw.choice(loops) if draw.chance(0.12) else "plain"
    legs = _draw_legs(draw, model, microbatches, data.steps, loop != "plain")
    # oneDNN has no LSTM in float16 for processors without instructions for it, and none in
    # bfloat16 without AVX-512.
    has_lstm = "LSTM" in str(model)
    dtypes = [torch.bfloat16] if has_lstm else [torch.bfloat16, torch.float16]
    precision = draw.choice(dtypes) if half else None
    if has_lstm and torch.backends.cpu.get_cpu_capability() == "AVX2":
        precision = None
    hooked_late = draw.randrange(len(model.blocks)) if draw.chance(0.03) else None
    evaluates = draw.chance(0.2)
    change = draw.pick("freeze", "eval", "drop") if draw.chance(0.1) else None
    optimization = draw_additions(draw, optimization, model.build(seed))
    more: Any = (precision, loop, tuple(legs), hooked_late, evaluates, change)
    return Case(seed, microbatches, model, loss, optimization, data, *more)


def _draw_legs(
    draw: Draw, model: Model, microbatches: int, steps: int, must_loop: bool
) -> list[Leg]:
    """Draw one layout, or two with a saved state between them."""
    blocks = len(model.blocks) if model.is_chain else 0
    more: Any = (blocks, microbatches, must_loop)
    if steps < 2 or draw.chance(0.8):
        return [Leg(draw_layout(draw, *more), 0, steps)]
    middle = draw.randint(1, steps - 1)
    return [Leg(draw_layout(draw, *more), 0, middle), Leg(draw_layout(draw, *more), middle, steps)]
