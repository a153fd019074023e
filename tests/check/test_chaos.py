"""The undisturbed run that `lockstep chaos` compares with."""

import pytest

import records
from lockstep.kernel.errors import UsageError
from lockstep.tools.check.chaos import read_baseline


def test_the_baseline_is_a_run_that_came_to_its_end(tmp_path):
    baseline = read_baseline(records.write(tmp_path / "whole", records.whole()), 2.0)
    assert baseline.digest == records.END["digest"]
    assert baseline.intervals.tolist() == pytest.approx([0.0] + [0.01] * 19)
    for name, lines in {
        "going": records.whole()[:-1],
        "failed": [*records.whole()[:-1], records.END | {"state": "failed"}],
        "empty": [records.HEADER, records.END],
    }.items():
        with pytest.raises(UsageError, match="has no digest of its weights to compare with"):
            read_baseline(records.write(tmp_path / name, lines), 2.0)
