"""The folder of checkpoints: finding, verifying and reading them.

    runs/NAME/checkpoints/
        step-100/
            manifest.json              every file's size and checksum, written last
            state.json                 values other than tensors; refers to tensors by name
            model.safetensors          the model's state dict, for any program
            optimizer.safetensors      "conv.weight/exp_avg"
            ema.safetensors            the averaged weights, if there are any
            state.safetensors          buffers, registered objects
        .step-200.37/                  being written, renamed when it is complete

With pipeline stages each stage writes separate files: model-00001-of-00002.safetensors, with an
index in the format of Hugging Face's libraries. With sharded storage each rank writes its rows of
every tensor (`lockstep.checkpoint.shards`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lockstep.checkpoint.encoding import decode
from lockstep.checkpoint.schema import find_manifest_mismatch, find_state_mismatch
from lockstep.checkpoint.shards import Rows, find_rows, join_shards
from lockstep.checkpoint.tensor_file import DTYPES, checksum_file
from lockstep.files import read_json, remove_tree
from lockstep.kernel.errors import FileError, LockstepError, UsageError
from lockstep.launcher.run_folder import CHECKPOINTS, RUNS

__all__ = [
    "FORMAT",
    "MANIFEST",
    "REST",
    "count_steps",
    "find_checkpoints",
    "find_newest_valid",
    "locate_checkpoint",
    "name_part",
    "prune",
    "read_checkpoint",
    "refusing_misfits",
    "remove_incomplete",
    "set_aside_newer",
    "verify",
]

MANIFEST = "manifest.json"
FORMAT = 1
KINDS = ("model", "optimizer", "ema")  # kinds of tensors with separate files
REST = "state"
SUFFIX = ".json"

SUPERSEDED = "superseded"

NAME = re.compile(r"step-([0-9]{1,15})(?:-([0-9]{1,15}))?")
INCOMPLETE = re.compile(r"\.step-\d+\.\d+")


def name_part(kind: str, number: int, count: int, suffix: str) -> str:
    """Return the name of file `number` of `count`: "model-00001-of-00002.safetensors"."""
    return f"{kind}{suffix}" if count == 1 else f"{kind}-{number + 1:05}-of-{count:05}{suffix}"


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder of checkpoints, the newest first."""
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match is not None and (path / MANIFEST).is_file():
            checkpoints.append(((int(match[1]), int(match[2] or 1)), path))
    return [path for _, path in sorted(checkpoints, reverse=True)]


def count_steps(path: Path) -> int:
    """Return the number of steps before a checkpoint that `find_checkpoints` returned."""
    return int(path.name.split("-")[1])


def verify(path: Path) -> str:
    """Read every file of a checkpoint; return a description of its damage, or ""."""
    try:
        for name, expected in _read_manifest(path)["files"].items():
            with (path / name).open("rb", buffering=0) as file:
                if checksum_file(file) != expected["xxh3"]:
                    return f"the checksum of {name} differs"
        _read_state(path, has_values=False)
    except OSError as error:
        return f"{Path(error.filename or MANIFEST).name} cannot be read ({error.strerror})"
    except FileError as error:
        return str(error)
    return ""


def find_newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint in a folder, and a sentence per damaged newer one."""
    problems: list[str] = []
    for path in find_checkpoints(folder):
        problem = verify(path)
        if not problem:
            return path, problems
        problems.append(f"the checkpoint {path} is damaged: {problem}")
    return None, problems


def locate_checkpoint(name: str | Path, runs: str | Path = RUNS) -> tuple[Path | None, Path]:
    """Return the checkpoint at `place` (None for a run) and the folder of checkpoints.

    Args:
        name: A checkpoint, a run's folder, or the name of a run in `runs`.
        runs: The folder of runs.

    Raises:
        UsageError: There is neither a checkpoint nor a run.
    """
    paths = (Path(name), Path(runs) / name)
    for path in paths:
        if (path / MANIFEST).is_file():
            return path, path.parent
    folders = [
        path if find_checkpoints(path) else path / CHECKPOINTS for path in paths if path.is_dir()
    ]
    for folder in folders:
        if find_checkpoints(folder):
            return None, folder
    if folders:
        return None, folders[0]
    raise UsageError(f"there is no run and no checkpoint at {name}; `lockstep runs` lists the runs")


def read_checkpoint(path: Path, rows: Rows | None = None) -> dict[str, Any]:
    """Return the state that a checkpoint holds, of all stages, with tensors on the CPU.

    Nothing is unpickled. Call `verify` before, which compares the checksums.

    Args:
        path: The folder of the checkpoint.
        rows: The rows that are read of sharded parameters, of their average and of their
            optimizer state. Everything else is read as a whole.

    Raises:
        FileError: A file cannot be read, or is damaged.
    """
    try:
        return _read_state(path, rows=rows or {})
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from None
    except FileError as error:
        raise FileError(f"the checkpoint {path} is damaged: {error}") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise FileError if it is damaged."""
    manifest: dict[str, Any] = read_json(path / MANIFEST)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise FileError(f"it has format {version}, and this version of lockstep reads {FORMAT}")
    if mismatch := find_manifest_mismatch(manifest):
        raise FileError(f"{MANIFEST} is damaged: {mismatch}")
    for name, entry in manifest["files"].items():
        status = (path / name).stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry["bytes"]:
            raise FileError(f"the size of {name} differs")
    states = [name for name in manifest["files"] if name.startswith(REST) and name.endswith(SUFFIX)]
    expected = [name_part(REST, number, len(states), SUFFIX) for number in range(len(states))]
    if not states or sorted(states) != expected:
        raise FileError(f"{MANIFEST} does not name the files {REST}*{SUFFIX} of all stages")
    return manifest


