"""Tests of the plugin: pytest runs in a process of its own, on files that a test writes."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm

pytest_plugins = ["pytester"]

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
PATIENCE = 5.0  # seconds that something may take to disappear after a test

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest on a test file and return what it printed."""
    for name in ("PYTEST_ADDOPTS", "CI", "BUILD_NUMBER"):  # these decide how long lines are
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)  # pytester sets another HOME

    def run(source: str, *arguments: str, **files: str) -> pytest.RunResult:
        imports = "import os\nimport pytest\nimport torch\nimport torch.distributed as dist\n"
        pytester.makepyfile(test_it=imports + source, **files)
        program = "import pytest, sys; sys.exit(pytest.console_main())"
        # A file that one test leaves in /dev/shm would be taken for a leak of another one, which
        # runs beside it.
        with open(Path(tempfile.gettempdir()) / f"pytest-lockstep-{os.getuid()}", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if "/dev/shm" in source else fcntl.LOCK_SH)
            done = warm.run(
                [sys.executable, "-c", program, "-p", "no:cacheprovider", *arguments],
                start=warm.PytestPopen,
                cwd=pytester.path,
                text=True,
                timeout=100,
            )
        print(done.stdout, done.stderr, sep="\n")
        return pytest.RunResult(
            done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0
        )

    return run


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a template process or a rank behind."""
    yield
    deadline = time.monotonic() + PATIENCE
    while (found := _find_orphans()) and time.monotonic() < deadline:
        time.sleep(0.01)  # those of other tests exit when they notice
    assert not found


def _find_orphans() -> list[str]:
    """Return the templates and ranks on this host whose launcher has exited."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes() + (place / "comm").read_bytes()
        except OSError:
            continue
        call = re.search(rb"template_main\.main\(\d+, (\d+)\)|spare-of-(\d+)", command)
        if call and not Path(f"/proc/{(call[1] or call[2]).decode()}").exists():
            found.append(place.name)
    return found
