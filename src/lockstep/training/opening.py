"""The opening of a run: its writers, and the first line of its record."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.launcher.world import World
from lockstep.model.parallel_context import Setting
from lockstep.record.environment import describe_environment
from lockstep.record.loggers import Logger
from lockstep.record.recorder import Recorder

__all__ = ["Record", "folder_of", "header", "opened"]

Record = str | Path | Logger
"""Where a run is recorded: its folder, or whatever takes the lines."""


def opened(record: Record | Sequence[Record]) -> list[Logger]:
    """Return the writers that `record` names; a folder gets a recorder."""
    given: Sequence[Any] = record if isinstance(record, (list, tuple)) else [record]
    return [Recorder(Path(each)) if isinstance(each, (str, Path)) else each for each in given]


def folder_of(writers: Sequence[Logger]) -> Path | None:
    """Return the run's folder, if some writer has one."""
    return next((each.folder for each in writers if isinstance(each, Recorder)), None)


def header(
    world: World, setting: Setting, module: nn.Module, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of the first line; `about` adds to them."""
    return {
        "command": sys.argv,
        "layout": {
            "world_size": world.world_size,
            "replicas": setting.replicas,
            "stages": setting.stages,
            "microbatches": setting.microbatches,
            "threads": setting.threads,
            "backend": world.backend,
            "device": str(world.device),
        },
        "environment": describe_environment(),
        "model": {
            "class": type(module).__name__,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "buffers": sum(buffer.numel() for buffer in module.buffers()),
        },
        **about,
    }
