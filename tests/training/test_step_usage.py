"""The times and the memory of the ranks in a step."""

import json

from lockstep.kernel.rank_status import DETAILED_RANKS
from lockstep.training.step_usage import RankTimes, RankUsage


def usage(rank, compute=3.0, data=0.0, idle=0.0):
    return RankUsage.of(RankTimes(rank, compute, data, idle, 100 + rank))


def test_waiting_is_the_time_until_the_last_rank_arrived():
    found = usage(0).merge(usage(1, compute=4.0, data=0.5, idle=0.5))
    by_first = found.compute_rows(arrived=3.0, exchanged=2.5, reduced=1.0, updated=0.5)
    by_second = found.compute_rows(arrived=5.0, exchanged=0.5, reduced=1.0, updated=0.5)
    assert by_first == by_second == [[3.5, 1.5, 2.0, 0.0], [4.5, 1.5, 0.5, 0.5]]
    assert found.list_memory() == [100, 101]
    assert RankUsage.unpack(json.loads(json.dumps(found))) == found


def test_many_ranks_have_rows_of_the_first_ones_and_wait_for_all():
    found = usage(0)
    for rank in range(1, 2 * DETAILED_RANKS):
        found = found.merge(usage(rank, compute=9.0 if rank == 100 else 1.0))
    rows = found.compute_rows(3.0, 6.0, 0.0, 0.0)
    assert len(rows) == len(found.list_memory()) == DETAILED_RANKS
    assert rows[1] == [1.0, 0.0, 8.0, 0.0]
