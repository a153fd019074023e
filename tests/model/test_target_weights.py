"""Weights: losses whose mean is not one over samples still give the full batch's gradient."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import LossError, UsageError
from lockstep.model.target_weights import find_ignored_count, infer_weight_function

CLASS_WEIGHTS = torch.tensor([0.1, 5.0, 1.0, 0.5])


def test_only_losses_that_say_so_get_a_weight_by_themselves():
    assert infer_weight_function(nn.CrossEntropyLoss()) is None
    assert infer_weight_function(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, reduction="sum")) is None
    assert infer_weight_function(nn.MSELoss()) is None
    assert infer_weight_function(None) is None
    assert infer_weight_function(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)) is not None
    assert infer_weight_function(nn.NLLLoss(ignore_index=0)) is not None


def test_target_weight_counts_what_the_mean_divides_by():
    targets = torch.tensor([0, 1, 1, 2, -100])
    assert ls.target_weight(nn.CrossEntropyLoss())((None, targets)) == 4
    weighted = ls.target_weight(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS))
    assert weighted((None, targets)) == pytest.approx(0.1 + 5 + 5 + 1)


def test_ignored_targets_are_counted_where_nothing_says_so():
    data = (None, torch.tensor([1, -100, -100]))
    count = find_ignored_count(nn.CrossEntropyLoss())
    assert count(data) == 2
    assert count((None, torch.rand(3, 2))) == 0
    assert find_ignored_count(nn.MSELoss()) is None
    count = find_ignored_count(None)
    assert count({"labels": data[1]}) == 2
    assert count({"labels": [1, -100]}) == 0
    assert count(data) == 0  # the last entry may be anything


def batch(ignored=False):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(21, 5, generator=generator)
    targets = torch.randint(0, 4, (21,), generator=generator)
    if ignored:
        targets[::2] = -100
        targets[:5] = -100  # a whole micro-batch: its own mean would be 0/0
    return inputs, targets


LOSSES = {
    "class weights": (lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), None, False),
    "ignored": (nn.CrossEntropyLoss, lambda: ls.target_weight(nn.CrossEntropyLoss()), True),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), None, False),
    "mean": (nn.CrossEntropyLoss, None, False),
}


def gradient_error(name):
    """Return how far the trainer's loss and gradient are from the full batch's."""
    make, weight, ignored = LOSSES[name]
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    inputs, targets = batch(ignored)
    loss = make()
    whole = loss(model(inputs), targets)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    kept = []
    trainer = ls.Trainer(
        model,
        loss,
        partial(torch.optim.SGD, lr=0.0),
        loss_weight=weight() if weight else None,
        callbacks=[lambda _: kept.extend(p.grad.clone() for p in model.parameters())],
    )
    value = trainer.step((inputs, targets))
    errors = [
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, kept, strict=True)
    ]
    return max(errors), abs(value - float(whole)) / float(whole), trainer.digest(), value


def test_gradients_are_those_of_the_full_batch(ranks):
    outcomes = [found for n in (1, 3) for found in ranks(lambda: [*map(gradient_error, LOSSES)], n)]
    for found in outcomes:
        for (gradient, loss, _, value), first in zip(found, outcomes[0], strict=True):
            assert gradient < 1e-5
            assert loss < 1e-6
            assert value == first[3]


def test_ignored_targets_without_a_weight_are_pointed_out_once(ranks):
    def warned():
        trainer = ls.Trainer(
            nn.Linear(5, 4), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.0)
        )
        inputs, targets = batch()
        targets[3] = -100
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.step((inputs, targets))
            trainer.step((inputs, targets))
        return [str(each.message) for each in seen]

    ((message,),) = ranks(warned, 1)
    assert "weight=lockstep.target_weight" in message
    assert "rank 0, step 0, micro-batch 1: the loss ignores some targets" in message


class LanguageModel(nn.Module):
    """Returns its loss as causal language models of Hugging Face do: it shifts the labels."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))

    def forward(self, input_ids, labels):
        logits = self.inner(input_ids)[:, :-1]
        targets = labels[:, 1:]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


@pytest.mark.usefixtures("world_of_one")
def test_labels_of_a_model_that_returns_its_loss_are_counted_by_target_weight():
    lengths = torch.tensor([2, 9, 3, 5, 7, 4, 6, 8])
    tokens = torch.randint(0, 9, (8, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.where(torch.arange(9) < lengths[:, None], -100)
    batch = {"input_ids": tokens, "labels": labels}

    def step(**options):
        torch.manual_seed(0)
        trainer = ls.Trainer(LanguageModel(), None, partial(torch.optim.SGD, lr=0.0), **options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            losses = {trainer.step(batch) for _ in range(2)}
        return losses.pop(), [str(each.message) for each in seen]

    weight = ls.target_weight(nn.CrossEntropyLoss(), shift=1)
    whole, _ = step(microbatches=1, loss_weight=weight)
    unweighted, (message,) = step(microbatches=4)
    weighted, silent = step(microbatches=4, loss_weight=weight)
    assert weighted == pytest.approx(whole, rel=1e-6)
    assert unweighted != pytest.approx(whole, rel=1e-3)
    assert "micro-batch 0: the loss ignores some targets (labels of -100), so" in message
    assert "target_weight(torch.nn.CrossEntropyLoss()) to the trainer, with shift=1" in message
    assert not silent
    with pytest.raises(LossError, match=r"found no targets in a dict: .* or \"labels\" of a"):
        ls.Trainer(
            LanguageModel(), None, partial(torch.optim.SGD, lr=0.0), loss_weight=weight
        ).step({"input_ids": tokens})


@pytest.mark.usefixtures("world_of_one")
def test_a_microbatch_without_a_target_is_named_as_the_reason_of_its_nan():
    inputs, targets = batch(ignored=True)
    for weight in (float("nan"), 1.0):  # with 1.0, the targets are the reason
        model = nn.Linear(5, 4)
        nn.init.constant_(model.weight, weight)
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.0))
        with pytest.raises(LossError, match="micro-batch 0: the loss is nan") as raised:
            trainer.step((inputs, targets.clamp(min=0) if weight != weight else targets))
        assert ("ignores all targets of the micro-batch, pass" in str(raised.value)) == (
            weight == 1.0
        )


def test_a_batch_that_weighs_nothing_is_an_error(ranks):
    def step():
        loss = nn.CrossEntropyLoss(ignore_index=0)
        trainer = ls.Trainer(nn.Linear(5, 4), loss, partial(torch.optim.SGD, lr=0.0))
        trainer.step((torch.ones(8, 5), torch.zeros(8, dtype=torch.int64)))

    with pytest.raises(ls.LockstepError, match=r"sum to 0\.0; check whether the targets"):
        ranks(step, 2)


class Smoothed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**options)

    def forward(self, outputs, targets):
        return self.inner(outputs, targets) + 0 * outputs.mean()


def padded(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, ignore_index=0)


def test_the_weight_of_a_loss_inside_of_another_one():
    targets = torch.tensor([0, 1, 2, 0])
    assert ls.target_weight(Smoothed(ignore_index=0))((None, targets)) == 2
    for loss in (padded, nn.MSELoss()):
        with pytest.raises(UsageError, match=r"ls.target_weight takes a CrossEntropyLoss"):
            ls.target_weight(loss)
