"""float16 autocast: the scale of the loss, and steps that are skipped where gradients overflow."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lockstep as ls
from lockstep.kernel.errors import DisagreementError, GradientError, UsageError

SGD = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
STEPS = 12
LARGE = 30.0  # of the loss: its gradients overflow float16 until the scale has been halved
LIMIT = 20.0  # of the norm: some gradients are clipped


class Normed(nn.Sequential):
    """Has buffers, which a skipped step updates as a forward in plain PyTorch does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4))


def large_loss(outputs, targets):
    return LARGE * nn.functional.cross_entropy(outputs, targets)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(24, 6, generator=generator), torch.arange(24) % 4) for _ in range(STEPS)]


def make(results: list[Any], interval: int = 3, **options) -> ls.Trainer:
    torch.manual_seed(1)
    optimizer = ls.OptimizerConfig(SGD, scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.9))
    options = {"loss": large_loss, "ema_decay": 0.9} | options
    trainer = ls.Trainer(
        options.pop("model", Normed)(), options.pop("loss"), optimizer,
        autocast_dtype=torch.float16, callbacks=[results.append], **options,
    )  # fmt: skip
    trainer.parallel.loss_scale.interval = interval
    return trainer


def bits(trainer: ls.Trainer, results: list[Any]) -> list[Any]:
    rows = [(r.loss, str(r.norm), r.lr, r.loss_scale, r.is_skipped) for r in results]
    ema = ls.digest(trainer.engine.state.model_state(ema=True))
    return [rows, trainer.digest(), trainer.optimizer_digest(), ema]


def train_by_hand(trainer: ls.Trainer, batch) -> None:
    with trainer.manual_step() as step:
        for inputs, targets in step.microbatches(batch):
            outputs = trainer.model(inputs)
            step.backward(large_loss(outputs, targets) / 2, retain_graph=True)
            step.backward(large_loss(outputs, targets) / 2)


def train(layout: dict[str, Any], by_hand: bool = False) -> list[Any]:
    results: list[Any] = []
    trainer = make(results, max_grad_norm=LIMIT, **layout)
    for number, batch in enumerate(batches()):
        if by_hand:
            train_by_hand(trainer, batch)
        else:
            trainer.step(batch)
        if number == 4:  # go on from a state, with another trainer, one step before the scale grows
            state = trainer.state_dict()
            trainer = make(results, max_grad_norm=LIMIT, **layout)
            trainer.load_state_dict(state)
    return bits(trainer, results)


STAGES = {"pipeline": ls.PipelineConfig(stages=2, balance=[2, 2], blocks=["0", "1", "2", "3"])}
SHARED = {"storage": "shared"}
LAYOUTS: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{}, STAGES, SHARED], 3: [{}], 4: [STAGES]}


def train_all(layouts: list[dict[str, Any]]) -> list[Any]:
    return [*map(train, layouts), train({}, by_hand=True)]


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks(train_all, 1, [{}])[0]


def test_a_training_alone_skips_steps_and_doubles_the_scale(alone):
    _, norms, rates, scales, skipped = zip(*alone[0][0], strict=True)
    assert scales[0] == 65536
    assert skipped[0]
    assert skipped[5:8] == (False, False, True)  # the scale was doubled, and was too large
    assert any(norm not in ("nan", "inf") and float(norm) > LIMIT for norm in norms)
    for scale, following, is_skipped in zip(scales, scales[1:], skipped, strict=False):
        assert following == scale / 2 if is_skipped else following in (scale, scale * 2)
    assert scales[6] > scales[5]
    for rate, following, is_skipped in zip(rates, rates[1:], skipped, strict=False):
        assert following == rate if is_skipped else following < rate


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_layout_has_the_bits_of_one_process(ranks, alone, n):
    for found in ranks(train_all, n, LAYOUTS[n]):
        *of_layouts, by_hand = found
        assert of_layouts == [alone[0]] * len(LAYOUTS[n])
        assert by_hand == alone[1]


@pytest.mark.usefixtures("world_of_one")
def test_one_micro_batch_has_the_bits_of_torchs_scaler():
    results: list[Any] = []
    trainer = make(results, microbatches=1)
    for batch in batches():
        trainer.step(batch)

    torch.manual_seed(1)
    model = Normed()
    optimizer = SGD(model.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scales = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = large_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
        if scaler.get_scale() >= scales[-1]:
            scheduler.step()
    assert [result.loss_scale for result in results] == scales
    assert sum(result.is_skipped for result in results) > 1
    assert trainer.digest() == ls.digest(model.state_dict())


class Broken(torch.autograd.Function):
    """Is the identity with a gradient that is never a number."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Unlearnable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)

    def forward(self, inputs):
        return Broken.apply(super().forward(inputs))


@pytest.mark.usefixtures("world_of_one")
def test_a_gradient_that_no_scale_makes_finite_ends_the_training(tmp_path):
    results: list[Any] = []
    trainer = make(results, model=Unlearnable, loggers=tmp_path / "run")
    before = trainer.digest()
    batch = batches()[0]
    for _ in range(16):
        trainer.step(batch)
    with pytest.raises(GradientError, match=r"step 16: .* is nan with a loss scale of 1;"):
        trainer.step(batch)
    assert [result.loss_scale for result in results] == [2.0**n for n in range(16, 0, -1)]
    assert trainer.digest() == before
    trainer.finish("failed")
    lines = (tmp_path / "run" / "record.jsonl").read_text().splitlines()
    first = next(step for line in lines if (step := json.loads(line))["kind"] == "step")
    assert (first["loss_scale"], first["is_skipped"], first["norm"]) == (65536, True, None)


@pytest.mark.usefixtures("world_of_one")
def test_float16_parameters_are_refused_by_name():
    with pytest.raises(
        UsageError, match=r"the parameter 0\.weight is float16, and autocast_dtype="
    ):
        make([], model=lambda: nn.Sequential(nn.Linear(6, 4).half()))


def test_ranks_with_different_scales_disagree(ranks):
    def differ():
        trainer = make([])
        if ls.rank() == 1:
            trainer.parallel.loss_scale.value = 2.0
        with pytest.raises(DisagreementError) as raised:
            trainer.step(batches()[0])
        return str(raised.value)

    for said in ranks(differ, 2):
        assert "micro-batches and a loss scale of 2 while rank 0 is in step 0" in said


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs):
        return inputs @ self.weight


def train_tied(stages: int) -> str:
    """Train with a weight of 16 KiB in the first and the last block."""
    torch.manual_seed(1)
    first = nn.Linear(64, 64)
    pipeline = ls.PipelineConfig(stages=stages, balance=[1, 1] if stages > 1 else None)
    trainer = ls.Trainer(
        nn.Sequential(first, Transposed(first.weight)), nn.MSELoss(), SGD,
        autocast_dtype=torch.float16, pipeline=pipeline,
    )  # fmt: skip
    for _ in range(3):
        trainer.step((torch.ones(8, 64), torch.ones(8, 64)))
    return trainer.digest()


def test_tied_gradients_are_sent_before_the_scale_is_removed(ranks):
    (expected,) = ranks(train_tied, 1, 1)
    assert ranks(train_tied, 2, 2) == [expected, expected]
