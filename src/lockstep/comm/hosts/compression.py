"""Compression of the sums of gradients that hosts send to each other.

    lossless   bytes are sorted into planes, so that the exponents, which repeat, lie together;
               then zstd           s eeeeeeee mmm...  ->  eeeeeeee mmmmmmmm mmmmmmmm mmmmmmms
    bf16       float32 is rounded to bfloat16: half the bytes

Lossless compression changes no bit of the sums. With bf16, each sum that crosses to another host is
rounded, and so is every result, also where it was computed, so that all ranks have the same bits.
The bits then depend on which ranks share a host.
"""

from __future__ import annotations

from typing import Protocol

import torch

from lockstep.kernel.errors import UsageError

__all__ = ["COMPRESSIONS", "Codec", "check_compression", "make_codec"]

COMPRESSIONS = (None, "lossless", "bf16")
"""The values of the argument `compression` of `lockstep.init`."""

LEVEL = 1
"""The level of zstd: higher ones gain less than 1 % on gradients."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Codec(Protocol):
    """A compression of vectors of one dtype."""

    is_lossless: bool

    def bound(self, size: int) -> int:
        """Return the most bytes that `size` elements take."""

    def encode(self, values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Compress values into a buffer of `bound` bytes; return the part that is used."""

    def decode(self, buffer: torch.Tensor, values: torch.Tensor) -> None:
        """Decompress what `encode` wrote at the beginning of a buffer, into `values`."""


def check_compression(name: str | None) -> None:
    """Raise UsageError if there is no such compression here."""
    if name not in COMPRESSIONS:
        raise UsageError(f'compression must be None, "lossless" or "bf16", not {name!r}')
    if name == "lossless":
        try:
            import zstandard  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except ImportError:
            raise UsageError(
                'compression="lossless" needs the package zstandard: pip install '
                '"torch-lockstep[compression]"'
            ) from None


def make_codec(name: str | None, dtype: torch.dtype) -> Codec | None:
    """Return the codec of a compression for a dtype; None if it is not compressed."""
    if name == "lossless" and dtype.itemsize in INTEGERS:
        return LosslessCodec(dtype)
    if name == "bf16" and dtype == torch.float32:
        return Bf16Codec()
    return None


class Bf16Codec:
    """Rounds float32 to bfloat16: to nearest, ties to even."""

    is_lossless = False

    def bound(self, size: int) -> int:
        """Return the bytes of `size` elements."""
        return 2 * size

    def encode(self, values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Round the values into a buffer."""
        used = buffer[: 2 * values.numel()]
        used.view(torch.bfloat16).copy_(values)
        return used

    def decode(self, buffer: torch.Tensor, values: torch.Tensor) -> None:
        """Widen the values in a buffer."""
        values.copy_(buffer[: 2 * values.numel()].view(torch.bfloat16))


class LosslessCodec:
    """Sorts the bytes of floating-point values into planes, and compresses them by zstd.

    Args:
        dtype: The dtype of the values.
    """

    is_lossless = True

    def __init__(self, dtype: torch.dtype) -> None:
        import zstandard

        self._item = dtype.itemsize
        # Without a checksum, damaged bytes that are stored as they are would be values.
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        self._decompressor = zstandard.ZstdDecompressor()

    def bound(self, size: int) -> int:
        """Return the most bytes of a frame: as zstd states it, with a margin."""
        raw = size * self._item
        return raw + (raw >> 7) + 1024

    def encode(self, values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Write a frame, which states its own length, into a buffer."""
        integers = values.view(INTEGERS[self._item])
        last = 8 * self._item - 1
        rotated = integers << 1 | integers >> last & 1  # the sign moves to the end
        planes = rotated.view(torch.uint8).view(-1, self._item).t().contiguous()
        frame = self._compressor.compress(planes.numpy().data)
        used = buffer[: len(frame)]
        used.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        return used

    def decode(self, buffer: torch.Tensor, values: torch.Tensor) -> None:
        """Read a frame, which the rest of the buffer follows.

        Raises:
            ValueError: It is not a frame of as many values.
        """
        import zstandard

        data, size = buffer.numpy().data, values.nbytes
        try:
            if zstandard.frame_content_size(data) != size:
                raise ValueError(f"a compressed message does not have {size} bytes of values")
            content = bytearray(self._decompressor.decompress(data))
        except zstandard.ZstdError as error:
            raise ValueError(f"a compressed message is damaged: {error}") from None
        planes = torch.frombuffer(content, dtype=torch.uint8).view(self._item, -1)
        rotated = planes.t().contiguous().view(-1).view(INTEGERS[self._item])
        last = 8 * self._item - 1
        low = rotated >> 1 & (1 << last) - 1  # a logical shift
        values.view(INTEGERS[self._item]).copy_(low | rotated << last)
