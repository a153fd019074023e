"""What counts as left behind, of what lies in memory that all processes of the host share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_lockstep.leaks import SHARED_MEMORY, find_shared_memory, list_shared_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it lies in /dev/shm")


def test_the_folder_of_another_launcher_that_runs_is_not_left_behind():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        before = list_shared_memory()
        for process in (other.pid, os.getpid()):
            folder = Path(SHARED_MEMORY) / f"lockstep-{process}-of-test-leaks"
            folder.mkdir()
            try:
                found = [path for path in find_shared_memory(before) if "of-test-leaks" in path]
            finally:
                folder.rmdir()
            assert found == ([str(folder)] if process == os.getpid() else [])


@pytest.mark.parametrize("name", ["mpich_shm_of-test-leaks", "vader_segment.of-test-leaks"])
def test_files_of_mpi_libraries_are_not_left_behind(name):
    before = list_shared_memory()
    file = Path(SHARED_MEMORY) / name
    file.touch()
    try:
        found = [path for path in find_shared_memory(before) if "of-test-leaks" in path]
    finally:
        file.unlink()
    assert found == []
