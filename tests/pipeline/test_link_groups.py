"""The groups of links: none connects two ranks by more than one link."""

from __future__ import annotations

import torch

from lockstep.pipeline.pipeline import assign_groups, make_groups


def test_links_of_the_same_two_ranks_are_in_different_groups():
    # Two ranks with two stages each: activations and gradients of three boundaries.
    links = {tag: (tag // 2 % 2, 1 - tag // 2 % 2) for tag in range(2, 8)}
    assert sorted(assign_groups(links).values()) == list(range(6))
    # Four ranks with one stage each need two groups: one per direction.
    chain = {2 * rank + way: (rank, rank + 1) for rank in range(3) for way in (0, 1)}
    numbers = assign_groups(chain)
    assert [numbers[tag] for tag in sorted(chain)] == [0, 1] * 3


def test_no_group_is_created_on_the_cpu(world_of_one):
    links = {2: (0, 1), 3: (0, 1)}
    assert make_groups(links, torch.device("cpu")) == dict.fromkeys(
        links, torch.distributed.group.WORLD
    )
