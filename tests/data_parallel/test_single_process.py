"""DataParallel: one process and several devices, with the trainer's bits."""

import copy
import gc
import random
import weakref
from collections import namedtuple
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
import models
from lockstep.kernel import spec
from lockstep.kernel.errors import GradientError, LayoutError, LossError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LOSS = nn.CrossEntropyLoss()


def build(make, seed=0):
    torch.manual_seed(seed)
    return make()


def images(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, 8, 8, generator=generator)
    return inputs, torch.randint(0, 10, (samples,), generator=generator)


def vectors(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return inputs, torch.randint(0, 10, (samples,), generator=generator)


def words(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, 13, shape, generator=generator) for shape in [(samples, 7), (samples,)]
    )


def bits(tensors):
    return [None if each is None else each.detach().clone() for each in tensors]


def same(left, right):
    return all(
        one is two is None or (one is not None and two is not None and is_equal(one, two))
        for one, two in zip(left, right, strict=True)
    )


def is_equal(one, two):
    if one.is_sparse and two.is_sparse:  # autograd forgets that rows are coalesced
        one = one.coalesce()
        two = two.coalesce()
        return torch.equal(one.indices(), two.indices()) and is_equal(one.values(), two.values())
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, two)))


def gradients(module):
    return bits(each.grad for each in module.parameters())


class Sparse(nn.Module):
    """Has sparse gradients, and a recurrent layer, which keeps a list of its weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 4, sparse=True)
        self.recurrent = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 13)

    def forward(self, words):
        return self.head(self.recurrent(self.embed(words))[0][:, -1])


class Recomputed(nn.Module):
    """Draws again in backward, and reads a buffer that it has written."""

    lockstep_buffer_rules = {"seen": "mean"}

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen = self.seen + inputs.detach().mean()
        return checkpoint(self._compute, inputs, use_reentrant=False)

    def _compute(self, inputs):
        return nn.functional.dropout(self.layer(inputs), 0.4) * self.seen


class DrawsElsewhere(nn.Sequential):
    """Draws from the generators of Python and numpy."""

    def __init__(self):
        super().__init__(nn.Linear(6, 10))

    def forward(self, inputs):
        return super().forward(inputs) * random.random() + numpy.random.rand()


class NoisyBackward(nn.Module):
    """Draws in a hook, so in backward only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 10)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        outputs.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return outputs


