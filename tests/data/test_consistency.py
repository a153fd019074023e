from dataclasses import fields, replace

import pytest

from lockstep.data.consistency import DIFFERENCES, EpochSummary, require_same_epoch
from lockstep.kernel.errors import DisagreementError

HERE = EpochSummary(True, 1000, 32, False, 8, 7, 2, 0, 32, "0f" * 16)


def test_equal_summaries_pass_and_one_that_differs_raises() -> None:
    equal = [HERE.pack()] * 3
    require_same_epoch(equal)
    with pytest.raises(DisagreementError, match="rank 3 has seed 1, rank 0"):
        require_same_epoch([*equal, replace(HERE, seed=1).pack()])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ready": False}, "rank 2 could not determine its order"),
        ({"samples": 900}, "rank 2 has a dataset of 900 samples, rank 0 one of 1000"),
        ({"batch_size": 64}, "rank 2 has batch size 64, rank 0 32"),
        ({"drop_last": True}, "rank 2 has drop_last=True, rank 0 drop_last=False"),
        ({"microbatches": 4}, "rank 2 splits a batch into 4 micro-batches, rank 0 into 8"),
        ({"seed": 8}, "rank 2 has seed 8, rank 0 7"),
        ({"epoch": 3}, "rank 2 is in epoch 3, rank 0 in epoch 2"),
        ({"position": 5}, "rank 2 starts at batch 5, rank 0 at batch 0"),
        ({"batches": 31}, "rank 2 has 31 batches in the epoch, rank 0 32"),
        ({"order": "00" * 16}, "rank 2 has a different order of the samples than rank 0"),
    ],
)
def test_the_rank_and_the_difference_are_named(change: dict[str, int], words: str) -> None:
    other = replace(HERE, **change)
    with pytest.raises(DisagreementError, match=words):
        require_same_epoch([HERE.pack(), HERE.pack(), other.pack(), HERE.pack()])


def test_rank_0_is_named_where_it_is_the_odd_one() -> None:
    with pytest.raises(DisagreementError, match="rank 0 has seed 1, rank 1 7"):
        require_same_epoch([replace(HERE, seed=1).pack(), HERE.pack(), HERE.pack()])


def test_of_two_ranks_the_second_differs() -> None:
    with pytest.raises(DisagreementError, match="rank 1 has seed 1"):
        require_same_epoch([HERE.pack(), replace(HERE, seed=1).pack()])


def test_every_field_has_a_sentence() -> None:
    assert list(DIFFERENCES) == [field.name for field in fields(EpochSummary)]
