"""The memory and the traffic of each storage, computed from the memory of one rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.plan.memory_plan import TrainingMemory, choose, count_sums, plan_storages

TRAINING = TrainingMemory(
    parameters=1000,
    gradients=800,  # 200 bytes are frozen
    optimizer=1600,
    activations=50,
    unused=40,
    process=30,
    shared=12,
    leaves=8,
    blocks=(100, 300, 200, 400),
    outputs=(7, 8, 9, 10),
)


def plan(hosts=1, ranks=1, **changes):
    """Return the plans by argument of the trainer."""
    plans = plan_storages(replace(TRAINING, **changes), hosts, ranks)
    return {made.argument.split("(")[-1].removeprefix("storage="): made for made in plans}


@given(st.integers(1, 70))
def test_one_rank_holds_the_digits_of_a_binary_counter(leaves):
    # The sums that wait before leaf m are the ones in the binary digits of m.
    assert count_sums(range(leaves), leaves) == 1 + max(m.bit_count() for m in range(leaves))


@pytest.mark.parametrize(
    ("span", "most"),
    [(range(0), 0), (range(3, 4), 1), (range(4, 8), 3), (range(3, 6), 3), (range(1, 4), 3)],
)
def test_sums_of_a_rank_among_others(span, most):
    assert count_sums(span, 8) == most


def test_one_rank_holds_what_was_measured():
    made = plan()['"replicated"']
    assert (made.parameters, made.gradients, made.optimizer) == (1000, 4 * 800, 1600)
    # Half of the shared pages: the fork server has them, too.
    assert made.rank == made.host == 1000 + 3200 + 1600 + 50 + 40 + 30 + 6
    assert (made.local, made.network) == (0, 0)


def test_ranks_of_a_host_share_parameters_and_optimizer_but_not_gradients():
    replicated = plan(ranks=2)['"replicated"']
    shared = plan(ranks=2)['"shared"']
    # Three lists while the fourth micro-batch is computed, and the buckets.
    assert replicated.gradients == shared.gradients == (3 + 1) * 800
    assert (replicated.parameters, replicated.optimizer) == (1000, 1600)
    assert (shared.parameters, shared.optimizer) == (500, 800)
    assert shared.host == 2 * shared.rank
    assert shared.process == 30 + 12 // 3
    # Unused memory was measured with parameters and 4 lists, and a rank has 3 beside its bucket.
    assert shared.activations == 50 + 40 * (1 + 3) // (1 + 4)


def test_storages_that_the_optimizer_or_the_backend_excludes_are_refused():
    reasons = {"shared": "no backend", "sharded": "no elements"}
    plans = plan(ranks=2, refusals=reasons)
    refusals = {name.strip('"'): made.refusal for name, made in plans.items()}
    assert {name: reason for name, reason in refusals.items() if name in reasons} == reasons


def test_three_ranks_have_a_bucket_per_node():
    # Rank 1 has the micro-batches 3 to 5, whose nodes are 3 and 4-5.
    assert plan(ranks=3)['"replicated"'].gradients == (3 + 2) * 800


def test_sharded_parameters_are_gathered_block_by_block():
    made = plan(hosts=2, ranks=4, parameters=1100, blocks=(200,) * 5)['"sharded"']
    # Those outside of blocks, and two blocks with the buffers in which they arrive.
    assert made.parameters == 1100 // 4 + 100 + 4 * 200
    # Two turns: the shard of the first one waits. Of a block, gradients are sent and received.
    assert made.gradients == 2 * 800 // 4 + 3 * 200 * 800 // 1100
    assert made.optimizer == 1600 // 4
    assert made.activations == 50
    # Per turn and rank, each other rank's part of parameters twice, and of gradients.
    sent = 2 * (2 * 1100 + 800) // 4
    assert (made.local, made.network) == (2 * sent, 2 * 2 * sent)


def test_hybrid_parameters_are_sharded_on_each_host():
    made = plan(hosts=2, ranks=4, parameters=1100)['"hybrid"']
    assert made.parameters == 1100 // 2 + 1100
    # A rank has the node of its two turns, in its bucket and before it.
    assert made.gradients == (2 + 1) * 800 // 2 + 3 * 400 * 800 // 1100
    assert made.optimizer == 1600 // 2
    # Per turn and rank, the other rank's part; at the end, gradients once to the other host.
    assert (made.local, made.network) == (2 * 2 * (2 * 1100 + 800) // 2, 800)
    assert '"hybrid"' not in plan(hosts=1, ranks=4) | plan(hosts=2, ranks=2)


@pytest.mark.parametrize("ranks", [3, 6, 16])
def test_sharding_needs_a_power_of_two(ranks):
    reason = "the number of ranks must be a power of two that divides 8 micro-batches"
    assert plan(ranks=ranks)['"sharded"'].refusal == reason


def test_a_model_without_blocks_is_gathered_as_a_whole():
    made = plan(ranks=2, blocks=())['"sharded"']
    assert made.parameters == 1000 // 2 + 1000


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_traffic_in_memory_is_that_of_a_ring(ranks):
    plans = plan(ranks=ranks)
    assert plans['"replicated"'].local == 2 * (ranks - 1) * 800
    assert plans['"shared"'].local == (ranks - 1) * 800


@pytest.mark.parametrize(("hosts", "sent"), [(1, 0), (2, 800), (4, 2 * 3 * 800 // 4)])
def test_traffic_between_hosts_is_that_of_a_ring_of_hosts(hosts, sent):
    assert plan(hosts=hosts, ranks=8)['"replicated"'].network == sent


def test_what_cannot_be_used_is_refused():
    assert plan(hosts=2, ranks=4)['"shared"'].refusal == "all ranks must be on one host"
    refused = plan(ranks=16)
    reason = "16 replicas cannot share 8 micro-batches"
    assert refused['"replicated"'].refusal == refused['"shared"'].refusal == reason
    assert "2, balance=[2, 2])" in refused  # 8 replicas of 2 stages
    assert not refused["2, balance=[2, 2])"].refusal


def test_stages_hold_their_blocks_and_what_belongs_to_no_block():
    made = plan(ranks=4, parameters=1100, gradients=1100)["2, balance=[2, 2])"]
    assert made.parameters == 200 + 400  # and 100 + 300 + 100 on the other rank
    assert made.optimizer == round(1600 * 600 / 1100)
    assert made.gradients == 600 * (3 + 1)  # 2 replicas
    # Each of 2 replicas sends 4 outputs of block 1 and gets their gradients; stages add gradients.
    assert made.local == 2 * 4 * 8 * 2 + 2 * 500 + 2 * 600
    assert made.network == 0


def test_stages_across_hosts_send_activations():
    made = plan(hosts=2, ranks=2)["2, balance=[2, 2])"]
    assert made.local == 0
    assert made.network == 8 * 8  # one way each


def test_a_model_without_blocks_has_no_stages():
    assert [*plan(ranks=4, blocks=())] == ['"replicated"', '"shared"', '"sharded"']


@given(st.lists(st.integers(0, 50), min_size=2, max_size=7), st.data())
def test_the_largest_stage_is_as_small_as_possible(blocks, data):
    stages = data.draw(st.integers(2, len(blocks)))
    total = sum(blocks)
    changes = {"parameters": total, "gradients": total, "blocks": tuple(blocks)}
    changes |= {"outputs": (0,) * len(blocks), "leaves": 1}
    plans = plan_storages(replace(TRAINING, **changes), 1, stages)
    made = next(made for made in plans if len(made.balance) == stages)
    assert len(made.balance) == stages
    assert sum(made.balance) == len(blocks)
    assert min(made.balance) > 0
    cuts = [(0, *inner, len(blocks)) for inner in combinations(range(1, len(blocks)), stages - 1)]
    sizes = [max(sum(blocks[a:b]) for a, b in pairwise(cut)) for cut in cuts]
    assert made.parameters == min(sizes)


def test_the_first_storage_that_fits_is_chosen():
    plans = plan_storages(TRAINING, 1, 2)
    replicated, shared, sharded, stages = plans
    assert choose(plans, replicated.host) is replicated
    assert choose(plans, replicated.host - 1) is shared
    assert choose(plans, shared.host - 1) is sharded
    assert choose(plans, sharded.host - 1) is stages
    assert choose(plans, stages.host - 1) is None
