"""The request for another number of ranks: a file in the folder of an elastic run.

lockstep scale RUN 4          RUN/scale.json          the run's launcher
    request_ranks ──────────> {"ranks": 4} ─────────> take_request removes it
"""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.files import replace_file

__all__ = ["SCALE_FILE", "request_ranks", "take_request"]

SCALE_FILE = "scale.json"


def request_ranks(folder: Path, ranks: int) -> Path:
    """Write the request to a file, which the launcher removes when it reads it.

    Raises:
        OSError: The file cannot be written.
    """
    path = folder / SCALE_FILE
    with replace_file(path) as file:
        file.write(json.dumps({"ranks": ranks}).encode())
    return path


def take_request(folder: Path) -> int | None:
    """Read and remove the request; return the number of ranks, or None without a request."""
    path = folder / SCALE_FILE
    try:
        content = path.read_bytes()
        path.unlink()
        ranks = int(json.loads(content)["ranks"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return ranks if ranks > 0 else None
