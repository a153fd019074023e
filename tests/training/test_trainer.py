"""The trainer as a user sees it: loops, resuming, averages, schedules, and what goes wrong."""

import contextlib
import copy
import gc
import json
import math
import os
import resource
import signal
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep as ls
import pytest_lockstep
from lockstep.checkpoint.folder import find_checkpoints
from lockstep.kernel.errors import (
    FileError,
    LayoutError,
    LossError,
    RankError,
    UsageError,
)
from lockstep.launcher.rank_process import take_failure_at_exit
from lockstep.processor_core import divide_cores
from lockstep.record import progress as progress_module
from lockstep.record.recorder import Recorder
from lockstep.tools.check.check_session import CheckSession
from lockstep.tools.check.layouts import Layout
from lockstep.training.session import open_session
from outcomes import Trainings

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def small_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def rows(samples=45):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


class Augmented(Dataset):
    """Samples with noise drawn when they are loaded."""

    def __len__(self):
        return 45

    def __getitem__(self, index):
        return rows().tensors[0][index] + 0.1 * torch.randn(6), int(rows().tensors[1][index])


def classifier(model=None, optimizer=SGD, **options):
    """Return the trainer of a classifier."""
    return ls.Trainer(model or small_model(), nn.CrossEntropyLoss(), optimizer, **options)


# --- one outcome for every number of ranks ----------------------------------------------------

training = Trainings()
outcomes = training.make_fixture(1, 3)


@training
def batches_of_an_augmented_dataset():
    found = []
    for workers in (0, 2):
        trainer = classifier()
        losses = [
            trainer.step(batch)
            for epoch in range(2)
            for batch in trainer.batches(Augmented(), 10, seed=5, epoch=epoch, num_workers=workers)
        ]
        assert len(losses) == 10
        found.append((losses, trainer.digest()))
    assert found[0] == found[1]
    return found[0]


@training
def manual_steps_have_the_bits_of_step():
    def train(is_manual, **options):
        model = small_model()
        loss = nn.CrossEntropyLoss()
        trainer = ls.Trainer(model, loss, SGD, metrics={"accuracy": ls.accuracy}, **options)
        for batch in trainer.batches(rows(), 10):
            if not is_manual:
                trainer.step(batch)
                continue
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(batch):
                    outputs = model(inputs)
                    accuracy = ls.accuracy(outputs, targets)
                    step.backward(loss(outputs, targets), metrics={"accuracy": accuracy})
        return trainer.digest(), trainer.history.last.loss, trainer.history.last.metrics

    def attempt():
        trainer = classifier(metrics={"accuracy": ls.accuracy})
        for batch in trainer.batches(rows(), 10):
            (only,) = trainer.attempts(batch)
            with only as step:
                for inputs, targets in step.microbatches():
                    outputs = trainer.model(inputs)
                    step.backward(
                        nn.functional.cross_entropy(outputs, targets),
                        metrics={"accuracy": ls.accuracy(outputs, targets)},
                    )
        return trainer.digest(), trainer.history.last.loss, trainer.history.last.metrics

    expected = train(False)
    assert train(True) == train(True, activation_checkpointing=True) == attempt() == expected
    return expected


@training
def several_backward_passes_add_up_within_a_microbatch():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    whole = classifier(copy.deepcopy(model))
    trainer = ls.Trainer(model, None, SGD)
    with trainer.manual_step() as step:
        for inputs, targets in step.microbatches(rows(16).tensors):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            step.backward(loss, retain_graph=True)
            step.backward(loss * 2)
    expected = 3 * whole.step(rows(16).tensors)
    assert step.result.loss == pytest.approx(expected, rel=1e-6)
    return trainer.digest()


@training
def groups_schedules_and_the_average():
    epochs = []
    steps = []
    digests = []
    trainer = classifier(
        optimizer=ls.OptimizerConfig(
            partial(torch.optim.AdamW, lr=0.01),
            lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {"lr": 0.02},
            partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
            scheduler_interval="epoch",
        ),
        ema_decay=0.9,
        max_grad_norm=0.1,
        callbacks=[steps.append, SimpleNamespace(on_epoch=epochs.append)],
    )
    for epoch in range(2):
        for batch in trainer.batches(rows(), 16, epoch=epoch):
            trainer.step(batch)
        digests.append(ls.digest(trainer.ema_model.state_dict()))
    groups = trainer.optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.005, 0.0025])
    assert [len(group["params"]) for group in groups] == [2, 2]
    assert [result.lr for result in steps] == pytest.approx([0.02] * 3 + [0.01] * 3)
    assert any(result.norm > 0.1 for result in steps)  # it was clipped
    assert [(result.epoch, result.samples) for result in epochs] == [(0, 45), (1, 45)]
    averaged = trainer.evaluate(rows(), 16, ema=True)
    assert averaged.samples == 45
    digests += [trainer.digest(), trainer.optimizer_digest()]
    return digests, averaged, [result.loss for result in epochs]


