"""Gradients that autograd creates in their buckets: that it does, and what must not be written."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.comm import backend as native
from lockstep.data_parallel import grad_bucket_views
from lockstep.data_parallel.grad_bucket_views import GradBucketViews

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native module")

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIZE = 128  # 64 KiB per square weight
SMALLEST = grad_bucket_views.SMALLEST


def batch(samples=16):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, SIZE, generator=generator)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


# --- places alone ---------------------------------------------------------------------------------


class Weights(nn.Module):
    """Two weights of one size, and temporary tensors of that size on request."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(SIZE, SIZE))
        self.second = nn.Parameter(torch.randn(SIZE, SIZE))

    def backward(self, places, *, hook=None):
        """Run a backward pass; return the gradients, as the reducer takes them."""
        self.zero_grad()
        rows = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(2))
        hidden = rows @ self.first
        if hook is not None:
            hidden.register_hook(hook)  # runs between the two gradients
        loss = (hidden @ self.second).square().sum()
        with places.watch():
            loss.backward()
        for index, each in enumerate(self.parameters()):
            places.note(index, each)
        return [each.grad.detach() for each in self.parameters()]


@pytest.fixture
def weights():
    return Weights()


@pytest.fixture
def vectors():
    return [torch.zeros(SIZE * SIZE) for _ in range(2)]


def addresses(tensors):
    return [each.data_ptr() for each in tensors]


def test_allocations_outside_of_a_watched_pass_and_of_other_threads_are_as_ever(weights, vectors):
    places = GradBucketViews(vectors)
    weights.backward(places)
    assert torch.empty(SIZE, SIZE).data_ptr() not in addresses(vectors)
    made = []
    with places.watch():
        thread = threading.Thread(target=lambda: made.append(torch.empty(SIZE, SIZE)))
        thread.start()
        thread.join()
    assert made[0].data_ptr() not in addresses(vectors)


def test_a_place_is_free_again_when_its_tensor_is_freed_by_another_thread(weights, vectors):
    places = GradBucketViews(vectors)
    weights.backward(places)
    held = [weights.backward(places)]
    weights.zero_grad()
    assert places.is_taken(0, None)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert not places.is_taken(0, None)
    found = weights.backward(places)
    assert addresses(found) == addresses(vectors)


def test_a_place_is_taken_while_anything_else_has_its_memory(weights, vectors):
    places = GradBucketViews(vectors)
    weights.backward(places)
    found = weights.backward(places)
    weights.zero_grad()
    assert not places.is_taken(0, found[0])  # the gradient alone
    assert places.is_taken(0, found[1])
    assert places.is_taken(0, None)
    view = found[0][1:]
    assert places.is_taken(0, found[0])
    del view
    assert not places.is_taken(0, found[0])
    array = found[0].detach().numpy()
    assert places.is_taken(0, found[0])
    assert array[0, 0] == found[0][0, 0]


def test_memory_that_is_resized_leaves_its_place(weights, vectors):
    places = GradBucketViews(vectors)
    weights.backward(places)
    found = weights.backward(places)
    weights.zero_grad()
    expected = found[0].clone()
    found[0].resize_(2 * SIZE, SIZE)
    assert found[0].data_ptr() not in addresses(vectors)
    assert torch.equal(found[0][:SIZE], expected)
    assert not places.is_taken(0, None)


def arrive(places, index, gradient):
    """Note a gradient as the reducer does."""
    parameter = nn.Parameter(torch.zeros(SIZE, SIZE))
    parameter.grad = gradient
    places.note(index, parameter)


def learn(places):
    """Let the first allocation of a pass be the gradient of parameter 0, the second that of 1."""
    with places.watch():
        gradients = [torch.empty(SIZE, SIZE), torch.empty(SIZE, SIZE)]
    for index, gradient in enumerate(gradients):
        arrive(places, index, gradient)


