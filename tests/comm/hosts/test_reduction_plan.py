"""The plan of a reduction across hosts: every placement adds along the one tree."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.reduction_plan import plan_reduction, slice_bounds
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import nodes_of, total

CONTIGUOUS, ALTERNATING = HostMap(((0, 1), (2, 3))), HostMap(((0, 2), (1, 3)))


@st.composite
def placements(draw):
    """Draw the ranks of each host."""
    return HostMap.of(draw(st.lists(st.integers(0, 3), min_size=2, max_size=9)))


@st.composite
def holdings(draw, ranks):
    """Draw the nodes of each rank: those of even ranges, or of leaves at random."""
    leaves = draw(st.integers(1, 20))
    if draw(st.booleans()):
        return [nodes_of(each, leaves) for each in split_evenly(leaves, ranks)], leaves
    owners = [draw(st.integers(0, ranks - 1)) for _ in range(leaves)]
    return [
        [(n, n + 1) for n in range(leaves) if owners[n] == rank] for rank in range(ranks)
    ], leaves


def added(left, right):
    return f"({left}+{right})"


def value_of(node):
    lo, hi = node
    width = hi - lo
    return total({(n, n + 1): str(lo + n) for n in range(width)}, width, added)


def value_of_term(term, holders):
    inputs = [value_of(holders[rank][number]) for rank, number in term.inputs]
    return total(dict(zip(term.nodes, inputs, strict=True)), term.leaves, added)


def simulate(plan, holders, slice_):
    """Return the result of a slice, the messages with terms, and the ranks that have the result."""
    values, messages = {}, []
    for host, terms in enumerate(plan.terms):
        handler = plan.handler(slice_, host)
        assert handler in plan.map.hosts[host]
        assert slice_ in plan.handled(handler)
        for term in terms:
            # A handler reads only the memory of its own host.
            assert all(rank in plan.map.hosts[host] for rank, _ in term.inputs)
            values[term.node] = value_of_term(term, holders)
            messages += [(handler, each) for each in plan.receivers(handler, slice_)]
    handlers = {plan.handler(slice_, host) for host in range(len(plan.map.hosts))}
    having = {each for each in handlers if plan.reduces(each, slice_)}
    for rank in having:  # which has got the terms of all other hosts
        senders = Counter(plan.map.host_of(handler) for handler, each in messages if each == rank)
        others = set(range(len(plan.map.hosts))) - {plan.map.host_of(rank)}
        assert senders == Counter({each: n for each in others if (n := len(plan.terms[each]))})
    return total(values, plan.leaves, added), messages, handlers if plan.returns else having


@given(placements(), st.data())
def test_every_slice_is_reduced_once_along_the_tree(hosts, data):
    ranks = hosts.size
    holders, leaves = data.draw(holdings(ranks))
    root = data.draw(st.none() | st.integers(0, ranks - 1))
    scatter = data.draw(st.booleans()) and root is None
    factor = data.draw(st.sampled_from([1, 2]))
    plan = plan_reduction(hosts, holders, leaves, root, scatter=scatter, wide_factor=factor)
    assert len(set(plan.owners)) == len(plan.owners)
    length, item = data.draw(st.integers(0, 3000)), 4
    bounds = slice_bounds(length, len(plan.owners), item)
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0, length)
    sent = Counter()
    for slice_, owner in enumerate(plan.owners):
        result, messages, receivers = simulate(plan, holders, slice_)
        assert result == value_of((0, leaves))
        size = (bounds[slice_ + 1] - bounds[slice_]) * item
        home = plan.map.host_of(owner)
        for handler, reducer in messages:
            host = plan.map.host_of(handler)
            wide = factor if plan.is_wide[host] else 1
            sent[host, plan.map.host_of(reducer)] += size * wide
        for rank in receivers - {owner} if plan.returns else ():
            sent[home, plan.map.host_of(rank)] += size
        if root is None and not scatter:  # one rank of each host gets it, and no host twice
            assert sorted(plan.map.host_of(each) for each in receivers) == [
                *range(len(hosts.hosts))
            ]
        else:
            assert receivers == {owner}
        assert scatter or root is None or home == plan.map.host_of(root)
    stated = plan.traffic(bounds, item, item * factor)
    assert {pair: count for pair, count in stated.items() if count} == +sent


@given(placements())
def test_values_in_any_order_are_combined_on_their_host(hosts):
    ranks = hosts.size
    holders = [[(each, each + 1)] for each in range(ranks)]
    plan = plan_reduction(hosts, holders, ranks, is_order_free=True)
    assert all(len(terms) == 1 for terms in plan.terms)
    inputs = [each for terms in plan.terms for term in terms for each in term.inputs]
    assert sorted(inputs) == [(rank, 0) for rank in range(ranks)]
    result, _, _ = simulate(plan, holders, 0)
    assert sorted(result.replace("(", "").replace(")", "").split("+"), key=int) == [
        str(rank) for rank in range(ranks)
    ]


@given(placements(), st.integers(1, 9))
def test_a_handler_is_on_its_host_and_slices_are_shared_out(hosts, seed):
    ranks = hosts.size
    for host, members in enumerate(hosts.hosts):
        found = Counter(hosts.partner(owner, host) for owner in range(ranks))
        assert set(found) <= set(members)
        assert all(hosts.partner(rank, host) == rank for rank in members)
        if len({len(each) for each in hosts.hosts}) == 1:  # as many ranks on every host
            assert set(found.values()) == {len(hosts.hosts)}


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [(CONTIGUOUS, 1.0), (ALTERNATING, 1.5)],
    ids=["contiguous", "alternating"],
)
def test_bytes_of_a_float_sum_between_two_hosts_of_two_ranks(hosts, expected):
    holders = [[(each, each + 1)] for each in range(4)]
    plan = plan_reduction(hosts, holders, 4)
    sent = plan.traffic(slice_bounds(1 << 20, 4, 4), 4, 4)
    assert {pair: count / (4 << 20) for pair, count in sent.items()} == {
        (0, 1): expected,
        (1, 0): expected,
    }


@pytest.mark.parametrize(
    ("hosts", "is_exchange"),
    [
        (CONTIGUOUS, True),
        (HostMap(((0,), (1,))), True),
        (HostMap(((0, 1, 2), (3,))), False),  # 3 ranks of a tree over 4 leave two terms, 01 and 2
        (ALTERNATING, False),
        (HostMap(((0, 1), (2, 3), (4, 5))), False),  # every host would send its terms twice
    ],
)
def test_two_hosts_with_one_term_each_exchange_it(hosts, is_exchange):
    holders = [[(each, each + 1)] for each in range(hosts.size)]
    plan = plan_reduction(hosts, holders, hosts.size)
    assert plan.is_exchange == is_exchange
    assert plan.returns != is_exchange
    assert not plan_reduction(hosts, holders, hosts.size, root=0).is_exchange
    assert not plan_reduction(hosts, holders, hosts.size, scatter=True).is_exchange
    combined = plan_reduction(hosts, holders, hosts.size, is_order_free=True)
    assert combined.is_exchange == (len(hosts.hosts) == 2)


def test_terms_of_16_bit_floats_are_combined_where_that_saves_bytes():
    holders = [[(each, each + 1)] for each in range(8)]
    two = plan_reduction(HostMap(((0, 1), (2, 3, 4, 5, 6, 7))), holders, 8, wide_factor=2)
    assert two.is_wide == (False, True)  # 2 leaves in 16 bits, and {23, 4567} in 32 bits
    assert [len(each) for each in two.terms] == [2, 2]
    scaled = plan_reduction(ALTERNATING, holders[:4], 4, wide_factor=2, is_scaled=True)
    assert scaled.is_wide == (True, True)
