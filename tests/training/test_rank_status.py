"""The status of ranks: what all ranks conclude from it."""

import math

import pytest
import torch.distributed as dist

from lockstep.model.step_context import MicrobatchResult, StepLabel
from lockstep.training.rank_status import (
    RankStatus,
    average_metrics,
    exchange_statuses,
    find_non_finite,
    sum_losses,
)


def status(*results, buffers=()):
    return RankStatus(list(results), list(buffers), compute=0.5, data=0.25, memory=7)


def test_statuses_arrive_with_every_bit(ranks):
    def swap():
        rank = dist.get_rank()
        values = [1 / 3, 5e-324, math.inf, -0.0]
        entry = MicrobatchResult(
            leaf=rank, size=3, share=0.1, loss=values[rank], metrics={"é": 1e300 / 7}
        )
        entries = [] if rank == 2 else [entry] * 40  # longer than the first message, and empty
        return exchange_statuses(
            status(*entries, buffers=["differ"] * rank), StepLabel(1, "in step 1", "", "")
        )

    found = ranks(swap, 3)
    assert found[0] == found[1] == found[2]
    for rank, each in enumerate(found[0]):
        assert each.buffers == ["differ"] * rank
        assert len(each.microbatches) == (0 if rank == 2 else 40)
        for entry in each.microbatches:
            assert entry.metrics == {"é": 1e300 / 7}
    assert found[0][0].microbatches[0].loss == 1 / 3
    assert found[0][1].microbatches[0].loss == 5e-324


def test_the_loss_is_added_along_the_tree():
    terms = [1e16, 1.0, 1.0, 1.0, -1e16]
    entries = [MicrobatchResult(leaf, 1, 1.0, loss) for leaf, loss in enumerate(terms)]
    expected = ((1e16 + 1.0) + (1.0 + 1.0)) - 1e16
    assert expected != sum(terms)
    assert sum_losses([status(*entries[3:]), status(*entries[:3])], 5) == expected


def test_micro_batches_that_were_left_out_add_nothing():
    assert sum_losses([status(MicrobatchResult(1, 4, 0.5, 3.0))], 3) == 1.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_non_finite_loss_is_found_with_its_rank(value):
    good, bad = MicrobatchResult(0, 1, 0.5, 1.0), MicrobatchResult(3, 1, 0.5, value)
    later = MicrobatchResult(4, 1, 0.5, math.nan)
    assert find_non_finite([status(good)]) is None
    assert find_non_finite([status(good), status(bad, later)]) == (1, bad)


def test_metrics_are_means_over_the_samples():
    statuses = [
        status(MicrobatchResult(0, 3, 0.0, 0.0, {"hit": 1.0})),
        status(MicrobatchResult(1, 1, 0.0, 0.0, {"hit": 0.0, "rare": 5.0})),
    ]
    assert average_metrics(statuses) == {"hit": 0.75, "rare": 5.0}
    assert average_metrics([status()]) == {}
