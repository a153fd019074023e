"""The check of the loss in the first step: what is not a mean over samples is named."""

import copy
import re
import warnings
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import LossError

CLASS_WEIGHTS = torch.linspace(0.2, 2.0, 4)
SGD = partial(torch.optim.SGD, lr=0.1)
NOT_ADDITIVE = "is not the sum of the losses of its halves times their shares"


class Focal(nn.CrossEntropyLoss):
    """Has class weights, and is a mean over the samples."""

    def forward(self, outputs, targets):
        losses = F.cross_entropy(outputs, targets, weight=self.weight, reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean()


class Flat(nn.CrossEntropyLoss):
    """Has the weights of its base class."""

    def forward(self, outputs, targets):
        return super().forward(outputs.flatten(0, -2), targets.flatten())


class Around(nn.Module):
    """Contains a loss that ignores some targets."""

    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, outputs, targets):
        return self.inner(outputs, targets)


class Disobedient(nn.Module):
    reduction = "sum"

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


def total(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


def marked(outputs, targets):
    return total(outputs, targets)


marked.reduction = "sum"


def over_positives(outputs, targets):
    positive = (targets > 0).float()
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (losses * positive).sum() / positive.sum().clamp(min=1)


def contrast(outputs, targets):
    rows = F.normalize(outputs, dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def weighted(loss):
    return lambda outputs, targets: loss(outputs, targets)


def said(loss, samples=21, model=None, **options):
    """Return the warnings about a loss in two steps."""
    torch.manual_seed(0)
    model = model or nn.Linear(6, 4)
    trainer = ls.Trainer(model, loss, SGD, progress=False, **options)
    inputs = torch.randn(samples, 6)
    targets = torch.randint(0, 4, (samples,))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.step((inputs, targets))
    return [str(each.message) for each in found if "the loss" in str(each.message)]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("samples", [21, 8], ids=["several", "one sample each"])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (total, 'total .* set the attribute reduction = "sum"'),
        (Disobedient(), "Disobedient .* return a mean over the samples"),
        (over_positives, "over_positives .* pass loss_weight="),
        (weighted(nn.CrossEntropyLoss(CLASS_WEIGHTS)), "<lambda> .* pass loss_weight="),
        (Focal(CLASS_WEIGHTS), "Focal .* pass loss_weight="),
        (contrast, 'contrast .* "Losses over the whole batch"'),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_loss_that_is_no_mean_over_samples_is_named_once(loss, words, samples):
    """Its gradients were those of another batch, without a word."""
    (sentence,) = said(loss, samples)
    assert re.match(f"rank 0, step 0, micro-batch .: the loss {words}", sentence), sentence


class Centred(nn.Module):
    """Counts its calls, moves a center and is called with it."""

    lockstep_buffer_rules: ClassVar = {"center": "mean"}

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("center", torch.zeros(4))

    def forward(self, outputs, targets):
        self.calls += 1
        self.center += outputs.detach().mean(dim=0)
        return F.cross_entropy(outputs - self.center, targets)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False)

    def forward(self, outputs, targets):
        return F.cross_entropy(self.norm(outputs), targets)


def overwriting(outputs, targets):
    targets.clamp_(max=2)
    return F.cross_entropy(outputs.clone().mul_(2), targets)


HONEST = {
    "mean": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1),
    "subclass": Flat(CLASS_WEIGHTS),
    "sum": partial(F.cross_entropy, reduction="sum"),
    "marked": marked,
    "random": lambda outputs, targets: F.cross_entropy(F.dropout(outputs), targets),
    "buffers": Centred(),
    "batch norm": Normalized(),
    "in place": overwriting,
    "mixed": lambda outputs, targets: (
        0.3 * F.cross_entropy(outputs, targets) + 0.7 * F.cross_entropy(outputs, (targets + 1) % 4)
    ),
    "constant": lambda outputs, targets: outputs.sum() * 0,
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", HONEST)
def test_other_losses_are_not_named_nor_changed(name, monkeypatch):
    """The check neither draws numbers nor writes; the bits are those without it."""

    def train():
        torch.manual_seed(0)
        trainer = ls.Trainer(nn.Linear(6, 4), copy.deepcopy(HONEST[name]), SGD, progress=False)
        inputs = torch.randn(21, 6)
        targets = torch.randint(0, 4, (21,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return trainer.step((inputs, targets)), trainer.digest(), torch.rand(2).tolist()

    checked = train()
    monkeypatch.setattr("lockstep.model.loss_check.LossCheck._check", lambda *_: None)
    assert train() == checked


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("form", "samples"), [("tensors", 24), ("mappings", 24), ("mappings", 8)])
def test_a_loss_of_the_boxes_of_each_image_is_checked(form, samples):
    """A batch of lists was not checked, for any denominator of the loss."""

    def stack(images):
        inputs, labels, boxes = zip(*images, strict=True)
        found = list(boxes) if form == "tensors" else [{"boxes": one} for one in boxes]
        return torch.stack(inputs), (torch.tensor(labels), found)

    def compute(divide):
        def loss(outputs, targets):
            labels, found = targets
            found = [one["boxes"] if form == "mappings" else one for one in found]
            pairs = zip(outputs, found, strict=True)
            of_boxes = sum((row - boxes).abs().sum() for row, boxes in pairs)
            return F.cross_entropy(outputs, labels) + of_boxes / divide(found)

        return loss

    torch.manual_seed(0)
    images = [(torch.randn(6), i % 4, torch.rand([2, 1, 5, 4][i % 4], 4)) for i in range(samples)]
    for divide, is_wrong in [(len, False), (lambda found: sum(map(len, found)), True)]:
        trainer = ls.Trainer(nn.Linear(6, 4), compute(divide), SGD, loggers=[])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in trainer.batches(images, batch_size=samples, collate_fn=stack):
                trainer.step(batch)
        assert [str(one.message) for one in caught if NOT_ADDITIVE in str(one.message)][1:] == []
        assert any(NOT_ADDITIVE in str(one.message) for one in caught) == is_wrong


@pytest.mark.usefixtures("world_of_one")
def test_a_loss_that_calls_the_model_has_no_verdict():
    """The numbers of a unit's calls are a part of its seeds."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))

    def consistent(outputs, targets):
        return total(outputs, targets) + model(torch.ones(1, 6)).mean()

    assert not said(consistent, model=model, audit=False)
    assert len(seen) == 2 * 8 * 2, "by the step alone"


@pytest.mark.usefixtures("world_of_one")
def test_a_weight_that_does_not_fit_the_loss_is_named():
    def count(data):
        return float((data[1] != 0).sum())

    (sentence,) = said(F.cross_entropy, loss_weight=count)
    assert "pass loss_weight=" in sentence
    assert not said(nn.CrossEntropyLoss(ignore_index=0), loss_weight=count)


@pytest.mark.usefixtures("world_of_one")
def test_a_hidden_ignore_index_is_named_also_where_it_ends_the_training():
    """Of a micro-batch without targets, the loss is NaN; the others show the reason."""
    inputs = torch.randn(24, 6)
    targets = torch.arange(24) % 4
    for is_empty in (False, True):
        targets[21:] = 0 if is_empty else 1
        trainer = ls.Trainer(nn.Linear(6, 4), Around(), SGD, progress=False)
        if is_empty:
            with pytest.raises(LossError, match=r"the loss is nan .* pass loss_weight=ls\.target"):
                trainer.step((inputs, targets))
        else:
            with pytest.warns(UserWarning, match="the loss Around .* pass loss_weight="):
                trainer.step((inputs, targets))


def test_ranks_and_stages_warn_alike(ranks):
    def train(stages):
        pipeline = ls.PipelineConfig(stages=stages, balance=(1,) * stages)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
        return len(said(total, model=model, pipeline=pipeline))

    assert sum(ranks(train, 3, 1)) == 1
    assert sum(ranks(train, 2, 2)) == 1
