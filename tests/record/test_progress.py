"""The progress display on terminals of any width, and elsewhere."""

import io
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from lockstep.launcher import rank_process
from lockstep.launcher.channel import open_pair
from lockstep.launcher.live_region import LiveRegion
from lockstep.record.progress import Progress

ROWS = [[0.6, 0.2, 0.1, 0.1]]
DRIVE = """
    import sys, time
    from lockstep.record.progress import Progress

    now = 0.0
    progress = Progress(True, epochs=2, title="digits", clock=lambda: now)
    for epoch in range(2):
        progress.begin_epoch(epoch, 9, 0)
        for step in range(9):
            now += 0.75
            progress.step(epoch=epoch, loss=0.5, samples=32, metrics={"accuracy": 0.9},
                          ranks=[[0.6, 0.2, 0.1, 0.1]])
            if step == 5:
                ENDING
        progress.epoch(epoch=epoch, loss=0.5, metrics={"accuracy": 0.9}, samples=288, seconds=2)
    progress.close()
"""


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def in_terminal(ending="pass", columns=80, **variables):
    """Run DRIVE on a terminal of its own; return what it wrote and its exit status."""
    ours, theirs = pty.openpty()
    environ = {
        name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ
    }
    environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "PYTHONUTF8": "1"} | variables
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVE).replace("ENDING", ending)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environ,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # the terminal's other end is closed
                break
            if not chunk:
                break
            seen += chunk
        return seen.decode(), process.wait(timeout=20)
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
            process.wait()


