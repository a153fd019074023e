"""Regression tests: each one describes a fault that has been fixed."""

import copy
import random
import warnings
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import RankError, UsageError
from lockstep.kernel.loss_weights import is_sum
from lockstep.model.target_weights import infer_weight_function
from outcomes import Trainings

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def rows(samples=24, width=6, classes=3):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, width, generator=generator)
    return inputs, torch.randint(0, classes, (samples,), generator=generator)


def classifier(model, loss=None, optimizer=SGD, **options):
    """Return the trainer of a classifier."""
    return ls.Trainer(model, loss or nn.CrossEntropyLoss(), optimizer, **options)


def linear(**options):
    """Return the trainer of a single layer, with the same weights everywhere."""
    torch.manual_seed(0)
    return classifier(nn.Linear(6, 3), **options)


# --- one outcome for every number of ranks -------------------------------------------------------

training = Trainings()
outcomes = training.make_fixture(1, 2, 3, 4)


class Counting(nn.Linear):
    lockstep_buffer_rules = {"count": "equal"}

    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        self.count += 1
        return super().forward(inputs)


@training
def a_microbatch_without_weight_under_batch_norm():
    """Its leaf was missing from the buffers' sum: a crash, or the buffers of before."""
    digests = []
    for ignored in (slice(0, 12), slice(3, 6)):  # whole micro-batches; all those of rank 0 of 2
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), nn.BatchNorm1d(3))
        inputs, targets = rows()
        targets = targets % 2 + 1
        targets[ignored] = 0
        trainer = classifier(model, nn.CrossEntropyLoss(ignore_index=0))
        trainer.step((inputs, targets))
        assert model[0].count == 1
        digests.append(trainer.digest())
    return digests


@training
def a_parameter_that_is_frozen_while_the_step_runs():
    """Which gradients are sent was read from `requires_grad` after the last backward."""
    torch.manual_seed(0)
    first = nn.Linear(6, 300)
    second = nn.Linear(300, 3)
    model = nn.Sequential(first, second)
    trainer = classifier(model)
    for samples in (24, 2):
        with trainer.manual_step() as step:
            for x, y in step.microbatches(rows(samples)):
                second.requires_grad_(True)
                loss = F.cross_entropy(model(x), y)
                second.requires_grad_(False)
                step.backward(loss)
    return trainer.digest()


@training
def two_trainers_that_use_each_others_batch_norm():
    """The generator's step wrote into the discriminator's buffers, on each rank otherwise."""
    torch.manual_seed(0)
    generator = nn.Linear(4, 6)
    judge = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
    of_generator = ls.Trainer(generator, None, SGD, extra_modules=[judge])
    of_judge = ls.Trainer(judge, None, SGD, extra_modules=[generator], seed=1)
    for _ in range(3):
        with of_judge.manual_step() as step:
            for real in step.microbatches(rows(32)[0]):
                with torch.no_grad():
                    false = generator(torch.randn(len(real), 4))
                step.backward(F.softplus(judge(false)).mean() + F.softplus(-judge(real)).mean())
        with of_generator.manual_step() as step:
            for real in step.microbatches(rows(32)[0]):
                false = generator(torch.randn(len(real), 4))
                step.backward(F.softplus(-judge(false)).mean())
    return of_generator.digest(), of_judge.digest(), of_judge.optimizer_digest()


@training
def extra_modules_of_one_class_are_all_kept_alike():
    """They were named by their class, so only the last one was."""
    torch.manual_seed(0)
    generator = nn.Linear(6, 3)
    first, second = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2)
    )
    trainer = ls.Trainer(generator, None, SGD, extra_modules=[first, second])
    for _ in range(2):
        with trainer.manual_step() as step:
            for x, _ in step.microbatches(rows()):
                made = generator(x)
                step.backward(first(made).mean() + second(made).square().mean())
    statistics = [judge[1].running_mean.tolist() for judge in (first, second)]
    return trainer.digest(), step.result.loss, statistics


class Centred(nn.Module):
    lockstep_buffer_rules = {"centre": "mean"}

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, outputs, targets):
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(dim=0)
        return F.cross_entropy(outputs - self.centre, targets)


