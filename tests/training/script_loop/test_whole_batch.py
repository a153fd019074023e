"""Steps whose micro-batches depend on each other: whole-batch losses, pairs of batches, lanes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.kernel.errors import LockstepError, LossError, StateError, UsageError
from lockstep.kernel.step_context import StepObserver
from lockstep.kernel.step_hooks import StepHook
from outcomes import Trainings

SGD = partial(torch.optim.SGD, lr=0.1)
training = Trainings()


def make_trainer(model, **options):
    return ls.Trainer(model, None, SGD, **{"microbatches": 4, "loggers": []} | options)


def require_close(model, reference):
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


class Towers(nn.Module):
    """Two encoders and a learned temperature, as in CLIP."""

    def __init__(self, *layers):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *layers, nn.Linear(16, 8))
        self.second = nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, first, second):
        return self.first(first), self.second(second)

    def compare(self, first, second):
        similarity = normalize(first, dim=1) @ normalize(second, dim=1).T
        return cross_entropy(similarity * self.scale.exp(), torch.arange(len(first)))


@training
def a_contrastive_loss_has_the_gradients_of_the_whole_batch():
    model = Towers()
    reference = copy.deepcopy(model)
    trainer = make_trainer(model)
    optimizer = SGD(reference.parameters())
    for _ in range(3):
        batch = torch.randn(19, 6), torch.randn(19, 5)
        with trainer.manual_step() as step:
            loss = step.backward_whole_batch(lambda data: model(*data), model.compare, batch)
        expected = reference.compare(*reference(*batch))
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        require_close(model, reference)
        assert loss.item() == pytest.approx(expected.item())
        assert step.result.loss == pytest.approx(loss.item())
    return trainer.digest(), loss.item()


@training
def both_passes_draw_the_same_random_numbers():
    model = Towers(nn.BatchNorm1d(16), nn.Dropout(0.5))

    def encode(data):
        first, second, labels = data
        first.add_(torch.randn_like(first))  # writes into its input
        return *model(first, second), labels

    def compare(first, second, labels):
        chosen = torch.randperm(len(first))[:10]  # drawn by the loss, alike on every rank
        return model.compare(first[chosen], second[chosen]) + (first.mean(1) * labels).mean()

    trainer = make_trainer(model)
    data = TensorDataset(torch.randn(46, 6), torch.randn(46, 5), torch.arange(46))
    for batch in trainer.batches(data, batch_size=18):
        for attempt in trainer.attempts(batch):
            with attempt as step:
                loss = step.backward_whole_batch(encode, compare)
    assert model.first[2].num_batches_tracked == 3  # the first pass leaves no trace
    return trainer.digest(), loss.item()


@training
def half_precision_scales_the_gradients_of_the_loss():
    model = Towers()
    trainer = make_trainer(model, autocast_dtype=torch.float16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = torch.randn(19, 6), torch.randn(19, 5)
    reference = copy.deepcopy(model)
    with trainer.manual_step() as step:
        step.backward_whole_batch(lambda data: model(*data), model.compare, batch)
    reference.compare(*reference(*batch)).backward()
    for parameter, old, other in zip(
        model.parameters(), before, reference.parameters(), strict=True
    ):
        torch.testing.assert_close(old - parameter, 0.1 * other.grad, rtol=0.03, atol=1e-3)
    assert step.result.is_skipped is False
    return trainer.digest()


@training
def two_batches_train_in_one_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    reference = copy.deepcopy(model)
    labeled = TensorDataset(torch.randn(38, 6), torch.randint(3, (38,)))
    unlabeled = TensorDataset(torch.randn(95, 6))
    trainer = make_trainer(model)
    optimizer = SGD(reference.parameters())
    for one, two in zip(
        trainer.batches(labeled, batch_size=10, epoch=0, shuffle=False),
        trainer.batches(unlabeled, batch_size=25, epoch=1, shuffle=False),
        strict=True,
    ):
        for attempt in trainer.attempts(one, two):
            with attempt as step:
                for (inputs, targets), (others,) in step.microbatches():
                    supervised = cross_entropy(model(inputs), targets)
                    step.backward(supervised, share=len(inputs) / one.size)
                    penalty = 0.5 * model(others).square().mean()
                    step.backward(penalty, share=len(others) / two.size)
        batch = (trainer.steps - 1) * 10
        inputs, targets = (tensor[batch : batch + 10] for tensor in labeled.tensors)
        others = unlabeled.tensors[0][batch * 5 // 2 : batch * 5 // 2 + 25]
        loss = cross_entropy(reference(inputs), targets)
        loss = loss + 0.5 * reference(others).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step.result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert step.result.samples == one.size
    assert trainer.steps == 4
    require_close(model, reference)
    return trainer.digest(), step.result.loss


class Images(Dataset):
    """Images with a label and some boxes."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        boxes = torch.rand([0, 1, 5, 0, 2, 9][index % 6], 4, generator=generator)
        return torch.randn(6, generator=generator), index % 3, boxes


