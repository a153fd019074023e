"""Stages as a user sees them: whatever a trainer does, a cut model gives the same bits."""

import io
import os
import random
import signal
import weakref
from functools import partial
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import LossError, RankError
from lockstep.kernel.rng_scopes import is_in_backward

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
        ls.OptimizerConfig(
            ADAM, decayed, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)
        ),
        metrics={"accuracy": ls.accuracy},
        max_grad_norm=0.7,
        ema_decay=0.9,
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
        seen.append(trainer.evaluate(rows(), 20, ema=True))
        folder.mkdir(parents=True, exist_ok=True)
        trainer.save_weights(folder / "weights.safetensors")
        trainer.save_weights(folder / "average.safetensors", ema=True)
        state = trainer.state_dict()
    for name in ("weights", "average"):
        seen.append(ls.digest(load_file(folder / f"{name}.safetensors")))
    return [*seen, trainer.digest(), trainer.optimizer_digest()], state


def test_whatever_a_trainer_does_a_cut_model_gives_the_same_bits(ranks, tmp_path):
    def trained(stages):
        folder = tmp_path / f"{ls.world_size()}-{stages}"
        folder.mkdir(exist_ok=True)
        is_wide = ls.world_size() == 4
        schedule = "interleaved" if is_wide else "1f1b"
        layout = {"activation_checkpointing": is_wide}
        if stages > 1:
            layout["pipeline"] = ls.PipelineConfig(stages, schedule)
        seen, state = whole_training(folder, **layout)
        # The state goes on in another layout: the same one cut otherwise, and not cut at all.
        again = (
            {} if stages == 1 else {"pipeline": ls.PipelineConfig(stages=stages, balance=[4, 1])}
        )
        other = ls.Trainer(
            small_model(),
            nn.CrossEntropyLoss(),
            ls.OptimizerConfig(ADAM, decayed),
            ema_decay=0.9,
            **again,
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
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, pipeline=ls.PipelineConfig(stages=2, balance=[2, 3])
        )
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
    "tied": (tied_model, {"max_grad_norm": 0.2}),
    "recurrent": (recurrent_model, {}),
    "transformer": (transformer_model, {"autocast_dtype": torch.bfloat16}),
    "channels last": (channels_last_model, {"autocast_dtype": torch.bfloat16}),
    # Autocast would keep the cast of a weight that is used twice, but not across stages.
    "tied, cast": (tied_model, {"autocast_dtype": torch.bfloat16}),
    "frozen": (frozen_model, {}),
    "repeated": (repeated_model, {}),
    "recomputed": (recomputed_model, {}),
}


def trained(stages, schedules, names=tuple(MODELS), **more):
    """Train every model under every schedule."""
    found = {}
    for name in names:
        model, options = MODELS[name]
        for schedule in schedules:
            torch.manual_seed(5)
            made = model()
            layout = (
                {"pipeline": ls.PipelineConfig(stages=stages, schedule=schedule)}
                if stages > 1
                else {}
            )
            layout |= options | more
            trainer = ls.Trainer(made, nn.CrossEntropyLoss(), SGD, seed=3, **layout)
            generator = torch.Generator().manual_seed(2)
            losses = []
            for size in (24, 19, 17):
                inputs = torch.randn(size, 6, generator=generator)
                losses.append(trainer.step((inputs, torch.arange(size) % 10)))
            found[name, schedule] = losses, trainer.digest(), trainer.optimizer_digest()
    return found


@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (3, "zero-bubble")])
def test_what_crosses_a_boundary_changes_no_bit(ranks, alone, stages, schedule):
    for results in ranks(trained, stages, stages, (schedule,)):
        for (name, _), result in results.items():
            assert result == alone[name, None], name


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks(trained, 1, 1, (None,))[0]


def test_recomputing_changes_no_bit(ranks, alone):
    schedule = "zero-bubble"
    names = ("tied, cast", "transformer", "repeated", "recomputed")
    recompute = partial(trained, names=names, activation_checkpointing=True)
    for results in ranks(recompute, 2, 2, (schedule,)):
        assert results == {(name, schedule): alone[name, None] for name in names}


