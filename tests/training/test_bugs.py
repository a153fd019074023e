"""Regression tests: each one describes a fault that has been fixed."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import DisagreementError, LayoutError, LossError, RankError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def on_epoch(function):
    """Return a callback of epochs."""
    return SimpleNamespace(on_epoch=function)


def rows(samples=24, width=6, classes=3):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, width, generator=generator)
    return inputs, torch.randint(0, classes, (samples,), generator=generator)


def one_outcome(ranks, train, *arguments, widths=(1, 2, 3)):
    """Run on several widths and return what every rank of every width agrees on."""
    found = [each for n in widths for each in ranks(train, n, *arguments)]
    assert all(each == found[0] for each in found), found
    return found[0]


def test_a_microbatch_without_weight_under_batch_norm(ranks):
    """Its leaf was missing from the buffers' sum: a crash, or the buffers of before."""

    class Counting(nn.Linear):
        lockstep_buffer_rules = {"count": "equal"}

        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs):
            self.count += 1
            return super().forward(inputs)

    def train(first):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), nn.BatchNorm1d(3))
        inputs, targets = rows()
        targets = targets % 2 + 1
        ignored = slice(0, 12) if first else slice(3, 6)
        targets[ignored] = 0  # whole micro-batches; with `first` all those of rank 0 of 2
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(ignore_index=0), SGD)
        trainer.step((inputs, targets))
        return trainer.digest(), model[0].count.item()

    for first in (False, True):
        assert one_outcome(ranks, train, first, widths=(1, 2, 3, 4))[1] == 1


def test_a_parameter_that_is_frozen_while_the_step_runs(ranks):
    """Which gradients are sent was read from `requires_grad` after the last backward."""

    def train():
        torch.manual_seed(0)
        first, second = nn.Linear(6, 300), nn.Linear(300, 3)
        model = nn.Sequential(first, second)
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
        for samples in (24, 2):
            inputs, targets = rows(samples)
            with trainer.manual_step() as step:
                for x, y in step.microbatches((inputs, targets)):
                    second.requires_grad_(True)
                    loss = F.cross_entropy(model(x), y)
                    second.requires_grad_(False)
                    step.backward(loss)
        return trainer.digest()

    one_outcome(ranks, train)


def test_two_trainers_that_use_each_others_batch_norm(ranks):
    """The generator's step wrote into the discriminator's buffers, on each rank otherwise."""

    def train():
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

    one_outcome(ranks, train)


def test_extra_modules_of_one_class_are_all_kept_alike(ranks):
    """They were named by their class, so only the last one was."""

    def judge():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def train():
        torch.manual_seed(0)
        generator, first, second = nn.Linear(6, 3), judge(), judge()
        trainer = ls.Trainer(generator, None, SGD, extra_modules=[first, second])
        for _ in range(2):
            with trainer.manual_step() as step:
                for x, _ in step.microbatches(rows()):
                    made = generator(x)
                    step.backward(first(made).mean() + second(made).square().mean())
        statistics = [each[1].running_mean.tolist() for each in (first, second)]
        return trainer.digest(), step.result.loss, statistics

    one_outcome(ranks, train)


def test_a_loss_with_buffers_is_kept_alike(ranks):
    class Centred(nn.Module):
        lockstep_buffer_rules = {"centre": "mean"}

        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, outputs, targets):
            self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(dim=0)
            return F.cross_entropy(outputs - self.centre, targets)

    def train():
        torch.manual_seed(0)
        loss = Centred()
        trainer = ls.Trainer(nn.Linear(6, 3), loss, SGD)
        for _ in range(3):
            trainer.step(rows())
        return trainer.digest(), loss.centre.tolist()

    one_outcome(ranks, train)


def test_a_loss_with_parameters_is_refused():
    ls.init()
    try:
        with pytest.raises(UsageError, match="has parameters, which would not be trained"):
            ls.Trainer(nn.Linear(2, 2), nn.Linear(2, 1), SGD)
    finally:
        ls.shutdown()


def test_a_rank_that_skips_a_step_is_not_paired_with_another_step(ranks):
    """Rank 1 continued with the next batch, and the ranks added two different ones."""

    def train():
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        trainer.step(rows(24))
        try:
            if dist.get_rank() == 1:
                trainer._position.steps += 1  # as if it had left one out
            trainer.step(rows(24))
        except DisagreementError as error:
            return str(error)

    for message in ranks(train, 2):
        assert "rank 1 is in step 2 of trainer 0" in message
        assert "while rank 0 is in step 1" in message


