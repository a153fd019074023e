"""Weights of a model from a file: safetensors, the format of `torch.load`, or a checkpoint.

    file      a state dict, or a mapping that has one as "state_dict" or "model"
    names     without the prefix "module." of DataParallel and DistributedDataParallel
    head      the classifier, which has other shapes for other classes

Nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.checkpoint.folder import read_checkpoint, verify
from lockstep.kernel.errors import FileError, UsageError

__all__ = ["load_weights", "read_weights"]

SAFETENSORS = ".safetensors"
PREFIX = "module."
CONTAINERS = ("state_dict", "model")
RENAMED = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}
"""Parts of names in published vision transformers, and those of their current versions."""

COUNTERS = ".num_batches_tracked"
"""The end of the names of buffers that old files lack. They change no result of the networks."""


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    head: str,
    network: str,
    has_new_head: bool = False,
    is_trained: bool = True,
) -> None:
    """Load the weights of a file into a model.

    Args:
        model: The model.
        path: The file, or the folder of a checkpoint.
        head: The name of the classifier in the state dict.
        network: The name of the network, for messages.
        has_new_head: Whether to keep the classifier of the model instead of that of the file.
        is_trained: Whether the model will be trained, and not only evaluated.

    Raises:
        FileError: The file cannot be read.
        UsageError: The file has the weights of another network, or for other classes or images.
    """
    own, saved = model.state_dict(), read_weights(path)
    classifier = [name for name in own if name.startswith(f"{head}.")]
    if has_new_head:
        saved |= {name: own[name] for name in classifier}
    saved = {name: tensor for name, tensor in own.items() if name.endswith(COUNTERS)} | saved
    _check_names(own, saved, f"{path}", network)
    for name in sorted(own, key=lambda tensor: tensor in classifier):  # the classifier last
        here, there = tuple(own[name].shape), tuple(saved[name].shape)
        if here == there:
            continue
        if name in classifier:
            advice = "evaluate it on data with the classes that it was trained on"
            if is_trained:
                advice = "add --new-head to train a new classifier on top of its other weights"
            raise UsageError(
                f"{path} classifies {there[0]} classes, the data has {here[0]}: {advice}"
            )
        raise UsageError(
            f"{path}: {name} has the shape {list(there)}, and {network} has {list(here)} here"
            f"{_advise(name, there)}"
        )
    model.load_state_dict(saved)


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the state dict in a file, with tensors on the CPU.

    Raises:
        FileError: The file cannot be read, or has no state dict.
    """
    path = Path(path)
    try:
        content = _read(path)
    except FileNotFoundError:
        raise FileError(
            f"there is no file {path}; --weights takes a .safetensors or .pth file with the "
            "weights of a model"
        ) from None
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from None
    for name in CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not content:
        raise FileError(f"{path} has no state dict: save one with torch.save(model.state_dict())")
    other = next((name for name, entry in content.items() if not _is_entry(name, entry)), None)
    if other is not None:
        raise FileError(
            f"{path}: the entry {other!r} is a {type(content[other]).__name__}, not a tensor; save "
            "the state dict of the model alone"
        )
    if all(name.startswith(PREFIX) for name in content):
        content = {name.removeprefix(PREFIX): entry for name, entry in content.items()}
    return {_rename(name): entry for name, entry in content.items()}


def _read(path: Path) -> Any:
    if path.is_dir():
        if problem := verify(path):
            raise FileError(f"{path} is not a valid checkpoint: {problem}")
        return read_checkpoint(path)
    if path.suffix == SAFETENSORS:
        try:
            return load_file(path)
        except SafetensorError as error:
            raise FileError(f"{path} cannot be read as safetensors ({error})") from None
    try:
        with torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise FileError(
            f"{path} is damaged, or has objects other than tensors, which are not loaded, because "
            "they can run code; save the state dict alone: torch.save(model.state_dict(), FILE)"
        ) from None
    except OSError:
        raise
    except Exception:  # a damaged file can make torch's reader raise anything
        raise FileError(
            f"{path} cannot be read as a file of torch.save; safetensors need the suffix "
            f"{SAFETENSORS}"
        ) from None


def _is_entry(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor)


def _rename(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def _check_names(own: Mapping[str, Any], saved: Mapping[str, Any], path: str, network: str) -> None:
    missing = next((name for name in own if name not in saved), None)
    unknown = next((name for name in saved if name not in own), None)
    if missing is not None:
        raise UsageError(
            f"{path} has no {missing}, which {network} needs: choose the recipe of the network "
            "that it was saved from"
        )
    if unknown is not None:
        raise UsageError(
            f"{path} has {unknown}, which {network} does not have: choose the recipe of the "
            "network that it was saved from"
        )


def _advise(name: str, shape: tuple[int, ...]) -> str:
    """Return the end of a message about a shape; positions depend on the size of the images."""
    if not name.endswith("pos_embedding") or len(shape) != 3:
        return ""
    side = round((shape[1] - 1) ** 0.5)
    return f": it was trained on images of {side} x {side} patches, so give --size {16 * side}"
