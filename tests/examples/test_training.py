"""The training scripts under python, torchrun and lockstep run: one digest each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from folders import write_pictures

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
TORCHRUN = [sys.executable, "-c", "from torch.distributed.run import main; main()"]
COMMANDS = {
    "python": [sys.executable, "-c", ALONE],
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2"],  # its ranks are new interpreters
    "lockstep run": [*warm.LOCKSTEP, "run", "-n", "3"],
}


IMAGENET = "imagenet.py pictures -a resnet18 --epochs 1 -b 8 --microbatches 4 --size 32"


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        ("training.py", "lockstep run"),
        ("contrastive.py", "lockstep run"),
        (IMAGENET, "lockstep run"),
        pytest.param("training.py", "torchrun", marks=pytest.mark.stress),
    ],
)
def test_digest_is_the_same_under_every_launcher(tmp_path, script, launcher):
    write_pictures(tmp_path / "pictures", ["train/a", "train/b", "val/a"], 4)
    script, *arguments = script.split()
    running = {
        name: warm.Popen(
            [*COMMANDS[name], str(EXAMPLES / script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
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
