"""`lockstep bisect`: text, JSON and mistakes; the search itself is in tests/tools/replay."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import records
from lockstep.cli import cli
from lockstep.kernel.errors import UsageError

CONTRACT = {
    "equal", "step", "microbatch", "unit", "direction", "operator", "source", "first_element",
    "differing_elements",
}  # fmt: skip


def lines(name, other=(), count=8, **header):
    """Return the lines of a run; `other` are losses of micro-batch 1 by step."""
    steps = []
    for number in range(count):
        losses = ["0x1p-1", dict(other).get(number, "0x1p-2")]
        exact = {"loss_hex": "0x1p-1", "norm_hex": "0x1p0", "batch": "b", "losses": losses}
        steps.append(records.step(number) | exact)
    return [records.HEADER | {"name": name} | header, *steps, records.END | {"steps": count}]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records.write(tmp_path / "runs" / "a", lines("a"))
    records.write(tmp_path / "runs" / "same", lines("same"))
    records.write(tmp_path / "runs" / "b", lines("b", {5: "0x1p-3"}))
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli, ["bisect", *arguments], catch_exceptions=False)


def test_runs_without_a_difference():
    done = invoke("a", "same", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["equal"] is True
    assert {name for name in CONTRACT if found[name] is None} == CONTRACT - {"equal"}
    assert (found["steps_compared"], found["is_replayed"]) == (8, False)
    assert "a and same agree in everything that both recorded." in done.stderr
    assert "bit-identical: 8 steps and 1 digest of the weights." in done.stderr


def test_unequal_numbers_of_micro_batches_are_the_difference(place):
    layout = records.HEADER["layout"] | {"microbatches": 4}
    records.write(place / "runs" / "four", lines("four", layout=layout))
    done = invoke("a", "four", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["equal"], found["step"], found["direction"]) == (False, 0, None)
    assert "into 8 micro-batches and the second into 4" in found["sentence"]
    with pytest.raises(UsageError, match="no run sam in runs; did you mean same"):
        invoke("a", "sam")


def test_what_cannot_be_replayed_is_found_in_the_records():
    done = invoke("a", "b", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found.keys() >= CONTRACT
    assert (found["equal"], found["step"], found["microbatch"]) == (False, 5, 1)
    assert (found["direction"], found["operator"]) == (None, None)
    assert "step 5, micro-batch 1" in done.stderr
    assert "a cannot be replayed: " in done.stderr


def test_mistakes_are_one_sentence(place):
    for words, message in [
        (["a"], r"bisect compares two runs, and got 1: lockstep bisect A B"),
        (["a", "b", "same"], "and got 3"),
        (["a", "nowhere"], "there is no run at nowhere"),
    ]:
        with pytest.raises(UsageError, match=message):
            invoke(*words)
    (place / "text").write_text("no record\n")
    with pytest.raises(Exception, match="text is not the record of a run"):
        invoke("a", "text")
