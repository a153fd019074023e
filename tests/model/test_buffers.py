"""Buffers: what becomes of the values that micro-batches write."""

from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.tree import nodes_of
from lockstep.data.microbatch import split_evenly
from lockstep.errors import BufferMismatchError
from lockstep.model.buffers import Buffers, merge_reports


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("idle", torch.tensor([float("nan"), -0.0]))
        self.register_buffer("empty", None)
        self.again = nn.Module()
        self.again.register_buffer("same", self.mean)


def run(write, leaves=3, ranks=1, rank=0, gathered=None):
    """Let `write(model, leaf)` act as each micro-batch that this rank owns."""
    model = Holder()
    owned = split_evenly(leaves, ranks)
    buffers = Buffers({"": model})
    for leaf in owned[rank]:
        buffers.install_copies()
        write(model, leaf)
        buffers.collect(leaf, share=(leaf + 1) / 6)
    buffers.restore()
    report = buffers.hash_results().of_replica(rank)
    everyone = [report] if gathered is None else gathered(report)
    buffers.merge(
        reduce(merge_reports, everyone), [nodes_of(each, leaves) for each in owned], leaves, None
    )
    return model


def test_every_microbatch_starts_from_the_steps_buffers():
    starts = []

    def write(model, leaf):
        starts.append(model.mean.tolist())
        model.mean.add_(leaf + 1)

    run(write)
    assert starts == [[0.0, 0.0]] * 3


def test_floating_results_that_differ_become_the_weighted_mean():
    def write(model, leaf):
        model.mean.add_(torch.tensor([1.0, leaf]))

    model = run(write)
    assert model.mean.tolist() == pytest.approx([1.0, 0 / 6 + 2 / 6 + 2 * 3 / 6])


def test_results_with_the_same_bits_are_adopted():
    def write(model, leaf):
        model.count += 1
        model.mean.fill_(1 / 3)  # a weighted mean would round

    model = run(write)
    assert model.count.item() == 1
    assert model.mean.tolist() == torch.full((2,), 1 / 3).tolist()


def test_what_nobody_wrote_stays_as_it_is():
    before = Holder().idle
    assert run(lambda model, leaf: None).idle.view(torch.int32).tolist() == (
        before.view(torch.int32).tolist()
    )


def test_a_buffer_keeps_its_identity_and_its_other_name():
    model = Holder()
    kept = model.mean
    buffers = Buffers({"": model})
    buffers.install_copies()
    assert model.again.same is model.mean
    assert model.mean is not kept
    model.mean.add_(1)
    buffers.collect(0, 1.0)
    buffers.restore()
    buffers.merge(buffers.hash_results(), [[(0, 1)]], 1, None)
    assert model.mean is kept
    assert model.again.same is kept
    assert kept.tolist() == [1.0, 1.0]


def test_integers_that_differ_are_an_error_that_names_the_buffer():
    def write(model, leaf):
        model.count += leaf

    with pytest.raises(
        BufferMismatchError, match=r"buffer count .* only floating-point buffers are averaged"
    ):
        run(write)


def test_a_buffer_that_changes_its_shape_is_named():
    def write(model, leaf):
        model.mean = torch.zeros(3)

    with pytest.raises(BufferMismatchError, match="buffer mean changed its shape"):
        run(write)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_without_a_microbatch_get_the_outcome_too(ranks, n):
    """Three leaves on four ranks: the last rank computed nothing."""

    def merge():
        def gather(findings):
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, findings)
            return found

        def write(model, leaf):
            model.count += 1
            model.mean.add_(leaf + 1)

        model = run(write, 3, dist.get_world_size(), dist.get_rank(), gather)
        return model.count.item(), model.mean.tolist()

    expected = [1.0 / 6 + 2.0 * 2 / 6 + 3.0 * 3 / 6] * 2
    for count, mean in ranks(merge, n):
        assert count == 1
        assert mean == pytest.approx(expected)


def test_integers_that_differ_between_ranks_are_an_error_on_all(ranks):
    def merge():
        def gather(findings):
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, findings)
            return found

        def write(model, leaf):
            model.count += leaf

        try:
            run(write, 2, dist.get_world_size(), dist.get_rank(), gather)
        except BufferMismatchError as error:
            return str(error)

    for message in ranks(merge, 2):
        assert message is not None
        assert "buffer count" in message
