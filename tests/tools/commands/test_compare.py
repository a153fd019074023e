"""`lockstep compare`: text, page and JSON."""

import json

import pytest
from click.testing import CliRunner

import records
from lockstep.cli import cli
from lockstep.kernel.errors import UsageError


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        records.write(tmp_path / "runs" / name, records.whole(name=name, options={"who": name}))
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli, ["compare", *arguments], catch_exceptions=False)


def test_the_text_is_complete():
    output = invoke("a", "b").output
    assert "b and a have bit-identical final weights" in output
    assert "Their losses are bit-identical at all 20 common steps." in output
    assert "2 replicas, 8 micro-batches, gloo, cpu" in output
    assert "options.who  a  b" in output


def test_three_runs_are_each_compared_with_the_first(place):
    records.write(place / "runs" / "c", records.whole(name="c"))
    output = invoke("a", "b", "c").output
    assert "b and a have bit-identical" in output
    assert "c and a have bit-identical" in output


def test_json_is_one_object():
    done = invoke("a", "b", "--json")
    found = json.loads(done.stdout)
    assert found["against"][0]["sentences"][0] in done.stderr
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert found["against"][0]["same_digest"] is True
    assert found["against"][0]["losses_part_at"] is None
    assert found["differs"] == {"options.who": ["a", "b"]}


def test_one_run_is_too_few():
    with pytest.raises(UsageError, match="needs two or more runs, but only a was given"):
        invoke("a")
