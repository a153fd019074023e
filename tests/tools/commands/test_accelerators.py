"""Commands on programs that train on the simulated accelerator: proofs that take long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stress

TESTS = Path(__file__).parents[2]
TIMEOUT = 240.0  # seconds per command

PROGRAM = """
import os, signal, sys
from functools import partial
import torch
from torch import nn
from simulated import ranks
ranks.install()
import lockstep as ls

ls.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ACTIVATION(), nn.Linear(8, 10))
trainer = ls.Trainer(
    model, nn.CrossEntropyLoss(), partial(torch.optim.AdamW, lr=0.01),
    checkpoint=ls.CheckpointConfig(every_steps=2),
)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 10, (64,)))
for epoch in range(2):
    for number, batch in enumerate(trainer.batches(data, batch_size=16, pin_memory=True)):
        trainer.step(batch)
        if "KILL" in os.environ and epoch == 1 and ls.rank() == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
if ls.rank() == 0:
    print("digest", trainer.digest(), trainer.optimizer_digest())
"""


def call(folder: Path, *arguments: str, **variables: str) -> str:
    """Run a command of Lockstep in a folder; return what it prints."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    return found.stdout + found.stderr


def digest_of(output: str) -> str:
    (found,) = re.findall(r"digest (\S+ \S+)", output)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name, activation in {"train": "Tanh", "other": "Sigmoid"}.items():
        (folder / f"{name}.py").write_text(PROGRAM.replace("ACTIVATION", activation))
    return folder


def test_a_run_that_loses_a_rank_has_the_bits_of_an_undisturbed_one(folder):
    expected = digest_of(call(folder, "run", "-n", "1", "train.py"))
    output = call(folder, "run", "--min", "1", "--max", "2", "train.py", KILL="1")
    assert "was killed by SIGKILL" in output
    assert digest_of(output) == expected


def test_check_replay_and_bisect_work(folder):
    assert "computes the same bits in all" in call(folder, "check", "train.py")
    runs = []
    for name in ("train", "other"):
        output = call(folder, "run", "-n", "2", f"{name}.py")
        runs += re.findall(r"the run is in (\S+)", output)
    assert "the same bits" in call(folder, "replay", runs[0], "--step", "5")
    output = call(folder, "bisect", *runs)
    assert "aten.tanh" in output, output
    assert "aten.sigmoid" in output
