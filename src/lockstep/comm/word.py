"""A word that all ranks see change at once: one element of an int64 tensor in shared memory.

For what must be decided once, however ranks end (a step is committed, or it is not):

    rank a   writes its part ... compare_exchange(word, 0, OPEN, COMMITTED)
    rank b   load(word, 0) == COMMITTED, so it sees all that rank a wrote before

A store releases and a load acquires: what a rank wrote before it stored is seen by
whoever loads that value. The tensor comes from `lockstep.comm.memory.shared`.
Needs the native module; ValueError unless the tensor is int64, contiguous and on
the CPU, IndexError where it has no such element.
"""

from __future__ import annotations

import torch

from lockstep.comm import backend

__all__ = ["compare_exchange", "load", "store"]


def load(tensor: torch.Tensor, index: int) -> int:
    """Return the word at `index`."""
    return int(backend.load().load(tensor, index))


def store(tensor: torch.Tensor, index: int, value: int) -> None:
    """Set the word at `index`."""
    backend.load().store(tensor, index, value)


def compare_exchange(tensor: torch.Tensor, index: int, expected: int, desired: int) -> int:
    """Set the word to `desired` if it is `expected`, as one act; return what it was before."""
    return int(backend.load().compare_exchange(tensor, index, expected, desired))
