"""Stages as a user sees them: whatever a trainer does, a cut model gives the same bits."""

import io
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01)


def small_model():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    )


def rows(samples=45):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def decayed(name, parameter):
    return {"weight_decay": 0.0 if "bias" in name else 0.1}


def whole_training(folder, **layout):
    """Use everything that a trainer has; return what must be the same in every layout."""
    trainer = ls.Trainer(
        small_model(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        ADAM,
        metrics={"accuracy": ls.accuracy},
        groups=decayed,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        clip_norm=0.7,
        average=0.9,
        **layout,
    )
    seen = []
    with trainer:
        for epoch in range(2):
            for batch in trainer.batches(rows(), 23, seed=5, epoch=epoch):
                seen.append(trainer.step(batch))
                seen.append(trainer.history.last.metrics["accuracy"])
                seen.append(trainer.history.last.norm)
            seen.append(trainer.evaluate(rows(), 20))
        seen.append(trainer.evaluate(rows(), 20, average=True))
        trainer.save(folder / "weights.safetensors")
        trainer.save(folder / "average.safetensors", average=True)
        state = trainer.state_dict()
    for name in ("weights", "average"):
        seen.append(ls.digest(load_file(folder / f"{name}.safetensors")))
    return [*seen, trainer.digest(), trainer.optimizer_digest()], state


def test_whatever_a_trainer_does_a_cut_model_gives_the_same_bits(ranks, tmp_path):
    def trained(stages):
        folder = tmp_path / f"{ls.world_size()}-{stages}"
        layout = {} if stages == 1 else {"stages": stages, "schedule": "1f1b"}
        seen, state = whole_training(folder, **layout)
        # The state goes on in another layout: the same one cut otherwise, and not cut at all.
        again = {} if stages == 1 else {"stages": stages, "balance": [4, 1]}
        other = ls.Trainer(
            small_model(), nn.CrossEntropyLoss(), ADAM, groups=decayed, average=0.9, **again
        )
        state = torch.load(_saved(state), weights_only=True)
        other.load_state_dict(state)
        other.step(rows()[:20])
        return seen, other.digest(), other.optimizer_digest()

    (expected,) = ranks(trained, 1, 1)
    for n in (2, 4):
        for found in ranks(trained, n, 2):
            assert found == expected


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_rank_keeps_its_own_stage_only(ranks):
    def held():
        model = small_model()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, stages=2, balance=[2, 3])
        before = [parameter.is_meta for parameter in model.parameters()]
        trainer.step(rows()[:16])
        buffers = [buffer.is_meta for buffer in model.buffers()]
        return before, buffers, len(trainer.optimizer.state)

    first, last = ranks(held, 2)
    assert first == ([False, False, True, True, True, True], [True] * 3, 2)
    assert last == ([True, True, False, False, False, False], [False] * 3, 4)


class Skip(nn.Module):
    """Hands a tuple on: the value twice, a mask that needs no gradient, a number, nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        h = self.linear(x)
        parts = torch.stack([h, h * 2], dim=-1).unbind(-1)  # strides with gaps
        return h * 3, {"twice": [h, h], "part": parts[1], "mask": x > 0, "n": 3, "none": None}


class Middle(nn.Module):
    """Begins by writing into what it was given, and passes the rest through."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        h, rest = given
        part = F.relu(rest["part"])
        h = F.relu(h, inplace=True)
        expanded = part.sum(dim=1, keepdim=True).expand(-1, 6)
        return self.linear(h) + rest["twice"][0], {**rest, "part": part, "expanded": expanded}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 10)

    def forward(self, given):
        h, rest = given
        a, b = rest["twice"]
        kept = torch.where(rest["mask"], a * b, h) * rest["n"] + rest["part"] + rest["expanded"]
        assert rest["none"] is None
        return self.linear(kept)


class Tied(nn.Module):
    """One of several blocks that use the same weight, twice each."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x + torch.tanh(F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T))


class Recomputed(nn.Module):
    """Dropout and batch norm that are computed again during backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def tied_model():
    weight = nn.Parameter(torch.randn(6, 6))
    return nn.Sequential(
        Tied(weight), nn.Dropout(0.1), Tied(weight), Tied(weight), nn.Linear(6, 10)
    )


def recurrent_model():
    class Last(nn.Module):
        def forward(self, given):
            return given[0][:, -1]

    return nn.Sequential(
        nn.Linear(6, 12), nn.Unflatten(1, (3, 4)), nn.LSTM(4, 5, batch_first=True), Last(),
        nn.LayerNorm(5), nn.Linear(5, 10),
    )  # fmt: skip


def transformer_model():
    layers = [nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True) for _ in range(2)]
    return nn.Sequential(
        nn.Linear(6, 12), nn.Unflatten(1, (3, 4)), *layers, nn.Flatten(), nn.Linear(12, 10)
    )


def channels_last_model():
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(48, 10),
    )
    return model.to(memory_format=torch.channels_last)


def frozen_model():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 10))
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def repeated_model():
    shared = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 10))


def recomputed_model():
    return nn.Sequential(Recomputed(), Recomputed(), nn.Linear(6, 10))


MODELS = {
    "skip": (lambda: nn.Sequential(Skip(), Middle(), Join()), {}),
    "tied": (tied_model, {"clip_norm": 0.2}),
    "recurrent": (recurrent_model, {}),
    "transformer": (transformer_model, {"precision": torch.bfloat16}),
    "channels last": (channels_last_model, {"precision": torch.bfloat16}),
    "frozen": (frozen_model, {}),
    "repeated": (repeated_model, {}),
    "recomputed": (recomputed_model, {}),
}


def trained(stages, schedules):
    """Train every model under every schedule, cut at each place in turn where that can be."""
    found = {}
    for name, (model, options) in MODELS.items():
        for schedule in schedules:
            torch.manual_seed(5)
            made = model()
            layout = {"stages": stages, "schedule": schedule} if stages > 1 else {}
            trainer = ls.Trainer(made, nn.CrossEntropyLoss(), SGD, seed=3, **layout, **options)
            generator = torch.Generator().manual_seed(2)
            losses = []
            for size in (24, 19, 17):
                inputs = torch.randn(size, 6, generator=generator)
                losses.append(trainer.step((inputs, torch.arange(size) % 10)))
            found[name, schedule] = losses, trainer.digest(), trainer.optimizer_digest()
    return found


SCHEDULES = ("1f1b", "zero-bubble")


@pytest.mark.parametrize(("n", "stages"), [(2, 2), (3, 3), (4, 2)])
def test_what_crosses_a_boundary_changes_no_bit(ranks, alone, n, stages):
    for found in ranks(trained, n, stages, SCHEDULES):
        for (name, schedule), result in found.items():
            assert result == alone[name, None], (name, schedule)


@pytest.fixture(scope="module")
def alone():
    def run():
        ls.init()
        return trained(1, (None,))

    (found,) = ls.launch(run, nprocs=1)
    return found
