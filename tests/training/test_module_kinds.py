"""Unusual parameters, buffers and losses train with the same bits in every layout."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import LayoutError, LossError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STAGES: dict[str, Any] = {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])}
SHARED: dict[str, Any] = {"storage": "shared"}


class Masked(nn.Module):
    """Has an expanded buffer, a lazily conjugated one, and an expanded frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([[1.0, 2.0, 0.5, 1.0]]).expand(8, 4))
        self.register_buffer("phase", torch.complex(torch.ones(4), torch.arange(4.0)).conj())
        self.scale = nn.Parameter(torch.tensor(3.0).expand(4), requires_grad=False)

    def forward(self, inputs):
        return self.layer(inputs) * self.mask[0] * self.scale * self.phase.imag


class Adapted(nn.Module):
    """Trains two small matrices beside a frozen layer of 8-bit integers and other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)
        values = torch.randn(4, 6)
        frozen = {
            "weight": (values * 10).to(torch.int8),
            "scale": (values[0] * 9).to(torch.float8_e4m3fn),
            "phase": torch.complex(values[0], values[1]),
            "mask": values > 0,
        }
        for name, value in frozen.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, inputs):
        inputs = inputs * self.scale.float() * self.phase.imag
        return inputs @ (self.weight.float() * self.mask).t() + self.up(self.down(inputs))


class OwnLoss(nn.Linear):
    """Returns its loss in the way that its name says."""

    def __init__(self, kind: str) -> None:
        super().__init__(6, 4)
        self.kind = kind

    def forward(self, inputs, targets):
        outputs = super().forward(inputs)
        return RETURNS[self.kind](nn.functional.cross_entropy(outputs, targets), outputs)


RETURNS = {
    "tensor": lambda loss, outputs: loss,
    "tuple": lambda loss, outputs: (loss, outputs, outputs.detach().mean()),
    "mapping": lambda loss, outputs: {"outputs": outputs, "loss": loss},
    "object": lambda loss, outputs: SimpleNamespace(loss=loss, outputs=outputs),
}


def loss_of(kind: str):
    def loss(outputs, targets):
        return RETURNS[kind](nn.functional.cross_entropy(outputs, targets), outputs)

    return loss


class Named(nn.Sequential):
    """A sequence that makes its own layers, whose children are its blocks."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)),
            nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 4)),
        )
        self.note = "an attribute"


class Case:
    """A training: its model, its loss, and the Trainer's other arguments."""

    def __init__(self, model, loss=nn.CrossEntropyLoss, **options) -> None:
        self.model = model
        self.loss = loss
        self.options = options

    def train(self, layout: dict[str, Any]) -> list[Any]:
        torch.manual_seed(1)
        trainer = ls.Trainer(self.model(), self.loss(), SGD, **self.options, **layout)
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(2, 13, 6, generator=generator)
        targets = torch.arange(26).view(2, 13) % 4
        found = [trainer.step(batch) for batch in zip(inputs, targets, strict=True)]
        found += [trainer.digest(), trainer.optimizer_digest()]
        trainer.load_state_dict(trainer.state_dict())
        found.append(trainer.step((inputs[0], targets[0])))
        if trainer.ema_model is not None:
            found.append(ls.digest(trainer.engine.state.model_state(ema=True)))
        return [*found, trainer.digest()]


def normed() -> nn.Module:
    with warnings.catch_warnings():  # torch recommends the one in nn.utils.parametrizations
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(6, 6))


CASES = {
    "expanded": Case(lambda: nn.Sequential(nn.Linear(6, 6), Masked()), ema_decay=0.9),
    "adapted": Case(lambda: nn.Sequential(nn.Linear(6, 6), Adapted()), ema_decay=0.9),
    "normed": Case(lambda: nn.Sequential(normed(), nn.Linear(6, 4)), ema_decay=0.9),
    "named": Case(Named),
    "loss": Case(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), partial(loss_of, "tuple")
    ),
}