def test_a_tensor_made_after_a_gradient_arrived_does_not_get_its_place(vectors):
    """The sum may be there already."""
    places = GradBucketViews(vectors)
    learn(places)
    elsewhere = torch.empty(SIZE, SIZE)
    with places.watch():
        assert torch.empty(SIZE, SIZE).data_ptr() == vectors[0].data_ptr()  # freed at once
        arrive(places, 1, elsewhere)
        assert torch.empty(SIZE, SIZE).data_ptr() != vectors[1].data_ptr()
    assert not places.is_taken(0, None)
    assert not places.is_taken(1, elsewhere)


def test_a_place_is_given_once_per_pass(vectors):
    """After the first tensor in it was freed, the sum may be there."""
    places = GradBucketViews(vectors)
    learn(places)
    with places.watch():  # now the second allocation is a gradient of parameter 0, too
        gradients = [torch.empty(SIZE, SIZE), torch.empty(SIZE, SIZE)]
    places._native.note(0, gradients[1])
    places._native.note(1, gradients[0])
    del gradients
    with places.watch():
        found = [torch.empty(SIZE, SIZE).data_ptr() for _ in range(5)]  # each is freed at once
    assert sorted(set(found) & set(addresses(vectors))) == sorted(addresses(vectors))
    assert [found.count(each) for each in addresses(vectors)] == [1, 1]


def test_nothing_gets_a_place_that_was_given_up(vectors):
    places = GradBucketViews(vectors)
    learn(places)
    with places.watch():
        held = torch.empty(SIZE, SIZE)
        assert places.is_taken(0, None)
        places.give_up([0])
        assert torch.empty(SIZE, SIZE).data_ptr() != vectors[1].data_ptr()
    assert held.data_ptr() == vectors[0].data_ptr()
    assert not places.is_taken(0, None)  # the bucket has other memory
    with places.watch():
        assert torch.empty(SIZE, SIZE).data_ptr() not in addresses(vectors)


# --- in the trainer -------------------------------------------------------------------------------


def wide(layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(layers - 1)), nn.Linear(SIZE, 3))


def digest_after(steps, model, *, microbatches=4, before_step=None):
    """Train; return the digest, and for each step the number of gradients in their places."""
    grad_bucket_views.SMALLEST = SMALLEST  # only weights get one
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=microbatches, audit=False)
    note, arrived = GradBucketViews.note, []

    def note_and_look(self, index, parameter):
        note(self, index, parameter)
        arrived.append(self.is_taken(index, None))

    GradBucketViews.note = note_and_look
    counts = []
    try:
        for step in range(steps):
            if before_step is not None:
                before_step(step)
            arrived.clear()
            trainer.step(batch())
            counts.append(sum(arrived))
    finally:
        GradBucketViews.note = note
    return trainer.digest(), counts


@pytest.mark.parametrize("microbatches", [2, 4, 6])
def test_large_gradients_are_created_in_their_buckets(ranks, microbatches):
    def train():
        return digest_after(4, wide(), microbatches=microbatches)

    (alone,) = ranks(train, 1)
    for digest, counts in ranks(train, 2, backend="lockstep"):
        assert digest == alone[0]
        # Step 0 shows in which order gradients arrive, step 1 that of the allocations.
        assert counts == [0, 0, 2, 2]