MODELS = {
    "convolutions, batch norm, dropout": (models.pictures, images),
    "attention, tied weights": (models.Words, words),
    "branches": (models.Branches, vectors),
    "sparse gradients, recurrent": (Sparse, words),
    "recomputation": (Recomputed, vectors),
    "numbers in backward": (NoisyBackward, vectors),
    "random and numpy": (DrawsElsewhere, vectors),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("world_of_one")
def test_gradients_and_buffers_have_the_bits_of_the_trainer(name):
    make, draw = MODELS[name]
    trainer = ls.Trainer(build(make), LOSS, SGD, microbatches=4, seed=3)
    others = {}
    for count in (1, 2, 3, 4):
        module = build(make)
        wrapped = ls.DataParallel(module, ["cpu"] * count, microbatches=4, seed=3)
        others[count] = module, wrapped, SGD(module.parameters())
    for step, samples in enumerate((19, 16, 3, 8)):  # 3: fewer than devices and micro-batches
        batch = draw(samples, seed=step)
        expected = trainer.step(batch)
        for count, (module, wrapped, optimizer) in others.items():
            optimizer.zero_grad()
            loss = wrapped.compute_loss(LOSS, *batch)
            loss.backward()
            assert same(gradients(module), gradients(trainer.model)), (count, step)
            optimizer.step()
            assert ls.digest(module) == trainer.digest(), (count, step)
            assert loss.item() == torch.tensor(expected).item()


@settings(max_examples=15)
@given(
    samples=st.integers(1, 20),
    microbatches=st.integers(1, 9),
    data=st.data(),
)
def test_gradients_are_the_sum_of_the_micro_batches_along_the_tree(samples, microbatches, data):
    count = data.draw(st.integers(1, microbatches))
    generator = torch.Generator().manual_seed(samples)
    inputs, targets = torch.randn(2, samples, 6, generator=generator)
    module = build(lambda: nn.Linear(6, 6))
    loss = nn.MSELoss()
    leaves = []
    for span in spec.cut(samples, min(samples, microbatches)):
        part = slice(span.start, span.stop)
        value = loss(module(inputs[part].clone()), targets[part].clone())
        value.backward(torch.full_like(value, len(span) / samples))
        leaves.append(gradients(module))
        module.zero_grad()
    expected = [spec.tree(column) for column in zip(*leaves, strict=True)]
    wrapped = ls.DataParallel(module, ["cpu"] * count, microbatches=microbatches)
    wrapped.compute_loss(loss, inputs, targets).backward()
    assert same(gradients(module), expected)


@pytest.mark.usefixtures("world_of_one")
def test_loss_weights_and_sums_are_those_of_the_trainer():
    torch.manual_seed(0)
    ignoring = nn.CrossEntropyLoss(ignore_index=3)
    for loss in (ignoring, nn.CrossEntropyLoss(reduction="sum")):
        trainer = ls.Trainer(build(models.pictures), loss, SGD, microbatches=4)
        inputs, targets = images(16)
        targets[:4] = 3  # micro-batch 0 has no targets
        trainer.step((inputs, targets))
        for count in (2, 4):  # then the first device has micro-batch 0 alone
            module = build(models.pictures)
            wrapped = ls.DataParallel(module, ["cpu"] * count, microbatches=4)
            wrapped.compute_loss(loss, inputs, targets).backward()
            assert same(gradients(module), gradients(trainer.model))
            assert same(module.buffers(), trainer.model.buffers())


@pytest.mark.usefixtures("world_of_one")
def test_a_loss_of_the_joined_outputs_has_the_bits_of_the_trainer_for_powers_of_two():
    for loss, (inputs, targets) in [
        (LOSS, images(16)),
        (nn.MSELoss(), (images(16)[0], images(16)[0][:, 0, 0, :1].repeat(1, 10))),
    ]:
        trainer = ls.Trainer(build(models.pictures), loss, SGD, microbatches=4)
        trainer.step((inputs, targets))
        for count in (1, 2, 3):
            module = build(models.pictures)
            outputs = ls.DataParallel(module, ["cpu"] * count, microbatches=4)(inputs)
            loss(outputs, targets).backward()
            assert same(gradients(module), gradients(trainer.model))


def test_a_loss_of_the_joined_outputs_has_the_same_bits_on_any_number_of_devices():
    inputs, targets = images(19)
    found = []
    for count in (1, 2, 3, 4):
        module = build(models.pictures)
        outputs = ls.DataParallel(module, ["cpu"] * count, microbatches=4)(inputs)
        LOSS(outputs, targets).backward()
        found.append([*gradients(module), *bits(module.buffers()), outputs.detach()])
    assert all(same(each, found[0]) for each in found)
    plain = build(
        lambda: nn.Sequential(*(each for each in models.pictures() if "Drop" not in str(each)))
    )
    del plain[1]  # batch norm
    wrapped = ls.DataParallel(copy.deepcopy(plain), ["cpu"] * 2)
    LOSS(plain(inputs), targets).backward()
    LOSS(wrapped(inputs), targets).backward()
    for one, two in zip(gradients(plain), gradients(wrapped), strict=True):
        torch.testing.assert_close(one, two)  # those of one backward, but for rounding


Pair = namedtuple("Pair", "first second")


class Nested(nn.Module):
    """Takes and returns nested tensors, and several kinds of scalars."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, pair, *, scale, labels=None, name=""):
        outputs = self.layer(pair["a"][0]) * scale
        return {
            "outputs": Pair(outputs, [pair["b"]]),
            "mean": outputs.mean(),
            "count": torch.tensor(len(outputs)),
            "name": name,
            "sizes": [2, 3],
        }


def test_arguments_and_outputs_may_be_nested():
    module = build(Nested)
    inputs = torch.randn(7, 3)
    positions = torch.arange(7)
    scale = torch.tensor(2.0)
    call = {"pair": {"a": (inputs,), "b": positions}, "scale": scale, "name": "x"}
    found = ls.DataParallel(module, ["cpu"] * 3, microbatches=3)(**call)
    expected = module(**call)
    assert type(found["outputs"]) is Pair
    assert torch.equal(found["outputs"].first, expected["outputs"].first)
    assert torch.equal(found["outputs"].second[0], positions)
    assert found["count"].tolist() == [3, 2, 2]
    assert (found["name"], found["sizes"]) == ("x", [2, 3])
    torch.testing.assert_close(found["mean"], expected["mean"])
    assert not found["outputs"].second[0].requires_grad
    weights = [*module.parameters()]
    one = torch.autograd.grad(found["mean"] + found["outputs"].first.sum(), weights)
    two = torch.autograd.grad(expected["mean"] + expected["outputs"].first.sum(), weights)
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(left, right)


def test_an_argument_that_requires_a_gradient_is_refused():
    wrapped = ls.DataParallel(build(lambda: nn.Linear(3, 2)), ["cpu"] * 2)
    with pytest.raises(UsageError, match=r"an argument requires one: pass argument\.detach\(\)"):
        wrapped(torch.randn(8, 3, requires_grad=True))


def test_samples_may_be_in_another_dimension():
    module = build(lambda: nn.LSTM(3, 4))
    inputs = torch.randn(5, 7, 3)
    outputs, _ = ls.DataParallel(module, ["cpu"] * 2, microbatches=3, dim=1)(inputs)
    torch.testing.assert_close(outputs, module(inputs)[0])


def test_gradients_accumulate_and_a_graph_may_be_kept():
    module = build(lambda: nn.Linear(3, 2))
    inputs = torch.randn(8, 3)
    wrapped = ls.DataParallel(module, ["cpu"] * 2)
    loss = wrapped.compute_loss(nn.MSELoss(), inputs, torch.ones(8, 2))
    loss.backward(retain_graph=True)
    once = gradients(module)
    loss.backward()
    assert same(gradients(module), [each + each for each in once])
    with pytest.raises(GradientError, match=r"a second time .* retain_graph=True"):
        loss.backward()
    with pytest.raises(GradientError, match="create_graph=True"):
        wrapped(inputs).mean().backward(create_graph=True)


def test_evaluation_computes_no_gradients_and_leaves_the_steps_and_buffers():
    module = build(models.pictures)
    wrapped = ls.DataParallel(module, ["cpu"] * 2).eval()
    inputs, _ = images(9)
    before = ls.digest(module)
    with torch.no_grad():
        outputs = wrapped(inputs)
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, module(inputs))
    assert (ls.digest(module), wrapped.steps) == (before, 0)


def test_autocast_and_the_mode_of_the_caller_hold():
    seen = []

    class Seen(nn.Linear):
        def forward(self, inputs):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
            return super().forward(inputs)

    wrapped = ls.DataParallel(build(lambda: Seen(3, 2)), ["cpu"] * 2, microbatches=2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert wrapped(torch.randn(4, 3)).dtype == torch.bfloat16
        assert torch.is_autocast_cache_enabled()
    assert {*seen} == {(False, False)}


class Fails(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.parts = parts

    def forward(self, inputs):
        if int(inputs[0]) in self.parts:
            raise KeyError(f"part {int(inputs[0])}")
        return inputs * self.weight


def test_an_error_names_its_micro_batch_and_device():
    module = Fails([])
    wrapped = ls.DataParallel(module, ["cpu"] * 2, microbatches=4)
    inputs = torch.arange(4.0)
    wrapped(inputs).sum().backward()
    module.parts = [1]
    with pytest.raises(KeyError, match="part 1") as caught:
        wrapped(inputs)
    assert caught.value.__notes__ == ["in micro-batch 1 on cpu (device 0 of 2)"]
    module.parts = [2]
    with pytest.raises(KeyError) as caught:
        wrapped(inputs)
    assert caught.value.__notes__ == ["in micro-batch 2 on cpu (device 1 of 2)"]
    module.parts = []
    assert torch.equal(wrapped(inputs), inputs)


def test_the_generators_of_the_caller_are_left_alone():
    wrapped = ls.DataParallel(build(models.pictures), ["cpu"] * 2)
    inputs, _ = images(16)
    for _ in range(2):
        torch.manual_seed(1)
        wrapped(inputs).sum().backward()
        after = torch.rand(3)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(3), after)


class Checkpointed(nn.Module):
    """Computes again in backward, and draws nothing."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.is_reentrant = is_reentrant

    def forward(self, inputs):
        inputs = inputs.detach().requires_grad_()  # which the first layer needs if it is reentrant
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=self.is_reentrant)
        return inputs


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_layers_may_be_recomputed(is_reentrant):
    module = build(lambda: Checkpointed(is_reentrant))
    wrapped = ls.DataParallel(module, ["cpu"] * 2)
    inputs = torch.randn(64, 6)
    found = []
    for _ in range(2):
        module.zero_grad()
        outputs = wrapped(inputs)
        torch.rand(3)  # the states of forward and backward differ
        outputs.square().mean().backward()
        found.append(gradients(module))
    assert all(same(each, found[0]) for each in found)


