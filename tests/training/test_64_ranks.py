"""64 real ranks of a tiny model compute what one rank computes."""

from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.record.reader import read_run

RANKS = 64
SAMPLES = 192


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


class Counting(nn.Linear):
    """A layer with a buffer that differs between micro-batches, and one that does not."""

    lockstep_buffer_rules = {"calls": "equal", "mean": "mean"}

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(sizes[0]))

    def forward(self, inputs):
        self.calls += 1
        self.mean.copy_(inputs.detach().mean(dim=0))
        return super().forward(inputs)


def train(folder=None, backend=None):
    """Train three steps; return the digest and every number that the ranks concluded."""
    ls.init(backend=backend, timeout=500)
    torch.manual_seed(0)
    model = nn.Sequential(Counting(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    dataset = torch.utils.data.TensorDataset(inputs, torch.arange(SAMPLES) % 4)
    results = []
    trainer = ls.Trainer(
        model, nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        microbatches=RANKS, seed=1, metrics={"hits": hits}, callbacks=results.append,
        progress=False, max_grad_norm=0.5, loggers=() if folder is None else folder,
    )  # fmt: skip
    for batch in trainer.batches(dataset, batch_size=RANKS):
        trainer.step(batch)
    evaluation = trainer.evaluate(dataset, RANKS)
    numbers = [(each.loss.hex(), each.norm.hex(), each.metrics) for each in results]
    return trainer.digest(), numbers, evaluation.loss.hex(), evaluation.metrics


@pytest.mark.stress
@pytest.mark.timeout(580)
@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_64_ranks_compute_what_one_does(backend, tmp_path):
    (expected,) = ls.launch(train, nprocs=1, timeout=100)
    start = partial(ls.launch, train, nprocs=RANKS, timeout=540)
    assert start((tmp_path / "run", backend)) == [expected] * RANKS
    run = read_run(tmp_path / "run")
    assert run.steps.ranks.shape == (3, RANKS, 4)
    assert run.end["digest"] == expected[0]
