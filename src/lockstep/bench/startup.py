"""How long it takes until ranks have joined a group and left it again, beside torchrun.

Both launchers run the same stock script, in turn, so that what else happens on
the machine happens to both. Wall-clock seconds of the whole command.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import WorkError
from lockstep.launcher.launch import launch

__all__ = ["Start", "measure"]

SCRIPT = """\
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""

DEADLINE = 120.0  # seconds for one start


@dataclass(frozen=True)
class Start:
    """The start-up times of one launcher with `nprocs` ranks, in seconds."""

    launcher: str
    nprocs: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one of the times."""
        return statistics.median(self.seconds)

    def record(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        return {"benchmark": "startup", **asdict(self), "median_seconds": self.median}


def measure(nprocs: int, repeats: int) -> Iterator[Start]:
    """Time each launcher `repeats` times, in turn; the first round of all is not counted.

    Raises WorkError where a launcher fails, with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "join.py")
        script.write_text(SCRIPT)
        starts = _starts(nprocs, script)
        times: dict[str, list[float]] = {name: [] for name in starts}
        for counted in [False] + [True] * repeats:
            for name, start in starts.items():
                began = time.perf_counter()
                start()
                if counted:
                    times[name].append(time.perf_counter() - began)
    for name, seconds in times.items():
        yield Start(name, nprocs, tuple(seconds))


def _starts(nprocs: int, script: Path) -> dict[str, Callable[[], object]]:
    lockstep = [sys.executable, "-c", "from lockstep.cli import main; main()", "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    count = ["--nproc-per-node", str(nprocs)]
    return {
        "lockstep run": lambda: _run([*lockstep, *count, str(script)], script.parent),
        "torchrun": lambda: _run([*torchrun, *count, str(script)], script.parent),
        "lockstep.launch, again": lambda: launch(_join, nprocs=nprocs, timeout=DEADLINE),
    }


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE
    )
    if done.returncode != 0:
        last = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
        raise WorkError(f"{' '.join(command)} failed with status {done.returncode}: {last}")


def _join() -> None:
    exec(SCRIPT, {})