def test_trainers_in_a_different_order_are_reported(ranks):
    """The message was "rank 1 has no torch.__version__"."""

    def fail_once(parameters):
        if dist.get_rank() == 0 and not failed:
            failed.append(True)
            raise ValueError("an optimizer that fails on one rank")
        return SGD(parameters)

    failed = []

    def train():
        for _ in range(2):
            try:
                ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), fail_once)
            except ValueError:
                continue  # and construct the next one, while rank 1 still constructs this one
            except DisagreementError as error:
                return str(error)

    for message in ranks(train, 2):
        assert "rank 0 compares the arguments of a Trainer, rank 1 the optimizer of a" in message
        assert "construct the same objects in the same order on every rank" in message


def test_batches_of_different_sizes_are_told_apart(ranks):
    def train():
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        try:
            trainer.step(rows(24 - 4 * dist.get_rank()))
        except DisagreementError as error:
            return str(error)

    for message in ranks(train, 2):
        assert "with a batch of 20 samples" in message


def test_saving_on_one_rank_only_is_told_apart(ranks, tmp_path):
    def train():
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        try:
            if dist.get_rank() == 0:
                trainer.save_weights(tmp_path / "model.safetensors")
            trainer.step(rows())
        except DisagreementError as error:
            return str(error)

    for message in ranks(train, 2):
        assert "while rank 0 is saving weights" in message


def test_evaluation_leaves_buffers_as_they_are(ranks):
    class Watching(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs):
            self.seen += 1
            return super().forward(inputs)

    def evaluate():
        torch.manual_seed(0)
        model = Watching()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
        trainer.evaluate(TensorDataset(*rows()), 10)
        return trainer.digest(), model.seen.item()

    assert one_outcome(ranks, evaluate)[1] == 0


def test_a_buffer_that_comes_into_being_in_a_step_is_named(ranks):
    class Lazy(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("scale", None)

        def forward(self, inputs):
            if self.scale is None:
                self.scale = inputs.detach().std()
            return super().forward(inputs) / self.scale

    with pytest.raises(RankError, match="buffer scale was registered in a training step"):
        ranks(lambda: ls.Trainer(Lazy(), nn.CrossEntropyLoss(), SGD).step(rows()), 2)


def test_a_buffer_that_shares_memory_with_another_may_not_be_written(ranks):
    """The other one kept its values, or took them from whichever was merged last."""

    def train():
        model = nn.Linear(6, 3)
        model.register_buffer("all", torch.zeros(2, 3))
        model.register_buffer("row", model.all[0])

        def write(module, _):
            module.all.add_(1)

        model.register_forward_pre_hook(write)
        ls.Trainer(model, nn.CrossEntropyLoss(), SGD).step(rows())

    with pytest.raises(RankError, match="buffer all shares its memory with another"):
        ranks(train, 2)


def schedules():
    return [
        (partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), "epoch"),
        (partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=10.0), "epoch"),
        (partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5), "step"),
    ]


@pytest.mark.parametrize("which", range(3))
def test_schedules_go_on_from_every_place_where_a_state_is_saved(which):
    """Saved after the last batch of an epoch, or in a callback, the schedule stood still."""
    scheduler, each = schedules()[which]

    def trainer_of(**more):
        torch.manual_seed(0)
        return ls.Trainer(
            nn.Linear(6, 3),
            nn.CrossEntropyLoss(),
            ls.OptimizerConfig(SGD, scheduler=scheduler, scheduler_interval=each),
            **more,
        )

    def go_on(trainer, state=None):
        epochs, saved = range(3), []
        for epoch in epochs:
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

    ls.init()
    try:
        digest, rate, saved = go_on(trainer_of())
        assert rate < 0.1
        for state in saved:
            trainer = trainer_of()
            trainer.load_state_dict(state["trainer"])
            assert go_on(trainer, state)[:2] == (digest, rate)
    finally:
        ls.shutdown()


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_optimizers_scalars_keep_their_dtype_in_a_saved_state(optimizer, dtype):
    """Loading made them numbers of the parameter's dtype, and training went on otherwise."""

    def trainer_of():
        torch.manual_seed(0)
        return ls.Trainer(nn.Linear(6, 3).to(dtype), nn.CrossEntropyLoss(), optimizer)

    inputs, targets = rows()
    batch = inputs.to(dtype), targets
    ls.init()
    try:
        whole, first, second = trainer_of(), trainer_of(), trainer_of()
        for trainer in (whole, first):
            trainer.step(batch)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert second.optimizer_digest() == first.optimizer_digest()
        for trainer in (whole, second):
            trainer.step(batch)
        assert second.digest() == whole.digest()
        assert second.optimizer_digest() == whole.optimizer_digest()
    finally:
        ls.shutdown()


