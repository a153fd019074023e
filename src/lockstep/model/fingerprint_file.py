"""Files of fingerprints: the checksums of each rank's computations in selected steps of a run.

    RUN/fingerprints/rank-0.jsonl     {"kind":"begin","launch":"5f0c...","step":0,"resumes":0,...}
                                      {"kind":"step","step":100,"data":{...},"calls":[...],...}
    RUN/fingerprints/rank-1.jsonl     ...

Each rank appends to its own file. When a run is resumed from a step, the fingerprints that earlier
launches recorded of later steps no longer count, even if the resumed run records none. "resumes" is
the number of lines "resume" in the record when the launch began; later lines "resume" rewind the
launch's fingerprints. Checksums are written in hexadecimal form, because many programs round JSON
numbers of 64 bits. This module does not import torch.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

from lockstep.files import make_folder, open_or_create
from lockstep.kernel.errors import FileError, UsageError
from lockstep.model.fingerprint import Call, StepFingerprint
from lockstep.record.columns import as_float
from lockstep.record.reader import read_ends

__all__ = [
    "FOLDER",
    "FingerprintFile",
    "FingerprintList",
    "RecordedFingerprints",
    "count_resumes",
    "decode_fingerprint",
    "encode_fingerprint",
    "list_fingerprints",
    "read_fingerprints",
]

FOLDER = "fingerprints"
FILE = re.compile(r"rank-(\d+)\.jsonl")
STEP_HEAD = re.compile(rb'\{"kind":"step","trainer":\d+,"step":(\d+),')
NAMED = ("before", "parameters", "gradients", "state", "optimizer")  # checksums by name
BY_MICROBATCH = ("leaf_gradients", "leaf_buffers")  # checksums by micro-batch and name


@dataclass(frozen=True)
class RecordedFingerprints:
    """The fingerprints that a run recorded.

    Attributes:
        steps: The fingerprints of each step, one per rank that recorded it, by the number of the
            step, ascending.
        remarks: The faults of the files, as sentences.
    """

    steps: dict[int, list[StepFingerprint]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class FingerprintFile:
    """The file of one rank of a run; each line is one system call.

    Args:
        run: The folder of the run.
        rank: The rank.

    Raises:
        OSError: The file cannot be created or continued.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / FOLDER / f"rank-{rank}.jsonl"
        make_folder(self.path.parent)
        descriptor = open_or_create(self.path, os.O_RDWR | os.O_APPEND)
        with open(descriptor, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() not in (b"", b"\n"):
                file.write(b"\n")  # ends the line of a rank that was killed while writing

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line.

        Raises:
            OSError: The line cannot be written.
        """
        option = orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
        line = orjson.dumps({"kind": kind, **fields}, option=option)
        descriptor = open_or_create(self.path, os.O_WRONLY | os.O_APPEND)
        with open(descriptor, "ab", buffering=0) as file:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def encode_fingerprint(fingerprint: StepFingerprint) -> dict[str, Any]:
    """Return a fingerprint as JSON values, without empty fields."""
    fields: dict[str, Any] = {
        "data": {index: _encode(values) for index, values in fingerprint.data.items()},
        "calls": [
            [*position, [[kind, name, _encode(values)] for kind, name, values in calls]]
            for position, calls in fingerprint.calls.items()
        ],
        "backward": {
            index: [[*key, f"{value:016x}"] for key, value in gradients.items()]
            for index, gradients in fingerprint.backward.items()
        },
        "losses": fingerprint.losses,
        "loss": fingerprint.loss,
        "digest": fingerprint.digest,
    }
    for name in NAMED:
        fields[name] = _encode_named(getattr(fingerprint, name))
    for name in BY_MICROBATCH:
        leaves = getattr(fingerprint, name).items()
        fields[name] = {index: _encode_named(values) for index, values in leaves}
    kept = {name: value for name, value in fields.items() if value}
    return {"trainer": fingerprint.trainer, "step": fingerprint.step} | kept


def decode_fingerprint(line: Mapping[str, Any]) -> StepFingerprint:
    """Return the fingerprint that `encode_fingerprint` encoded.

    Raises:
        ValueError: The line is not an encoded fingerprint.
    """
    try:
        fingerprint = StepFingerprint(int(line["trainer"]), int(line["step"]))
        fingerprint.data = {int(k): _decode(values) for k, values in line.get("data", {}).items()}
        for index, stage, calls in line.get("calls", ()):
            fingerprint.calls[int(index), int(stage)] = [_decode_call(*call) for call in calls]
        for index, gradients in line.get("backward", {}).items():
            fingerprint.backward[int(index)] = {
                (str(name), int(call), int(number)): int(value, 16)
                for name, call, number, value in gradients
            }
        fingerprint.losses = {
            int(index): str(loss) for index, loss in line.get("losses", {}).items()
        }
        fingerprint.loss = str(line.get("loss", ""))
        fingerprint.digest = str(line.get("digest", ""))
        for name in NAMED:
            setattr(fingerprint, name, _decode_named(line.get(name, {})))
        for name in BY_MICROBATCH:
            leaves = line.get(name, {}).items()
            setattr(
                fingerprint, name, {int(index): _decode_named(values) for index, values in leaves}
            )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a fingerprint: {error}") from None
    return fingerprint


def _encode(values: tuple[int, ...]) -> list[str]:
    return [f"{value:016x}" for value in values]


def _encode_named(values: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{value:016x}" for name, value in values.items()}


def _decode(values: list[str]) -> tuple[int, ...]:
    return tuple(int(value, 16) for value in values)


def _decode_named(values: Mapping[str, str]) -> dict[str, int]:
    return {str(name): int(value, 16) for name, value in values.items()}


def _decode_call(kind: str, name: str, values: list[str]) -> Call:
    return str(kind), str(name), _decode(values)


# --- reading ------------------------------------------------------------------------------------


def read_fingerprints(run: Path) -> RecordedFingerprints:
    """Return the fingerprints that a run recorded; empty if it recorded none.

    Raises:
        FileError: A file cannot be read.
    """
    fingerprints, remarks = _read(run, orjson.loads, decode_fingerprint)
    return RecordedFingerprints(
        {
            step: [fingerprint for _, fingerprint in sorted(ranks.items())]
            for step, ranks in fingerprints.items()
        },
        remarks,
    )


@dataclass(frozen=True)
class FingerprintList:
    """The ranks whose fingerprints a run recorded, by the number of the step, and remarks."""

    steps: dict[int, list[int]]
    remarks: list[str]


def list_fingerprints(run: Path) -> FingerprintList:
    """List the fingerprints that a run recorded, without parsing them.

    Raises:
        FileError: A file cannot be read.
    """
    lines, remarks = _read(run, _parse_head, lambda line: None)
    return FingerprintList({step: sorted(ranks) for step, ranks in lines.items()}, remarks)


def _parse_head(text: bytes) -> Any:
    """Return the kind and number of a line "step", and all fields of other lines."""
    head = STEP_HEAD.match(text)
    if head is None or not text.endswith(b"\n"):
        return orjson.loads(text)
    return {"kind": "step", "step": int(head[1])}


Parse = Callable[[bytes], Any]
"""A function that returns the fields of a line, or the required ones."""

Decoded = TypeVar("Decoded")


@dataclass
class _Launch(Generic[Decoded]):
    """The fingerprints of one launch of a run, by step and rank.

    Attributes:
        begun: The Unix time at which the launch began to record.
        first: The step at which the launch began.
        resumes: The number of resumptions of the run before.
        steps: The decoded fingerprints, by step and rank.
    """

    begun: float
    first: int
    resumes: int
    steps: dict[int, dict[int, Decoded]] = field(default_factory=dict)


def _read(
    run: Path, parse: Parse, decode: Callable[[dict[str, Any]], Decoded]
) -> tuple[dict[int, dict[int, Decoded]], list[str]]:
    """Return the latest fingerprints of each step, by step and rank; and remarks."""
    launches: dict[str, _Launch[Decoded]] = {}
    remarks: list[str] = []
    for rank, path in _find_files(run):
        remarks += _read_file(path, rank, launches, parse, decode)
    resumed_from = _resumed_from(run) if launches else []
    steps: dict[int, dict[int, Decoded]] = {}
    for launch in sorted(launches.values(), key=lambda launch: launch.begun):
        end = min(resumed_from[launch.resumes :], default=math.inf)
        steps = {number: ranks for number, ranks in steps.items() if number < launch.first}
        steps |= {number: ranks for number, ranks in launch.steps.items() if number < end}
    return dict(sorted(steps.items())), remarks


def count_resumes(run: Path) -> int:
    """Return the number of lines "resume" in the record of a run; 0 without a record.

    Raises:
        FileError: The record cannot be read.
    """
    return len(_resumed_from(run))


def _resumed_from(run: Path) -> list[float]:
    """Return the steps at which a run was resumed, in order of time; infinity if unknown."""
    try:
        lines = read_ends(run).resumes
    except UsageError:  # there is no record
        return []
    steps = [as_float(line.get("step")) for line in lines]
    return [math.inf if math.isnan(step) else step for step in steps]


def _find_files(run: Path) -> list[tuple[int, Path]]:
    files = ((FILE.fullmatch(path.name), path) for path in (run / FOLDER).glob("rank-*.jsonl"))
    return sorted((int(match[1]), path) for match, path in files if match is not None)


def _read_file(
    path: Path,
    rank: int,
    launches: dict[str, _Launch[Decoded]],
    parse: Parse,
    decode: Callable[[dict[str, Any]], Decoded],
) -> list[str]:
    """Add the lines of a file to `launches`; return remarks."""
    launch: _Launch[Decoded] | None = None
    unread, was_unread = 0, False
    for text in _read_lines(path):
        try:
            line = parse(text)
            if line["kind"] == "begin":
                unread -= was_unread  # the rank was killed while it wrote that line
                begun, first = float(line["t"]), int(line["step"])
                new: _Launch[Decoded] = _Launch(begun, first, int(line["resumes"]))
                launch = launches.setdefault(str(line["launch"]), new)
                launch.begun = min(launch.begun, begun)
            elif line["kind"] == "step" and launch is not None:
                launch.steps.setdefault(int(line["step"]), {})[rank] = decode(line)
            was_unread = False
        except (ValueError, TypeError, KeyError, OverflowError):
            unread, was_unread = unread + 1, True
    if not unread:
        return []
    return [f"{FOLDER}/{path.name}: {unread} lines could not be read and were skipped."]


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, which may be larger than memory."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from None
