"""The options of a recorded run of `lockstep train`, with which it is continued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lockstep.kernel.errors import UsageError
from lockstep.tools.recipes.catalog import NAMES

if TYPE_CHECKING:
    from lockstep.record.reader import Run
    from lockstep.tools.recipes.classification import Options

__all__ = [
    "open_resumed",
    "recall_options",
    "resolve_options",
]

CHANGEABLE = {"stages", "schedule", "activation_checkpointing", "workers"}
CHANGEABLE |= {"checkpoint_every", "quiet", "download"}  # on resuming, because they change no bits
NOT_RECALLED = {"quiet", "download"}  # apply to one process, not to the run


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

    folder = find_run(run, Path(runs))
    _read_recorded(folder)
    wait_until_free(folder)
    return _read_recorded(folder)


def _read_recorded(folder: Path) -> Run:
    """Return a run with its options; raise UsageError if it is not a run of a recipe."""
    from lockstep.record.columns import as_dict
    from lockstep.record.reader import read_ends

    recorded = read_ends(folder)
    if as_dict(recorded.latest("options")).get("recipe") not in NAMES:
        raise UsageError(
            f"{folder} is not a run of `lockstep train`, so its options are not known; continue "
            f"a run of a script with `lockstep run --resume {folder}`"
        )
    return recorded


def resolve_options(recipe: str, given: Mapping[str, Any]) -> Options:
    """Return the options with the recipe's defaults; KeyError if there is no such recipe."""
    from lockstep.tools.recipes.catalog import find_recipe
    from lockstep.tools.recipes.classification import Options

    chosen = {name: value for name, value in given.items() if value is not None}
    defaults = {"data": None, "portable": None, **find_recipe(recipe).defaults}
    return Options(recipe=recipe, **{**defaults, **chosen})


def recall_options(
    run: Run, recipe: str | None, name: str | None, nprocs: int, given: dict[str, Any]
) -> tuple[str, int]:
    """Add the recorded options of a run to `given`, unless they were given.

    Returns:
        The recipe and the number of ranks.

    Raises:
        UsageError: An option that decides the results was given with another value.
    """
    recorded: dict[str, Any] = {"portable": False} | run.latest("options")
    for option in given.keys() - CHANGEABLE - recorded.keys():
        raise UsageError(
            f"{run.folder} cannot be resumed: its record has no option {option}, which decides "
            f"the results; start a new run"
        )
    asked = {"recipe": recipe, "name": name, **given}
    for parameter in click.get_current_context().command.params:
        option = parameter.name or ""
        if option == "name":
            recorded = recorded | {"name": run.folder.resolve().name}
        if _is_given(option) and option in asked and option not in CHANGEABLE:
            _require_same(run, parameter, asked[option], recorded.get(option))
    for option in given.keys() & recorded.keys() - NOT_RECALLED:
        if not _is_given(option):
            given[option] = recorded[option]
    if given["stages"] == 1 and not _is_given("schedule"):
        given["schedule"] = None
    ranks = nprocs if _is_given("nprocs") else int(run.layout.get("world_size") or nprocs)
    return recorded["recipe"], ranks


def _require_same(run: Run, parameter: click.Parameter, value: Any, recorded: Any) -> None:
    """Raise UsageError unless an option of a resumed run has its recorded value."""
    if parameter.name == "data" and None not in (value, recorded):
        value, recorded = os.path.abspath(value), os.path.abspath(recorded)
    if value == recorded:
        return
    option = parameter.opts[-1] if isinstance(parameter, click.Option) else "RECIPE"
    if value is True:
        asked, had = option, f"without {option}"
    elif value is False:
        asked, had = parameter.secondary_opts[-1], f"with {option}"
    else:
        asked = f"{option} {value}"
        had = f"with {option} {recorded}" if recorded is not None else f"without {option}"
    raise UsageError(
        f"{asked}: the run {run.folder} was started {had}, which a resumed run keeps; omit it, "
        f"or start a new run"
    )
