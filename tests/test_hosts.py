"""Simulated hosts, each property seen from inside them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hosts
import warm
from processes import until

PROBE = """
import json, os, socket
print(json.dumps({
    "name": socket.gethostname(),
    "interfaces": sorted(name for _, name in socket.if_nameindex()),
    "sys": sorted(os.listdir("/sys/class/net")),
    "memory": os.listdir("/dev/shm"),
    "peer": socket.gethostbyname("b"),
    "folder": os.getcwd(),
    "argument": __import__("sys").argv[1],
}))
"""


@pytest.fixture
def net(network):
    return network("a", "b")


def connect(here: hosts.Host, address: str, listening: socket.socket) -> socket.socket:
    """Return a connection from a host to a listening socket of another."""
    port = listening.getsockname()[1]
    return here.call(lambda: socket.create_connection((address, port), timeout=10))


def listen(host: hosts.Host, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    return host.call(lambda: socket.create_server(("", 0), family=family))


@contextlib.contextmanager
def joined(net: hosts.Network):
    """Yield the two ends of a connection from a to b, which wait at most 10 s."""
    with listen(net.b) as listening, connect(net.a, net.b.address, listening) as ours:
        theirs, _ = listening.accept()
        with theirs:
            theirs.settimeout(10)
            yield ours, theirs


def round_trip(ours: socket.socket, theirs: socket.socket) -> float:
    began = time.monotonic()
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"
    theirs.sendall(b"y")
    assert ours.recv(1) == b"y"
    return time.monotonic() - began


@pytest.mark.parametrize("start", [subprocess.Popen, warm.Popen])
def test_a_program_on_a_host_sees_that_host(net, start, tmp_path):
    done = net.a.run(
        [sys.executable, "-c", PROBE, "given"], start=start, cwd=tmp_path, timeout=60, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "name": "a",
        "interfaces": ["eth0", "lo"],
        "sys": ["eth0", "lo"],
        "memory": [],
        "peer": net.b.address,
        "folder": str(tmp_path),
        "argument": "given",
    }


def test_hosts_reach_each_other_and_the_machine_reaches_none(net):
    for family, address in ((socket.AF_INET, net.b.address), (socket.AF_INET6, net.b.address6)):
        with listen(net.b, family) as listening, connect(net.a, address, listening) as ours:
            theirs, (peer, *_) = listening.accept()
            theirs.close()
            assert peer == (net.a.address if family == socket.AF_INET else net.a.address6)
            assert ours.getpeername()[0] == address
    names = {name for _, name in socket.if_nameindex()}
    assert not any(name.startswith(("a0", "b0", "bridge")) for name in names), names
    assert (
        net.a.address not in subprocess.run(["ip", "addr"], capture_output=True, text=True).stdout
    )


def test_a_cut_link_carries_nothing_until_it_is_restored(net):
    with joined(net) as (ours, theirs):
        round_trip(ours, theirs)
        net.cut("b")
        ours.sendall(b"x")
        theirs.settimeout(0.1)
        with pytest.raises(TimeoutError):
            theirs.recv(1)
        net.restore("b")
        theirs.settimeout(10)
        assert theirs.recv(1) == b"x"
    assert net.b.address in net.b.namespaces.run(["ip", "addr"])


def test_a_host_vanishes_without_a_word(net):
    program = "import socket, sys; s = socket.create_server(('', 29400)); print(flush=True)"
    program += "; c = s.accept()[0]; c.recv(1)"
    process = net.b.popen([sys.executable, "-SEc", program], stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        with net.a.call(lambda: socket.create_connection((net.b.address, 29400), 10)) as ours:
            net.vanish("b")
            assert process.wait(10) == -signal.SIGKILL
            ours.settimeout(0.1)
            with pytest.raises(TimeoutError):  # neither an end nor a reset
                ours.recv(1)


def test_packets_are_lost_and_their_number_is_known(net):
    net.lose("b", 0.1)
    receiver, sender = (
        host.call(lambda: socket.socket(type=socket.SOCK_DGRAM)) for host in (net.b, net.a)
    )
    with receiver, sender:
        receiver.bind(("", 0))
        address = (net.b.address, receiver.getsockname()[1])
        for number in range(200):
            sender.sendto(str(number).encode(), address)
        receiver.settimeout(0.2)
        arrived = 0
        with contextlib.suppress(TimeoutError):
            while receiver.recv(10):
                arrived += 1
    assert 0 < net.count_lost("b") == 200 - arrived
    net.lose("b", 0)
    assert net.switch.run(["nft", "list", "ruleset"]) == ""


def test_a_program_that_is_left_on_a_host_is_killed_and_named():
    net = hosts.network("a")
    process = net.a.popen(["sleep", "1000"])
    command = Path(f"/proc/{process.pid}/cmdline")  # nsenter's at first, then none for a moment
    until(lambda: command.read_bytes() == b"sleep\x001000\x00", "it is not on the host", 10)
    assert process.pid in net.a.namespaces.list_processes()
    with pytest.raises(AssertionError, match=r"left running: .*sleep 1000\) on host a"):
        net.close(patience=0)
    assert process.wait(10) == -signal.SIGKILL


def test_namespaces_go_when_the_process_that_made_them_is_killed():
    program = """
import hosts, os
net = hosts.network("a", "b")
print(*(os.readlink(each.namespaces.net) for each in (net.a, net.b)), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
        text=True,
    ) as process:
        made = set(process.stdout.readline().split())
        assert len(made) == 2
        assert made <= _list_namespaces()
        process.kill()
    until(lambda: not made & _list_namespaces(), "the namespaces are still there", 10)


def _list_namespaces() -> set[str]:
    """Return the network namespaces that processes hold open or live in."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {name for name in found if name.startswith("net:[")}


def test_required_hosts_that_cannot_be_made_fail_instead_of_skipping(monkeypatch):
    monkeypatch.setattr(hosts, "reason_unavailable", lambda: "simulated hosts need root")
    monkeypatch.delenv(hosts.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="need root"):
        hosts.network("a")
    monkeypatch.setenv(hosts.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="need root"):
        hosts.network("a")