def _read_state(path: Path, *, has_values: bool = True, rows: Rows | None = None) -> dict[str, Any]:
    """Return the state of a checkpoint; raise FileError unless it is one that training can use."""
    manifest = _read_manifest(path)
    names = sorted(manifest["files"])
    state: dict[str, Any] = {}
    try:
        tensors = [name for name in names if name.endswith(".safetensors")]
        with TensorFiles(path, tensors, rows or {}, has_values=has_values) as files:
            for name in names:
                if name.startswith(REST) and name.endswith(SUFFIX):
                    part = decode(read_json(path / name), files)
                    if not isinstance(part, dict):
                        raise FileError(f"{name} is damaged: it is no object")
                    _merge(state, part)
            state |= {kind: join_shards(state[kind]) for kind in KINDS if kind in state}
            unused = files.keys() - files.used
    except (OSError, FileError):
        raise
    except Exception as error:  # the content of files with the right checksums may be anything
        raise FileError(f"its content is invalid ({type(error).__name__}: {error})") from None
    if mismatch := find_state_mismatch(state):
        raise FileError(f"its content is invalid: {mismatch}")
    if unused:
        raise FileError(f"its content is invalid: the tensor {min(unused)} has no use")
    if state["steps"] != manifest["step"]:
        raise FileError(
            f"{MANIFEST} says step {manifest['step']}, and its state step {state['steps']}"
        )
    return state


@contextmanager
def refusing_misfits(what: str) -> Iterator[None]:
    """Raise FileError in place of an error with which the body refuses saved values.

    Args:
        what: The saved values, for the message.
    """
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise FileError(f"{what} cannot be loaded ({reason})") from error


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name ("model/conv.weight"), each read on access.

    Args:
        path: The folder of the checkpoint.
        names: The names of its tensor files.
        rows: The rows that are read of some tensors.
        has_values: Whether values are read; False: the tensors are on the meta device.

    Attributes:
        used: The names of the tensors that were accessed.
    """

    def __init__(self, path: Path, names: list[str], rows: Rows, *, has_values: bool) -> None:
        self._has_values = has_values
        self._rows = rows
        self._stack = ExitStack()
        self._files: dict[str, tuple[Any, str]] = {}
        self.used: set[str] = set()
        for name in names:
            kind = re.split(r"[-.]", name)[0]
            file = self._stack.enter_context(safe_open(path / name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 (it is not a mapping)
                self._files[key if kind == REST else f"{kind}/{key}"] = file, key

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        file, key = self._files[name]
        self.used.add(name)
        if self._has_values:
            saved: torch.Tensor = file.get_tensor(key)  # mapped: what is not copied is not read
            rows = find_rows(name, self._read_shape, self._rows) if self._rows else None
            return saved if rows is None else saved[rows]
        described = file.get_slice(key)
        dtype = next(kind for kind, name in DTYPES.items() if name == described.get_dtype())
        return torch.empty(described.get_shape(), dtype=dtype, device="meta")

    def _read_shape(self, name: str) -> list[int]:
        file, key = self._files[name]
        shape: list[int] = file.get_slice(key).get_shape()
        return shape

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._files)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._files)

    def __enter__(self) -> TensorFiles:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self._stack.close()


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in find_checkpoints(folder)[keep:]:
        # The manifest first, so that an interrupted removal leaves no complete checkpoint.
        if not path.is_symlink():
            (path / MANIFEST).unlink(missing_ok=True)
        remove_tree(path)


def set_aside_newer(folder: Path, used: Path, step: int) -> list[Path]:
    """Rename the checkpoints that a run leaves behind when it continues from an older one.

    Args:
        folder: The run's folder of checkpoints.
        used: The checkpoint that it continues from, which may be in another folder.
        step: The number of steps finished in that checkpoint.

    Returns:
        Their new paths, the newest first. They are no longer used, and never removed.
    """
    checkpoints = find_checkpoints(folder)
    if used in checkpoints:
        later = checkpoints[: checkpoints.index(used)]
    else:
        later = [path for path in checkpoints if count_steps(path) >= step]
    renamed = []
    for path in later:
        aside = path.with_name(f"{path.name}.{SUPERSEDED}")
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.{SUPERSEDED}-{number}")
        path.rename(aside)
        renamed.append(aside)
    return renamed


def remove_incomplete(folder: Path) -> None:
    """Remove incomplete checkpoints of interrupted runs; call it while no process writes here."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        # A link may lead to a folder that is not mounted now.
        is_own = NAME.fullmatch(path.name) and not path.is_symlink()
        unfinished = is_own and not (path / MANIFEST).exists()
        if INCOMPLETE.fullmatch(path.name) or unfinished:
            remove_tree(path)


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the entries of nested dicts that `into` does not have."""
    for key, value in more.items():
        if isinstance(into.get(key), dict) and isinstance(value, Mapping):
            _merge(into[key], value)
        else:
            into.setdefault(key, value)
