"""Files that only their owner can read, complete or not there."""

import os
import re
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lockstep
from lockstep import files
from lockstep.files import (
    create_file,
    make_folder,
    open_for_write,
    open_or_create,
    remove_tree,
    replace_file,
    write_output,
)
from lockstep.kernel.errors import FileError
from lockstep.training.weights_file import save_weights


@pytest.fixture(params=[0o000, 0o022, 0o077], ids="umask {:03o}".format)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_modes_do_not_depend_on_the_umask(tmp_path, umask):
    make_folder(tmp_path / "a" / "b")
    os.close(create_file(tmp_path / "a" / "created"))
    os.close(open_or_create(tmp_path / "a" / "locked", os.O_RDWR))
    open_for_write(tmp_path / "a" / "opened").close()
    with replace_file(tmp_path / "a" / "replaced"):
        pass
    assert [mode(tmp_path / name) for name in ("a", "a/b")] == [0o700] * 2
    write_output(tmp_path / "a" / "printed", "text")
    assert [mode(path) for path in sorted((tmp_path / "a").glob("*ed"))] == [0o600] * 5


def test_what_exists_keeps_its_mode(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o755)
    make_folder(tmp_path / "shared")
    make_folder(tmp_path / "shared" / "run")
    assert (mode(tmp_path / "shared"), mode(tmp_path / "shared/run")) == (0o755, 0o700)
    file = tmp_path / "weights"
    file.write_bytes(b"old")
    file.chmod(0o640)
    with replace_file(file) as out:
        out.write(b"new")
    assert (file.read_bytes(), mode(file)) == (b"new", 0o640)
    with open_for_write(file) as out:
        out.write(b"newer")
    assert (file.read_bytes(), mode(file)) == (b"newer", 0o640)


def test_another_users_file_gives_no_mode_to_the_one_that_replaces_it(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"planted")
    file.chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with replace_file(file) as out:
        out.write(b"new")
    assert (file.read_bytes(), mode(file)) == (b"new", 0o600)


def test_a_new_folder_may_be_required(tmp_path):
    make_folder(tmp_path / "run", exist_ok=False)
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "run", exist_ok=False)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file" / "run")


@pytest.mark.parametrize("kind", ["link", "file", "fifo"])
def test_a_new_file_is_never_one_that_was_there(tmp_path, kind):
    victim = tmp_path / "victim"
    path = tmp_path / "new"
    victim.write_bytes(b"precious")
    plant(kind, path, victim)
    with pytest.raises(FileExistsError):
        create_file(path)
    assert victim.read_bytes() == b"precious"


def plant(kind, path, victim):
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b"planted")


def test_weights_do_not_go_through_a_link_at_a_temporary_name(tmp_path):
    victim = tmp_path / "victim"
    weights = tmp_path / "m.safetensors"
    victim.write_bytes(b"precious")
    (tmp_path / f".m.safetensors.{os.getpid()}").symlink_to(victim)
    save_weights(weights, {"a": torch.ones(3)}, [torch.ones(3)])
    assert victim.read_bytes() == b"precious"
    assert not weights.is_symlink()
    assert load_file(weights)["a"].tolist() == [1.0] * 3


def test_not_even_where_the_random_name_is_guessed(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "00" * size)
    victim = tmp_path / "victim"
    weights = tmp_path / "m.safetensors"
    victim.write_bytes(b"precious")
    (tmp_path / f".m.safetensors.{'00' * 8}").symlink_to(victim)
    with pytest.raises(FileError, match=r"could not be written \(File exists\)"):
        save_weights(weights, {"a": torch.ones(3)}, [torch.ones(3)])
    assert victim.read_bytes() == b"precious"
    assert not weights.exists()


def test_an_error_leaves_the_old_file_and_no_other(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"old")

    def interrupted():
        with replace_file(file) as out:
            out.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert file.read_bytes() == b"old"


def test_a_replaced_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync = os.fsync
    replace = os.replace

    def synced(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names)))
    with replace_file(tmp_path / "weights") as out:
        out.write(b"new")
    assert done == ["file", "name", "folder"]


def test_a_named_output_may_be_a_device(tmp_path):
    with open_for_write(Path(os.devnull)) as out:
        out.write(b"x")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


SOURCE = Path(lockstep.__file__).parent
PREDICTABLE = re.compile(r"\bmktemp\(|(with_name|with_suffix|open|Path)\(.*(getpid|\.tmp|\.new)")


def test_no_other_module_invents_names_of_temporary_files():
    """Another user can guess them and put a link there: use `files.replace_file`."""
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PREDICTABLE.search(line) and "mkdtemp(" not in line  # which adds what nobody can guess
    ]
    assert not found


@pytest.mark.parametrize("leads_to", ["a file", "nothing"])
def test_an_output_replaces_a_link_and_not_the_file_that_it_leads_to(tmp_path, leads_to):
    victim = tmp_path / "victim"
    output = tmp_path / "report.html"
    if leads_to == "a file":
        victim.write_bytes(b"precious")
    output.symlink_to(victim)
    write_output(output, "new")
    assert (output.read_text(), output.is_symlink()) == ("new", False)
    assert victim.exists() == (leads_to == "a file")
    assert not victim.exists() or victim.read_bytes() == b"precious"


def test_an_output_goes_through_a_link_to_a_pipe_or_device(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    write_output(tmp_path / "null", "new")
    assert (tmp_path / "null").is_symlink()


def test_a_removed_link_leaves_the_folder_that_it_leads_to(tmp_path):
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "archive")
    remove_tree(tmp_path / "link")
    assert [path.name for path in tmp_path.rglob("*")] == ["archive", "file"]
    remove_tree(tmp_path / "archive")
    remove_tree(tmp_path / "not there")
    assert not [*tmp_path.iterdir()]
