"""A model that is changed after the Trainer was made: followed in every layout, or named."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import lockstep as ls
from lockstep.kernel.errors import LayoutError, StateError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SHARED = {"storage": "shared"}
STAGES = {"pipeline": ls.PipelineConfig(stages=2, balance=[2, 2])}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def replace_block(model):
    model[2] = nn.Linear(6, 6)


def replace_block_without_parameters(model):
    model[1] = nn.ReLU()


def replace_parameter(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def load_by_assignment(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def add_parameters(model):
    model[2].scale = nn.Parameter(torch.ones(1))


def remove_block(model):
    del model[2]


def change_dtype(model):
    model[2].double()


def change_strides(model):
    if not model[2].weight.is_meta:  # on the ranks of its stage
        model[2].weight.data = model[2].weight.data.t()


REFUSED = {
    replace_block: "parameter 2.weight was replaced",
    replace_block_without_parameters: "module 1 (Tanh) was replaced",
    replace_parameter: "parameter 2.weight was replaced",
    load_by_assignment: "parameter 0.weight was replaced",
    add_parameters: "parameter 2.scale was added",
    remove_block: "module 2 (Linear) was replaced",
    change_strides: "the parameter 2.weight changed from float32[6, 6] with strides (6, 1)",
}


def freeze(model):
    model[0].requires_grad_(False)


def scale_in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def scale_by_data(model):
    model[0].weight.data.mul_(0.5)


def give_other_memory(model):
    if not model[0].weight.is_meta:
        model[0].weight.data = model[0].weight.data * 0.5


def convert_and_back(model):
    model.double().float()


def add_hook(model):
    model[2].register_forward_hook(lambda module, inputs, output: output * 1.5)


def prune_later(model):
    prune.l1_unstructured(model[2], "weight", amount=0.4)


def parametrize_later(model):
    parametrize.register_parametrization(model[2], "weight", Symmetric())


FOLLOWED = {  # and in which layouts not
    freeze: {},
    scale_in_place: {"shared": "was written after the step before"},
    scale_by_data: {"shared": "was written after the step before"},
    give_other_memory: {"shared": "was given other memory"},
    convert_and_back: {"shared": "was given other memory"},
    change_dtype: {
        "plain": "the parameter 2.weight changed from float32[6, 6] with",
        "shared": "the parameter 2.weight changed from float32[6, 6] with",
        "stages": "the parameter 2.weight changed from float32[6, 6] with",
    },
    add_hook: {},
    prune_later: {"stages": "parameter 2.weight was renamed"},
    parametrize_later: {"stages": "parameter 2.weight was renamed"},
}


def outcomes(over):
    """Return what each change leads to, on this rank: a digest, or what an error said."""
    found = []
    for change in (*REFUSED, *FOLLOWED):
        model = net()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, **over)
        try:
            for number in range(5):
                generator = torch.Generator().manual_seed(number)
                inputs = torch.randn(16, 6, generator=generator)
                trainer.step((inputs, torch.randint(0, 4, (16,), generator=generator)))
                if number == 3:  # after the steps that compare checksums
                    torch.manual_seed(5)
                    change(model)
            found.append(trainer.digest())
        except StateError as error:
            assert trainer.steps == 4
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def of_one_rank(ranks):
    return ranks(outcomes, 1, {})[0]


@pytest.mark.parametrize(
    ("kind", "n", "over"),
    [("plain", 1, {}), ("plain", 2, {}), ("shared", 2, SHARED), ("stages", 2, STAGES)],
)
def test_a_change_between_steps_is_followed_or_named_on_every_rank(
    ranks, of_one_rank, kind, n, over
):
    found = ranks(outcomes, n, over) if (n, over) != (1, {}) else [of_one_rank]
    for said in found:
        refused = {**REFUSED, **{each: texts.get(kind) for each, texts in FOLLOWED.items()}}
        for (change, text), said_of_it, digest in zip(
            refused.items(), said, of_one_rank, strict=True
        ):
            if text is None:
                assert said_of_it == digest, change.__name__
            else:
                assert text in said_of_it, change.__name__
                assert ", step 4: the " in said_of_it


@pytest.mark.usefixtures("world_of_one")
def test_what_forward_adds_without_parameters_is_followed():
    class Growing(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.make = make

        def forward(self, inputs):
            if not hasattr(self, "last"):
                self.last = self.make()
            return self.last(self.linear(inputs))

    batch = torch.ones(8, 6), torch.zeros(8, dtype=torch.long)
    trainer = ls.Trainer(Growing(nn.Tanh), nn.CrossEntropyLoss(), SGD)
    assert trainer.step(batch) > trainer.step(batch)
    trainer = ls.Trainer(Growing(partial(nn.Linear, 4, 4)), nn.CrossEntropyLoss(), SGD)
    with pytest.raises(StateError, match=r"step 0: the parameter last\.w") as raised:
        trainer.step(batch)
    assert raised.value.reason.startswith("the parameter last.weight was added")


def optimizer_groups(over):
    said = []
    for add in ("the model's", "another"):
        model = net()
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), lambda each: torch.optim.SGD(each[1:], lr=0.1), **over
        )
        batch = torch.ones(16, 6), torch.zeros(16, dtype=torch.long)
        trainer.step(batch)
        added = model[0].weight if add == "the model's" else nn.Parameter(torch.ones(3))
        trainer.optimizer.add_param_group({"params": [added], "lr": 0.01})
        try:
            trainer.step(batch)
            said.append(trainer.digest())
        except StateError as error:
            said.append(str(error))
    return said


def test_parameter_groups_that_are_added_later(ranks):
    """A parameter beside the model got this rank's part of its gradient, and kept it."""
    digests = set()
    for n in (1, 2):
        for (own, stranger), shared in ranks(lambda: [*map(optimizer_groups, ({}, SHARED))], n):
            digests.add(own)
            assert "param_groups[1] of the optimizer has a parameter of shape (3,)" in stranger
            assert "trainer.optimizer got a parameter group after the training" in shared[0]
            assert shared[0] == shared[1]
    assert len(digests) == 1


