"""The steps of a script's own loop, in the forms that users write: the trainer's bits or records.

Each loop is trained on 1, 2 and 3 ranks. Where `ls.Trainer` can do the same, it is the reference.
"""

import math
import os
import signal
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.checkpoint.stop_request import StoppedOnRequest
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.record.reader import read_run
from lockstep.training.script_loop import exact_setup

SEED = 5
MICROBATCHES = 4
BATCH = 16
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def network(seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 3))


def rows(samples=48):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def begin(model=None, make_optimizer=SGD, **options):
    """Return a model, its optimizer, the handle and the batches of an epoch."""
    model = network() if model is None else model
    optimizer = make_optimizer(model.parameters())
    quiet = {"loggers": [], "progress": False} | options
    exact = ls.exact(model, optimizer, microbatches=MICROBATCHES, seed=SEED, **quiet)
    return model, optimizer, exact, exact.batches(rows(), BATCH)


def compute(model, batch, **options):
    """Compute the micro-batches of a batch."""
    for inputs, targets in batch:
        batch.backward(F.cross_entropy(model(inputs), targets), **options)


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def make_trainer(make_optimizer=SGD, **options):
    quiet = {"loggers": [], "progress": False, "microbatches": MICROBATCHES, "seed": SEED}
    return ls.Trainer(network(), nn.CrossEntropyLoss(), make_optimizer, **quiet, **options)


# --- loops, each with that of the trainer ---------------------------------------------------------


def skipping():
    """Leave out a batch, and train on another one twice."""
    model, optimizer, exact, batches = begin()
    losses = []
    for batch in batches:
        if batch.number == 0:
            continue
        for _ in range(2):
            compute(model, batch)
            losses.append(batch.loss)
            update(optimizer)
    return losses, exact.digest(), exact.optimizer_digest()


def skipping_trainer():
    trainer = make_trainer()
    losses = []
    for batch in trainer.batches(rows(), BATCH):
        if batch.identity.position:
            losses += [trainer.step(batch), trainer.step(batch)]
    return losses, trainer.digest(), trainer.optimizer_digest()


def clipping():
    model, optimizer, exact, batches = begin()
    norms = []
    for batch in batches:
        compute(model, batch)
        norms.append(exact.clip_grad_norm_(0.1))
        assert norms[-1] == batch.norm
        update(optimizer)
    return norms, exact.digest(), exact.optimizer_digest()


def clipping_trainer():
    trainer = make_trainer(max_grad_norm=0.1)
    norms = []
    for batch in trainer.batches(rows(), BATCH):
        trainer.step(batch)
        norms.append(trainer.last_result.norm)
    return norms, trainer.digest(), trainer.optimizer_digest()


def freezing():
    model, optimizer, exact, batches = begin()
    losses = []
    for batch in batches:
        model[0].requires_grad_(batch.number != 1)
        compute(model, batch)
        losses.append(batch.loss)
        update(optimizer)
    return losses, exact.digest(), exact.optimizer_digest()


def freezing_trainer():
    trainer = make_trainer()
    losses = []
    for batch in trainer.batches(rows(), BATCH):
        trainer.module[0].requires_grad_(batch.identity.position != 1)
        losses.append(trainer.step(batch))
    return losses, trainer.digest(), trainer.optimizer_digest()


def scheduling():
    """Step a scheduler after each step; evaluate and predict between two batches."""
    model = network()
    optimizer = ADAMW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    options = {"microbatches": MICROBATCHES, "seed": SEED, "loggers": [], "progress": False}
    exact = ls.exact(model, optimizer, scheduler=scheduler, **options)
    found = []
    for batch in exact.batches(rows(), BATCH):
        compute(model, batch)
        update(optimizer)
        scheduler.step()
        evaluation = exact.evaluate(rows(20), 8, loss=nn.CrossEntropyLoss())
        outputs = exact.predict(rows(20), 8)
        found.append((batch.loss, evaluation.loss, outputs.tolist(), exact.last_result.lr))
    return found, exact.digest(), exact.optimizer_digest()