def test_a_callback_sees_the_schedule_after_it_moved():
    rates = []
    ls.init()
    try:
        trainer = ls.Trainer(
            nn.Linear(6, 3),
            nn.CrossEntropyLoss(),
            ls.OptimizerConfig(SGD, scheduler=schedules()[0][0], scheduler_interval="epoch"),
            callbacks=[
                on_epoch(lambda _: rates.append(trainer.optimizer.param_groups[0]["lr"])),
            ],
        )
        for batch in trainer.batches(TensorDataset(*rows()), 10):
            trainer.step(batch)
    finally:
        ls.shutdown()
    assert rates == [0.05]


def test_an_epoch_that_was_broken_off_does_not_count_in_the_next():
    epochs = []
    ls.init()
    try:
        callbacks = [on_epoch(epochs.append)]
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD, callbacks=callbacks)
        for batch in trainer.batches(TensorDataset(*rows()), 10, epoch=0):
            trainer.step(batch)
            break
        for batch in trainer.batches(TensorDataset(*rows()), 10, epoch=1):
            trainer.step(batch)
    finally:
        ls.shutdown()
    assert [(each.epoch, each.samples) for each in epochs] == [(1, 24)]


def test_a_model_that_writes_into_its_input(ranks):
    class Halving(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs.mul_(0.5))

    def train():
        torch.manual_seed(0)
        trainer = ls.Trainer(Halving(6, 3), nn.CrossEntropyLoss(), SGD)
        inputs, targets = rows(48)
        trainer.step((inputs[:32], targets[:32]))
        trainer.step((inputs[16:], targets[16:]))
        return trainer.digest(), torch.equal(inputs, rows(48)[0])

    assert one_outcome(ranks, train)[1]


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
        return [each.tolist() for each in kept]

    ls.init()
    try:
        assert gradient(True) == gradient(False)
    finally:
        ls.shutdown()


def test_a_parameter_with_gaps_in_memory(ranks):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        model.weight = nn.Parameter(torch.randn(6, 5)[::2])
        model.bias = nn.Parameter(torch.randn(6, 5).t()[:3, 0])
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, max_grad_norm=0.1)
        inputs, targets = rows(24, 5)
        trainer.step((inputs, targets))
        averaged = ls.DistributedDataParallel(copy.deepcopy(model))
        averaged(inputs).square().mean().backward()
        alone = copy.deepcopy(model)
        alone(inputs).square().mean().backward()
        close = torch.allclose(averaged.module.weight.grad, alone.weight.grad, atol=1e-6)
        return trainer.digest(), close

    assert one_outcome(ranks, train)[1]


def test_gradients_that_an_optimizer_keeps_are_not_overwritten(ranks):
    class Difference(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    before = self.state[p].get("before")
                    if before is not None:
                        p.data.add_(p.grad - before, alpha=0.1)
                    self.state[p]["before"] = p.grad

    def train():
        torch.manual_seed(0)
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), partial(Difference, lr=0.1))
        for _ in range(3):
            trainer.step(rows())
        return trainer.digest()

    one_outcome(ranks, train)


def test_weights_that_are_saved_as_good_are_good(ranks, tmp_path):
    """A gradient that is no number used to reach the weights where nothing was clipped."""

    def train():
        model = nn.Linear(2, 1, bias=False)
        loss = lambda outputs, targets: (outputs.sum(dim=1) * 0).sqrt().mean()  # noqa: E731
        trainer = ls.Trainer(model, loss, SGD, loggers=tmp_path / "run")
        try:
            trainer.step((torch.ones(8, 2), torch.ones(8)))
        except ls.LockstepError as error:
            return str(error), trainer.digest()

    for message, digest in ranks(train, 2):
        assert "the norm of the gradient is nan" in message
        saved = load_file(tmp_path / "run" / "last-good.safetensors")
        assert ls.digest(saved) == digest
        assert saved["weight"].isfinite().all()


