"""The results of one micro-batch: its loss, its gradients, its buffers, as hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash

from lockstep.checksum import checksum

__all__ = ["combine_hashes", "find_damaged", "hash_results"]

GRADIENT = "the gradient of "


def hash_results(
    losses: Sequence[torch.Tensor],
    gradients: Mapping[str, int],
    buffers: Mapping[str, torch.Tensor],
) -> dict[str, int]:
    """Return a hash of each result of one micro-batch, by its name in messages.

    Args:
        losses: The losses of its backward passes, not multiplied by its share.
        gradients: Hashes of the gradients of the parameters, before they are added to others.
        buffers: The buffers after it, by name.
    """
    hashes = [("the loss", checksum(loss)) for loss in losses]
    hashes += [(f"{GRADIENT}{name}", value) for name, value in gradients.items()]
    hashes += [(f"the buffer {name}", checksum(tensor)) for name, tensor in buffers.items()]
    return dict(hashes)


def find_damaged(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return the module in whose backward two computations differ first; None if it is not known.

    An error in forward shows in all gradients. The model itself is "".
    """
    wrong = [name for name, bits in one.items() if other.get(name) != bits]
    names = [name.removeprefix(GRADIENT) for name in wrong if name.startswith(GRADIENT)]
    if not names or len(names) + sum("input gradient" in name for name in wrong) < len(wrong):
        return None
    return names[-1].rpartition(".")[0]


def combine_hashes(hashes: Mapping[str, int]) -> str:
    """Return one hash of all results, their names and their order."""
    return xxhash.xxh3_64_hexdigest(repr([*hashes.items()]).encode())
