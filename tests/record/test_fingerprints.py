"""What identifies each step of a run, read from its record."""

import math

import pytest

import records
from lockstep.kernel.errors import UsageError
from lockstep.record.fingerprints import RecordedStep, read_step_fingerprints


def line(number, loss, **fields):
    """Return the line of a step; the exact loss is one that its rounded form does not show."""
    exact = {"loss_hex": loss.hex(), "norm_hex": (loss / 3).hex(), "losses": [loss.hex(), None]}
    return records.step(number, loss=round(loss, 3)) | exact | {"batch": f"{number:016x}"} | fields


def test_the_exact_numbers_of_each_step_are_read(tmp_path):
    loss = 0.1 + 0.2
    folder = records.write(tmp_path, [records.HEADER, line(0, loss), line(1, 1.0, norm_hex="inf")])
    first, second = read_step_fingerprints(folder)
    assert first == RecordedStep(0, 0, loss, loss / 3, (loss, None), "0" * 16)
    assert (second.step, second.norm) == (1, math.inf)
    assert read_step_fingerprints(folder / "record.jsonl") == [first, second]


def test_records_of_older_versions_have_what_they_have(tmp_path):
    lines = [
        records.HEADER,
        records.step(0, norm=0.5),
        {"kind": "step"},
        records.step(1, loss=None),
    ]
    first, second = read_step_fingerprints(records.write(tmp_path, lines, tail="{"))
    assert first == RecordedStep(0, 0, records.step(0)["loss"], 0.5, (), None)
    assert second.loss is None
    assert second.norm is None


@pytest.mark.parametrize("is_damaged", [False, True])
def test_steps_that_were_taken_again_replace_the_earlier_ones(tmp_path, is_damaged):
    again = [line(number, 2.0) for number in (2, 3)]
    resume = {"kind": "resumed"} if is_damaged else records.resume(2)
    lines = [records.HEADER, *(line(number, 1.0) for number in range(5)), resume, *again]
    found = read_step_fingerprints(records.write(tmp_path, lines))
    assert [(each.step, each.loss) for each in found] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]


def test_steps_of_a_round_replace_those_that_its_last_rank_0_had_recorded(tmp_path):
    again = [line(number, 2.0) for number in (4, 5)]
    lines = [records.HEADER, *(line(number, 1.0) for number in range(5)), records.new_round(1, 4)]
    found = read_step_fingerprints(records.write(tmp_path, [*lines, *again]))
    assert [(each.step, each.loss) for each in found[3:]] == [(3, 1.0), (4, 2.0), (5, 2.0)]
    found = read_step_fingerprints(records.write(tmp_path, lines))
    assert [each.step for each in found] == [0, 1, 2, 3]


def test_a_run_that_was_resumed_and_has_no_step_since_then(tmp_path):
    lines = [records.HEADER, *(line(number, 1.0) for number in range(5)), records.resume(3)]
    found = read_step_fingerprints(records.write(tmp_path, lines))
    assert [each.step for each in found] == [0, 1, 2]


def test_a_missing_record_raises_an_error(tmp_path):
    with pytest.raises(UsageError, match="there is no run at"):
        read_step_fingerprints(tmp_path)
