"""The same training script under python, torchrun and lockstep run: one digest."""

import subprocess
import sys
from pathlib import Path

import pytest

import warm

SCRIPT = str(Path(__file__).parents[2] / "examples" / "training.py")
ALONE = f"import runpy; runpy.run_path({SCRIPT!r}, run_name='__main__')"
TORCHRUN = [sys.executable, "-c", "from torch.distributed.run import main; main()"]
COMMANDS = {
    "python": [sys.executable, "-c", ALONE],
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", SCRIPT],  # its ranks are new interpreters
    "lockstep run": [*warm.LOCKSTEP, "run", "-n", "3", SCRIPT],
}


@pytest.mark.parametrize(
    "launcher", ["lockstep run", pytest.param("torchrun", marks=pytest.mark.stress)]
)
def test_digest_is_the_same_under_every_launcher(tmp_path, launcher):
    running = {
        name: warm.Popen(
            COMMANDS[name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        for name in ("python", launcher)
    }
    digests = {}
    for name, process in running.items():
        output, errors = process.communicate(timeout=110)
        assert process.returncode == 0, f"{name}: {errors}"
        (line,) = [line for line in output.splitlines() if "digest" in line]  # from one rank
        digests[name] = line.split()[-1]
    assert len(set(digests.values())) == 1, digests
