"""Weights that a script initializes again between steps: the same numbers in every layout."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import UsageError

SGD = partial(torch.optim.SGD, lr=0.1)
INIT = nn.init


def each_matrix(function: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                function(parameter)

    return edit


def reset(model: nn.Module) -> None:
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def draw_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.normal_()


@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)


@torch.no_grad()
def drop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(nn.functional.dropout(parameter, 0.5))


@torch.no_grad()
def draw_rows(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter[1:].uniform_()


@torch.no_grad()
def mask(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(torch.bernoulli(torch.full_like(parameter, 0.5)))


def draw_by_shape(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape) * random.random())


SHARDABLE = [reset, each_matrix(INIT.xavier_normal_), each_matrix(INIT.kaiming_uniform_), draw_data,
             add_noise, drop]  # fmt: skip
"""Edits that torch supports on sharded tensors, too."""

EDITS = [
    *SHARDABLE,
    each_matrix(INIT.orthogonal_),
    each_matrix(INIT.trunc_normal_),
    each_matrix(partial(INIT.sparse_, sparsity=0.5)),
    draw_rows,
    mask,
    draw_by_shape,
]


def make_trainer(storage: Any, stages: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5, 6), nn.Flatten(), nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 7)
    )
    balance = [2, 3] if stages == 2 else None
    pipeline = ls.PipelineConfig(stages=stages, balance=balance)
    options = {"microbatches": 4, "loggers": (), "storage": storage, "pipeline": pipeline}
    return ls.Trainer(model, nn.CrossEntropyLoss(), SGD, **options)


def train(storage: str, stages: int, edits: list[Any]) -> list[Any]:
    """Return, for each edit, the next random number and the weights after the next step."""
    # torch says that sharded tensors on a CPU draw other numbers, which are not used.
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
    found = []
    for edit in edits:
        trainer = make_trainer(storage, stages)
        batch = torch.arange(24).view(8, 3) % 5, torch.arange(8) % 7
        trainer.step(batch)
        torch.manual_seed(5)
        random.seed(5)
        edit(trainer.module)
        number = torch.rand(()).item()
        trainer.step(batch)
        found.append((number, trainer.digest()))
    return found


def test_stages_draw_for_the_weights_of_all_stages(ranks):
    (expected,) = ranks(train, 1, "replicated", 1, EDITS)
    assert len({digest for _, digest in expected}) == len(EDITS)
    assert ranks(train, 2, "replicated", 2, EDITS) == [expected] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_shards_have_the_numbers_of_the_whole_weights(ranks, n):
    (expected,) = ranks(train, 1, "replicated", 1, SHARDABLE)
    assert ranks(train, n, "sharded", 1, SHARDABLE) == [expected] * n


def draw_by_values(storage: str, stages: int, draw: Callable[[torch.Tensor], Any]) -> str:
    trainer = make_trainer(storage, stages)
    if stages == 2:
        trainer.step((torch.arange(24).view(8, 3) % 5, torch.arange(8) % 7))
    said = []
    for parameter in trainer.module.parameters():
        try:
            draw(parameter.detach().abs())
        except UsageError as error:
            said.append(str(error))
    return said[0] if said else ""


def test_numbers_that_depend_on_the_weights_of_another_stage_are_refused(ranks):
    first, second = ranks(draw_by_values, 2, "replicated", 2, torch.poisson)
    assert "poisson draws random numbers that depend on 2.weight, which is in another" in first
    assert "poisson draws random numbers that depend on 0.weight, which is in another" in second


def test_numbers_that_depend_on_the_values_of_shards_are_refused(ranks):
    for said in ranks(draw_by_values, 2, "sharded", 1, torch.bernoulli):
        assert "aten::bernoulli on a sharded tensor of shape (5, 6) would draw other" in said
