"""Several micro-batches in one pass: the bits of separate passes, and what cannot be joined."""

import json
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import lockstep as ls
import pytest_lockstep
from lockstep.training import one_pass
from lockstep.training.one_pass import OnePass

STEPS = 5  # of which the steps 0, 1 and 2 compare, and the others are computed in one pass
SAMPLES, FEATURES, CLASSES = 16, 64, 16


class Calls(nn.Module):
    """A model whose forward is a function of a linear layer and the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, *inputs, **named):
        return self._function(self, *inputs, **named)


def on_features(function, **parts):
    """Return a model that applies a function of the model to the features of a layer."""
    return Calls(lambda model, x: model.head(function(model, model.layer(x).relu())), **parts)


def on_images(*layers, outputs):
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(outputs, 16))


def on_sequences(layer):
    def forward(model, x):
        rows = model.part(x.view(len(x), 4, 16) + model.position)
        rows = rows[0] if isinstance(rows, tuple) else rows
        return model.head(rows.flatten(1))

    return Calls(forward, part=layer, position=nn.Parameter(torch.randn(1, 4, 16)))


def attend(model, x):
    x = torch.cat([model.first.expand(len(x), -1, -1), x.view(len(x), 4, 16)], 1) + model.position
    q, k, v = model.mix(x).view(len(x), 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    return model.last(model.norm(x)[:, 0])


def attention():
    return Calls(
        attend,
        first=nn.Parameter(torch.zeros(1, 1, 16)),
        position=nn.Parameter(torch.randn(1, 5, 16)),
        mix=nn.Linear(16, 48),
        norm=nn.LayerNorm(16),
        last=nn.Linear(16, CLASSES),
    )


def scale():
    return nn.Parameter(torch.rand(64))


JOINED = {
    "linear layers": lambda: on_features(lambda model, x: x),
    "GELU": lambda: on_features(lambda model, x: F.gelu(x)),
    "convolutions": lambda: on_images(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), outputs=16
    ),
    "a convolution in 1D": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(112, 16)
    ),
    "a transposed convolution": lambda: on_images(nn.ConvTranspose2d(1, 2, 2, 2), outputs=512),
    "group norm": lambda: on_images(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), outputs=288),
    "attention": attention,
    "RMS norm": lambda: on_features(lambda model, x: model.norm(x), norm=nn.RMSNorm(64)),
    "broadcast parameters": lambda: on_features(
        lambda model, x: x * model.scale + model.shift, scale=scale(), shift=scale()
    ),
    "einsum": lambda: on_features(
        lambda model, x: torch.einsum("bi,ij->bj", x, model.matrix),
        matrix=nn.Parameter(torch.randn(64, 64)),
    ),
    "an embedding": lambda: on_features(
        lambda model, x: model.table((x * 9).long() % 8).sum(1), table=nn.Embedding(8, 64)
    ),
    "frozen parameters": lambda: on_features(
        lambda model, x: x + model.frozen(x), frozen=nn.Linear(64, 64).requires_grad_(False)
    ),
    "a buffer that is read": lambda: on_features(
        lambda model, x: x + model.fixed, fixed=nn.Buffer(torch.rand(64))
    ),
}


def count(model, x):
    model.calls = getattr(model, "calls", 0) + 1
    return x


def write(model, x):
    model.seen += len(x)
    return x


def by_values(model, x):
    return x * 2 if x.max() > 100 else x


def over_a_limit(model, x):
    return torch.where(x.norm() > 1e9, x / x.norm(), x)


def with_hook():
    model = on_features(lambda model, x: x)
    model.layer.register_forward_hook(lambda *_: None)
    return model


def with_tensor_hook():
    model = on_features(lambda model, x: x)
    model.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def with_tied_weights():
    return on_features(lambda model, x: model.layer(x).relu())


SEPARATE = {
    "batch norm": (
        lambda: on_features(lambda model, x: model.norm(x), norm=nn.BatchNorm1d(64)),
        "",
    ),
    "a mean": (lambda: on_features(lambda model, x: x - x.mean(0)), "aten::mean combines samples"),
    "a norm": (lambda: on_features(lambda model, x: x / x.norm()), "combines samples"),
    "a norm that seldom counts": (lambda: on_features(over_a_limit), "combines samples"),
    "values": (lambda: on_features(by_values), "aten::max combines samples"),
    "a softmax over samples": (
        lambda: on_features(lambda model, x: x * x.softmax(0)),
        "other bits",
    ),
    "a sum over samples": (lambda: on_features(lambda model, x: x.cumsum(0)), "other bits"),
    "the order of samples": (lambda: on_features(lambda model, x: x + x.roll(1, 0)), "other bits"),
    "sorted samples": (lambda: on_features(lambda model, x: x.sort(0).values), "other bits"),
    "products of samples": (
        lambda: on_features(lambda model, x: x + (x @ x.t()) @ x),
        "does not have one part per sample",
    ),
    "one sample": (lambda: on_features(lambda model, x: x + x[0]), "aten::select combines samples"),
    "some rows": (lambda: on_features(lambda model, x: x + x[x[:, 0] > 0].sum()), ""),
    "the number of samples": (lambda: on_features(lambda model, x: x / len(x)), "other bits"),
    "dropout": (lambda: on_features(lambda model, x: F.dropout(x)), "the model draws random"),
    "noise": (lambda: on_features(lambda model, x: x + torch.rand_like(x)), "the model draws"),
    "Python's generator": (
        lambda: on_features(lambda model, x: x * random.random()),
        "the model draws",
    ),
    "tied weights": (with_tied_weights, "aten::add changes the gradient of a parameter"),
    "a weight that is computed": (
        lambda: on_features(
            lambda model, x: model.part(x), part=parametrizations.weight_norm(nn.Linear(64, 64))
        ),
        "changes the gradient of a parameter",
    ),
    "short vectors": (
        lambda: on_features(
            lambda model, x: F.pad(model.part(x).tanh(), (0, 61)), part=nn.Linear(64, 3)
        ),
        "aten::tanh may round the last elements of the shape (2, 3) differently",
    ),
    "a buffer that is written": (
        lambda: on_features(write, seen=nn.Buffer(torch.zeros(()))),
        "",
    ),
    "an attribute": (lambda: on_features(count), "forward changes"),
    "an encoder layer, with time first inside": (
        lambda: on_sequences(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)),
        "the gradient of a parameter of the shape (48, 16) has other bits",
    ),
    "an LSTM": (
        lambda: on_sequences(nn.LSTM(16, 16, batch_first=True)),
        "aten::lstm may round elements differently",
    ),
    "time first": (
        lambda: on_features(lambda model, x: x.view(2, -1, 64).softmax(0).view(-1, 64)),
        None,
    ),
    "a hook": (with_hook, None),
    "a hook on a parameter": (with_tensor_hook, None),
}
RULES = {"a buffer that is written": {"seen": "sum"}}


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def train(model, batches, *, is_joined, loss=None, **options):
    """Return the digests, the number of micro-batches in joint passes, and the note."""
    joined = []

    def compute(self, step, buffers, group):
        results = original(self, step, buffers, group)
        joined.append(0 if results is None else len(group))
        return results

    original = OnePass.compute
    with mock.patch.object(OnePass, "compute", compute):
        trainer = ls.Trainer(
            model,
            loss or nn.CrossEntropyLoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            microbatches=8,
            loggers=[],
            audit=ls.AuditConfig(max_corrections=0),
            **options,
        )
        joint = trainer.engine.setup.executor.one_pass
        assert joint is not None
        if not is_joined:
            trainer.engine.setup.executor.one_pass = None
        for batch in batches:
            trainer.step(batch)
    return trainer.digest(), trainer.optimizer_digest(), sum(joined), joint.note


def compare(make, rules=None, batches=None, **options):
    """Return whether one pass has the bits of separate ones, what it computed, and the note."""
    found = []
    for is_joined in (False, True):
        torch.manual_seed(0)
        model = make()
        if rules:
            model.lockstep_buffer_rules = rules
        found.append(train(model, batches or [data()] * STEPS, is_joined=is_joined, **options))
    (*separate, _, _), (*joined, count, note) = found
    return separate == joined, count, note


def on_portable_ranks(function, ranks=1):
    def call():
        ls.init(portable=True, threads=1)
        return function()

    return pytest_lockstep.run(call, ranks=ranks, timeout=300, init=False)


@pytest.fixture(scope="module")
def compared():
    """What every model does, computed in one process."""

    def compare_all():
        joined = {name: compare(make) for name, make in JOINED.items()}
        separate = {name: compare(make, RULES.get(name)) for name, (make, _) in SEPARATE.items()}
        return joined | separate

    return on_portable_ranks(compare_all)[0]


@pytest.mark.parametrize("name", JOINED)
def test_one_pass_has_the_bits_of_separate_ones(name, compared):
    assert compared[name] == (True, 8 * (STEPS - 3), "")


@pytest.mark.parametrize("name", SEPARATE)
def test_a_model_that_couples_samples_or_draws_is_computed_separately(name, compared):
    is_equal, count, note = compared[name]
    assert (is_equal, count) == (True, 0), note
    if SEPARATE[name][1] is None:
        return
    assert note
    assert SEPARATE[name][1] in note


class Changes(nn.Module):
    """A model that calls other operators, or fails, from a step on."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change, self.is_changed = nn.Linear(FEATURES, CLASSES), change, False

    def forward(self, x):
        x = self.layer(x)
        return self.change(x) if self.is_changed else x


