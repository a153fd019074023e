"""`lockstep runs`: the table, as text and JSON."""

import json

import pytest
from click.testing import CliRunner

import records
from lockstep.cli import cli
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import describe_launch, write_description
from lockstep.tools.commands.runs import list_runs, runs_table


def invoke(*arguments):
    return CliRunner().invoke(cli, ["runs", *arguments], catch_exceptions=False)


def test_a_table_with_one_line_per_run(tmp_path):
    for name in ("a", "b"):
        records.write(tmp_path / name, records.whole(name=name))
    lines = invoke(str(tmp_path)).output.splitlines()
    assert lines[0].split() == ["run", "state", "recipe", "layout", "loss", "accuracy",
                                "samples/s", "digest"]  # fmt: skip
    assert [line.split()[0] for line in lines[2:]] == ["a", "b"]
    assert all(line.endswith("abababab") for line in lines[2:])


def test_json_is_a_list(tmp_path):
    records.write(tmp_path / "a", records.whole())
    (found,) = json.loads(invoke(str(tmp_path), "--json").output)
    assert found["state"] == "done"
    assert found["digest"] == records.END["digest"]


def test_an_empty_and_a_missing_folder(tmp_path):
    assert "has no runs yet" in invoke(str(tmp_path)).output
    with pytest.raises(UsageError, match="there is no folder"):
        invoke(str(tmp_path / "nowhere"))


def test_one_line_per_run_the_oldest_first(tmp_path):
    records.write(tmp_path / "new", records.whole(started="2026-11-22T00:00:00+00:00"))
    records.write(tmp_path / "old", records.whole(started="2026-11-20T00:00:00+00:00"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    names, rows = runs_table(list_runs(tmp_path))
    assert [row[0] for row in rows] == ["old", "new"]
    assert dict(zip(names, rows[0], strict=True)) == {
        "run": "old", "state": "done", "recipe": "digits",
        "layout": "2 replicas", "loss": "0.2500",
        "accuracy": "91.2%", "samples/s": "2,207", "digest": "abababab",
    }  # fmt: skip


def test_an_unreadable_record_is_a_line_too(tmp_path):
    records.write(tmp_path / "good", records.whole())
    records.write(tmp_path / "bad", [], tail="PNG\n")
    found = list_runs(tmp_path)
    _, rows = runs_table(found)
    assert [row[:2] for row in rows] == [["bad", "unreadable"], ["good", "done"]]
    plain = json.loads(json.dumps([one.to_json() for one in found]))
    assert "is not the record of a run" in plain[0]["message"]
    assert plain[1]["metrics"] == {"accuracy": 0.9125}


@pytest.mark.parametrize("recipe", ["digits", None])
def test_the_command_that_resumes_a_stopped_run(tmp_path, recipe):
    lines = records.whole(recipe=recipe)
    records.write(tmp_path / "done", lines)
    for name in ("night", "bare"):
        records.write(tmp_path / name, [*lines[:-1], records.END | {"state": "stopped"}])
    for name in ("night", "done"):
        (tmp_path / name / "checkpoints" / "step-10").mkdir(parents=True)
    command = f"lockstep train --resume {tmp_path / 'night'}"
    if recipe is None:
        command = f"lockstep run -n 2 --resume {tmp_path / 'night'} SCRIPT"
    output = invoke(str(tmp_path)).output
    assert output.splitlines()[-2:] == ["Resume a run with", command]
    found = {run["name"]: run for run in json.loads(invoke(str(tmp_path), "--json").output)}
    assert found["night"]["state"] == found["bare"]["state"] == "stopped"
    assert found["night"]["resume_command"] == command
    assert found["done"]["resume_command"] is found["bare"]["resume_command"] is None


@pytest.mark.parametrize("argument", ["--lr=0.1", "--password=hunter22", "damaged"])
def test_a_script_that_was_launched_is_resumed_without_its_command(tmp_path, argument):
    """Unless the command had a secret, which is not stored, or its file is damaged."""
    lines = [*records.whole(recipe=None)[:-1], records.END | {"state": "stopped"}]
    folder = records.write(tmp_path / "night", lines)
    (folder / "checkpoints" / "step-10").mkdir(parents=True)
    write_description(folder, describe_launch("script", "train.py", [argument], 2, 1))
    if argument == "damaged":
        (folder / "launch.json").write_text("null")
    (found,) = json.loads(invoke(str(tmp_path), "--json").output)
    command = f"lockstep run --resume {folder}"
    if argument != "--lr=0.1":
        command = f"lockstep run -n 2 --resume {folder} SCRIPT"
    assert found["resume_command"] == command
