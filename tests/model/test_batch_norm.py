"""Batch norm that will fail on a micro-batch of one sample fails in the epoch's first step."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, TensorDataset

import lockstep as ls
from lockstep.data.microbatch import Batch
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.kernel.step_context import Attempt, StepContext
from lockstep.model.batch_norm import BatchNormCheck

SGD = partial(torch.optim.SGD, lr=0.1)


class Keyword(nn.BatchNorm1d):
    """A module whose input the model passes by keyword, which is not looked at."""

    def __call__(self, inputs):
        return super().__call__(input=inputs)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def rows(samples, *shape):
    torch.manual_seed(1)
    inputs = torch.randn(samples, *shape or (6,))
    return TensorDataset(inputs, torch.randint(0, 3, (samples,)))


def train(model, samples, *shape, loss=None, **options):
    """Train an epoch of batches of 8 samples in 4 micro-batches; return the trainer."""
    trainer = ls.Trainer(model, loss or nn.CrossEntropyLoss(), SGD, microbatches=4)
    if "batch_sampler" not in options:
        options["batch_size"] = 8
    try:
        for batch in trainer.batches(rows(samples, *shape), **options):
            trainer.step(batch)
    finally:
        assert not any(each._forward_pre_hooks for each in model.modules())
    return trainer


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("samples", "options", "named"),
    [
        (17, {}, r"batch 2 of epoch 0 \(1 sample\)"),
        (23, {"epoch": 3}, r"batch 2 of epoch 3 \(7 samples\)"),  # in 2, 2, 2 and 1
        (24, {"batch_sampler": BatchSampler(range(24), 9, False)}, r"batch 2 .*\(6 samples\)"),
    ],
)
def test_the_first_step_says_which_batch_will_fail(samples, options, named):
    model = network()
    before = ls.digest(model)
    sentence = (
        f"^a micro-batch of {named} holds one sample, on which the batch norm 1 cannot train: pass "
        "drop_last=True to trainer.batches if that is the short last batch, or choose another"
    )
    with pytest.raises(UsageError, match=sentence):
        train(model, samples, **options)
    assert ls.digest(model) == before


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("skips", [False, True])
def test_the_first_manual_step_warns_of_the_batch_that_will_fail(skips):
    """It is no error, since the loop may skip that batch, or call other samples then."""
    judge, generator = nn.Linear(3, 1), network().requires_grad_(False)
    trainer = ls.Trainer(judge, None, SGD, microbatches=4, extra_modules=[generator])

    def run_epoch():
        for batch in trainer.batches(rows(17), 8):
            if skips and batch.size < 8:
                continue
            with trainer.manual_step() as step:
                for inputs, _ in step.microbatches(batch):
                    step.backward(judge(generator(inputs)).mean())
            assert not generator[1]._forward_pre_hooks

    sentence = (
        r"before batch 2 of epoch 0 \(1 sample\): .* batch norm "
        r"extra_modules\[0\].1 cannot train: "
    )
    ends = nullcontext()
    if not skips:
        ends = pytest.raises(UsageError, match=r"step 2, micro-batch 0 holds one .* drop_last=")
    with ends, pytest.warns(UserWarning, match=sentence) as seen:
        run_epoch()
    assert len(seen) == 1
    assert trainer.steps == 2


@pytest.mark.usefixtures("world_of_one")
def test_what_works_is_not_refused():
    pictures = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 2 * 2, 3)
    )
    frozen, unweighted = network(), nn.CrossEntropyLoss(ignore_index=9)
    frozen[1].eval()
    assert train(network(), 17, drop_last=True).steps == 2
    assert train(network(), 24).steps == 3
    assert train(pictures, 17, 1, 4, 4).steps == 3  # several values per sample
    assert train(frozen, 17).steps == 3
    by_keyword = network()
    by_keyword[1] = Keyword(8)
    with pytest.raises(UsageError, match="micro-batch 0 holds one sample, and batch norm"):
        train(by_keyword, 17)
    with pytest.raises(UsageError, match="micro-batch 0 holds one sample, and batch norm"):
        train(network(), 17, loss=unweighted)  # a micro-batch without weight is not computed
    trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), SGD, microbatches=4)
    for batch, _ in zip(trainer.batches(rows(16), 8), range(2), strict=False):
        trainer.step(batch)
    assert trainer.evaluate(rows(17), 8).samples == 17


def test_with_stages_it_fails_on_every_rank(ranks):
    """The first call evaluates micro-batches of one sample, on which the blocks are measured."""

    def run():
        stages = ls.PipelineConfig(stages=2)
        trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), SGD, microbatches=4, pipeline=stages)
        evaluated = trainer.evaluate(rows(3), 3).samples
        before = trainer.digest()
        try:
            for batch in trainer.batches(rows(17), 8):
                trainer.step(batch)
        except LockstepError as error:
            return evaluated, trainer.steps, str(error), trainer.digest() == before

    for evaluated, steps, message, is_unchanged in ranks(run, 2):
        assert (evaluated, steps, is_unchanged) == (3, 0, True)
        assert "a micro-batch of batch 2 of epoch 0 (1 sample) holds one sample" in message


def test_a_compiled_model_gets_no_hooks():
    """They would change where its graphs are cut."""
    batch = Batch(8, 4, (), single_sample="batch 2 of epoch 0 (1 sample)")
    for compiled in (False, True):
        model = network()
        model[3]._compiled_call_impl = model.forward if compiled else None
        step = StepContext(Attempt(0, 0, 0), SimpleNamespace(rank=0))
        check = BatchNormCheck({"": model}, lambda: None, has_weights=False)
        with check.begin(step, batch):
            assert bool(model[1]._forward_pre_hooks) != compiled