@training
def mixed_precision():
    dtypes = set()
    model = small_model()

    def keep(outputs, targets):
        dtypes.add(outputs.dtype)
        return 0.0

    trainer = classifier(model, autocast_dtype=torch.bfloat16, metrics={"kept": keep})
    trainer.step(rows(30).tensors)
    assert dtypes == {torch.bfloat16}
    assert model[0].weight.grad.dtype == torch.float32
    return trainer.digest()


@training
def bfloat16_parameters_round_at_each_node():
    trainer = classifier(small_model().bfloat16())
    inputs, targets = rows(30).tensors
    for _ in range(3):
        trainer.step((inputs.bfloat16(), targets))
    return trainer.digest()


@training
def evaluation_counts_every_sample_once_and_keeps_modes():
    model = small_model()
    model[1].eval()
    trainer = classifier(model, metrics={"accuracy": ls.accuracy})
    found = [trainer.evaluate(rows(45), size) for size in (45, 7)]
    assert model[0].training
    model.eval()
    inputs, targets = rows(45).tensors
    with torch.no_grad():
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    accuracy = ls.accuracy(outputs, targets)
    for evaluation in found:
        assert evaluation.samples == 45
        assert evaluation.loss == pytest.approx(float(loss), rel=1e-5)
        assert evaluation.metrics["accuracy"] == pytest.approx(float(accuracy))
    return found


@training
def evaluation_adds_losses_and_metrics_exactly():
    """A sum in any order of its own would have other last bits in another layout."""
    values = torch.tensor([1e16, 1.0, -1e16, 1.0, 1e16, -1e16, 0.5, 0.25], dtype=torch.float64)

    def mean(outputs, targets):
        return targets.mean()

    trainer = ls.Trainer(small_model(), mean, SGD, microbatches=4, metrics={"mean": mean})
    found = trainer.evaluate(TensorDataset(torch.zeros(8, 6), values), 4)
    assert (found.loss, found.metrics["mean"]) == (2.75 / 8, 2.75 / 8)


@training
def what_users_draw_between_steps():
    torch.manual_seed(8)
    trainer = classifier()
    drawn = []
    for batch in trainer.batches(rows(), 10):
        trainer.step(batch)
        drawn.append(torch.rand(()).item())
    assert len({*drawn}) == 5
    return drawn


