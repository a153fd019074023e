from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.agreement import DIFFERENCES, Description, check
from lockstep.errors import DisagreementError

HERE = Description(1, 1000, 32, 8, 7, 2, 0, 32, bytes(range(16)))
whole = st.integers(-1, 2**63 - 1)


@given(st.builds(Description, *[whole] * 8, st.binary(min_size=16, max_size=16)))
def test_a_description_survives_the_exchange(description: Description) -> None:
    assert Description.unpacked(description.packed()) == description
    assert len(description.packed()) == len(HERE.packed())


def test_ranks_that_agree_pass() -> None:
    check([HERE.packed()] * 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ready": 0}, "rank 2 could not make its order"),
        ({"samples": 900}, "rank 2 has a dataset of 900 samples, rank 0 one of 1000"),
        ({"batch_size": 64}, "rank 2 has batch size 64, rank 0 32"),
        ({"microbatches": 4}, "rank 2 cuts a batch into 4 micro-batches, rank 0 into 8"),
        ({"seed": 8}, "rank 2 has seed 8, rank 0 7"),
        ({"epoch": 3}, "rank 2 is in epoch 3, rank 0 in epoch 2"),
        ({"position": 5}, "rank 2 begins at batch 5, rank 0 at batch 0"),
        ({"batches": 31}, "rank 2 has 31 batches in the epoch, rank 0 32"),
        ({"order": bytes(16)}, "rank 2 goes through the samples in another order than rank 0"),
    ],
)
def test_the_rank_and_the_difference_are_named(change: dict[str, int], words: str) -> None:
    other = replace(HERE, **change)
    with pytest.raises(DisagreementError, match=words):
        check([HERE.packed(), HERE.packed(), other.packed(), HERE.packed()])


def test_rank_0_is_named_where_it_is_the_odd_one() -> None:
    with pytest.raises(DisagreementError, match="rank 0 has seed 1, rank 1 7"):
        check([replace(HERE, seed=1).packed(), HERE.packed(), HERE.packed()])


def test_of_two_ranks_the_second_differs() -> None:
    with pytest.raises(DisagreementError, match="rank 1 has seed 1"):
        check([HERE.packed(), replace(HERE, seed=1).packed()])


def test_every_field_has_a_sentence() -> None:
    assert list(DIFFERENCES) == [field.name for field in fields(Description)]
