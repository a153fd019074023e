"""Makes the pictures of the documentation from real runs: `make pictures`.

    command in a pseudo-terminal ──pyte──> screen ──to_svg──> docs/pictures/NAME.svg
    recorded run ──> lockstep report ──Chromium──> docs/pictures/report.png

Runs start in an empty folder. Paths and names of this machine are replaced before they are
drawn. A picture that still contains one of them is not written.
"""

from __future__ import annotations

import fcntl
import getpass
import io
import os
import platform
import pty
import re
import shutil
import socket
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

__all__ = [
    "FILES",
    "FOLDER",
    "LARGEST",
    "PICTURES",
    "ROOT",
    "Cell",
    "Recording",
    "find_browser",
    "find_private",
    "record",
    "to_svg",
]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/pictures"
LARGEST = 200_000  # the largest size of a picture in bytes
ROWS = 500  # rows of the screen, enough that nothing scrolls out of it

CELL_WIDTH = 8.4
CELL_HEIGHT = 19
FONT_SIZE = 14
MARGIN = 16
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BACKGROUND = "#1c1f2b"
FOREGROUND = "#d9dce8"
COLORS = {
    "black": "#6b7089", "red": "#ff7b8a", "green": "#8fd694", "brown": "#e5c07b",
    "blue": "#82aaff", "magenta": "#c792ea", "cyan": "#6fd3e0", "white": "#f2f4ff",
}  # fmt: skip

PLAIN = """
from functools import partial

import torch

import lockstep as ls
from lockstep.data.datasets import digits

ls.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
trainer = ls.Trainer(model, torch.nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
for batch in trainer.batches(digits(), batch_size=128):
    trainer.step(batch)
"""
# A mistake that `lockstep check` finds: the noise depends on the rank.
NOISE = PLAIN.replace(
    "\nls.init()",
    """

class Noise(torch.nn.Module):
    def forward(self, x):
        generator = torch.Generator().manual_seed(ls.rank())
        return x + 0.1 * torch.randn(x.shape, generator=generator)


ls.init()""",
).replace("Flatten(), ", "Flatten(), Noise(), ")
# A mistake that fails on one rank.
CRASH = PLAIN + (
    """    if trainer.steps == 5:
        settings = {"lr": 0.1} if ls.rank() == 0 else {}
        print("learning rate", settings["lr"])
"""
)

VISIBLE_TEXT = """() => {
    const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [], range = new Range();
    while (nodes.nextNode()) {
        range.selectNodeContents(nodes.currentNode);
        if (range.getBoundingClientRect().top < innerHeight) found.push(nodes.currentNode.data);
    }
    return found.join("\\n");
}"""


@dataclass(frozen=True)
class Cell:
    """One character of a terminal; `color` is a CSS color, "" for the default one."""

    text: str = " "
    color: str = ""
    is_bold: bool = False


Screen = list[list[Cell]]
"""The rows of a terminal."""


@dataclass(frozen=True)
class Recording:
    """A picture of a terminal.

    Attributes:
        command: The command, as it is shown.
        title: The description of the picture for screen readers.
        columns: The width of the terminal.
        script: The name and source of the file that `command` runs; None if it runs none.
        until: A pattern; the picture is taken when it first appears on the screen. None: at the
            end of the command.
        last: A text; the first row that contains it and all rows below are left out. None for
            no such text.
        rows: The number of last rows that are kept; None for all.
    """

    command: str
    title: str
    columns: int = 80
    script: tuple[str, str] | None = None
    until: str | None = None
    last: str | None = None
    rows: int | None = None


