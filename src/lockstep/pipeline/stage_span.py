"""What a pipeline stage did, and when."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StageSpan"]


class StageSpan(NamedTuple):
    """One action of a pipeline stage, for the timeline.

    Attributes:
        kind: "forward", "backward", "input" or "weight".
        stage: The number of the stage.
        microbatch: The number of the micro-batch.
        begin: The start by `time.perf_counter`, in seconds, including the waiting.
        end: The end by the same clock.
        waited: Seconds after `begin` that it waited for another rank.
        source: The rank that it waited for; -1 for none.
        received: The bytes received from that rank.
    """

    kind: str
    stage: int
    microbatch: int
    begin: float
    end: float
    waited: float
    source: int
    received: int
