"""Options that several commands have, and what they do."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from lockstep.kernel.errors import UsageError

__all__ = [
    "PASSING_ARGUMENTS",
    "json_option",
    "parse_rank_counts",
    "printing_text",
    "resolve_run",
    "runs_option",
    "timeout_option",
]

json_option = click.option(
    "--json", "as_json", is_flag=True,
    help="Print one JSON object as the last line of stdout; text goes to stderr.",
)  # fmt: skip
"""The option `as_json` of a command that measures or compares one thing."""

runs_option = click.option(
    "--runs", "folder", default="runs", show_default=True, metavar="DIR", help="Folder of runs."
)
"""The option of a command that finds its runs in a folder, its argument `folder`."""

timeout_option = click.option(
    "--timeout", default=300.0, show_default=True,
    type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Longest time per launch of the script, in seconds.",
)  # fmt: skip

PASSING_ARGUMENTS = {"ignore_unknown_options": True}
"""The settings of a command that passes the options that it does not know to a script."""


@contextlib.contextmanager
def printing_text(as_json: bool, describe: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Print the text of the body and, with `--json`, one object after it.

    Args:
        as_json: Whether standard output is for the object; the text goes to standard error then.
        describe: Called after the body; returns the object.
    """
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield
    if as_json:
        click.echo(json.dumps(describe()))


def parse_rank_counts(option: str, text: str) -> list[int]:
    """Return the numbers of ranks in "1,2,3"; raise UsageError naming the option."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option} {text}: expected numbers of ranks of at least 1, such as 2,4")
    return list(map(int, words))


def resolve_run(run: str, folder: str) -> Path:
    """Return the folder or file of a run, given its path or name."""
    from lockstep.launcher.run_folder import find_candidates

    if candidates := find_candidates(run, Path(folder)):
        return candidates[0]
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if close := get_close_matches(run, names, 1):
        raise UsageError(f"there is no run {run} in {folder}; did you mean {close[0]}?")
    return Path(run)
