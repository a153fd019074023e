"""Checksums: equal exactly where dtype, shape and bits are."""

import pytest
import torch

from lockstep.checksum import checksum

VALUES = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def test_equal_bits_have_equal_checksums_however_they_lie():
    assert checksum(VALUES) == checksum(VALUES.clone())
    assert checksum(VALUES) == checksum(VALUES.t().contiguous().t())
    assert checksum(VALUES) == checksum(torch.stack([VALUES, VALUES], dim=2)[:, :, 0])


@pytest.mark.parametrize(
    "other",
    [
        VALUES.flip(0),
        VALUES.reshape(4, 3),
        VALUES.to(torch.float64),
        VALUES.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(5.0000005)),
        VALUES.view(torch.int32),
    ],
    ids=["order", "shape", "dtype", "one bit", "same bytes"],
)
def test_a_difference_shows(other):
    assert checksum(VALUES) != checksum(other)


def test_negative_zero_is_not_zero():
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
        lambda x: x.to(torch.bfloat16),
        lambda x: x[:, :0],
        lambda x: x.to("meta"),
    ],
    ids=["coo", "csr", "csc", "conjugate", "quantized", "bfloat16", "empty", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_every_kind_of_tensor_has_one(make):
    assert checksum(make(VALUES)) == checksum(make(VALUES.clone()))
    if make(VALUES).numel() and not make(VALUES).is_meta:
        assert checksum(make(VALUES)) != checksum(make(VALUES + 1))
