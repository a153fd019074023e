"""`lockstep report`: output files and errors."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

import records
from lockstep.cli import cli
from lockstep.kernel.errors import FileError, UsageError


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records.write(tmp_path / "runs" / "night", records.whole())
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli, ["report", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("run", ["night", "runs/night", "runs/night/record.jsonl"])
def test_a_run_is_found_by_name_folder_or_record(place, run):
    assert invoke(run).output.startswith("runs/night/report.html  (")
    assert (place / "runs/night/report.html").read_text().startswith("<!doctype html>")


def test_output_files(place):
    invoke("night", "-o", "elsewhere/x.html")
    assert (place / "elsewhere/x.html").read_bytes().startswith(b"<!doctype")
    assert invoke("night", "-o", "-").stdout.startswith("<!doctype")
    assert not (place / "runs/night/report.html").exists()


def test_without_a_browser_the_path_is_printed(monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    done = invoke("night", "--open")
    assert "No browser could be started; open runs/night/report.html manually." in done.stderr


def test_a_missing_run(place):
    with pytest.raises(UsageError, match=r"there is no run at day \(day does not exist\)"):
        invoke("day")
    (place / "empty").mkdir()
    with pytest.raises(UsageError, match="there is no run at empty"):
        invoke("empty")


def test_an_unwritable_output():
    with pytest.raises(FileError, match="choose another file with --output"):
        invoke("night", "-o", "/proc/report.html")


def test_errors_are_one_message_and_an_exit_status(place):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "report", "day"],
        capture_output=True, text=True, timeout=60, cwd=place, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: there is no run at day")
    assert done.stderr.count("\n") == 1
