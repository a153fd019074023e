"""A step: what its line in the record says of it in every layout."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import collectives
from lockstep.comm.native_all_reduce import NativeAllReduce
from lockstep.data_parallel import planned_buckets
from lockstep.kernel import norm as gradient_norm
from lockstep.record.fingerprints import read_step_fingerprints

INPUTS = torch.arange(28.0).reshape(7, 4).cos()
SGD = partial(torch.optim.SGD, lr=0.1)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(INPUTS, INPUTS, strict=True)


def weigh(data):
    """Give no weight to the micro-batch with the first row of the inputs."""
    return float(not (data[0] == INPUTS[0]).all(-1).any())


def record(folder, stages, seed=3):
    """Train on batches of every kind, and record the steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    pipeline = ls.PipelineConfig(stages=stages, balance=[1, 2]) if stages > 1 else None
    losses = []
    norms = []

    def note(result):
        losses.append(result.losses)
        norms.append(result.norm)

    trainer = ls.Trainer(
        model, nn.MSELoss(), SGD,
        microbatches=4, seed=seed, loss_weight=weigh, pipeline=pipeline, loggers=folder,
        callbacks=note,
    )  # fmt: skip
    with trainer:
        for dataset in (TensorDataset(INPUTS, INPUTS), Stream()):
            for batch in trainer.batches(dataset, 4, epoch=0):
                trainer.step(batch)
        trainer.step((INPUTS, INPUTS))
    return losses, norms


def test_the_record_identifies_each_step_in_every_layout(ranks, world_of_one, tmp_path):
    losses, norms = record(tmp_path / "whole", 1)
    steps = read_step_fingerprints(tmp_path / "whole")
    assert [list(each.losses) for each in steps] == losses
    assert [each.norm for each in steps] == norms
    assert [[loss is None for loss in each].count(True) for each in losses].count(1) == 3
    assert len({each.batch for each in steps}) == 5, "every batch has other samples"
    assert None not in {each.batch for each in steps}
    for nprocs, stages in ((2, 1), (2, 2)):
        ranks(record, nprocs, tmp_path / f"{nprocs}-{stages}", stages)
        assert read_step_fingerprints(tmp_path / f"{nprocs}-{stages}") == steps
    record(tmp_path / "other", 1, seed=4)
    other = read_step_fingerprints(tmp_path / "other")
    assert [a.batch == b.batch for a, b in zip(steps, other, strict=True)] == [False] * 2 + [
        True
    ] * 3


def test_a_step_of_a_small_model_exchanges_one_message_per_rank(ranks):
    """Statuses with gradients; a large model also exchanges an announcement, a bucket, a norm."""

    def train(is_small):
        if is_small:
            planned_buckets.LARGE_BYTES, gradient_norm.SHARED_ELEMENTS = limits
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
        norms = []
        counts = []
        trainer = ls.Trainer(
            model, nn.MSELoss(), SGD,
            microbatches=4, max_grad_norm=0.01, callbacks=lambda result: norms.append(result.norm),
        )  # fmt: skip

        def counted(call):
            def call_and_count(*args, **options):
                counts[-1] += 1
                return call(*args, **options)

            return call_and_count

        collectives._gather_pages = counted(collectives._gather_pages)
        NativeAllReduce.launch = counted(NativeAllReduce.launch)
        for _ in range(4):
            counts.append(0)
            trainer.step((INPUTS, INPUTS))
        return counts[1:], norms, trainer.digest()

    limits = planned_buckets.LARGE_BYTES, gradient_norm.SHARED_ELEMENTS
    ((_, *alone),) = ranks(train, 1, False)
    for n, is_small, expected in ((2, True, 1), (3, True, 1), (2, False, 4)):
        for counts, *found in ranks(train, n, is_small, backend="lockstep"):
            assert counts == [expected] * 3
            assert found == alone