def test_views_of_weights_are_refused_where_they_would_be_left_behind(ranks):
    """A list or a closure went on reading the memory from before the parameters were shared."""

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.views = [self.linear.weight.data.view(-1)]

        def forward(self, inputs):
            return self.linear(inputs) * self.views[0].mean()

    def refused():
        said = []
        for model in (Holding(), nn.Linear(6, 4, bias=False)):
            state = model.state_dict() if isinstance(model, nn.Linear) else None
            try:
                ls.Trainer(model, nn.CrossEntropyLoss(), SGD, **SHARED)
                said.append("")
            except LayoutError as error:
                said.append(str(error))
            del state
            trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), SGD, **SHARED)
            again = ls.Trainer(trainer.module, nn.CrossEntropyLoss(), SGD, **SHARED)
            again.step((torch.ones(8, 6), torch.zeros(8, dtype=torch.long)))
        return said

    for n in (1, 2):
        for first, second in ranks(refused, n):
            assert "something refers to the memory of linear.weight" in first
            assert "something refers to the memory of weight" in second


def test_a_loaded_state_is_no_write_of_shared_parameters(ranks):
    def train():
        trainer = ls.Trainer(net(), nn.CrossEntropyLoss(), SGD, **SHARED)
        state = trainer.state_dict()
        for _ in range(3):
            trainer.step((torch.ones(16, 6), torch.zeros(16, dtype=torch.long)))
            trainer.load_state_dict(state)
        return trainer.digest()

    assert len({*ranks(train, 1), *ranks(train, 2)}) == 1


def test_a_model_that_another_trainer_trains_may_change(ranks):
    """With shared storage, the steps of the other trainer are no writes of several ranks."""

    def train():
        first = net()
        second = nn.Linear(4, 4)
        of_first = ls.Trainer(first, None, SGD, extra_modules=[second], **SHARED)
        of_second = ls.Trainer(second, None, SGD, extra_modules=[first], **SHARED)
        for _ in range(3):
            for trainer in (of_first, of_second):
                with trainer.manual_step() as step:
                    for inputs in step.microbatches(torch.ones(16, 6)):
                        step.backward(second(first(inputs)).square().mean())
        return of_first.digest(), of_second.digest()

    assert len({*ranks(train, 1), *ranks(train, 2)}) == 1


# --- a manual step is open ---------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_what_reads_the_model_is_refused_inside_a_manual_step(tmp_path):
    """It saw the buffers of the rank's last micro-batch."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    trainer, other = (ls.Trainer(model, nn.CrossEntropyLoss(), SGD) for _ in range(2))
    beside = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), SGD)
    batch = torch.randn(16, 6), torch.zeros(16, dtype=torch.long)
    state = trainer.state_dict()
    calls = {
        "evaluate": partial(trainer.evaluate, torch.utils.data.TensorDataset(*batch), 16),
        "digest": trainer.digest,
        "optimizer_digest": trainer.optimizer_digest,
        "state_dict": trainer.state_dict,
        "load_state_dict": partial(trainer.load_state_dict, state),
        "save_weights": partial(trainer.save_weights, tmp_path / "weights.pt"),
        "step": partial(other.step, batch),
        "manual_step": lambda: other.manual_step().__enter__(),
    }
    for name, call in calls.items():
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
            with pytest.raises(UsageError, match=rf"trainer\.{name}\(\) was called inside"):
                call()
            beside.step(batch)
    assert trainer.steps == beside.steps == len(calls)
    assert other.steps == 0
    trainer.evaluate(torch.utils.data.TensorDataset(*batch), 16)
    with pytest.raises(ZeroDivisionError), trainer.manual_step():
        raise ZeroDivisionError
    other.step(batch)
