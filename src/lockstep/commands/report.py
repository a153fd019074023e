"""`lockstep report`: a run's record as a page, as Markdown or as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lockstep.errors import FileError

__all__ = ["command", "place_of", "save", "show_page"]

SUFFIXES = {"html": "html", "md": "md", "svg": "svg", "png": "png"}


@click.command()
@click.argument("run")
@click.option("--runs", "folder", default="runs", show_default=True, help="The folder of runs.")
@click.option(
    "--format", "kind", type=click.Choice(list(SUFFIXES)), help="What to make; html by default."
)
@click.option("-o", "--output", help="Where to write it; '-' is the standard output.")
@click.option("--open", "opened", is_flag=True, help="Open it in the browser.")
def command(run: str, folder: str, kind: str | None, output: str | None, opened: bool) -> None:
    """Render the record of RUN, a run's name or folder.

    The page is one file that loads nothing: runs/NAME/report.html. Runs that are
    still going, failed or died are rendered as far as they came. md, svg and png
    are for an issue or a slide.
    """
    from lockstep.show.reading import read

    found = read(place_of(run, folder))
    kind = kind or kind_of(output)
    content = rendered(found, kind)
    place = save(content, output or str(found.folder / f"report.{SUFFIXES[kind]}"))
    if opened and place is not None:
        show_page(place)


def rendered(run: object, kind: str) -> bytes:
    """Return a run's report as the bytes of a file of `kind`."""
    from lockstep.show import report, slide
    from lockstep.show.reading import Run

    assert isinstance(run, Run)
    if kind == "md":
        return report.markdown(run).encode()
    if kind == "html":
        return report.html(run).encode()
    picture = slide.draw(run)
    return picture.svg().encode() if kind == "svg" else picture.png()


def kind_of(output: str | None) -> str:
    """Return the format that a file's name asks for."""
    suffix = Path(output).suffix.lstrip(".") if output else ""
    return suffix if suffix in SUFFIXES else "html"


def place_of(run: str, folder: str) -> Path:
    """Return the folder (or file) of a run that is named by its path or by its name alone."""
    as_path = Path(run)
    by_name = Path(folder) / run
    return by_name if not as_path.exists() and by_name.exists() else as_path


def save(content: bytes, output: str) -> Path | None:
    """Write `content` and say where; on the standard output nothing is said."""
    if output == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return None
    place = Path(output)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    except OSError as error:
        raise FileError(
            f"{place} cannot be written ({error.strerror}); name another place with --output"
        ) from None
    click.echo(f"{place}  ({len(content) / 1000:,.0f} kB)")
    return place


def show_page(place: Path) -> None:
    """Open a file in the browser; say so where there is none."""
    import webbrowser

    if not webbrowser.open(place.resolve().as_uri()):
        click.echo(f"No browser could be started; open {place} yourself.", err=True)