def test_a_folder_that_cannot_be_made_does_not_hide_why_training_stopped(
    ranks, tmp_path, monkeypatch
):
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)

    def train():
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        inputs, targets = rows()
        try:
            trainer.step((inputs * math.nan, targets))
        except LossError as error:
            return str(error)

    for message in ranks(train, 2):
        assert "rank 0, step 0, micro-batch 0: the loss is nan" in message
        assert "could not be saved: runs is not a folder" in message


def test_class_weights_with_soft_targets_and_with_a_label_out_of_range(ranks):
    def train(targets):
        torch.manual_seed(0)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        trainer = ls.Trainer(nn.Linear(6, 3), loss, SGD)
        return trainer.step((rows()[0], targets)), trainer.digest()

    one_outcome(ranks, train, F.one_hot(rows()[1], 3).float())
    with pytest.raises(RankError, match="micro-batch 0: the weight of the micro-batch could not"):
        ranks(train, 1, rows()[1] + 7)


def test_a_loss_made_by_partial_is_understood():
    from lockstep.kernel.loss_weights import is_sum
    from lockstep.model.target_weights import infer_weight_function

    assert is_sum(partial(F.cross_entropy, reduction="sum"))
    assert infer_weight_function(partial(F.cross_entropy, ignore_index=0)) is not None
    assert infer_weight_function(partial(F.cross_entropy)) is None


def test_warnings_of_every_rank_reach_the_record(ranks, tmp_path):
    def train():
        import warnings

        inputs, targets = rows()
        targets[-1] = -100  # in rank 1's half
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD, loggers=tmp_path / "run")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.step((inputs, targets))
        trainer.finish()

    ranks(train, 2)
    assert '"kind":"warning"' in (tmp_path / "run" / "record.jsonl").read_text()


def test_evaluating_ignored_targets_counts_every_sample(ranks):
    def evaluate(targets):
        torch.manual_seed(0)
        trainer = ls.Trainer(
            nn.Linear(6, 3), nn.CrossEntropyLoss(ignore_index=0), SGD,
            metrics={"accuracy": ls.accuracy},
        )  # fmt: skip
        found = trainer.evaluate(TensorDataset(rows()[0], targets), 24)
        return found.loss, found.samples, found.metrics

    some = rows()[1].clone()
    some[:6] = 0  # two whole micro-batches
    loss, samples, metrics = one_outcome(ranks, evaluate, some)
    assert samples == 24
    torch.manual_seed(0)
    outputs = nn.Linear(6, 3)(rows()[0]).detach()
    assert loss == pytest.approx(float(F.cross_entropy(outputs, some, ignore_index=0)), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(float(ls.accuracy(outputs, some)))
    with pytest.raises(RankError, match="add up to 0, so their loss has no mean"):
        ranks(evaluate, 2, torch.zeros(24, dtype=torch.int64))


def test_numpy_and_random_in_a_model_are_keyed_too(ranks):
    import random

    import numpy

    class Mixing(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * (random.random() + numpy.random.rand())

    def train():
        torch.manual_seed(0)
        trainer = ls.Trainer(Mixing(6, 3), nn.CrossEntropyLoss(), SGD)
        trainer.step(rows())
        trainer.step(rows())
        return trainer.digest()

    one_outcome(ranks, train)


def test_autocast_ends_with_the_step_even_if_the_iteration_is_kept():
    ls.init()
    try:
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
    finally:
        ls.shutdown()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_grad_norm": -1.0}, "expected a positive number"),
        ({"loss": None, "metrics": {"accuracy": ls.accuracy}}, r"metrics=\['accuracy'\]: metrics"),
        ({"ema_decay": 2.0}, r"ema_decay=2.0: expected a decay in \[0, 1\)"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times"),
    ],
)
def test_settings_that_cannot_work_get_one_sentence(wrong, sentence):
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": SGD} | wrong
    ls.init()
    try:
        with pytest.raises(UsageError, match=sentence):
            ls.Trainer(nn.Linear(6, 3), **given)
    finally:
        ls.shutdown()


def test_a_fused_sgd_of_16_bit_parameters_is_refused():
    """It updates the last elements of a tensor only, and its momentum is never the same."""
    ls.init()
    try:
        fused = partial(SGD, fused=True)
        for dtype in (torch.bfloat16, torch.float16):
            with pytest.raises(UsageError, match="use SGD without fused=True"):
                ls.Trainer(nn.Linear(6, 3).to(dtype), nn.CrossEntropyLoss(), fused)
        ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), fused)
    finally:
        ls.shutdown()


