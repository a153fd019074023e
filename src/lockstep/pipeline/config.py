"""What a trainer is asked to do about pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.pipeline.cut import Blocks

__all__ = ["PipelineConfig"]


@dataclass(frozen=True)
class PipelineConfig:
    """Cuts a model into stages on several ranks. No choice made here changes a bit.

    Attributes:
        stages: Ranks per replica, each with its part of the model; the world size is a
            multiple of it. The rest of the model is on the meta device once it is cut: with
            the first batch, or an `nn.Sequential` at once with `balance`.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; None for the fastest one
            by the measured costs of the blocks.
        blocks: The modules, or their attribute paths, that the model's forward calls one after
            another; each is a unit of random numbers and of activation checkpointing, for any
            number of stages. Needed unless the model is an `nn.Sequential` or has a method
            `blocks()`.
        balance: The number of blocks of each stage; None for an even cut by measurement.
        stages_per_rank: Stages on each rank, for the schedule "interleaved"; None for 2.
    """

    stages: int = 1
    schedule: str | None = None
    blocks: Blocks = None
    balance: Sequence[int] | None = None
    stages_per_rank: int | None = None
