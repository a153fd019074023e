"""Ten tests that each need a group of two ranks: pytest-lockstep beside torch.multiprocessing.

    python benchmarks/rank_tests.py --rounds 2

Each round runs pytest once on each file, in a process of its own; the times include its start.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BODY = """
import pytest, socket, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def check(rank):
    total = torch.ones(3) * (rank + 1)
    dist.all_reduce(total)
    assert total[0].item() == 3
"""
LOCKSTEP = f"""{BODY}
@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(10))
def test_sum(rank, number):
    check(rank)
"""
SPAWN = f"""{BODY}
def work(rank, port):
    address = f"tcp://127.0.0.1:{{port}}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    check(rank)
    dist.destroy_process_group()

@pytest.mark.parametrize("number", range(10))
def test_sum(number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)
"""


def run_pytest(source: str, *options: str) -> tuple[float, float, str]:
    """Return the seconds and processor seconds of a run of pytest, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_ten.py"
        file.write_text(source)
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTEST_ADDOPTS": ""},
            timeout=600,
            check=False,
        )
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"pytest failed:\n{done.stdout}\n{done.stderr}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, processor, done.stdout


def main() -> None:
    """Run both files in turns and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each file [default: 2]")
    rounds = parser.parse_args().rounds
    for _ in range(rounds):
        for name, source in (("pytest-lockstep", LOCKSTEP), ("mp.spawn, gloo", SPAWN)):
            seconds, processor, printed = run_pytest(source, "--durations=0", "-vv")
            calls = sorted(
                float(line.split("s ")[0]) for line in printed.splitlines() if "s call" in line
            )
            print(
                f"{name:16} {seconds:6.1f} s, {processor:5.1f} s of processor time; one test "
                f"{calls[0]:.2f} s the fastest, {calls[len(calls) // 2]:.2f} s the median",
                flush=True,
            )


if __name__ == "__main__":
    main()
