"""Sparse gradients over ranks, against the sums of their dense forms."""

import pytest
import torch

from lockstep.comm.sparse_gradients import sum_sparse_gradients
from lockstep.kernel import spec

RANKS = 3
MODELS = {0: torch.empty(6, 4), 3: torch.empty(5, 2, 3, dtype=torch.float64), 7: torch.empty(2, 2)}


def gradients_of(rank):
    """Rows twice and out of order; gradient 3 on two ranks only, one of them dense; 7 nowhere."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 6, (1, 5 * rank), generator=generator)
    rows = torch.randn(5 * rank, 4, generator=generator)
    found = {
        0: torch.sparse_coo_tensor(indices, rows, (6, 4), check_invariants=True).coalesce(),
        3: None,
        7: None,
    }
    if rank:
        values = torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
        found[3] = values if rank == 1 else values.to_sparse(1).coalesce()
    return found


@pytest.mark.ranks(RANKS, backend=("gloo", "lockstep"))
def test_the_sum_is_along_the_tree_over_the_ranks(rank):
    held = {(rank, rank + 1): gradients_of(rank)}
    found = sum_sparse_gradients(held, [0, 3], RANKS, MODELS)
    for number in (0, 3):
        parts = [gradients_of(rank)[number] for rank in range(RANKS)]
        dense = [part if part is None else part.to_dense() for part in parts]
        total = found[number]
        assert total.is_coalesced() if number == 0 else not total.is_sparse
        assert torch.equal(total.to_dense(), spec.tree(dense))
