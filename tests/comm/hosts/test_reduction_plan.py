"""The plan of a reduction across hosts: every placement adds along the one tree."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.reduction_plan import plan_reduction
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


def value_of_term(term, nodes_by_rank):
    inputs = [value_of(nodes_by_rank[rank][number]) for rank, number in term.inputs]
    return total(dict(zip(term.nodes, inputs, strict=True)), term.leaves, added)


def simulate(plan, nodes_by_rank, slice_):
    """Return the result of a slice, the messages with terms, and the ranks that have the result."""
    values, messages = {}, []
    for host, terms in enumerate(plan.terms):
        handler = plan.handler(slice_, host)
        assert handler in plan.map.hosts[host]
        assert slice_ in plan.handled(handler)
        for term in terms:
            # A handler reads only the memory of its own host.
            assert all(rank in plan.map.hosts[host] for rank, _ in term.inputs)
            values[term.node] = value_of_term(term, nodes_by_rank)
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
    nodes_by_rank, leaves = data.draw(holdings(hosts.size))
    scatter = data.draw(st.booleans())
    plan = plan_reduction(hosts, nodes_by_rank, leaves, scatter=scatter)
    for owner in range(plan.slices):
        result, _, receivers = simulate(plan, nodes_by_rank, owner)
        assert result == value_of((0, leaves))
        if scatter:
            assert receivers == {owner}
        else:  # one rank of each host gets it, and no host twice
            assert sorted(map(hosts.host_of, receivers)) == [*range(len(hosts.hosts))]


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
    ("hosts", "terms"), [(CONTIGUOUS, 1), (ALTERNATING, 2)], ids=["contiguous", "alternating"]
)
def test_terms_that_a_host_sends_of_a_slice(hosts, terms):
    plan = plan_reduction(hosts, [[(rank, rank + 1)] for rank in range(4)], 4)
    assert [len(of_host) for of_host in plan.terms] == [terms] * 2


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
    nodes_by_rank = [[(rank, rank + 1)] for rank in range(hosts.size)]
    plan = plan_reduction(hosts, nodes_by_rank, hosts.size)
    assert plan.is_exchange == is_exchange
    assert plan.returns != is_exchange
    assert not plan_reduction(hosts, nodes_by_rank, hosts.size, scatter=True).is_exchange
