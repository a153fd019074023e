"""A group on simulated hosts with a network between them: cut, lossy, asymmetric, gone."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

import hosts
import warm
from lockstep.comm import backend

pytestmark = [
    pytest.mark.skipif(not backend.available(), reason="the extension is not built here"),
    pytest.mark.timeout(120),
]

PORT = "29700"
TIMEOUT = 2.0  # seconds of a call

# Reduces until something fails; says what, and how long the last call took.
SCRIPT = f"""
import os, sys, time
import torch, torch.distributed as dist
import lockstep as ls
from lockstep.comm.bucket import plan
from lockstep.comm.make_all_reduce import make_all_reduce

world = ls.init(timeout={TIMEOUT})
tensor = torch.ones(1 << 20)
(bucket,) = plan([tensor.numel()], [tensor.dtype], tensor.nbytes)
nodes = [[(rank, rank + 1)] for rank in range(world.world_size)]
bucket_sum = make_all_reduce(bucket, nodes, world.world_size, tensor.device)

def reduce():
    if os.environ["OPERATION"] == "all_reduce":
        total = tensor.clone()
        dist.all_reduce(total)
        return total
    bucket_sum.launch({{nodes[world.rank][0]: [tensor]}})
    return bucket_sum.gather()[0][1]

dist.barrier()
for step in range(int(os.environ["STEPS"])):
    begun = time.monotonic()
    try:
        total = reduce()
    except RuntimeError as error:
        print(f"FAILED {{world.rank}} {{time.monotonic() - begun:.2f}} {{error}}", flush=True)
        sys.exit(7)
    assert total.eq(world.world_size).all()
    if step == 1 and world.rank == 0:
        print("RUNNING", flush=True)
print(f"DONE {{world.rank}} {{world.backend}}", flush=True)
"""


class Run:
    """A run of 2 ranks per host, on hosts a and b."""

    def __init__(
        self, net: hosts.Network, folder, steps: int, operation="reproducible_all_reduce"
    ) -> None:
        script = folder / "reduce.py"
        script.write_text(SCRIPT)
        self.launchers = {}
        for number, name in enumerate(["a", "b"]):
            command = [
                *warm.LOCKSTEP, "run", "--nnodes", "2", "--node-rank", str(number),
                "--master-addr", net.a.address, "--master-port", PORT, "-n", "2", str(script),
            ]  # fmt: skip
            self.launchers[name] = net[name].popen(
                command,
                start=warm.Popen,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    "STEPS": str(steps),
                    "OPERATION": operation,
                },
            )

    def wait_until_running(self) -> None:
        for line in self.launchers["a"].stdout:
            if "RUNNING" in line:
                return
        raise AssertionError("it did not start")

    def finish(self, *names: str) -> str:
        """Return what the launchers of hosts print until they end."""
        return "".join(self.launchers[name].communicate(timeout=60)[0] for name in names)


def failures(printed: str) -> dict[int, tuple[float, str]]:
    """Return the seconds and the message of each rank's error."""
    found = re.findall(r"^\[\d\] FAILED (\d) ([\d.]+) (.*)$", printed, re.MULTILINE)
    return {int(rank): (float(seconds), told) for rank, seconds, told in found}


def check(
    found: dict[int, tuple[float, str]],
    sides: list[set[int]],
    most: float,
    operation="reproducible_all_reduce",
) -> None:
    """Check the errors: on each side at least of one rank, whose launcher then ends the others."""
    assert all(found.keys() & side for side in sides), found
    for seconds, told in found.values():
        assert seconds < most
        assert "gloo" not in told.lower()
        expected = rf"rank \d: {operation} #\d+ on group default failed: rank \d "
        assert re.match(expected, told)


def test_a_link_that_goes_down_in_an_all_reduce_is_named_on_both_sides(tmp_path):
    with hosts.network("a", "b") as net:
        run = Run(net, tmp_path, steps=10_000)
        run.wait_until_running()
        net.cut("b")
        printed = run.finish("a", "b")
    found = failures(printed)
    check(found, [{0, 1}, {2, 3}], TIMEOUT + 6)
    for rank, (seconds, told) in found.items():
        here, there = ("a", "b") if rank < 2 else ("b", "a")
        assert seconds > TIMEOUT - 0.5
        waiting = (
            rf"on host {here} timed out after 2 s in reproducible_all_reduce #\d+, waiting for "
            rf"rank \d on host {there}: check"
        )
        assert re.search(waiting, told), told
        assert "that the network between the hosts works" in told


@pytest.mark.stress
@pytest.mark.parametrize("operation", ["all_reduce", "reproducible_all_reduce"])
def test_a_host_whose_processes_are_killed_is_named_at_once(tmp_path, operation):
    with hosts.network("a", "b") as net:
        run = Run(net, tmp_path, 10_000, operation)
        run.wait_until_running()
        net.b.kill()
        printed = run.finish("a")
        run.finish("b")
    check(found := failures(printed), [{0, 1}], 3.0, operation)
    assert all("on host b closed its connection" in told for _, told in found.values())


@pytest.mark.stress
def test_a_host_that_vanishes_is_named_within_the_timeout(tmp_path):
    with hosts.network("a", "b") as net:
        run = Run(net, tmp_path, steps=10_000)
        run.wait_until_running()
        net.vanish("b")
        printed = run.finish("a")
        run.finish("b")
    check(found := failures(printed), [{0, 1}], TIMEOUT + 6)
    assert all("waiting for rank" in told for _, told in found.values())


@pytest.mark.stress
def test_lost_packets_make_it_slow_and_not_wrong(tmp_path):
    with hosts.network("a", "b") as net:
        run = Run(net, tmp_path, steps=60)
        run.wait_until_running()
        net.lose("b", 0.01)
        printed = run.finish("a", "b")
        assert net.count_lost("b") > 0
    assert sorted(re.findall(r"DONE (\d) lockstep", printed)) == ["0", "1", "2", "3"], printed


@pytest.mark.stress
def test_answers_may_take_another_way(tmp_path):
    with hosts.network("a", "b", networks=2) as net:
        (second,) = net.a.addresses[1:]
        net.b.namespaces.ip(f"route add {net.a.address}/32 via {second} src {net.b.address}")
        net.a.namespaces.run(["sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0"])
        before = received(net.a, "eth1")
        printed = Run(net, tmp_path, steps=5).finish("a", "b")
        assert received(net.a, "eth1") - before > 4 << 20  # what b sends comes there
    assert sorted(re.findall(r"DONE (\d) lockstep", printed)) == ["0", "1", "2", "3"], printed


def received(host: hosts.Host, interface: str) -> int:
    """Return the bytes that an interface has received."""
    return int(host.namespaces.run(["cat", f"/sys/class/net/{interface}/statistics/rx_bytes"]))
