"""Tensor files: safetensors, written piece by piece while a checksum is computed.

    | length of the header, 8 bytes | header: JSON of name -> dtype, shape, offsets | tensors ... |

The format is that of the library safetensors, which reads the files here and elsewhere. The
library's writer first copies all tensors into one object and blocks other threads meanwhile. This
writer writes pieces of the tensors' memory, so that training continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from typing import BinaryIO

import torch
import xxhash

from lockstep.kernel.buffers import as_bytes

__all__ = ["DTYPES", "checksum_file", "sort_tensors", "write_tensors"]

CHUNK = 1 << 20  # bytes that are read and hashed at a time, within a cache
PIECE = 8 << 20  # bytes that are written and hashed at a time

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def sort_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in the order of a file: large elements first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, torch.Tensor],
    check: Callable[[], None] = lambda: None,
    values: Iterable[torch.Tensor] | None = None,
) -> tuple[int, str]:
    """Write tensors in the format safetensors, each under its name.

    Args:
        file: The file, opened for writing.
        tensors: Contiguous tensors on the CPU, of the dtypes in `DTYPES`.
        check: Called before each piece; may raise to abandon the file.
        values: The values of the tensors in the order of `sort_tensors`, taken one by one; None:
            the tensors themselves. Otherwise only shapes and dtypes of `tensors` are used.

    Returns:
        The size of the file in bytes, and its checksum: 128-bit XXH3 in hex.
    """
    hasher = xxhash.xxh3_128()
    size = 0
    ordered = sort_tensors(tensors)
    for piece in _pieces(_header(ordered), ordered.values() if values is None else values):
        check()
        hasher.update(piece)
        size += len(piece)
        rest = memoryview(piece)
        while rest:  # an unbuffered file may write less, such as what fits on the disk
            rest = rest[file.write(rest) :]
    return size, hasher.hexdigest()


def checksum_file(file: FileIO) -> str:
    """Return the checksum of a file's content from its position to its end."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK))  # one for all chunks: page faults are slow
    while size := file.readinto(buffer):
        hasher.update(buffer[:size])
    return hasher.hexdigest()


def _pieces(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        if tensor.numel():
            octets = as_bytes(tensor).numpy().data
            for begin in range(0, len(octets), PIECE):
                yield octets[begin : begin + PIECE]


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
