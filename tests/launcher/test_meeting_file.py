"""The meeting file: nothing that another user put at its place is followed or waited for."""

import os
import stat
import tempfile

import pytest

import lockstep as ls
from lockstep.errors import LockstepError, RendezvousError
from lockstep.launcher.meeting_file import MeetingFile


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The place of the folder, where there is nothing yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "launch/7")
    return tmp_path / f"lockstep-{os.getuid()}"


def test_the_others_read_what_rank_0_wrote_until_it_is_removed(folder):
    first, second = MeetingFile(0), MeetingFile(1)
    assert second.read() is None
    first.write("4000 3 17")
    assert second.read() == "4000 3 17"
    first.write("4001 3 18")  # what an earlier launch left is replaced
    assert second.read() == "4001 3 18"
    first.remove()
    first.remove()
    assert second.read() is None
    assert list(folder.iterdir()) == []


def test_only_this_user_may_enter_the_folder_whatever_its_mode_was(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    MeetingFile(0).write("1")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "launch-7")]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("kind", ["fifo", "file", "link"])
@pytest.mark.parametrize("use", ["write", "read", "remove"])
def test_what_has_the_folders_name_is_named_and_not_waited_for(folder, kind, use):
    plant(kind, folder)
    with pytest.raises(RendezvousError, match=rf"rank 2: .* through {folder}, which is not this"):
        getattr(MeetingFile(2), use)(*(["1"] if use == "write" else []))


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_what_has_the_files_name_is_named_and_not_waited_for(folder, kind):
    folder.mkdir(mode=0o700)
    plant(kind, folder / "launch-7")
    with pytest.raises(RendezvousError, match=rf"through {folder}/launch-7, which is not this"):
        MeetingFile(1).read()


def test_a_link_at_the_files_name_is_not_written_through(folder, tmp_path):
    folder.mkdir(mode=0o700)
    plant("link", folder / "launch-7")
    MeetingFile(0).write("4000 3 17")
    assert (tmp_path / "victim").read_text() == "precious"
    assert MeetingFile(1).read() == "4000 3 17"


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


def test_another_users_folder_is_named_with_its_owner(folder, monkeypatch):
    MeetingFile(0).write("1")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for use in (lambda: MeetingFile(0).write("1"), MeetingFile(1).read):
        with pytest.raises(RendezvousError, match=r"\(it belongs to user \w+\): remove it, or set"):
            use()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
@pytest.mark.parametrize("kind", ["fifo", "file", "folder"])
def test_ranks_of_srun_do_not_wait_for_what_another_user_planted(tmp_path, kind):
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
        tempfile.tempdir = None  # the ranks' parent may have looked TMPDIR up before the fork
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
        assert sentence.startswith(f"rank {rank}: the ranks of this host meet through {planted},")
