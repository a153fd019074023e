"""Activation checkpointing: the second forward repeats the first without side effects."""

import gc
import random
import weakref
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import lockstep as ls
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.rng_scopes import is_in_backward
from lockstep.model.activation_checkpointing import ActivationCheckpointing

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1)


class Counted(nn.Module):
    """Calls what is inside, and counts the calls in forward and in backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = [0, 0]

    def forward(self, *args, **kwargs):
        self.calls[is_in_backward()] += 1
        return self.inner(*args, **kwargs)


def counted(*layers):
    return nn.Sequential(*map(Counted, layers))


def make_checkpointing(model):
    return ActivationCheckpointing(dict(model.named_children()), CPU)


def gradients(model, inputs, again, passes):
    """Return what a micro-batch leaves: gradients, buffers, and what is drawn after it."""
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    buffers = Buffers({"": model})
    leaf = inputs.clone().requires_grad_()
    with again.enable(buffers), again.explain_errors():
        buffers.install_copies()
        loss = model(leaf * 1.0).square().sum()
        for _ in range(passes):
            loss.backward(retain_graph=passes > 1)
        held = [each.clone() for each in model.buffers()]
        buffers.restore()
    found = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [*found, *held, torch.rand(2), torch.tensor([random.random(), numpy.random.rand()])]


def assert_repeated(model, passes=1):
    """Compare the bits with and without; return each block's calls in a second micro-batch."""
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    expected = gradients(model, inputs, ActivationCheckpointing({}, CPU), passes)
    again = make_checkpointing(model)
    for _ in range(2):  # the first call of a block shows what it writes into
        for block in model:
            block.calls = [0, 0]
        found = gradients(model, inputs, again, passes)
        assert len(expected) == len(found)
        assert all(map(torch.equal, expected, found))
    return [block.calls for block in model]


def test_a_block_is_computed_twice_and_its_statistics_count_once():
    inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.3), nn.Dropout(0.4))
    model = counted(inner, nn.Sequential(nn.Tanh(), nn.Linear(6, 3)))
    assert assert_repeated(model) == [[1, 1], [1, 1]]
    assert inner[1].num_batches_tracked == 0  # what was counted is the buffers', not the step's


class Hidden(nn.Module):
    """Remembers, weakly, what a layer inside it was given."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.given = []

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.given.append(weakref.ref(hidden))
        return self.second(hidden)


@pytest.mark.parametrize("recompute", [True, False])
def test_activations_inside_a_block_are_let_go_of(recompute):
    model = nn.Sequential(Hidden(), Hidden())
    buffers = Buffers({"": model})
    again = ActivationCheckpointing(dict(model.named_children()) if recompute else {}, CPU)
    with again.enable(buffers):
        loss = model(torch.randn(4, 6)).sum()
        alive = [block.given[0]() is not None for block in model]
        assert alive == [not recompute] * 2
        loss.backward()
    assert [len(block.given) for block in model] == [1 + recompute] * 2


class Drawing(nn.Linear):
    """Draws from every generator that there is."""

    def forward(self, x):
        noise = torch.rand_like(x) + random.random() + numpy.random.rand()
        return super().forward((x * noise).exp())


def test_all_random_numbers_are_drawn_again_and_the_generators_given_back():
    assert assert_repeated(counted(Drawing(6, 6), Drawing(6, 6))) == [[1, 1], [1, 1]]


class Moving(nn.Module):
    """Reads a buffer and changes it in every call."""

    lockstep_buffer_rules = {"scale": "mean", "calls": "equal"}

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        result = (x * self.weight * self.scale).tanh().square()
        self.scale = self.scale * 0.5 + x.detach().mean(dim=0)
        return result


def test_each_call_of_a_block_sees_again_the_buffers_that_it_saw():
    twice = Counted(Moving())
    assert assert_repeated(nn.Sequential(twice, twice)) == [[2, 2], [2, 2]]


def test_spectral_norm_starts_from_the_same_vectors():
    inner = nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2))
    assert assert_repeated(counted(inner)) == [[1, 1]]


class Parting(nn.Module):
    def forward(self, x):
        columns = torch.stack([x, x * 2], dim=-1).unbind(-1)
        return x + 1, {"same": [columns[0], columns[0]], "n": 3}


class Middle(nn.Linear):
    """Takes nested inputs, and returns some of them."""

    def forward(self, given):
        h, rest = given
        return super().forward(h.tanh()) * rest["same"][0], {**rest, "h": h}


class Joining(nn.Module):
    def forward(self, given):
        value, rest = given
        return value + rest["same"][1].sin() + rest["h"].cos()


def test_what_works_in_place_and_has_no_weights_is_computed_once():
    layers = [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)]
    model = counted(*layers, nn.Dropout(0.5, inplace=True))
    assert assert_repeated(model) == [[1, 1], [1, 0], [1, 1], [1, 0]]


def test_several_backward_passes_repeat_it_each_time():
    model = counted(Parting(), Middle(6, 6), Joining())
    assert assert_repeated(model, passes=3) == [[1, 0], [1, 3], [1, 0]]


def test_a_step_that_is_broken_off_leaves_no_tensor_alive():
    model = nn.Sequential(Parting(), Middle(6, 6))
    again = make_checkpointing(model)
    with again.enable(Buffers({"": model})):
        outputs, rest = model(torch.randn(3, 6, requires_grad=True) * 1.0)
        seen = weakref.ref(rest["h"])  # the block's input and its output
        del outputs, rest
        gc.collect()
        assert seen() is None


def test_without_gradients_nothing_is_computed_twice():
    model = counted(nn.Linear(6, 6))
    again = make_checkpointing(model)
    with again.enable(Buffers({"": model})), torch.inference_mode():
        model(torch.ones(2, 6))
    assert model[0].calls == [1, 0]


def test_no_module_keeps_another_forward():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("boom")

    model = nn.Sequential(nn.Linear(6, 6), Fails())
    own = partial(nn.Linear.forward, model[0])
    model[0].forward = own
    again = make_checkpointing(model)
    with pytest.raises(ValueError, match="boom"), again.enable(Buffers({"": model})):
        model(torch.ones(2, 6))
    assert vars(model[0])["forward"] is own
    assert "forward" not in vars(model[1])


class Alternating(nn.Module):
    """Computes something else every other time."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.calls += 1
        x = x * self.weight
        return (x.exp() * x).sin() if self.calls % 2 else x.exp()