def drawn(text):
    """Return the lines of a terminal's output without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").split("\n")


def plain(is_wanted=True, steps=5, **arguments):
    """Return a progress that writes into a text, the text, and its clock."""
    stream = io.StringIO()
    clock = Clock()
    progress = Progress(is_wanted, stream=stream, clock=clock, **arguments)
    progress.begin_epoch(0, steps, 0)
    return progress, stream, clock


@pytest.fixture(autouse=True)
def nothing_shown(monkeypatch):
    """No trainer is shown before the test."""
    monkeypatch.setattr(Progress, "_shown", None)


def take(progress, clock, steps, seconds, epoch=0):
    for _ in range(steps):
        clock.now += seconds
        progress.step(epoch=epoch, loss=0.5, samples=32, metrics={"accuracy": 0.875}, ranks=ROWS)


def test_an_epoch_is_one_plain_line():
    progress, stream, clock = plain(epochs=3)
    take(progress, clock, 5, 0.1)
    progress.epoch(
        epoch=0, loss=0.5, metrics={"accuracy": 0.875}, samples=160, seconds=0.5,
        evaluation={"loss": 0.4, "metrics": {"accuracy": 0.9}, "samples": 10},
    )  # fmt: skip
    assert stream.getvalue() == (
        "epoch 1/3  loss 0.5000, accuracy 87.5%  held out: loss 0.4000, accuracy 90.0%"
        "  320 samples/s  500 ms\n"
    )


def test_a_long_epoch_prints_a_line_every_ten_seconds():
    progress, stream, clock = plain(steps=100, epochs=3)
    take(progress, clock, 100, 0.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[1].startswith(
        "epoch 1/3  step 41/100  loss 0.5000  accuracy 87.5%  64.0 samples/s"
    )
    assert lines[1].endswith("2 min 10 s left")  # 59 + 2 x 100 steps of half a second


def test_the_region_shows_everything_on_a_terminal():
    seen, status = in_terminal()
    lines = drawn(seen)
    assert status == 0
    assert "digits" in lines
    assert any(re.match(r"epoch 2/2  ━+─*  \d/9  \d+ s left", line) for line in lines)
    assert any("accuracy 90.0%" in line and "samples/s" in line for line in lines)
    assert "step 750 ms  compute 60%  communication 20%  waiting 10%  data 10%" in lines
    assert sum(line.startswith("epoch 1/2  loss") for line in lines) == 1


@pytest.mark.parametrize(
    "ending", ["pass", "raise KeyError", "import os; os.kill(os.getpid(), 15)"]
)
def test_the_cursor_is_left_visible(ending):
    seen, status = in_terminal(ending)
    assert status == {"pass": 0, "raise KeyError": 1}.get(ending, -signal.SIGTERM)
    assert seen.rfind("\x1b[?25h") >= seen.rfind("\x1b[?25l")
    assert "loss 0.5000" in seen


@pytest.mark.parametrize("columns", [40, 60])
def test_lines_fit_a_narrow_terminal(columns):
    seen, _ = in_terminal(columns=columns)
    region = [line for line in drawn(seen) if not re.match(r"epoch ./2  loss", line)]
    assert max(map(len, region)) <= columns
    assert any(line.startswith("loss 0.5000") for line in region)
    assert any(re.match(r"epoch 2/2  .* \d/9", line) for line in region)
    folded = [line for line in region if not re.match(r"digits|epoch|loss|step|compute|$", line)]
    assert not folded


def test_no_color_is_respected():
    colored = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    assert colored.search(in_terminal()[0])
    assert not colored.search(in_terminal(NO_COLOR="1")[0])


def test_a_dumb_terminal_gets_plain_lines():
    seen, _ = in_terminal(TERM="dumb")
    assert "\x1b" not in seen
    assert "epoch 2/2  loss 0.5000" in seen
    assert "epoch 2/2  step 6/9" in seen  # ten seconds have passed


def test_a_terminal_without_unicode_gets_ascii():
    seen, _ = in_terminal(PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert seen.isascii()
    assert "\\u" not in seen
    assert "compute 60%" in seen


def test_what_the_user_prints_stays_above_the_region():
    seen, _ = in_terminal("print('mine', epoch)")
    assert [line for line in drawn(seen) if line.startswith("mine")] == ["mine 0", "mine 1"]
    before = seen[: seen.index("mine 0")]
    assert before.endswith("\x1b[J")  # the region is erased first, and drawn again below


def test_logging_and_unfinished_lines_are_written_as_they_are():
    seen, _ = in_terminal(
        "import logging; logging.basicConfig(format='%(message)s');"
        " logging.warning('logged'); print('name? ', end='', flush=True)"
    )
    assert [line for line in drawn(seen) if line.startswith("logged")] == ["logged", "logged"]
    assert re.search(r"name\? \r?\nepoch 1/2  loss", seen)  # no region behind an unfinished line


def test_handlers_of_logging_write_above_the_region(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    logger = logging.getLogger("mine")
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    region = LiveRegion(stream)
    try:
        region.draw(["drawn", ""])
        logger.warning("logged")
    finally:
        region.close()
        logger.removeHandler(handler)
    assert stream.getvalue() == "drawn\n\n\r\x1b[2A\x1b[Jlogged\n"
    assert handler.stream is sys.stderr is stream


def train_epoch(progress, clock, epoch, steps, seconds, **more):
    progress.begin_epoch(epoch, steps, 0)
    take(progress, clock, steps, seconds, epoch)
    progress.epoch(epoch=epoch, loss=0.5, samples=steps * 32, seconds=steps * seconds, **more)


def test_a_script_prints_nothing_in_its_first_ten_seconds():
    progress, stream, clock = plain(False)
    train_epoch(progress, clock, 0, 5, 0.5, evaluation={"loss": 0.4, "metrics": {}})
    train_epoch(progress, clock, 1, 100, 0.04)
    assert stream.getvalue() == ""
    train_epoch(progress, clock, 2, 10, 0.6, evaluation={"loss": 0.4, "ema": True})
    train_epoch(progress, clock, 3, 10, 0.01)  # within a second of the last line
    within, *lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"epoch 3  step 7/10  loss 0.5.*samples/s  \d s left in the epoch", within)
    assert lines == [
        "epoch 3  loss 0.5000  held out (EMA): loss 0.4000  53.3 samples/s  6.00 s",
    ]


def test_a_resumed_epoch_counts_the_steps_before():
    progress, stream, clock = plain()
    progress.begin_epoch(1, 40, 15)
    take(progress, clock, 21, 0.5, epoch=1)
    assert "epoch 2  step 36/40" in stream.getvalue()


def test_of_two_trainers_that_train_in_turns_one_is_shown():
    (first, ours, clock) = plain(False)
    (second, theirs, other) = plain(False)
    for _ in range(60):
        take(first, clock, 1, 1.0)
        take(second, other, 1, 1.0)
    assert ours.getvalue().count("\n") == 5
    assert theirs.getvalue() == ""
    take(second, other, 20, 1.0)  # the first one takes no more steps
    assert "step" in theirs.getvalue()
    wanted, third, clock = plain(True)
    clock.now = other.now
    take(wanted, clock, 12, 1.0)
    assert third.getvalue().count("\n") == 1
    second.close()
    assert Progress._shown is None


def test_a_progress_bar_of_tqdm_is_left_alone(monkeypatch):
    bars = SimpleNamespace(_instances=["a bar"])
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=bars))
    stream = io.StringIO()
    clock = Clock()
    progress = Progress(stream=stream, clock=clock)
    take(progress, clock, 19, 5.0)
    assert stream.getvalue() == ""
    bars._instances = []
    take(progress, clock, 5, 5.0)
    assert stream.getvalue().startswith("step 22  loss")


def test_a_region_that_the_launcher_does_not_read_is_dropped(monkeypatch):
    launcher, rank = open_pair()
    monkeypatch.setattr(rank_process, "_report", rank)
    monkeypatch.setattr(rank_process, "_report_owner", os.getpid())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = Clock()
    progress = Progress(epochs=1, clock=clock)
    progress.begin_epoch(0, 20_000, 0)
    take(progress, clock, 20_000, 0.2)  # a send that waits would wait for ever
    rank.close()
    messages = list(iter(launcher.receive, None))
    launcher.close()
    assert 10 < len(messages) < 20_000
    assert messages[0][0]["kind"] == "progress"
    assert any("loss 0.5000" in line for line in messages[0][0]["lines"])
