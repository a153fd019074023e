"""Habits of Lightning's users: the same on 1 and 3 ranks.

Each training returns what its callbacks, schedulers and loggers have seen. All of them run in one
launch per number of ranks.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import lockstep as ls

pytestmark = pytest.mark.timeout(600)  # one launch has all trainings of the module

MICROBATCHES = 4  # batches of 12, 12, 12 and 5 samples
SIZE = 3
SAMPLES = 41
HELD_OUT = 17  # samples, in batches of 4
TRAINED = (1, 3)  # numbers of ranks; on 2, only what is refused is tried

Outcome = dict[str, Any]
trainings: dict[str, Callable[[], Outcome]] = {}


def training(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Register a training by its name."""
    trainings[function.__name__] = function
    return function


def make_data(samples: int = SAMPLES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def make_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(make_data(), SIZE, shuffle=True, **options)


def make_held_out(size: int = 4) -> DataLoader[Any]:
    return DataLoader(make_data(HELD_OUT, 2), size)


def make_module(**methods: Any) -> Any:
    """Return a module whose class has some more methods."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
            self.lr = 0.1

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            outputs = self.network(batch[0])
            self.log("val_loss", nn.functional.cross_entropy(outputs, batch[1]))
            self.log("val_accuracy", (outputs.argmax(1) == batch[1]).float().mean())

        test_step = validation_step

        def predict_step(self, batch: Any, index: int) -> Any:
            return {"outputs": self.network(batch[0]), "index": index}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module()


def make_trainer(strategy: Any = None, **options: Any) -> Any:
    import lightning.pytorch as pl

    from lockstep.integrations.lightning import ExactStrategy

    warnings.simplefilter("error")
    for message in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "The '.*dataloader' does not have many workers",
        "The number of training batches",
        "You requested to overfit but enabled",
        "Your `IterableDataset` has `__len__` defined",
        "Your `val_dataloader`'s sampler has shuffling enabled",
        "You defined a `validation_step` but have no `val_dataloader`",
        "SWA is currently only supported",
        "torch.distributed.nn.functional.all_gather is deprecated",
    ):
        warnings.filterwarnings("ignore", message)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    return pl.Trainer(
        accelerator="cpu",
        devices=ls.world_size(),
        strategy=strategy or ExactStrategy(MICROBATCHES, seed=3),
        **options,
    )


def describe(trainer: Any, module: Any, **more: Any) -> Outcome:
    """Return what must be equal on any number of ranks."""
    metrics = {name: float(value).hex() for name, value in trainer.callback_metrics.items()}
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    digest = ls.digest(module)
    return {
        "digest": digest,
        "metrics": metrics,
        "steps": trainer.global_step,
        "rates": rates,
    } | more


def fit(module: Any = None, train: Any = None, held_out: Any = None, **options: Any) -> Outcome:
    module = module or make_module()
    trainer = make_trainer(**options)
    train = make_loader() if train is None else train
    trainer.fit(module, train, make_held_out() if held_out is None else held_out)
    return describe(trainer, module)


# --- Validation, test, prediction --------------------------------------------------------------


@training
def following_a_metric() -> Outcome:
    """EarlyStopping, ReduceLROnPlateau and ModelCheckpoint follow the validation."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]

    module = make_module(configure_optimizers=configure_optimizers)
    with TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
        stopping = EarlyStopping("val_accuracy", mode="max", patience=2)
        trainer = make_trainer(callbacks=[best, stopping], max_epochs=9, enable_checkpointing=True)
        trainer.fit(module, make_loader(), make_held_out())
        score = float(best.best_model_score).hex()
        return describe(trainer, module, score=score, stopped=stopping.stopped_epoch)


@training
def validation_test_and_prediction() -> Outcome:
    module = make_module()
    trainer = make_trainer()
    held_out = make_held_out()
    validated = trainer.validate(module, held_out, verbose=False)
    tested = trainer.test(module, [held_out, make_held_out(16)], verbose=False)
    predicted = trainer.predict(module, held_out)
    outputs = torch.cat([part["outputs"] for part in predicted])
    assert [part["index"] for part in predicted] == list(range(5))
    inputs, targets = held_out.dataset.tensors
    expected = module.network(inputs)
    torch.testing.assert_close(outputs, expected)
    loss = nn.functional.cross_entropy(expected, targets).item()
    assert validated[0]["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert tested[1]["val_loss/dataloader_idx_1"] == pytest.approx(loss, rel=1e-6)
    return {"validated": validated, "tested": tested, "predicted": outputs.tolist()}


@training
def a_single_batch_to_validate() -> Outcome:
    """One rank has it, and the others must know the metrics."""
    return fit(held_out=make_held_out(32), check_val_every_n_epoch=2)


@training
def random_numbers_and_buffers_in_a_validation() -> Outcome:
    def validation_step(self: Any, batch: Any, index: int) -> None:
        self.log("val_noise", self.network(batch[0] + torch.randn_like(batch[0])).sum())

    after = []

    def on_train_epoch_start(self: Any) -> None:
        after.append(torch.rand(()).item())

    outcome = fit(
        make_module(validation_step=validation_step, on_train_epoch_start=on_train_epoch_start)
    )
    return outcome | {"after": after}


@training
def a_buffer_that_the_module_writes() -> Outcome:
    """The profiler of Trainer refers to the module by a proxy, which was taken for another one."""
    module = make_module()
    type(module).lockstep_buffer_rules = {"seen": "sum"}
    module.register_buffer("seen", torch.zeros(()))
    step = type(module).training_step

    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        self.seen += len(batch[0])
        return step(self, batch, index)

    type(module).training_step = training_step
    trainer = make_trainer()
    trainer.fit(module, make_loader(), make_held_out())
    assert module.seen == 2 * SAMPLES
    return describe(trainer, module)


@training
def random_numbers_of_a_hook() -> Outcome:
    """It draws once per batch, after the batch was loaded."""

    def on_train_batch_start(self: Any, batch: Any, index: int) -> None:
        self.scale = torch.rand(()).item()

    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        return self.scale * nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    hooks = {"on_train_batch_start": on_train_batch_start, "training_step": training_step}
    return fit(make_module(**hooks))


@training
def random_numbers_after_the_batches_of_a_validation() -> Outcome:
    """They belonged to the last batch of a rank, and were the same in each validation."""
    drawn: list[float] = []

    def draw(self: Any) -> None:
        drawn.append(torch.rand(()).item())

    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        scale = drawn[-1] if drawn else 1.0
        return scale * nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    hooks = {"on_validation_epoch_end": draw, "on_validation_end": draw}
    # Within an epoch, this rank has loaded its next batch of the training already.
    options: list[dict[str, Any]] = [{}, {"limit_val_batches": 3}, {"val_check_interval": 2}]
    outcomes = []
    for given in options:
        outcomes.append(fit(make_module(**hooks, training_step=training_step), **given))
    assert len({*drawn}) == 8  # two in each evaluation; those of the sanity check are repeated
    return {"outcomes": outcomes, "drawn": drawn}


@training
def shuffled_and_random_data_to_validate() -> Outcome:
    def noisy(samples: Any) -> Any:
        inputs, targets = torch.utils.data.default_collate(samples)
        return inputs + torch.rand_like(inputs), targets

    data = make_data(HELD_OUT, 2)
    outcomes = []
    for workers in (0, 2):
        loader = DataLoader(data, 4, shuffle=True, collate_fn=noisy, num_workers=workers)
        outcomes.append(fit(held_out=loader))
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


# --- Metrics -----------------------------------------------------------------------------------


@training
def metrics_of_torchmetrics() -> Outcome:
    import torchmetrics

    def validation_step(self: Any, batch: Any, index: int) -> None:
        outputs = self.network(batch[0])
        for metric in (self.accuracy, self.area):
            metric.update(outputs.softmax(1), batch[1])
        self.log("accuracy", self.accuracy)
        self.log("area", self.area)

    def training_step(self: Any, batch: Any, index: int) -> Any:
        outputs = self.network(batch[0])
        self.log("train_accuracy", self.of_training(outputs, batch[1]), on_epoch=True)
        self.log("epoch_accuracy", self.of_training, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(outputs, batch[1])

    module = make_module(validation_step=validation_step, training_step=training_step)
    classes = {"task": "multiclass", "num_classes": 3}
    module.accuracy = torchmetrics.Accuracy(**classes)
    module.of_training = torchmetrics.Accuracy(**classes)
    module.area = torchmetrics.AUROC(**classes)
    return fit(module)


@training
def outputs_that_are_kept() -> Outcome:
    """With divide_evaluation=False every rank has all of them."""
    from lockstep.integrations.lightning import ExactStrategy

    def validation_step(self: Any, batch: Any, index: int) -> None:
        self.kept.append(self.network(batch[0]))
        self.log("val_loss", self.kept[-1].square().mean())

    def on_validation_epoch_end(self: Any) -> None:
        self.log("val_norm", torch.cat(self.kept).norm())
        self.kept.clear()

    module = make_module(
        validation_step=validation_step, on_validation_epoch_end=on_validation_epoch_end
    )
    module.kept = []
    return fit(module, strategy=ExactStrategy(MICROBATCHES, divide_evaluation=False))


@training
def values_of_steps() -> Outcome:
    """What training_step logs is that of the whole batch, also for callbacks."""
    import lightning.pytorch as pl

    class Recorder(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            step = trainer.callback_metrics["train_loss_step"].item()
            self.seen.append((index, step, outputs["loss"].item()))
            assert step == pytest.approx(outputs["loss"].item(), rel=1e-6)

    recorder = Recorder()
    outcome = fit(callbacks=[recorder])
    assert [index for index, *_ in recorder.seen] == 2 * [0, 1, 2, 3]
    return outcome | {"seen": recorder.seen}


# --- Counts ------------------------------------------------------------------------------------


@training
def values_of_steps_count_all_samples() -> Outcome:
    """The last batch has micro-batches of 2, 1, 1 and 1 samples, which counted alike."""
    seen: list[float] = []
    norms: list[list[float]] = []

    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss_of_step", loss)
        self.log("size", 1.0, batch_size=torch.tensor(len(batch[0])), reduce_fx="sum")
        return loss

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, index: int) -> None:
        torch.testing.assert_close(self.trainer.callback_metrics["loss_of_step"], outputs["loss"])
        seen.append(float(outputs["loss"]))

    def on_after_backward(self: Any) -> None:
        norms.append([float(one.grad.norm()) for one in self.parameters()])
        self.log("norm", norms[-1][0], on_epoch=True)

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        assert norms[-1] == [float(one.grad.norm()) for one in self.parameters()]

    def validation_step(self: Any, batch: Any, index: int) -> None:
        self.log("half", float(index), batch_size=0 if index % 2 else 4)

    hooks = [training_step, on_train_batch_end, on_after_backward, on_before_optimizer_step]
    methods = {hook.__name__: hook for hook in [*hooks, validation_step]}
    outcome = fit(make_module(**methods))
    assert outcome["metrics"]["half"] == (2.0).hex()  # of the batches 0, 2 and 4
    assert len(norms) == 8  # one per batch
    return outcome | {"seen": seen, "norms": norms}


@training
def a_schedule_from_the_number_of_steps() -> Outcome:
    def configure_optimizers(self: Any) -> Any:
        steps = self.trainer.estimated_stepping_batches
        assert steps == 8
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=int(steps))
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    return fit(make_module(configure_optimizers=configure_optimizers))


@training
def a_schedule_of_every_second_step() -> Outcome:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": decay, "interval": "step", "frequency": 2}]

    return fit(make_module(configure_optimizers=configure_optimizers))


@training
def validation_within_an_epoch() -> Outcome:
    from lightning.pytorch.callbacks import ModelCheckpoint

    outcomes = []
    for interval in (0.5, 3):
        with TemporaryDirectory() as folder:
            saving = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)
            options = {"callbacks": [saving], "enable_checkpointing": True}
            outcome = fit(val_check_interval=interval, **options)
            scores = sorted(float(score).hex() for score in saving.best_k_models.values())
            outcomes.append(outcome | {"scores": scores})
    return {"outcomes": outcomes}


@training
def limited_batches() -> Outcome:
    options: list[dict[str, Any]] = [
        {"limit_train_batches": 2, "limit_val_batches": 3},
        {"limit_train_batches": 0.5, "limit_val_batches": 0.4},
        {"fast_dev_run": True},
        {"overfit_batches": 2},
        {"max_steps": 5},
        {"limit_val_batches": 0},
    ]
    return {"outcomes": [fit(**each) for each in options]}


@training
def loaders_that_are_made_again() -> Outcome:
    def train_dataloader(self: Any) -> Any:
        return make_loader()

    module = make_module(train_dataloader=train_dataloader)
    trainer = make_trainer(reload_dataloaders_every_n_epochs=1)
    trainer.fit(module)
    return describe(trainer, module)


@training
def two_calls_of_fit() -> Outcome:
    module = make_module()
    first = fit(module, max_epochs=1)
    return {"first": first, "second": fit(module, max_epochs=2)}


@training
def a_checkpoint_after_fit() -> Outcome:
    """A checkpoint that is saved after `fit` has returned has the position in the data."""
    trainer = make_trainer(max_epochs=1)
    trainer.fit(make_module(), make_loader())
    module = make_module()
    longer = make_trainer()
    with TemporaryDirectory() as folder:
        file = trainer.strategy.broadcast(f"{folder}/last.ckpt")
        trainer.save_checkpoint(file)
        longer.fit(module, make_loader(), ckpt_path=file, weights_only=False)
        trainer.strategy.barrier()
    uninterrupted = fit()["digest"]
    assert ls.digest(module) == uninterrupted
    return {"digest": uninterrupted}


@training
def the_finder_of_learning_rates() -> Outcome:
    from lightning.pytorch.tuner import Tuner

    module = make_module()
    loader = make_loader()
    with TemporaryDirectory() as folder:
        trainer = make_trainer(default_root_dir=folder)
        found = Tuner(trainer).lr_find(module, loader, num_training=9)
        trainer.fit(module, loader, make_held_out())
    losses = [float(loss) for loss in found.results["loss"]]
    return describe(trainer, module, losses=losses, suggested=float(module.lr))


@training
def averaged_weights() -> Outcome:
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    outcomes = [
        fit(callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)]),
        fit(callbacks=[EMAWeightAveraging(decay=0.5)]),
    ]
    return {"outcomes": outcomes}


