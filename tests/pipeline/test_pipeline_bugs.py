"""A museum: faults that a reading of the pipeline found, a test each."""

from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.errors import LayoutError, LockstepError, RankError

BATCH = (torch.ones(8, 4), torch.zeros(8, dtype=torch.long))


def trainer(model, stages, balance, **options):
    """Return a trainer with SGD and 4 micro-batches."""
    if stages > 1:
        options |= {"stages": stages, "balance": balance, "schedule": "1f1b"}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return ls.Trainer(model, nn.CrossEntropyLoss(), optimizer, microbatches=4, **options)


class Fuse(nn.Module):
    """Raises until it is mended."""

    mended = False

    def forward(self, x):
        if not Fuse.mended:
            raise ValueError("the fuse has blown")
        return x


def chain(*blocks):
    torch.manual_seed(1)
    return nn.Sequential(*(block() for block in blocks))


def layer():
    return nn.Linear(4, 4)


def several_trainers(stages):
    """Train one that fails, then two others in turn, then the first again."""
    Fuse.mended = False
    first = trainer(chain(Fuse, layer, layer), stages, [2, 1])
    with pytest.raises(LockstepError if stages > 1 and ls.rank() else ValueError):
        first.step(BATCH)
    Fuse.mended = True
    others = [trainer(chain(layer, layer, layer), stages, [1, 2]) for _ in range(2)]
    losses = [each.step(BATCH) for _ in range(3) for each in others]
    return [*losses, first.step(BATCH)]


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_trainers_do_not_take_each_others_messages(ranks, backend):
    """The second one was told of the first one's failure: both had the same tags."""
    alone = ranks(several_trainers, 1, 1)
    assert ranks(several_trainers, 2, 2, backend=backend, timeout=20.0) == alone * 2


class Counted(nn.Module):
    """Returns a number beside its input, another one for each micro-batch."""

    NUMBERS = (1, 1.0, True, 0.0, -0.0)

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x, self.NUMBERS[(self.calls - 1) % 5]


class Noting(nn.Module):
    """Takes the number off again, and notes how it is written."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, value):
        x, number = value
        self.seen.append(repr(number))
        return x


def numbers(stages):
    model = chain(layer, Counted, Noting, layer)
    noting = model[2]
    made = trainer(model, stages, [2, 2])
    made.step(BATCH)
    made.step(BATCH)
    return noting.seen


def test_equal_numbers_of_other_types_cross_as_they_are(ranks):
    """The description was not sent again, because 1 == 1.0 == True and 0.0 == -0.0."""
    (alone,) = ranks(numbers, 1, 1)
    assert alone[:5] == ["1", "1.0", "True", "0.0", "-0.0"]
    assert ranks(numbers, 2, 2) == [[], alone]


class Skipping(nn.Module):
    """Its forward is not its blocks one after another."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = layer(), layer(), layer()

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h)) + h


def skipping():
    made = trainer(Skipping(), 2, [2, 1], blocks=["a", "b", "c"])
    with pytest.raises(LayoutError, match="one after another, do not give what its forward gives"):
        made.step(BATCH)
    return True


def test_a_balance_does_not_excuse_a_model_that_is_no_chain(ranks):
    """With `balance` the blocks were taken for the model, and another model was trained."""
    assert ranks(skipping, 2) == [True, True]


SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved")


def layouts(blocks):
    """Return options of a trainer that cut `blocks` blocks into stages of 2 ranks, every way."""
    cut = [blocks // 2, blocks - blocks // 2]
    chunked = [1, 1, 1, blocks - 3]
    return [
        {"stages": 2, "schedule": each, "balance": chunked if each == "interleaved" else cut}
        for each in SCHEDULES
    ]


def trained(make, loss=None, batches=(), layout=None, **options):
    """Return the digests after training on `batches`, with momentum."""
    made = ls.Trainer(
        make(),
        nn.CrossEntropyLoss() if loss is None else loss,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        **options,
        **(layout or {}),
    )
    for batch in batches:
        made.step(batch)
    return made.digest(), made.optimizer_digest()


def in_every_schedule(ranks, make, blocks, loss=None, batches=None, **options):
    """Return the digests of one process, then those of 2 stages by schedule."""
    batches = random_batches() if batches is None else batches

    def one():
        return trained(make, loss, batches, **options)

    def two():
        return [trained(make, loss, batches, layout, **options) for layout in layouts(blocks)]

    (expected,) = ranks(one, 1)
    first, second = ranks(two, 2)
    assert first == second
    return expected, dict(zip(SCHEDULES, first, strict=True))


def random_batches(samples=18, steps=2):
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(samples, 4, generator=generator),
            torch.randint(0, 4, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


def same(expected):
    """Return what `in_every_schedule` gives where no schedule changes a bit."""
    return dict.fromkeys(SCHEDULES, expected)


def test_a_micro_batch_of_weight_zero_takes_no_gradient(ranks):
    """With stages its leaf took the gradient of the next one, so that the tree added otherwise."""
    batches = random_batches(16, 4)
    for _, targets in batches:
        targets[targets == 3] = 0
        targets[2:4] = 3  # micro-batch 1 is ignored as a whole
    expected, found = in_every_schedule(
        ranks,
        lambda: chain(layer, nn.Tanh, layer, layer),
        4,
        nn.CrossEntropyLoss(ignore_index=3),
        batches,
    )
    assert found == same(expected)


class Conjugate(nn.Module):
    """Returns a lazily conjugated tensor, and the lazily negated imaginary part of it."""

    def __init__(self):
        super().__init__()
        self.linear = layer()

    def forward(self, x):
        z = torch.fft.rfft(self.linear(x), dim=1).conj()
        return z, z.imag


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat))

    def forward(self, given):
        z, imaginary = given
        return (z @ self.weight).abs() + (imaginary @ self.weight.imag)


def test_lazily_conjugated_tensors_cross_as_they_are(ranks):
    """They ended the run with an error of torch's."""
    expected, found = in_every_schedule(ranks, lambda: chain(layer, Conjugate, Product, layer), 4)
    assert found == same(expected)


class Repeating(nn.Module):
    """Calls one of its blocks a second time; in its list that has a name for each call."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(1)
        again, last = layer(), layer()
        self.layers = nn.ModuleList([again, nn.Tanh(), again, last][: 4 if names == 2 else 2])
        self.last = last

    def blocks(self):
        return [self.layers[0], self.layers[1], self.layers[0], self.last]

    def forward(self, x):
        for block in self.blocks():
            x = block(x)
        return x


def repeating(stages, names):
    made = trainer(Repeating(names), stages, [2, 2])
    return [made.step(BATCH), made.step(BATCH), made.digest()]


def test_a_block_that_a_method_names_twice(ranks):
    """Stages forgot the second call, and the model was refused as no chain of its blocks."""
    for names in (1, 2):
        (alone,) = ranks(repeating, 1, 1, names)
        if names == 2:
            assert ranks(repeating, 2, 2, names) == [alone, alone]
    with pytest.raises(RankError, match=r"block layers.0 is called 2 times, and stages need a"):
        ranks(repeating, 2, 2, 1)
