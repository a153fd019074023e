"""How the result of a bisection is shown: as text and as JSON."""

from dataclasses import replace

import pytest

from bisections import DIVERGENCE, MODULE, bisected
from lockstep.tools.replay.bisection import Reproduction
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
        "recorded loss of the step": [repr(each.steps[7].loss) for each in (found.a, found.b)],
    }
    text = list_sentences(found)
    assert text[0] == "17 elements differ; the first by 0.25."
    close = replace(DIVERGENCE, element=replace(DIVERGENCE.element, ulps=1000))
    assert list_sentences(replace(found, divergence=close))[0] == (
        "17 elements differ; the first by 1,000 units in the last place."
    )
    assert text[1].startswith("The records differ first in step 7, in the loss; compared: 20 steps")
    assert text[2] == "night-b has 2 steps more, which were not compared."
    assert text[3] == "Replays of both runs compute what was recorded, bit for bit."
    assert text[4] == "These settings differ and can change results: options.seed (7 and 8)."
    assert text[5] == "Their sources differ in train.py."
    assert text[6] == "night-b: data.pt has changed."
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


def test_replays_that_do_not_compute_what_was_recorded(found):
    difference = RecordDifference(7, "norm", None, "0.5", "0.25")
    for is_repeatable, words in ((True, "a hardware fault"), (False, "not deterministic")):
        both = Reproduction(True), Reproduction(False, difference, is_repeatable)
        text = " ".join(list_sentences(replace(found, reproductions=both)))
        assert "Replays of night-a compute what was recorded" in text
        assert "the replay of night-b does not" in text.replace("The replay", "the replay")
        assert "step 7: the norm was 0.5 and is 0.25 now" in text
        assert words in text


def test_what_only_records_show_comes_with_advice_and_arguments_that_differ(found):
    programs = [{"program": {"kind": "script", "arguments": each}} for each in (["--b", "1"], [])]
    sides = [
        replace(side, run=replace(side.run, header=side.run.header | program))
        for side, program in zip((found.a, found.b), programs, strict=True)
    ]
    divergence = replace(DIVERGENCE, direction=None, a=None, b=None, element=None)
    found = replace(found, a=sides[0], b=sides[1], divergence=divergence, is_replayed=False)
    text = " ".join(list_sentences(found))
    assert "Their arguments differ: --b 1 and (none)." in text
    assert "on a machine like those of the runs" in text
    assert "machine" not in " ".join(list_sentences(replace(found, is_replayed=True)))


def test_where_a_run_stopped_is_said_also_without_a_difference(found):
    for message, is_value in (
        ("step 20, micro-batch 3: the loss is nan", True),
        ("KeyError", False),
    ):
        end = {"kind": "end", "t": 2.0, "state": "failed", "message": message}
        a = replace(found.a, run=replace(found.a.run, end=end, state="failed"))
        assert a.stop is not None
        assert (a.stop.step, a.stop.is_value) == (20, is_value)
        text = list_sentences(replace(found, a=a, divergence=None))
        what = "step 20, micro-batch 3 (the loss is nan)" if is_value else "step 20 (KeyError)"
        assert f"night-a stopped in {what}; night-b continued." in text


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
    assert plain["operators"] is None
