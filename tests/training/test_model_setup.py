"""The beginning of a training: a block has memory only where it is held."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.launcher import world as joined

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Calibrated(nn.Linear):
    """Looks at its weights when it is made, which the meta device does not allow."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.largest = self.weight.abs().max().item()


class Fixed(nn.Module):
    """Has a parameter in memory on any device."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size, device="cpu"))

    def forward(self, inputs):
        return inputs * self.scale


def asleep() -> nn.Module:
    with torch.device("meta"):
        return nn.LSTM(8, 8)


BLOCKS = [
    partial(nn.Linear, 6, 8),
    partial(nn.BatchNorm1d, 8),
    partial(Calibrated, 8, 8),
    partial(Fixed, 8),
    partial(nn.Dropout, 0.2),
    partial(nn.Linear, 8, 3),
]


def noting(block, alive: list[bool]):
    def made() -> nn.Module:
        module = block()
        alive.extend(not each.is_meta for each in list(module.parameters())[:1])
        return module

    return made


def trained(**layout) -> tuple[list[list[bool]], list[str], list[object]]:
    """Return where weights were made at first, what has memory then, and the bits of two steps."""
    notes: list[list[bool]] = [[] for _ in BLOCKS]
    blocks = [noting(*pair) for pair in zip(BLOCKS, notes, strict=True)]
    trainer = ls.Trainer(
        blocks, nn.CrossEntropyLoss(), SGD, seed=5, microbatches=4, max_grad_norm=1.0, **layout
    )
    alive = [name for name, each in trainer.module.state_dict().items() if not each.is_meta]
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(2, 9, 6, generator=generator)
    targets = torch.arange(18).view(2, 9) % 3
    losses = [trainer.step(batch) for batch in zip(inputs, targets, strict=True)]
    return notes, alive, [losses, trainer.digest(), trainer.optimizer_digest()]


def test_the_same_bits_with_blocks_alive_on_their_ranks_alone(ranks, capfd):
    def rank():
        given = trained(pipeline=ls.PipelineConfig(stages=2, balance=[3, 3]))
        interleaved = trained(
            pipeline=ls.PipelineConfig(
                stages=2, schedule="interleaved", stages_per_rank=2, balance=[1, 2, 2, 1]
            )
        )
        return given, interleaved, trained(pipeline=ls.PipelineConfig(stages=2))[-1]

    ((notes, alive, bits),) = ranks(trained, 1)
    assert notes == [[True]] * 4 + [[], [True]]
    assert {name[0] for name in alive} == {"0", "1", "2", "3", "5"}
    # Block 2 fails on the meta device, and is made and freed; 3 has memory in any case.
    made = [[[True]] * 4 + [[], [False]], [[False], [False], [True], [True], [], [True]]]
    for position, (given, interleaved, measured) in enumerate(ranks(rank, 4)):
        assert given[0] == made[position % 2]
        assert {name[0] for name in given[1]} == [{"0", "1", "2"}, {"3", "5"}][position % 2]
        assert {name[0] for name in interleaved[1]} == [{"0", "3"}, {"1", "2", "5"}][position % 2]
        assert given[-1] == interleaved[-1] == measured == bits
    measured_line = (
        r"^measured 6 blocks in [\d.]+ s: [\d, ]+ and \d blocks per stage, schedule [a-z0-9-]+$"
    )
    assert len(re.findall(measured_line, capfd.readouterr().err, re.MULTILINE)) == 1


def test_the_first_rank_with_a_weight_gives_it_to_those_that_need_it(ranks):
    def rank():
        number = ls.rank()
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(6, 8), asleep(), nn.Linear(8, 8))
        if number == 1:
            model[1] = nn.LSTM(8, 8)
        if number != 2:
            with torch.device("meta"):
                model[2] = nn.Linear(8, 8)
        weights = [each.detach().clone() for each in model.parameters()]
        whole = ls.Trainer(model, nn.MSELoss(), SGD).module
        return weights, [each.detach().clone() for each in whole.parameters()]

    given, agreed = zip(*ranks(rank, 3), strict=True)
    wanted = [*given[0][:2], *given[1][2:6], *given[2][6:]]
    assert not any(each.is_meta for each in wanted)
    for here in agreed:
        assert all(torch.equal(*pair) for pair in zip(here, wanted, strict=True))


def test_a_stage_is_given_to_its_replicas_alone(ranks):
    def rank():
        number = ls.rank()
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        if number != 1:
            with torch.device("meta"):
                model[1] = nn.BatchNorm1d(8)
        else:
            nn.init.normal_(model[1].weight)
        trainer = ls.Trainer(
            model, nn.MSELoss(), SGD, pipeline=ls.PipelineConfig(stages=2, balance=[1, 1])
        )
        state = model.state_dict()
        held = {name: each.clone() for name, each in state.items() if not each.is_meta}
        return held, trainer.digest()

    held, digests = zip(*ranks(rank, 4), strict=True)
    assert len(set(digests)) == 1
    assert [{name[0] for name in each} for each in held] == [{"0"}, {"1"}] * 2
    for mine, peers in ((held[0], held[2]), (held[1], held[3])):
        assert ls.digest(mine) == ls.digest(peers)
    assert not torch.equal(held[3]["1.weight"], torch.ones(8))


def test_blocks_that_nobody_has_are_refused(ranks):
    def rank():
        with pytest.raises(UsageError, match=r"^weight_ih_l0 is on the meta device on every"):
            ls.Trainer(nn.Linear(6, 8), nn.MSELoss(), SGD, extra_modules=[asleep()])

    ranks(rank, 2)


def test_blocks_that_share_a_tensor_come_to_life_together(ranks):
    def rank():
        with torch.device("meta"):
            first = nn.Linear(6, 6, bias=False)
            last = nn.Linear(6, 6, bias=False)
        last.weight = first.weight
        blocks = [nn.Tanh(), first, last, nn.Tanh()]
        layout = {
            "pipeline": ls.PipelineConfig(stages=2, schedule="interleaved", balance=[1, 1, 1, 1])
        }
        layout = layout if joined.world().world_size == 2 else {}
        trainer = ls.Trainer(blocks, nn.MSELoss(), SGD, seed=3, **layout)
        assert first.weight is last.weight
        assert not first.weight.is_meta
        inputs = torch.linspace(-1, 1, 48).view(8, 6)
        return trainer.step((inputs, inputs)), trainer.digest()

    (alone,) = ranks(rank, 1)
    assert ranks(rank, 2) == [alone, alone]


def tied_by_memory():
    """Return a model whose linear layers have one weight."""
    torch.manual_seed(2)
    first = nn.Linear(6, 6)
    last = nn.Linear(6, 6)
    last.weight.data = first.weight.data
    return nn.Sequential(first, nn.Tanh(), last)


def test_parameters_over_one_memory_stay_tied_on_every_number_of_ranks(ranks):
    def rank():
        model = tied_by_memory()
        trainer = ls.Trainer(model, nn.MSELoss(), SGD, ema_decay=0.9)
        inputs = torch.linspace(-1, 1, 108).view(18, 6)
        losses = [trainer.step((inputs, inputs)) for _ in range(3)]
        tied = model[0].weight.data_ptr() == model[2].weight.data_ptr()
        return tied, losses, trainer.digest(), trainer.optimizer_digest()

    (alone,) = ranks(rank, 1)
    assert alone[0]
    assert ranks(rank, 3) == [alone] * 3


def test_parameters_over_one_memory_are_refused_where_they_would_lose_it(ranks):
    """With shared=True and with stages each got memory of its own, and other bits."""

    def rank():
        said = []
        for layout in (
            {"storage": "shared"},
            {"storage": "sharded"},
            {"pipeline": ls.PipelineConfig(stages=2)},
            {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 2])},
        ):
            with pytest.raises(LayoutError) as raised:
                ls.Trainer(tied_by_memory(), nn.MSELoss(), SGD, **layout)
            said.append(str(raised.value))
        return said

    for said in ranks(rank, 2):
        for each in said:
            assert each.startswith("0.weight and 2.weight are different tensors over the same mem")
            assert "(2.weight = 0.weight)" in each


def test_the_weight_that_spectral_norm_computes_may_be_shared(ranks):
    def rank(storage):
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
        options = {"microbatches": 4, "loggers": (), "storage": storage}
        trainer = ls.Trainer(model, nn.MSELoss(), SGD, **options)
        for _ in range(2):
            trainer.step((torch.ones(8, 4), torch.zeros(8, 4)))
        return trainer.digest()

    (alone,) = ranks(rank, 1, "replicated")
    assert ranks(rank, 2, "shared") == [alone] * 2


def test_an_attribute_over_the_memory_of_a_parameter_is_named(ranks):
    def rank():
        model = nn.Linear(4, 4)
        model.first_row = model.weight.data[0]
        with pytest.raises(LayoutError) as raised:
            ls.Trainer(model, nn.MSELoss(), SGD, storage="shared")
        return str(raised.value)

    for said in ranks(rank, 2):
        assert "weight and first_row are different tensors over the same memory" in said
        assert "delete first_row, or compute it in forward, or let one be a copy" in said


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Linear(4, 4)
        self.mask = nn.Linear(3, 4)

    def forward(self, ids, mask, labels=None):
        outputs = torch.tanh(self.ids(ids) + self.mask(mask))
        return outputs if labels is None else (outputs, labels)


class Loss(nn.Module):
    def forward(self, both):
        return F.cross_entropy(*both)


def test_a_list_of_blocks_takes_several_inputs_in_every_layout(ranks):
    """It took them in stages with `balance` only, and raised a TypeError elsewhere."""
    inputs = torch.arange(32.0).reshape(8, 4) % 7 - 3
    targets = torch.arange(8) % 4
    mask = torch.arange(24.0).reshape(8, 3) % 5 - 2
    triple = inputs, mask, targets
    named = {"ids": inputs, "mask": mask, "labels": targets}

    def rank(**pipeline):
        results = []
        for last, loss, batch in ((nn.Tanh, F.cross_entropy, triple), (Loss, None, named)):
            trainer = ls.Trainer(
                [Sum, nn.Identity, last],
                loss,
                SGD,
                microbatches=4,
                pipeline=ls.PipelineConfig(**pipeline),
                loggers=[],
            )
            results += [trainer.step(batch), trainer.step(batch), trainer.digest()]
        return results

    (alone,) = ranks(rank, 1)
    assert ranks(rank, 2) == [alone] * 2
    assert ranks(partial(rank, stages=2), 2) == [alone] * 2
    assert ranks(partial(rank, stages=2, balance=[1, 2]), 2) == [alone] * 2
