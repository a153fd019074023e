"""The work that new processes of an elastic run repeat, in seconds.

    state saved                  noticed   continued           interrupted again
    ───┴─── step ── step ── step x │ pause │ step ── step x ───┘
       └─────────┬───────────────┘         └───────┬──────┘
        repeated by this round              repeated by the next one, from the same state

What earlier rounds have lost counts once: their pauses, and what they repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from lockstep.elastic.round_origin import RoundOrigin
from lockstep.record.recorder import RECORD_FILE

__all__ = ["count_work", "measure_repeated_work"]

KINDS = (b'{"kind":"run"', b'{"kind":"round"')  # of the lines that are read


def measure_repeated_work(
    origin: RoundOrigin, state: Mapping[str, Any] | None, folder: Path | None
) -> float | None:
    """Return the seconds of work that the processes of a new round repeat.

    Args:
        origin: The origin of the round.
        state: What they continue from; None for the beginning.
        folder: The folder of the record, which has the earlier rounds; None on ranks without.

    Returns:
        None where there is no record, or a state of an older version says not when it was saved.
    """
    if folder is None:
        return None
    lines = list(_read_lines(folder / RECORD_FILE))
    since = None if state is None else state.get("time")
    if state is None and lines:  # whole seconds
        since = datetime.fromisoformat(lines[0]["started"]).timestamp()
    rounds = [line for line in lines if line["kind"] == "round"]
    return None if since is None else count_work(since, origin.interrupted, rounds)


def count_work(since: float, until: float, rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds between two moments (Unix times) in which work was done that counts.

    Args:
        since: When the state was saved.
        until: When the training was interrupted.
        rounds: The lines of earlier rounds.
    """
    lost = sorted((line["noticed"] - (line["undone"] or 0.0), line["continued"]) for line in rounds)
    seconds = 0.0
    for begin, end in lost:
        seconds += max(0.0, min(begin, until) - since)
        since = max(since, end)
    return seconds + max(0.0, until - since)


def _read_lines(record: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), record.open("rb") as file:
        for text in file:
            if text.startswith(KINDS):
                with contextlib.suppress(orjson.JSONDecodeError):
                    yield orjson.loads(text)
