"""Private stores: other users cannot reach them."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.kernel.errors import LockstepError
from lockstep.launcher.private_store import attach_store, create_store

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="no private stores")


@pytest.fixture
def created():
    descriptor, address = create_store()
    yield descriptor, address
    os.close(descriptor)


def descriptors():
    """Return this process's open descriptors."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def attached(address):
    """Attach, and return (the store, the descriptors that this opened)."""
    before = descriptors()
    store = attach_store(address)
    return store, list(map(int, descriptors() - before))


@needs_linux
def test_a_store_outlives_its_creator():
    descriptor, address = create_store()
    store, opened = attached(address)
    os.close(descriptor)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert attach_store(address) is None  # the creator has gone
    for each in opened:
        os.close(each)


@needs_linux
def test_only_its_owner_may_open_a_store(created):
    assert os.fstat(created[0]).st_mode & 0o777 == 0o600


@needs_linux
def test_the_store_of_another_user_is_not_attached(created, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert attached(created[1]) == (None, [])


@needs_linux
@pytest.mark.parametrize(
    "address", ["", "1", "1 2", "1 2 x", "1 2 3 4", "-1 2 3", "0 0 0", "99999999 3 1", "\x1b[2J"]
)
def test_invalid_addresses(address):
    assert attached(address) == (None, [])


@needs_linux
def test_a_descriptor_that_was_reused_is_not_attached(created, tmp_path):
    pid, number, inode = created[1].split()
    assert attached(f"{pid} {number} {int(inode) + 1}") == (None, [])
    with (tmp_path / "precious").open("w") as file:
        found = os.fstat(file.fileno())
        assert attached(f"{pid} {file.fileno()} {found.st_ino}") == (None, [])
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    assert attached(f"{pid} {fifo} {os.fstat(fifo).st_ino}") == (None, [])
    os.close(fifo)


POISON = ("\x1b[31m", "{}", "[1]", '{"rank": "0"}')


def poison(values):
    """Write into a store at MASTER_ADDR:MASTER_PORT, as any user of this host can."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, None, ls.rank() == 0, wait_for_workers=False)
    for key in ("size", "complete", "rank/0", "rank/1", "arrived"):
        for prefix in ("lockstep/1/", "/lockstep/1/", ""):
            store.set(f"{prefix}{key}", values)
    return store


@needs_linux
@pytest.mark.parametrize("value", POISON)
def test_ranks_of_one_host_do_not_use_the_store_on_a_port(value):
    def join():
        store = poison(value)
        keys = store.num_keys()
        ls.init(timeout=30)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.new_group([0, 1])
        more = store.num_keys() - keys
        dist.barrier()  # the store ends with rank 0
        return tensor.item(), more

    assert ls.launch(join, nprocs=2, timeout=60) == [(2.0, 0)] * 2


@needs_linux
@pytest.mark.parametrize("value", POISON)
def test_without_a_private_store_foreign_values_are_an_error(value):
    def join():
        os.environ.pop("LOCKSTEP_STORE")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        store = poison(value)
        try:
            ls.init(timeout=30)
        except LockstepError as error:
            store.add("told", 1)
            while ls.rank() == 0 and store.add("told", 0) < 2:  # the store ends with this rank
                time.sleep(0.01)
            return str(error)
        return "joined"

    for rank, told in enumerate(ls.launch(join, nprocs=2, timeout=60)):
        assert told.startswith(f"rank {rank}: the value of 'size' in the store at 127.0.0.1:")
        assert "was not written by a rank of Lockstep: another program or user writes" in told
        assert told.isprintable()