def train_all(layouts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {
        f"{name} {layout}": case.train(layout) for name, case in CASES.items() for layout in layouts
    }


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks(train_all, 1, [{}])[0]


@pytest.mark.parametrize(("n", "layouts"), [(2, [{}, STAGES, SHARED]), (3, [{}])])
def test_every_layout_has_the_bits_of_one_process(ranks, alone, n, layouts):
    for found in ranks(train_all, n, layouts):
        for name, bits in found.items():
            assert bits == alone[f"{name.split()[0]} {{}}"], name


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(48.0).view(8, 6) / 48, torch.arange(8) % 4


@pytest.mark.usefixtures("world_of_one")
def test_the_average_copies_what_it_cannot_average_and_can_be_evaluated():
    torch.manual_seed(1)
    model = nn.Sequential(normed(), Adapted())
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, ema_decay=0.5)
    for _ in range(3):
        trainer.step(batch())
    averaged = trainer.ema_model
    assert torch.equal(averaged[1].weight, model[1].weight)
    assert not torch.equal(averaged[0].weight_v, model[0].weight_v)
    dataset = torch.utils.data.TensorDataset(*batch())
    result, plain = (trainer.evaluate(dataset, 8, ema=ema) for ema in (True, False))
    assert result.loss != plain.loss
    with torch.no_grad():
        expected = nn.functional.cross_entropy(averaged(batch()[0]), batch()[1])
    assert result.loss == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.usefixtures("world_of_one")
def test_a_loss_is_found_in_what_a_model_or_a_loss_function_returns():
    def train(kind, is_own):
        torch.manual_seed(1)
        model, loss = (OwnLoss(kind), None) if is_own else (nn.Linear(6, 4), loss_of(kind))
        trainer = ls.Trainer(model, loss, SGD)
        if not is_own:
            dataset = torch.utils.data.TensorDataset(*batch())
            return trainer.step(batch()), trainer.evaluate(dataset, 8).loss, trainer.digest()
        inputs, targets = batch()
        return trainer.step({"inputs": inputs, "targets": targets}), trainer.digest()

    for is_own in (True, False):
        assert len({train(kind, is_own) for kind in RETURNS}) == 1


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda loss, outputs: {"loss": None}, "a dict has the loss None: put the targets into"),
        (lambda loss, outputs: (loss, loss * 2), "any of several numbers in a tuple could be"),
        (lambda loss, outputs: (outputs, loss), "not a tuple that begins with .1, 4. float32"),
        (lambda loss, outputs: {"logits": outputs}, "not a dict of 'logits'"),
        (lambda loss, outputs: "no loss", "the model must return its loss"),
    ],
)
def test_what_is_no_loss_is_explained(monkeypatch, returned, sentence):
    monkeypatch.setitem(RETURNS, "wrong", returned)
    trainer = ls.Trainer(OwnLoss("wrong"), None, SGD)
    with pytest.raises(LossError, match=sentence):
        trainer.step(batch())


@pytest.mark.usefixtures("world_of_one")
def test_backward_of_a_tuple_in_a_manual_step_is_explained():
    trainer = ls.Trainer(OwnLoss("tuple"), None, SGD)

    def step():
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch()):
                step.backward(trainer.model(inputs, targets))

    with pytest.raises(LossError, match="a tuple, not a tensor: pass the loss in it"):
        step()


def test_a_frozen_parameter_that_cannot_be_shared_is_refused_once_it_has_a_gradient(ranks):
    def unfreeze():
        model = Adapted()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, **SHARED)
        trainer.step(batch())
        model.phase.requires_grad_(True)
        before = trainer.digest()
        with pytest.raises(LayoutError) as raised:
            trainer.step(batch())
        return str(raised.value), trainer.digest() == before

    for said, is_unchanged in ranks(unfreeze, 2):
        assert said.startswith("parameter phase (torch.complex64) was frozen when the training")
        assert is_unchanged


class Exported(nn.Linear):
    """Behaves as the `.module()` of a `torch.export.ExportedProgram`."""

    def train(self, mode=True):
        raise NotImplementedError("Calling train() is not supported yet.")


@pytest.mark.usefixtures("world_of_one")
def test_an_exported_model_trains_and_says_why_it_cannot_be_evaluated():
    model = nn.Sequential(nn.Dropout(0.1), Exported(6, 4))
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    trainer.step(batch())
    dataset = torch.utils.data.TensorDataset(*batch())
    with pytest.raises(UsageError, match="stays in the mode in which it was exported: evaluate"):
        trainer.evaluate(dataset, 8)
    assert all(module.training for module in model.modules())


@pytest.mark.usefixtures("world_of_one")
def test_what_is_no_model_is_refused():
    class ExportedProgram:
        """Has the name of torch's."""

    for model, advice in [(ExportedProgram(), r"its \.module"), (nn.Linear, "a torch.nn.Module")]:
        with pytest.raises(UsageError, match=f"^the model is of type .*: pass {advice}"):
            ls.Trainer(model, nn.MSELoss(), SGD)
