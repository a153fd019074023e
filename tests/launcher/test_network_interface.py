"""The network interface that ranks on simulated hosts find, for any resolution of their names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

import warm
from lockstep.comm.hosts.identity import describe_namespaces
from lockstep.kernel.errors import RendezvousError
from lockstep.launcher import listening_socket, network_interface
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.network_interface import find_interface
from lockstep.launcher.rendezvous import choose_interface

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
    net.a.namespaces.ip("route add default dev eth0")
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
    assert interfaces(run(net, net.a.address)) == ["eth0", "eth0"]


def test_localhost_as_the_address_of_two_hosts_is_named_on_each(network, run):
    net = network("a", "b")
    first, second = run(net, "localhost", timeout=1)
    assert "did not join within 1 s, while the others waited at localhost:29500, which" in first
    assert (
        "rank 1: no answer from localhost:29500 (MASTER_ADDR, MASTER_PORT) within 1 s: connection "
        "refused; on this host localhost is 127.0.0.1, the loopback interface, which leads to no "
        "other host: set --master-addr (MASTER_ADDR) to an address of rank 0's host in your "
        "network; the log of rank 1:"
    ) in second


def test_a_foreign_name_that_resolves_to_loopback_is_named(network, run):
    """As in the image of a virtual machine that was copied."""
    net = network("a", "b")
    net.b.write_hosts("127.0.0.1 localhost\n127.0.1.1 a\n")
    _, second = run(net, "a", timeout=1)
    assert "on this host a is 127.0.1.1, the loopback interface, which leads to no other" in second
    assert "in your network, or correct /etc/hosts" in second


# --- the decision ------------------------------------------------------------------------------

OWN = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.1.0.1": "eth1", "10.9.0.9": "lo"}
ROUTES = {"10.0.0.2": "10.1.0.1", "10.9.0.1": "10.9.0.9", "192.0.2.1": "10.0.0.1"}


@pytest.fixture
def routes(monkeypatch):
    """Give this host addresses and routes."""
    routes = {"127.0.0.1": "127.0.0.1", **ROUTES}
    monkeypatch.setattr(network_interface, "address_towards", lambda to: routes.get(to, ""))
    monkeypatch.setattr(network_interface, "_find_own_addresses", lambda: OWN)
    return routes


@pytest.mark.parametrize(
    ("master", "name"),
    [
        ("127.0.0.1", "lo"),
        ("localhost", "lo"),
        ("10.0.0.1", "eth0"),  # its own address
        ("10.0.0.2", "eth1"),  # of the route
        ("10.9.0.1", None),  # an address of the loopback interface, which has another first one
    ],
)
def test_the_interface_is_that_of_the_route_to_the_master(routes, master, name):
    assert find_interface(master) == name


def test_a_name_of_this_host_at_loopback_means_the_default_route(routes, monkeypatch):
    monkeypatch.setattr(network_interface, "resolve_address", lambda name: (2, "127.0.1.1"))
    assert find_interface("gpu1") == "eth0"
    del routes["192.0.2.1"]
    with pytest.raises(
        RendezvousError, match=r"gpu1, which is 127\.0\.1\.1 here, and this host has"
    ):
        find_interface("gpu1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert find_interface("gpu1") is None


def test_no_route_is_an_error_that_names_the_address(routes):
    with pytest.raises(
        RendezvousError, match=r"this host has no route to 192\.0\.2\.7 \(MASTER_ADDR"
    ):
        find_interface("192.0.2.7")


@pytest.mark.parametrize("launcher", ["lockstep", "torchrun", "srun", "mpiexec"])
def test_ranks_that_a_launcher_started_on_one_host_exchange_nothing(launcher):
    store = dist.HashStore()
    info = RankInfo(0, 2, 0, 2, 0, "10.0.0.1", 29500, launcher)
    assert choose_interface(info, store) == ("lo" if sys.platform == "linux" else "lo0")
    assert store.num_keys() == 0


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