class Late(torch.utils.data.Dataset):
    """Batches, before one of which the model changes."""

    def __init__(self, model, step):
        self.model, self.step = model, step

    def __iter__(self):
        for step in range(8):
            self.model.is_changed = step >= self.step
            yield data()


@pytest.mark.parametrize("change", ["mean", "tanh"])
def test_operators_that_were_not_called_before_are_noticed(change):
    def change_late():
        def run(is_joined):
            torch.manual_seed(0)
            model = Changes(lambda x: x - x.mean(0) if change == "mean" else x.tanh())
            return train(model, Late(model, 4), is_joined=is_joined)

        return run(False), run(True)

    ((*separate, _, _), (*joined, count, note)) = on_portable_ranks(change_late)[0]
    assert separate == joined
    assert note == f"aten::{change} was not called as in the first step"
    # Step 3; step 4 is computed separately; 5 compares; 6 and 7 are joined if it can be.
    assert count == (8 if change == "mean" else 8 + 2 * 8)


def test_an_error_is_that_of_a_separate_pass():
    def fail():
        model = Changes(lambda x: x[:, 99])
        with pytest.raises(IndexError, match="index 99 is out of bounds") as raised:
            train(model, Late(model, 4), is_joined=True)
        return raised.value.__notes__

    assert on_portable_ranks(fail)[0] == ["in rank 0, step 4, micro-batch 0"]


