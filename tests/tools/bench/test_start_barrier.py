"""Start barrier: no rank passes before the last one has arrived."""

from __future__ import annotations

import threading

import pytest

from lockstep.tools.bench.start_barrier import StartBarrier


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_no_rank_passes_before_the_last_arrives(tmp_path, ranks):
    path = str(tmp_path / "line")
    turns = 200
    came = [0] * ranks
    early = []
    StartBarrier.prepare(path, ranks)

    def go(rank: int) -> None:
        start_barrier = StartBarrier(path, rank, ranks, timeout=10.0)
        for turn in range(1, turns + 1):
            came[rank] = turn
            start_barrier.wait()
            early.extend(other for other in range(ranks) if came[other] < turn)
        start_barrier.close()

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [turns] * ranks
    assert early == []


def test_timeout_names_missing_rank(tmp_path):
    path = str(tmp_path / "line")
    StartBarrier.prepare(path, 3)
    start_barrier = StartBarrier(path, 0, 3, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.05 s at the start barrier for rank 1"):
        start_barrier.wait()
    start_barrier.close()