@training
def a_loss_with_buffers_is_kept_alike():
    loss = Centred()
    trainer = linear(loss=loss)
    for _ in range(3):
        trainer.step(rows())
    return trainer.digest(), loss.centre.tolist()


@training
def evaluation_leaves_buffers_as_they_are():
    torch.manual_seed(0)
    model = Counting()
    trainer = classifier(model)
    trainer.evaluate(TensorDataset(*rows()), 10)
    assert model.count == 0
    return trainer.digest()


class Halving(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.mul_(0.5))


@training
def a_model_that_writes_into_its_input():
    torch.manual_seed(0)
    trainer = classifier(Halving(6, 3))
    inputs, targets = rows(48)
    trainer.step((inputs[:32], targets[:32]))
    trainer.step((inputs[16:], targets[16:]))
    assert torch.equal(inputs, rows(48)[0])
    return trainer.digest()


@training
def a_parameter_with_gaps_in_memory():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.randn(6, 5)[::2])
    model.bias = nn.Parameter(torch.randn(6, 5).t()[:3, 0])
    trainer = classifier(model, max_grad_norm=0.1)
    inputs, targets = rows(24, 5)
    trainer.step((inputs, targets))
    return trainer.digest()


class Difference(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("before")
                if before is not None:
                    p.data.add_(p.grad - before, alpha=0.1)
                self.state[p]["before"] = p.grad


@training
def gradients_that_an_optimizer_keeps_are_not_overwritten():
    trainer = linear(optimizer=partial(Difference, lr=0.1))
    for _ in range(3):
        trainer.step(rows())
    return trainer.digest()


@training
def class_weights_with_soft_targets():
    trainer = linear(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    return trainer.step((rows()[0], F.one_hot(rows()[1], 3).float())), trainer.digest()


def evaluate_ignoring(targets):
    trainer = linear(loss=nn.CrossEntropyLoss(ignore_index=0), metrics={"accuracy": ls.accuracy})
    return trainer.evaluate(TensorDataset(rows()[0], targets), 24)


@training
def evaluating_ignored_targets_counts_every_sample():
    targets = rows()[1].clone()
    targets[:6] = 0  # two whole micro-batches
    found = evaluate_ignoring(targets)
    torch.manual_seed(0)
    outputs = nn.Linear(6, 3)(rows()[0]).detach()
    expected = F.cross_entropy(outputs, targets, ignore_index=0)
    assert found.samples == 24
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    assert found.metrics["accuracy"] == pytest.approx(float(ls.accuracy(outputs, targets)))
    return found.loss, found.metrics


class Mixing(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * (random.random() + numpy.random.rand())


@training
def numpy_and_random_in_a_model_are_keyed_too():
    torch.manual_seed(0)
    trainer = classifier(Mixing(6, 3))
    trainer.step(rows())
    trainer.step(rows())
    return trainer.digest()


def gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def squared(outputs, targets):
    return F.cross_entropy(outputs * 1.1 + outputs * outputs * 0.01, targets)


class Activated(nn.Linear):
    def __init__(self, function):
        super().__init__(6, 64)
        self.function = function

    def forward(self, inputs):
        return self.function(super().forward(inputs))


@training
def functions_that_torchscript_compiled():
    """They were optimized after their first calls, of which each rank makes another number."""
    digests = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for compile_function in (lambda function: function, torch.jit.script):
            torch.manual_seed(0)
            model = nn.Sequential(Activated(compile_function(gelu)), nn.Linear(64, 3))
            trainer = classifier(model, compile_function(squared))
            for _ in range(4):
                trainer.step(rows())
                if ls.rank() == 0:  # a function is optimized for each process by itself
                    model(rows()[0]).sum().backward()
            digests.add(trainer.digest())
    assert len(digests) == 1
    return digests


test_every_number_of_ranks_has_the_same_outcome = training.make_test()


# --- faults that ranks name ----------------------------------------------------------------------


def message_of(act):
    """Return the message of the error that a call raises."""
    with pytest.raises((ls.LockstepError, ValueError)) as raised:
        act()
    return str(raised.value)


def skip_a_step():
    """Rank 1 continued with the next batch, and the ranks added two different ones."""
    trainer = linear()
    trainer.step(rows(24))
    if dist.get_rank() == 1:
        trainer.engine.state.position.steps += 1  # as if it had left one out
    trainer.step(rows(24))


def build_in_another_order():
    """The message was "rank 1 has no torch.__version__"."""

    def fail(parameters):
        raise ValueError("an optimizer that fails on one rank")

    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="fails on one rank"):
            linear(optimizer=fail)
    linear()  # the next one on rank 0, while rank 1 still constructs the first
    linear()


def train_on_batches_of_different_sizes():
    linear().step(rows(24 - 4 * dist.get_rank()))


def save_on_one_rank_only(folder):
    trainer = linear()
    if dist.get_rank() == 0:
        trainer.save_weights(folder / "model.safetensors")
    trainer.step(rows())


class LateBuffer(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("scale", None)

    def forward(self, inputs):
        if self.scale is None:
            self.scale = inputs.detach().std()
        return super().forward(inputs) / self.scale


def register_a_buffer_in_a_step():
    classifier(LateBuffer()).step(rows())


def write_a_buffer_that_shares_memory():
    """The other one kept its values, or took them from whichever was merged last."""
    model = nn.Linear(6, 3)
    model.register_buffer("all", torch.zeros(2, 3))
    model.register_buffer("row", model.all[0])

    def write(module, _):
        module.all.add_(1)

    model.register_forward_pre_hook(write)
    classifier(model).step(rows())


def weigh_a_label_out_of_range():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    linear(loss=loss).step((rows()[0], rows()[1] + 7))


def evaluate_without_targets():
    evaluate_ignoring(torch.zeros(24, dtype=torch.int64))


FAULTS = [
    (skip_a_step, ["rank 1 is in step 2 of trainer 0", "while rank 0 is in step 1"]),
    (train_on_batches_of_different_sizes, ["with a batch of 20 samples"]),
    (register_a_buffer_in_a_step, ["buffer scale was registered in a training step"]),
    (write_a_buffer_that_shares_memory, ["buffer all shares its memory with another"]),
    (
        weigh_a_label_out_of_range,
        ["the weight of the micro-batch could not be computed"],
    ),
    (evaluate_without_targets, ["add up to 0, so their loss has no mean"]),
]


def test_faults_are_named_on_every_rank(ranks, tmp_path):
    faults = [
        *FAULTS,
        (partial(save_on_one_rank_only, tmp_path), ["while rank 0 is saving weights"]),
    ]

    def name_all():
        return [message_of(act) for act, _ in faults]

    for messages in ranks(name_all, 2):
        for (act, words), message in zip(faults, messages, strict=True):
            assert all(word in message for word in words), (act, message)


def test_trainers_in_a_different_order_are_reported(ranks):
    for message in ranks(lambda: message_of(build_in_another_order), 2):
        assert "rank 0 compares the arguments of a Trainer, rank 1 the optimizer of a" in message
        assert "construct the same objects in the same order on every rank" in message


def test_a_gradient_that_is_not_finite_changes_no_weight(ranks, tmp_path):
    """A gradient that is not finite used to reach the weights where nothing was clipped."""

    def train():
        outcomes = []
        for name, norm in {"plain": None, "clipped": 1.0}.items():
            model = nn.Linear(2, 1, bias=False)
            loss = lambda outputs, targets: (outputs.sum(dim=1) * 0).sqrt().mean()  # noqa: E731
            trainer = classifier(model, loss, loggers=tmp_path / name, max_grad_norm=norm)
            before = trainer.digest()
            message = message_of(lambda: trainer.step((torch.ones(8, 2), torch.ones(8))))  # noqa: B023
            outcomes.append((message, before, trainer.digest()))
        return outcomes

    for outcomes in ranks(train, 2):
        for message, before, after in outcomes:
            assert "step 0: the norm of the gradient is nan" in message
            assert before == after


def test_warnings_of_every_rank_reach_the_record(ranks, tmp_path):
    def train():
        inputs, targets = rows()
        targets[-1] = -100  # in rank 1's half
        trainer = linear(loggers=tmp_path / "run")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.step((inputs, targets))
        trainer.finish()

    ranks(train, 2)
    assert '"kind":"warning"' in (tmp_path / "run" / "record.jsonl").read_text()


# --- in one process ------------------------------------------------------------------------------


HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
SCHEDULES = [
    (HALVED, "epoch"),
    (partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=10.0), "epoch"),
    (partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5), "step"),
]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("scheduler", "interval"), SCHEDULES)
def test_schedules_go_on_from_every_place_where_a_state_is_saved(scheduler, interval):
    """Saved after the last batch of an epoch, or in a callback, the schedule stood still."""
    config = ls.OptimizerConfig(SGD, scheduler=scheduler, scheduler_interval=interval)

    def go_on(state=None):
        trainer = linear(optimizer=config)
        saved = []
        if state is not None:
            trainer.load_state_dict(state["trainer"])
        for epoch in range(3):
            batches = trainer.batches(TensorDataset(*rows()), 10, epoch=epoch)
            if state is not None and epoch < state["trainer"]["epoch"]:
                continue
            if state is not None and epoch == state["trainer"]["epoch"]:
                batches.load_state_dict(state["batches"])
            for batch in batches:
                trainer.step(batch)
                here = {"trainer": trainer.state_dict(), "batches": batches.state_dict()}
                saved.append(copy.deepcopy(here))
        return trainer.digest(), trainer.optimizer.param_groups[0]["lr"], saved

    *expected, saved = go_on()
    assert expected[1] < 0.1
    for state in saved:
        assert [*go_on(state)[:2]] == expected


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_optimizers_scalars_keep_their_dtype_in_a_saved_state(optimizer, dtype):
    """Loading made them numbers of the parameter's dtype, and training went on otherwise."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(dtype)
    whole, first, second = (classifier(copy.deepcopy(model), optimizer=optimizer) for _ in range(3))
    inputs, targets = rows()
    batch = inputs.to(dtype), targets
    for trainer in (whole, first):
        trainer.step(batch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.optimizer_digest() == first.optimizer_digest()
    for trainer in (whole, second):
        trainer.step(batch)
    assert second.digest() == whole.digest()
    assert second.optimizer_digest() == whole.optimizer_digest()


@pytest.mark.usefixtures("world_of_one")
def test_callbacks_of_epochs():
    """The schedule has moved before them; an epoch that was broken off does not count."""
    seen = []

    def note(result):
        rate = trainer.optimizer.param_groups[0]["lr"]
        seen.append((result.epoch, result.samples, rate))

    config = ls.OptimizerConfig(SGD, scheduler=HALVED, scheduler_interval="epoch")
    trainer = linear(optimizer=config, callbacks=SimpleNamespace(on_epoch=note))
    for epoch in range(2):
        for batch in trainer.batches(TensorDataset(*rows()), 10, epoch=epoch):
            trainer.step(batch)
            if epoch == 0:
                break
    assert seen == [(1, 24, 0.05)]


@pytest.mark.usefixtures("world_of_one")
def test_what_follows_the_model_in_a_checkpointed_region_draws_the_same_again():
    def gradient(checkpointed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 3))
        kept = []
        trainer = ls.Trainer(
            model, None, SGD, callbacks=[lambda _: kept.extend(p.grad for p in model.parameters())]
        )

        def outputs(x):
            return F.dropout(model(x), 0.4)

        with trainer.manual_step() as step:
            for x, y in step.microbatches(rows()):
                made = checkpoint(outputs, x, use_reentrant=False) if checkpointed else outputs(x)
                step.backward(F.cross_entropy(made, y))
        return [gradient.tolist() for gradient in kept]

    assert gradient(True) == gradient(False)


def test_a_loss_made_by_partial_is_understood():
    assert is_sum(partial(F.cross_entropy, reduction="sum"))
    assert infer_weight_function(partial(F.cross_entropy, ignore_index=0)) is not None
    assert infer_weight_function(partial(F.cross_entropy)) is None


@pytest.mark.usefixtures("world_of_one")
def test_autocast_ends_with_the_step_even_if_the_iteration_is_kept():
    trainer = ls.Trainer(nn.Linear(6, 3), None, SGD, autocast_dtype=torch.bfloat16)
    kept = []

    def fail():
        with trainer.manual_step() as step:
            kept.append(step.microbatches(rows()))
            next(kept[0])
            assert torch.is_autocast_enabled("cpu")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"loss": nn.Linear(2, 1)}, "has parameters, which would not be trained"),
        ({"max_grad_norm": -1.0}, "expected a positive number"),
        ({"ema_decay": 2.0}, r"ema_decay=2.0: expected a decay in \[0, 1\)"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times"),
    ],
)
def test_settings_that_cannot_work_get_one_sentence(wrong, sentence):
    with pytest.raises(UsageError, match=sentence):
        ls.Trainer(nn.Linear(6, 3), **{"loss": nn.CrossEntropyLoss(), "optimizer": SGD} | wrong)


@pytest.mark.usefixtures("world_of_one")
def test_a_fused_sgd_of_16_bit_parameters_is_refused():
    """It updates the last elements of a tensor only, and its momentum is never the same."""
    fused = partial(SGD, fused=True)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(UsageError, match="use SGD without fused=True"):
            classifier(nn.Linear(6, 3).to(dtype), optimizer=fused)
    classifier(nn.Linear(6, 3), optimizer=fused)


# --- DistributedDataParallel ------------------------------------------------------------


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, inputs, skip):
        hidden = self.first(inputs)
        return hidden if skip else self.second(hidden)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (lambda: torch.randn(9, 8)[:, ::2], "has gaps between its elements"),
        (lambda: torch.randn(37)[1:].view(9, 4), "does not begin on a 64-byte boundary"),
    ],
)
def test_a_parameter_that_shared_memory_would_lay_out_otherwise_is_refused(ranks, weight, why):
    """`shared=True` gave it other strides or another alignment, and so other bits."""

    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 9)
            self.projection = nn.Parameter(weight())

        def forward(self, inputs):
            return self.linear(inputs).tanh() @ self.projection

    def train(shared):
        torch.manual_seed(0)
        trainer = classifier(Projected(), storage="shared" if shared else "replicated")
        for _ in range(3):
            trainer.step(rows())
        return trainer.digest()

    assert ranks(train, 3, False) == ranks(train, 1, False) * 3
    with pytest.raises(RankError, match=f"projection {why}"):
        ranks(train, 2, True)


def test_a_channels_last_parameter_may_be_shared(ranks):
    def train(shared):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(
            memory_format=torch.channels_last
        )
        trainer = classifier(model, storage="shared" if shared else "replicated")
        trainer.step((torch.randn(16, 3, 5, 5), torch.randint(0, 3, (16,))))
        return trainer.digest()

    assert ranks(train, 2, True) == ranks(train, 2, False)


class Lazy(torch.autograd.Function):
    """Passes a gradient on that is lazily conjugated or negated."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.conj() if gradient.is_complex() else torch._neg_view(-gradient)


class LazilyDerived(nn.Module):
    def __init__(self):
        super().__init__()
        self.real = nn.Parameter(torch.randn(6, 3))
        self.complex = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, inputs):
        return (
            inputs @ Lazy.apply(self.real)
            + (inputs.to(torch.complex64) @ Lazy.apply(self.complex)).abs()
        )


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_gradients_that_are_lazily_conjugated_or_negated(ranks, backend):
    """torch's error for mutable lists of conjugated tensors, on some widths."""

    def train():
        torch.manual_seed(0)
        trainer = classifier(LazilyDerived(), microbatches=3)
        return [trainer.step(rows()) for _ in range(2)], trainer.digest()

    for n in (2, 3):
        assert ranks(train, n, backend=backend) == ranks(train, 1, backend=backend) * n
