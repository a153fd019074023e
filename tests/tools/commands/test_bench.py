"""What all benchmarks have in common: they leave nothing behind, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial

import psutil
import pytest

import processes
import warm

CLI = [*warm.LOCKSTEP, "bench"]
until = partial(processes.until, seconds=60.0)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_benchmark_that_is_ended_takes_ranks_and_folder_with_it(tmp_path, how, status):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    flags = ["all_reduce", "-n", "2", "--vs", "gloo", "--sizes", "4", "--seconds", "100"]
    bench = warm.Popen(
        [*CLI, *flags], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: len(psutil.Process(bench.pid).children(recursive=True)) >= 2, "no rank came")
        below = [each.pid for each in psutil.Process(bench.pid).children(recursive=True)]
        assert list(tmp_path.glob("lockstep-bench-*"))
        bench.send_signal(how)
        assert bench.wait(timeout=60) == status
    finally:
        bench.kill()
        bench.wait()
    assert not list(tmp_path.iterdir())
    until(lambda: not any(map(processes.alive, below)), "a rank is left")
