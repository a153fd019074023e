"""The network interface that ranks on simulated hosts find, for any resolution of their names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import warm
from lockstep.comm.hosts.identity import describe_namespaces
from lockstep.kernel.errors import RendezvousError
from lockstep.launcher import listening_socket, network_interface
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.network_interface import find_interface
from lockstep.launcher.rendezvous import choose_interface
from lockstep.launcher.rendezvous_check import check_ranks

SCRIPT = """
import os, torch, torch.distributed as dist
import lockstep as ls
world = ls.init(backend="gloo", timeout=float(os.environ["TIMEOUT"]))
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "by", os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script with a rank on each host and returns what they print."""
    (tmp_path / "join.py").write_text(SCRIPT)

    def call(net, address, timeout=60, **variables):
        environ = {**os.environ, "TIMEOUT": str(timeout), **variables}
        processes = [
            host.popen(
                [
                    *(*warm.LOCKSTEP, "run", "--nnodes", "2", "--node-rank", str(number)),
                    *("--master-addr", address, "join.py"),
                ],
                start=warm.Popen,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env=environ,
            )
            for number, host in enumerate((net.a, net.b))
        ]
        return [process.communicate(timeout=90)[0] for process in processes]

    return call


def interfaces(printed):
    """Return the interfaces that the ranks have used; fail unless they added 1 and 2."""
    words = [line.split() for text in printed for line in text.splitlines() if "sum" in line]
    assert [each[1:4] for each in words] == [["sum", "3.0", "by"]] * 2, printed
    return [each[4] for each in words]


def test_a_name_that_resolves_to_loopback_on_its_own_host(network, run):
    """As Debian's installer writes /etc/hosts."""
    net = network("a", "b")
    net.a.write_hosts(f"127.0.0.1 localhost\n127.0.1.1 a\n{net.b.address} b\n")
    net.b.write_hosts(f"127.0.0.1 localhost\n127.0.1.1 b\n{net.a.address} a\n")
    assert interfaces(run(net, "a")) == ["eth0", "eth0"]


def test_host_names_are_empty_or_do_not_resolve(network, run):
    net = network("a", "b")
    net.a.rename("")
    for host in (net.a, net.b):
        host.write_hosts("127.0.0.1 localhost\n")
    assert interfaces(run(net, net.a.address)) == ["eth0", "eth0"]


def test_hosts_without_ipv4(network, run):
    """The name has an address of each kind, of which one has no route."""
    net = network("a", "b", ipv6_only=True)
    for host in (net.a, net.b):
        host.write_hosts(f"127.0.0.1 localhost\n::1 localhost\n10.77.0.1 a\n{net.a.address} a\n")
    assert interfaces(run(net, "a")) == ["eth0", "eth0"]


def test_the_way_there_is_not_the_way_back(network, run):
    net = network("a", "b", networks=2)
    net.a.namespaces.ip(f"route add {net.b.address}/32 dev eth1")
    assert interfaces(run(net, net.a.address)) == ["eth1", "eth0"]


def test_localhost_as_the_address_of_two_hosts_is_named_on_each(network, run):
    net = network("a", "b")
    first, second = run(net, "localhost", timeout=1)
    assert "did not join within 1 s, while the others waited at localhost:29500, which" in first
    assert (
        "rank 1: no answer from localhost:29500 (MASTER_ADDR, MASTER_PORT) within 1 s: connection "
        "refused; on this host localhost is 127.0.0.1, the loopback interface, which leads to no "
        "other host: set --master-addr (MASTER_ADDR) to an address of rank 0's host in your "
        "network; its log:"
    ) in second


def test_a_foreign_name_that_resolves_to_loopback_is_named(network, run):
    """As in the image of a virtual machine that was copied."""
    net = network("a", "b")
    net.b.write_hosts("127.0.0.1 localhost\n127.0.1.1 a\n")
    _, second = run(net, "a", timeout=1)
    assert "on this host a is 127.0.1.1, the loopback interface, which leads to no other" in second
    assert "in your network, or correct /etc/hosts" in second


# --- the exchange ------------------------------------------------------------------------------


def exchange(monkeypatch, *ranks, **patches):
    """Let ranks find their interface, each with its address of the master; return the results."""
    for name, value in patches.items():
        monkeypatch.setattr(network_interface, name, value)
    store = dist.HashStore()

    def find(rank):
        address = ranks[rank]
        info = RankInfo(rank, len(ranks), master_addr=address, master_port=29500)
        try:
            check_ranks(store, info, time.monotonic() + 30)
            return choose_interface(info, store)
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(find, range(len(ranks))))


LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_of_one_host_use_the_loopback_interface(monkeypatch, size):
    found = exchange(monkeypatch, *["127.0.0.1"] * size)
    assert found == [LOOPBACK_INTERFACE] * size
    assert find_interface(RankInfo()) == LOOPBACK_INTERFACE


@pytest.mark.parametrize("launcher", ["lockstep", "torchrun"])
def test_ranks_that_a_launcher_started_on_one_host_exchange_nothing(launcher):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    info = RankInfo(0, 2, 0, 2, 0, "10.0.0.1", 29500, launcher)
    assert choose_interface(info, store) == LOOPBACK_INTERFACE
    assert store.num_keys() == 0


def test_a_rank_on_the_masters_host_asks_for_the_route_to_the_first_other_rank(monkeypatch):
    own = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.1.0.1": "eth1", "10.2.0.9": "eth2"}
    routes = {"10.0.0.2": "10.1.0.1", "10.9.0.1": "10.0.0.2"}
    monkeypatch.setattr(network_interface, "address_towards", lambda to: routes.get(to, ""))
    monkeypatch.setattr(network_interface, "find_own_addresses", lambda: own)
    other = RankInfo(rank=2, world_size=3, master_addr="10.9.0.1", master_port=1)
    assert find_interface(other, "10.0.0.2") is None  # which is on another host
    for rank in (0, 1):
        info = RankInfo(rank=rank, world_size=3, master_addr="10.0.0.1", master_port=1)
        assert find_interface(info, "10.0.0.2") == "eth1"


def test_an_address_of_the_loopback_interface_is_not_named_to_other_hosts(monkeypatch):
    monkeypatch.setattr(network_interface, "address_towards", lambda address: "10.9.0.9")
    own = {"127.0.0.1": "lo", "10.9.0.9": "lo", "10.0.0.1": "eth0"}
    monkeypatch.setattr(network_interface, "find_own_addresses", lambda: own)
    info = RankInfo(rank=1, world_size=2, master_addr="10.0.0.7", master_port=1)
    assert find_interface(info, "10.0.0.8") is None


def test_a_tunnel_to_the_store_is_an_error_on_every_rank(monkeypatch):
    identities = iter(["first", "second"])
    found = exchange(
        monkeypatch, "localhost", "localhost", describe_namespaces=lambda kind: next(identities)
    )
    for rank, sentence in enumerate(found):
        assert sentence.startswith(
            f"rank {rank}: the ranks meet at localhost:29500, which is the loopback interface of "
            f"several hosts (a tunnel?)"
        )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    identities = iter(["first", "second"])
    assert exchange(monkeypatch, "localhost", "localhost") == [LOOPBACK_INTERFACE] * 2


@pytest.mark.parametrize(
    ("master", "words"),
    [("192.0.2.1", "192.0.2.1 (MASTER_ADDR)"), ("127.0.0.1", "192.0.2.2 (another host of this")],
)
def test_no_route_is_an_error_that_names_the_address(monkeypatch, master, words):
    monkeypatch.setattr(network_interface, "address_towards", lambda address: "")
    info = RankInfo(world_size=2, master_addr=master, master_port=1)
    with pytest.raises(RendezvousError, match=re.escape(f"this host has no route to {words}")):
        find_interface(info, "192.0.2.2")


@pytest.mark.parametrize("value", ["x" * 200, "127.0.0.1", "::1", "0.0.0.0", "a.example", "\0"])
def test_a_value_that_no_rank_writes_is_an_error(value):
    store = dist.HashStore()
    store.set("layout", json.dumps({"hosts": [0, 1], "other": value}))
    info = RankInfo(world_size=2, master_addr="127.0.0.1", master_port=1)
    with pytest.raises(RendezvousError, match="was not written by a rank of Lockstep"):
        choose_interface(info, store)


def test_hosts_differ_in_their_identity_and_their_processes_share_it(network):
    net = network("a", "b")
    found = [host.call(lambda: describe_namespaces("net")) for host in (net.a, net.a, net.b)]
    assert found[0] == found[1] != found[2] != describe_namespaces("net")


def test_a_host_name_at_loopback_is_served_on_every_interface(network):
    net = network("a")
    net.a.write_hosts("127.0.0.1 localhost\n127.0.1.1 a\n")

    def addresses():
        with (
            listening_socket.listen("a", 0) as alone,
            listening_socket.listen("a", 0, is_single_host=False) as several,
            listening_socket.listen("localhost", 0, is_single_host=False) as local,
        ):
            return [each.getsockname()[0] for each in (alone, several, local)]

    assert net.a.call(addresses) == ["127.0.1.1", "::", "127.0.0.1"]