def test_nothing_of_a_pass_is_kept_until_garbage_is_collected():
    replicas = []
    module = build(models.pictures)
    module[0].register_forward_hook(lambda replica, *_: replicas.append(weakref.ref(replica)))
    wrapped = ls.DataParallel(module, ["cpu"] * 2, microbatches=2)
    inputs, targets = images(8)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            wrapped.compute_loss(LOSS, inputs, targets).backward()
            LOSS(wrapped(inputs), targets).backward()
            wrapped(inputs)
            with torch.no_grad():
                wrapped(inputs)
        assert len(replicas) == 16
        assert [each() for each in replicas] == [None] * 16
    finally:
        gc.enable()


def test_state_dict_has_the_names_of_the_module():
    module = build(models.pictures)
    wrapped = ls.DataParallel(module)
    assert list(wrapped.state_dict()) == list(module.state_dict())
    other = ls.DataParallel(build(models.pictures, seed=1))
    other.load_state_dict(wrapped.state_dict())
    assert ls.digest(other.module) == ls.digest(module)
    assert ls.digest(copy.deepcopy(other).module) == ls.digest(module)


def linear():
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda: ls.DataParallel(linear(), []), UsageError, "devices is empty"),
        (lambda: ls.DataParallel(linear(), [0])(torch.ones(4, 3)), UsageError, "is on cpu"),
        (lambda: ls.DataParallel(linear(), ["cpu"] * 9), LayoutError, "9 devices cannot share 8"),
        (lambda: ls.DataParallel(linear(), dim=-1), UsageError, "dim=-1"),
        (lambda: ls.DataParallel(ls.DataParallel(linear())), UsageError, "pass its module"),
        (lambda: ls.DataParallel(torch.jit.script(linear())), UsageError, "TorchScript"),
        (lambda: ls.DataParallel(nn.Linear(3, 2, device="meta"))(torch.ones(4, 3)), UsageError,
         "weight is on meta, but the first device of ls.DataParallel is cpu"),
        (lambda: ls.DataParallel(linear())(3), UsageError, "no tensor with a dimension 0"),
        (lambda: ls.DataParallel(linear())(torch.ones(4, 3), x=[torch.ones(5)]), UsageError,
         r"argument 0 has 4 samples in dimension 0, but argument x\[0\] has 5"),
        (lambda: ls.DataParallel(linear())(torch.ones(0, 3)), UsageError, "has no samples"),
        (lambda: ls.DataParallel(linear()).compute_loss(LOSS, torch.ones(4, 3)), UsageError,
         "the arguments of the module and the targets"),
        (lambda: ls.DataParallel(linear()).compute_loss(
            lambda outputs, _: outputs, torch.ones(4, 3), torch.ones(4)), LossError,
         "micro-batch 0 on cpu"),
        (lambda: ls.DataParallel(nn.BatchNorm1d(3), microbatches=4)(torch.ones(7, 3)), UsageError,
         r"^micro-batch 3 on cpu \(device 0 of 1\) holds one sample, and batch norm"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_mistake_gets_one_sentence(mistake, error, message):
    with pytest.raises(error, match=message):
        mistake()


def test_a_compiled_module_is_refused():
    module = linear()
    module.compile(backend="eager")
    with pytest.raises(UsageError, match=r"compiled by torch.compile, .* ls.exact"):
        ls.DataParallel(module)
