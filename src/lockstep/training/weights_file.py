"""Atomically written files of weights: safetensors, or the format of `torch.load`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.collectives import broadcast_bytes
from lockstep.files import replace_file
from lockstep.kernel.errors import FileError
from lockstep.launcher.run_folder import RUNS, create_run_folder
from lockstep.messages import log
from lockstep.training.weight_parts import (
    INDEX,
    gather_each,
    save_parts,
    sort_tensors,
    write_part,
)

__all__ = ["save_from_rank0", "save_last_good", "save_weights"]

LAST_GOOD = "last-good.safetensors"
SAFETENSORS = ".safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of files for `torch.load`; files with any other suffix are safetensors."""


def save_weights(path: Path, state: Mapping[str, Any], values: Iterable[Any]) -> None:
    """Write a state dict, in the format of the file's suffix, replacing an older file atomically.

    Parameters that share memory are written under each of their names, so that
    `model.load_state_dict` accepts the result of `safetensors.torch.load_file(path)` or
    `torch.load(path, weights_only=True)` for any model.

    Args:
        path: The file.
        state: The state dict, in the order of the file.
        values: Its values, which may be gathered when they are taken.

    Raises:
        FileError: The file cannot be written, or its folder does not exist.
    """
    try:
        if not path.parent.is_dir():
            raise FileError(f"{path}: the folder {path.parent} does not exist: create it first")
        if path.suffix not in PICKLED:
            write_part(path, state, values)
            return
        with replace_file(path) as file:
            file.write(_serialize(state, values))
    except OSError as error:
        raise FileError(
            f"{path}: the weights could not be written ({error.strerror}); an existing file is "
            "unchanged"
        ) from error


def _serialize(state: Mapping[str, Any], values: Iterable[Any]) -> bytes:
    copied = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in zip(state, values, strict=True)
    }
    content = io.BytesIO()  # torch's error messages for a full disk do not name the cause
    torch.save(copied, content)
    return content.getvalue()


def _select(state: Mapping[str, Any], suffix: str = SAFETENSORS) -> Mapping[str, Any]:
    """Return the entries of a file in their order; safetensors files contain only tensors."""
    if suffix in PICKLED:
        return state
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return sort_tensors(tensors)


def save_from_rank0(path: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Write the file, or the parts and their index; return on all ranks, or raise on all.

    Sharded tensors are gathered when they are written. An unknown suffix is no error, since an
    error could lose the weights of a long training.
    """

    def write(save: Callable[[], None], values: Iterable[object]) -> None:
        _write_on_rank0(path, save, group, values)

    if path.name.endswith(INDEX):
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        save_parts(path, tensors, group, write)
        return
    entries = _select(state, path.suffix)
    values = gather_each(entries)
    write(lambda: save_weights(path, entries, values), values)
    if dist.get_rank(group) == 0 and path.suffix not in (SAFETENSORS, *PICKLED):
        log(f"{path} is written as safetensors; for torch.load use the suffix .pt")


def _write_on_rank0(
    path: Path,
    write: Callable[[], None],
    group: dist.ProcessGroup | None,
    values: Iterable[object],
) -> None:
    """Call a function on rank 0; return on all ranks when it has returned, or raise on all.

    All ranks take the values that the function takes on rank 0, since they gather them together.
    """
    failure = b""
    if dist.get_rank(group) == 0:
        try:
            write()
        except FileError as error:
            failure = str(error).encode()
        except Exception as error:  # any error: the other ranks wait for the outcome
            failure = f"{path}: the weights could not be written: {error}".encode()
    for _ in values:  # also after a failure
        pass
    failure = broadcast_bytes(failure, "saving weights", group)
    if failure:
        writer = 0 if group is None else dist.get_global_rank(group, 0)
        who = f"rank {writer}: " if dist.get_world_size(group) > 1 else ""
        raise FileError(who + failure.decode())


def save_last_good(
    folder: Path | None, state: Mapping[str, Any], group: dist.ProcessGroup | None, advice: str
) -> str:
    """Save the weights of a training that stops on rank 0; return the outcome on all ranks.

    Args:
        folder: The folder of the run; None: a new one in `runs`.
        state: The state dict, which may have sharded tensors.
        group: The group of the ranks.
        advice: The text that rank 0 appends to the outcome.

    Returns:
        The end of a sentence, with the path of the weights or the error.
    """
    outcome, entries = "", _select(state)
    values = gather_each(entries)
    if dist.get_rank(group) == 0:
        try:
            folder = folder or create_run_folder(Path(RUNS), "stopped")
            save_weights(folder / LAST_GOOD, entries, values)
            outcome = f"the weights before this step are in {folder / LAST_GOOD}"
        except Exception as error:  # any error: the other ranks wait for the outcome
            outcome = f"and the weights before this step could not be saved: {error}"
    for _ in values:
        pass
    return broadcast_bytes((outcome + advice).encode(), "stopping", group).decode()
