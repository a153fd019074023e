"""`lockstep report`: a run's record as a page, as Markdown or as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.errors import FileError, UsageError
from lockstep.files import make_folder, open_for_write, replace_file
from lockstep.messages import escape_control

if TYPE_CHECKING:
    from lockstep.record.reader import Run
    from lockstep.record.timeline import Timeline

__all__ = ["command", "place_of", "save", "show_page"]

SUFFIXES = {"html": "html", "md": "md", "svg": "svg", "png": "png"}


@click.command()
@click.argument("run")
@click.option("--runs", "folder", default="runs", show_default=True, help="The folder of runs.")
@click.option(
    "--format", "kind", type=click.Choice(list(SUFFIXES)), help="What to make; html by default."
)
@click.option("-o", "--output", help="Where to write it; '-' is the standard output.")
@click.option("--trace", type=click.Path(), help="Write a trace for Perfetto here instead.")
@click.option("--open", "opened", is_flag=True, help="Open it in the browser.")
def command(
    run: str, folder: str, kind: str | None, output: str | None, trace: str | None, opened: bool
) -> None:
    """Render the record of RUN, a run's name or folder.

    The page is one file that loads nothing: runs/NAME/report.html. Runs that are
    still going, failed or died are rendered as far as they came. md, svg and png
    are for an issue or a slide. --trace writes the timeline of all ranks as JSON
    that ui.perfetto.dev and chrome://tracing open.
    """
    from lockstep.record.reader import read

    found = read(place_of(run, folder))
    if trace is not None:
        save(traced(found), trace)
        return
    kind = kind or kind_of(output)
    content = rendered(found, kind)
    place = save(content, output, found.folder / f"report.{SUFFIXES[kind]}")
    if opened and place is not None:
        show_page(place)


def rendered(run: Run, kind: str) -> bytes:
    """Return a run's report as the bytes of a file of `kind`."""
    from lockstep.report import run_report as report
    from lockstep.report import slide

    if kind == "md":
        return report.markdown(run).encode()
    if kind == "html":
        return report.html(run, simulated(run)).encode()
    picture = slide.draw(run)
    return picture.svg().encode() if kind == "svg" else picture.png()


def simulated(run: Run) -> Timeline | None:
    """Return the timeline that the report draws, simulated; None where it has no stages."""
    from lockstep.pipeline.replay import replay
    from lockstep.record.recorded import typical

    found = typical(run)
    return None if found is None else replay(found)


def traced(run: Run) -> bytes:
    """Return the run's trace; UsageError where it recorded no times."""
    from lockstep.report.trace import trace

    if not len(run.steps) and not run.timelines:
        raise UsageError(
            f"the run {run.folder.name} holds no steps yet, so there is nothing to trace"
        )
    return trace(run)


def kind_of(output: str | None) -> str:
    """Return the format that a file's name asks for."""
    suffix = Path(output).suffix.lstrip(".") if output else ""
    return suffix if suffix in SUFFIXES else "html"


def place_of(run: str, folder: str) -> Path:
    """Return the folder (or file) of a run that is named by its path or by its name alone."""
    as_path = Path(run)
    by_name = Path(folder) / run
    return by_name if not as_path.exists() and by_name.exists() else as_path


def save(content: bytes, output: str | None, default: Path | None = None) -> Path | None:
    """Write `content` and print where; nothing is printed for "-", the standard output.

    `output` is what the user named, which may be a link or a device; without one the
    content replaces the file `default`.
    """
    if output == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return None
    place = default if output is None and default is not None else Path(output or "")
    try:
        make_folder(place.parent)
        with replace_file(place) if output is None else open_for_write(place) as file:
            file.write(content)
    except OSError as error:
        raise FileError(
            f"{place} cannot be written ({error.strerror}); name another place with --output"
        ) from None
    click.echo(escape_control(f"{place}  ({len(content) / 1000:,.0f} kB)"))
    return place


def show_page(place: Path) -> None:
    """Open a file in the browser; say so where there is none."""
    import webbrowser

    if not webbrowser.open(place.resolve().as_uri()):
        click.echo(f"No browser could be started; open {place} yourself.", err=True)
