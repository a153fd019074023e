"""The cores of a machine, and how processes share them."""

from __future__ import annotations

import pytest

from lockstep import processor_core
from lockstep.processor_core import divide_cores, read_core_quota


@pytest.mark.parametrize(
    ("cores", "quota", "processes", "threads"),
    [(32, None, 2, 16), (32, None, 3, 10), (2, None, 4, 1), (32, 6.5, 2, 3), (4, 8.0, 1, 4)],
)
def test_cores_are_divided(monkeypatch, cores, quota, processes, threads):
    monkeypatch.setattr(processor_core, "count_usable_cores", lambda: cores)
    monkeypatch.setattr(processor_core, "read_core_quota", lambda: quota)
    assert divide_cores(processes) == threads


def test_a_quota_is_read(tmp_path):
    assert read_core_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert read_core_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert read_core_quota(tmp_path) == 1.5
