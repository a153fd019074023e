"""Private stores and rendezvous files: other users can neither reach nor replace them."""

import os
import stat
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.kernel.errors import LockstepError, RendezvousError
from lockstep.launcher.local_rendezvous import RendezvousFile, attach_store, create_store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The place of the folder, where there is nothing yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "launch/7")
    return tmp_path / f"lockstep-{os.getuid()}"


def test_other_ranks_read_what_rank_0_wrote_until_it_is_removed(folder):
    first, second = RendezvousFile(0), RendezvousFile(1)
    assert second.read() is None
    first.write("4000 3 17")
    assert second.read() == "4000 3 17"
    first.write("4001 3 18")  # what an earlier launch left is replaced
    assert second.read() == "4001 3 18"
    first.remove()
    first.remove()
    assert second.read() is None
    assert list(folder.iterdir()) == []


def test_the_folder_gets_mode_0700(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    RendezvousFile(0).write("1")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "launch-7")]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("kind", ["fifo", "file", "link"])
@pytest.mark.parametrize("use", ["write", "read", "remove"])
def test_anything_else_with_the_folders_name_is_an_error(folder, kind, use):
    plant(kind, folder)
    with pytest.raises(RendezvousError, match=rf"rank 2: .* through {folder}, which is not safe"):
        getattr(RendezvousFile(2), use)(*(["1"] if use == "write" else []))


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_anything_else_with_the_files_name_is_an_error(folder, kind):
    folder.mkdir(mode=0o700)
    plant(kind, folder / "launch-7")
    with pytest.raises(RendezvousError, match=rf"through {folder}/launch-7, which is not safe"):
        RendezvousFile(1).read()


def test_a_link_with_the_files_name_is_not_followed(folder, tmp_path):
    folder.mkdir(mode=0o700)
    plant("link", folder / "launch-7")
    RendezvousFile(0).write("4000 3 17")
    assert (tmp_path / "victim").read_text() == "precious"
    assert RendezvousFile(1).read() == "4000 3 17"


def plant(kind, path):
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("4000 3 17")
    elif kind == "folder":
        path.mkdir()
    else:
        victim = path.parents[1] / "victim"
        victim.write_text("precious")
        path.symlink_to(victim)


def test_the_folder_of_another_user_is_an_error_that_names_the_owner(folder, monkeypatch):
    RendezvousFile(0).write("1")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for use in (lambda: RendezvousFile(0).write("1"), RendezvousFile(1).read):
        with pytest.raises(RendezvousError, match=r"\(it belongs to user \w+\): remove it, or set"):
            use()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
@pytest.mark.parametrize("kind", ["fifo", "file", "folder"])
def test_ranks_of_srun_do_not_wait_for_files_of_another_user(tmp_path, kind):
    def join():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name)
        rank = os.environ.pop("ROLE_RANK")
        os.environ.pop("MASTER_ADDR"), os.environ.pop("MASTER_PORT")
        os.environ |= {
            "TMPDIR": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
        }  # fmt: skip
        try:
            ls.init(timeout=1000)
        except LockstepError as error:
            return type(error).__name__, str(error)
        return "joined"

    planted = tmp_path / "lockstep-0"
    plant(kind, planted)
    os.chown(planted, 1, 1)
    for rank, (name, sentence) in enumerate(ls.launch(join, nprocs=2, timeout=60)):
        assert name == "RendezvousError"
        assert sentence.startswith(
            f"rank {rank}: the ranks of this host connect through {planted},"
        )


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
    """Write into the store at MASTER_ADDR:MASTER_PORT, as any user of this host can."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False,
        wait_for_workers=False,
    )  # fmt: skip
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
        return tensor.item(), store.num_keys() - keys

    assert ls.launch(join, nprocs=2, timeout=60) == [(2.0, 0)] * 2


@needs_linux
@pytest.mark.parametrize("value", POISON)
def test_without_a_private_store_foreign_values_are_an_error(value):
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
