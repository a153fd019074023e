"""`exact.batches`: a loop over batches, with one over micro-batches in it, is the trainer's step.

The digests, losses, norms and records of the trainer are the reference, on every number of ranks.
"""

import gc
import math
import random
import weakref
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.kernel.errors import UsageError

SEED = 11
MICROBATCHES = 4
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def network(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 3)
    )


def rows(samples=56):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


class Augmented(Dataset):
    """Samples that draw from every global generator."""

    def __init__(self):
        self.rows = rows()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        inputs, target = self.rows[index]
        noise = torch.randn(6) + random.random() + float(numpy.random.rand())
        return inputs + 0.1 * noise, target


class Stream(IterableDataset):
    """Rows without a length."""

    def __iter__(self):
        yield from rows(40)


class Buckets:
    """Batches of different sizes."""

    def __iter__(self):
        order = torch.randperm(56).tolist()
        yield from (order[:16], order[16:25], order[25:56])

    def __len__(self):
        return 3


DATA = {
    "rows": lambda: {"dataset": rows(), "batch_size": 20},
    "augmented": lambda: {"dataset": Augmented(), "batch_size": 20},
    "workers": lambda: {"dataset": Augmented(), "batch_size": 20, "num_workers": 1},
    "loader": lambda: {"dataset": DataLoader(Augmented(), 20, shuffle=True)},
    "stream": lambda: {"dataset": Stream(), "batch_size": 16},
    "buckets": lambda: {"dataset": rows(), "batch_sampler": Buckets()},
}
WRAPPERS = {"bare": lambda model: model, "wrapped": DistributedDataParallel}


def train_trainer(data):
    trainer = ls.Trainer(
        network(),
        nn.CrossEntropyLoss(),
        ADAMW,
        microbatches=MICROBATCHES,
        seed=SEED,
        loggers=[],
        progress=False,
        metrics={"accuracy": accuracy},
    )
    steps = []
    for epoch in range(2):
        for batch in trainer.batches(**DATA[data](), epoch=epoch):
            trainer.step(batch)
            last = trainer.last_result
            steps.append((last.loss.hex(), last.norm.hex(), last.metrics["accuracy"]))
    evaluation = trainer.evaluate(rows(33), 16)
    return steps, trainer.digest(), trainer.optimizer_digest(), vars(evaluation)


def train_nested(data, wrapper):
    model = network()
    model[0].weight.data.add_(ls.rank())  # all ranks get the weights of rank 0
    called = WRAPPERS[wrapper](model)
    optimizer = ADAMW(model.parameters())
    exact = ls.exact(
        called, optimizer, microbatches=MICROBATCHES, seed=SEED, loggers=[], progress=False
    )
    steps = []
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(2):
        batches = exact.batches(**DATA[data](), epoch=epoch)
        for batch in batches:
            for inputs, targets in batch:
                outputs = called(inputs)
                batch.backward(loss_function(outputs, targets))
                batch.log("accuracy", accuracy(outputs, targets))
            optimizer.step()
            optimizer.zero_grad()
            steps.append((batch.loss.hex(), batch.norm.hex(), batch.metrics["accuracy"]))
        if data != "stream":
            assert len(batches) == 3
    evaluation = exact.evaluate(rows(33), 16, loss=loss_function, metrics={"accuracy": accuracy})
    return steps, exact.digest(), exact.optimizer_digest(), vars(evaluation)


def train_all():
    found = {}
    for data in DATA:
        random.seed(5)
        expected = train_trainer(data)
        for wrapper in WRAPPERS:
            found[data, wrapper] = train_nested(data, wrapper) == expected, expected
    return found


@pytest.fixture(scope="module")
def trained(ranks):
    return {n: ranks(train_all, n) for n in (1, 2, 3, 4)}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_nested_loop_has_the_results_of_the_trainer(trained, n):
    for found in trained[n]:
        for case, (is_equal, expected) in found.items():
            assert is_equal, case
            assert expected == trained[1][0][case][1], case


