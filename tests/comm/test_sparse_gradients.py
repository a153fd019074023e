"""Sparse gradients over ranks, against the sums of their dense forms."""

import pytest
import torch

from averaging import tree_mean
from lockstep.comm.sparse_gradients import average_sparse_gradients

RANKS = 3
MODELS = {0: torch.empty(6, 4), 3: torch.empty(5, 2, 3, dtype=torch.float64), 7: torch.empty(2, 2)}


def gradients_of(rank):
    """Rows twice and out of order; gradient 3 on two ranks only, one of them dense; 7 nowhere."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 6, (1, 5 * rank), generator=generator)
    rows = torch.randn(5 * rank, 4, generator=generator)
    found = {
        0: torch.sparse_coo_tensor(indices, rows, (6, 4), check_invariants=True),
        3: None,
        7: None,
    }
    if rank:
        values = torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
        found[3] = values if rank == 1 else values.to_sparse(2)
    return found


def means(rank, new):
    found = average_sparse_gradients(gradients_of(rank), new, MODELS)
    return {number: (mean.is_coalesced(), mean.to_dense()) for number, mean in found.items()}


@pytest.mark.ranks(RANKS, backend=("gloo", "lockstep"))
def test_the_mean_is_along_the_tree_over_the_ranks(rank):
    found = means(rank, {0, 3})
    assert sorted(found) == [0, 3]
    for number, (coalesced, mean) in found.items():
        parts = [gradients_of(rank)[number] for rank in range(RANKS)]
        parts = [p.coalesce().to_dense() if p is not None and p.is_sparse else p for p in parts]
        assert coalesced
        assert torch.equal(mean, tree_mean(parts))


@pytest.mark.ranks(RANKS)
def test_what_nobody_has_anew_is_left_alone(rank):
    """Rank 2 alone has gradient 3 anew; gradient 0 is of before everywhere."""
    assert sorted(means(rank, {3} if rank == 2 else set())) == [3]
    assert means(rank, set()) == {}