class Writing(nn.Linear):
    """Writes into one of its inputs."""

    def forward(self, given):
        given[0].mul_(2)
        return super().forward(given[1]["h"].exp())


class Doubling(nn.Module):
    def forward(self, x):
        h = x + 1
        return h, {"h": h}


class Viewing(nn.Module):
    def forward(self, x):
        h = x + 1
        return h, {"h": h[:, :]}


class Handing(nn.Linear):
    """Returns its input beside what it made of it."""

    def forward(self, x):
        return x, super().forward(x).exp()


class Spoiling(nn.Module):
    def forward(self, given):
        given[0].mul_(2)
        return given[1]


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([nn.Tanh(), Alternating()], "block 1 produced a different result when it was recomputed"),
        ([Doubling(), Writing(6, 2)], "must not write into its inputs"),
        ([Viewing(), Writing(6, 2)], "must not write into its inputs"),
        ([Handing(6, 6), Spoiling()], "a tensor that backward needs was overwritten in place"),
    ],
)
def test_what_cannot_be_repeated_is_refused(layers, sentence):
    model = nn.Sequential(*layers)
    again = make_checkpointing(model)

    def train():
        with again.enable(Buffers({"": model})), again.explain_errors():
            model(torch.randn(4, 6).requires_grad_() * 1.0).sum().backward()

    with pytest.raises(UsageError, match=sentence):
        train()


def test_errors_of_others_are_left_as_they_are():
    plain = ActivationCheckpointing({}, CPU)
    again = ActivationCheckpointing({"0": nn.ReLU()}, CPU)
    for checkpointing, said in [(plain, "modified by an inplace operation"), (again, "boom")]:
        with pytest.raises(RuntimeError, match=said) as caught, checkpointing.explain_errors():
            raise RuntimeError(said)
        assert type(caught.value) is RuntimeError


@pytest.mark.usefixtures("world_of_one")
def test_a_model_without_blocks_is_refused():
    class Opaque(nn.Linear):
        pass

    compiled = torch.compile(nn.Sequential(nn.Linear(6, 6)), backend="eager")
    in_place = nn.Sequential(nn.Linear(6, 6))
    in_place.compile(backend="eager")
    for model, said in [
        (Opaque(6, 6), "Opaque does not name its blocks"),
        (compiled, "a compiled model is a single block"),
        (in_place, "a compiled model is a single block"),
    ]:
        with pytest.raises(LayoutError, match=said):
            ls.Trainer(model, nn.CrossEntropyLoss(), SGD, activation_checkpointing=True)
