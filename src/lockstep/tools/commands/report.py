"""`lockstep report`: renders the record of a run as a page or as Markdown."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.files import make_folder, open_for_write, replace_file
from lockstep.kernel.errors import FileError, UsageError
from lockstep.messages import escape_control, log

if TYPE_CHECKING:
    from lockstep.record.reader import Run

__all__ = ["command", "find_run", "format_of", "open_in_browser", "runs_option", "save"]

SUFFIXES = ("html", "md")

runs_option = click.option(
    "--runs", "folder", default="runs", show_default=True, metavar="DIR", help="Folder of runs."
)
"""The option of a command that finds its runs in a folder, its argument `folder`."""


@click.command()
@click.argument("run")
@runs_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(SUFFIXES),
    help="Format of the report.  [default: by the suffix of --output, else html]",
)
@click.option(
    "-o", "--output", metavar="FILE",
    help="Output file; '-' is standard output.  [default: report.* in the run's folder]",
)  # fmt: skip
@click.option("--trace", type=click.Path(), help="Write a trace for Perfetto to this file instead.")
@click.option("--open", "opened", is_flag=True, help="Open the result in the browser.")
def command(
    run: str, folder: str, kind: str | None, output: str | None, trace: str | None, opened: bool
) -> None:
    """Write a report of RUN, the name or folder of a run.

    The default is an HTML page in a single file, runs/NAME/report.html. Runs that
    are still going, failed or died are rendered up to their last line. Use md for an
    issue. --trace writes the timelines of all ranks as JSON for ui.perfetto.dev and
    chrome://tracing.
    """
    from lockstep.record.reader import read_run

    recording = read_run(find_run(run, folder))
    for remark in recording.remarks:
        log(remark)
    if trace is not None:
        save(_trace(recording), trace)
        return
    kind = kind or format_of(output)
    content = _render(recording, kind)
    path = save(content, output, recording.folder / f"report.{kind}")
    if opened and path is not None:
        open_in_browser(path)


def _render(run: Run, kind: str) -> bytes:
    """Return the report of a run in the format `kind`."""
    from lockstep.tools.report.run_report import report_html, report_markdown

    text = report_markdown(run) if kind == "md" else report_html(run)
    return text.encode()


def _trace(run: Run) -> bytes:
    """Return the trace of a run; raise UsageError if it has no steps."""
    from lockstep.tools.report.trace import export_trace

    if not len(run.steps) and not run.timelines:
        raise UsageError(
            f"the run {run.folder.name} has no steps yet, so there is nothing to trace"
        )
    return export_trace(run)


def format_of(output: str | None) -> str:
    """Return the format of an output file by its suffix; "html" by default."""
    suffix = Path(output).suffix.lstrip(".").lower() if output else ""
    if suffix and suffix not in (*SUFFIXES, "htm"):
        raise UsageError(
            f"--output {output}: the suffix decides the format, which is one of "
            f"{', '.join(SUFFIXES)}; to write another one, add --format"
        )
    return suffix if suffix in SUFFIXES else "html"


def find_run(run: str, folder: str) -> Path:
    """Return the folder or file of a run, given its path or name."""
    from lockstep.launcher.run_folder import find_candidates

    if candidates := find_candidates(run, Path(folder)):
        return candidates[0]
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if close := get_close_matches(run, names, 1):
        raise UsageError(f"there is no run {run} in {folder}; did you mean {close[0]}?")
    return Path(run)


def save(content: bytes, output: str | None, default: Path | None = None) -> Path | None:
    """Write `content` to a file and print its path; return the path.

    Args:
        content: The content of the file.
        output: The file that the user named, which may be a link or a device. "-" is standard
            output; the path is then not printed, and the result is None.
        default: The file to replace if the user named none.
    """
    if output == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return None
    path = default if output is None and default is not None else Path(output or "")
    try:
        make_folder(path.parent)
        with replace_file(path) if output is None else open_for_write(path) as file:
            file.write(content)
    except OSError as error:
        raise FileError(
            f"{path} cannot be written ({error.strerror}); choose another file with --output"
        ) from None
    click.echo(escape_control(f"{path}  ({len(content) / 1000:,.0f} kB)"))
    return path


def open_in_browser(path: Path) -> None:
    """Open a file in the browser, or print its path if there is no browser."""
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        click.echo(f"No browser could be started; open {path} manually.", err=True)
