"""The notebooks: every cell runs, and shows what the text above it says.

They start kernels and workers. The pages about the driver and about replays, which say the same,
are tested in the suite (tests/test_docs.py, tests/tools/replay/test_scripts.py).
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra [test]")
nbclient = pytest.importorskip("nbclient", reason="needs the extra [test]")
EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.stress, pytest.mark.timeout(300)]


def text_of(cell) -> str:
    """Return what a cell printed, followed by its value, without lines written over."""
    parts = [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"] + "\n"
        for output in cell["outputs"]
    ]
    return "\n".join(line.rpartition("\r")[2] for line in "".join(parts).split("\n"))


def run_notebook(name: str, folder: Path) -> list[Any]:
    """Return the code cells of a notebook, run by a kernel of their own in a folder."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Jupyter's own
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The code cells of the notebook of the driver."""
    return run_notebook("driver.ipynb", tmp_path_factory.mktemp("notebook"))


def cell_with(cells, word: str) -> str:
    (found,) = [cell for cell in cells if word in cell["source"]]
    return text_of(found)


def test_what_workers_print_appears_in_the_cell_that_waits(cells):
    printed = cell_with(cells, "driver.run(total").splitlines()
    assert sorted(printed[:2]) == ["[0] I am rank 0 of 2", "[1] I am rank 1 of 2"]
    assert printed[2] == "[30.0, 30.0]"


def test_calls_on_one_worker(cells):
    assert cell_with(cells, "def square") == "(9, 25)\n"
    assert "rank 1 raised TypeError: can't multiply" in cell_with(cells, 'square, "one"')


def test_one_digest_in_every_layout(cells):
    shown = cell_with(cells, "assert one_process").splitlines()
    assert len(shown[-1].strip("'")) == 64
    two = cell_with(cells, "two_replicas = train").splitlines()
    assert shown[:-1] == two
    assert [line.split()[:2] for line in two] == [["epoch", "0"], ["epoch", "1"]]


def test_a_spike_on_four_ranks_is_found_on_one_process(tmp_path, monkeypatch):
    folder = os.path.dirname(sys.executable)  # of the command `lockstep`
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    cells = run_notebook("replay.ipynb", tmp_path)
    table = [line.split() for line in cell_with(cells, "record.jsonl").splitlines()]
    assert [line[0] for line in table] == ["11", "12", "13", "14"]
    normal = table[1]
    spiking = table[2]
    assert float(spiking[1]) > 100 * float(normal[1])
    assert max(map(float, spiking[2:9])) < 0.2 < 100 < float(spiking[9])
    replayed = cell_with(cells, "lockstep replay").splitlines()
    assert any(line.startswith("step 13, micro-batch 7: the same bits") for line in replayed)
    assert sum("2412.0" in line for line in replayed) == 1
    found = cell_with(cells, "lockstep bisect")
    assert (
        "spike and fixed differ first in step 13, micro-batch 7, forward pass, module `0`: "
        "aten.clamp is called in the second run only."
    ) in " ".join(found.split())
    assert "Replays of both runs compute what was recorded, bit for bit." in found
