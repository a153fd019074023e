"""Every example: its picture is the one in the documentation, alone and under the launcher."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep as ls
from lockstep import examples
from lockstep.run import preload

OTHERS = {"picture", "training"}  # what they share; with tests of their own
NAMES = {module.name for module in pkgutil.iter_modules(examples.__path__)} - OTHERS
PAGE = Path(__file__).parents[2] / "docs" / "message-passing.md"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_documentation_shows_what_the_example_prints(name):
    main = importlib.import_module(f"lockstep.examples.{name}").main
    preload.template(trains=True)
    drawn, *others = ls.launch(main, nprocs=4, timeout=60)
    assert others == [""] * 3
    assert drawn.count("\n") == 5
    page = PAGE.read_text()
    assert drawn in page
    assert f"lockstep.examples.{name}" in page


def test_a_picture_differs_with_the_number_of_ranks():
    main = importlib.import_module("lockstep.examples.all_reduce").main
    assert ls.launch(main, ("gloo",), 2, timeout=60)[0].splitlines()[2:] == [
        "    rank 0   1 2      12 14",
        "    rank 1   11 12    12 14",
    ]


def test_run_alone_it_starts_ranks_of_its_own(capfd):
    subprocess.run(
        [sys.executable, "-m", "lockstep.examples.broadcast", "-n", "3", "--backend", "gloo"],
        check=True, timeout=60,
    )  # fmt: skip
    printed = capfd.readouterr().out.splitlines()
    assert printed[0] == "broadcast from rank 1"
    assert [line.split()[-2:] for line in printed[2:]] == [["11", "12"]] * 3


def test_run_as_a_file_it_joins_the_launchers_ranks(tmp_path):
    file = str(Path(examples.__path__[0]) / "broadcast.py")
    done = subprocess.run(
        [sys.executable, "-c", "from lockstep.cli import main; main()", "run", "-n", "2", file],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "[0] broadcast from rank 1"
    assert len(done.stdout.splitlines()) == 4
