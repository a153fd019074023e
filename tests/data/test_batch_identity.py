import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.consistency import BatchIdentity, require_same_batch, unpack_identity
from lockstep.kernel.errors import DisagreementError

LOADED = BatchIdentity(epoch=2, position=5, order="ab12")
WHOLE = BatchIdentity(checksum="cd34")
words = st.text("0123456789abcdef", max_size=16)


@given(st.builds(BatchIdentity, st.integers(-1, 10**9), st.integers(-1, 10**9), words, words))
def test_an_identity_survives_the_exchange(identity: BatchIdentity) -> None:
    assert unpack_identity(identity.pack()) == identity


@pytest.mark.parametrize("identity", [LOADED, WHOLE, BatchIdentity()])
def test_equal_identities_pass_and_one_that_differs_raises(identity: BatchIdentity) -> None:
    equal = [identity.pack()] * 3
    require_same_batch(equal, 0)
    with pytest.raises(DisagreementError, match="in step 0, rank 3"):
        require_same_batch([*equal, BatchIdentity(epoch=9, position=9).pack()], 0)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            LOADED,
            BatchIdentity(2, 6, "ab12"),
            "rank 2 trains on batch 6 of epoch 2 while",
        ),
        (
            LOADED,
            BatchIdentity(3, 5, "ab12"),
            "trains on batch 5 of epoch 3 while rank 0 trains on",
        ),
        (
            LOADED,
            BatchIdentity(2, 5, "ab13"),
            "rank 2 trains on .* with a different order of the samples than",
        ),
        (
            WHOLE,
            BatchIdentity(checksum="0f"),
            r"rank 2 got a different batch .* \(checksums 0f and cd",
        ),
        (WHOLE, BatchIdentity(checksum="0f"), "DistributedSampler, .* use batches"),
        (
            LOADED,
            WHOLE,
            "rank 2 trains on a batch with checksum cd34 while rank 0 trains on batch 5",
        ),
        (LOADED, BatchIdentity(), "rank 2 trains on a batch from a driver while"),
    ],
)
def test_the_rank_and_the_difference_are_named(
    ours: BatchIdentity, theirs: BatchIdentity, words: str
) -> None:
    with pytest.raises(DisagreementError, match=f"in step 7, .*{words}"):
        require_same_batch([ours.pack(), ours.pack(), theirs.pack(), ours.pack()], 7)
