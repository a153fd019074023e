"""A step without memory has the sizes of a step with memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.kernel.errors import UsageError
from lockstep.tools.plan.live_tensors import LiveTensors
from lockstep.tools.plan.memory_plan import count_sums
from lockstep.tools.plan.memory_session import MemorySession
from lockstep.tools.plan.meta_trainer import MetaTrainer
from lockstep.training.session import SessionComplete


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 50)
        self.head.weight = self.words.weight
        self.head.bias.requires_grad_(False)

    def forward(self, words):
        return self.head(self.layer(self.words(words))).flatten(0, 1)


def small_convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(0, 2))


WORDS = torch.randint(50, (12, 64))
MODELS = {
    "transformer": (Tied, WORDS, WORDS),
    "convolution": (small_convolution, torch.randn(12, 3, 20, 20), torch.zeros(12, 1)),
}


def compare(outputs, targets):
    if targets.is_floating_point():
        return outputs.square().mean()
    return nn.functional.cross_entropy(outputs, targets.flatten())


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_a_step_with_memory(name):
    build, inputs, targets = MODELS[name]
    with torch.device("meta"):
        model = build()
    found = []
    optimizer = partial(torch.optim.AdamW, lr=0.1)
    trainer = MetaTrainer(MemorySession(found.append, 2), model, compare, optimizer, microbatches=5)
    with pytest.raises(SessionComplete):
        trainer.step((inputs, targets))
    (training,) = found

    real = build()
    parameters = list(real.parameters())
    gradients = sum(p.nbytes for p in parameters if p.requires_grad)
    assert training.parameters == sum(p.nbytes for p in parameters)
    assert training.gradients == gradients
    live = LiveTensors()
    live.ignore([*parameters, *real.buffers()])
    data = inputs[:3].clone(), targets[:3].clone()
    live.ignore(data)
    with live:
        compare(real(data[0]), data[1]).backward()
    # The data of a micro-batch are copied to tensors without memory.
    copied = sum(tensor.nbytes for tensor in data)
    assert live.peak - gradients <= training.activations <= live.peak - gradients + copied
    assert training.activations > 0
    stepped = torch.optim.AdamW(parameters)
    stepped.step()
    state = [value.nbytes for entries in stepped.state.values() for value in entries.values()]
    assert training.optimizer == sum(state)


def test_freed_tensors_are_not_counted():
    live = LiveTensors()
    with live:
        kept = torch.zeros(1000)
        for _ in range(5):
            torch.zeros(3000)
        kept.view(10, 100).add_(1)
    assert live.peak == 4 * (1000 + 3000)


def test_least_memory_of_a_model_that_is_not_built():
    blocks = [lambda: nn.Linear(4, 5), lambda: nn.Linear(5, 6, bias=False)]
    trainer = MetaTrainer(
        MemorySession([].append, 2), blocks, compare, torch.optim.SGD, microbatches=6
    )
    size = 4 * (20 + 5 + 30)
    assert trainer.least_bytes == size + count_sums(range(6), 6) * size


@pytest.mark.parametrize("is_loader", [False, True])
def test_batches_are_those_of_a_data_loader(is_loader):
    data = TensorDataset(torch.arange(6.0).view(6, 1), torch.zeros(6))
    trainer = MetaTrainer(
        MemorySession([].append, 2), [lambda: nn.Linear(1, 1)], compare, torch.optim.SGD
    )
    loader = (DataLoader(data, 4),) if is_loader else (data, 4)
    inputs, targets = next(iter(trainer.batches(*loader, shuffle=False)))
    assert inputs.flatten().tolist() == [0, 1, 2, 3]
    assert targets.tolist() == [0] * 4


def test_what_needs_memory_is_refused():
    trainer = MetaTrainer(
        MemorySession([].append, 2), [lambda: nn.Linear(1, 1)], compare, torch.optim.SGD
    )
    with pytest.raises(UsageError, match=r"trainer\.evaluate before its first trainer\.step"):
        trainer.evaluate(None)
