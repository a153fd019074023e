"""Files of weights: safetensors, in one file or in parts with an index, or those of `torch.load`.

    model.safetensors.index.json          names of tensors -> files
    model-00001-of-00002.safetensors      up to 5 GB
    model-00002-of-00002.safetensors

Files are written atomically, by rank 0. Sharded tensors are gathered one by one when they are
written, and each rank reads the rows of its shards, so no rank holds a whole model.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from lockstep.call_checks import check_call
from lockstep.checkpoint.tensor_file import sort_tensors, write_tensors
from lockstep.comm.collectives import broadcast_bytes
from lockstep.files import replace_file
from lockstep.kernel.errors import FileError, UsageError
from lockstep.messages import log
from lockstep.model.deferred_init import materialize
from lockstep.sharded_tensors import gather, is_sharded, local_part, local_rows

__all__ = ["load_weights", "plan_parts", "save_from_rank0", "save_weights"]

INDEX = ".safetensors.index.json"
"""The end of the name of an index."""

PART_BYTES = 5_000_000_000
"""The bytes of a part. A larger tensor has its own part."""

SAFETENSORS = ".safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of files for `torch.load`; files with any other suffix are safetensors."""


def save_from_rank0(path: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Write the file, or the parts and their index; return on all ranks, or raise on all.

    Sharded tensors are gathered when they are written. An unknown suffix is no error, since an
    error could lose the weights of a long training.

    Args:
        path: The file, or an index, whose name ends with `INDEX`.
        state: The state dict; on other ranks than 0, the same or none.
        group: The ranks.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if path.name.endswith(INDEX):
        _save_parts(path, tensors, group)
        return
    entries = state if path.suffix in PICKLED else sort_tensors(tensors)
    values = _gather_each(entries)
    _write_on_rank0(path, lambda: save_weights(path, entries, values), group, values)
    if dist.get_rank(group) == 0 and path.suffix not in (SAFETENSORS, *PICKLED):
        log(f"{path} is written as safetensors; for torch.load use the suffix .pt")


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
    if not path.parent.is_dir():
        raise FileError(f"{path}: the folder {path.parent} does not exist: create it first")
    try:
        with replace_file(path) as file:
            if path.suffix in PICKLED:
                file.write(_serialize(state, values))
            else:
                write_tensors(file, state, values=values)
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


def plan_parts(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names of the tensors of each part, in order.

    Args:
        sizes: The bytes of each tensor, by name.
        limit: The most bytes of a part of several tensors.
    """
    parts = [list[str]()]
    held = 0
    for name, size in sizes.items():
        if parts[-1] and held + size > limit:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts


def _save_parts(
    path: Path, state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    """Write tensors in parts, and then their index; a collective call.

    An index of the same name is removed first, so that it never names parts of different weights.
    """
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    plan = json.dumps(plan_parts(sizes, PART_BYTES)).encode()
    parts = json.loads(broadcast_bytes(plan, "saving weights in parts", group))
    _write_on_rank0(path, lambda: path.unlink(missing_ok=True), group)
    stem = path.name.removesuffix(INDEX)
    index = dict[str, str]()
    for number, names in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        index |= dict.fromkeys(names, file)
        tensors = sort_tensors({name: state[name] for name in names if state})
        values = _gather_each(tensors)
        save = partial(save_weights, path.with_name(file), tensors, values)
        _write_on_rank0(path, save, group, values)
    content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}

    def write_index() -> None:
        with replace_file(path) as target:
            target.write(json.dumps(content, indent=2).encode())

    _write_on_rank0(path, write_index, group)


def _gather_each(state: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of a state; a tensor that is sharded is gathered when it is taken."""
    for value in state.values():
        is_tensor = isinstance(value, torch.Tensor)
        yield gather(value.detach()).cpu().contiguous() if is_tensor else value


def _write_on_rank0(
    path: Path,
    write: Callable[[], None],
    group: dist.ProcessGroup | None,
    values: Iterable[object] = (),
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


@torch.no_grad()
@check_call("ls.load_weights")
def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load safetensors into a model, also into one that torch's `fully_shard` has divided.

    Each rank reads the rows of its shards, so none holds the whole model. Tensors on the meta
    device get memory first. Call it on every rank, before `lockstep.exact`.

    Args:
        model: The model, whose state dict has the names of the files. Of tied weights, one name
            is enough.
        path: A file, an index (model.safetensors.index.json), or a folder with
            model.safetensors.index.json or model.safetensors, as Hugging Face writes them.

    Raises:
        FileError: A file is missing or damaged.
        UsageError: The files have other tensors than the model.
    """
    files = _find_files(Path(path))
    names = {name: file for file, own in files.items() for name in own}
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    loaded = {id(tensor) for name, tensor in tensors.items() if name in names}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in loaded]
    unknown = [name for name in names if name not in tensors]
    kind = type(model).__name__
    if missing or unknown:
        has, name = ("no", missing[0]) if missing else ("a tensor", unknown[0])
        raise UsageError(
            f"{path} has {has} {name}, unlike the {kind} ({len(missing)} names are missing, "
            f"{len(unknown)} are unknown): build the model that the weights were saved from"
        )
    _give_memory(model, tensors)
    state = model.state_dict(keep_vars=True)
    for file, own in files.items():
        with _reading(file) as reader:
            for name in own:
                _read(reader, name, state[name], file)


def _find_files(path: Path) -> dict[Path, list[str]]:
    """Return the names of the tensors of each file."""
    if path.is_dir():
        index = path / f"model{INDEX}"
        path = index if index.exists() else path / "model.safetensors"
    if not path.name.endswith(INDEX):
        with _reading(path) as reader:
            return {path: list(reader.keys())}
    files: dict[Path, list[str]] = {}
    try:
        content = json.loads(path.read_text())["weight_map"]
        for name, file in content.items():
            files.setdefault(path.with_name(file), []).append(name)  # not in another folder
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FileError(f"{path} is damaged, or not an index of safetensors files") from None
    return files


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Yield a reader of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except FileNotFoundError:
        raise FileError(f"there is no file {path}") from None
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} cannot be read as safetensors ({error})") from None


def _give_memory(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Give memory to tensors on the meta device, all of which must be saved."""
    known = {id(tensor) for tensor in saved.values()}
    others = {name: one for name, one in model.named_buffers() if id(one) not in known}
    for name, buffer in others.items():
        if buffer.is_meta:
            raise UsageError(
                f"the buffer {name} is on the meta device, and weights do not contain it: build "
                "it with memory, for instance by torch.zeros(..., device='cpu')"
            )
    sharded: Any = next((tensor for tensor in saved.values() if is_sharded(tensor)), None)
    if not any(tensor.is_meta for tensor in saved.values()):
        return
    if sharded is None:
        materialize(model, "cpu")
        return
    kept = {name: buffer.clone() for name, buffer in others.items()}
    # `fully_shard` was called with the whole model, so all are on the device of one mesh.
    model.to_empty(device=sharded.device_mesh.device_type)  # which empties all tensors
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.copy_(kept[name])


def _read(reader: Any, name: str, tensor: torch.Tensor, file: Path) -> None:
    """Read a tensor, or this rank's rows of it."""
    saved = reader.get_slice(name)
    if tuple(saved.get_shape()) != tuple(tensor.shape):
        raise UsageError(
            f"{file}: {name} has the shape {saved.get_shape()}, and the model has "
            f"{list(tensor.shape)}: build the model that the weights were saved from"
        )
    if not is_sharded(tensor):
        tensor.copy_(reader.get_tensor(name))
        return
    (*others, placement) = tensor.placements  # type: ignore[attr-defined]
    if not all(other.is_replicate() for other in others) or not placement.is_shard(0):
        raise UsageError(
            f"{name} has the placements {(*others, placement)}: call fully_shard with a mesh that "
            "shards in one dimension, and without shard_placement_fn"
        )
    local_part(tensor).copy_(saved[local_rows(tensor)])
