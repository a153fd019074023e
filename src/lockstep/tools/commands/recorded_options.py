"""The options of a recorded run of `lockstep train`, with which it is continued."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lockstep.kernel.errors import UsageError
from lockstep.tools.recipes import NAMES

if TYPE_CHECKING:
    from lockstep.record.reader import Run
    from lockstep.tools.recipes.digits import Options

__all__ = [
    "open_resumed",
    "recall_options",
    "resolve_options",
]

CHANGEABLE = {"resume", "runs", "nprocs", "least", "most", "stages", "workers", "checkpoint_every"}
CHANGEABLE |= {"quiet", "as_json"}
"""Options that may be given to continue a run, because they change no bits."""


def _is_given(option: str) -> bool:
    """Return whether an option of the command is on the command line."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


def open_resumed(run: str, runs: str) -> Run:
    """Return the run to resume, once no other process uses it.

    Raises:
        UsageError: There is no such run, it is not a run of a recipe, or it is still running.
    """
    from lockstep.launcher.run_folder import find_run, wait_until_free
    from lockstep.record.columns import as_dict
    from lockstep.record.reader import read_run

    folder = find_run(run, Path(runs))
    wait_until_free(folder)
    recorded = read_run(folder)
    if as_dict(recorded.latest("options")).get("recipe") not in NAMES:
        raise UsageError(
            f"{folder} is not a run of `lockstep train`, so its options are not known; continue "
            f"a run of a script with `lockstep run --resume {folder}`"
        )
    return recorded


def resolve_options(recipe: str, given: Mapping[str, Any]) -> Options:
    """Return the options with their defaults."""
    from lockstep.tools.recipes.digits import Options

    chosen = {name: value for name, value in given.items() if value is not None}
    return Options(recipe, **chosen)


def recall_options(run: Run, nprocs: int, given: dict[str, Any]) -> tuple[str, int]:
    """Set the options in `given` to those of a run, unless they were given and change no bits.

    Returns:
        The recipe and the number of ranks.

    Raises:
        UsageError: Another option was given, or the record lacks one.
    """
    for parameter in click.get_current_context().command.params:
        if _is_given(parameter.name or "") and parameter.name not in CHANGEABLE:
            option = parameter.opts[-1] if isinstance(parameter, click.Option) else "RECIPE"
            raise UsageError(
                f"{option}: the run {run.folder} keeps its recipe and options when it is resumed; "
                "omit it, or start a new run"
            )
    recorded: dict[str, Any] = {"portable": False} | run.latest("options")
    for option in given.keys() - CHANGEABLE - recorded.keys():
        raise UsageError(
            f"{run.folder} cannot be resumed: its record has no option {option}, which decides "
            f"the results; start a new run"
        )
    for option in given.keys() & recorded.keys() - {"quiet"}:
        if not _is_given(option):
            given[option] = recorded[option]
    ranks = nprocs if _is_given("nprocs") else int(run.layout.get("world_size") or nprocs)
    return recorded["recipe"], ranks
