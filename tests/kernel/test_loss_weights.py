"""Rule 2: the shares of micro-batches in the loss of a batch."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.kernel.loss_weights import compute_shares, is_sum, share_by_size


def test_shares_are_parts_of_the_whole_and_leave_out_what_weighs_nothing():
    assert compute_shares({0: 1.0, 1: 0.0, 2: 3.0}) == {0: 0.25, 2: 0.75}


@given(st.integers(1, 500), st.data())
def test_shares_by_size_are_those_of_weights_that_count_samples(samples, data):
    shares = share_by_size(samples, data.draw(st.integers(1, samples)))
    assert sum(shares.values()) == pytest.approx(1)
    sizes = {microbatch: round(share * samples) for microbatch, share in shares.items()}
    assert shares == compute_shares(sizes)


def test_losses_that_add_are_not_scaled():
    assert is_sum(nn.MSELoss(reduction="sum"))
    assert is_sum(partial(nn.functional.mse_loss, reduction="sum"))
    assert not is_sum(nn.MSELoss())
    assert not is_sum(lambda outputs, targets: outputs.sum())