class Hidden(nn.Module):
    """Counts its calls in forward and backward; remembers an activation inside it weakly."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 6)
        self.calls = [0, 0]
        self.given = []
        self.alive = []

    def forward(self, x):
        self.calls[is_in_backward()] += 1
        hidden = torch.tanh(self.norm(self.first(x)))
        if self.training and not is_in_backward():
            self.given.append(weakref.ref(hidden))
            hidden.register_hook(lambda _: self.alive.append(self.living()))
        return self.second(hidden)

    def living(self):
        return sum(each() is not None for each in self.given)


def test_a_stage_that_recomputes_lets_go_of_activations(ranks):
    def train(recompute):
        model = nn.Sequential(Hidden(), Hidden())
        layout = {
            "pipeline": ls.PipelineConfig(stages=2, schedule="gpipe", balance=[1, 1]),
            "activation_checkpointing": recompute,
            "audit": False,
        }
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=4, **layout)
        batch = torch.randn(16, 6), torch.arange(16) % 6
        trainer.step(batch)
        trainer.evaluate(TensorDataset(*batch), 16)
        mine = model[ls.rank()]
        counted = int(mine.norm.num_batches_tracked)
        return mine.calls, max(mine.alive), counted

    def both():
        return train(True), train(False)

    for found in ranks(both, 2):
        assert found == (([8, 4], 0, 1), ([8, 0], 3, 1))


def test_a_stage_that_fails_stops_every_rank_with_its_place_and_training_can_go_on(ranks):
    class Fails(nn.Module):
        armed = True

        def forward(self, x):
            if self.armed and x[0, 0].item() > 0:
                raise ValueError("boom")
            return x

    def train():
        torch.manual_seed(1)
        first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        fails = Fails()
        model = nn.Sequential(first, fails, nn.Linear(6, 3))
        options = {"pipeline": ls.PipelineConfig(stages=2, schedule="1f1b", balance=[1, 2])}
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=4, **options)
        before = trainer.digest()
        said = ""
        with pytest.raises((ValueError, ls.LockstepError)) as caught:
            trainer.step(rows()[:16])
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        after = trainer.digest()
        fails.armed = False
        trainer.step(rows()[:16])
        return before == after, type(caught.value).__name__, said, trainer.digest()

    found = ranks(train, 4)
    assert {same for same, _, _, _ in found} == {True}
    assert len({digest for *_, digest in found}) == 1
    assert {kind for _, kind, _, _ in found} == {"ValueError", "StoppedError"}
    for rank, (_, kind, said, _) in enumerate(found):
        assert "stage 1, step 0, micro-batch" in said
        assert said.startswith("boom" if kind == "ValueError" else f"rank {rank} stopped because")


def test_a_failure_in_one_stage_is_reported_as_that_ranks(ranks):
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("boom")

    def train():
        model = nn.Sequential(nn.Linear(6, 6), Fails(), nn.Linear(6, 3))
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, pipeline=ls.PipelineConfig(stages=2, balance=[1, 2])
        )
        trainer.step(rows()[:16])

    with pytest.raises(RankError, match=r"^rank 1 raised ValueError: boom") as caught:
        ranks(train, 2)
    assert "in rank 1, stage 1, step 0, micro-batch 0" in "".join(caught.value.__notes__)


def test_a_loss_that_is_no_number_stops_every_stage_before_the_weights_change(ranks, tmp_path):
    def train():
        os.chdir(tmp_path)
        model = small_model()
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, pipeline=ls.PipelineConfig(stages=2)
        )
        inputs, targets = rows()[:16]
        trainer.step((inputs, targets))
        before = trainer.digest()
        inputs[9] = float("nan")
        with pytest.raises(LossError, match="step 1, micro-batch 4: the loss is nan") as caught:
            trainer.step((inputs, targets))
        assert "training stopped" in str(caught.value)
        return before == trainer.digest()

    assert ranks(train, 2) == [True, True]


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_a_killed_stage_is_named(ranks, tmp_path, backend):
    class Dies(nn.Module):
        def forward(self, x):
            if ls.rank() == 1 and Path("die").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return x

    def train(folder):
        os.chdir(folder)
        model = nn.Sequential(nn.Linear(6, 6), Dies(), nn.Linear(6, 3))
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, pipeline=ls.PipelineConfig(stages=2, balance=[1, 2])
        )
        trainer.step(rows()[:16])
        Path("die").touch()
        trainer.step(rows()[:16])

    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        ranks(train, 2, tmp_path, backend=backend)


def test_on_gloo_the_bits_are_the_same(ranks, alone):
    names = ("skip", "recomputed")
    for found in ranks(partial(trained, 2, ("1f1b",), names), 2, backend="gloo"):
        assert found == {(name, "1f1b"): alone[name, None] for name in names}


def refusals():
    """Return what is said to a model or a layout that cannot be cut."""
    sequence = small_model()
    loss = nn.CrossEntropyLoss()

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.two = nn.Linear(6, 3)

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    class Doubled(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    def said(model, use=lambda trainer: None, extra_modules=(), stages=2, **stage_options):
        pipeline = ls.PipelineConfig(stages, **stage_options)
        with pytest.raises(ls.LockstepError) as caught:
            use(ls.Trainer(model, loss, SGD, extra_modules=extra_modules, pipeline=pipeline))
        return str(caught.value)

    class Draws(nn.Module):
        def forward(self, x):
            return x * random.random()

    batch = rows()[:16]
    return [
        said(sequence, stages=3),
        said(Opaque()),
        said(Opaque(), blocks=["one", "three"]),
        said(
            Opaque(),
            blocks=["one", "two"],
            use=lambda trainer: trainer.step(batch),
        ),
        said(sequence, schedule="2f2b"),
        said(sequence, balance=[1, 1]),
        said(nn.Sequential(nn.Linear(6, 3))),
        said(Doubled(nn.Linear(6, 3), nn.Linear(3, 3)), balance=[1, 1]),
        said(torch.fx.symbolic_trace(sequence), balance=[2, 3]),
        said(
            nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)),
            blocks=["0", "1"],
            balance=[1, 1],
            use=lambda trainer: trainer.step(batch),
        ),
        said(sequence, stages_per_rank=2),
        said(sequence, extra_modules=[nn.Linear(1, 1)]),
        said(sequence, use=lambda trainer: trainer.manual_step()),
        said(
            nn.Sequential(nn.Linear(6, 3), Draws()),
            balance=[1, 1],
            use=lambda trainer: trainer.step(batch),
        ),
    ]


def test_what_cannot_be_cut_is_refused_by_name(ranks):
    expected = [
        "2 rank(s) cannot hold replicas of 3 stages",
        "Opaque does not define how to split it into 2 stages",
        "the model Opaque has no module 'three'",
        "Opaque does more than call its blocks one after another: it calls torch.tanh",
        "there is no schedule '2f2b'",
        "balance=[1, 1] must hold the number of blocks of each of 2 stages, 5 blocks in total",
        "1 blocks cannot be split into 2 stages",
        "Doubled overrides forward and does not define how to split it into 2 stages",
        "a traced or exported model is one graph, which is not split into 2 stages",
        "the forward of Sequential does more than call its blocks one after another",
        "stages_per_rank=2 needs schedule",
        "cannot be split into stages: train them with stages=1",
        "a manual step needs the whole model on every rank",
        "a block draws from Python's or numpy's random numbers",
    ]
    for found in ranks(refusals, 2):
        for said, part in zip(found, expected, strict=True):
            assert part in said


def test_a_record_says_stages_and_the_digest_of_all_of_them(ranks, tmp_path):
    def train():
        layout = {
            "pipeline": ls.PipelineConfig(stages=2, schedule="1f1b"),
            "loggers": tmp_path / "run",
        }
        with ls.Trainer(small_model(), nn.CrossEntropyLoss(), SGD, **layout) as trainer:
            trainer.step(rows()[:16])
            return trainer.digest(), trainer.optimizer_digest()

    for digest, optimizer_digest in ranks(train, 2):
        lines = (tmp_path / "run/record.jsonl").read_bytes().splitlines()
        first = orjson.loads(lines[0])
        last = orjson.loads(lines[-1])
        assert first["layout"]["stages"] == 2
        assert (last["digest"], last["optimizer_digest"]) == (digest, optimizer_digest)


def count_threads_and_descriptors():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_trainers_with_as_many_stages_keep_one_group(ranks):
    def counts():
        found = []
        for _ in range(3):
            trainer = ls.Trainer(
                small_model(), nn.CrossEntropyLoss(), SGD,
                pipeline=ls.PipelineConfig(stages=2, balance=[2, 3]),
            )  # fmt: skip
            trainer.step(rows()[:16])
            trainer.finish()
            found.append(count_threads_and_descriptors())
        return found

    for first, *others in ranks(counts, 2):
        assert others == [first, first]
