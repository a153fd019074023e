"""The time that bisect takes on each planted difference: `python benchmarks/differences.py`.

Prints a Markdown table; the runs are those of tests/tools/replay/test_bisect.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from lockstep.tools.replay.bisection import bisect_runs
from lockstep.tools.replay.recorded_run import RecordedRun
from planted import PLANTED, record

COLUMNS = ("planted", "step", "micro-batch", "module", "direction", "operator", "seconds", "right")


def main() -> None:
    """Record each pair of runs, bisect it, and print what was found."""
    plain: dict[str, RecordedRun] = {}
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as name:
        for number, planted in enumerate(PLANTED):
            first, second = planted.sources()
            with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
                if first not in plain:
                    plain[first] = record(Path(name), f"plain-{number}", first)
                other = record(Path(name), f"other-{number}", second, planted.environ)
            begun = time.monotonic()
            found = bisect_runs(plain[first], other)
            seconds = time.monotonic() - begun
            divergence = found.divergence
            wrong = planted.check(found)
            assert divergence is not None
            place = (divergence.step, divergence.microbatch, divergence.unit, divergence.direction)
            cells = (*place, divergence.operator, f"{seconds:.1f}", "; ".join(wrong) or "yes")
            shown = ("" if each is None else str(each) for each in cells)
            print(f"| {planted.name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
