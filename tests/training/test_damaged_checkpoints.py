"""Damaged checkpoints: the one before is used, or there is one error of ours; nothing else."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from checkpoints import draw_damage
from lockstep.checkpoint.folder import count_steps, find_checkpoints
from lockstep.kernel.errors import LockstepError

ADAM = partial(torch.optim.Adam, lr=0.1)


class Meter:
    """A registered object with values of several types."""

    def __init__(self):
        self.total = 0.5
        self.seen = torch.tensor([7])

    def state_dict(self):
        return {"total": self.total, "parts": (1, [2]), "seen": self.seen}

    def load_state_dict(self, state):
        self.total = state["total"] + 0
        self.seen = state["seen"]
        _ = state["parts"][1][0]


def build(folder, **options):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    scheduled = ls.OptimizerConfig(
        ADAM, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    )
    return ls.Trainer(
        model, nn.CrossEntropyLoss(), scheduled, microbatches=4, ema_decay=0.9, loggers=[],
        checkpoint=ls.CheckpointConfig(
            every_steps=2, keep=9, folder=folder, stateful={"meter": Meter()}
        ),
        **options,
    )  # fmt: skip


def train(trainer):
    """Train for three epochs of two steps; return the outcome."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    )
    for epoch in range(3):
        for batch in trainer.batches(data, 8, epoch=epoch, seed=1):
            trainer.step(batch)
            trainer._run._checkpoints.writer.wait()
        trainer.evaluate(data, 8)
    trainer.finish()
    return trainer.digest(), trainer.optimizer_digest(), trainer.steps


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "stages": (2, {"pipeline": ls.PipelineConfig(stages=2)}),
    "shared": (2, {"storage": "shared"}),
}


def damage_newest(folder, draw):
    """Damage the newest checkpoint; return what was done, and whether any state may follow."""
    newest = find_checkpoints(folder / "checkpoints")[0]
    files = sorted(path.name for path in newest.iterdir())
    texts = [name for name in files if name.startswith("state") and name.endswith(".json")]
    kind = draw.choice(["manifest", "state", "state", "state", "bytes", "swap"])
    if kind in ("manifest", "state"):
        name = "manifest.json" if kind == "manifest" else draw.choice(texts)
        value = json.loads((newest / name).read_text())
        place, text = draw_damage(value, draw)
        (newest / name).write_text(text)
        return f"{name} {place}: {text[-60:]}", False
    name = draw.choice(files)
    content = (newest / name).read_bytes()
    if kind == "swap":
        other = find_checkpoints(folder / "checkpoints")[1] / name
        (newest / name).write_bytes(other.read_bytes())
    else:
        cut = draw.randrange(len(content))
        (newest / name).write_bytes(draw.choice([b"", content[:cut], content + b"\0", b"[" * 9999]))
    return f"{name}: {kind}", name == "model.safetensors.index.json"


def resume_damaged(template, layout, seeds):
    """Return, for each seed, what was damaged and how a resumed training ended."""
    outcomes = []
    for seed in seeds:
        folder = template.with_name(f"{template.name}-{seed}")
        said = ["", False]
        if ls.rank() == 0:
            shutil.copytree(template, folder)
            said = list(damage_newest(folder, random.Random(seed)))
        torch.distributed.barrier()
        try:
            trainer = build(folder, **layout)
            trainer.resume()
            outcome = train(trainer)
        except LockstepError as error:
            outcome = f"{type(error).__name__}: {error}"
        torch.distributed.barrier()
        outcomes.append((*said, outcome))
    return outcomes


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "seeds",
    [
        range(12),
        pytest.param(range(12, 56), marks=pytest.mark.stress),
        pytest.param(range(56, 100), marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_a_damaged_checkpoint_never_changes_the_result(ranks, tmp_path, name, seeds):
    n, layout = LAYOUTS[name]
    expected = ranks(lambda: train(build(tmp_path / "run", **layout)), n)[0]
    for path in find_checkpoints(tmp_path / "run" / "checkpoints"):
        if count_steps(path) == 6:
            shutil.rmtree(path)
    for place, is_free, outcome in ranks(
        lambda: resume_damaged(tmp_path / "run", layout, seeds), n
    )[0]:
        if isinstance(outcome, str):
            assert "\n" not in outcome, place
        else:
            assert is_free or outcome == expected, place
