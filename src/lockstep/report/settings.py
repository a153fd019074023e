"""What a run was started with: its command, layout, options, environment, as text."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.formatting import format_bytes, format_count
from lockstep.record.columns import mapping
from lockstep.record.reader import Run
from lockstep.report.summary import real

__all__ = ["Facts", "command", "facts", "flattened", "shown"]


def command(run: Run) -> str:
    """Return the command as it would be typed; "" where the record does not hold it."""
    words_typed = run.header.get("command")
    if not isinstance(words_typed, list) or not words_typed:
        return ""
    first, *rest = map(str, words_typed)
    if os.path.basename(first) == "__main__.py":
        return shlex.join(["python", "-m", os.path.basename(os.path.dirname(first)), *rest])
    return shlex.join([os.path.basename(first) if first.endswith("/lockstep") else first, *rest])


@dataclass(frozen=True)
class Facts:
    """Some named facts under one heading."""

    name: str
    facts: dict[str, str]


def facts(run: Run) -> list[Facts]:
    """Return environment, layout, options and variables, as far as the record has them."""
    environment = dict(run.environment)
    variables = mapping(environment.pop("variables", None))
    octets = real(environment.pop("memory_bytes", None))
    if math.isfinite(octets):
        environment["memory"] = format_bytes(octets)
    started = {"started": run.header["started"]} if run.header.get("started") else {}
    groups = {
        "Environment": started | environment,
        "Layout": run.layout,
        "Options": mapping(run.header.get("options")),
        "Model": mapping(run.header.get("model")),
        "Environment variables": variables,
    }
    shown = {name: dict(flattened(values)) for name, values in groups.items()}
    return [Facts(name, values) for name, values in shown.items() if values]


def flattened(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested facts as text under dotted names; what is empty is left out."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if value:
                yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value is not None and value != "":
            yield f"{prefix}{name}", shown(value)


def shown(value: Any) -> str:
    """Return one fact as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_count(value) if isinstance(value, int) and abs(value) >= 10000 else str(value)
