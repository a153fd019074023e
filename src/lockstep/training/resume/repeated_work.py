"""The work that new processes of an elastic run repeat, in seconds.

    state saved                  noticed   continued           interrupted again
    ───┴─── step ── step ── step x │ pause │ step ── step x ───┘
       └─────────┬───────────────┘         └───────┬──────┘
        repeated by this round              repeated by the next one, from the same state

The time that earlier rounds lost is not counted again: their pauses and their repeated work.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from lockstep.elastic.restart_source import RestartSource
from lockstep.launcher.run_folder import RECORD_FILE

__all__ = ["count_repeated_steps", "count_work", "measure_repeated_work"]

# the beginnings of lines
STEP = b'{"kind":"step"'
ROUND = b'{"kind":"round"'
KINDS = (b'{"kind":"run"', ROUND)


def measure_repeated_work(
    origin: RestartSource, state: Mapping[str, Any] | None, folder: Path | None
) -> float | None:
    """Return the seconds of work that the processes of a new round repeat.

    Args:
        origin: The origin of the round.
        state: The state that they continue from; None: they start from the beginning.
        folder: The folder of the record, which has the earlier rounds; None on ranks without it.

    Returns:
        The seconds. None if there is no record, it is damaged, or the state was saved by an older
        version and does not contain its time.
    """
    if folder is None:
        return None
    lines = list(_read_lines(folder / RECORD_FILE))
    since = None if state is None else state.get("time")
    with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged record
        if state is None and lines:  # has a resolution of one second
            since = datetime.fromisoformat(lines[0]["started"]).timestamp()
        rounds = [line for line in lines if line["kind"] == "round"]
        return None if since is None else count_work(since, origin.interrupted, rounds)
    return None


def count_repeated_steps(steps: int, folder: Path | None) -> int:
    """Return how many steps the record has after the first `steps`, in the round that ended.

    Args:
        steps: The number of steps in the state that the new processes continue from.
        folder: The folder of the record; None if there is none.
    """
    latest = b""
    with contextlib.suppress(OSError):
        if folder is not None:
            with (folder / RECORD_FILE).open("rb") as file:
                latest = next(iter(deque(filter(_tells_position, file), 1)), b"")
    with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged record, or none
        reached: int = orjson.loads(latest)["step"] + latest.startswith(STEP)
        return max(0, reached - steps)
    return 0


def _tells_position(line: bytes) -> bool:
    return line.startswith((STEP, ROUND)) and line.endswith(b"\n")


def count_work(since: float, until: float, rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds between two times, without those that earlier rounds lost.

    Args:
        since: The Unix time at which the state was saved.
        until: The Unix time at which the training was interrupted.
        rounds: The record's lines of earlier rounds.
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
