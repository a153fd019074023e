"""Elastic runs on two simulated hosts: one is killed, cut off, comes back, or holds the store."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import hosts
import warm
from processes import until

SCRIPT = """
import os, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
import lockstep as ls
from lockstep.elastic.membership import membership

# The member STOPS stops in its step 5, until the test has done something; those in DIES die there.
MEMBER = os.environ.get("LOCKSTEP_MEMBER", "alone")
STOPS, DIES = os.environ.get("STOPS"), os.environ.get("DIES", "").split()
# In step 7, rank 0 waits for members of a host that comes back, until there are FULL ranks.
FULL = int(os.environ.get("FULL", "0"))
if MEMBER == os.environ.get("WAITS"):  # before it joins the others
    Path("stopped").touch()
    time.sleep(600)
if MEMBER == os.environ.get("STUCK"):  # a thread that Gloo does not wake
    from lockstep.comm.hosts.process_group import HostWork
    wait_until, trainer = HostWork._wait_until, None

    def oversleep(work, deadline):
        if trainer is not None and trainer.steps == 5:
            Path("waiting").touch()
            time.sleep(600)
        return wait_until(work, deadline)

    HostWork._wait_until = oversleep
if "PUBLISHES" in os.environ:  # this member dies once others can read its address
    import select
    from lockstep.comm.hosts import process_group

    class Store(torch.distributed.Store):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def set(self, key, value):
            self.inner.set(key, value)
            Path("victim.new").write_text(str(os.getpid()))
            Path("victim.new").rename("victim")
            os.kill(os.getpid(), 9)

    for name in ("get", "add", "check", "wait", "multi_get"):
        setattr(Store, name, lambda self, *given, name=name: getattr(self.inner, name)(*given))
    connect_all = process_group.connect

    def connect(store, *given):
        if not Path("victim").exists():
            if MEMBER == os.environ["PUBLISHES"]:
                store = Store(store)
            else:
                while not Path("victim").exists():
                    time.sleep(0.005)
                try:
                    victim = os.pidfd_open(int(Path("victim").read_text()))
                    select.select([victim], [], [], 60)
                except ProcessLookupError:
                    pass
        return connect_all(store, *given)

    process_group.connect = connect
ls.init(timeout=600)
from lockstep.launcher.world import local_rank, world
torch.manual_seed(1)


class Last(nn.Linear):
    def forward(self, inputs):
        if trainer.steps == 5 and MEMBER in DIES:
            os.kill(os.getpid(), 9)
        if trainer.steps == 5 and MEMBER == os.environ.get("RAISES"):
            raise OSError("out of paper")
        if trainer.steps == 5 and MEMBER == STOPS:
            Path("stopped").touch()
            while not Path("go on").exists():
                time.sleep(0.005)
        return super().forward(nn.functional.dropout(torch.relu(inputs), 0.1))


generator = torch.Generator().manual_seed(7)
checkpoint = ls.CheckpointConfig(every_steps=2) if "CHECKPOINT" in os.environ else None
pipeline = ls.PipelineConfig(stages=2) if "STAGES" in os.environ else None
trainer = ls.Trainer(
    nn.Sequential(nn.Linear(16, 32), Last(32, 4)), nn.CrossEntropyLoss(),
    partial(torch.optim.AdamW, lr=0.01), microbatches=8, seed=3, progress=False,
    checkpoint=checkpoint, pipeline=pipeline, storage=os.environ.get("STORAGE", "replicated"),
)
with trainer:
    for _ in range(12):
        inputs = torch.randn(24, 16, generator=generator)
        trainer.step((inputs, (inputs[:, 0] > 0).long()))
        place = ls.rank(), ls.world_size(), local_rank(), world().local_world_size
        print("STEP", trainer.steps, *place, world().host, flush=True)
        while trainer.steps == 7 and ls.rank() == 0 and ls.world_size() < FULL:
            time.sleep(0.01)
            if membership().poll():
                break
print("DIGEST", trainer.digest(), flush=True)
print("BACKEND", world().backend, type(torch.distributed.group.WORLD._get_backend(
    torch.device("cpu"))).__name__, flush=True)
