"""Comparison of runs: speed, digests, losses, weights and settings."""

import json

import pytest
import torch
from safetensors.torch import save_file

import records
from lockstep.record.reader import read_run
from lockstep.report import comparison
from lockstep.report.comparison import compare_runs


@pytest.fixture
def run(tmp_path):
    """Write a record of 60 steps and read it: run(name, seconds=..., end=..., header=...)."""

    def write(name, seconds=0.01, losses=(), end=(), header=()):
        lines = [
            records.step(n, per_epoch=60, seconds=seconds * (1 + 0.01 * (n % 7)), ranks=None)
            for n in range(60)
        ]
        for at, loss in dict(losses).items():
            lines[at]["loss"] = loss
        first = records.HEADER | {"name": name} | dict(header)
        ends = [] if end is None else [records.END | dict(end)]
        return read_run(records.write(tmp_path / name, [first, *lines, *ends]))

    return write


def first_difference(a, b):
    return compare_runs([a, b]).pairs[0].losses.step


def sentences(*runs):
    return compare_runs(list(runs)).pairs[0].sentences


def test_the_faster_run_is_named_in_either_order(run):
    slow, fast = run("slow", seconds=0.012), run("fast")
    assert sentences(slow, fast)[0].startswith(
        "fast is 1.20 times as fast as slow (95% interval 1."
    )
    assert sentences(fast, slow)[0].startswith(
        "fast is 1.20 times as fast as slow (95% interval 1."
    )


def test_equal_speeds_do_not_differ_significantly(run):
    assert "do not differ significantly in speed" in sentences(run("a"), run("b"))[0]


def test_equal_runs_have_no_differences(run):
    said = sentences(run("a"), run("b"))
    assert said[1] == "b and a have bit-identical final weights: the digests are equal."
    assert said[2] == "Their losses are bit-identical at all 60 common steps."
    assert len(said) == 3


def test_the_first_step_at_which_losses_differ(run):
    a, b = run("a"), run("b", losses={41: 0.5, 50: 0.25}, end={"digest": "ff"})
    said = sentences(a, b)
    assert "the digests differ" in said[1]
    ours = float(a.steps.loss[41])
    assert said[2] == f"Their losses first differ at step 41: {ours!r} and 0.5 (60 steps compared)."
    assert first_difference(a, b) == 41


def test_nan_losses_of_both_runs_are_equal(run):
    assert first_difference(run("a", losses={3: None}), run("b", losses={3: None})) is None
    assert first_difference(run("c", losses={3: None}), run("d")) == 3


def test_runs_of_different_lengths_are_compared_at_common_steps(tmp_path):
    lines = [records.HEADER, *map(records.step, range(20))]
    a = read_run(records.write(tmp_path / "a", lines))
    b = read_run(records.write(tmp_path / "b", [records.HEADER, *map(records.step, range(10, 30))]))
    none = read_run(records.write(tmp_path / "c", [records.HEADER]))
    assert compare_runs([a, b]).pairs[0].losses.num_compared == 10
    assert "no steps in common" in sentences(a, none)[2]


def test_a_run_without_an_end_has_no_digest_to_compare(run):
    assert "not all runs reached their end" in sentences(run("a"), run("b", end=None))[1]


def test_the_first_tensor_that_differs_is_named(run):
    a, b = run("a"), run("b", end={"digest": "ff"})
    weight = torch.ones(3)
    save_file({"conv.bias": weight, "fc.bias": weight + 0}, a.folder / "weights.safetensors")
    save_file({"conv.bias": weight, "fc.bias": 2 * weight}, b.folder / "weights.safetensors")
    assert sentences(a, b)[3] == (
        "The first tensor in weights.safetensors that differs is fc.bias: "
        "it differs in 3 of 3 elements, by at most 1."
    )
    (b.folder / "weights.safetensors").write_bytes(b"oops")
    assert "cannot be compared" in sentences(a, b)[3]


def test_differing_settings_are_listed(run):
    layout = records.HEADER["layout"] | {"replicas": 4, "world_size": 4}
    environment = records.HEADER["environment"] | {"torch": "2.14.0"}
    found = compare_runs(
        [run("a"), run("b", header={"layout": layout, "environment": environment})]
    )
    assert found.settings == {
        "layout.world_size": ["2", "4"],
        "layout.replicas": ["2", "4"],
        "torch": ["2.13.0", "2.14.0"],
    }
    assert compare_runs([run("c"), run("d")]).settings == {}


def test_all_formats_have_the_sentences(run):
    found = compare_runs([run("a"), run("b"), run("c", seconds=0.02)])
    page, text = comparison.comparison_html(found), comparison.comparison_markdown(found)
    plain = json.loads(json.dumps(comparison.comparison_json(found)))
    for one, listed in zip(found.pairs, plain["against"], strict=True):
        for sentence in one.sentences:
            assert sentence in page
            assert sentence in text
            assert sentence in listed["sentences"]
    assert plain["against"][1]["significant"] is True
    assert plain["against"][0]["same_digest"] is True
    assert page.count('class="chart"') == 3


def test_names_of_runs_are_escaped(run):
    evil = "</script><script>alert(1)</script>"
    page = comparison.comparison_html(compare_runs([run("a", header={"name": evil}), run("b")]))
    assert "<script>alert" not in page
    assert page.count("</script>") == page.count("<script")


def test_runs_with_the_same_name_are_shown_by_their_folders(run):
    a, b = run("a", header={"name": "same"}), run("b", header={"name": "same"})
    assert compare_runs([a, b]).names == [str(a.folder), str(b.folder)]