def stack_images(samples):
    images, labels, boxes = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels), list(boxes)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.label = nn.Linear(8, 3)
        self.box = nn.Linear(8, 4)

    def sum_losses(self, images, labels, boxes):
        hidden = self.body(images).tanh()
        per_box = [(b - o).abs().sum() for b, o in zip(boxes, self.box(hidden), strict=True)]
        return cross_entropy(self.label(hidden), labels, reduction="sum"), torch.stack(
            per_box
        ).sum()


@training
def a_loss_has_two_denominators():
    model = Detector()
    data = Images()
    reference = copy.deepcopy(model)
    trainer = make_trainer(model, microbatches=8)
    optimizer = SGD(reference.parameters())
    for batch in trainer.batches(data, batch_size=23, shuffle=False, collate_fn=stack_images):
        with trainer.manual_step() as step:
            boxes = step.total(lambda data: sum(map(len, data[2])), batch)
            for images in step.microbatches(batch):
                of_labels, of_boxes = model.sum_losses(*images)
                step.backward(of_labels / batch.size + of_boxes / boxes, share=1)
    whole = stack_images([data[index] for index in range(23)])
    of_labels, of_boxes = reference.sum_losses(*whole)
    loss = of_labels / 23 + of_boxes / sum(map(len, whole[2]))
    loss.backward()
    optimizer.step()
    require_close(model, reference)
    assert boxes == sum(map(len, whole[2]))
    assert step.result.loss == pytest.approx(loss.item(), rel=1e-5)
    return trainer.digest(), step.result.loss


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs, hidden):
        outputs, hidden = self.cell(inputs, hidden.unsqueeze(0))
        return self.head(outputs), hidden.squeeze(0).detach()


class Lanes(nn.Module):
    """The hidden state of every lane."""

    def __init__(self, lanes):
        super().__init__()
        self.register_buffer("hidden", torch.zeros(lanes, 8))


@training
def hidden_states_follow_their_lanes():
    model = Recurrent()
    lanes = Lanes(15)
    reference = copy.deepcopy(model)
    hidden = torch.zeros(15, 8)
    trainer = make_trainer(model, extra_modules=[lanes])
    optimizer = SGD(reference.parameters())
    inputs = torch.randn(15, 40, 4)
    targets = torch.randn(15, 40, 1)
    for begin in range(0, 40, 10):
        chunk = inputs[:, begin : begin + 10], targets[:, begin : begin + 10]
        with trainer.manual_step() as step:
            states = []
            for part, wanted, lane in step.microbatches((*chunk, torch.arange(15))):
                outputs, state = model(part, lanes.hidden[lane])
                step.backward(mse_loss(outputs, wanted))
                states.append(state)
            states = step.gather(states)
        lanes.hidden.copy_(states)
        outputs, hidden = reference(chunk[0], hidden)
        optimizer.zero_grad()
        mse_loss(outputs, chunk[1]).backward()
        optimizer.step()
        require_close(model, reference)
        torch.testing.assert_close(lanes.hidden, hidden)
    return trainer.digest(), ls.digest(lanes)


@training
def ranks_without_micro_batches_get_the_rows_of_the_others():
    model = nn.Linear(3, 2)
    trainer = make_trainer(model)
    columns = {
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([[1.5], [-0.0]], dtype=torch.bfloat16),
        "empty": torch.zeros(2, 0),
    }
    batch = {"inputs": torch.eye(3)[:2]} | columns  # two micro-batches
    with trainer.manual_step() as step:
        assert step.total(lambda data: len(data["inputs"]) / 4, batch) == 0.5
        rows = []
        for data in step.microbatches(batch):
            step.backward(model(data["inputs"]).sum())
            rows.append(data)
        gathered = {name: step.gather([row[name] for row in rows]) for name in columns}
    for name, column in columns.items():
        assert gathered[name].dtype == column.dtype
    assert ls.digest(gathered) == ls.digest(columns)
    return trainer.digest()


outcomes = training.make_fixture(1, 3)
test_outcomes = training.make_test()


class Listener(StepHook, StepObserver):
    """Observes the losses, as a replay of one micro-batch does."""

    def __init__(self):
        self.losses = []

    def begin(self, step, batch):
        step.observers.append(self)

    def record_loss(self, loss):
        self.losses.append(loss.item())


@pytest.mark.usefixtures("world_of_one")
def test_observers_get_the_losses_that_are_reported():
    model = nn.Linear(6, 3)
    listener = Listener()
    trainer = make_trainer(model)
    trainer._steps.optimizer_step.hooks.append(listener)
    with trainer.manual_step() as step:
        for data in step.microbatches(torch.randn(19, 6)):
            step.backward(model(data).square().sum() / 19, share=1)
    assert listener.losses == step.result.losses
    # As the script has computed them.
    assert sum(step.result.losses) == pytest.approx(step.result.loss)


# --- mistakes ------------------------------------------------------------------------------------

ROWS = torch.ones(19, 6)
SCALE = nn.Parameter(torch.ones(()))


