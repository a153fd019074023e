"""Compatibility: whether a training can continue from a checkpoint with the same bits.

    must be equal     seed, micro-batches, the model's modules and tensors, the optimizer
    is reported       torch, processor, other settings, source files: the bits may differ
    may differ        ranks, stages, storage, backend, loader workers

Settings are compared in the same text form in which ranks compare them with each other.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from lockstep.checkpoint.folder import find_checkpoints
from lockstep.elastic.restart_source import RestartSource
from lockstep.formatting import format_numbered, format_quantity
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import CHECKPOINTS, command_words, find_launch_folder
from lockstep.launcher.world import world
from lockstep.messages import log
from lockstep.model.call_site import class_name
from lockstep.model.description import THREADS
from lockstep.record.program import describe_program
from lockstep.record.run_environment import describe_environment, find_environment_differences
from lockstep.record.sources import find_sources
from lockstep.training.state import TrainingState

__all__ = [
    "describe_run",
    "describe_training",
    "list_changes",
    "log_continued",
    "log_resumed",
    "require_same_training",
]

# Settings without effect on the bits; the last one was saved by version 0.1.
FREE = (
    *("pipeline.", "storage", "checkpoint", "audit", "restore_schedule"),
    "fingerprints",
)
SHOWN = 5  # differences that are printed


def describe_sources() -> dict[str, str]:
    """Return a hash of the program and of each of its own modules, by file name."""
    return {
        os.path.relpath(path): xxhash.xxh3_64_hexdigest(content)
        for path, content in find_sources().items()
    }


def require_same_training(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UsageError if a checkpoint cannot be continued by this trainer with the same bits.

    Args:
        saved: The state of the checkpoint, with its "settings".
        here: The same of this trainer.
    """
    theirs = saved["settings"]
    ours = here["settings"]
    for entry in {**ours, **theirs}:
        before = theirs.get(entry)
        now = ours.get(entry)
        if entry == "ema_decay":  # compare only whether there is an average
            before = str(before == "None")
            now = str(now == "None")
        if _is_structure(entry) and before != now:
            raise UsageError(
                f"{entry} is {ours.get(entry, 'missing')}, in the checkpoint it is "
                f"{theirs.get(entry, 'missing')}: resume with the same model and optimizer"
            )
        is_scheduler = re.fullmatch(r"scheduler(\[\d+\])?", entry) is not None
        is_restored = ours.get(entry.replace("scheduler", "restore_schedule")) != "False"
        if is_scheduler and is_restored and before != now and "None" not in (before, now):
            raise UsageError(
                f"{entry} is {now}, in the checkpoint it is {before}, which is used: resume with "
                "the same scheduler, or pass restore_schedule=False to ls.OptimizerConfig"
            )


def list_changes(
    saved: Mapping[str, Any], here: Mapping[str, Any], used: Mapping[str, str]
) -> list[str]:
    """Return the other differences from the training that saved a checkpoint, as sentences.

    Args:
        saved: The state of the checkpoint.
        here: The same of this trainer, before the checkpoint was loaded.
        used: The settings of the optimizers and schedulers, after it was loaded.
    """
    differences = [
        f"{difference} from now on"
        for difference in find_environment_differences(saved["environment"], here["environment"])
    ]
    for entry in {**saved["settings"], **here["settings"]}:
        before = saved["settings"].get(entry)
        now = here["settings"].get(entry)
        if entry == THREADS and here["environment"].get("portable"):
            continue  # a checkpoint of an earlier version, whose portable bits depended on it
        is_derived = re.match(r"scheduler(\[\d+\])?\._", entry)
        if before != now and not entry.startswith(FREE) and not is_derived:
            restored = " (the checkpoint's is used)" if used.get(entry) == before else ""
            if restored and re.match(r"scheduler|.*\.(initial_)?lr$", entry):
                restored = (
                    " (the checkpoint's is used; restore_schedule=False in ls.OptimizerConfig "
                    "uses the new one)"
                )
            differences.append(f"{entry} is {now}, it was {before}{restored}")
    for file in {**saved["sources"], **here["sources"]}:
        before = saved["sources"].get(file)
        now = here["sources"].get(file)
        if before and now and before != now:
            differences.append(f"the source file {file} has changed")
    return differences


def describe_training(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of a training that its checkpoints contain."""
    return {
        "settings": dict(settings),
        "environment": describe_environment(),
        "sources": describe_sources(),
    }


def describe_run(state: TrainingState) -> dict[str, Any]:
    """Return the fields of the record's first line."""
    module = state.module
    parallel = state.parallel
    optimization = state.optimization
    return {
        "command": command_words(os.environ, sys.argv),
        "program": describe_program(),
        "seed": state.position.seed,
        "torch_seed": torch.initial_seed(),  # a random one if the program sets none
        "trainer": state.position.attempt.trainer,
        "layout": {
            "world_size": world().world_size,
            "replicas": parallel.replicas,
            "stages": parallel.stages,
            "microbatches": parallel.microbatches,
            "threads": parallel.threads,
            "backend": world().backend,
            "device": str(world().device),
            "storage": optimization.storage,
        },
        "environment": describe_environment(),
        "model": {
            "class": class_name(module),
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "buffers": sum(buffer.numel() for buffer in module.buffers()),
        },
        "optimizer": optimization.options(),
    }


def _is_structure(entry: str) -> bool:
    """Return whether an entry of the settings decides which tensors a state has."""
    if re.fullmatch(r"optimizer(\[\d+\])?|ema_decay", entry) or ".params[" in entry:
        return True
    is_attribute = "(" in entry or entry.endswith("requires_grad")
    return re.match(r"model\b", entry) is not None and not is_attribute


def log_continued(
    origin: RestartSource, path: Path | None, steps: int, repeated: int, has_checkpoints: bool
) -> None:
    """Print from where the processes of a new round continue.

    Args:
        origin: The origin of the round, as reported by the launcher.
        path: The state that they continue from; None: they start from the beginning.
        steps: The number of steps in it.
        repeated: The number of recorded steps after these.
        has_checkpoints: Whether the trainer saves checkpoints.
    """
    if path is None and not has_checkpoints and _has_other_state(origin):
        return  # the state of a trainer that this one is registered with or comes after
    advice = ""
    if path is None:
        advice = "" if has_checkpoints else "; pass checkpoint=ls.CheckpointConfig()"
        source = "the beginning: no checkpoint"
    elif origin.state is not None:
        source = f"step {steps}, handed over by {format_numbered('member', origin.writers)}"
    else:
        source = f"the checkpoint of step {steps}"
    if repeated:
        verb = "is" if repeated == 1 else "are"
        source += f"; {format_quantity(repeated, 'step')} {verb} computed again"
    log(f"round {origin.round} continues from {source}{advice}")


def _has_other_state(origin: RestartSource) -> bool:
    """Return whether the last round left the state of some trainer."""
    launch = find_launch_folder()
    has_checkpoints = launch is not None and bool(find_checkpoints(launch / CHECKPOINTS))
    return origin.state is not None or has_checkpoints


def log_resumed(path: Path | None, steps: int, differences: Sequence[str]) -> None:
    """Print from where a run is resumed, and the differences."""
    if path is None:
        log("the run has not saved a checkpoint: it starts from the beginning")
        return
    log(f"resumed after step {steps} from {os.path.relpath(path)}")
    for difference in differences[:SHOWN]:
        log(difference)
    if len(differences) > SHOWN:
        log(f"and {len(differences) - SHOWN} more differences; the record has all")
