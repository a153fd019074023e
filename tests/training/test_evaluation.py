"""Evaluations and predictions: metrics of whole datasets, outputs in the dataset's order."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import LossError, UsageError
from outcomes import Trainings

SGD = partial(torch.optim.SGD, lr=0.1)
PAIR = {"pipeline": ls.PipelineConfig(stages=2)}


def rows(samples=45):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))


def auc(outputs, targets):
    scores = outputs[:, 1] - outputs[:, 0]
    above = scores[targets == 1][:, None] > scores[targets == 0][None]
    return above.double().mean()


def build(model=None, loss=nn.functional.cross_entropy, **options):
    metrics = {"auc": ls.DatasetMetric(auc), "accuracy": ls.accuracy}
    options = {"metrics": metrics, "loggers": [], **options}
    return ls.Trainer(model or network(), loss, SGD, **options)


# --- one outcome for every number of ranks ----------------------------------------------------

training = Trainings()
outcomes = training.make_fixture(1, 3)


@training
def metrics_of_the_whole_set():
    trainer = build()
    for batch in trainer.batches(rows(), 16):
        trainer.step(batch)
    assert set(trainer.last_result.metrics) == {"accuracy"}
    evaluation = trainer.evaluate(rows(), 16)
    outputs = trainer.predict(rows(), 16)
    inputs, targets = rows().tensors
    with torch.no_grad():
        trainer.model.eval()
        assert torch.allclose(outputs, trainer.model(inputs), atol=1e-6)
    assert evaluation.metrics["auc"] == auc(outputs, targets).item()
    assert evaluation.metrics["accuracy"] == ls.accuracy(outputs, targets).item()
    same = trainer.predict(TensorDataset(inputs), 16), trainer.predict(list(inputs), 16)
    assert all(torch.equal(outputs, other) for other in same)
    return evaluation, ls.digest({"outputs": outputs})


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
def test_the_loss_is_the_mean_over_the_targets_that_are_not_ignored(ranks, loss):
    def evaluate():
        inputs, targets = rows(20).tensors
        targets[:9:2] = -100
        targets[10:15] = -100  # a whole micro-batch
        model = network()
        exact = ls.exact(model, microbatches=4)
        trained = build(network(), loss, microbatches=4)
        data = TensorDataset(inputs, targets)
        values = exact.evaluate(data, 20, loss=loss).loss, trained.evaluate(data, 20).loss
        model.eval()
        return *values, nn.functional.cross_entropy(model(inputs), targets).item()

    alone, *both = ranks(evaluate, 1) + ranks(evaluate, 2)
    assert both == [alone] * 2
    assert alone[0] == alone[1] == pytest.approx(alone[2], rel=1e-6)


@pytest.mark.usefixtures("world_of_one")
def test_a_loss_that_is_no_mean_over_samples_is_named():
    """It was added up as a mean, without a word."""
    inputs, targets = rows(20).tensors
    targets[:4] = -100
    exact = ls.exact(network(), microbatches=2)

    def own_loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    with pytest.warns(UserWarning, match=r"the loss own_loss is not a mean .* pass loss_weight="):
        exact.evaluate(TensorDataset(inputs, targets), 20, loss=own_loss)


TAKES = r"rank 0, evaluation batch 0, micro-batch 0: Linear.forward\(input\) cannot take the "


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            rows(8),
            TAKES + "micro-batch, a (tuple|list) of 2 .* pass a loss function, which gets the",
        ),
        ([{"x": row} for row in torch.ones(8, 6)], TAKES + "micro-batch, a dict of x .* name its"),
    ],
)
def test_what_the_model_cannot_take_is_named(data, said):
    exact = ls.exact(nn.Linear(6, 2), microbatches=2)
    with pytest.raises(UsageError, match=said):
        exact.evaluate(data, 8)


def test_a_mapping_has_the_arguments_of_the_model_in_predictions(ranks):
    def predict():
        model = network()[3]
        exact = ls.exact(model, microbatches=4)
        inputs = torch.arange(80.0).reshape(10, 8)
        outputs = exact.predict([{"input": row} for row in inputs], 6)
        assert torch.equal(outputs, exact.predict(TensorDataset(inputs, inputs), 6))
        return ls.digest({"outputs": outputs})

    assert len({*ranks(predict, 1), *ranks(predict, 2)}) == 1


class Detector(nn.Module):
    """Returns a loss in training and one mapping per sample in evaluation, as torchvision does."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, inputs, targets=None):
        scores = self.network(inputs)
        if self.training:
            return {"loss": nn.functional.cross_entropy(scores, targets), "scores": scores}
        return [{"score": row, "boxes": row.expand(int(row[0] > 0) + 1, 2)} for row in scores]