def take_steps(compute, **options):
    """Compute two steps of a small model."""
    model = nn.Linear(6, 3)
    trainer = make_trainer(model, **options)
    for _ in range(2):
        with trainer.manual_step() as step:
            compute(step, model)


def without_share(step, model):
    for first, _ in step.microbatches(ROWS, ROWS):
        step.backward(model(first).mean())


def with_few_samples(step, model):
    next(step.microbatches(ROWS, ROWS[:3]))


def with_two_calls(step, model):
    zip(step.microbatches(ROWS), step.microbatches(ROWS[:8]), strict=True)


def with_another_batch(step, model):
    step.total(len, ROWS)
    next(step.microbatches(ROWS[:8]))


def before_the_end(step, model):
    for data in step.microbatches(ROWS):
        step.gather([data])


def with_too_few(step, model):
    for data in step.microbatches(ROWS):
        step.backward(model(data).mean())
    step.gather([data])


def with_a_number(step, model):
    losses = []
    for data in step.microbatches(ROWS):
        losses.append(model(data).mean())
        step.backward(losses[-1])
    step.gather(losses)


def with_other_shapes(step, model):
    rows = []
    for number, data in enumerate(step.microbatches(ROWS)):
        step.backward(model(data).mean())
        rows.append(data[:, number:])
    step.gather(rows)


def with_several_rows(step, model):
    step.backward_whole_batch(lambda data: model(data).flatten(), torch.mean, ROWS)


def with_state_in_python(step, model):
    calls = []

    def encode(data):
        calls.append(0)
        return model(data) * len(calls)

    step.backward_whole_batch(encode, torch.mean, ROWS)


def with_detached_outputs(step, model):
    step.backward_whole_batch(lambda data: model(data).detach(), torch.mean, ROWS)


def with_a_loss_per_sample(step, model):
    step.backward_whole_batch(model, lambda outputs: outputs.mean(1), ROWS)


def with_a_trainable_number(step, model):
    step.backward_whole_batch(model, lambda outputs: (outputs * SCALE).mean(), ROWS)


def with_weights(step, model):
    step.backward_whole_batch(model, torch.mean, ROWS.clone().index_fill_(0, torch.arange(5), 0))


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("compute", "error", "sentence"),
    [
        (without_share, UsageError, r"micro-batch 0: the step has 2 batches: pass the share"),
        (with_few_samples, UsageError, r"have \[4, 3\] micro-batches.*pass drop_last=True"),
        (with_two_calls, UsageError, r"as in step.microbatches\(labeled, unlabeled\)"),
        (with_another_batch, UsageError, "one step takes one batch"),
        (before_the_end, UsageError, "got 1 tensors, and 0 micro-batches are complete"),
        (with_too_few, UsageError, "got 1 tensors, and 4 micro-batches are complete"),
        (with_a_number, UsageError, r"tensor of shape \(\) was given for the 5 samples"),
        (with_other_shapes, UsageError, r"micro-batch 1: .*\['float32', 5\].*\['float32', 6\]"),
        (with_several_rows, UsageError, r"tensor of shape \(15,\) was given for the 5 samples"),
        (
            with_state_in_python,
            StateError,
            "rank 0, step 0: micro-batch 0: the second pass .* other outputs",
        ),
        (with_detached_outputs, LossError, "no output of encode depends on a trainable parameter"),
        (with_a_loss_per_sample, LossError, r"the loss has shape \(19,\)"),
        (with_a_trainable_number, StateError, "step 1: a parameter of shape .* not in the model"),
        (with_weights, UsageError, "pass no loss_weight="),
    ],
)
def test_a_mistake_is_explained(compute, error, sentence):
    options = {"loss_weight": lambda data: float(data[0, 0])} if compute is with_weights else {}
    with pytest.raises(error, match=sentence):
        take_steps(compute, **options)


def disagree(compute):
    with pytest.raises(LockstepError) as caught:
        take_steps(compute)
    return str(caught.value)


def with_another_second_batch(step, model):
    for first, second in step.microbatches(ROWS, ROWS + ls.rank()):
        step.backward(model(first).mean() + model(second).mean(), share=1)


def with_another_dtype(step, model):
    rows = []
    for data in step.microbatches(ROWS):
        step.backward(model(data).mean())
        rows.append(data.double() if ls.rank() else data)
    step.gather(rows)


def with_a_number_on_rank_1(step, model):
    rows = []
    for data in step.microbatches(ROWS):
        step.backward(model(data).mean())
        rows.append(data[0, 0] if ls.rank() else data)
    step.gather(rows)


def test_differences_between_ranks_are_named_on_all(ranks):
    for compute, sentence in [
        (with_another_second_batch, "in step 0, rank 1 got a different batch than rank 0"),
        (with_another_dtype, "rank 1, step 0: the rows have dtypes and shapes [['float64', 6]], "),
        (with_a_number_on_rank_1, "rank 1, step 0, micro-batch 2: a tensor of shape () was given"),
    ]:
        one, two = ranks(disagree, 2, compute)
        assert one == two
        assert one.startswith(sentence)
