"""Message-passing examples: each prints the table that the documentation shows."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

import lockstep as ls
import warm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/message-passing.md"
FOLDER = ROOT / "examples" / "message_passing"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "harness")


def run_all():
    """Run all examples, one after another; return what each printed by its name."""
    printed = {}
    for path in EXAMPLES:
        printed[path.stem] = importlib.import_module(path.stem).main()
        ls.shutdown()
    return printed


@pytest.fixture(scope="module")
def outputs():
    """What each example printed on 4 ranks, by rank."""
    return ls.launch(run_all, nprocs=4, timeout=60)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_documentation_shows_the_output_of_the_example(path, outputs):
    printed, *others = (output[path.stem] for output in outputs)
    assert others == [""] * 3
    assert printed.count("\n") == 5
    page = PAGE.read_text()
    assert printed in page
    assert f"python examples/message_passing/{path.name}" in page


def test_output_depends_on_the_number_of_ranks():
    main = importlib.import_module("all_reduce").main
    assert ls.launch(main, ("gloo",), 2, timeout=60)[0].splitlines()[2:] == [
        "    rank 0   1 2      12 14",
        "    rank 1   11 12    12 14",
    ]


def test_example_without_a_launcher_starts_its_ranks(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(FOLDER)}
    path = FOLDER / "broadcast.py"
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    command = [sys.executable, "-c", program, "-n", "3", "--backend", "gloo"]
    done = warm.run(command, cwd=tmp_path, env=environ, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[0] == "broadcast from rank 1"
    assert [line.split()[-2:] for line in printed[2:]] == [["11", "12"]] * 3


def test_example_under_a_launcher_joins_its_ranks(tmp_path):
    command = [*warm.LOCKSTEP, "run", "-n", "2", str(FOLDER / "broadcast.py")]
    done = warm.run(command, cwd=tmp_path, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "[0] broadcast from rank 1"
    assert len(done.stdout.splitlines()) == 4
