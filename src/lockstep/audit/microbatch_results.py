"""The results of one micro-batch: its loss, its gradients, its buffers, and their hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from lockstep.checksum import checksum

__all__ = ["MicrobatchResults", "combine_hashes", "hash_results"]


class MicrobatchResults(NamedTuple):
    """The results of one micro-batch on one rank.

    Attributes:
        losses: The losses of its backward passes, not multiplied by its share.
        gradients: The gradients of the parameters, by name, before they are added to others.
        buffers: The buffers after it, by name.
    """

    losses: Sequence[torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors in a fixed order, with their names in messages."""
        yield from (("the loss", loss) for loss in self.losses)
        for name, tensor in self.gradients.items():
            yield f"the gradient of {name}", tensor
        for name, tensor in self.buffers.items():
            yield f"the buffer {name}", tensor


def hash_results(results: MicrobatchResults) -> dict[str, int]:
    """Return a hash of each result, by its name in messages."""
    return {name: checksum(tensor) for name, tensor in results.named_tensors()}


def combine_hashes(hashes: Mapping[str, int]) -> str:
    """Return one hash of all results, their names and their order."""
    return xxhash.xxh3_64_hexdigest(repr([*hashes.items()]).encode())