def count_boxes(outputs, targets):
    assert len(outputs) == len(targets)
    return sum(len(each["boxes"]) for each in outputs) / len(outputs)


@training
def a_detector():
    """Metrics get the outputs and the micro-batch; steps and evaluations get different outputs."""

    def score(outputs, batch):
        if isinstance(outputs, dict):
            return ls.accuracy(outputs["scores"], batch[1])
        return ls.accuracy(torch.stack([each["score"] for each in outputs]), batch[1])

    def select(outputs, batch):
        return outputs, batch[1]

    metrics = {"score": score, "boxes": ls.DatasetMetric(count_boxes, select)}
    trainer = build(Detector(), None, metrics=metrics)
    for batch in trainer.batches(rows(), 16):
        trainer.step(batch)
    evaluation = trainer.evaluate(rows(), 16)
    assert math.isnan(evaluation.loss)
    outputs = trainer.predict(TensorDataset(rows().tensors[0]), 16)
    assert len(outputs) == 45
    boxes = sum(len(each["boxes"]) for each in outputs)
    assert evaluation.metrics["boxes"] == boxes / 45
    digest = ls.digest({str(number): each["score"] for number, each in enumerate(outputs)})
    return trainer.last_result.metrics, evaluation.metrics, digest


def generate(noise_of):
    """Evaluate a discriminator by samples that a generator makes; return what it gave."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    judge = nn.Linear(6, 1)
    generator[1].bias.data.normal_()  # judged differently from sample to sample

    def fooled(outputs, data):
        return (judge(generator(noise_of(len(outputs)))) > 0).float().mean()

    judging = build(judge, None, metrics={"fooled": fooled}, extra_modules=[generator])
    evaluation = judging.evaluate(rows(64).tensors[0], 32)
    assert 0 < evaluation.metrics["fooled"] < 1
    assert not generator[1].running_mean.any()
    for batch in judging.batches(rows(64).tensors[0], 32):
        with judging.manual_step() as step:
            for data in step.microbatches(batch):
                step.backward(judge(data).square().mean())
    return evaluation.metrics, judging.digest()


@training
def metric_of_a_generator():
    """It was called a metric that is no mean, and its check wrote to batch norm on one rank."""
    return generate(lambda count: torch.randn(count, 4))


@training
def metric_with_noise_of_numpy():
    return generate(lambda count: torch.tensor(np.random.randn(count, 4), dtype=torch.float32))


test_outcomes = training.make_test()


def in_stages():
    """Outputs are those of the last stage; the loss is that of the model or of a function."""
    found = []
    for loss in (nn.functional.cross_entropy, None):
        model = network() if loss else nn.Sequential(*network(), WithLoss())
        layout = PAIR if ls.world_size() > 1 else {"pipeline": ls.PipelineConfig()}
        of_set, of_part = (auc, ls.accuracy) if loss else (count, mean)
        metrics = {"all": ls.DatasetMetric(of_set), "one": of_part}
        trainer = build(model, loss, metrics=metrics, **layout)
        data = rows() if loss else TensorDataset(rows().tensors[0])
        for batch in trainer.batches(data, 16):
            trainer.step(batch)
        outputs = trainer.predict(data, 16)
        found.append((trainer.last_result.metrics, trainer.evaluate(data, 16), str(outputs)))
    return found


class WithLoss(nn.Module):
    def forward(self, outputs):
        return {"loss": outputs.square().mean(), "outputs": outputs}


def count(outputs, batch):
    assert outputs["outputs"].shape == (45, 2)
    assert outputs["loss"].dim() == 1  # a number per micro-batch
    return len(batch[0])


def mean(outputs, batch):
    assert len(outputs["outputs"]) == len(batch[0])
    return outputs["outputs"].double().mean()


def test_stages_have_the_same_metrics_and_outputs(ranks):
    (alone,) = ranks(in_stages, 1)
    assert ranks(in_stages, 2) == [alone, alone]
    assert alone[1][1].metrics["all"] == 45


# --- what goes wrong --------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_a_metric_that_is_no_mean_over_samples_is_named():
    """It gave NaN, or a mean of AUCs of a few samples, without a word."""
    trainer = build(metrics={"auc": auc, "accuracy": ls.accuracy})
    with pytest.warns(UserWarning, match=r"the metric auc is not a mean .* ls\.DatasetMetric"):
        trainer.evaluate(rows(), 32)
    trainer.evaluate(rows(), 32)  # warns once; a warning here would be an error


@pytest.mark.usefixtures("world_of_one")
def test_a_metric_may_be_nan_in_steps():
    """The AUC of a micro-batch of one class; its mean in the epoch raised an error of fractions."""
    epochs = []
    metrics = {"auc": auc, "accuracy": ls.accuracy}
    trainer = build(metrics=metrics, callbacks=SimpleNamespace(on_epoch=epochs.append))
    for batch in trainer.batches(rows(), 16):
        trainer.step(batch)
        state = trainer.state_dict()
    assert math.isnan(trainer.last_result.metrics["auc"])
    assert math.isnan(epochs[0].metrics["auc"])
    assert 0 <= epochs[0].metrics["accuracy"] <= 1
    resumed = build(metrics=metrics)
    resumed.load_state_dict(state)
    assert resumed.digest() == trainer.digest()


@pytest.mark.usefixtures("world_of_one")
def test_a_warning_shows_the_line_of_the_program():
    """It showed a line inside of Lockstep."""
    trainer = build(metrics={"auc": auc})
    with pytest.warns(UserWarning, match="the metric auc is not a mean") as seen:
        trainer.evaluate(rows(), 32)
    assert seen[0].filename == __file__


@pytest.mark.usefixtures("world_of_one")
def test_a_model_without_a_loss_in_evaluation_needs_metrics():
    with pytest.raises(LossError, match="so the model must return its loss"):
        build(Detector(), None, metrics={}).evaluate(rows(), 16)


class Uneven(nn.Module):
    def forward(self, inputs):
        return inputs[:, : int(inputs[0, 0] > 0) + 1]


@pytest.mark.usefixtures("world_of_one")
def test_outputs_that_cannot_be_joined_are_refused():
    trainer = build(nn.Sequential(nn.Linear(6, 2), Uneven()), metrics={})
    with pytest.raises(UsageError, match=r"cannot be joined .*: let the model return tensors"):
        trainer.predict(rows(), 16)


@pytest.mark.usefixtures("world_of_one")
def test_a_metric_of_torchmetrics_is_reset():
    """It keeps what it was given, and a later evaluation would count it again."""
    torchmetrics = pytest.importorskip("torchmetrics.classification")
    f1 = torchmetrics.MulticlassF1Score(2)
    trainer = build(metrics={"f1": ls.DatasetMetric(f1)})
    outputs = trainer.predict(rows(), 16)
    targets = rows().tensors[1]
    expected = torchmetrics.MulticlassF1Score(2)(outputs, targets).item()
    assert trainer.evaluate(rows(), 16).metrics == {"f1": expected}
    assert not f1.update_called
