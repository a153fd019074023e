"""The doctor on several hosts: what differs between them."""

import socket
from dataclasses import replace

import pytest

import pytest_lockstep
from lockstep.tools.report.checks.hosts import HostFacts, compare_hosts, gather_facts

HOST = HostFacts("a", "3.11.7", "2.13.0", "0.1.0", "softmax=1, numpy=2", "", "none")


def compare(**changes):
    """Compare a host with another one that differs in some facts."""
    results = compare_hosts([HOST, replace(HOST, host="b", **changes)])
    return {result.subject: result for result in results}


def test_equal_hosts_have_good_results_only():
    assert {result.verdict for result in compare().values()} == {"good"}


@pytest.mark.parametrize(("fact", "value", "verdict"), [
    ("torch", "2.12.1", "bad"),
    ("lockstep", "0.2.0", "bad"),
    ("python", "3.12.1", "bad"),
    ("python", "3.11.9", "note"),
    ("gpus", "NVIDIA H100", "note"),
])  # fmt: skip
def test_a_difference_names_both_hosts(fact, value, verdict):
    result = compare(**{fact: value})[fact]
    assert result.verdict == verdict
    assert f"{getattr(HOST, fact)} on a; {value} on b" in result.what
    assert result.advice


def test_other_arithmetic_names_the_operators():
    result = compare(arithmetic="softmax=3, numpy=2")["arithmetic"]
    assert (result.verdict, result.what) == ("bad", "softmax: other bits on b than on a")
    assert "--portable" in result.advice
    assert "C library" in compare(arithmetic="softmax=1, numpy=4")["arithmetic"].advice


def test_a_host_without_the_backend_is_named():
    result = compare(backend="there is no compiler: run lockstep build")["backend"]
    assert result.verdict == "note"
    assert "on b" in result.what
    assert result.advice == "run lockstep build"


def test_clocks_that_are_far_apart():
    assert compare(clock=0.9)["clocks"].verdict == "good"
    result = compare(clock=-3.0)["clocks"]
    assert result.verdict == "note"
    assert "the clock of a is 3.00 s ahead of that of b" in result.what


def test_one_rank_of_each_host_says_what_the_host_is():
    for hosts in pytest_lockstep.run(lambda rank: gather_facts(), 2, init=False):
        (host,) = hosts
        assert (host.host, host.clock) == (socket.gethostname(), 0.0)