# --- Data --------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """An iterable dataset that draws random numbers; its length may be known."""

    def __init__(self, samples: int) -> None:
        self.data = make_data(samples)

    def __iter__(self) -> Iterator[Any]:
        for position in range(len(self.data)):
            inputs, target = self.data[position]
            yield inputs + torch.rand(6), target


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


@training
def iterable_datasets() -> Outcome:
    outcomes = [
        fit(
            train=DataLoader(kind(SAMPLES), SIZE, num_workers=workers),
            held_out=DataLoader(Stream(HELD_OUT), 4),
        )
        for kind, workers in [(Stream, 0), (SizedStream, 2)]
    ]
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    return {"outcomes": outcomes}


class Buckets:
    """A batch sampler with lists of several sizes."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        begins = [0, 2, 7, 9, 14, 18, 20, 25, 30, 33, 38, SAMPLES]
        order = torch.randperm(11).tolist()
        yield from ([*range(begins[number], begins[number + 1])] for number in order)


@training
def own_samplers() -> Outcome:
    data = make_data()
    sampler = WeightedRandomSampler([1.0 + index for index in range(SAMPLES)], SAMPLES)
    weighted = fit(train=DataLoader(data, SIZE, sampler=sampler))
    buckets = fit(train=DataLoader(data, batch_sampler=Buckets()), use_distributed_sampler=False)
    return {"weighted": weighted, "buckets": buckets}


# --- Manual optimization -----------------------------------------------------------------------


def make_pair(training_step: Any) -> Any:
    """Return a module with a generator and a discriminator, and optimizers for both."""

    def configure_optimizers(self: Any) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), 0.01) for part in (self.one, self.other)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)]

    module = make_module(training_step=training_step, configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    module.one = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 6))
    module.other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return module


def train_adversaries(self: Any, batch: Any, index: int) -> None:
    """A step of a GAN, as in Lightning's documentation."""
    of_one, of_other = self.optimizers()
    noise = torch.randn(len(batch[0]), 4)
    self.toggle_optimizer(of_one)
    loss = nn.functional.softplus(-self.other(self.one(noise))).mean()
    self.log("loss_one", loss, on_step=False, on_epoch=True)
    of_one.zero_grad()
    self.manual_backward(loss)
    self.clip_gradients(of_one, 0.1, "norm")
    of_one.step()
    self.untoggle_optimizer(of_one)
    with of_other.toggle_model():
        real = self.other(batch[0])
        fake = self.other(self.one(noise).detach())
        loss = nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()
        self.manual_backward(loss)
        of_other.step()
        of_other.zero_grad()
    self.lr_schedulers().step()


