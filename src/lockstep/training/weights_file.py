"""Saving: weights in a file that is whole or not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save

from lockstep.comm.collectives import all_gather_bytes
from lockstep.errors import FileError
from lockstep.files import make_folder, replace_file
from lockstep.launcher.run_folder import RUNS
from lockstep.record.recorder import create_run_folder

__all__ = ["save_from_rank0", "save_last_good", "save_weights"]

LAST_GOOD = "last-good.safetensors"


def save_weights(path: Path, state: Mapping[str, Any]) -> None:
    """Write the tensors of a state dict as safetensors; an older file stays until the end.

    Parameters that share memory are written under each of their names, so that
    `model.load_state_dict(safetensors.torch.load_file(path))` works for any model.
    Raises FileError where the file cannot be written.
    """
    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    try:
        make_folder(path.parent)
        with replace_file(path) as file:
            file.write(save(tensors))
    except OSError as error:
        raise FileError(
            f"{path}: the weights could not be written ({error.strerror}); "
            "a file that was there before is as it was"
        ) from error


def save_from_rank0(path: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Let rank 0 write the file; return on all ranks when it is there, or raise on all."""
    failure = b""
    if dist.get_rank(group) == 0:
        try:
            save_weights(path, state)
        except FileError as error:
            failure = str(error).encode()
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            failure = f"{path}: the weights could not be written: {error}".encode()
    failure = all_gather_bytes(failure, "saving weights", group)[0]
    if failure:
        raise FileError(failure.decode())


def save_last_good(
    folder: Path | None, state: Mapping[str, Any], group: dist.ProcessGroup | None
) -> str:
    """Let rank 0 save the weights of a training that stops; return on all ranks what became of it.

    `folder` is the run's, or None for a new one under `runs`.
    """
    outcome = ""
    if dist.get_rank(group) == 0:
        try:
            folder = folder or Path(RUNS) / create_run_folder(Path(RUNS), "stopped")
            save_weights(folder / LAST_GOOD, state)
            outcome = f"the weights before this step are in {folder / LAST_GOOD}"
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            outcome = f"and the weights before this step could not be saved: {error}"
    return all_gather_bytes(outcome.encode(), "stopping", group)[0].decode()