"""

TIMEOUT = 60.0
SILENCE = 3.0  # seconds after which a host that is cut off counts as lost
CUT = ("--host-timeout", f"{SILENCE:g}")


class Launch:
    """The launchers of one run on two hosts.

    Args:
        net: The hosts.
        folder: The working directory.
        options: Further options of the launchers.
        is_apart: Whether each host has a folder of its own.
        variables: Further variables.
    """

    def __init__(
        self,
        net: hosts.Network,
        folder: Path,
        *options: str,
        is_apart: bool = False,
        **variables: str,
    ) -> None:
        self.net = net
        self.folder = folder
        self._is_apart = is_apart
        for each in [folder / "a", folder / "b"] if is_apart else [folder]:
            each.mkdir(exist_ok=True)
            (each / "train.py").write_text(SCRIPT)
        self._options = ["--nnodes", "2", *options]
        self._options += ["--master-addr", net.a.address]
        self._environ = {**os.environ, "LOCKSTEP_SECRET": secrets.token_hex(32), **variables}
        self.a = self.start("a")
        self.b = self.start("b")

    def start(self, name: str, *options: str, script: str = "train.py") -> subprocess.Popen[Any]:
        """Start the launcher of a host."""
        rank = str("ab".index(name))
        words = [*warm.LOCKSTEP, "run", *self._options, "--node-rank", rank, *options, script]
        folder = self.folder / name if self._is_apart else self.folder
        return self.net[name].popen(
            [word for word in words if word],
            start=warm.Popen,
            cwd=folder,
            env=self._environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_until_stopped(self) -> None:
        """Wait until a member has stopped in its step."""
        until(lambda: (self.folder / "stopped").exists(), "no member stops", TIMEOUT)

    def wait_for_checkpoint(self) -> int:
        """Wait until the checkpoints are written, and return the step of the newest one.

        While one is written, no other one begins: with a slow disk, that of step 4 is left out.
        """

        def list_folders() -> list[str]:
            return [path.name for path in self.folder.glob("runs/*/checkpoints/*step-*")]

        def are_complete() -> bool:
            names = list_folders()
            return bool(names) and not any(name.startswith(".") for name in names)

        until(are_complete, "no checkpoint is saved", TIMEOUT)
        return max(int(name.removeprefix("step-")) for name in list_folders())

    def finish(self, name: str) -> tuple[int, str]:
        """Wait for the launcher of a host; return its exit status and what it printed."""
        process = getattr(self, name)
        output, _ = process.communicate(timeout=TIMEOUT)
        return process.returncode, output

    def run_folder(self) -> Path:
        """Return the folder of the run on host 0: the one with a record or checkpoints."""
        (found,) = {path.parent for path in self.folder.glob("runs/*/checkpoints")}
        return found


Start = Callable[..., Launch]


@pytest.fixture
def start(network: Any, tmp_path: Path) -> Iterator[Start]:
    launches: list[Launch] = []

    def begin(*options: str, is_apart: bool = False, **variables: str) -> Launch:
        net = network("a", "b")
        launches.append(Launch(net, tmp_path, *options, is_apart=is_apart, **variables))
        return launches[-1]

    yield begin
    for launch in launches:
        for process in (launch.a, launch.b):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in (launch.a, launch.b):
            with process:
                pass


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    command = [*warm.LOCKSTEP, "run", "train.py"]
    done = warm.run(command, timeout=TIMEOUT, cwd=folder, text=True)
    assert done.returncode == 0, done.stderr
    return find_digests(done.stdout).pop()


def find_digests(output: str) -> set[str]:
    return set(re.findall(r"DIGEST (\w+)", output))


def said(output: str) -> list[str]:
    """Return what the launcher said, without where the run is."""
    lines = re.findall(r"^lockstep: (.*)", output, re.MULTILINE)
    return [line for line in lines if not line.startswith(("the run is in", "host 1 (b) joined"))]


def find_places(output: str, step: int) -> set[tuple[int, ...]]:
    """Return rank, world size, local rank, local world size and host of each rank in a step."""
    found = re.findall(rf"STEP {step} (.*)", output)
    return {tuple(map(int, each.split())) for each in found}


def test_a_killed_host_is_lost_and_joins_again(start, digest):
    launch = start("--max", "2", STOPS="1", FULL="2")
    launch.wait_until_stopped()
    launch.net.b.kill()  # launcher, fork server and rank, in the middle of a step
    assert launch.finish("b")[0] == -signal.SIGKILL
    launch.b = launch.start("b")
    status, output = launch.finish("a")
    assert (status, said(output)) == (
        0,
        [
            "host 1 (b) closed the connection: member 1 is lost",
            "round 1: 1 rank",
            "round 2: 2 ranks, member 2 joined",
        ],
    ), output
    assert find_places(output, 5) == {(0, 2, 0, 1, 0)}
    assert find_places(output, 6) == {(0, 1, 0, 1, 0)}
    assert find_places(output, 12) == {(0, 2, 0, 1, 0)}
    status, joined = launch.finish("b")
    assert (status, said(joined)) == (0, [])
    assert find_places(joined, 12) == {(1, 2, 0, 1, 1)}
    assert "BACKEND lockstep HostProcessGroup" in output
    assert "BACKEND lockstep HostProcessGroup" in joined
    assert find_digests(output) == find_digests(joined) == {digest}


def test_a_host_that_is_cut_off_is_lost_within_the_deadline(start, digest):
    """No packet says so: host 0 goes on, and the other host ends by itself."""
    launch = start("--min", "2", "--max", "3", *CUT, STOPS="2")
    launch.wait_until_stopped()
    launch.net.cut("b")
    begun = time.monotonic()
    status, output = launch.finish("a")
    seconds = time.monotonic() - begun
    assert (status, said(output)) == (
        0,
        [f"host 1 (b) was silent for {SILENCE:g} s: member 2 is lost", "round 1: 2 ranks"],
    ), output
    assert SILENCE - 1 < seconds < SILENCE + 20
    assert find_places(output, 5) == {(0, 3, 0, 2, 0), (1, 3, 1, 2, 0)}
    assert find_places(output, 6) == {(0, 2, 0, 2, 0), (1, 2, 1, 2, 0)}
    assert find_digests(output) == {digest}
    assert "BACKEND lockstep LockstepBackend" in output  # in shared memory, without a connection
    (launch.folder / "go on").touch()
    status, lost = launch.finish("b")
    assert status == 75
    (sentence,) = said(lost)
    assert sentence.startswith(f"host 0 (10.77.0.1:29500) was silent for {SILENCE:g} s")
    assert not find_digests(lost)


@pytest.mark.stress
@pytest.mark.parametrize("fault", ["kill", "vanish"])
def test_a_run_that_loses_the_host_of_its_store_is_resumed(start, digest, fault):
    launch = start("--max", "4", *CUT, STOPS="1", CHECKPOINT="1")
    launch.wait_until_stopped()
    saved = launch.wait_for_checkpoint()
    if fault == "kill":
        launch.net.a.kill()
    else:
        launch.net.vanish("a")
    status, lost = launch.finish("b")
    assert status == 75
    (sentence,) = said(lost)
    how = {"kill": "closed the connection", "vanish": f"was silent for {SILENCE:g} s"}[fault]
    folder = launch.run_folder().relative_to(launch.folder)
    assert sentence.startswith(f"host 0 (10.77.0.1:29500) {how}")
    assert sentence.endswith(f"lockstep run --resume {folder}")
    assert launch.finish("a")[0] == -signal.SIGKILL
    launch.net.restore("a")
    (launch.folder / "go on").touch()
    for name in ("a", "b"):
        setattr(launch, name, launch.start(name, "--resume", str(folder), script=""))
    for name in ("a", "b"):
        status, output = launch.finish(name)
        assert (status, find_digests(output)) == (0, {digest}), output
        assert len(find_places(output, 12)) == 2
        assert (f"resumed after step {saved}" in output) == (name == "a"), output


def find_store(launcher: int) -> psutil.Process:
    """Return the process that serves the store of a launch: one of its threads says so."""
    for process in psutil.Process(launcher).children(recursive=True):
        names = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/comm")]
        if any(name.startswith("pt_tcpstore") for name in names):
            return process
    raise AssertionError("there is no store")


def test_a_store_that_is_killed_with_all_ranks_is_replaced(start, digest):
    """New ranks would wait for it until the limit of init."""
    launch = start("--max", "2", STOPS="1", CHECKPOINT="1")
    launch.wait_until_stopped()
    launch.wait_for_checkpoint()
    store = find_store(launch.a.pid)
    ranks = [
        process
        for launcher in (launch.a, launch.b)
        for process in psutil.Process(launcher.pid).children(recursive=True)
        if process.ppid() != launcher.pid and process != store
    ]
    assert len(ranks) == 2
    for process in (store, *ranks):
        process.kill()
    (launch.folder / "go on").touch()
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    assert "the process of the ranks' store was killed by SIGKILL" in said(output)
    assert "round 1: 2 ranks, in new processes" in said(output)
    assert find_digests(output) == find_digests(of_b) == {digest}


@pytest.mark.stress
@pytest.mark.parametrize("survives", [True, False])
def test_a_round_without_the_store_has_new_processes(start, digest, survives):
    """Ranks that have joined do without it, until one of them is lost."""
    launch = start("--max", "2", STOPS="1", CHECKPOINT="1", FULL="2")
    launch.wait_until_stopped()
    launch.wait_for_checkpoint()
    find_store(launch.a.pid).kill()
    if not survives:
        launch.net.b.kill()
        launch.finish("b")
        launch.b = launch.start("b")
    (launch.folder / "go on").touch()
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    assert "the process of the ranks' store was killed by SIGKILL" in said(output)
    assert ("in new processes" in output) == (not survives)
    assert find_digests(output) == find_digests(of_b) == {digest}


@pytest.mark.stress
def test_connections_between_ranks_that_are_reset_are_made_again(start, digest):
    """No rank has died: the step is repeated in the next round."""
    if not (shutil.which("nft") and shutil.which("ss")):
        pytest.skip("needs nft and ss")
    launch = start("--max", "2", STOPS="1")
    launch.wait_until_stopped()
    store = rf":(\d+) .*pid={find_store(launch.a.pid).pid},"
    (port,) = set(re.findall(store, launch.net.a.namespaces.run(["ss", "-Hltnp"])))
    rules = (
        "type filter hook input priority 0;"
        f"ip saddr {launch.net.b.address} tcp dport != {{ 29500, {port} }} "
        "counter reject with tcp reset;"
    )
    nft = launch.net.a.namespaces.run
    nft(["nft", "-f", "-"], input=f"table inet broken {{\nchain arriving {{\n{rules}\n}}\n}}\n")

    def is_reset() -> bool:
        printed = nft(["nft", "list", "table", "inet", "broken"])
        return re.search(r"packets [1-9]", printed) is not None

    (launch.folder / "go on").touch()
    until(is_reset, "nothing was reset", TIMEOUT)
    nft(["nft", "delete", "table", "inet", "broken"])
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    assert "round 1: 2 ranks" in output
    assert find_digests(output) == find_digests(of_b) == {digest}


@pytest.mark.stress
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_may_be_killed_before_others_connect_to_it(start, digest, victim):
    launch = start("--max", "2", PUBLISHES=victim)
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    assert f"member {victim} was killed by SIGKILL" in said(output)
    assert "round 1: 2 ranks, in new processes" in said(output)
    assert find_digests(output) == find_digests(of_b) == {digest}


@pytest.mark.stress
def test_a_host_that_is_lost_before_the_ranks_have_joined(start, digest):
    """The others would wait for its ranks in init: they are replaced."""
    launch = start("--max", "2", WAITS="1")
    launch.wait_until_stopped()
    launch.net.b.kill()
    status, output = launch.finish("a")
    assert (status, said(output)) == (
        0,
        [
            "host 1 (b) closed the connection: member 1 is lost",
            "round 1: 1 rank, in new processes",
        ],
    ), output
    assert find_digests(output) == {digest}


@pytest.mark.stress
@pytest.mark.parametrize("dead", ["1", "3", "0 1"])
def test_killed_ranks_are_replaced_on_their_host(start, digest, dead):
    """The others, to which no packet may say so, do not wait for them."""
    launch = start("--max", "4", DIES=dead, FULL="4")
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    killed = [f"member {member} was killed by SIGKILL" for member in dead.split()]
    assert set(killed) <= set(said(output))
    places = find_places(output, 12) | find_places(of_b, 12)
    assert len(places) == 4
    assert {each[2:] for each in places} == {(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)}
    assert find_digests(output) | find_digests(of_b) == {digest}


@pytest.mark.stress
def test_the_number_of_ranks_is_that_of_all_hosts(start, digest):
    launch = start("--max", "2", STOPS="1", FULL="4")
    launch.wait_until_stopped()
    (folder,) = {path.parent for path in launch.folder.glob("runs/*/rank-0.log")}
    scale = [*warm.LOCKSTEP, "scale", str(folder), "4"]
    assert warm.run(scale, timeout=TIMEOUT, cwd=launch.folder).returncode == 0
    (launch.folder / "go on").touch()
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    assert {each[-1] for each in find_places(output, 12)} == {0}
    assert {each[0] for each in find_places(output, 12)} == {0, 1}
    assert {each[0] for each in find_places(of_b, 12)} == {2, 3}
    assert find_digests(output) | find_digests(of_b) == {digest}


def test_a_member_that_goes_on_waiting_for_a_lost_one_is_replaced(start, digest):
    launch = start("--max", "4", STOPS="2", STUCK="1")
    launch.wait_until_stopped()
    until((launch.folder / "waiting").exists, "member 1 does not wait", TIMEOUT)
    launch.net.b.kill()
    status, output = launch.finish("a")
    assert status == 0, output
    assert "member 1 still waits for member " in output
    assert "member 1 was killed by SIGKILL" in output
    assert find_digests(output) == {digest}


@pytest.mark.stress
def test_a_host_that_is_asked_to_stop_leaves(start, digest):
    launch = start("--max", "2", STOPS="1")
    launch.wait_until_stopped()
    launch.b.send_signal(signal.SIGTERM)
    status, left = launch.finish("b")
    assert (status, said(left)[0]) == (143, "SIGTERM: this host leaves the run")
    status, output = launch.finish("a")
    assert status == 0, output
    assert said(output) == [
        "host 1 (b) was asked to stop and leaves, with member 1",
        "round 1: 1 rank",
    ]
    assert find_digests(output) == {digest}


@pytest.mark.stress
def test_a_run_that_is_asked_to_stop_saves_a_checkpoint_and_ends_on_every_host(start, digest):
    launch = start("--max", "2", STOPS="1", CHECKPOINT="1")
    launch.wait_until_stopped()
    launch.a.send_signal(signal.SIGTERM)
    (launch.folder / "go on").touch()
    (status, output) = launch.finish("a")
    (other, of_b) = launch.finish("b")
    assert (status, other) == (75, 75), output + of_b
    folder = launch.run_folder().relative_to(launch.folder)
    assert f"lockstep run --resume {folder}" in output
    assert f"lockstep run --resume {folder}" in of_b


@pytest.mark.stress
@pytest.mark.parametrize("storage", ["replicated", "sharded"])
def test_a_run_ends_when_too_few_ranks_are_left(start, storage):
    """The others would stay in their processes, or be replaced."""
    launch = start("--min", "2", "--max", "2", STOPS="1", STORAGE=storage)
    launch.wait_until_stopped()
    launch.net.b.kill()
    status, output = launch.finish("a")
    assert status == 1
    assert said(output)[-1] == (
        "round 0: 1 rank left, fewer than --min 2, and the hosts that are left have all of their "
        "ranks"
    )


@pytest.mark.stress
def test_an_error_on_another_host_ends_the_run_everywhere(start):
    launch = start("--max", "2", RAISES="1")
    (status, output) = launch.finish("a")
    (other, of_b) = launch.finish("b")
    assert (status, other) == (1, 1)
    assert "member 1 raised OSError: out of paper" in output
    assert "member 1 raised OSError: out of paper" in said(of_b)[-1]


@pytest.mark.stress
@pytest.mark.parametrize("dead", ["3", "0"])
def test_hosts_need_no_common_folder_while_rank_0_stays(start, digest, dead):
    """One of a host with two ranks is killed: the state reaches the new one over the network."""
    launch = start("--max", "4", is_apart=True, DIES=dead, FULL="4", CHECKPOINT="1")
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    assert len(find_places(output, 12) | find_places(of_b, 12)) == 4
    assert find_digests(output) | find_digests(of_b) == {digest}
    assert [path.parent.parent.parent.name for path in launch.folder.glob("*/runs/*/checkpoints")]


@pytest.mark.stress
def test_shards_of_a_lost_host_are_those_of_a_checkpoint(start, digest):
    launch = start("--max", "4", STOPS="3", STORAGE="sharded", CHECKPOINT="1")
    launch.wait_until_stopped()
    saved = launch.wait_for_checkpoint()
    launch.net.b.kill()
    status, output = launch.finish("a")
    assert status == 0, output
    assert "round 1: 2 ranks, in new processes" in said(output)
    assert f"round 1 continues from the checkpoint of step {saved}; {5 - saved} step" in output
    assert find_digests(output) == {digest}


@pytest.mark.stress
@pytest.mark.parametrize("layout", [{"STAGES": "2"}, {"STORAGE": "sharded"}])
def test_processes_that_cannot_stay_continue_from_a_checkpoint(start, digest, layout):
    launch = start("--max", "4", DIES="3", CHECKPOINT="1", **layout)
    (status, output) = launch.finish("a")
    (_, of_b) = launch.finish("b")
    assert status == 0, output + of_b
    assert "round 1: 4 ranks, in new processes" in said(output)
    assert find_digests(output) | find_digests(of_b) == {digest}