@training
def adversaries() -> Outcome:
    return fit(make_pair(train_adversaries))


@training
def one_optimizer_every_second_batch() -> Outcome:
    def training_step(self: Any, batch: Any, index: int) -> None:
        of_one, of_other = self.optimizers()
        fake = self.one(batch[0][:, :4])
        of_other.zero_grad()
        self.manual_backward(self.other(fake.detach()).square().mean())
        of_other.step()
        if index % 2:
            self.toggle_optimizer(of_one)
            of_one.zero_grad()
            self.manual_backward(self.other(self.one(batch[0][:, :4])).mean())
            of_one.step()
            self.untoggle_optimizer(of_one)

    return fit(make_pair(training_step))


def do_not_toggle(self: Any, batch: Any, index: int) -> None:
    of_one, of_other = self.optimizers()
    of_one.zero_grad()
    self.manual_backward(self.other(self.one(batch[0][:, :4])).mean())
    of_one.step()
    of_other.zero_grad()
    self.manual_backward(self.other(batch[0]).square().mean())
    of_other.step()


def step_in_the_first_microbatch(self: Any, batch: Any, index: int) -> None:
    of_one, of_other = self.optimizers()
    self.manual_backward(self.one(batch[0][:, :4]).square().mean())
    of_one.step()
    with of_other.toggle_model():
        self.manual_backward(self.other(batch[0]).square().mean())
    of_other.step()
    if self.calls == 0:
        self.lr_schedulers().step()
    self.calls += 1


