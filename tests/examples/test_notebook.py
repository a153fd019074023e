"""The notebook: every cell runs, and shows what the text above it says."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra [test]")
nbclient = pytest.importorskip("nbclient", reason="needs the extra [test]")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "driver.ipynb"


def text_of(cell) -> str:
    """Return what a cell printed and its value, line by line."""
    parts = [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
        for output in cell["outputs"]
    ]
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The code cells of the notebook, run by a kernel of their own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Jupyter's own
        nbclient.NotebookClient(notebook, timeout=100, resources=folder).execute()
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def cell_with(cells, word: str) -> str:
    (found,) = [cell for cell in cells if word in cell["source"]]
    return text_of(found)


def test_what_workers_print_appears_in_the_cell_that_waits(cells):
    printed = cell_with(cells, "driver.run(total").splitlines()
    assert sorted(printed[:2]) == ["[0] I am rank 0 of 2", "[1] I am rank 1 of 2"]
    assert printed[2] == "[30.0, 30.0]"


def test_objects_of_the_notebook_live_in_workers(cells):
    assert cell_with(cells, "class Counter") == "(15, 115, 115)\n"
    assert "rank 1 raised TypeError: unsupported operand" in cell_with(cells, 'add("one")')


def test_one_digest_in_every_layout(cells):
    shown = cell_with(cells, "assert one_process").splitlines()
    assert len(shown[-1].strip("'")) == 64
    two = cell_with(cells, "two_replicas = train").splitlines()
    assert shown[:-1] == two
    assert [line.split()[:2] for line in two] == [["epoch", "0"], ["epoch", "1"]]
