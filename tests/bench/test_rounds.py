"""Rounds: contenders take turns; a call lasts as long as its slowest rank."""

from __future__ import annotations

import pytest

from lockstep.bench import rounds
from lockstep.bench.measure import Order
from lockstep.bench.peers import CopyPeer
from lockstep.bench.rounds import Contender, Result, measure

ORDER = Order("all_reduce", 256, "float32", "SUM")


class Scripted:
    """A peer of two ranks whose calls last as long as it is told, in nanoseconds."""

    def __init__(self, name, log, times=(1000, 3000), wrong=0, cannot=None):
        self.name, self.library, self.log = name, "scripted", log
        self.times, self.wrong, self.cannot = times, wrong, cannot

    def ask(self, message):
        self.log.append((self.name, *message))
        if "block" in message:
            if self.cannot == "block":
                return [{"times": [1], "wrong": 0}, {"cannot": "rank 1 has no luck"}]
            return [{"times": [t] * message["calls"], "wrong": self.wrong} for t in self.times]
        if self.cannot == "prepare" and "prepare" in message:
            return [{}, {"cannot": "no such dtype"}]
        return [{}, {}]

    def end(self):
        pass


def race(*peers, order=ORDER, seconds=1e-9):
    return measure([Contender(peer.name, peer) for peer in peers], order, 2, 1024, seconds)


def test_the_slowest_rank_counts():
    (result,) = race(Scripted("a", []))
    assert result.median == 3.0
    assert len(result.times) >= rounds.FEWEST
    assert result.algbw == pytest.approx(1024 / 3e-6 / 1e9)
    assert result.busbw == result.algbw  # two ranks: 2 (n - 1) / n = 1


def test_a_round_trip_counts_half():
    order = Order("send_recv", 256, "float32", "SUM")
    assert race(Scripted("a", []), order=order)[0].median == 1.5


@pytest.mark.parametrize(("name", "copied"), [("all_gather", 1024), ("send_recv", 256)])
def test_a_copy_moves_as_many_bytes_as_the_message(name, copied):
    class Copy(CopyPeer):
        def ask(self, message):
            if "prepare" in message:
                assert message["order"]["count"] == copied
            if "block" in message:
                return [{"times": [3000] * message["calls"], "wrong": 0}]
            return super().ask(message)

    (result,) = measure(
        [Contender("memcpy", Copy())], Order(name, 256, "float32", "SUM"), 4, 4, 0.1
    )
    assert result.median == 3.0  # a copy is no round trip
    assert result.order.count == 256


def test_contenders_take_turns_and_another_begins_each_round():
    log = []
    names = ("a", "b", "c")
    race(*(Scripted(name, log, times=(10**9,) * 2) for name in names), seconds=1e9 and 1.0)
    blocks = [name for name, what, *_ in log if what == "block"][3 * 2 :]  # after the warm-ups
    assert blocks[:9] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert len(blocks) == 3 * rounds.FEWEST
    assert [entry for entry in log if entry[1] == "drop"] == [(name, "drop") for name in names]


def test_short_calls_come_in_blocks_and_long_ones_singly():
    log = []
    race(Scripted("short", log, times=(10, 10)))
    assert sum(what == "block" for _, what, *_ in log) == 2 + rounds.ROUNDS
    log.clear()
    race(Scripted("long", log, times=(10**9, 10**9)))
    assert sum(what == "block" for _, what, *_ in log) == 2 + rounds.FEWEST


@pytest.mark.parametrize(("when", "why"), [("prepare", "no such dtype"), ("block", "no luck")])
def test_who_cannot_says_why_and_the_others_go_on(when, why):
    able, unable = race(Scripted("able", []), Scripted("unable", [], cannot=when))
    assert able.times
    assert not unable.times
    assert why in unable.cannot


def test_wrong_answers_are_added_up_over_ranks_and_blocks():
    (result,) = race(Scripted("a", [], wrong=3))
    assert result.wrong >= 2 * 3 * rounds.ROUNDS


def test_quantiles_lie_between_the_calls():
    result = Result(Contender("a", Scripted("a", [])), ORDER, 2, 4, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert [result.quantile(share) for share in (0, 0.1, 0.5, 1)] == [1.0, 1.4, 3.0, 5.0]
    assert result.median == 3.0
