"""How one rank goes through the cases: compare, note, go on.

A case is a name and a call. The name's words are what a limit is matched on:
"all_reduce SUM int16 17". The ranks run the same cases in the same order.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from contract import plain

SHOWN = 6  # elements of a wrong tensor in a message


@dataclass(frozen=True)
class Limit:
    """What a backend cannot do: cases by pattern, and what happens there.

    "refuses": it raises on every rank. "wrong": some rank gets a wrong value.
    "breaks": it aborts, crashes, hangs or sometimes gets a wrong value, so the cases are not run.
    """

    cases: str
    how: Literal["refuses", "wrong", "breaks"]
    reason: str
    least: int = 1  # ranks from which on it happens

    def holds(self, case: str, n: int) -> bool:
        return n >= self.least and fnmatch.fnmatchcase(case, self.cases)


@dataclass
class Ledger:
    """What a rank found: `results` case -> None or message, `skipped` case -> reason.

    `small`: messages pass in small pieces.
    """

    backend: str
    limits: tuple[Limit, ...]
    note: Callable[[str], None]
    small: bool = False
    prefix: str = ""
    results: dict[str, str | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)

    def __call__(self, name: str, call: Callable[[], object]) -> None:
        """Run a case, whose call raises where something is wrong."""
        case = f"{self.prefix} {name}"
        n = dist.get_world_size()
        limit = next((one for one in self.limits if one.holds(case, n)), None)
        self.note(case)
        if limit is None:
            self.results[case] = outcome(call)
            return
        self.skipped[case] = limit.reason
        if limit.how != "breaks" and outcome(call) is not None:
            self.confirmed.add(limit.cases)


def outcome(call: Callable[[], object]) -> str | None:
    """Return None where the call is content, otherwise what it says."""
    try:
        call()
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        return text if isinstance(error, Wrong) else f"{type(error).__name__}: {text}"
    return None


class Wrong(AssertionError):
    """A value that is not what the reference says."""


def same(got: object, expected: object, what: str = "", relative: float = 0.0) -> None:
    """Compare two values, or lists of values; tensors by dtype, shape and elements."""
    if isinstance(expected, (list, tuple)):
        if len(got) != len(expected):  # type: ignore[arg-type]
            raise Wrong(f"{what}: {len(got)} values, expected {len(expected)}")  # type: ignore[arg-type]
        for number, pair in enumerate(zip(got, expected, strict=True)):  # type: ignore[call-overload]
            same(*pair, f"{what}[{number}]", relative)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        same_tensor(got, expected, what, relative)
    elif got != expected:
        raise Wrong(f"{what}: got {got!r}, expected {expected!r}")


def same_tensor(got: torch.Tensor, expected: torch.Tensor, what: str, relative: float) -> None:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        raise Wrong(f"{what}: {got.dtype} {list(got.shape)}, expected "
                    f"{expected.dtype} {list(expected.shape)}")  # fmt: skip
    got = comparable(got)
    expected = comparable(expected)
    wrong = (got - expected).abs() > relative * expected.abs() if relative else got != expected
    if not wrong.any():
        return
    places = wrong.flatten().nonzero().flatten()
    first = places[:SHOWN]
    raise Wrong(
        f"{what}: {len(places)} of {wrong.numel()} wrong, first at {int(first[0])}: got "
        f"{got.flatten()[first].tolist()}, expected {expected.flatten()[first].tolist()}"
    )


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype whose elements torch compares."""
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.dtype in plain.FLOAT8 else tensor


def refused(call: Callable[[], object], *words: str) -> None:
    """Want an error that says one of `words`."""
    try:
        call()
    except Exception as error:
        if not any(word.lower() in str(error).lower() for word in words):
            raise Wrong(f"refused, but not by name ({'/'.join(words)}): {error}") from None
        return
    raise Wrong("it was not refused")


@contextmanager
def or_refused(*words: str) -> Iterator[None]:
    """Let the body raise where its error says one of `words`: right, or refused by name."""
    try:
        yield
    except Wrong:
        raise
    except Exception as error:
        if not any(word.lower() in str(error).lower() for word in words):
            raise
