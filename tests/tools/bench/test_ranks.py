"""The ranks of a benchmark: every collective on every backend, in turns, with checked results."""

from __future__ import annotations

import os
from itertools import islice

import pytest

from lockstep.kernel.errors import RankError
from lockstep.launcher.launch import launch
from lockstep.launcher.world import cpu_backend
from lockstep.processor_core import count_usable_cores
from lockstep.tools.bench import measured_calls
from lockstep.tools.bench.measured_collectives import COLLECTIVES
from lockstep.tools.bench.ranks import MIN_CALLS, BenchPlan, measure, rotate
from lockstep.tools.bench.start_barrier import StartBarrier

BACKENDS = ["gloo", *(["lockstep"] if cpu_backend() == "lockstep" else [])]


def make_plan(folder, ranks, collective="all_reduce", backends=("gloo",), is_bound=False):
    path = str(folder / f"barrier-{collective}")
    StartBarrier.prepare(path, ranks)
    return BenchPlan(collective, ranks, list(backends), [4, 6000], 1e-9, is_bound, path, 20.0)


def measure_all(plans):
    return [measure(plan) for plan in plans]


def test_every_collective_is_correct_on_every_backend(tmp_path):
    plans = [make_plan(tmp_path, 3, name, BACKENDS) for name in COLLECTIVES]
    first, *others = launch(measure_all, (plans,), 3, timeout=300)
    assert all(other == first for other in others), "all ranks know the slowest rank's times"
    for plan, results in zip(plans, first, strict=True):
        sizes = 1 if plan.collective == "barrier" else 2
        segment = "lockstep" in BACKENDS and plan.collective != "barrier"
        names = [*BACKENDS, *(["lockstep (segment)"] if segment else [])]
        assert [one.backend for one in results] == names * sizes
        for one in results:
            assert (one.error, one.wrong) == ("", 0)
            assert len(one.times) >= MIN_CALLS
            assert 0 < one.times[0] <= one.median <= one.times[-1]
            assert one.library.startswith("torch ")


def bind(plan):
    measure(plan)
    return os.sched_getaffinity(0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no choice of cores here")
def test_bind_gives_each_rank_its_own_core_if_there_are_enough(tmp_path):
    ranks = min(2, count_usable_cores())
    allowed = sorted(os.sched_getaffinity(0))
    bound = launch(bind, (make_plan(tmp_path, ranks, is_bound=True),), ranks, timeout=100)
    assert bound == [{core} for core in allowed[:ranks]]


def test_unknown_backend_raises(tmp_path):
    with pytest.raises(RankError, match="nosuch"):
        launch(measure, (make_plan(tmp_path, 1, backends=["nosuch"]),), 1, timeout=100)


def measure_unable(plan):
    """Measure all_gather on a torch whose gather raises an error."""
    measured_calls.all_gather_single = raise_error
    return measure(plan)


def raise_error(*args, **options):
    raise RuntimeError("no luck")


def test_a_backend_that_is_unable_has_an_error(tmp_path):
    plan = make_plan(tmp_path, 2, "all_gather")
    for results in launch(measure_unable, (plan,), 2, timeout=100):
        assert [(one.error, one.times) for one in results] == [("no luck", [])] * 2


def test_contenders_take_turns_and_another_begins_each_round():
    assert list(islice(rotate(3), 9)) == [0, 1, 2, 1, 2, 0, 2, 0, 1]