PICTURES = {
    "progress": Recording(
        "lockstep train digits -n 2",
        "The terminal while lockstep train digits -n 2 runs: finished epochs, and a live display",
        columns=88,
        until=r"epoch 12/30 .* [2-4]\d/45",
    ),
    "train": Recording(
        "lockstep train digits -n 2",
        "The end of lockstep train digits -n 2: epochs, accuracy, speed and the digests",
        columns=88,
        rows=15,
    ),
    "check": Recording(
        "lockstep check train.py",
        "lockstep check compares nine layouts of a script and names the module that differs",
        columns=96,
        script=("train.py", NOISE),
    ),
    "failure": Recording(
        "lockstep run -n 2 --name first train.py",
        "A rank raises a KeyError; the last line names the rank, the exception and the log",
        columns=88,
        script=("train.py", CRASH),
    ),
    "doctor": Recording(
        "lockstep doctor",
        "lockstep doctor lists its checks of this machine, each with its result",
        last="To report a problem",
    ),
}
FILES = [*(f"{name}.svg" for name in PICTURES), "report.png"]


def to_svg(rows: Screen, title: str) -> str:
    """Return a drawing of terminal rows, with its own background."""
    columns = max(len(_text(row).rstrip()) for row in rows)
    width = columns * CELL_WIDTH + 2 * MARGIN
    height = len(rows) * CELL_HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="10" fill="{BACKGROUND}"/>',
        f'<g font-family="{FONTS}" font-size="{FONT_SIZE}" fill="{FOREGROUND}" '
        'xml:space="preserve">',
    ]
    for number, row in enumerate(rows):
        y = MARGIN + number * CELL_HEIGHT + FONT_SIZE
        lines += [_draw_run(start, run, y) for start, run in _split_runs(row)]
    return "\n".join([*lines, "</g>", "</svg>", ""])


def _text(cells: Sequence[Cell]) -> str:
    return "".join(cell.text for cell in cells)


def _trim(rows: Screen) -> Screen:
    """Return rows without empty ones at the end."""
    count = len(rows)
    while count and not _text(rows[count - 1]).strip():
        count -= 1
    return rows[:count]


def _split_runs(row: Sequence[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    """Yield runs of cells with one style, without spaces around them, and their first columns."""
    start = 0
    for _, group in groupby(row, lambda cell: replace(cell, text="")):
        run = list(group)
        for part in re.finditer(r"\S+(?: \S+)*", _text(run)):
            yield start + part.start(), run[part.start() : part.end()]
        start += len(run)


def _draw_run(start: int, run: Sequence[Cell], y: int) -> str:
    cell = run[0]
    style = f' fill="{cell.color}"' if cell.color else ""
    style += ' font-weight="bold"' if cell.is_bold else ""
    text = escape(_text(run))
    length = len(run) * CELL_WIDTH
    x = MARGIN + start * CELL_WIDTH
    return f'<text x="{x:g}" y="{y}" textLength="{length:g}"{style}>{text}</text>'


def record(
    command: Sequence[str],
    columns: int,
    folder: Path,
    hidden: Mapping[str, str],
    until: str | None = None,
) -> tuple[Screen, Screen | None]:
    """Run a command in a pseudo-terminal, and return its last screen.

    Args:
        command: The command and its arguments.
        columns: The width of the terminal.
        folder: The working directory of the command.
        hidden: Texts to replace in the output.
        until: A pattern; also return the first screen that contains it.
    """
    import pyte  # type: ignore[import-not-found, import-untyped, unused-ignore]

    screen = pyte.Screen(columns, ROWS)
    stream = pyte.Stream(screen)
    early = None
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT / "src")}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], list(command), environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    for text in _read(terminal):
        for private, shown in hidden.items():
            text = text.replace(private, shown)
        stream.feed(text)
        if until is not None and early is None and re.search(until, "\n".join(screen.display)):
            early = _read_screen(screen)
    os.waitpid(process, 0)
    return _read_screen(screen), early


def _read(terminal: int) -> Iterator[str]:
    """Yield the output of a terminal in whole lines where possible, until it is closed."""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # on Linux, when the last process has closed the terminal
            return
        if not data:
            return
        while True:  # until the last character is complete
            try:
                yield data.decode()
                break
            except UnicodeDecodeError:
                data += os.read(terminal, 1)


