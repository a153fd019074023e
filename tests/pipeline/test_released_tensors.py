"""Released tensors: those of other stages, which a block or the loss must not read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import LockstepError

BATCH = (torch.arange(32.0).reshape(8, 4) % 7 - 3, torch.arange(8) % 4)


def trained(make, loss=F.cross_entropy, schedule=None, balance=(2, 2)):
    """Return the error of a step, or the losses of two and the digest."""
    torch.manual_seed(1)
    pipeline = ls.PipelineConfig(2, schedule, balance=balance)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    try:
        trainer = ls.Trainer(make(), loss, optimizer, microbatches=4, pipeline=pipeline, loggers=[])
        return [trainer.step(BATCH), trainer.step(BATCH), trainer.digest()]
    except LockstepError as error:
        return str(error)


class Reading(nn.Module):
    """Reads a tensor of another block, with an operator that torch lets pass on the meta device."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.read = read
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x @ self.read())


def reading(read: Callable[[Any], torch.Tensor], chain: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 4))
    if chain:
        parts = [model[0], norm]
        model.extend([Reading(lambda: read(parts)), nn.Linear(4, 4)])
    return model


def viewing(views: list[torch.Tensor]) -> nn.Module:
    """A model whose last block multiplies by a view of the first one's weight."""

    def read() -> torch.Tensor:
        return views[0]

    first = nn.Linear(4, 4)
    views[:] = [first.weight.detach().t()]
    return nn.Sequential(first, nn.Tanh(), Reading(read))


def test_tensors_of_another_stage_are_named_by_the_block_or_loss_that_reads_them(ranks):
    """torch computed with arbitrary numbers, or its error spoke of the meta device."""

    def rank():
        models = []

        def penalty(outputs, targets):
            return F.cross_entropy(outputs, targets) + models[-1][0].weight.norm()

        def device(outputs, targets):
            weights = torch.ones(4, device=next(models[-1].parameters()).device)
            return F.cross_entropy(outputs * weights, targets)

        def make(read):
            models.append(reading(read or (lambda parts: None), read is not None))
            return models[-1]

        detached = partial(make, lambda parts: parts[0].weight.detach())
        return [
            trained(detached, balance=[2, 4]),
            trained(
                partial(make, lambda parts: parts[1].running_var.diag()),
                schedule="interleaved",
                balance=[2, 1, 2, 1],
            ),
            trained(partial(viewing, []), balance=[2, 1]),
            trained(partial(make, None), penalty),
            trained(partial(make, None), device),
        ]

    for number, results in enumerate(ranks(rank, 2)):
        weight, buffer, view, loss, device = results
        assert "rank 1, stage 1, step 0, micro-batch 0: block 4 reads 0.weight" in weight
        assert "block 4 reads 1.running_var" in buffer
        assert "views[0] is a view of 0.weight" in view
        assert "the loss reads 0.weight" in loss
        assert "the loss computes with a tensor on the meta device" in device
        for said, source in zip(results, (1, 0, 1, 1, 1), strict=True):
            stopped = f"rank {number} stopped because rank {source}"
            assert said.startswith((f"rank {source}, ", stopped)), said


def test_models_whose_blocks_are_in_other_stages_can_be_copied(ranks):
    def copied():
        torch.manual_seed(1)
        stages = ls.world_size()
        trainer = ls.Trainer(
            nn.Sequential(*(nn.BatchNorm1d(4, momentum=None) for _ in range(4))),
            F.cross_entropy,
            partial(torch.optim.SGD, lr=0.1),
            microbatches=4,
            pipeline=ls.PipelineConfig(stages, balance=[4 // stages] * stages),
            ema_decay=0.5,
            loggers=[],
        )
        trainer.step(BATCH)
        copy.deepcopy(trainer.ema_model)
        trainer.load_state_dict(trainer.state_dict())
        return trainer.digest()

    (alone,) = ranks(copied, 1)
    assert ranks(copied, 2) == [alone, alone]
