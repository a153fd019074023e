"""`lockstep report`: renders the record of a run as a page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lockstep.files import make_folder, open_for_write, replace_file
from lockstep.kernel.errors import FileError
from lockstep.messages import escape_control, log
from lockstep.tools.commands.options import resolve_run, runs_option

__all__ = ["command"]


@click.command()
@click.argument("run")
@runs_option
@click.option(
    "-o", "--output", metavar="FILE",
    help="Output file; '-' is standard output.  [default: report.html in the run's folder]",
)  # fmt: skip
@click.option("--open", "opened", is_flag=True, help="Open the result in the browser.")
def command(run: str, folder: str, output: str | None, opened: bool) -> None:
    """Write a report of RUN, the name or folder of a run, as one HTML page.

    Runs that are still going, failed or died are rendered up to their last line.
    """
    from lockstep.record.reader import read_run
    from lockstep.tools.report.run_report import report_html

    recording = read_run(resolve_run(run, folder))
    for remark in recording.remarks:
        log(remark)
    path = save(report_html(recording).encode(), output, recording.folder / "report.html")
    if opened and path is not None:
        open_in_browser(path)


def save(content: bytes, output: str | None, default: Path) -> Path | None:
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
    path = default if output is None else Path(output)
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
