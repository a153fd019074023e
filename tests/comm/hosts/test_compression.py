"""Compression between hosts: lossless for every bit pattern, bf16 as torch rounds."""

import pytest
import torch

from lockstep.comm.hosts.compression import check_compression, make_codec
from lockstep.kernel.errors import UsageError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def random_bits(dtype, size):
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def round_trip(codec, values):
    buffer = torch.full((codec.bound(values.numel()),), 0xA5, dtype=torch.uint8)
    used = codec.encode(values, buffer)
    assert used.data_ptr() == buffer.data_ptr()
    found = torch.empty_like(values)
    codec.decode(buffer, found)  # the buffer is longer than the message, as the receiver's is
    return found, used.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 4097, 100_003])
def test_lossless_keeps_every_bit_pattern(dtype, size):
    pytest.importorskip("zstandard", reason="the extra 'compression' is not installed")
    codec = make_codec("lossless", dtype)
    values = random_bits(dtype, size)
    found, used = round_trip(codec, values)
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert used <= codec.bound(size)


def test_lossless_makes_gradients_smaller():
    pytest.importorskip("zstandard", reason="the extra 'compression' is not installed")
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    _, used = round_trip(make_codec("lossless", torch.float32), values)
    assert used < 0.9 * values.nbytes


def test_a_damaged_message_raises():
    pytest.importorskip("zstandard", reason="the extra 'compression' is not installed")
    codec = make_codec("lossless", torch.float32)
    original = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    buffer = torch.zeros(codec.bound(5000), dtype=torch.uint8)
    values, noticed = torch.zeros(5000), 0
    for place in [*range(12), *range(40, 18_000, 97)]:
        used = codec.encode(original, buffer)
        used[place] ^= 0xFF
        try:
            codec.decode(used, values)
        except ValueError:
            noticed += 1
        else:  # some bits of the header have no meaning
            assert torch.equal(values, original), place
    assert noticed > 180


def test_bf16_rounds_as_torch_does():
    codec = make_codec("bf16", torch.float32)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    found, used = round_trip(codec, values)
    assert torch.equal(found, values.bfloat16().float())
    assert used == values.nbytes // 2
    assert not codec.is_lossless


def test_bf16_leaves_other_dtypes_alone():
    assert [make_codec("bf16", dtype) for dtype in DTYPES[1:]] == [None] * 3


def test_an_unknown_compression_is_refused():
    with pytest.raises(UsageError, match="'zip'"):
        check_compression("zip")
    check_compression(None)
    check_compression("bf16")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"torch-lockstep\[compression\]"):
        check_compression("lossless")
