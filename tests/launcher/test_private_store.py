"""A store in memory: who reaches it, and that ranks of one host meet there."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.errors import LockstepError
from lockstep.launcher import private_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")


@pytest.fixture
def created():
    descriptor, address = private_store.create()
    yield descriptor, address
    os.close(descriptor)


def descriptors():
    """Return this process's open descriptors."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def attached(address):
    """Attach, and return (the store, the descriptors that this opened)."""
    before = descriptors()
    store = private_store.attach(address)
    return store, list(map(int, descriptors() - before))


def test_what_one_writes_the_other_reads_also_after_the_creators_end():
    descriptor, address = private_store.create()
    store, opened = attached(address)
    os.close(descriptor)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert private_store.attach(address) is None  # the creator has gone
    for each in opened:
        os.close(each)


def test_only_its_owner_may_open_the_file(created):
    assert os.fstat(created[0]).st_mode & 0o777 == 0o600


def test_another_users_store_is_none(created, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert attached(created[1]) == (None, [])


@pytest.mark.parametrize(
    "address", ["", "1", "1 2", "1 2 x", "1 2 3 4", "-1 2 3", "0 0 0", "99999999 3 1", "\x1b[2J"]
)
def test_what_is_no_address_is_no_store(address):
    assert attached(address) == (None, [])


def test_a_number_that_means_another_file_by_now_is_no_store(created, tmp_path):
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
    """Write into the store at MASTER_ADDR:MASTER_PORT, as any user of this host can."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False,
        wait_for_workers=False,
    )  # fmt: skip
    for key in ("size", "complete", "rank/0", "rank/1", "arrived"):
        for prefix in ("lockstep/1/", "/lockstep/1/", ""):
            store.set(f"{prefix}{key}", values)
    return store


@pytest.mark.parametrize("value", POISON)
def test_ranks_of_one_host_do_not_look_at_the_port_that_others_can_write_to(value):
    def join():
        store = poison(value)
        keys = store.num_keys()
        ls.init(timeout=30)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.new_group([0, 1])
        return tensor.item(), store.num_keys() - keys

    assert ls.launch(join, nprocs=2, timeout=60) == [(2.0, 0)] * 2


@pytest.mark.parametrize("value", POISON)
def test_where_the_port_is_all_there_is_an_intruder_is_named_in_one_sentence(value):
    def join():
        os.environ.pop("LOCKSTEP_STORE")
        poison(value)
        try:
            ls.init(timeout=30)
        except LockstepError as error:
            return str(error)
        return "joined"

    for rank, told in enumerate(ls.launch(join, nprocs=2, timeout=60)):
        assert told.startswith(f"rank {rank}: the value of 'size' in the store at 127.0.0.1:")
        assert "was not written by a rank of Lockstep: another program or user writes" in told
        assert told.isprintable()
