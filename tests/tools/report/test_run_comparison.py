"""Comparison of runs: speed, digests, losses, weights and settings."""

import json

import pytest

import records
from lockstep.record.reader import read_run
from lockstep.tools.report import run_comparison
from lockstep.tools.report.run_comparison import compare_runs


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


def first_differing_step(a, b):
    return compare_runs([a, b]).pairs[0].first_difference


def sentences(*runs):
    return compare_runs(list(runs)).pairs[0].sentences


def test_the_speeds_are_compared(run):
    slow = run("slow", seconds=0.012)
    fast = run("fast")
    assert sentences(slow, fast)[0] == (
        "fast trained 1.20 times as many samples per second as slow, on average during steps."
    )
    assert compare_runs([fast, slow]).pairs[0].speed_ratio == pytest.approx(1 / 1.2)


def test_the_rank_that_holds_up_a_slower_run_is_named(tmp_path):
    def write(name, **fields):
        lines = [records.step(number, **fields) for number in range(12)]
        header = records.HEADER | {"name": name}
        return read_run(records.write(tmp_path / name, [header, *lines, records.END]))

    busy = [0.006, 0.002, 0.0, 0.0]
    idle = [0.006, 0.002, 0.03, 0.0]
    even = write("even", ranks=[busy, busy])
    uneven = write("uneven", ranks=[idle, busy], outside=[0.0, 0.03])
    said = (
        "In uneven, the others wait for rank 1: it works 36.0 ms per step, where the slowest rank "
        "of even works 6.00 ms. It spends the time between steps: in the body of the loop, "
        "callbacks, evaluation or saving."
    )
    assert said in sentences(even, uneven)
    assert said in sentences(uneven, even)
    assert not any("wait for rank" in each for each in sentences(even, even))
    late = write("late", ranks=[[0.04, 0.002, 0.0, 0.0], idle])
    assert any("rank 0: it works 40.0 ms" in each for each in sentences(even, late))
    # A rank that is slow in both runs explains no difference.
    assert not any("wait for rank" in each for each in sentences(uneven, uneven))


def test_runs_that_differ_in_their_learning_rate_say_so(tmp_path):
    """Of a script, whose record has no options: the rate is in its steps alone."""

    def write(name, rates):
        lines = [records.step(n, lr=rate, loss=rate + n) for n, rate in enumerate(rates)]
        header = {key: value for key, value in records.HEADER.items() if key != "options"}
        return read_run(records.write(tmp_path / name, [header, *lines, records.END]))

    constant = write("a", [0.05] * 20)
    lower = write("b", [0.01] * 20)
    found = compare_runs([constant, lower])
    assert found.settings == {"learning rate": ["0.05", "0.01"]}
    said = "These settings differ and can change results: learning rate (0.05 and 0.01)."
    assert said in found.pairs[0].sentences
    falling = [0.1 - 0.005 * n for n in range(20)]
    schedule = write("c", falling)
    other = write("d", [*falling[:7], 0.06, *falling[8:]])
    assert compare_runs([schedule, other]).settings == {
        "learning rate": [
            "0.1 to 0.005",
            f"0.1 to 0.005, other values from step 7: 0.06 instead of {falling[7]!r}",
        ]
    }
    assert compare_runs([schedule, write("e", falling)]).settings == {}


def test_optimizer_states_that_differ_with_equal_weights_are_reported(run):
    said = sentences(run("a"), run("b", end={"optimizer_digest": "00" * 32}))
    assert said[2] == "Their optimizer states differ, although their weights are the same."


def test_equal_runs_have_no_differences(run):
    said = sentences(run("a"), run("b"))
    assert said[1] == "b and a have bit-identical final weights: the digests are equal."
    assert said[2] == "Their losses are bit-identical at all 60 common steps."
    assert len(said) == 3


def test_the_first_step_at_which_losses_differ(run):
    a = run("a")
    b = run("b", losses={41: 0.5, 50: 0.25}, end={"digest": "ff"})
    said = sentences(a, b)
    assert "the digests differ" in said[1]
    ours = float(a.steps.loss[41])
    assert said[2] == (
        f"Their losses first differ at step 41: 0.5 in b and {ours!r} in a (60 steps compared)."
    )
    assert first_differing_step(a, b) == 41


def test_processors_that_compute_other_bits_are_named_if_the_results_differ(run):
    environment = {"processor": "A", "instructions": "AVX2", "arithmetic": "softmax=1, numpy=2"}
    other = environment | {"processor": "B", "arithmetic": "softmax=3, numpy=2"}
    a = run("a", header={"environment": environment})
    b = run("b", losses={41: 0.5}, end={"digest": "ff"}, header={"environment": other})
    said = "B (AVX2) computes softmax with other bits than A (AVX2)."
    assert said in sentences(a, b)
    assert said not in sentences(a, run("c", header={"environment": other}))


def test_nan_losses_of_both_runs_are_equal(run):
    assert first_differing_step(run("a", losses={3: None}), run("b", losses={3: None})) is None
    assert first_differing_step(run("c", losses={3: None}), run("d")) == 3


def test_runs_of_different_lengths_are_compared_at_common_steps(tmp_path):
    lines = [records.HEADER, *map(records.step, range(20))]
    a = read_run(records.write(tmp_path / "a", lines))
    b = read_run(records.write(tmp_path / "b", [records.HEADER, *map(records.step, range(10, 30))]))
    none = read_run(records.write(tmp_path / "c", [records.HEADER]))
    assert compare_runs([a, b]).pairs[0].num_compared == 10
    assert "no steps in common" in sentences(a, none)[1]


def test_a_run_without_an_end_has_no_digest_to_compare(run):
    assert "not all runs reached their end" in sentences(run("a"), run("b", end=None))[1]


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
    a = run("e", header={"variables": {"LR": "1"}})
    b = run("f", header={"variables": {"LR": "2"}})
    assert compare_runs([a, b]).settings == {"LR": ["1", "2"]}
    assert compare_runs([run("c"), run("d")]).settings == {}


def test_json_has_the_sentences(run):
    found = compare_runs([run("a"), run("b"), run("c", seconds=0.02)])
    plain = json.loads(json.dumps(run_comparison.comparison_json(found)))
    for one, listed in zip(found.pairs, plain["against"], strict=True):
        assert one.sentences == listed["sentences"]
    assert plain["against"][1]["speed_ratio"] == pytest.approx(0.5)
    assert plain["against"][0]["same_digest"] is True


def test_runs_with_the_same_name_are_shown_by_their_folders(run):
    a = run("a", header={"name": "same"})
    b = run("b", header={"name": "same"})
    assert compare_runs([a, b]).names == [str(a.folder), str(b.folder)]


def test_resumptions_are_differences_in_settings(tmp_path):
    runs = [records.write(tmp_path / "whole", records.whole())]
    runs += [records.write(tmp_path / "resumed", records.resumed())]
    found = compare_runs(list(map(read_run, runs)))
    assert found.settings == {"resumed from step": ["", "12, 16"]}, "the last layout counts"
    assert found.pairs[0].same_digest
    assert (found.pairs[0].num_compared, found.pairs[0].first_difference) == (20, None)


def test_runs_that_differ_point_to_bisect(run):
    a = run("a")
    b = run("b", losses={7: 0.5})
    *_, last = sentences(a, b)
    assert last.startswith("To find the first operator that computes other bits: lockstep bisect ")
    assert last.endswith("/b")
    assert not any("bisect" in each for each in sentences(a, run("c")))
    other = {"layout": records.HEADER["layout"] | {"microbatches": 4}}
    assert not any("bisect" in each for each in sentences(a, run("d", end={}, header=other)))