# --- DistributedDataParallel ------------------------------------------------------------


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs, skip):
        hidden = self.first(inputs)
        return hidden if skip else self.second(hidden)


def test_two_wrapped_models_in_one_backward(ranks):
    """The ranks launched their buckets in different orders, and equal sizes were swapped."""

    def gradients(wrap):
        rank = dist.get_rank()
        torch.manual_seed(0)
        below, above = wrap(Skipping()), wrap(Skipping())
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        above(below(inputs, False), rank == 1).square().mean().backward()
        return [
            None if p.grad is None else p.grad.tolist()
            for model in (below, above)
            for p in model.module.parameters()
        ]

    def ours():
        return gradients(ls.DistributedDataParallel)

    def theirs():
        wrap = partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
        return gradients(wrap)

    first, second = ranks(ours, 2)
    assert first == second
    expected = ranks(theirs, 2)[0]
    for found, each in zip(first, expected, strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(each), atol=1e-6)


def test_accumulating_without_no_sync_where_a_parameter_is_unused(ranks):
    """An earlier mean that one rank did not touch again counted as absent there."""

    def gradients():
        model = ls.DistributedDataParallel(Skipping())
        for skip in (False, dist.get_rank() == 1):
            model(torch.ones(1, 4), skip).sum().backward()
        bias = model.module.second.bias.grad
        before = bias.clone()
        model(torch.ones(1, 4), True).sum().backward()  # nobody touches it
        return bias.tolist(), torch.equal(before, bias)

    for found, kept in ranks(gradients, 2):
        # First backward: 1 on both. Then rank 0 has 2, rank 1 still 1: the mean is 1.5.
        assert found == [1.5] * 4
        assert kept


def test_two_forwards_with_batch_norm_before_one_backward(ranks):
    """Giving out rank 0's buffers looked like a write to what the first forward had saved."""

    def gradients():
        torch.manual_seed(0)
        model = ls.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        (model(inputs).square().mean() + model(inputs * 2).abs().mean()).backward()
        return model.module[0].weight.grad.tolist()

    first, second = ranks(gradients, 2)
    assert first == second


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
        try:
            trainer = ls.Trainer(
                Projected(),
                nn.CrossEntropyLoss(),
                SGD,
                storage="shared" if shared else "replicated",
            )
        except LayoutError as error:
            return str(error)
        for _ in range(3):
            trainer.step(rows())
        return trainer.digest()

    one_outcome(ranks, train, False)
    assert f"projection {why}" in one_outcome(ranks, train, True, widths=(2, 3))


def test_a_channels_last_parameter_may_be_shared(ranks):
    def train(shared):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(
            memory_format=torch.channels_last
        )
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, storage="shared" if shared else "replicated"
        )
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
        trainer = ls.Trainer(LazilyDerived(), nn.CrossEntropyLoss(), SGD, microbatches=3)
        return [trainer.step(rows()) for _ in range(2)], trainer.digest()

    def average():
        torch.manual_seed(0)
        model = ls.DistributedDataParallel(LazilyDerived())
        inputs, targets = rows()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        return {name: each.grad.resolve_neg().tolist() for name, each in model.named_parameters()}

    found = [each for n in (1, 2, 3) for each in ranks(train, n, backend=backend)]
    assert all(each == found[0] for each in found)
    (alone,), averaged = ranks(average, 1), ranks(average, 2, backend=backend)
    assert averaged == [alone, alone]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_that_torchscript_compiled(ranks):
    """They were optimized after their first calls, of which each rank makes another number."""

    def gelu(x):
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    def loss(outputs, targets):
        return F.cross_entropy(outputs * 1.1 + outputs * outputs * 0.01, targets)

    class Activated(nn.Linear):
        def __init__(self, function):
            super().__init__(6, 64)
            self.function = function

        def forward(self, inputs):
            return self.function(super().forward(inputs))

    def train(compile_function):
        torch.manual_seed(0)
        model = nn.Sequential(Activated(compile_function(gelu)), nn.Linear(64, 3))
        trainer = ls.Trainer(model, compile_function(loss), SGD)
        for _ in range(4):
            trainer.step(rows())
            if ls.rank() == 0:  # a function is optimized for each process by itself
                model(rows()[0]).sum().backward()
        return trainer.digest()

    plain = one_outcome(ranks, train, lambda function: function, widths=(1,))
    assert one_outcome(ranks, train, torch.jit.script) == plain
