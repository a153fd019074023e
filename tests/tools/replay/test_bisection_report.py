"""How the result of a bisection is shown: as text and as JSON."""

from dataclasses import replace

import pytest

from bisections import DIVERGENCE, MODULE, bisected
from lockstep.tools.replay.bisection_report import (
    bisection_json,
    describe_divergence,
    list_facts,
    list_sentences,
    suggest_commands,
)
from lockstep.tools.replay.record_difference import RecordDifference


@pytest.fixture
def found(tmp_path):
    return bisected(tmp_path)


def test_the_text_says_where_what_and_how_sure(found):
    assert describe_divergence(found) == (
        "night-a and night-b differ first in step 7, micro-batch 2, forward pass, module "
        f"`{MODULE}`: aten.add.Tensor is called with different arguments: 1 and <b>two</b>."
    )
    assert dict((name, values) for name, *values in list_facts(found)) == {
        "operator": ["aten.add.Tensor"] * 2,
        "line": ["train.py:3 in forward"] * 2,
        "code": ["x = x + y  # night-a", "x = x + y  # night-b"],
        "arguments": ["alpha=1", "alpha=<b>two</b>"],
        "inputs": [f"{MODULE}.weight: float32[64, 64], float32[16, 64]"] * 2,
        "outputs": ["float32[16, 64]"] * 2,
        "element [3, 12]": ["0.25", "0.5"],
    }
    text = list_sentences(found)
    assert text[0] == "17 elements differ; the first by 0.25."
    close = replace(DIVERGENCE, element=replace(DIVERGENCE.element, ulps=1000))
    assert list_sentences(replace(found, divergence=close))[0] == (
        "17 elements differ; the first by 1,000 units in the last place."
    )
    assert text[1] == "The records differ first in step 7, in the loss."
    assert text[2] == "Replays of both runs compute what was recorded, bit for bit."
    assert text[3] == "These settings differ and can change results: options.seed (7 and 8)."
    assert text[4] == "Their sources differ in train.py."
    assert text[5] == "night-b: data.pt has changed."
    text = list_sentences(replace(found, divergence=None))
    assert not any("differ" in each for each in text)


def test_the_model_itself_other_samples_and_parameters_are_named(found):
    assert "the model itself (`Net`)" in describe_divergence(
        replace(found, divergence=replace(DIVERGENCE, unit="Net"))
    )
    named = replace(DIVERGENCE, direction="optimizer", parameter="0.weight")
    assert f"update, module `{MODULE}`, `0.weight`: " in describe_divergence(
        replace(found, divergence=named)
    )
    data = replace(DIVERGENCE, direction="data", what="data", sentence="the data differ")
    batch = RecordDifference(7, "batch", None, "x", "y")
    assert "the batches have different samples" in describe_divergence(
        replace(found, divergence=data, recorded=batch)
    )
    assert "the data differ" in describe_divergence(replace(found, divergence=data))


def test_what_only_records_show_comes_with_advice(found):
    divergence = replace(DIVERGENCE, direction=None, a=None, b=None, element=None)
    found = replace(found, divergence=divergence, is_replayed=False, is_exact=(True, False))
    text = " ".join(list_sentences(found))
    assert "on a machine like those of the runs" in text
    assert "bit for bit" not in text
    assert "machine" not in " ".join(list_sentences(replace(found, is_replayed=True)))


def test_where_a_run_failed_is_said_also_without_a_difference(found):
    end = {"kind": "end", "t": 2.0, "state": "failed", "message": "step 20: the loss is nan"}
    a = replace(found.a, run=replace(found.a.run, end=end, state="failed"))
    text = list_sentences(replace(found, a=a, divergence=None))
    assert "night-a failed after step 19: step 20: the loss is nan" in text


def test_commands_look_further(found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert suggest_commands(found) == [
        "lockstep replay night-a --step 7 --microbatch 2 --pdb",
        "lockstep replay night-b --step 7 --microbatch 2 --pdb",
    ]
    update = replace(found, divergence=replace(DIVERGENCE, microbatch=None))
    assert suggest_commands(update)[0] == "lockstep replay night-a --step 7"
    assert suggest_commands(replace(found, divergence=None)) == []


def test_json_has_what_the_contract_names(found):
    plain = bisection_json(found)
    assert (plain["equal"], plain["step"], plain["microbatch"], plain["unit"]) == (
        False, 7, 2, MODULE,
    )  # fmt: skip
    assert (plain["direction"], plain["operator"]) == ("forward", "aten.add.Tensor")
    assert plain["source"] == "train.py:3 in forward"
    assert plain["first_element"] == {"index": [3, 12], "a": 0.25, "b": 0.5, "ulps": 8388608}
    assert plain["differing_elements"] == 17
    element = replace(DIVERGENCE.element, a=float("nan"), b=complex(1, 2), ulps=None)
    plain = bisection_json(replace(found, divergence=replace(DIVERGENCE, element=element)))
    assert plain["first_element"] == {"index": [3, 12], "a": "nan", "b": "(1+2j)", "ulps": None}
    plain = bisection_json(replace(found, divergence=None))
    assert plain["equal"] is True
