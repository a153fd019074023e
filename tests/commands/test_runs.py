"""`lockstep runs`: the table, as text and JSON."""

import json

import pytest
from click.testing import CliRunner

import records
from lockstep.cli import cli
from lockstep.errors import UsageError


def invoke(*arguments):
    return CliRunner().invoke(cli, ["runs", *arguments], catch_exceptions=False)


def test_a_table_with_a_line_a_run(tmp_path):
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


def test_an_empty_folder_and_none(tmp_path):
    assert "holds no runs yet" in invoke(str(tmp_path)).output
    with pytest.raises(UsageError, match="there is no folder"):
        invoke(str(tmp_path / "nowhere"))
