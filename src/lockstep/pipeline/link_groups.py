"""The process groups of a pipeline's links on an accelerator.

NCCL and the backends like it run the messages between two ranks of a group one after another, in
the order of the calls, and ignore their tags: two ranks that call in different orders wait for
each other forever. The schedule fixes the order of the messages on one link, but not that of the
links of two ranks: one sends activations while the other sends gradients. So each link between the
same two ranks is in a group of its own, and has its own connection and stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lockstep.devices import is_accelerator

__all__ = ["assign_groups", "make_groups"]


def assign_groups(links: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the number of the group of each link.

    Args:
        links: The two ranks of each link of the world, by its tag.

    Returns:
        Numbers from 0, by tag; no two links of one group connect the same two ranks.
    """
    used: Counter[tuple[int, ...]] = Counter()
    numbers = {}
    for tag, ranks in links.items():
        pair = tuple(sorted(ranks))
        numbers[tag] = used[pair]
        used[pair] += 1
    return numbers


def make_groups(links: Mapping[int, tuple[int, int]], device: torch.device) -> dict[int, Any]:
    """Return the group of each link by its tag; on the CPU, where tags count, the default group.

    All ranks of the world must call this in the same order, because they create the groups
    together.
    """
    if not is_accelerator(device):
        return dict.fromkeys(links, dist.group.WORLD)
    numbers = assign_groups(links)
    groups = [dist.new_group() for _ in range(max(numbers.values(), default=-1) + 1)]
    return {tag: groups[number] for tag, number in numbers.items()}
