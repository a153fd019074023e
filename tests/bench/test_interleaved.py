"""Interleaved measurement: contenders take turns; the slowest rank counts."""

from __future__ import annotations

import pytest

from lockstep.tools.bench import interleaved
from lockstep.tools.bench.interleaved import Contender, Result, measure
from lockstep.tools.bench.workload import Workload

WORKLOAD = Workload("all_reduce", 256)


class Scripted:
    """A peer of two ranks whose calls last as long as it is told, in nanoseconds."""

    def __init__(self, name, log, times=(1000, 3000), wrong=0, error=None):
        self.name, self.library, self.log = name, "scripted", log
        self.times, self.wrong, self.error = times, wrong, error

    def ask(self, message):
        self.log.append((self.name, *message))
        if "block" in message:
            if self.error == "block":
                return [{"times": [1], "wrong": 0}, {"error": "rank 1 has no luck"}]
            return [{"times": [t] * message["calls"], "wrong": self.wrong} for t in self.times]
        if self.error == "prepare" and "prepare" in message:
            return [{}, {"error": "no such dtype"}]
        return [{}, {}]

    def end(self):
        pass


def race(*runners, workload=WORKLOAD, seconds=1e-9):
    return measure(
        [Contender(runner.name, runner) for runner in runners], workload, 2, 1024, seconds
    )


def test_the_slowest_rank_counts():
    (result,) = race(Scripted("a", []))
    assert result.median == 3.0
    assert len(result.times) >= interleaved.MIN_CALLS
    assert result.algbw == pytest.approx(1024 / 3e-6 / 1e9)
    assert result.busbw == result.algbw  # two ranks: 2 (n - 1) / n = 1


def test_a_round_trip_counts_half():
    workload = Workload("send_recv", 256)
    assert race(Scripted("a", []), workload=workload)[0].median == 1.5


@pytest.mark.parametrize(("name", "copied"), [("all_gather", 1024), ("send_recv", 256)])
def test_a_copy_moves_as_many_bytes_as_the_message(name, copied):
    class Copy:
        name, library = "copy", "none"

        def ask(self, message):
            if "prepare" in message:
                asked.append((message["workload"]["collective"], message["workload"]["count"]))
            if "block" in message:
                return [{"times": [3000] * message["calls"], "wrong": 0}]
            return [{}]

    asked = []
    (result,) = measure(
        [Contender("memcpy", Copy(), is_copy=True)],
        Workload(name, 256),
        4,
        4,
        0.1,
    )
    assert asked == [("memcpy", copied)]
    assert result.median == 3.0  # a copy is no round trip
    assert result.workload.count == 256


def test_contenders_take_turns_and_another_begins_each_round():
    log = []
    names = ("a", "b", "c")
    race(*(Scripted(name, log, times=(10**9,) * 2) for name in names), seconds=1e9 and 1.0)
    blocks = [name for name, what, *_ in log if what == "block"][3 * 2 :]  # after the warm-ups
    assert blocks[:9] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert len(blocks) == 3 * interleaved.MIN_CALLS
    assert [entry for entry in log if entry[1] == "drop"] == [(name, "drop") for name in names]


def test_short_calls_come_in_blocks_and_long_ones_singly():
    log = []
    race(Scripted("short", log, times=(10, 10)))
    assert sum(what == "block" for _, what, *_ in log) == 2 + interleaved.MIN_ROUNDS
    log.clear()
    race(Scripted("long", log, times=(10**9, 10**9)))
    assert sum(what == "block" for _, what, *_ in log) == 2 + interleaved.MIN_CALLS


@pytest.mark.parametrize(("when", "why"), [("prepare", "no such dtype"), ("block", "no luck")])
def test_unsupported_contender_reports_error_and_others_continue(when, why):
    able, unable = race(Scripted("able", []), Scripted("unable", [], error=when))
    assert able.times
    assert not unable.times
    assert why in unable.error


def test_wrong_elements_are_summed_over_ranks_and_blocks():
    (result,) = race(Scripted("a", [], wrong=3))
    assert result.wrong >= 2 * 3 * interleaved.MIN_ROUNDS


def test_quantiles_lie_between_the_calls():
    result = Result(Contender("a", Scripted("a", [])), WORKLOAD, 2, 4, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert [result.quantile(share) for share in (0, 0.1, 0.5, 1)] == [1.0, 1.4, 3.0, 5.0]
    assert result.median == 3.0
