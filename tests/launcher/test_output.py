"""One rank's streams: what reaches the terminal, and a log on a full disk."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from lockstep.launcher.output import Output


class Console(io.BytesIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


def shown(text: bytes, log: Path | None = None) -> tuple[bytes, Output]:
    console = Console()
    output = Output(3, log, (console, None))
    os.write(output.streams[0].writing, text)
    os.write(output.streams[1].writing, b"to the log alone\n")
    output.started()
    output.close()
    return console.getvalue(), output


def test_the_prefix_has_a_colour_on_a_terminal_that_wants_some(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown(b"line\n")[0] == b"\x1b[32m[3]\x1b[0m line\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(b"line\n")[0] == b"[3] line\n"


def test_the_last_lines_are_kept_of_both_streams(monkeypatch):
    assert list(shown(b"one\ntwo")[1].last) == [b"one", b"two", b"to the log alone"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_log_and_not_the_run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("lockstep.launcher.output.create_file", lambda path, flags: full)
    printed, output = shown(b"line\n", Path("rank-3.log"))
    assert printed == b"[3] line\n"
    assert output.complaint == "rank-3.log cannot be written any more: No space left on device"
