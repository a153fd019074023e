"""The messages of Gloo and of torch's store from which decisions are taken, provoked for real."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys

import pytest
from torch.distributed import DistBackendError, DistNetworkError  # type: ignore[attr-defined]

import warm
from lockstep import foreign_messages
from lockstep.foreign_messages import GLOO_TIMEOUTS, LOST_PEERS, ForeignMessage, says_lost_peer

PROGRAM = """
import json, os, queue, signal, sys, threading
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from lockstep.foreign_messages import is_gloo_timeout, is_of_gloo_connection, says_lost_peer

case = sys.argv[1]
path = sys.argv[2] + "/store"
ready, is_ready = os.pipe()
seconds = timedelta(seconds=30)


class Store(dist.Store):
    "Kills its process once it has published its address."

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value):
        self.inner.set(key, value)
        os.kill(os.getpid(), signal.SIGKILL)


for name in ("get", "add", "check", "wait", "multi_get"):
    setattr(Store, name, lambda self, *given, name=name: getattr(self.inner, name)(*given))


def connect(rank, store):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = seconds
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo", lazy_init=False)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def run_other():
    "The other process: rank 0 of Gloo, or the server of a store."
    if case.startswith("store"):
        server = dist.TCPStore("127.0.0.1", 0, None, True, seconds, wait_for_workers=False)
        Path(path + ".new").write_text(str(server.port))
        os.rename(path + ".new", path + ".port")
    elif case == "gloo connects":
        connect(0, Store(dist.FileStore(path, 2)))
    else:
        group = connect(0, dist.FileStore(path, 2))
    os.write(is_ready, b"x")
    signal.pause()


def end(pid, number=signal.SIGKILL):
    os.kill(pid, number)
    os.waitpid(pid, os.WUNTRACED)


def provoke(pid):
    tensor = torch.ones(1 << 16)
    if case.startswith("store"):
        os.read(ready, 1)
        port = int(Path(path + ".port").read_text())
        store = dist.TCPStore("127.0.0.1", port, None, False, seconds, wait_for_workers=False)
        store.add("key", 1)
        if case == "store is reset":
            end(pid, signal.SIGSTOP)
            store.set("key", "value")  # unread
        end(pid)
        if case == "store is gone":
            try:
                store.add("key", 1)
            except RuntimeError:
                pass
        store.add("key", 1)
        store.add("key", 1)
    else:
        group = connect(1, dist.FileStore(path, 2))
        os.read(ready, 1)
        if case == "gloo is reset":
            end(pid, signal.SIGSTOP)
            # Both are unread. No call follows the end of the process: one that writes could take
            # the connection's error, and the thread that reads would find it closed.
            sent = group.send([tensor], 0, 0)
            received = group.recv([tensor], 0, 0)
            end(pid)
            received.wait()
        elif case == "gloo is closed":
            end(pid)
            group.recv([tensor], 0, 0).wait()
        else:
            try:
                group.recv([tensor], 0, 0).wait(timedelta(milliseconds=1))
            except RuntimeError:
                if case == "gloo is late":
                    raise
            group.recv([tensor], 0, 0).wait()


def begin():
    pid = os.fork()
    if pid == 0:
        try:
            run_other()
        finally:
            os._exit(0)
    return pid


def describe(error):
    message = str(error)
    return [
        message, says_lost_peer(error), is_gloo_timeout(message), is_of_gloo_connection(message)
    ]


if case == "gloo connects":
    # Of two ranks, the one with the higher port connects, and the other one waits for it: one of
    # many ranks at once does the first.
    paths = [f"{path}-{number}" for number in range(12)]
    for path in paths:
        os.waitpid(begin(), 0)
    found = queue.SimpleQueue()

    def attempt(path):
        try:
            connect(1, dist.FileStore(path, 2))
        except RuntimeError as error:
            found.put(describe(error))

    for path in paths:
        threading.Thread(target=attempt, args=[path], daemon=True).start()
    print(json.dumps(found.get()), flush=True)
    os._exit(0)

pid = begin()
try:
    provoke(pid)
except RuntimeError as error:
    print(json.dumps(describe(error)))
finally:
    try:
        end(pid)
    except (ProcessLookupError, ChildProcessError):
        pass
"""

PROVOKED = {
    "gloo is closed": ["connection closed by peer"],
    "gloo is reset": ["connection reset by peer", "read error ["],
    "gloo connects": ["timed out connecting"],
    "gloo closes": ["caused pair closure"],
    "gloo is late": ["timed out waiting"],
    "store ends": ["failed to recv, got 0 bytes"],
    "store is gone": ["broken pipe"],
    "store is reset": ["connection reset by peer"],
}
"""For each case of the program, the entries of which its message must have the words."""


def find_entries(case: str) -> list[ForeignMessage]:
    library = case.partition(" ")[0]
    known = [each for each in (*LOST_PEERS, *GLOO_TIMEOUTS) if each.library == library]
    return [each for each in known if each.words in PROVOKED[case]]


@pytest.mark.parametrize("case", PROVOKED)
def test_the_message_of_this_version_of_torch_is_known(case, tmp_path):
    command = [sys.executable, "-c", PROGRAM, case, str(tmp_path)]
    done = warm.run(command, timeout=120, text=True)
    message, is_lost, is_late, is_of_connection = json.loads(done.stdout.splitlines()[-1])
    entries = find_entries(case)
    assert len(entries) == len(PROVOKED[case])
    assert all(entry.is_in(message) for entry in entries), message
    assert (is_lost, is_late) == (case != "gloo is late", case == "gloo is late")
    assert is_of_connection == case.startswith("gloo")


def test_every_entry_is_provoked_or_says_why_it_is_not():
    provoked = {(each.library, each.words) for case in PROVOKED for each in find_entries(case)}
    for entry in (*LOST_PEERS, *GLOO_TIMEOUTS):
        assert entry.when
        assert entry.seen
        is_excused = entry.when == "not reproduced" or entry.library == "nccl"
        assert ((entry.library, entry.words) in provoked) != is_excused, entry


def test_the_words_of_the_system_in_messages_of_torch_are_known():
    assert os.strerror(errno.ENOSPC) == foreign_messages.FULL_MEMORY
    assert f"signal: {signal.strsignal(signal.SIGTERM)}" == foreign_messages.LOADER_TERMINATED


def test_the_class_of_an_exception_names_its_library():
    nccl = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote process "
        "exited or there was a network error, NCCL version 2.26.2"
    )
    assert says_lost_peer(DistBackendError(nccl))
    assert says_lost_peer(DistNetworkError("Broken pipe"))
    assert not says_lost_peer(DistBackendError("Broken pipe"))
    assert not says_lost_peer(DistNetworkError("The client socket has timed out after 2000ms"))
    assert not says_lost_peer(RuntimeError("Broken pipe"))  # of the script's own
    assert not says_lost_peer(ConnectionResetError("Connection reset by peer"))
    mismatch = "[enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:463] 64 vs 40"
    assert foreign_messages.is_of_gloo_connection(mismatch)
    assert not says_lost_peer(RuntimeError(mismatch))
