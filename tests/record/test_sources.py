"""The copies of a program's own files: complete, unchanged, for their owner alone."""

import importlib
import os
import stat
import sys

import pytest

from lockstep.record import sources
from lockstep.record.reader import read_run
from lockstep.record.recorder import Recorder
from lockstep.record.sources import find_named_variables, find_sources, locate_stored
from lockstep.tools.replay.recorded_program import read_program

WIDTH = "_".join(["MADE", "UP", "WIDTH"])  # not named in this file, which is one of the program


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Return a function that writes and imports a module of the program's own."""
    folder = tmp_path / "program"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    names = []

    def write(name, text):
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        importlib.import_module(name)
        names.append(name)
        return folder / f"{name}.py"

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_own_files_are_found_and_no_others(write_module):
    path = write_module("own_layers", "WIDTH = 4\n")
    found = find_sources()
    assert found[str(path)] == b"WIDTH = 4\n"
    assert __file__ in found
    assert not any("site-packages" in each or "/lockstep/record/" in each for each in found)


def test_variables_that_own_files_name_are_recorded_without_secrets(
    tmp_path, write_module, monkeypatch
):
    sources = [
        b"""os.environ["LR"], os.getenv('WIDTH', "4"), "RANK" "HOME" "NAP_TOKEN" "PLACE" "NO" """
    ]
    environ = {"LR": "0.1", "WIDTH": "8", "OTHER": "1", "RANK": "0", "HOME": "/home/ann"}
    environ |= {"NAP_TOKEN": "hush", "PLACE": "qX83hfk20vmQ91bz"}
    secrets = {"VAULT_KEY": "correct horse", "API_PIN": "4711", "DB_LOGIN": "me", "SSH_PW": "a b"}
    sources = [*sources, repr(list(secrets)).encode()]
    environ = environ | secrets
    assert find_named_variables(sources, environ) == {"LR": "0.1", "WIDTH": "8"}
    monkeypatch.setenv("MADE_UP_RATE", "0.25")
    monkeypatch.setenv(WIDTH, "4")
    write_module("own_rates", "import os\nRATE = os.environ['MADE_UP_RATE']\n")
    with Recorder(tmp_path / "run") as recorder:
        recorder.write("run", program={"kind": "script", "target": "train.py"})
        write_module("own_widths", f"import os\nWIDTH = os.environ['{WIDTH}']\n")
        recorder.write("step", step=0)
        recorder.write("end", state="done")
    run = read_run(tmp_path / "run")
    assert run.latest("variables")["MADE_UP_RATE"] == "0.25"
    assert WIDTH not in run.latest("variables"), "its module is imported later"
    variables = read_program(run, 0).variables
    assert (variables["MADE_UP_RATE"], variables[WIDTH]) == ("0.25", "4")


def test_sources_are_stored_when_the_record_opens_and_when_modules_follow(tmp_path, write_module):
    first = write_module("own_layers", "WIDTH = 4\n")
    run = tmp_path / "run"
    with Recorder(run) as recorder:
        recorder.write("run")
        kept = locate_stored(run / "sources", str(first))
        assert kept.read_text() == "WIDTH = 4\n"
        assert kept == run / "sources" / str(first).lstrip("/")
        first.write_text("WIDTH = 8\n")  # the process runs what it imported
        second = write_module("own_losses", "")
        recorder.write("step", step=0)
        assert not locate_stored(run / "sources", str(second)).exists()
        recorder.write("checkpoint", step=1)
        assert locate_stored(run / "sources", str(second)).exists()
        third = write_module("own_metrics", "")
        recorder.write("end", state="done")
    assert locate_stored(run / "sources", str(third)).exists()
    assert kept.read_text() == "WIDTH = 4\n"
    for place in (kept, *kept.relative_to(run).parents):
        mode = stat.S_IMODE(os.stat(run / place).st_mode)
        assert mode & 0o077 == 0, f"{place} is open to others"
    assert read_run(run).latest("sources") == "sources"


def test_a_resumed_run_whose_sources_changed_gets_another_folder(tmp_path, write_module):
    first = write_module("own_layers", "WIDTH = 4\n")
    run = tmp_path / "run"
    names = []
    for text in ("WIDTH = 4\n", "WIDTH = 4\n", "WIDTH = 8\n", "WIDTH = 8\n", "WIDTH = 4\n"):
        first.write_text(text)
        with Recorder(run, resume=bool(names)) as recorder:
            recorder.write("resume" if names else "run", step=0)
        names.append(read_run(run).latest("sources"))
        assert locate_stored(run / names[-1], str(first)).read_text() == text
        assert locate_stored(run / names[-1], __file__).exists(), "each folder is complete"
    assert names == ["sources", "sources", "sources-2", "sources-2", "sources-3"]


def test_sources_that_cannot_be_stored_are_one_sentence(tmp_path, capfd):
    (tmp_path / "sources").write_text("in the way")
    with Recorder(tmp_path) as recorder:
        recorder.write("run")
        recorder.write("checkpoint", step=1)
        recorder.write("end", state="done")
    assert capfd.readouterr().err.count("the sources of the program cannot be copied") == 1
    run = read_run(tmp_path)
    assert (run.state, run.latest("sources")) == ("done", None)


def test_a_program_without_files_of_its_own_names_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_find_files", list)
    with Recorder(tmp_path) as recorder:
        recorder.write("run")
        recorder.write("checkpoint", step=1)
    assert read_run(tmp_path).latest("sources") is None
    assert [path.name for path in tmp_path.iterdir()] == ["record.jsonl"]
