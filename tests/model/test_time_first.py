"""Batches with time in their first dimension are named, where a module shows it."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls


class Recurrent(nn.Module):
    def __init__(self, kind, is_transposed=False, **options):
        super().__init__()
        self.part = kind(4, **options)
        self.is_transposed = is_transposed

    def forward(self, inputs):
        inputs = inputs.transpose(0, 1) if self.is_transposed else inputs
        attended = (inputs,) * 3 if isinstance(self.part, nn.MultiheadAttention) else (inputs,)
        outputs = self.part(*attended)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return outputs.transpose(0, 1) if self.is_transposed else outputs


def said(model, steps, samples, is_manual=False):
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer = ls.Trainer(model, nn.MSELoss(), sgd, microbatches=4, progress=False)
    batch = torch.randn(steps, samples, 4), torch.randn(steps, samples, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            if not is_manual:
                trainer.step(batch)
                continue
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(batch):
                    step.backward(nn.functional.mse_loss(model(inputs), targets))
    return [str(each.message) for each in found if "first dimension" in str(each.message)]


KINDS = {
    "GRU": partial(nn.GRU, hidden_size=4),
    "LSTM": partial(nn.LSTM, hidden_size=4),
    "MultiheadAttention": partial(nn.MultiheadAttention, num_heads=2),
    "TransformerEncoderLayer": partial(nn.TransformerEncoderLayer, nhead=2, dim_feedforward=4),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", KINDS)
def test_a_batch_that_is_split_along_time_is_named(name):
    """Each micro-batch had some of the time steps, equally in every layout."""
    (sentence,) = said(Recurrent(KINDS[name]), 12, 8)
    place = "part.self_attn" if name.startswith("Tr") else "part"
    assert f" {place} has batch_first=False" in sentence
    assert len(said(Recurrent(KINDS[name]), 4, 8, is_manual=True)) == 1, "one step per micro-batch"


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", KINDS)
def test_a_batch_of_samples_is_not_named(name):
    assert not said(Recurrent(KINDS[name], is_transposed=True), 12, 8)
    assert not said(Recurrent(KINDS[name], is_transposed=True), 12, 3)
    assert not said(Recurrent(KINDS[name], batch_first=True), 12, 8)
