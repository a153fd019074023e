"""`exact.batches(..., together=True)`: several micro-batches at once, with the bits of each."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
import pytest_lockstep
from lockstep.kernel.errors import UsageError

MICROBATCHES = 8
EPOCHS = 2


def rows(samples=6 * 32):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 16, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 16, (samples,), generator=generator))


class Calls(nn.Module):
    """A model whose forward is a function of two layers and the inputs."""

    def __init__(self, function):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.last = nn.Linear(64, 16)
        self._function = function

    def forward(self, x):
        return self.last(self._function(self.first(x).relu()))


def weigh(model, inputs, targets):
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return losses * (1 + inputs[:, 0].abs())


def smooth(model, inputs, targets):
    noisy = inputs + torch.randn_like(inputs)
    return F.cross_entropy(model(noisy), targets, label_smoothing=0.1, reduction="none")


def cross_entropy(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets, reduction="none")


def against_the_mean(model, inputs, targets):
    losses = cross_entropy(model, inputs, targets)
    return losses - 0.1 * losses.mean()


CASES = {  # the model, the losses, and why micro-batches are computed one by one
    "linear layers": (lambda x: x, cross_entropy, ""),
    "weights of samples": (lambda x: x, weigh, ""),
    "dropout and noise": (lambda x: F.dropout(x, 0.3), smooth, ""),
    "batch norm": (nn.BatchNorm1d(64), cross_entropy, ""),
    "a model that couples samples": (
        lambda x: x - x.mean(0),
        cross_entropy,
        "aten::mean combines samples",
    ),
    "a loss that couples samples": (
        lambda x: x,
        against_the_mean,
        "aten::mean combines samples",
    ),
    "the order of samples": (
        lambda x: x + x.roll(1, 0),
        cross_entropy,
        "has other bits for several micro-batches",
    ),
}


LATE = {  # what is logged after backward
    "shares of the losses": lambda losses: losses.softmax(0),
    "noise": torch.rand_like,
}


def train(name, *, together, batch_size=32, late=None):
    """Return the bits of a training, the sizes of what a loop got, and the note."""
    function, find_losses, _ = CASES[name]
    torch.manual_seed(0)
    model = Calls(copy.deepcopy(function))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    exact = ls.exact(
        model,
        optimizer,
        microbatches=MICROBATCHES,
        loggers=[],
        progress=False,
        audit=ls.AuditConfig(every_steps=1000),
    )
    bits = []
    sizes = []
    for _ in range(EPOCHS):
        for batch in exact.batches(rows(), batch_size=batch_size, together=together):
            sizes.append([])
            for inputs, targets in batch:
                sizes[-1].append(len(inputs))
                losses = find_losses(model, inputs, targets)
                hits = (losses.detach() < 2.5).float()
                if together:
                    batch.log("hits", hits)
                    batch.backward(losses)
                else:
                    batch.log("hits", hits.mean())
                    batch.backward(losses.mean())
                if late is not None:
                    values = LATE[late](losses.detach())
                    batch.log("late", values if together else values.mean())
            bits.append((batch.loss.hex(), batch.norm.hex(), *batch.metrics.values()))
            optimizer.step()
            optimizer.zero_grad()
    joint = exact.engine.setup.executor.one_pass
    return [*bits, ls.digest(model)], sizes, joint.known.note


def on_portable_ranks(function, ranks=1):
    def call():
        ls.init(portable=True, threads=1)
        return function()

    return pytest_lockstep.run(call, ranks=ranks, timeout=300, init=False)


def train_all():
    found = {}
    for name in CASES:
        for together in (False, True):
            found[name, together] = train(name, together=together)
    for late in LATE:
        for together in (False, True):
            found[late, together] = train("linear layers", together=together, late=late)
    found["uneven", False] = train("dropout and noise", together=False, batch_size=37)
    found["uneven", True] = train("dropout and noise", together=True, batch_size=37)
    return found


@pytest.fixture(scope="module")
def alone():
    return on_portable_ranks(train_all)[0]


@pytest.mark.parametrize("name", [*CASES, "uneven"])
def test_micro_batches_together_have_the_bits_of_separate_ones(name, alone):
    (separate, _, _) = alone[name, False]
    (joined, _, note) = alone[name, True]
    expected = CASES[name][2] if name in CASES else ""
    assert joined == separate, note
    assert expected in note
    assert bool(note) == bool(expected)


@pytest.mark.parametrize("name", LATE)
def test_what_is_logged_after_backward_is_compared(name, alone):
    (separate, _, _) = alone[name, False]
    (joined, _, note) = alone[name, True]
    assert joined == separate
    assert note == "the metric 'late' has other bits for several micro-batches"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.stress), 3])
def test_ranks_have_the_bits_of_one(ranks, alone):
    for found in on_portable_ranks(train_all, ranks):
        for name in [*CASES, "uneven"]:
            assert found[name, True][0] == alone[name, False][0], name
        sizes = found["dropout and noise", True][1]
        assert max(map(max, sizes)) > 4


def test_a_loop_gets_all_samples_at_once(alone):
    separate = [4] * 8
    sizes = alone["linear layers", True][1]
    # Steps 0, 1, 2 and 5 are audited. The first one that is not records a pass, and compares one.
    assert sizes[:3] == [separate] * 3
    assert sizes[3] == [*separate, 32, 32]
    assert sizes[4] == [*separate, 32]
    assert sizes[5] == separate
    assert sizes[6] == [*separate, 32]
    assert sizes[7:9] == [[32]] * 2
    assert sizes[9] == [*separate, 32]  # compared again, after five such steps
    assert sizes[10:] == [separate, [32]]
    assert alone["a loss that couples samples", True][1][6:] == [separate] * 6


def begin(**options):
    model = Calls(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exact = ls.exact(model, optimizer, microbatches=4, loggers=[], progress=False, audit=False)
    return model, optimizer, exact.batches(rows(48), batch_size=16, together=True, **options)


def describe_errors():
    model, optimizer, batches = begin()
    for batch in batches:  # steps with observers, none of which is a trial
        for inputs, targets in batch:
            batch.backward(cross_entropy(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()

    def average(batch, inputs, targets):
        batch.backward(F.cross_entropy(model(inputs), targets))

    def share(batch, inputs, targets):
        batch.backward(cross_entropy(model, inputs, targets), share=0.25)

    def twice(batch, inputs, targets):
        losses = cross_entropy(model, inputs, targets)
        batch.backward(losses)
        batch.backward(losses)

    def log(batch, inputs, targets):
        batch.log("mean", inputs.mean())

    def forget(batch, inputs, targets):
        model(inputs)

    def leave(batch, inputs, targets):
        raise KeyError("of the script")

    found = {}
    for step in (average, share, twice, log, forget, leave):
        for at in (0, 4):  # in the pass of the first micro-batch, and in that of all of them
            batch = next(iter(batches))
            try:
                for number, (inputs, targets) in enumerate(batch):
                    if number == at:
                        step(batch, inputs, targets)
                    else:
                        batch.backward(cross_entropy(model, inputs, targets))
            except (KeyError, ls.LockstepError) as error:
                found[step.__name__, at] = f"{type(error).__name__}: {error}"
            optimizer.zero_grad()
            if step is not forget:  # whose error the loop itself raises
                with pytest.raises(UsageError, match="the loop was left before the last"):
                    next(iter(batch))
            torch.ones(3).sum()  # no pass sees it
    return found


def test_what_a_loop_over_samples_must_not_do():
    found = on_portable_ranks(describe_errors)[0]
    assert len(found) == 12
    for (name, at), message in found.items():
        place = "micro-batches 0 to 3: " if at else "micro-batch 0: "
        expected = {
            "average": "the loss has shape (), and with together=True there has to be one loss per",
            "share": "with together=True, batch.backward(losses) takes one loss per sample, and no",
            "twice": "a second backward of the same samples: add the losses",
            "log": "batch.log('mean', ...) got no tensor of the shape",
            "forget": "batch.backward(losses) was not called",
            "leave": "of the script",
        }[name]
        assert expected in message
        assert (place in message) == (name != "leave"), message
