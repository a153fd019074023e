"""Which ranks are missing is said in few words, by one rank, not too often."""

import pytest

from lockstep.launcher.environment import RankInfo
from lockstep.launcher.late_ranks import LongWait, advise_on_late_ranks, describe_ranks, is_speaker

HOST_0 = RankInfo(0, 8, 0, 2, 0, "10.0.0.1", 29500, "lockstep")


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ([2, 3], "host 1 (ranks 2 and 3 of 8)"),
        ([2, 3, 6, 7], "hosts 1 and 3 (ranks 2, 3, 6 and 7 of 8)"),
        ([2, 3, 4, 5, 6, 7], "hosts 1, 2 and 3 (ranks 2, 3, 4, 5, 6 and 7 of 8)"),
        ([3], "rank 3 of 8"),
        ([1, 2, 3], "ranks 1, 2 and 3 of 8"),
        ([0, 2, 3, 4, 5, 7], "ranks 0, 2, 3, 4, 5 and 7 of 8"),
    ],
)
def test_ranks_and_hosts_are_named(missing, text):
    assert describe_ranks(missing, HOST_0) == text


def test_hosts_are_not_named_where_ranks_do_not_tell_them():
    by_node = RankInfo(1, 4, 0, 2, 1, "10.0.0.1", 29500, "mpiexec")
    assert describe_ranks([2, 3], by_node) == "ranks 2 and 3 of 4"
    alone = RankInfo(0, 4, 0, 4, 0, launcher="lockstep")
    assert describe_ranks([0, 1, 2, 3], alone) == "ranks 0, 1, 2 and 3 of 4"


def test_what_to_check_depends_on_the_launcher():
    assert "lockstep run was started there with --node-rank 1" in advise_on_late_ranks(
        [2, 3], HOST_0
    )
    assert "with their own --node-rank" in advise_on_late_ranks([2, 3, 4, 5], HOST_0)
    assert "each with its own RANK, and can reach 10.0.0.1:29500" in advise_on_late_ranks(
        [3], HOST_0
    )
    assert advise_on_late_ranks([1], RankInfo(0, 2, 0, 2, launcher="srun")).startswith(
        "check their logs"
    )


@pytest.mark.parametrize("launcher", ["lockstep", "srun", "mpiexec", "environment"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_rank_speaks_for_each_terminal(launcher, size):
    ranks = [
        RankInfo(rank, 2 * size, rank % size, size, rank // size, "a", 1, launcher)
        for rank in range(2 * size)
    ]
    speakers = [info.rank for info in ranks if is_speaker(info)]
    assert speakers == ([2 * size - 1] if launcher in ("srun", "mpiexec") else [0, size])


def test_a_note_is_due_first_early_and_then_at_each_interval(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    wait = LongWait(100.0)
    notes = []
    for tenth in range(1000, 1500):
        now[0] = tenth / 10
        if wait.is_note_due():
            notes.append(now[0])
    assert notes == pytest.approx([103.0, 113.0, 123.0, 133.0, 143.0])
    assert (wait.waited, wait.left) == pytest.approx((49.9, 50.1))
