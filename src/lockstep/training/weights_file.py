"""Weights in a file that is whole or not there: safetensors, or the format of `torch.load`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save

from lockstep.comm.collectives import all_gather_bytes
from lockstep.errors import FileError
from lockstep.files import replace_file
from lockstep.launcher.run_folder import RUNS, create_run_folder
from lockstep.messages import say

__all__ = ["save_from_rank0", "save_last_good", "save_weights"]

LAST_GOOD = "last-good.safetensors"
SAFETENSORS = ".safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files that `torch.load` reads; with any other one a file is safetensors."""


def save_weights(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict in the format of the file's suffix; an older file stays until the end.

    Parameters that share memory are written under each of their names, so that
    `model.load_state_dict` takes what `safetensors.torch.load_file(path)` or
    `torch.load(path, weights_only=True)` returns, for any model. Extra state is left out of
    safetensors.

    Raises:
        FileError: The file cannot be written, or its folder does not exist.
    """
    values = {
        name: value.detach().cpu().contiguous().clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }
    try:
        if not path.parent.is_dir():
            raise FileError(f"{path}: the folder {path.parent} does not exist: create it first")
        with replace_file(path) as file:
            file.write(_serialize(values, path.suffix))
    except OSError as error:
        raise FileError(
            f"{path}: the weights could not be written ({error.strerror}); an existing file is "
            "unchanged"
        ) from error


def _serialize(values: dict[str, Any], suffix: str) -> bytes:
    if suffix not in PICKLED:
        return save({name: each for name, each in values.items() if isinstance(each, torch.Tensor)})
    content = io.BytesIO()  # torch's own errors of a disk that fills do not name the cause
    torch.save(values, content)
    return content.getvalue()


def save_from_rank0(path: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Let rank 0 write the file; return on all ranks when it is there, or raise on all.

    A suffix that names no format is no error, which could cost the weights of a long training.
    """
    failure = b""
    if dist.get_rank(group) == 0:
        try:
            save_weights(path, state)
            if path.suffix not in (SAFETENSORS, *PICKLED):
                say(f"{path} is written as safetensors; for torch.load use the suffix .pt")
        except FileError as error:
            failure = str(error).encode()
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            failure = f"{path}: the weights could not be written: {error}".encode()
    failure = all_gather_bytes(failure, "saving weights", group)[0]
    if failure:
        writer = 0 if group is None else dist.get_global_rank(group, 0)
        who = f"rank {writer}: " if dist.get_world_size(group) > 1 else ""
        raise FileError(who + failure.decode())


def save_last_good(
    folder: Path | None, state: Mapping[str, Any], group: dist.ProcessGroup | None, advice: str
) -> str:
    """Let rank 0 save the weights of a training that stops; return on all ranks what became of it.

    Args:
        folder: That of the run; None for a new one under `runs`.
        state: The state dict.
        group: The ranks.
        advice: What rank 0 adds to the sentence.
    """
    outcome = ""
    if dist.get_rank(group) == 0:
        try:
            folder = folder or create_run_folder(Path(RUNS), "stopped")
            save_weights(folder / LAST_GOOD, state)
            outcome = f"the weights before this step are in {folder / LAST_GOOD}"
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            outcome = f"and the weights before this step could not be saved: {error}"
    return all_gather_bytes((outcome + advice).encode(), "stopping", group)[0].decode()
