"""The settings of an epoch are compared between ranks."""

import pytest

from lockstep.data.consistency import ORDER, pack_described, require_same_epoch
from lockstep.kernel.errors import DisagreementError

HERE = {"number of samples": 1000, "batch_size": 32, "epoch": 2, ORDER: "0f" * 16}
CHANGED = HERE | {"epoch": 3}


@pytest.mark.parametrize(
    ("everyone", "words"),
    [
        ([HERE, HERE, CHANGED, HERE], "rank 2: epoch is 3, on rank 0 it is 2"),
        ([CHANGED, HERE, HERE], "rank 0: epoch is 3, on rank 1 it is 2"),
        ([HERE, CHANGED], "rank 1: epoch is 3, on rank 0 it is 2"),
        ([HERE, HERE | {ORDER: ""}], "rank 1 has a different order of the samples than rank 0"),
        ([HERE, {}, HERE], "rank 1 could not determine its order"),
        ([{}, {}, HERE], "rank 0 could not determine its order"),
    ],
)
def test_the_rank_and_the_difference_are_named(everyone, words: str) -> None:
    require_same_epoch([pack_described(HERE)] * len(everyone))
    with pytest.raises(DisagreementError, match=words):
        require_same_epoch([pack_described(settings) for settings in everyone])
