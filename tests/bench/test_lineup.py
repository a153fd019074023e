"""The start line: nobody begins before the last one came."""

from __future__ import annotations

import threading

import pytest

from lockstep.bench.lineup import Lineup


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_nobody_starts_before_the_last_one_came(tmp_path, ranks):
    path, turns, came, early = str(tmp_path / "line"), 200, [0] * ranks, []
    Lineup.prepare(path, ranks)

    def go(rank: int) -> None:
        lineup = Lineup(path, rank, ranks, patience=10.0)
        for turn in range(1, turns + 1):
            came[rank] = turn
            lineup()
            early.extend(other for other in range(ranks) if came[other] < turn)
        lineup.close()

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [turns] * ranks
    assert early == []


def test_who_does_not_come_is_named(tmp_path):
    path = str(tmp_path / "line")
    Lineup.prepare(path, 3)
    lineup = Lineup(path, 0, 3, patience=0.05)
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.05 s on the start line for rank 1"):
        lineup()
    lineup.close()