def train_with_a_counter() -> Outcome:
    module = make_pair(step_in_the_first_microbatch)
    module.calls = 0
    return fit(module)


# --- What is refused ---------------------------------------------------------------------------


def log_what_a_rank_has(self: Any) -> None:
    self.log("val_own", float(ls.rank()))


def call_a_collective(self: Any, batch: Any, index: int) -> None:
    self.all_gather(batch[0])


def train_with_squares() -> Outcome:
    import torchmetrics

    def validation_step(self: Any, batch: Any, index: int) -> None:
        self.error.update(self.network(batch[0]).argmax(1), batch[1])
        self.log("error", self.error)

    module = make_module(validation_step=validation_step)
    module.error = torchmetrics.MeanSquaredError()
    return fit(module)


def train_with_statistics() -> Outcome:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    module = make_module()
    module.network.append(nn.BatchNorm1d(3))
    return fit(module, callbacks=[StochasticWeightAveraging(0.05)])


class OwnGenerator(torch.utils.data.Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.data = make_data(samples)
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        return inputs + torch.rand(6, generator=self.generator), target


def divide_by_rank() -> Outcome:
    data = make_data(HELD_OUT + ls.rank(), 2 + ls.rank())
    return fit(held_out=DataLoader(data, 4))


def read_other_outputs() -> Outcome:
    def training_step(self: Any, batch: Any, index: int) -> Any:
        outputs = self.network(batch[0])
        hits = (outputs.argmax(1) == batch[1]).sum()
        return {"loss": nn.functional.cross_entropy(outputs, batch[1]), "hits": hits}

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, index: int) -> None:
        assert "loss" in outputs
        outputs["hits"]

    return fit(make_module(training_step=training_step, on_train_batch_end=on_train_batch_end))


