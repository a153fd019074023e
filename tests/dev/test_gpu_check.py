"""The check of a GPU, on the simulated accelerator; the long parts are for `make soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dev import gpu_check, gpu_parts

ROOT = Path(__file__).parents[2]
SHORT = ["one process", "own loop"]


def check(path, *parts, timeout):
    """Run parts; return their results and the printed table."""
    process = subprocess.run(
        [
            sys.executable, str(ROOT / "dev" / "gpu_check.py"), "--parts", ",".join(parts),
            "--before", "simulated.ranks:install", "--out", str(path), "--jobs", "1",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    results = [json.loads(line) for line in path.read_text().splitlines()]
    bad = [result for result in results if result["good"] is False]
    assert (process.returncode, bad) == (0, []), process.stdout + process.stderr
    return results, process.stdout


def test_every_part_has_a_limit():
    assert set(gpu_parts.PARTS) == set(gpu_check.LIMITS)


def test_parts_on_the_simulated_accelerator(tmp_path):
    results, table = check(tmp_path / "results.jsonl", *SHORT, timeout=110)
    assert {result["part"] for result in results} == set(SHORT)
    assert "| own loop | 4 ranks |" in table


def test_a_part_that_fails_hides_no_other(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    monkeypatch.setitem(gpu_check.LIMITS, "device", 0.2)  # seconds: too short to start Python
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--parts", "device,install", "--out", str(path)]
    )
    assert gpu_check.main() == 1
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert any("not finished after 0.2 s" in result["result"] for result in results)
    assert {"install", "device"} == {result["part"] for result in results}


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_long_parts_on_the_simulated_accelerator(tmp_path):
    # How fast the simulation is tells nothing.
    left_out = (*SHORT, "extension", "speed")
    long = [part for part in gpu_check.LIMITS if part not in left_out]
    check(tmp_path / "results.jsonl", *long, timeout=880)
