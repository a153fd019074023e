"""A forked child of a rank can use nothing of the backend "lockstep", and harms nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import pytest_lockstep
from lockstep.comm import backend
from lockstep.comm.bucket import Bucket, Member
from lockstep.comm.native_all_reduce import NativeAllReduce
from lockstep.comm.shared_memory import create_group_tensor, empty_shared
from placed import join

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

on_lockstep = {"backend": "lockstep"}

LOCAL = {
    "Options", "_get_backend_name", "_get_sequence_number_for_group", "_pybind11_conduit_v1_",
    "_set_default_timeout", "_set_sequence_number_for_group", "allocate_tensor", "longest_message",
    "name", "options", "rank", "set_timeout", "size",
    "supports_coalescing", "supports_shrinking", "supports_splitting", "supports_tensor_alloc",
    "supports_time_estimate",
}  # fmt: skip
"""Methods that read or change only what the child has a copy of."""

UNSUPPORTED = {
    "eager_connect_single_device", "mem_allocator", "memory_stats", "resume",
    "setUsePgForSymmMemRendezvous", "shrink", "suspend",
}  # fmt: skip
"""Methods of torch that the backend does not implement."""


def in_child(act: Callable[[], Any]) -> Any:
    """Run `act` in a forked child of this process, and return its value, which is plain data."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)  # instead of waiting for ever
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        value = said.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child was killed"
    return json.loads(value)


