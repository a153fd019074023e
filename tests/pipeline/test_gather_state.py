"""The whole state is brought together from what ranks have, and changes nothing of it."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lockstep as ls


def come_apart():
    """Train a 2 x 2 layout, change a weight and a momentum on rank 3, and look at all of it."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    trainer = ls.Trainer(
        model,
        F.cross_entropy,
        optimizer,
        microbatches=4,
        pipeline=ls.PipelineConfig(stages=2, balance=[1, 1]),
    )
    generator = torch.Generator().manual_seed(1)
    trainer.step((torch.randn(8, 4, generator=generator), torch.arange(8) % 3))
    alike = trainer.digest(), trainer.optimizer_digest()
    weight = model[1].weight
    if dist.get_rank() == 3:
        with torch.no_grad():
            weight[0, 0] = 7.0
            trainer.optimizer.state[weight]["momentum_buffer"][0, 0] = 8.0
    apart = trainer.digest(), trainer.optimizer_digest()
    state = trainer.state_dict()
    return {
        "alike": alike,
        "apart": apart,
        "weight": None if weight.is_meta else weight[0, 0].item(),
        "whole": not any(tensor.is_meta for tensor in state["model"].values()),
    }


def test_a_rank_that_came_apart_has_another_digest_and_keeps_what_it_has(ranks):
    found = ranks(come_apart, 4)
    assert len({each["alike"] for each in found}) == 1
    for rank in (0, 1, 2):
        assert found[rank]["apart"] == found[0]["alike"]
    for one, other in zip(found[3]["apart"], found[0]["apart"], strict=True):
        assert one != other
    assert found[3]["weight"] == 7.0
    assert found[1]["weight"] != 7.0
    assert all(each["whole"] for each in found)