def scheduling_trainer():
    schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=3)
    config = ls.OptimizerConfig(ADAMW, scheduler=schedule, scheduler_interval="step")
    trainer = make_trainer(config)
    found = []
    for batch in trainer.batches(rows(), BATCH):
        loss = trainer.step(batch)
        lr = trainer.last_result.lr
        evaluation = trainer.evaluate(rows(20), 8)
        found.append((loss, evaluation.loss, trainer.predict(rows(20), 8).tolist(), lr))
    return found, trainer.digest(), trainer.optimizer_digest()


# --- loops that only a script can write -----------------------------------------------------------


def catching():
    """Catch an exception in the middle of a batch: its step is undone, and the next one says so."""
    model, optimizer, exact, batches = begin()
    seen = []
    for batch in batches:
        before = ls.digest(model)
        try:
            for inputs, targets in batch:
                batch.backward(F.cross_entropy(model(inputs), targets))
                if batch.number == 1:
                    raise ArithmeticError("a bad batch")
        except ArithmeticError:
            assert ls.digest(model) == before
            assert all(parameter.grad is None for parameter in model.parameters())
            with pytest.raises(UsageError, match=r"left before the last .* an exception"):
                compute(model, batch)
            compute(model, batch)
        seen.append(batch.loss)
        update(optimizer)
    assert len(seen) == exact.steps == 3
    return seen, exact.digest(), exact.optimizer_digest()


def leaving():
    """Leave a batch early; the next step says so, and the one after it is computed."""
    model, optimizer, exact, batches = begin()
    losses = []
    for batch in batches:
        if batch.number == 0:
            for inputs, targets in batch:
                batch.backward(F.cross_entropy(model(inputs), targets))
                break
            continue
        if batch.number == 1:
            with pytest.raises(UsageError, match="left before the last micro-batch"):
                compute(model, batch)
            continue
        compute(model, batch)
        losses.append(batch.loss)
        update(optimizer)
    return losses, exact.digest(), exact.optimizer_digest()


def not_stepping():
    """Leave out the update of a batch, as with a loss that is too large."""
    model, optimizer, exact, batches = begin()
    losses = []
    for batch in batches:
        compute(model, batch)
        losses.append(batch.loss)
        if batch.number != 1:
            optimizer.step()
        optimizer.zero_grad()
    assert exact.steps == 3
    return losses, exact.digest(), exact.optimizer_digest()


def adding():
    """Add two losses of a micro-batch, by two backward passes."""
    model, optimizer, exact, batches = begin(audit=False)
    losses = []
    for batch in batches:
        for inputs, targets in batch:
            outputs = model(inputs)
            batch.backward(F.cross_entropy(outputs, targets), final=False, retain_graph=True)
            batch.backward(0.1 * outputs.square().mean(), final=False)
        losses.append(batch.loss)
        update(optimizer)
    return losses, exact.digest(), exact.optimizer_digest()


def weighing():
    """Divide by the tokens of the batch, of which a micro-batch may have none."""
    model, optimizer, exact, _ = begin()
    data = rows()
    data.tensors[1][::3] = -100
    data.tensors[1][:4] = -100
    losses = []
    for batch in exact.batches(data, BATCH, shuffle=False):
        for inputs, targets in batch:
            loss = F.cross_entropy(model(inputs), targets)
            count = int((targets >= 0).sum())
            batch.backward(loss, weight=count)
            batch.log("tokens", float(count), weight=1)
        losses.append((batch.loss, batch.metrics["tokens"]))
        update(optimizer)
    assert all(math.isfinite(loss) for loss, _ in losses)
    return losses, exact.digest(), exact.optimizer_digest()


def scaling():
    """Scale the loss; the second step overflows, and is skipped by the scaler."""
    model, optimizer, exact, batches = begin()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scales = []
    for batch in batches:
        for inputs, targets in batch:
            loss = F.cross_entropy(model(inputs), targets)
            if batch.number == 1:
                loss = loss * 1e37
            batch.backward(loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [256.0, 128.0, 128.0]
    return scales, exact.digest(), exact.optimizer_digest()


def competing():
    """Train two models on the same batches, as in a GAN."""
    critic, critic_optimizer, judging, batches = begin(audit=False)
    torch.manual_seed(3)
    maker = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 6))
    maker_optimizer = ADAMW(maker.parameters())
    options = {"microbatches": MICROBATCHES, "seed": SEED + 1, "loggers": [], "progress": False}
    making = ls.exact(maker, maker_optimizer, audit=False, **options)
    losses = []
    for batch in batches:
        for real, targets in batch:
            noise = torch.randn(len(real), 4)
            with torch.no_grad():
                fake = maker(noise)
            loss = F.cross_entropy(critic(real), targets) + critic(fake).square().mean()
            batch.backward(loss)
        update(critic_optimizer)
        own = making.use(batch)
        critic.requires_grad_(False)
        for real, targets in own:
            outputs = critic(maker(torch.randn(len(real), 4)))
            own.backward(F.cross_entropy(outputs, targets))
        critic.requires_grad_(True)
        update(maker_optimizer)
        losses.append((batch.loss, own.loss))
    return losses, judging.digest(), making.digest()


