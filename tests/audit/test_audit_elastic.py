"""An elastic run goes on without a rank that computes wrong."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import warm

SCRIPT = """
import os, sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import torch
from torch import nn
import lockstep as ls

sys.path.insert(0, {tests!r})
from bit_flips import FaultyOperator

ls.init(timeout=60)
torch.manual_seed(0)
trainer = ls.Trainer(
    nn.Linear(6, 6), nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), microbatches=8, loggers="run",
    progress=False, storage=os.environ["STORAGE"],
)
fault = nullcontext()
if os.environ.get("FAULTY") and ls.rank() == 1 and trainer.steps == 0:
    if not (mark := Path("faulty")).exists():  # the first process of rank 1
        mark.touch()
        fault = FaultyOperator("addmm", phase="forward", element=0)
generator = torch.Generator().manual_seed(3)
with trainer, fault:
    for _ in range(4):
        inputs = torch.randn(16, 6, generator=generator)
        trainer.step((inputs, inputs))
    print("DIGEST", trainer.digest(), flush=True)
"""


def train(folder: Path, *options: str, **variables: str) -> tuple[set[str], str]:
    """Return the digests that the ranks printed, and all output."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    with warm.Popen(
        [*warm.LOCKSTEP, "run", *options, "train.py"],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return {*re.findall(r"DIGEST (\w+)", output)}, output


@pytest.mark.parametrize(
    ("storage", "ranks"),
    [("replicated", "3"), pytest.param("sharded", "4", marks=pytest.mark.stress)],
)
def test_a_rank_that_is_wrong_again_and_again_leaves_an_elastic_run(tmp_path, storage, ranks):
    options = {"FAULTY": "1", "STORAGE": storage}
    expected, _ = train(tmp_path / "alone", "-n", "1", STORAGE="replicated")
    found, output = train(tmp_path / "elastic", "--min", "1", "--max", ranks, **options)
    assert len(expected) == 1
    assert found == expected
    assert re.search(
        r"rank 1 \(host .*, core \d+\) computed wrong results, again and again", output
    )
    assert "; the process ends" in output