@pytest.mark.parametrize(("samples", "count"), [(19, 6), (3, 3), (8, 8), (16, 8)])
def test_a_pass_is_a_node_of_equal_micro_batches(samples, count):
    def compare_sizes():
        return compare(JOINED["linear layers"], batches=[data(samples)] * 6)

    # 19 samples: 3 3 3 2 2 2 2 2, of which 0-1 and 4-7 are alike.
    assert on_portable_ranks(compare_sizes)[0] == (True, count * 2, "")


def test_a_pass_keeps_no_more_memory_than_it_may():
    def compare_limited():
        with mock.patch.object(one_pass, "MOST_BYTES", 4 * 2 * (64 + 64 + 16) * 4):
            return compare(JOINED["linear layers"], batches=[data()] * 8)

    is_equal, count, note = on_portable_ranks(compare_limited)[0]
    assert (is_equal, note) == (True, "")
    assert count == 8 * 4  # steps 3, 4, 6 and 7, as two passes each


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_bits_of_one(ranks):
    def digests():
        torch.manual_seed(0)
        model = attention()
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        return train(model, [data(), data(19)] * 4, is_joined=True, loss=loss)

    (alone,) = on_portable_ranks(digests)
    together = on_portable_ranks(digests, ranks)
    assert [found[:2] for found in together] == [alone[:2]] * ranks
    assert alone[2] > 0
    assert all(found[2] > 0 for found in together)


def test_why_micro_batches_are_computed_separately_is_recorded_once(tmp_path):
    def record():
        trainer = ls.Trainer(
            SEPARATE["dropout"][0](),
            nn.CrossEntropyLoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            microbatches=8,
            loggers=[tmp_path / "run"],
        )
        for _ in range(3):
            trainer.step(data())
        trainer.finish()

    on_portable_ranks(record)
    lines = map(json.loads, (tmp_path / "run" / "record.jsonl").read_text().splitlines())
    (note,) = [line for line in lines if line["kind"] == "one_pass"]
    assert (note["step"], note["message"]) == (0, "the model draws random numbers")
