"""The notebooks: every cell runs, and shows what the text above it says."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import warm

nbformat = pytest.importorskip("nbformat", reason="needs the extra [test]")
nbclient = pytest.importorskip("nbclient", reason="needs the extra [test]")
EXAMPLES = Path(__file__).parents[2] / "examples"


def text_of(cell) -> str:
    """Return what a cell printed, followed by its value."""
    parts = [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"] + "\n"
        for output in cell["outputs"]
    ]
    return "".join(parts)


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


COMMAND = """\
#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tests:
    tests.connect({place!r})
    order = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
    socket.send_fds(tests, [order.encode()], [0, 1, 2])
    sys.exit(int(tests.recv(16)))
"""


@pytest.fixture
def warm_command(tmp_path, monkeypatch):
    """Let `lockstep` in shells start warm: a command that hands its arguments to this process."""
    place = tmp_path / "socket"
    command = tmp_path / "bin" / "lockstep"
    command.parent.mkdir()
    command.write_text(COMMAND.format(python=sys.executable, place=str(place)))
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")

    def serve():
        while True:
            end, _ = server.accept()
            with end:
                order, streams, _, _ = socket.recv_fds(end, 1 << 18, 3)
                if not order:
                    return
                arguments, folder, environ = json.loads(order)
                call = [*warm.LOCKSTEP, *arguments]
                names = ("stdin", "stdout", "stderr")
                given = dict(zip(names, streams, strict=True))
                with warm.Popen(call, cwd=folder, env=environ, **given) as process:
                    for each in streams:
                        os.close(each)
                end.send(str(process.returncode).encode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(place))
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
            last.connect(str(place))
        thread.join(60)


def test_a_spike_on_four_ranks_is_found_on_one_process(tmp_path, warm_command):
    cells = run_notebook("replay.ipynb", tmp_path)
    table = [line.split() for line in cell_with(cells, "record.jsonl").splitlines()]
    assert [line[0] for line in table] == ["11", "12", "13", "14"]
    normal, spiking = table[1], table[2]
    assert float(spiking[1]) > 100 * float(normal[1])
    assert max(map(float, spiking[2:9])) < 0.2 < 100 < float(spiking[9])
    replayed = cell_with(cells, "lockstep replay").splitlines()
    assert any(line.startswith("step 13, micro-batch 7: the same bits") for line in replayed)
    named = cell_with(cells, "load_file").splitlines()
    assert ["2412.0" in line for line in named] == [False, True, False]
    found = cell_with(cells, "lockstep bisect")
    assert (
        "spike and fixed differ first in step 13, micro-batch 7, forward pass, module `0`: "
        "aten.clamp is called in the second run only."
    ) in " ".join(found.split())
    assert "Replays of both runs compute what was recorded, bit for bit." in found
