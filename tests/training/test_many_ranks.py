"""Trainings as on more than 64 ranks: rows of the first ranks only.

The thresholds are lowered, so that a few ranks are many.
"""

import math
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls
from lockstep.kernel import rank_status
from lockstep.kernel.errors import DisagreementError, LossError
from lockstep.record.reader import read_run
from lockstep.training import step_usage

SAMPLES = 36


def lower_thresholds(stack):
    for module in (step_usage, rank_status):
        stack.enter_context(mock.patch.object(module, "DETAILED_RANKS", 1))


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    targets = torch.arange(SAMPLES) % 4
    targets[5:9] = -100  # a micro-batch with few targets
    targets[:3] = -100
    return torch.utils.data.TensorDataset(inputs, targets)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def train(folder=None, class_weights=None, lowered=True, **options):
    """Train three steps; return the digest and every number that the ranks concluded."""
    with ExitStack() as stack:
        if lowered:
            lower_thresholds(stack)
        results = []
        weight = None if class_weights is None else torch.tensor(class_weights)
        trainer = ls.Trainer(
            network(), nn.CrossEntropyLoss(weight=weight, ignore_index=-100),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), microbatches=6, seed=1,
            metrics={"hits": hits}, callbacks=results.append, progress=False,
            loss_weight=ls.target_weight(nn.CrossEntropyLoss(weight=weight)),
            loggers=() if folder is None else folder, **options,
        )  # fmt: skip
        for batch in trainer.batches(data(), batch_size=12):
            trainer.step(batch)
        trainer.history.end_epoch(0)
        evaluation = trainer.evaluate(data(), 12)
        found = [(each.loss, each.norm, each.metrics) for each in results]
        assert {len(each.ranks) for each in results} == {1}
        digest = trainer.digest()
        return digest, found, evaluation.loss, evaluation.metrics, evaluation.samples


@pytest.mark.parametrize("class_weights", [None, [0.1, 0.7, 1.3, 0.4]])
def test_many_ranks_compute_what_one_does(ranks, class_weights):
    options = {"class_weights": class_weights}
    (expected,) = ranks(lambda: train(lowered=False, **options), 1)
    for world_size in (2, 3):
        assert ranks(lambda: train(**options), world_size) == [expected] * world_size


def test_stages_compute_what_one_rank_does(ranks):
    (expected,) = ranks(lambda: train(lowered=False), 1)
    found = ranks(lambda: train(pipeline=ls.PipelineConfig(stages=2)), 4)
    assert found == [expected] * 4


def test_the_record_has_rows_of_the_first_ranks(ranks, tmp_path):
    ranks(lambda: train(tmp_path / "run"), 3)
    run = read_run(tmp_path / "run")
    assert run.steps.ranks.shape == (3, 1, 4)
    assert (run.steps.ranks >= 0).all()
    assert '"losses"' not in (tmp_path / "run/record.jsonl").read_text()
    assert len(run.epochs[0]["memory_bytes"]) == 1


def raised(kind, act):
    with ExitStack() as stack:
        lower_thresholds(stack)
        trainer = ls.Trainer(
            nn.Linear(1, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), microbatches=6,
            loggers=(), progress=False,
        )  # fmt: skip
        with pytest.raises(kind) as caught:
            act(trainer, dist.get_rank())
        return str(caught.value)


def test_the_culprits_are_named_on_all_ranks(ranks):
    def non_finite(trainer, rank):
        batch = torch.zeros(6, 1), torch.zeros(6, 1)
        batch[1][4] = math.nan  # of rank 2
        trainer.step(batch)

    def batches(trainer, rank):
        trainer.step((torch.full((6, 1), float(rank == 1)), torch.zeros(6, 1)))

    def learning_rates(trainer, rank):
        trainer.optimizer.param_groups[0]["lr"] = 0.5 if rank == 2 else 0.1
        trainer.step((torch.zeros(6, 1), torch.zeros(6, 1)))

    def calls(trainer, rank):
        batch = torch.zeros(6, 1), torch.zeros(6, 1)
        if rank == 2:
            trainer.evaluate(torch.utils.data.TensorDataset(*batch), 6)
        else:
            trainer.step(batch)

    faults = [
        (LossError, non_finite, "rank 2, step 0, micro-batch 4: the loss is nan"),
        (DisagreementError, batches, "rank 1 got a different batch than rank 0"),
        (DisagreementError, learning_rates, "rank 2"),
        (DisagreementError, calls, "rank 2 is beginning an evaluation while rank 0 is in step 0"),
    ]
    for messages in ranks(lambda: [raised(kind, act) for kind, act, _ in faults], 3):
        for message, (_, _, expected) in zip(messages, faults, strict=True):
            assert expected in message