TRAINER = {
    skipping: skipping_trainer,
    clipping: clipping_trainer,
    freezing: freezing_trainer,
    scheduling: scheduling_trainer,
}
OWN = [catching, leaving, not_stepping, adding, weighing, scaling, competing]


def train_all():
    """Return the results of every loop, and whether the trainer has the same ones."""
    found = {loop.__name__: loop() for loop in (*TRAINER, *OWN)}
    return found, {loop.__name__: reference() for loop, reference in TRAINER.items()}


@pytest.fixture(scope="module")
def trained(ranks):
    return {n: ranks(train_all, n) for n in (1, 3)}


@pytest.mark.parametrize("loop", [*TRAINER, *OWN], ids=lambda loop: loop.__name__)
def test_a_loop_has_the_same_results_on_any_number_of_ranks(trained, loop):
    results = [found[loop.__name__] for each in trained.values() for found, _ in each]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("loop", TRAINER, ids=lambda loop: loop.__name__)
def test_a_loop_has_the_results_of_the_trainer(trained, loop):
    ((found, references), *_) = trained[1]
    assert found[loop.__name__] == references[loop.__name__]


# --- layouts -------------------------------------------------------------------------------------


def train_in_layouts():
    """Return the results on a whole model and on a sharded one."""
    found = {}
    for kind in ("plain", "sharded"):
        model = network()
        if kind == "sharded":
            fully_shard(model[0])
            fully_shard(model)
        optimizer = ADAMW(model.parameters())
        options = {"microbatches": MICROBATCHES, "seed": SEED, "loggers": [], "progress": False}
        exact = ls.exact(model, optimizer, **options)
        results = []
        for batch in exact.batches(rows(), BATCH):
            compute(model, batch)
            results.append((batch.loss, batch.norm, exact.clip_grad_norm_(0.5)))
            update(optimizer)
            results.append(exact.evaluate(rows(20), 8, loss=nn.CrossEntropyLoss()).loss)
        found[kind] = results, exact.digest(), exact.optimizer_digest()
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_loop_has_the_same_results_in_every_layout(ranks, n):
    for found in ranks(train_in_layouts, n):
        assert found["plain"] == found["sharded"]


# --- services ------------------------------------------------------------------------------------


def recorded(folder):
    """Train two epochs, with a record, values of the script's own and an evaluation."""
    model, optimizer, exact, _ = begin(loggers=str(folder))
    with exact:
        for _ in range(2):
            for batch in exact.batches(rows(), BATCH):
                compute(model, batch)
                update(optimizer)
            exact.log("largest weight", model[0].weight.abs().max())
            exact.evaluate(rows(20), 8, loss=nn.CrossEntropyLoss())
    return exact.digest()


@pytest.mark.parametrize("n", [1, 2])
def test_a_loop_has_a_record(ranks, tmp_path, n):
    digest, *_ = ranks(partial(recorded, tmp_path / "run"), n)
    run = read_run(tmp_path / "run")
    assert len(run.steps) == 6
    assert run.steps.ranks.shape[1] == n
    assert [epoch["epoch"] for epoch in run.epochs] == [0, 1]
    assert all(epoch["evaluation"]["samples"] == 20 for epoch in run.epochs)
    assert run.end["state"] == "done"
    assert run.end["digest"] == digest


