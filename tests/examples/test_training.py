"""The same training script under python, torchrun and lockstep run: one digest."""

import subprocess
import sys
from pathlib import Path

from lockstep.examples import training

SCRIPT = str(Path(training.__file__))
WAYS = {
    "python": [sys.executable, SCRIPT],
    "module": [sys.executable, "-m", "lockstep.examples.training"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT],
    "lockstep run": [sys.executable, "-m", "lockstep", "run", "-n", "3", SCRIPT],
}


def test_one_digest_however_it_is_started(tmp_path):
    running = {
        way: subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        for way, command in WAYS.items()
    }
    digests = {}
    for way, process in running.items():
        output, errors = process.communicate(timeout=110)
        assert process.returncode == 0, f"{way}: {errors}"
        (line,) = [line for line in output.splitlines() if "digest" in line]  # from one rank
        digests[way] = line.split()[-1]
    assert len(set(digests.values())) == 1, digests