@training
def channels_last_and_a_frozen_layer():
    digests = []
    for is_frozen in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(3, 5, 3),
            nn.BatchNorm2d(5),
            nn.Conv2d(5, 4, 3),
            nn.Flatten(),
            nn.Linear(64, 3),
        ).to(memory_format=torch.channels_last)
        model[0].requires_grad_(not is_frozen)
        trainer = classifier(model, max_grad_norm=0.3)
        inputs = torch.randn(27, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        before = model[0].weight.detach().clone()
        for _ in range(3):
            trainer.step((inputs, torch.arange(27) % 3))
        assert torch.equal(before, model[0].weight) == is_frozen
        digests.append(trainer.digest())
    return digests


@training
def a_module_that_is_unfrozen_later():
    model = small_model()
    model[0].requires_grad_(False)
    trainer = classifier(model)
    trainer.step(rows(20).tensors)
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    trainer.step(rows(20).tensors)
    assert not torch.equal(before, model[0].weight)
    return trainer.digest()


class Segments(nn.Module):
    """Dropout that reentrant checkpoints compute again; one layer in both and after them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.shared, self.first, self.second = (nn.Linear(6, 6) for _ in range(3))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        hidden = inputs.requires_grad_()
        for layer in (self.first, self.second):
            segment = nn.Sequential(self.shared, self.dropout, layer)
            hidden = checkpoint(segment, hidden, use_reentrant=True)
        return self.head(self.shared(hidden))


@training
def reentrant_checkpoints():
    trainer = classifier(Segments(), max_grad_norm=0.5)
    for samples in (16, 11):
        trainer.step(rows(samples).tensors)
    return trainer.digest()


@training
def a_penalty_of_the_gradient():
    """Double backward in a manual step."""
    model = small_model()
    trainer = ls.Trainer(model, None, SGD)
    for samples in (16, 11):
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(rows(samples).tensors):
                inputs.requires_grad_()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
                step.backward(loss + slope.square().sum(dim=1).mean())
    return trainer.digest()


class StochasticDepth(nn.Module):
    """Adds a layer to its input with a probability, which is 1 at first: nothing is drawn then."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.probability = 1.0

    def forward(self, inputs):
        if self.probability < 1 and torch.rand(()) > self.probability:
            return inputs
        return inputs + self.layer(inputs)


def draw_late(model):
    for block in model[:2]:
        block.probability = 0.5


def perturb_late(model):
    """Add noise to gradients, of a parameter and of an activation; forward draws nothing."""

    def perturb(gradient):
        return gradient + 0.01 * torch.randn_like(gradient)

    model[0].layer.weight.register_hook(perturb)
    model[1].register_forward_hook(lambda *given: given[2].register_hook(perturb) and None)


def train_with_late_draws(change, **options):
    """Train eight steps; return the digest. Until the sixth nothing draws random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(StochasticDepth(), StochasticDepth(), nn.Linear(6, 3))
    trainer = classifier(model, microbatches=4, **options)
    for step in range(8):
        if step == 5:
            change(model)
        trainer.step(rows(11).tensors)
    return trainer.digest()


@training
def random_numbers_that_are_drawn_only_later():
    changes = (draw_late, perturb_late, lambda model: None)
    digests = [train_with_late_draws(change) for change in changes]
    assert len({*digests}) == 3
    return digests


@training
def a_compiled_model_has_its_own_names_and_the_same_bits():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    trainers = [classifier(each, ema_decay=0.9) for each in (model, compiled)]
    for trainer in trainers:
        trainer.step(rows(32).tensors)
        assert list(trainer.state_dict()["model"]) == list(model.state_dict())
    assert trainers[0].digest() == trainers[1].digest()
    return trainers[0].digest()


test_every_number_of_ranks_has_the_same_outcome = training.make_test()


def test_a_block_that_draws_later_has_one_digest_in_stages(ranks):
    (alone,) = ranks(train_with_late_draws, 1, draw_late)
    stages = ls.PipelineConfig(stages=2, schedule="1f1b")
    assert ranks(partial(train_with_late_draws, draw_late, pipeline=stages), 2) == [alone] * 2


class Jitter(nn.Module):
    """Draws random numbers in evaluation mode, too."""

    def forward(self, inputs):
        return inputs + torch.rand(())


def test_every_microbatch_of_an_evaluation_draws_other_numbers(ranks):
    """The same ones on any number of ranks, and in each evaluation."""

    def evaluate():
        drawn = []

        def keep(outputs, targets):
            drawn.append(outputs[0, 0].item())
            return 0.0

        model = nn.Sequential(Jitter(), nn.Linear(6, 10))
        nn.init.ones_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        trainer = classifier(model, microbatches=4, metrics={"kept": keep})
        same = TensorDataset(torch.zeros(16, 6), torch.zeros(16, dtype=torch.int64))
        for _ in range(2):
            trainer.evaluate(same, 8)
        return drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]

    ((alone, again),) = ranks(evaluate, 1)
    assert alone == again
    assert len({*alone}) == 8  # two batches of four micro-batches
    of_ranks = [number for first, _ in ranks(evaluate, 3) for number in first]
    assert sorted(of_ranks) == sorted(alone)


@pytest.mark.usefixtures("world_of_one")
def test_the_average_is_the_exponential_moving_average():
    model = nn.Linear(1, 1, bias=False)
    trainer = ls.Trainer(model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), ema_decay=0.5)
    expected = None
    for _ in range(4):
        trainer.step((torch.ones(8, 1), torch.zeros(8, 1)))
        weight = model.weight.item()
        expected = weight if expected is None else expected + 0.5 * (weight - expected)
    assert trainer.ema_model.weight.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("world_of_one")
def test_epochs_without_a_number_follow_each_other():
    def make():
        return classifier()

    numbered = make()
    again = make()
    reused = make()
    parts = make()
    for epoch in range(3):
        for batch in numbered.batches(rows(), 10, epoch=epoch):
            numbered.step(batch)
        assert again.epoch == max(0, epoch - 1)
        for batch in again.batches(rows(), 10):
            again.step(batch)
    loader = reused.batches(rows(), 10)
    for epoch in range(3):
        assert [batch.epoch for batch in loader if reused.step(batch)] == [epoch] * len(loader)
    assert numbered.digest() == again.digest() == reused.digest()

    interrupted = parts.batches(rows(), 10)
    for count in (None, 2):  # stopped in epoch 1
        for batch in islice(interrupted, count):
            parts.step(batch)
    rest = make()
    rest.load_state_dict(parts.state_dict())
    continued = rest.batches(rows(), 10)
    continued.load_state_dict(interrupted.state_dict())
    for _ in range(2):
        for batch in continued:
            rest.step(batch)
    assert (rest.epoch, rest.digest()) == (2, numbered.digest())
    rest.load_state_dict(parts.state_dict())
    assert rest.batches(rows(), 10).epoch == 1
    rest.load_state_dict(again.state_dict())
    assert rest.batches(rows(), 10).epoch == 3
    assert rest.batches(rows(), 10, epoch=7).epoch == 7


@pytest.mark.usefixtures("world_of_one")
def test_a_state_of_another_seed_is_refused():
    state = classifier(seed=1).state_dict()
    other = classifier(seed=2)
    with pytest.raises(UsageError, match="saved with seed=1, this trainer has seed=2"):
        other.load_state_dict(state)


@pytest.mark.usefixtures("world_of_one")
def test_a_checkpoint_of_another_seed_is_refused(tmp_path):
    checkpoint = ls.CheckpointConfig(folder=tmp_path / "run")
    with classifier(seed=1, checkpoint=checkpoint) as trainer:
        trainer.step(rows()[:8])
    other = classifier(seed=2, checkpoint=checkpoint)
    with pytest.raises(UsageError, match="the checkpoint was saved with seed=1, this trainer has"):
        other.resume()
    other.finish("failed")


# --- the record ---------------------------------------------------------------------------


def test_rank_zero_records_the_run_line_by_line(ranks, tmp_path):
    def train():
        with ls.Trainer(
            small_model(),
            nn.CrossEntropyLoss(),
            SGD,
            metrics={"accuracy": ls.accuracy},
            loggers=Recorder(tmp_path / "run", {"recipe": "rows", "epochs": 2})
            if ls.rank() == 0
            else (),
        ) as trainer:
            for epoch in range(2):
                for batch in trainer.batches(rows(), 16, epoch=epoch):
                    trainer.step(batch)
                evaluation = trainer.evaluate(rows(), 16)
            return trainer.digest(), evaluation.loss, trainer.folder

    (digest, loss, folder), (*_, elsewhere) = ranks(train, 2)
    assert folder == elsewhere == tmp_path / "run"
    lines = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == [
        "run", "step", "step", "step", "epoch", "step", "step", "step", "epoch", "end",
    ]  # fmt: skip
    header = lines[0]
    step = lines[1]
    epoch = lines[8]
    end = lines[9]
    assert header["layout"]["replicas"] == 2
    assert header["recipe"] == "rows"
    assert header["environment"]["torch"] == torch.__version__
    assert step["samples"] == 16
    assert len(step["ranks"]) == 2
    assert all(len(row) == 4 and min(row) >= 0 for row in step["ranks"])
    assert set(step["metrics"]) == {"accuracy"}
    assert epoch["evaluation"]["loss"] == loss
    assert len(epoch["memory_bytes"]) == 2
    assert end["state"] == "done"
    assert end["digest"] == digest


@pytest.mark.usefixtures("world_of_one")
def test_a_record_that_cannot_be_finished_fails_the_run_at_its_end(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    trainer = classifier(loggers=tmp_path / "run")
    record = str(tmp_path / "run" / "record.jsonl")
    (descriptor,) = (
        int(each)
        for each in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{each}") == record
    )
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), descriptor)
    losses = [trainer.step(batch) for batch in trainer.batches(rows(), 16)]
    assert len(losses) == 3
    trainer.finish()
    assert "No space left on device" in str(take_failure_at_exit())
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.usefixtures("world_of_one")
def test_a_run_without_a_folder_or_a_step_says_so():
    """A check gets a temporary folder instead, which is removed with the trainer."""
    trainer = classifier(loggers=[])
    with pytest.raises(UsageError, match='the run has no folder: pass loggers="runs/mine"'):
        _ = trainer.folder
    with pytest.raises(UsageError, match="last_result: no step has been taken"):
        _ = trainer.last_result
    with open_session(CheckSession(Layout(1), 1, print)):
        trainer = classifier()
        folder = trainer.folder
    assert trainer.folder == folder
    assert folder.is_dir()
    del trainer
    gc.collect()
    assert not folder.exists()


@pytest.mark.usefixtures("world_of_one")
def test_an_exception_ends_the_record_as_failed(tmp_path):
    def fail():
        with classifier(loggers=tmp_path / "run"):
            raise ValueError("my own")

    with pytest.raises(ValueError, match="my own"):
        fail()
    end = json.loads((tmp_path / "run/record.jsonl").read_text().splitlines()[-1])
    assert (end["state"], end["message"]) == ("failed", "ValueError: my own")


@pytest.mark.usefixtures("world_of_one")
def test_rank_0_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "LINE_INTERVAL", 0.0)
    monkeypatch.setattr(progress_module, "EPOCH_INTERVAL", 0.0)
    monkeypatch.setattr(progress_module.Progress, "_shown", None)

    def train(**options):
        """Return what a training of two epochs of three steps shows."""
        with classifier(**options) as trainer:
            for epoch in range(2):
                for batch in trainer.batches(rows(), 16, epoch=epoch):
                    trainer.step(batch)
            trainer.evaluate(rows(), 16)
            trainer.step(rows(16).tensors)
        written = capsys.readouterr()
        assert written.out == ""
        return [line.split("  loss")[0] for line in written.err.splitlines()]

    shown = train()
    assert shown[:4] == [*(f"epoch 1  step {n}/3" for n in (1, 2, 3)), "epoch 1"]
    assert shown[7:] == ["epoch 2", "epoch 2  step 4"]
    assert train(progress=False) == []
    with open_session(CheckSession(Layout(1), 99, lambda fingerprint: None)):
        assert train() == []
    other = classifier()
    for batch in other.batches(rows(), 45):
        other.step(batch)
    assert train() == ["epoch 1  step 1/1"]  # of the other one, which is shown
    assert train(progress=True) == shown
    other.finish()


# --- what goes wrong ------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_stops_all_ranks_before_the_weights_change(ranks, tmp_path):
    def train(storage):
        trainer = classifier(loggers=tmp_path / storage, storage=storage)
        trainer.step(rows(40).tensors)
        good = trainer.digest()
        inputs = rows(40).tensors[0].clone()
        inputs[27, 0] = math.inf
        with pytest.raises(
            LossError, match="rank 1, step 1, micro-batch 5: the loss is nan"
        ) as raised:
            trainer.step((inputs, rows(40).tensors[1]))
        assert trainer.digest() == good
        return str(raised.value)

    storages = ("replicated", "shared")
    for found in ranks(lambda: [*map(train, storages)], 3):
        for message in found:
            assert "rank 1, step 1, micro-batch 5: the loss is nan; training stopped" in message


def test_more_replicas_than_microbatches_is_said_at_once(ranks):
    with pytest.raises(RankError, match="3 replicas share 2 micro-batches"):
        ranks(lambda: classifier(microbatches=2), 3)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"microbatches": 0}, LayoutError, "at least one"),
        (
            {"autocast_dtype": torch.float64},
            UsageError,
            "float16 or torch.float32, not torch.float64",
        ),
        ({"storage": "split"}, UsageError, '"sharded" or "hybrid", not'),
        ({"callbacks": [1]}, UsageError, "a int is neither a function that takes a StepResult"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)},
            UsageError,
            "pass a factory",
        ),
    ],
)
def test_wrong_arguments_get_one_sentence(wrong, error, sentence):
    arguments = {"model": small_model(), "loss": nn.CrossEntropyLoss(), "optimizer": SGD} | wrong
    with pytest.raises(error, match=sentence):
        ls.Trainer(**arguments)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("loss", "batch", "sentence"),
    [
        (
            nn.CrossEntropyLoss(reduction="none"),
            rows(16).tensors,
            r"rank 0, step 0, micro-batch 0: the loss has shape \(2,\); it must be a scalar",
        ),
        (lambda o, t: 1.0, rows(16).tensors, r"a float, not a tensor: leave out .item\(\) or"),
        (
            lambda o, t: o.detach().sum(),
            rows(16).tensors,
            r"depends on no trainable parameter; .* or detached by .detach\(\)",
        ),
        (
            lambda o, t: (o, o.sum()),
            rows(16).tensors,
            r"returned a tuple that begins with \(2, 3\) float32: return the loss first, or alone",
        ),
        (
            lambda o, t: {"mean": o.mean()},
            rows(16).tensors,
            "returned a dict of 'mean': return the loss alone, or under the key \"loss\"",
        ),
        (lambda o, t: o.sum() * 1j, rows(16).tensors, "micro-batch 0: the loss is complex; pass"),
        (lambda o, t: None, rows(16).tensors, "returned None: end it with `return loss`"),
        (
            nn.CrossEntropyLoss(),
            (torch.zeros(16, 6), torch.arange(16)),
            r"micro-batch 1: the loss CrossEntropyLoss failed on outputs \(2, 3\) float32 and "
            r"targets \(2,\) int64 with values 2 to 3: IndexError: Target 3 is out of bounds",
        ),
        (nn.CrossEntropyLoss(), torch.zeros(16, 6), "a pair .inputs, targets., not a Tensor"),
        (nn.CrossEntropyLoss(), (torch.zeros(4, 6), torch.zeros(5)), "has 4 samples"),
    ],
    ids=[
        "shape",
        "float",
        "detached",
        "last",
        "key",
        "complex",
        "none",
        "label",
        "no pair",
        "sizes",
    ],
)
def test_a_wrong_loss_or_batch_is_named_with_its_place(loss, batch, sentence):
    trainer = ls.Trainer(small_model(), loss, SGD)
    before = trainer.digest()
    with pytest.raises(ls.LockstepError, match=sentence):
        trainer.step(batch)
    assert trainer.digest() == before


@pytest.mark.usefixtures("world_of_one")
def test_an_exception_in_a_loop_of_ones_own_undoes_the_step():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    before = trainer.digest()
    state = torch.get_rng_state()

    def step():
        with trainer.manual_step() as step:
            for number, (inputs, targets) in enumerate(step.microbatches(rows(32).tensors)):
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
                if number == 2:
                    raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        step()
    assert caught.value.__notes__ == ["in rank 0, step 0, micro-batch 2"]
    assert trainer.digest() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert trainer.step(rows(32).tensors) > 0


def failed_step(trainer):
    """Return a manual step that an exception of the loop ended."""
    with contextlib.suppress(KeyError), trainer.manual_step() as step:
        raise KeyError("mine")
    return step


@pytest.mark.usefixtures("world_of_one")
def test_a_manual_step_has_a_result_once_it_was_entered_and_left():
    model = nn.Linear(6, 3)
    initial = copy.deepcopy(model)
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    with pytest.raises(UsageError, match=r"manual_step\(\) was not entered: write `with"):
        trainer.manual_step().microbatches(rows(16).tensors)
    with pytest.warns(RuntimeWarning, match="its context was never entered"):
        trainer.manual_step()
    with trainer.manual_step() as step:
        with pytest.raises(UsageError, match=r"no result yet: read step.result after the block"):
            _ = step.result
        for inputs, targets in step.microbatches(rows(16).tensors):
            step.backward(nn.functional.cross_entropy(trainer.model(inputs), targets))
    inputs, targets = rows(16).tensors
    whole = nn.functional.cross_entropy(initial(inputs), targets)
    assert step.result.loss == pytest.approx(whole.item())
    assert step.result.step == 0
    with pytest.raises(UsageError, match="an exception ended it"):
        _ = failed_step(trainer).result
    with pytest.raises(UsageError, match="has ended"):
        step.microbatches(rows(16).tensors)
    assert trainer.steps == 1


@pytest.mark.usefixtures("world_of_one")
def test_misuse_of_the_step_object_is_explained():
    model = nn.Linear(6, 3)
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    batch = rows(16).tensors

    def leave_early():
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
                break

    def forget_backward():
        with trainer.manual_step() as step:
            for _ in step.microbatches(batch):
                pass

    def backward_outside():
        with trainer.manual_step() as step:
            step.backward(torch.zeros((), requires_grad=True))

    def two_batches():
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
            next(step.microbatches(batch))

    for misuse, sentence in [
        (leave_early, "left before its last micro-batch"),
        (forget_backward, "was not called"),
        (backward_outside, "inside the loop over step.microbatches"),
        (two_batches, "one step takes one batch"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            misuse()
    assert trainer.steps == 0


@pytest.mark.usefixtures("world_of_one")
def test_a_data_loader_trains_and_evaluates_like_its_dataset():
    """It was read as a dataset whose samples are batches."""
    digests = []
    evaluations = []
    loader = DataLoader(rows(), 16, shuffle=True, drop_last=True)
    for arguments, options in [((rows(), 16), {"drop_last": True}), ((loader,), {})]:
        trainer = classifier()
        for epoch in range(2):
            for batch in trainer.batches(*arguments, epoch=epoch, **options):
                trainer.step(batch)
        assert trainer.steps == 2 * (45 // 16)
        digests.append(trainer.digest())
        held_out = [rows(), 16] if options else [DataLoader(rows(), 16)]
        evaluations.append(trainer.evaluate(*held_out))
        with pytest.raises(UsageError, match="batch size is missing: pass batch_size="):
            trainer.batches(rows())
        with pytest.raises(UsageError, match="batch size is missing: pass batch_size="):
            trainer.evaluate(rows())
    assert digests[0] == digests[1]
    assert evaluations[0] == evaluations[1]
    assert evaluations[0].samples == 45


@pytest.mark.usefixtures("world_of_one")
def test_calls_that_do_not_fit_say_what_to_write():
    trainer = classifier(nn.Linear(6, 3))
    batch = rows(16).tensors
    step = r"^trainer.step takes one batch, .*: write `loss = trainer.step\(batch\)`, or `with tr"
    several = r"; for several batches write `for batch in trainer.batches\(...\): trainer.step\(b"
    with pytest.raises(UsageError, match=several):
        trainer.step(DataLoader(rows(), 16))
    for call, sentence in [
        (lambda: trainer.step(), step),
        (lambda: trainer.step(*batch), step),
        (lambda: trainer.step(inputs=batch), step),
        (lambda: trainer.manual_step(batch), "takes no batch: write `with trainer.manual_step"),
        (lambda: trainer.batches(), r"write `for batch in trainer.batches\(dataset, batch_size\)"),
        (lambda: trainer.evaluate(rows(), 16, 16), r"write `trainer.evaluate\(dataset, batch_size"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            call()
    assert trainer.steps == 0
    trainer.step(batch)
    digest = trainer.digest()
    with pytest.raises(UsageError, match=r"trainer.optimizer.step\(\) would step it once more"):
        trainer.optimizer.step()
    assert trainer.digest() == digest
    trainer.step(batch)
    for wrong, hint in {"grad_clip": "max_grad_norm=", "microbatch": "microbatches="}.items():
        with pytest.raises(UsageError, match=f"^ls.Trainer has no argument {wrong}: write {hint}$"):
            ls.Trainer(nn.Linear(6, 3), None, SGD, **{wrong: 1})
    takes = r"Bilinear.forward\(input1, input2\) cannot take the micro-batch, a Tensor .*'input2'"
    with pytest.raises(UsageError, match=takes):
        ls.Trainer(nn.Bilinear(6, 6, 3), None, SGD).step(batch[0])


@pytest.mark.usefixtures("world_of_one")
def test_a_plateau_is_given_the_loss_of_each_epoch_or_of_the_scripts_choice():
    """With the default interval the first step raised TypeError, after the weights changed."""
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.9)
    losses = []
    config = ls.OptimizerConfig(SGD, scheduler=plateau)
    trainer = ls.Trainer(
        small_model(), nn.CrossEntropyLoss(), config,
        callbacks=SimpleNamespace(on_epoch=lambda result: losses.append(result.loss)),
    )  # fmt: skip
    rates = []
    for epoch in range(3):
        for batch in trainer.batches(rows(), 16, epoch=epoch):
            trainer.step(batch)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.001])
    assert trainer.scheduler.best == losses[0]
    by_hand = partial(plateau, mode="max")
    config = ls.OptimizerConfig(SGD, scheduler=by_hand, scheduler_interval="manual")
    trainer = ls.Trainer(small_model(), nn.CrossEntropyLoss(), config)
    for value, rate in [(0.5, 0.1), (0.4, 0.01)]:
        for batch in trainer.batches(rows(), 16):
            trainer.step(batch)
        trainer.scheduler.step(value)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    for options in ({"scheduler": plateau, "scheduler_interval": "step"}, {"scheduler": by_hand}):
        with pytest.raises(
            UsageError, match=r"leave scheduler_interval=.* call trainer.scheduler."
        ):
            ls.Trainer(small_model(), None, ls.OptimizerConfig(SGD, **options))


def test_weights_that_cannot_be_written_fail_on_every_rank(ranks, tmp_path):
    (tmp_path / "model.pt").mkdir()

    def save():
        trainer = classifier()
        said = []
        for path in (tmp_path / "model.pt", tmp_path / "new" / "folder" / "model.pt"):
            try:
                trainer.save_weights(path)
            except FileError as error:
                said.append(str(error))
        return said

    for in_the_way, missing in ranks(save, 2):
        assert "model.pt: the weights could not be written (Is a directory)" in in_the_way
        assert missing.endswith(f"the folder {tmp_path}/new/folder does not exist: create it first")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("world_of_one")
def test_the_suffix_of_a_weights_file_decides_its_format(tmp_path, capfd):
    """`torch.load` rejected "model.pt", which was safetensors."""
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = nn.Parameter(torch.randn(9)[:9].view(3, 3).t())  # a view of more memory
    model[2].bias = model[0].bias  # tied
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    for name in ("model.pt", "model.pth", "model.bin", "model.ckpt", "model.safetensors"):
        trainer.save_weights(tmp_path / name)
        if name.endswith(".safetensors"):
            state = load_file(tmp_path / name)
        else:
            state = torch.load(tmp_path / name, weights_only=True)
        assert list(state) == list(model.state_dict()) or name == "model.safetensors"
        assert ls.digest(state) == trainer.digest() == ls.digest(trainer.model)
        model.load_state_dict(state)
    assert capfd.readouterr().err == ""
    trainer.save_weights(tmp_path / "model")  # an error would cost the weights
    assert ls.digest(load_file(tmp_path / "model")) == trainer.digest()
    said = capfd.readouterr().err
    assert said.endswith("model is written as safetensors; for torch.load use the suffix .pt\n")


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_disk_that_fills_leaves_the_old_weights(ranks, tmp_path, name):
    path = tmp_path / name

    def save():
        trainer = classifier()
        trainer.save_weights(path)
        saved = trainer.digest()
        trainer.step(rows(16).tensors)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            trainer.save_weights(path)
        except FileError as error:
            return str(error), saved
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    ((message, saved),) = ranks(save, 1)
    assert "File too large" in message
    assert ls.digest(torch.load(path) if name == "model.pt" else load_file(path)) == saved
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.usefixtures("world_of_one")
def test_an_epoch_that_is_repeated_by_mistake_is_named(tmp_path):
    """The same number in every epoch repeats order and augmentation without a word."""
    trainer = classifier(loggers=tmp_path / "run")
    data = rows(32)

    def train(**options):
        for batch in trainer.batches(data, 16, **options):
            trainer.step(batch)

    for epoch in (0, 1, None):  # as it should be
        train(epoch=epoch)
    for _ in range(2):
        train(shuffle=False, epoch=7)  # the order is the same in any epoch
    train(epoch=3)
    said = r"test_trainer.py:\d+: epoch 3 is trained again, .* epoch=epoch\), or leave epoch= out"
    with pytest.warns(UserWarning, match=said):
        train(epoch=3)
    train(epoch=3)  # warns once; a warning here would be an error
    trainer.finish()
    lines = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines].count("warning") == 1


def train_without_init():
    """Return the digest of a training whose script never calls `init`."""
    torch.manual_seed(1)
    trainer = ls.Trainer(nn.Linear(4, 2), nn.MSELoss(), SGD, microbatches=2, loggers=[])
    try:
        assert torch.get_num_threads() == divide_cores(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        trainer.step((torch.ones(4, 4), torch.ones(4, 2)))
        return trainer.digest()
    finally:
        ls.shutdown()


def test_a_trainer_joins_the_world_by_itself():
    found = pytest_lockstep.run(train_without_init, ranks=2, init=False)
    assert found == [train_without_init()] * 2


@pytest.mark.usefixtures("world_of_one")
def test_checkpoints_of_the_default_settings(tmp_path):
    options = {"microbatches": 2, "loggers": tmp_path / "run"}
    with ls.Trainer(nn.Linear(4, 2), nn.MSELoss(), SGD, checkpoint=True, **options) as trainer:
        trainer.step((torch.ones(4, 4), torch.ones(4, 2)))
    assert len(find_checkpoints(tmp_path / "run" / "checkpoints")) == 1
    with pytest.raises(UsageError, match=r"checkpoint='runs': expected True, False or a lockstep"):
        ls.Trainer(nn.Linear(4, 2), nn.MSELoss(), SGD, checkpoint="runs", **options)
