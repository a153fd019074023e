"""The C++ tests of the backend's core, built here; under sanitizers with `-m stress`."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the core is for Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here"),
    pytest.mark.timeout(600),
]


def make(target: str, folder: Path) -> str:
    command = ["make", "-C", str(HERE), target, f"BUILD={folder}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=550)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # a test that hangs, too
            raise
    assert process.returncode == 0, output[-2000:] + errors[-6000:]
    return output


def test_the_core(tmp_path):
    assert "tests passed" in make("test", tmp_path)


@pytest.mark.stress
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="no compiler for Arm, or no emulator",
)
def test_the_core_on_arm(tmp_path):
    assert "tests passed" in make("arm", tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_the_core_under_a_sanitizer(tmp_path, sanitizer):
    assert "tests passed" in make(sanitizer, tmp_path)
