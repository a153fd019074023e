"""A resumed training finds every buffer that a step writes as it was saved."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import UsageError

ADAM = partial(torch.optim.Adam, lr=0.05)
LAYOUTS = [
    (1, {}),
    (2, {}),
    (2, {"storage": "shared"}),
    (2, {"pipeline": ls.PipelineConfig(stages=2, balance=[2, 1])}),
    (2, {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 2])}),
    (4, {"pipeline": ls.PipelineConfig(stages=2)}),
]


class Drift(nn.Module):
    """Subtracts a moving average of its inputs, which its state dict leaves out."""

    lockstep_buffer_rules = {"mean": "mean"}

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width), persistent=False)

    def forward(self, inputs):
        outputs = inputs - self.mean
        self.mean = 0.5 * self.mean + 0.5 * inputs.detach().mean(dim=0)
        return outputs


class Centred(nn.Module):
    """A loss with a persistent and a non-persistent buffer."""

    lockstep_buffer_rules = {"centre": "mean", "steps": "equal"}

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, outputs, targets):
        loss = F.cross_entropy(outputs - self.centre / (1 + self.steps), targets)
        self.centre = 0.5 * self.centre + 0.5 * outputs.detach().mean(dim=0)
        self.steps = self.steps + 1
        return loss


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 6, generator=generator)
    return inputs, torch.randint(0, 3, (24,), generator=generator)


def trained(layout, path, begin, end):
    """Train the steps from `begin` to `end`; load before and save after where there are others."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 5), Drift(5), nn.Linear(5, 3))
    trainer = ls.Trainer(model, Centred(), ADAM, ema_decay=0.5, **layout)
    if begin:
        trainer.load_state_dict(torch.load(path, weights_only=True))
    losses = [trainer.evaluate(list(zip(*batch(9), strict=True)), 24, ema=True).loss]
    losses += [trainer.step(batch(step)) for step in range(begin, end)]
    state = trainer.state_dict()
    if not begin and ls.rank() == 0:
        torch.save(state, path)
    return losses, {
        name: {key: each.tolist() for key, each in group.items()}
        for name, group in state["buffers"].items()
    }


def test_buffers_of_model_average_and_loss_go_on_in_every_layout(ranks, tmp_path):
    path = tmp_path / "state.pt"
    ((whole, buffers),) = ranks(trained, 1, {}, path, 0, 6)
    assert {name: list(group) for name, group in buffers.items()} == {
        "model": ["1.mean"],
        "average": ["1.mean"],
        "loss": ["centre", "steps"],
    }
    for n in (1, 2, 4):  # all layouts of so many ranks in one launch
        mine = [number for number, (ranks_of, _) in enumerate(LAYOUTS) if ranks_of == n]

        def begin(mine=mine):
            return [trained(LAYOUTS[k][1], tmp_path / str(k), 0, 3)[0] for k in mine]

        for found in ranks(begin, n):
            assert found == [whole[:4]] * len(mine)
    for n in (1, 2, 4):
        mine = [number for number, (ranks_of, _) in enumerate(LAYOUTS) if ranks_of == n]
        cases = [(k, source) for k in mine for source in (k, (k - 2) % len(LAYOUTS))]

        def resume(cases=cases):
            return [trained(LAYOUTS[k][1], tmp_path / str(source), 3, 6) for k, source in cases]

        for found in ranks(resume, n):
            for case, (losses, state) in zip(cases, found, strict=True):
                assert losses[1:] == whole[4:], case
                assert state == buffers, case


def test_buffers_of_the_averaged_weights_are_loaded_before_the_first_step(ranks, tmp_path):
    """Until its first update the average would compute with the buffers that it was made with."""

    def evaluated(path, load):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 5), Drift(5), nn.Linear(5, 3))
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), ADAM, ema_decay=0.5)
        if load:
            trainer.load_state_dict(torch.load(path, weights_only=True))
        else:
            trainer.step(batch(0))
            torch.save(trainer.state_dict(), path)
        return trainer.evaluate(list(zip(*batch(9), strict=True)), 24, ema=True)

    path = tmp_path / "state.pt"
    assert ranks(evaluated, 1, path, False) == ranks(evaluated, 1, path, True)


def test_buffers_of_extra_modules_go_on(ranks, tmp_path):
    path = tmp_path / "state.pt"

    def played(begin, end):
        torch.manual_seed(2)
        model = nn.Linear(6, 3)
        helper = nn.Sequential(nn.BatchNorm1d(6), Drift(6))
        trainer = ls.Trainer(model, None, ADAM, extra_modules=[helper])
        if begin:
            trainer.load_state_dict(torch.load(path, weights_only=True))
        for step in range(begin, end):
            with trainer.manual_step() as turn:
                for inputs, targets in turn.microbatches(batch(step)):
                    turn.backward(F.cross_entropy(model(helper(inputs)), targets))
        if not begin and ls.rank() == 0:
            torch.save(trainer.state_dict(), path)
        return trainer.digest(), [each.tolist() for each in helper.buffers()]

    (whole,) = ranks(played, 1, 0, 6)
    assert ranks(played, 2, 0, 3)[0] != whole
    assert ranks(played, 2, 3, 6) == [whole, whole]


@pytest.mark.usefixtures("world_of_one")
def test_a_state_without_buffers_is_loaded_as_before():
    trainer = ls.Trainer(nn.Sequential(nn.Linear(6, 3), Drift(3)), Centred(), ADAM)
    trainer.step(batch(0))
    state = trainer.state_dict()
    mean = trainer.model[1].mean.clone()
    del state["buffers"]
    trainer.load_state_dict(state)
    assert torch.equal(trainer.model[1].mean, mean)
    assert mean.any()


@pytest.mark.usefixtures("world_of_one")
def test_a_buffer_of_another_shape_is_refused_by_name():
    def trainer(width):
        return ls.Trainer(nn.Linear(6, 3), nn.Sequential(Drift(width)), ADAM)

    state = trainer(5).state_dict()
    with pytest.raises(UsageError, match=r"buffer 0\.mean of loss has shape \(4,\), and \(5,\)"):
        trainer(4).load_state_dict(state)