def raised(call: Callable[[], object]) -> str:
    """Return the type and message of what a call raises, "" if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def methods(native: Any) -> dict[str, Callable[[], object]]:
    """Return a call of every method of the backend that other ranks take part in or notice."""
    one = torch.ones(2)
    two = torch.ones(4)
    lists = [[torch.ones(2), torch.ones(2)]]
    plan = Bucket(torch.float32, (Member(0, 4, 0),), 16)
    exact = NativeAllReduce(native, plan, [[(0, 1)], [(1, 2)]], 2, native.rank())
    return {
        "_abort_because": lambda: native._abort_because("a test"),
        "_allgather_base": lambda: native._allgather_base(two, one),
        "_end_coalescing": native._end_coalescing,
        "_reduce_scatter_base": lambda: native._reduce_scatter_base(one, two),
        "_start_coalescing": native._start_coalescing,
        "abort": native.abort,
        "advance": native.advance,
        "all_gather_bytes": lambda: native.all_gather_bytes(b"message"),
        "allgather": lambda: native.allgather(lists, [one]),
        "allgather_coalesced": lambda: native.allgather_coalesced([[one], [one]], [one]),
        "allreduce": lambda: native.allreduce([one]),
        "allreduce_coalesced": lambda: native.allreduce_coalesced([one]),
        "alltoall": lambda: native.alltoall(lists[0], [one, one]),
        "alltoall_base": lambda: native.alltoall_base(two, two, [], []),
        "barrier": native.barrier,
        "broadcast": lambda: native.broadcast([one]),
        "reproducible_all_reduce": lambda: exact.launch({(0, 1): [torch.ones(4)]}),
        "gather": lambda: native.gather(lists[0], one, 0),
        "monitored_barrier": native.monitored_barrier,
        "recv": lambda: native.recv([one], 1, 0),
        "recv_anysource": lambda: native.recv_anysource([one], 0),
        "reduce": lambda: native.reduce(one, 0),
        "reduce_scatter": lambda: native.reduce_scatter([one], lists),
        "scatter": lambda: native.scatter(one, lists[0], 0),
        "send": lambda: native.send([one], 1, 0),
        "share": lambda: native.share(8),
        "shutdown": native.shutdown,
    }  # fmt: skip


def torch_calls(pending: dict[str, dist.Work]) -> dict[str, Callable[[], object]]:
    """Return calls of torch.distributed, and of works that were begun before the fork."""
    two = torch.ones(4)

    def managed() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(two)

    def asks(work: dist.Work) -> dict[str, Callable[[], object]]:
        return {"wait": work.wait, "is_completed": work.is_completed, "future": work.get_future}

    return {
        "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
        "manager": managed,
        "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, two, 1)]),
        "new_group": dist.new_group,
        "destroy": dist.destroy_process_group,
        "shutdown": ls.shutdown,
        "shared": lambda: create_group_tensor(8, torch.uint8),
        **{
            f"{name} {asked}": call
            for name, work in pending.items()
            for asked, call in asks(work).items()
        },
    }


def begin() -> dict[str, dist.Work]:
    """Begin calls that end only when the other rank makes them too."""
    other = 1 - dist.get_rank()
    return {
        "collective": dist.all_reduce(torch.ones(2), async_op=True),
        "message": dist.irecv(torch.ones(2), other),
    }


def finish(pending: dict[str, dist.Work]) -> dict[str, Any]:
    """Return what the group still does."""
    dist.send(torch.ones(2), 1 - dist.get_rank())
    for work in pending.values():
        work.wait()
    group = dist.new_group()
    total = torch.tensor([dist.get_rank() + 1.0])
    again = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    dist.all_reduce(again, group=group)
    return {"sums": [total.item(), again.item()]}


def call_all() -> dict[str, Any]:
    """Make every call in a child of rank 0, then go on in both ranks."""
    native = backend.of_group(None)
    dist.barrier()
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        pending = begin()

        def child() -> dict[str, str]:
            calls = {
                **{f"backend.{name}": call for name, call in methods(native).items()},
                **torch_calls(pending),
            }
            return {name: raised(call) for name, call in calls.items()}

        found = {"told": in_child(child), "names": dir(native), "pid": os.getpid()}
    else:
        pending = begin()
    return found | finish(pending)


def test_a_forked_child_is_refused_in_every_operation_and_the_ranks_go_on(ranks):
    found, other = ranks(call_all, 2, **on_lockstep)
    assert found["sums"] == other["sums"] == [3.0, 3.0]
    for name, told in found["told"].items():
        assert f"is a fork of process {found['pid']}" in told, (name, told)
        assert told.startswith(("BackendError ", "RuntimeError ", "WorkError ")), (name, told)
        assert "\n" not in told, (name, told)
    sentence = found["told"]["backend.allreduce"]
    assert "BackendError rank 0: process " in sentence
    assert f"cannot use the group: make this call in process {found['pid']}" in sentence
    assert "cannot create process groups" in found["told"]["new_group"]
    # No method is forgotten: a new one must be refused, or be listed as local.
    known = {name.removeprefix("backend.") for name in found["told"]} | LOCAL | UNSUPPORTED
    assert {name for name in found["names"] if not name.startswith("__")} <= known


def call_across_hosts(placement: str) -> dict[str, Any]:
    """Make calls in a child of rank 0, and end there, then go on in both ranks."""
    join(placement)
    native = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.barrier()
    told: dict[str, str] = {}
    if dist.get_rank() == 0:

        def child() -> dict[str, str]:
            calls = {
                "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
                "send": lambda: dist.send(torch.ones(1), 1),
                "recv": lambda: dist.recv(torch.ones(1)),
                "reproducible_all_reduce": lambda: native.host_group.begin_sum(),
                "abort": native.abort,
                "shutdown": native.shutdown,
            }
            return {name: raised(call) for name, call in calls.items()}

        told = in_child(child)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    return {"told": told, "sum": total.item(), "pid": os.getpid()}


def test_a_forked_child_of_a_rank_across_hosts_is_refused_too():
    found, other = pytest_lockstep.run(call_across_hosts, "ab", ranks=2, timeout=60, init=False)
    assert found["sum"] == other["sum"] == 2.0
    assert len(found["told"]) == 6
    for name, told in found["told"].items():
        assert told.startswith("BackendError rank 0: process "), (name, told)
        assert f"is a fork of process {found['pid']}, which joined group default" in told
        assert f"cannot use the group: make this call in process {found['pid']}" in told
        assert "\n" not in told, (name, told)


def use_private_memory() -> list[float]:
    return in_child(lambda: empty_shared(3).fill_(2.0).tolist())


def test_a_forked_child_may_still_have_shared_memory_of_its_own(ranks):
    assert ranks(use_private_memory, 1, **on_lockstep) == [[2.0] * 3]


# ---- the end of a child ----


def go_on_in_both(how: str) -> str:
    """Fork, and let the child run to the end of the rank's function too."""
    ls.init(backend="lockstep", timeout=60)
    dist.all_reduce(torch.ones(2), async_op=True).wait()  # starts a thread
    child = os.fork() if ls.rank() == 0 else None
    if child == 0:
        signal.alarm(60)
        if how == "raises":
            raise ValueError("only the child raised")
        return "the child's value"
    status = 0 if child is None else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    total = torch.ones(1)
    dist.all_reduce(total)
    return f"{status} {total.item()}"


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1)])
def test_a_forked_child_that_ends_is_not_taken_for_the_rank(how, status):
    assert ls.launch(go_on_in_both, (how,), 2, timeout=100) == [f"{status} 2.0", "0 2.0"]


def run_script(script: str, **variables: str) -> list[str]:
    """Run a program that must say nothing on stderr; return the words it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True, text=True, timeout=100, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


EXITS = """
import os, signal, sys
if (child := os.fork()) == 0:
    signal.alarm(60)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
dist.all_reduce(x); print(*x.tolist())
"""


def test_a_forked_child_that_exits_ends_at_once_and_leaves_the_group_alone():
    # Destroying the group would wait for threads that the child does not have.
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('lockstep', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(2); dist.all_reduce(x, async_op=True).wait()\n"
        f"{EXITS}"
        "dist.destroy_process_group()\n"
    )
    assert run_script(script) == ["0", "1.0", "1.0"]


def test_a_forked_child_that_exits_does_not_say_goodbye_for_its_rank():
    script = (
        "import torch, torch.distributed as dist, lockstep as ls\n"
        "from lockstep.launcher import rendezvous\n"
        "ls.init(backend='lockstep', timeout=60)\n"
        "x = torch.ones(2); dist.all_reduce(x, async_op=True).wait()\n"
        f"{EXITS}"
        "print(rendezvous.ProcessState.store.add('lockstep/left', 0))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    assert run_script(script, **place) == ["0", "1.0", "1.0", "0"]
