"""A replayed step beside the recorded one, as plain values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.record.columns import concatenate_steps
from lockstep.record.fingerprints import RecordedStep
from lockstep.record.reader import Run
from lockstep.redaction import redact
from lockstep.tools.replay.replay_comparison import Recorded, compare, find_recorded
from lockstep.tools.replay.result import Replay, ReplayedStep, ReplayRequest

STEP = RecordedStep(7, 1, 0.5, 2.0, (0.25, 0.75, None), "ab")
REPLAYED = ReplayedStep(7, 1, 0.5, 2.0, (0.25, 0.75, None), "ab", "d1")
REQUEST = ReplayRequest(Path("runs/mine"), 7, 7)


def compared(step=STEP, replayed=REPLAYED, digest=None, request=REQUEST):
    return compare(request, Recorded(step, digest), Replay([replayed], 4, 1.0))


def make_run(**lines):
    return Run(Path("runs/mine"), {}, concatenate_steps([]), **lines)


def test_equal_bits_are_equal_and_what_was_compared_is_named():
    found = compared(digest="d1")
    assert found.equal
    assert found.compared == (
        "samples of the batch",
        "loss",
        "gradient norm",
        "digest of the weights",
        "losses of the micro-batches",
    )
    plain = found.plain()
    assert plain["loss"] == plain["recorded_loss"] == 0.5
    assert plain["norm_hex"] == plain["recorded_norm_hex"] == "0x1.0000000000000p+1"
    assert plain["digest"] == plain["recorded_digest"] == "d1"
    assert plain["from_step"] == 4


def test_one_last_bit_is_a_difference():
    for name in ("loss", "norm"):
        found = compared(replayed=replace(REPLAYED, **{name: math.nextafter(0.5, 1)}))
        assert not found.equal
        assert "0.5000000000000001" in found.differences[0]


def test_signs_of_zero_and_nan_are_compared_by_their_bits():
    zero = replace(STEP, loss=0.0), replace(REPLAYED, loss=-0.0)
    assert not compared(*zero).equal
    nan = replace(STEP, losses=(math.nan,)), replace(REPLAYED, losses=(math.nan,))
    assert compared(*nan).equal
    assert compared(*nan).plain()["loss"] == 0.5


def test_other_samples_digests_and_micro_batches_are_named():
    found = compared(
        replayed=replace(REPLAYED, batch="cd", losses=(0.25, 0.5, 0.5)), digest="another"
    )
    assert found.differences == (
        "batch: recorded ab, replayed cd",
        "loss of the micro-batch 1: recorded 0.75, replayed 0.5",
        "loss of the micro-batch 2: recorded none, replayed 0.5",
        "digest: recorded another, replayed d1",
    )
    fewer = compared(replayed=replace(REPLAYED, losses=(0.25,)))
    assert fewer.differences == ("loss of the micro-batch 1: recorded 0.75, replayed none",)


def test_an_old_record_compares_what_it_has():
    found = compared(step=RecordedStep(7, 1, 0.5, None))
    assert found.equal
    assert found.compared == ("loss",)


def test_a_micro_batch_is_compared_alone():
    request = replace(REQUEST, microbatch=1)
    alone = replace(REPLAYED, losses=(None, 0.75, None), loss=math.nan)
    found = compared(replayed=alone, request=request)
    assert found.equal
    plain = found.plain()
    assert (plain["loss"], plain["recorded_loss"]) == (0.75, 0.75)
    assert (plain["norm"], plain["digest"], plain["recorded_norm"]) == (None, None, None)
    other = compared(replayed=replace(alone, losses=(None, 0.5, None)), request=request)
    assert "loss of the micro-batch 1" in other.differences[0]


def test_a_micro_batch_is_compared_alone_though_several_ranks_compute_the_others():
    request = replace(REQUEST, ranks=2, microbatch=1)
    assert compared(request=request).equal
    other = compared(replayed=replace(REPLAYED, losses=(0.25, 0.5, None)), request=request)
    assert other.differences == ("loss of the micro-batch 1: recorded 0.75, replayed 0.5",)


def test_a_replay_that_failed_is_no_equal_one():
    found = compare(REQUEST, Recorded(STEP), Replay([], 0, 1.0, "rank 0 failed: no data"))
    assert not found.equal
    assert found.differences == ("the replay failed: rank 0 failed: no data",)
    assert found.plain()["loss"] is None


def test_nothing_is_compared_after_the_debugger_was_left():
    recorded = Recorded(None, failure="the loss is nan", microbatch=3)
    for each in (Recorded(STEP), recorded):
        found = compare(REQUEST, each, Replay([], 0, 1.0, "the debugger was left", is_left=True))
        assert (found.compared, found.differences, found.equal) == ((), (), False)


STOP = {"step": 7, "code": "LossError", "microbatch": 3, "value": "nan"}
REASON = {"step": 7, "code": "GradientError", "reason": "no gradient"}


@pytest.mark.parametrize(
    ("stop", "changes"),
    [
        (STOP, [{}, {"step": 6}, {"microbatch": 2}, {"value": "inf"}]),
        (REASON, [{}, {"step": 6}, {"code": "StateError"}, {"reason": "no buffer"}]),
    ],
)
def test_the_failure_of_a_step_is_compared_by_fields_and_not_by_words(stop, changes):
    recorded = find_recorded(make_run(end=stop), {}, 7)
    for change in changes:
        replay = Replay([], 0, 1.0, "halted", stop=stop | change | {"message": "rank 0 halts"})
        assert compare(REQUEST, recorded, replay).equal is not bool(change)


def test_a_step_in_which_a_run_stopped_is_not_equal_to_one_that_is_finished():
    run = make_run(end=STOP)
    recorded = find_recorded(run, {}, 7)
    assert (recorded.step, recorded.microbatch) == (None, 3)
    assert find_recorded(run, {}, 8) == Recorded(None)
    assert not compare(REQUEST, recorded, Replay([REPLAYED], 0, 1.0)).equal
    elsewhere = find_recorded(make_run(end={"step": 7, "code": "StoppedError"}), {}, 7)
    assert compare(REQUEST, elsewhere, Replay([], 0, 1.0, stop=REASON)).equal

    for microbatch, loss, is_equal in ((3, math.nan, True), (3, 0.5, False)):
        found = compare_alone(recorded, microbatch, loss)
        assert (found.compared, found.equal) == (("whether it stopped",), is_equal)
    for loss in (0.5, math.nan):  # the record does not say what another one computes
        found = compare_alone(recorded, 2, loss)
        assert (found.compared, found.differences, found.equal) == ((), (), False)
    request = replace(REQUEST, microbatch=2)
    found = compare(request, recorded, Replay([], 0, 1.0, "rank 0 failed: no data"))
    assert not found.equal


def compare_alone(recorded: Recorded, microbatch: int, loss: float):
    """Compare what the record has with a micro-batch that was computed alone."""
    losses = tuple(loss if each == microbatch else None for each in range(4))
    alone = replace(REPLAYED, losses=losses, loss=math.nan)
    request = replace(REQUEST, microbatch=microbatch)
    return compare(request, recorded, Replay([alone], 0, 1.0))


def test_a_run_that_failed_otherwise_is_compared_by_its_error():
    run = make_run(end={"state": "failed", "message": "KeyError: 'lr'\nin step 7"}, state="failed")
    steps = {number: replace(STEP, step=number) for number in range(7)}
    recorded = find_recorded(run, steps, 7)
    assert recorded == Recorded(None, failure="KeyError: 'lr'")
    assert find_recorded(run, steps, 8) == Recorded(None)
    again = Replay([], 0, 1.0, "rank 0 raised KeyError: 'lr' (train.py:31)")
    alone = replace(REQUEST, microbatch=0)
    assert compare(REQUEST, recorded, again).equal
    assert compare(alone, recorded, again).equal
    other = replace(again, failure="rank 0 raised KeyError: 'x'")
    assert not compare(REQUEST, recorded, other).equal
    assert not compare(REQUEST, recorded, Replay([REPLAYED], 0, 1.0)).equal
    found = compare_alone(recorded, 0, 0.5)  # the error may belong to another micro-batch
    assert (found.compared, found.differences, found.equal) == ((), (), False)


def test_secrets_of_an_error_are_redacted_as_in_the_record(monkeypatch):
    monkeypatch.setenv("STORE_PASSWORD", "open sesame")
    said = "OSError: no answer from s3://me:{}@store, password 'open sesame' was sent"
    message = redact(said.format("hunter2"))
    run = make_run(end={"state": "failed", "message": message}, state="failed")
    recorded = find_recorded(run, {}, 0)
    failure = redact(f"rank 0 raised {said.format('hunter2')} (train.py:3)")
    found = compare(replace(REQUEST, first=0), recorded, Replay([], 0, 1.0, failure))
    assert found.equal


def test_the_digest_after_a_step_is_that_of_a_checkpoint_or_of_the_end():
    run = make_run(
        checkpoints=[
            {"step": 8, "digest": "a"},
            {"step": 8, "digest": "d8"},
            {"step": 9, "digest": None},
            {"step": 10},
        ],
        end={"steps": 12, "digest": "d12"},
    )
    steps = {number: replace(STEP, step=number) for number in range(12)}
    assert find_recorded(run, steps, 7).digest == "d8"
    assert find_recorded(run, steps, 8).digest is None
    assert find_recorded(run, steps, 9).digest is None
    assert find_recorded(run, steps, 11).digest == "d12"