class Mixed(nn.Module):
    """Several kinds of gradients, and temporary tensors of the same size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, SIZE)
        self.convolution = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.recurrent = nn.LSTM(SIZE, SIZE // 2, batch_first=True)
        self.transposed = nn.Linear(SIZE // 2, SIZE)
        self.transposed.weight = nn.Parameter(self.transposed.weight.detach().t().contiguous().t())
        self.normalization = nn.LayerNorm(SIZE)
        self.recomputed = nn.Linear(SIZE, SIZE)
        self.unused = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        tokens = self.embedding((inputs[:, :9].abs() * 10).long().clamp(max=49))
        hidden, _ = self.recurrent(tokens)
        value = self.normalization(self.transposed(hidden[:, -1]))
        value = checkpoint(self.recomputed, value, use_reentrant=False)
        squares = self.convolution((value.t() @ value)[None, None])
        if inputs[0, 0] > 0:
            value = value + self.unused(value)
        return self.head(value) + squares.mean()


@pytest.mark.parametrize("storage", ["replicated", "shared"])
def test_all_kinds_of_gradients_have_the_bits_of_one_process(ranks, storage):
    def train():
        trainer = ls.Trainer(
            Mixed(), nn.CrossEntropyLoss(), SGD, microbatches=6, storage=storage, max_grad_norm=1.0
        )
        for samples in (16, 16, 13, 16, 5, 16):
            trainer.step(batch(samples))
        return trainer.digest()

    assert len({digest for n in (1, 3) for digest in ranks(train, n, backend="lockstep")}) == 1


class Temporary(torch.autograd.Function):
    """The identity; `on_backward` is called in its backward."""

    @staticmethod
    def forward(ctx, value, on_backward):
        ctx.on_backward = on_backward
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.on_backward()
        return gradient, None


class Unsteady(nn.Module):
    """Other allocations in some steps; what they made is kept in `kept`."""

    def __init__(self):
        super().__init__()
        self.layers, self.first = wide(), nn.Linear(SIZE, SIZE)
        self.is_unsteady, self.kept = False, []

    def forward(self, inputs):
        return self.layers(Temporary.apply(self.first(inputs), self.allocate))

    def allocate(self):
        if self.is_unsteady:
            self.kept.append(torch.full((SIZE, SIZE), 7.0))


def test_a_tensor_in_the_wrong_place_is_kept_and_the_bucket_gets_other_memory(ranks):
    """The tensor that stays is allocated before the gradient that had this place."""

    def train():
        model = Unsteady()

        def change(step):
            model.is_unsteady = step in (3, 6)

        digest, counts = digest_after(9, model, microbatches=2, before_step=change)
        return digest, counts, [bool((each == 7).all()) for each in model.kept]

    (alone,) = ranks(train, 1)
    for digest, counts, are_whole in ranks(train, 2, backend="lockstep"):
        assert digest == alone[0]
        assert are_whole == [True, True]
        # Step 3 finds out that the place of the first weight is taken; the others are used again
        # after a step that shows the order of the allocations.
        assert counts == [0, 0, 3, 3, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("microbatches", [2, 4])
def test_gradients_that_a_hook_keeps_do_not_change(ranks, microbatches):
    """Those of this rank's micro-batches, not the sums."""

    def train():
        model, kept = wide(), []
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, microbatches=microbatches, audit=False
        )
        for step in range(5):
            if step == 3:
                for each in model.parameters():
                    each.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
            trainer.step(batch())
        are_equal = [torch.equal(*pair) for pair in kept]
        return trainer.digest(), len(are_equal), all(are_equal)

    (alone,) = ranks(train, 1)
    for digest, count, are_equal in ranks(train, 2, backend="lockstep"):
        assert digest == alone[0]
        assert count == 2 * 6 * microbatches // 2
        assert are_equal


def test_gradients_that_arrive_in_parts_keep_their_places(ranks):
    """They are moved out of `.grad` after the pass, and freed before the next one."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.first = wide(), nn.Linear(SIZE, SIZE)

        def forward(self, inputs):
            inputs.requires_grad_()
            return self.layers(checkpoint(self.first, self.first(inputs), use_reentrant=True))

    def train():
        return digest_after(6, Twice(), microbatches=2)

    (alone,) = ranks(train, 1)
    for digest, counts in ranks(train, 2, backend="lockstep"):
        assert digest == alone[0]
        assert counts[2:] == [4, 4, 4, 4]  # the gradient of `first` arrives twice


def test_a_step_that_fails_in_backward_leaves_no_gradient_behind(ranks, monkeypatch):
    def fail():
        raise KeyError("mine")

    def train():
        model = Unsteady()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=2, audit=False)
        for step in range(6):
            monkeypatch.setattr(model, "allocate", fail if step == 3 else lambda: None)
            if step == 3:
                with pytest.raises(KeyError, match="mine"):
                    trainer.step(batch())
            else:
                trainer.step(batch())
        return trainer.digest(), len(trainer._executor._gradients._may_have_view)

    (alone,) = ranks(train, 1)
    for found in ranks(train, 2, backend="lockstep"):
        assert found == alone
