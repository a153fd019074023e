"""Unusual parameters, buffers and losses train with the same bits in every layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STAGES: dict[str, Any] = {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])}
SHARED: dict[str, Any] = {"storage": "shared"}


class Masked(nn.Module):
    """Has an expanded buffer, a lazily conjugated one, and an expanded frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([[1.0, 2.0, 0.5, 1.0]]).expand(8, 4))
        self.register_buffer("phase", torch.complex(torch.ones(4), torch.arange(4.0)).conj())
        self.scale = nn.Parameter(torch.tensor(3.0).expand(4), requires_grad=False)

    def forward(self, inputs):
        return self.layer(inputs) * self.mask[0] * self.scale * self.phase.imag


class Case:
    """A training: its model, its loss, and the Trainer's other arguments."""

    def __init__(self, model, loss=nn.CrossEntropyLoss, **options) -> None:
        self.model, self.loss, self.options = model, loss, options

    def train(self, layout: dict[str, Any]) -> list[Any]:
        torch.manual_seed(1)
        trainer = ls.Trainer(self.model(), self.loss(), SGD, **self.options, **layout)
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(2, 13, 6, generator=generator)
        targets = torch.arange(26).view(2, 13) % 4
        found = [trainer.step(batch) for batch in zip(inputs, targets, strict=True)]
        found += [trainer.digest(), trainer.optimizer_digest()]
        trainer.load_state_dict(trainer.state_dict())
        found.append(trainer.step((inputs[0], targets[0])))
        if trainer.ema_model is not None:
            found.append(ls.digest(trainer._state.model_state(ema=True)))
        return [*found, trainer.digest()]


CASES = {
    "expanded": Case(lambda: nn.Sequential(nn.Linear(6, 6), Masked()), ema_decay=0.9),
}


def train_all(layouts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {
        f"{name} {layout}": case.train(layout) for name, case in CASES.items() for layout in layouts
    }


@pytest.fixture(scope="module")
def alone():
    (found,) = ls.launch(lambda: (ls.init(), train_all([{}]))[1], nprocs=1)
    return found


@pytest.mark.parametrize(("n", "layouts"), [(2, [{}, STAGES, SHARED]), (3, [{}])])
def test_every_layout_has_the_bits_of_one_process(ranks, alone, n, layouts):
    for found in ranks(train_all, n, layouts):
        for name, bits in found.items():
            assert bits == alone[f"{name.split()[0]} {{}}"], name
