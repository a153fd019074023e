"""Large gradients, whose buckets are launched while backward runs."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
import models
from lockstep.comm import backend as native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native module")

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIZE = 128  # 64 KiB per square weight


def batch(samples=16):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, SIZE, generator=generator)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def wide(layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(layers - 1)), nn.Linear(SIZE, 3))


class Mixed(nn.Module):
    """Several kinds of gradients, and temporary tensors of the same size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, SIZE)
        self.convolution = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.recurrent = nn.LSTM(SIZE, SIZE // 2, batch_first=True)
        self.transposed = nn.Linear(SIZE // 2, SIZE)
        self.transposed.weight = nn.Parameter(self.transposed.weight.detach().t().contiguous().t())
        self.normalization = nn.LayerNorm(SIZE)
        self.recomputed = nn.Linear(SIZE, SIZE)
        self.unused = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        tokens = self.embedding((inputs[:, :9].abs() * 10).long().clamp(max=49))
        hidden, _ = self.recurrent(tokens)
        value = self.normalization(self.transposed(hidden[:, -1]))
        value = checkpoint(self.recomputed, value, use_reentrant=False)
        squares = self.convolution((value.t() @ value)[None, None])
        if inputs[0, 0] > 0:
            value = value + self.unused(value)
        return self.head(value) + squares.mean()


@pytest.mark.parametrize("storage", ["replicated", "shared"])
def test_all_kinds_of_gradients_have_the_bits_of_one_process(ranks, storage):
    def train():
        trainer = ls.Trainer(
            Mixed(), nn.CrossEntropyLoss(), SGD, microbatches=6, storage=storage, max_grad_norm=1.0
        )
        for samples in (16, 16, 13, 16, 5, 16):
            trainer.step(batch(samples))
        return trainer.digest()

    assert len({digest for n in (1, 3) for digest in ranks(train, n, backend="lockstep")}) == 1


@pytest.mark.parametrize("microbatches", [2, 4])
def test_gradients_that_a_hook_keeps_do_not_change(ranks, microbatches):
    """Those of this rank's micro-batches, not the sums."""

    def train():
        model = wide()
        kept = []
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, microbatches=microbatches, audit=False
        )
        for step in range(5):
            if step == 3:
                for each in model.parameters():
                    each.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
            trainer.step(batch())
        are_equal = [torch.equal(*pair) for pair in kept]
        return trainer.digest(), len(are_equal), all(are_equal)

    (alone,) = ranks(train, 1)
    for digest, count, are_equal in ranks(train, 2, backend="lockstep"):
        assert digest == alone[0]
        assert count == 2 * 6 * microbatches // 2
        assert are_equal


def test_a_step_that_fails_in_backward_leaves_no_gradient_behind(ranks):
    def fail():
        raise KeyError("mine")

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = wide()
            self.first = nn.Linear(SIZE, SIZE)
            self.on_backward = lambda: None

        def forward(self, inputs):
            return self.layers(models.CallInBackward.apply(self.first(inputs), self.on_backward))

    def train():
        model = Failing()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=2, audit=False)
        for step in range(6):
            model.on_backward = fail if step == 3 else lambda: None
            if step == 3:
                with pytest.raises(KeyError, match="mine"):
                    trainer.step(batch())
            else:
                trainer.step(batch())
        return trainer.digest()

    (alone,) = ranks(train, 1)
    assert ranks(train, 2, backend="lockstep") == [alone] * 2
