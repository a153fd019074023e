"""The same training script under python, torchrun and lockstep run: one digest."""

import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "examples" / "training.py")
COMMANDS = {
    "python": [sys.executable, SCRIPT],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT],
    "lockstep run": [sys.executable, "-m", "lockstep", "run", "-n", "3", SCRIPT],
}


def test_digest_is_the_same_under_every_launcher(tmp_path):
    running = {
        launcher: subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        for launcher, command in COMMANDS.items()
    }
    digests = {}
    for launcher, process in running.items():
        output, errors = process.communicate(timeout=110)
        assert process.returncode == 0, f"{launcher}: {errors}"
        (line,) = [line for line in output.splitlines() if "digest" in line]  # from one rank
        digests[launcher] = line.split()[-1]
    assert len(set(digests.values())) == 1, digests
