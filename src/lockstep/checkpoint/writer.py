"""The writer, which copies a state and writes the copy in the background.

    training ── step ── step ── copy ── step ── step ── step ──
                                  └──> write, sync ─> wait for the parts ─> rename   (a thread)
                                       of the other stages

    every writing rank                          rank 0, after all parts are written
    .step-100.7/model-00002-of-00002.safetensors    .step-100.7/manifest.json
    .step-100.7/part-1.json                         .step-100.7 -> step-100

A checkpoint is therefore either complete or absent, even if the processes or the machine stop. One
of its files, in turn, is read back, and written again if it has other bytes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from lockstep.checkpoint.encoding import decode, encode
from lockstep.checkpoint.folder import FORMAT, KINDS, MANIFEST, REST, name_part, prune
from lockstep.checkpoint.shards import is_shard
from lockstep.checkpoint.tensor_file import checksum_file, write_tensors
from lockstep.checksum import digest
from lockstep.devices import is_accelerator, record_event
from lockstep.files import (
    create_file,
    make_folder,
    remove_tree,
    replace_file,
    sync_folder,
)
from lockstep.kernel.errors import UsageError, WorkError
from lockstep.messages import log

__all__ = ["CheckpointWriter", "SavedCheckpoint"]

PART_TIMEOUT = 600.0  # seconds that rank 0 waits for the files of the other stages
POLL = 0.02  # seconds between two checks for these files
REMARK_AFTER = 60.0  # seconds of waiting for the disk

CheckFn = Callable[[], None]
"""A function that raises an exception if the checkpoint is abandoned."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written, or that failed.

    Attributes:
        step: The number of finished steps.
        path: The folder of the checkpoint.
        size: The number of bytes that this rank wrote.
        stall: The seconds that training waited for the copy.
        seconds: The seconds until the checkpoint was complete.
        failure: The reason for a failure; "" if the checkpoint is complete.
        rewritten: The file that had other bytes when it was read back, after which the rank's files
            were written again; "" if there was none.
        digest: The digest of the model in the checkpoint. None: not computed, or each stage wrote a
            part of the model.
    """

    step: int
    path: Path
    size: int
    stall: float
    seconds: float
    failure: str = ""
    digest: str | None = None
    rewritten: str = ""


class _Abandoned(Exception):
    pass


@dataclass
class CheckpointWriter:
    """A writer of the checkpoints of one rank, one at a time.

    Attributes:
        folder: The folder of checkpoints.
        keep: The number of latest checkpoints that are kept.
        has_digests: Whether the digest of the model in a checkpoint is computed.
        latest: The last checkpoint that was written or failed. None: there is none.
    """

    folder: Path
    keep: int
    has_digests: bool = True
    latest: SavedCheckpoint | None = None
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _abandoned: threading.Event = field(default_factory=threading.Event)
    _saved: list[SavedCheckpoint] = field(default_factory=list)
    _turn: int = 0  # of the file that is read back

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        attempt: int,
        part: tuple[int, int] = (0, 1),
        begun: float | None = None,
    ) -> None:
        """Copy a state and begin to write it; return after the copy.

        Args:
            state: This rank's part of the state.
            step: The number of finished steps.
            attempt: A number that no other checkpoint of this training has.
            part: The number of this rank's part, and the number of parts.
            begun: The time at which training began to wait, by `time.perf_counter`. None: now.

        Raises:
            UsageError: The state cannot be encoded.
        """
        self.wait()
        begun = time.perf_counter() if begun is None else begun
        tensors: dict[str, torch.Tensor] = {}
        plain = {name: encode(value, tensors, name) for name, value in state.items()}
        copies, copied = self._copy(tensors)
        stall = time.perf_counter() - begun
        self._abandoned = threading.Event()
        copied_state = plain, copies, copied
        arguments = (*copied_state, step, attempt, part, begun, stall, self._abandoned)
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="lockstep checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self._thread is None:
            return
        self._thread.join(REMARK_AFTER)
        while self._thread.is_alive():
            log(
                f"still writing a checkpoint to {self.folder}; check that the disk is reachable "
                "and not too slow"
            )
            self._thread.join(REMARK_AFTER)
        self._thread = None

    def abandon(self) -> None:
        """Abandon the checkpoint that is being written, and wait until it is removed.

        Called after a failure: the state that was copied just before it is not trusted.
        """
        self._abandoned.set()
        self.wait()

    def take_saved(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that were completed or failed since the last call."""
        saved = self._saved
        self._saved = []
        return saved

    @torch.no_grad()
    def _copy(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Event]]:
        """Copy tensors into memory that all checkpoints reuse, because page faults are slow.

        Copies from an accelerator run in its current stream, before later steps change the
        tensors; this process does not wait for them.

        Returns:
            The copies, and the events after which they are complete.
        """
        copies = {}
        for name, tensor in tensors.items():
            here = self._buffers.get(name)
            if here is None or here.shape != tensor.shape or here.dtype != tensor.dtype:
                pins = is_accelerator(tensor.device)
                here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
            copies[name] = here.copy_(tensor, non_blocking=True)
        self._buffers = dict(copies)
        devices = {tensor.device for tensor in tensors.values() if is_accelerator(tensor.device)}
        return copies, [record_event(device) for device in devices]

    def _write(
        self,
        plain: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        copied: Sequence[torch.Event],
        step: int,
        attempt: int,
        part: tuple[int, int],
        begun: float,
        stall: float,
        abandoned: threading.Event,
    ) -> None:
        """Write this rank's files and, on rank 0, complete the checkpoint; runs in the thread."""
        folder = self.folder
        aside = folder / f".step-{step}.{attempt}"
        final = folder / f"step-{step}"
        size = 0
        failure = ""
        rewritten = ""

        def check() -> None:
            if abandoned.is_set():
                raise _Abandoned

        try:
            for event in copied:
                event.synchronize()
            if aside.is_symlink():
                remove_tree(aside)
            make_folder(aside)
            files = _write_files(aside, plain, tensors, part, check)
            if rewritten := self._find_wrong(aside, files):
                files = _write_files(aside, plain, tensors, part, check)
                if _has_other_bytes(aside / rewritten, files[rewritten]["xxh3"]):
                    raise WorkError(f"{rewritten} was written twice, and has other bytes on disk")
            size = sum(entry["bytes"] for entry in files.values())
            if part[0] == 0:
                files |= _await_parts(aside, part[1], check)
                final = _complete(aside, files, step, check)
                prune(folder, self.keep)
            else:
                _write_file(aside / f"part-{part[0]}.json", json.dumps(files).encode())
        except _Abandoned:
            remove_tree(aside)
            return
        except Exception as error:  # a failed checkpoint must not end the training
            said = error.strerror if isinstance(error, OSError) else str(error)
            failure = said or type(error).__name__
            remove_tree(aside)
        seconds = time.perf_counter() - begun
        # Last, because a resuming process may need the checkpoint; nothing waits for the digest.
        is_whole = self.has_digests and part == (0, 1) and not failure
        model = _digest_model(plain, tensors) if is_whole else None
        self.latest = SavedCheckpoint(
            step,
            path=final,
            size=size,
            stall=stall,
            seconds=seconds,
            failure=failure,
            digest=model,
            rewritten=rewritten,
        )
        self._saved.append(self.latest)

    def _find_wrong(self, aside: Path, files: Mapping[str, Mapping[str, Any]]) -> str:
        """Return one file, in turn, if it has other bytes than were written; "" if it has not."""
        name = [*files][self._turn % len(files)]
        self._turn += 1
        return name if _has_other_bytes(aside / name, files[name]["xxh3"]) else ""


