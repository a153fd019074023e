"""The opening of a run: its loggers, and the first line of its record."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.launcher.world import World
from lockstep.model.parallel_context import ParallelContext
from lockstep.record.environment import describe_environment
from lockstep.record.loggers import Logger
from lockstep.record.recorder import Recorder

__all__ = ["LoggerLike", "folder_of", "header", "opened"]

LoggerLike = str | Path | Logger
"""Where a run is recorded: its folder, or an object that takes the lines."""


def opened(loggers: LoggerLike | Sequence[LoggerLike]) -> list[Logger]:
    """Return the loggers that are given; a folder gets a recorder."""
    given: Sequence[Any] = loggers if isinstance(loggers, (list, tuple)) else [loggers]
    return [Recorder(Path(each)) if isinstance(each, (str, Path)) else each for each in given]


def folder_of(loggers: Sequence[Logger]) -> Path | None:
    """Return the run's folder, if some logger has one."""
    return next((each.folder for each in loggers if isinstance(each, Recorder)), None)


def header(world: World, parallel: ParallelContext, module: nn.Module) -> dict[str, Any]:
    """Return the fields of the first line."""
    return {
        "command": sys.argv,
        "layout": {
            "world_size": world.world_size,
            "replicas": parallel.replicas,
            "stages": parallel.stages,
            "microbatches": parallel.microbatches,
            "threads": parallel.threads,
            "backend": world.backend,
            "device": str(world.device),
        },
        "environment": describe_environment(),
        "model": {
            "class": type(module).__name__,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "buffers": sum(buffer.numel() for buffer in module.buffers()),
        },
    }
