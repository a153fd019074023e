"""Runs as bisect takes them."""

import pytest

import records
from lockstep.kernel.errors import UsageError
from lockstep.tools.replay.recorded_run import (
    find_source_differences,
    read_recorded_run,
)


@pytest.fixture
def run(tmp_path):
    """Write a run and read it: run(name, **fields of the first line)."""

    def write(name="a", steps=range(8), **header):
        lines = [records.HEADER | {"name": name} | header, *map(step, steps)]
        lines[4:4] = [records.checkpoint(3, digest="x")]
        return read_recorded_run(records.write(tmp_path / name, [*lines, records.END]))

    return write


def step(number):
    exact = {"loss_hex": (0.1 / (number + 1)).hex(), "norm_hex": "0x1.8p+1", "batch": "b"}
    return records.step(number) | exact | {"losses": ["0x1p-1", None]}


def test_a_run_has_its_steps_and_digests(run):
    found = run()
    assert [each.step for each in found.steps] == list(range(8))
    assert found.run.digests == {3: "x", records.END["steps"]: records.END["digest"]}
    assert found.microbatches == records.HEADER["layout"]["microbatches"]
    assert found.folder == found.run.folder
    assert found.name == "a"


def test_a_record_without_steps_has_nothing_to_compare(tmp_path):
    place = records.write(tmp_path / "empty", [records.HEADER])
    with pytest.raises(UsageError, match="empty has no steps, so there is nothing to compare"):
        read_recorded_run(place)


def test_a_step_before_a_resumption_has_the_sources_of_its_time(tmp_path):
    resume = {"kind": "resume", "t": 1.0, "step": 4, "sources": "sources-2"}
    lines = [records.HEADER | {"sources": "sources"}, *map(step, range(4)), resume]
    place = records.write(tmp_path / "a", [*lines, *map(step, range(4, 8)), records.END])
    for name, text in (("sources", "old"), ("sources-2", "new")):
        (place / name).mkdir()
        (place / name / "train.py").write_text(f"{text}\n")
    found = read_recorded_run(place)
    assert [found.read_line("train.py:1 in forward", each) for each in (3, 4)] == ["old", "new"]
    assert find_source_differences(found, found, 3) == []
