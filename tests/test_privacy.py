"""What a run leaves behind: who can read it."""

import os
import stat
import subprocess
import sys

import pytest

CLI = [sys.executable, "-c", "from lockstep.cli import main; main()"]

TRAIN = """
import os
from functools import partial
from pathlib import Path
import torch
import lockstep as ls

ls.init()
torch.manual_seed(1)
model, loss = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss()
batch = torch.randn(8, 4), torch.arange(8) % 2
run = Path(os.environ["LOCKSTEP_RUN"])
print("a line for the log")
sgd = partial(torch.optim.SGD, lr=0.1)
with ls.Trainer(model, loss, sgd, microbatches=2, record=run) as trainer:
    trainer.step(batch)
    trainer.save(run / "weights.safetensors")
    trainer.step((batch[0] * float("nan"), batch[1]))
"""

FILES = {
    "rank-0.log", "rank-1.log", "record.jsonl", "weights.safetensors", "last-good.safetensors",
    "report.html", "report.md", "report.svg", "report.png",
}  # fmt: skip


def lockstep(*arguments, **settings):
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, timeout=90, **settings
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run that failed, made where new files are open to everybody."""
    place = tmp_path_factory.mktemp("place")
    (place / "train.py").write_text(TRAIN)
    done = lockstep("run", "-n", "2", "train.py", cwd=place, umask=0)
    assert "training stopped, the weights before this step are in" in done.stderr
    (run,) = (place / "runs").iterdir()
    for kind in ("html", "md", "svg", "png"):
        lockstep("report", run.name, "--format", kind, cwd=place, umask=0).check_returncode()
    for kind in ("html", "md"):
        arguments = ("compare", run.name, run.name, "--format", kind)
        lockstep(*arguments, cwd=place, umask=0).check_returncode()
    lockstep("report", run.name, "--trace", "trace.json", cwd=place, umask=0).check_returncode()
    return place


def test_everything_that_a_run_writes_is_its_owners_alone(place):
    (run,) = (place / "runs").iterdir()
    assert {path.name for path in run.iterdir()} == FILES
    written = [place / "runs", *(place / "runs").rglob("*"), *place.glob("compare.*")]
    written.append(place / "trace.json")
    modes = {path: stat.S_IMODE(os.lstat(path).st_mode) for path in written}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in written}