@pytest.mark.ranks(1)
def test_an_audited_step_refers_to_nothing_that_only_the_garbage_collector_frees():
    model = nn.Linear(6, 3)
    loss_function = nn.CrossEntropyLoss()
    optimizer = ADAMW(model.parameters())
    audit = ls.AuditConfig(every_steps=1)
    exact = ls.exact(model, optimizer, MICROBATCHES, loggers=(), audit=audit)
    loops = []
    alive = []
    gc.collect()
    gc.disable()
    try:
        for batch in exact.batches(rows(), 14):
            for inputs, targets in batch:
                loops.append(weakref.ref(batch._loop))  # which has the sums of gradients
                batch.backward(loss_function(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            alive.append(sum(loop() is not None for loop in dict.fromkeys(loops)))
    finally:
        gc.enable()
    assert alive == [1, 1, 1, 1]  # that of the last step, until the next one begins


@pytest.mark.ranks(1)
def test_the_loss_of_a_batch_is_computed_in_float64_from_those_of_its_micro_batches():
    """Whatever the script says of their weights: a loss times its weight is never rounded."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = ls.exact(model, optimizer, 2)
    for factor in ("share", "weight"):
        for batch in exact.batches(rows(8), 4, shuffle=False):
            losses = []
            for number, (inputs, _) in enumerate(batch):
                loss = model(inputs).square().mean()
                losses.append(loss.item())
                batch.backward(loss, **{factor: 0.3 + number})
            optimizer.step()
            optimizer.zero_grad()
            whole = 0.3 * losses[0] + 1.3 * losses[1]
            assert batch.loss == (whole / 1.6 if factor == "weight" else whole)
        assert exact.last_result.losses == losses


@pytest.mark.ranks(1)
def test_a_micro_batch_without_weight_may_have_several_losses():
    model = nn.Linear(6, 1)
    exact = ls.exact(model, microbatches=2)
    (batch,) = exact.batches(rows(4), 4)
    for number, (inputs, _) in enumerate(batch):
        for loss in (model(inputs).sum(), model(inputs).square().sum()):
            batch.backward(loss, weight=float(number), final=False)
        losses = [model(inputs).sum().item(), model(inputs).square().sum().item()]
    assert batch.loss == sum(losses)


def overflow_on_the_first_rank():
    """Take a step on a batch of one sample, whose scaled gradients are not finite."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = ls.exact(model, optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    (batch,) = exact.batches(rows(1), 1)
    for inputs, _ in batch:
        loss = model(inputs).mean()
        loss.register_hook(lambda gradient: gradient * torch.inf)
        batch.backward(loss, scaler=scaler)
    return batch.norm


def weigh_on_the_first_rank():
    """Take a step in which the micro-batches of the other ranks have no weight."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = ls.exact(model, optimizer, 2)
    scaler = torch.amp.GradScaler("cpu")
    for batch in exact.batches(rows(2), 2):
        for inputs, _ in batch:
            weight = 0.0 if ls.rank() else 1.0
            batch.backward(model(inputs).mean(), weight=weight, scaler=scaler)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return exact.digest()


def test_a_scaler_begins_with_a_loss_without_weight(ranks):
    assert len(set(ranks(weigh_on_the_first_rank, 2))) == 1


def test_a_rank_without_a_micro_batch_knows_that_losses_are_scaled(ranks):
    assert [math.isfinite(norm) for norm in ranks(overflow_on_the_first_rank, 2)] == [False] * 2


def clip_each_microbatch():
    """Clip in the loop over a batch, beside gradients that are sent during backward."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = ls.exact(model, optimizer, MICROBATCHES, audit=False)
    for _ in range(3):
        for batch in exact.batches(rows(), 16):
            for inputs, targets in batch:
                batch.backward(nn.functional.cross_entropy(model(inputs), targets))
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


def say_why_it_ends():
    with pytest.raises(UsageError) as caught:
        clip_each_microbatch()
    return str(caught.value)


def test_gradients_that_the_loop_changes_are_refused_where_some_are_sent_early(ranks):
    first, second = ranks(say_why_it_ends, 2)
    assert "micro-batch 0: the gradients were changed between backward and the end" in first
    assert "micro-batch 2: the gradients were changed between backward and the end" in second


def draw_between_steps():
    """Draw the strength of mixup once per batch, from generators with a seed of this rank."""
    model = network()
    torch.manual_seed(ls.rank())
    exact = ls.exact(model, microbatches=MICROBATCHES, loggers=[])
    for batch in exact.batches(rows(), 16):
        strength = float(torch.rand(()))
        for inputs, _ in batch:
            batch.backward(model(inputs).square().mean() * strength)
        model.zero_grad()


def begin_two_steps_at_once():
    """Train two models in the same micro-batches, as ExactAccelerator does."""
    models = network(), network()
    pairs = [(ls.exact(model, microbatches=MICROBATCHES, loggers=[]), model) for model in models]
    for _ in range(2):
        for _ in range(MICROBATCHES // ls.world_size()):
            for exact, _ in pairs:
                exact.begin()
            inputs = torch.randn(4, 6)
            for exact, model in pairs:
                exact.weigh(model(inputs).square().mean()).backward()
        for model in models:
            model.zero_grad()


def test_numbers_of_the_microbatches_of_another_model_are_not_named(ranks, capfd):
    ranks(begin_two_steps_at_once, 2)
    assert "differ between the ranks" not in capfd.readouterr().err


def test_ranks_that_draw_other_numbers_between_steps_are_named_once(ranks, capfd):
    ranks(draw_between_steps, 2)
    assert capfd.readouterr().err.count("differ between the ranks: if the training depends") == 1


def evaluate_on_rank_0(calls, steps):
    """Iterate over a DataLoader on rank 0, which draws its seed, and then draw on all ranks."""
    model = network()
    torch.manual_seed(0)
    exact = ls.exact(model, microbatches=MICROBATCHES, loggers=[])
    for number, batch in enumerate(exact.batches(rows(8 * steps), 8)):
        if number == calls:
            if ls.rank() == 0:
                next(iter(DataLoader(rows(), 4)))
        elif number > calls:
            torch.rand(())
        for inputs, _ in batch:
            batch.backward(model(inputs).square().mean())
        model.zero_grad()


def test_ranks_that_draw_other_numbers_after_the_first_steps_are_named(ranks, capfd):
    ranks(evaluate_on_rank_0, 2, 5, 12)
    assert "step 10: random numbers of torch were drawn before" in capfd.readouterr().err


def draw_with_equal_seeds():
    """Draw from Python's generator, which all ranks have seeded; nobody has seeded numpy's."""
    model = network()
    numpy.random.seed(ls.rank())
    random.seed(0)
    exact = ls.exact(model, microbatches=MICROBATCHES, loggers=[])
    for batch in exact.batches(rows(), 16):
        strength = random.random()
        for inputs, _ in batch:
            batch.backward(model(inputs).square().mean() * strength)
        model.zero_grad()


def test_generators_that_nothing_is_drawn_from_may_differ(ranks, capfd):
    ranks(draw_with_equal_seeds, 2)
    assert "differ between the ranks" not in capfd.readouterr().err


def step_a_scheduler_in_the_loop():
    """Step a scheduler in each micro-batch, of which a rank has one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = ls.exact(model, optimizer, microbatches=ls.world_size(), loggers=[])
    for batch in exact.batches(rows(), 16):
        for inputs, _ in batch:
            batch.backward(model(inputs).square().mean())
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("n", [1, 2])
def test_settings_that_change_after_the_only_micro_batch_are_refused(ranks, n):
    with pytest.raises(ls.LockstepError, match=r"lr is 0\.05 after the last micro-batch, and was"):
        ranks(step_a_scheduler_in_the_loop, n)
