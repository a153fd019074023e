"""The ledger: what all ranks conclude from their pages."""

import math

import pytest
import torch.distributed as dist

from lockstep.model.ledger import Entry, Page, exchange, mean_metrics, not_finite, total_loss


def page(*entries, buffers=()):
    return Page(entries=list(entries), buffers=list(buffers), compute=0.5, data=0.25, memory=7)


def test_pages_arrive_with_every_bit(ranks):
    def swap():
        rank = dist.get_rank()
        values = [1 / 3, 5e-324, math.inf, -0.0]
        entry = Entry(leaf=rank, size=3, share=0.1, loss=values[rank], metrics={"é": 1e300 / 7})
        entries = [] if rank == 2 else [entry] * 40  # longer than a page, and empty
        return exchange(page(*entries, buffers=["differ"] * rank), "in step 1")

    found = ranks(swap, 3)
    assert found[0] == found[1] == found[2]
    for rank, each in enumerate(found[0]):
        assert each.buffers == ["differ"] * rank
        assert len(each.entries) == (0 if rank == 2 else 40)
        for entry in each.entries:
            assert entry.metrics == {"é": 1e300 / 7}
    assert found[0][0].entries[0].loss == 1 / 3
    assert found[0][1].entries[0].loss == 5e-324


def test_the_loss_is_added_along_the_tree():
    terms = [1e16, 1.0, 1.0, 1.0, -1e16]
    entries = [Entry(leaf, 1, 1.0, loss) for leaf, loss in enumerate(terms)]
    expected = ((1e16 + 1.0) + (1.0 + 1.0)) - 1e16
    assert expected != sum(terms)
    assert total_loss([page(*entries[3:]), page(*entries[:3])], 5) == expected


def test_leaves_that_were_left_out_add_nothing():
    assert total_loss([page(Entry(1, 4, 0.5, 3.0))], 3) == 1.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_no_number_is_found_with_its_rank(value):
    good, bad = Entry(0, 1, 0.5, 1.0), Entry(3, 1, 0.5, value)
    later = Entry(4, 1, 0.5, math.nan)
    assert not_finite([page(good)]) is None
    assert not_finite([page(good), page(bad, later)]) == (1, bad)


def test_metrics_are_means_over_the_samples():
    pages = [
        page(Entry(0, 3, 0.0, 0.0, {"hit": 1.0})),
        page(Entry(1, 1, 0.0, 0.0, {"hit": 0.0, "rare": 5.0})),
    ]
    assert mean_metrics(pages) == {"hit": 0.75, "rare": 5.0}
    assert mean_metrics([page()]) == {}