def compute_a_mean_at_the_end() -> Outcome:
    import torchmetrics

    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.mean.update(loss)
        return loss

    def on_train_epoch_end(self: Any) -> None:
        self.log("mean_loss", self.mean.compute())

    module = make_module(training_step=training_step, on_train_epoch_end=on_train_epoch_end)
    module.mean = torchmetrics.MeanMetric()
    return fit(module)


def predict_arrays() -> Outcome:
    module = make_module(predict_step=lambda self, batch, index: self.network(batch[0]).numpy())
    return {"outputs": len(make_trainer().predict(module, make_held_out()))}


REFUSED: dict[str, tuple[tuple[int, ...], Callable[[], Outcome]]] = {
    "val_own was logged in on_validation_epoch_end as 0 on rank 0 and as 1 on rank 1": (
        (2,),
        lambda: fit(make_module(on_validation_epoch_end=log_what_a_rank_has)),
    ),
    r"rank \d, evaluation batch \d: all_gather was called": (
        (2,),
        lambda: fit(make_module(validation_step=call_a_collective)),
    ),
    "cannot log error, since MeanSquaredError rounds sum_squared_error on each rank": (
        (2,),
        train_with_squares,
    ),
    "cannot log mean, since MeanMetric rounds mean_value on each rank": (
        (2,),
        compute_a_mean_at_the_end,
    ),
    r"outputs\['hits'\] is an output of training_step, which computes one micro-batch": (
        (1, 2),
        read_other_outputs,
    ),
    "predicting with other ranks: numpy.* is not exchanged; return tensors": ((2,), predict_arrays),
    "StochasticWeightAveraging of a module with batch norm": ((1, 2), train_with_statistics),
    "a val_check_interval of time": ((1,), lambda: fit(val_check_interval="00:00:01:00")),
    "loaded twice with the same random seed": (
        (1, 2),
        lambda: fit(train=DataLoader(OwnGenerator(SAMPLES), SIZE)),
    ),
    r"sample \d+ of OwnGenerator, loaded twice": (
        (1, 2),
        lambda: fit(held_out=DataLoader(OwnGenerator(HELD_OUT), 4)),
    ),
    r"fewer samples \(1\) than there are ranks \(2\)": (
        (2,),
        lambda: fit(train=DataLoader(Stream(SIZE * MICROBATCHES + 1), SIZE)),
    ),
    "number of samples is 18, on rank 0 it is 17": ((2,), divide_by_rank),
    "no tensor with a gradient in the NoneType": (
        (1, 2),
        lambda: fit(make_module(training_step=lambda self, batch, index: None)),
    ),
    "loss 0 of training_step reaches parameters of optimizer 1": (
        (1, 2),
        lambda: fit(make_pair(do_not_toggle)),
    ),
    "training_step makes the steps .* in one micro-batch and others in another": (
        (1, 2),
        train_with_a_counter,
    ),
    "has called manual_backward for no loss": (
        (1, 2),
        lambda: fit(make_pair(lambda self, batch, index: None)),
    ),
    "divides torch's DataLoaders among the ranks, and got a Tensor": (
        (1,),
        lambda: fit(held_out=[[make_data()[:4]]]),
    ),
}


def run_all() -> tuple[dict[str, Outcome], dict[str, str]]:
    """Return the outcomes of all trainings on this rank, and the messages of those refused."""
    messages = {}
    for name, (ranks, train) in REFUSED.items():
        if ls.world_size() in ranks:
            try:
                train()
                messages[name] = "it was trained"
            except Exception as error:
                messages[name] = f"{type(error).__name__}: {error}"
    chosen = trainings.items() if ls.world_size() in TRAINED else ()
    return {name: train() for name, train in chosen}, messages


@pytest.fixture(scope="module")
def outcomes(forks: Any) -> dict[int, list[Any]]:
    return {n: forks(run_all, n) for n in (1, 2, 3)}


@pytest.mark.parametrize("name", trainings)
def test_a_habit_has_the_same_outcome_on_any_number_of_ranks(outcomes: Any, name: str) -> None:
    ((first, _),) = outcomes[1]
    for n in TRAINED:
        for found, _ in outcomes[n]:
            assert found[name] == first[name]


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_exact_is_refused_on_every_rank(outcomes: Any, words: str) -> None:
    for n in REFUSED[words][0]:
        for _, messages in outcomes[n]:
            assert re.match(rf"\w*Error: .*{words}", messages[words]), messages[words]