def _has_other_bytes(path: Path, checksum: str) -> bool:
    """Read a file from the disk and compare its checksum."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return checksum_file(file) != checksum


def _digest_model(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str | None:
    """Return the digest of the model in an encoded state; None if it has no digest."""
    if "model" not in plain:
        return None
    state: dict[str, Any] = {}
    for name, value in plain["model"].items():
        is_stored_as_it_is = value == {"$tensor": f"model/{name}"}  # and needs no copy
        state[name] = tensors[f"model/{name}"] if is_stored_as_it_is else decode(value, tensors)
    try:
        return digest(state)
    except UsageError:  # a custom state dict that is not a flat mapping of tensors
        return None


def _write_files(
    aside: Path,
    plain: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    part: tuple[int, int],
    check: CheckFn,
) -> dict[str, dict[str, Any]]:
    """Write and sync this rank's files; return their sizes, checksums and tensors by name."""
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind in KINDS and rest:
            kinds.setdefault(kind, {})[rest] = tensor
        else:
            kinds.setdefault(REST, {})[name] = tensor
    files: dict[str, dict[str, Any]] = {}
    for kind, group in kinds.items():
        name = name_part(kind, *part, ".safetensors")
        (aside / name).unlink(missing_ok=True)  # left by a killed rank with the same part
        descriptor = create_file(aside / name)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            size, checksum = write_tensors(file, group, check)
            os.fsync(descriptor)
        files[name] = {"bytes": size, "xxh3": checksum}
        if kind == "model" and part[1] > 1:
            files[name]["tensors"] = list(group)
    text = json.dumps(plain).encode()
    name = name_part(REST, *part, ".json")
    _write_file(aside / name, text)
    files[name] = {"bytes": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
    return files


def _write_file(path: Path, text: bytes) -> None:
    with replace_file(path) as file:
        file.write(text)


def _await_parts(aside: Path, count: int, check: CheckFn) -> dict[str, dict[str, Any]]:
    """Wait for the files of the other stages; return their sizes, checksums and tensors by name."""
    deadline = time.monotonic() + PART_TIMEOUT
    files: dict[str, dict[str, Any]] = {}
    for number in range(1, count):
        while not (path := aside / f"part-{number}.json").exists():
            check()
            if time.monotonic() > deadline or not aside.exists():
                raise WorkError(f"stage {number} could not write its part")
            time.sleep(POLL)
        files |= json.loads(path.read_bytes())
        path.unlink()
    return files


def _complete(
    aside: Path,
    files: dict[str, dict[str, Any]],
    step: int,
    check: CheckFn,
) -> Path:
    """Write the index and the manifest, and rename the folder; return its new path."""
    shards = {name: entry.pop("tensors") for name, entry in files.items() if "tensors" in entry}
    weight_map = {tensor: name for name, names in shards.items() for tensor in names}
    if weight_map and not any(map(is_shard, weight_map)):  # no index names rows of a weight
        total = sum(files[name]["bytes"] for name in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_file(aside / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
    manifest = {"format": FORMAT, "step": step, "files": files}
    _write_file(aside / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_folder(aside)
    check()
    final = aside.parent / f"step-{step}"
    number = 1
    while os.path.lexists(final):
        number += 1
        final = aside.parent / f"step-{step}-{number}"
    os.rename(aside, final)
    sync_folder(final.parent)
    return final