def _read_screen(screen: Any) -> Screen:
    """Return the rows of a terminal, without empty rows at the bottom."""
    columns = range(screen.columns)
    lines = (screen.buffer[number] for number in range(screen.lines))
    return _trim([[_read_cell(line[column]) for column in columns] for line in lines])


def _read_cell(character: Any) -> Cell:
    name = character.fg.removeprefix("bright")
    color = COLORS.get(name, "")
    if re.fullmatch(r"[0-9a-f]{6}", character.fg):
        color = f"#{character.fg}"
    return Cell(character.data, color, character.bold)


def find_private(text: str, private: Sequence[str]) -> str | None:
    """Return the first of some names that occurs in a text as a word or path."""
    for each in private:
        if re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text):
            return each
    return None


def _list_private() -> list[str]:
    names = [getpass.getuser(), socket.gethostname(), str(Path.home()), str(ROOT), sys.prefix]
    return [name for name in names if len(name) > 1 and name != "root"] + ["/root", "/home", "/tmp"]


def _draw(name: str, picture: Recording, rows: Screen) -> None:
    """Write the picture of a terminal; exit if it shows a name or path of this machine."""
    prompt = [Cell("$", COLORS["green"]), *(Cell(letter) for letter in f" {picture.command}")]
    if picture.last is not None:
        end = next(i for i, row in enumerate(rows) if picture.last in _text(row))
        rows = _trim(rows[:end])
    if picture.rows is not None:
        rows = rows[-picture.rows :]
    text = "\n".join(map(_text, rows))
    if (private := find_private(text, _list_private())) is not None:
        raise SystemExit(f"{name}: the picture would show {private!r}")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(to_svg([prompt, *rows], picture.title))
    print(FOLDER / f"{name}.svg")


def _hidden(folder: Path) -> dict[str, str]:
    """Return the texts to replace in outputs: paths and names of this machine."""
    kernel = platform.release()
    return {
        kernel: kernel.partition("-")[0],
        str(folder): "~/project",
        sys.prefix: "~/project/.venv",
        " /tmp ": " $TMPDIR ",
    }


def find_browser() -> str | None:
    """Return the path of the system's Chromium or Chrome; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


def _photograph(page: Path, file: Path, size: tuple[int, int]) -> None:
    """Take a screenshot of the top of a page in the light scheme, with few colors."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        width, height = size
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        tab.goto(page.as_uri())
        text = tab.evaluate(VISIBLE_TEXT)
        data = tab.screenshot()
        browser.close()
    if (private := find_private(text, _list_private())) is not None:
        raise SystemExit(f"{file.name}: the picture would show {private!r}")
    Image.open(io.BytesIO(data)).convert("RGB").quantize(128).save(file, optimize=True)
    print(file)


def main() -> None:
    """Make all pictures."""
    lockstep = [sys.executable, "-m", "lockstep"]
    screens: dict[str, tuple[Screen, Screen | None]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        hidden = _hidden(folder)
        for name, picture in PICTURES.items():
            if picture.script is not None:
                (folder / picture.script[0]).write_text(picture.script[1].lstrip())
            if picture.command not in screens:
                words = [*lockstep, *picture.command.split()[1:]]
                screens[picture.command] = record(
                    words, picture.columns, folder, hidden, picture.until
                )
            end, early = screens[picture.command]
            rows = end if picture.until is None else early
            if rows is None:
                raise SystemExit(f"{name}: {picture.until!r} did not appear on the screen")
            _draw(name, picture, rows)
        run = next((folder / "runs").glob("digits-*"))
        record([*lockstep, "report", str(run)], 80, folder, hidden)
        _photograph(run / "report.html", FOLDER / "report.png", (1000, 845))
    for path in map(FOLDER.joinpath, FILES):
        if path.stat().st_size > LARGEST:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {LARGEST}")


if __name__ == "__main__":
    main()