class Meter:
    """An object of the script that is saved with the training."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state):
        self.losses = list(state["losses"])


def stop_and_resume(folder, *, stops, is_resumed):
    """Train two epochs; a SIGTERM comes to the last rank in the middle of the fourth step."""
    model = network()
    meter = Meter()
    optimizer = ADAMW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    exact = ls.exact(
        model, optimizer, microbatches=MICROBATCHES, seed=SEED, scheduler=scheduler, progress=False,
        checkpoint=True, stateful={"meter": meter}, loggers=str(folder),
    )  # fmt: skip
    if is_resumed:
        exact.resume()
    evaluations = []
    try:
        for epoch in range(2):
            for batch in exact.batches(rows(), BATCH, epoch=epoch):
                for inputs, targets in batch:
                    noise = torch.randn_like(inputs)  # drawn by the loop
                    batch.backward(F.cross_entropy(model(inputs + 0.1 * noise), targets))
                    if stops and exact.steps == 3 and ls.rank() == ls.world_size() - 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                update(optimizer)
                scheduler.step()
                meter.losses.append(batch.loss)
            evaluations.append(exact.evaluate(rows(20), 8, loss=nn.CrossEntropyLoss()).loss)
    except StoppedOnRequest as stop:
        return stop.code, exact.steps
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exact.finish()
    assert exact.resumed_from == (4 if is_resumed else None)
    return exact.digest(), exact.optimizer_digest(), exact.steps, evaluations, meter.losses


def test_a_loop_stops_on_request_and_resumes_on_other_ranks(ranks, tmp_path):
    options = {"stops": False, "is_resumed": False}
    (whole,) = ranks(partial(stop_and_resume, tmp_path / "whole", **options), 1)
    options["stops"] = True
    for found in ranks(partial(stop_and_resume, tmp_path / "run", **options), 2):
        assert found == (75, 4)
    assert read_run(tmp_path / "run").state == "stopped"
    options = {"stops": False, "is_resumed": True}
    for found in ranks(partial(stop_and_resume, tmp_path / "run", **options), 3):
        assert found == whole
    assert len(read_run(tmp_path / "run").steps) == 6


# --- what an elastic run refuses -----------------------------------------------------------------


def test_an_elastic_run_refuses_what_it_cannot_replace(monkeypatch):
    """Each sentence is raised before anything is communicated."""
    model = network()
    ls.init()
    try:
        wrapped = nn.parallel.DistributedDataParallel(network())
        sharded = network()
        fully_shard(sharded)
        monkeypatch.setattr(exact_setup, "membership", object)
        monkeypatch.setattr(exact_setup, "_attached", set())
        for given, said in ((wrapped, "pass the model itself"), (sharded, "shards of a lost rank")):
            with pytest.raises(UsageError, match=said):
                ls.exact(given, SGD(given.parameters()), microbatches=MICROBATCHES)
        monkeypatch.setattr(exact_setup, "_attached", {network()})
        with pytest.raises(UsageError, match="one model in an elastic run"):
            ls.exact(model, SGD(model.parameters()), microbatches=MICROBATCHES)
    finally:
        ls.shutdown()


# --- optimizers that the trainer refuses ----------------------------------------------------------


def shift(optimizer, arguments, options):
    """A hook that may look at all parameters."""


def hooked(parameters):
    optimizer = SGD(parameters)
    optimizer.register_step_pre_hook(shift)
    return optimizer


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.Rprop, "torch cannot step the shards of parameters by Rprop"),
        (torch.optim.Adafactor, "Adafactor does not treat each element of a parameter by itself"),
        (hooked, "the hook shift of SGD"),
    ],
)
def test_an_optimizer_whose_step_on_shards_has_other_bits_is_refused(is_given, make, said):
    model = network()
    fully_shard(model)
    optimizer = make(model.parameters())
    with pytest.raises(LockstepError, match=said):
        take_one_step(model, optimizer, is_given)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("is_given", [True, False])
def test_a_fused_optimizer_that_is_broken_is_refused(is_given):
    """It updates only the last elements, and leaves its momentum uninitialized."""
    model = network().to(torch.bfloat16)
    with pytest.raises(UsageError, match="use SGD without fused=True"):
        take_one_step(model, SGD(model.parameters(), fused=True), is_given)


def take_one_step(model, optimizer, is_given):
    exact = ls.exact(model, optimizer if is_given else None, 2)
    for _ in range(2):
        exact.begin()
        exact.weigh(model(torch.randn(4, 6, dtype=model[0].weight.dtype)).mean()).backward()
    optimizer.step()
