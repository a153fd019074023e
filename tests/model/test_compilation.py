"""Compiled models: one digest in every layout, also where micro-batches differ in size."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.errors import RankError, UsageError
from lockstep.model.compilation import check_static

SGD = partial(torch.optim.SGD, lr=0.1)


def compiler(graph, inputs):
    """Return a graph whose bits depend on whether it was made for several sizes, as kernels do."""
    symbolic = any(isinstance(each, torch.SymInt) for each in inputs)
    return lambda *values: [each * (1.001 if symbolic else 1.0) for each in graph(*values)]


def train(sizes, compiled):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    if compiled == "in place":
        model[0].compile(backend=compiler)
    elif compiled == "whole":
        model = torch.compile(model, backend=compiler)
    trainer = ls.Trainer(model, F.cross_entropy, SGD, microbatches=4)
    for size in sizes:
        trainer.step((torch.randn(size, 6), torch.randint(0, 4, (size,))))
    data = torch.utils.data.TensorDataset(torch.randn(21, 6), torch.randint(0, 4, (21,)))
    loss = trainer.evaluate(data, 13).loss
    config = sys.modules.get("torch._dynamo.config")
    kept = config is None or (
        config.automatic_dynamic_shapes and not config.fail_on_recompile_limit_hit
    )
    return trainer.digest(), loss, kept


@pytest.mark.parametrize("compiled", ["whole", "in place"])
def test_uneven_micro_batches_have_the_same_bits_in_every_layout(ranks, compiled):
    """Which size a rank saw first decided which graph was specialized for it."""
    found = [each for n in (1, 2, 4) for each in ranks(train, n, (22, 22, 14), compiled)]
    plain = ranks(train, 1, (22, 22, 14), "")
    assert all(each == plain[0] for each in found), (found, plain)


def test_too_many_shapes_are_an_error_and_not_a_fall_back_to_eager(ranks):
    with pytest.raises(RankError, match=r"met more different shapes than torch\.compile keeps"):
        ranks(train, 1, range(8, 52, 4), "whole")


@pytest.mark.parametrize("in_place", [False, True])
def test_dynamic_graphs_are_refused_by_name(in_place):
    part = nn.Linear(6, 9)
    if in_place:
        part.compile(dynamic=True, backend=compiler)
    else:
        part = torch.compile(part, dynamic=True, backend=compiler)
    with pytest.raises(UsageError, match="0 is compiled with dynamic=True"):
        check_static(nn.Sequential(part))
    check_static(nn.Sequential(torch.compile(nn.Linear(6, 9), dynamic=False, backend=compiler)))
