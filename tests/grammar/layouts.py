"""Layouts: how many ranks, and what each of them does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lockstep as ls
from grammar.drawing import Draw

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Layout:
    """A world and the trainer's options that change no bit."""

    world: int = 1
    backend: str = "lockstep"
    stages: int = 1
    schedule: str | None = None
    chunks: int | None = None
    balance: tuple[int, ...] | None = None
    shared: bool = False
    recompute: bool = False
    loop: bool = False
    """The user's own loop instead of `trainer.step(batch)`."""
    sharded: bool = False
    hosts: int = 1
    """Simulated hosts, over which a sharded model is replicated."""

    def __str__(self) -> str:
        """Describe the layout."""
        parts = [f"{self.world} x {self.backend}"]
        parts += [f"{name}={value}" for name, value in vars(self.pipeline(None)).items() if value]
        parts += [f"{name}={value}" for name, value in self.options().items() if value]
        return " ".join(parts + ["own loop"] * self.loop)

    @property
    def replicas(self) -> int:
        """How many times the model is there."""
        return self.world // self.stages

    def options(self) -> dict[str, Any]:
        """Return the trainer's options."""
        sharded = "hybrid" if self.hosts > 1 else "sharded"
        return {
            "storage": "shared" if self.shared else sharded if self.sharded else "replicated",
            "activation_checkpointing": self.recompute,
        }

    def pipeline(self, blocks: Sequence[str] | None) -> ls.PipelineConfig:
        """Return the stages of a model with these blocks."""
        if self.stages == 1:
            return ls.PipelineConfig(blocks=blocks)
        balance = None if self.balance is None else list(self.balance)
        return ls.PipelineConfig(self.stages, self.schedule, blocks, balance, self.chunks)


def draw_layout(draw: Draw, blocks: int, microbatches: int, must_loop: bool) -> Layout:
    """Draw a layout for a model of so many blocks; `must_loop`: only a loop of one's own will do.

    Some of them are refused on purpose (`grammar.refusals`).
    """
    world = draw.choices([1, 2, 3, 4], [2, 4, 3, 3])[0]
    if world > microbatches and draw.chance(0.9):
        world = draw.randint(1, min(4, microbatches))
    backend = draw.pick("lockstep", "lockstep", "gloo")
    recompute = blocks > 0 and draw.chance(0.2)
    fitting = [stages for stages in (2, 3, 4) if blocks >= stages]
    if draw.chance(0.99):
        fitting = [stages for stages in fitting if world % stages == 0]
    if fitting and not must_loop and draw.chance(0.6):
        return _staged(draw, world, backend, draw.choice(fitting), blocks, recompute)
    shared = backend == "lockstep" and draw.chance(0.3)
    loop = must_loop or draw.chance(0.2)
    if draw.chance(0.01):
        return Layout(world, backend, 2, loop=loop, recompute=recompute)
    ahead = Draw()  # so that cases stay what they were before models could be sharded
    ahead.setstate(draw.getstate())
    fits = world != 3 and microbatches % world == 0
    sharded = not shared and ahead.chance(0.4 if fits else 0.02)
    hosts = 2 if sharded and fits and world > 1 and ahead.chance(0.5) else 1
    whole = Layout(world, backend, shared=shared, recompute=recompute, loop=loop)
    return replace(whole, sharded=sharded, hosts=hosts)


def _staged(
    draw: Draw, world: int, backend: str, stages: int, blocks: int, recompute: bool
) -> Layout:
    schedule = draw.choice(SCHEDULES)
    chunks = None
    if schedule == "interleaved":
        most = blocks // stages
        if most < 2:
            schedule = "1f1b"
        else:
            chunks = draw.randint(2, min(3, most))
    number = stages * (chunks or 1)
    balance = tuple(draw.cut(blocks, number)) if draw.chance(0.9) else None
    if balance is None and draw.chance(0.3):
        schedule = chunks = None
    shared = draw.chance(0.01)
    return Layout(world, backend, stages, schedule, chunks, balance, shared, recompute)


def widths(layouts: Sequence[Layout]) -> str:
    """Return the sort of a training's layouts, to be counted."""
    found = []
    for each in layouts:
        name = f"{each.world} {each.backend}" if each.world > 1 else "1"
        name += f" in {each.stages} stages ({each.schedule})" if each.stages > 1 else ""
        name += " shared" * each.shared + " sharded" * each.sharded
        name += f" on {each.hosts} hosts" * (each.hosts > 1)
        found.append(name)
    return ", then ".join(found)
