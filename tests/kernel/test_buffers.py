"""Rule 5: what becomes of the values that micro-batches write into buffers."""

import re
from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls
from lockstep.kernel.buffers import Buffers, as_bytes, merge_reports
from lockstep.kernel.errors import BufferMismatchError, DisagreementError, UsageError
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import nodes_of
from lockstep.model.buffer_exchange import GroupExchange

SGD = partial(torch.optim.SGD, lr=0.1)


class Holder(nn.Module):
    lockstep_buffer_rules = {"mean": "mean", "count": "equal"}

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
    exchange = GroupExchange(None) if ranks > 1 else None
    nodes = [nodes_of(microbatches, leaves) for microbatches in owned]
    buffers.merge(reduce(merge_reports, everyone), nodes, leaves, exchange)
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
    buffers.merge(buffers.hash_results(), [[(0, 1)]], 1)
    assert model.mean is kept
    assert model.again.same is kept
    assert kept.tolist() == [1.0, 1.0]


def test_integers_that_differ_are_an_error_that_names_the_buffer():
    def write(model, leaf):
        model.count += leaf

    with pytest.raises(
        BufferMismatchError, match=r'buffer count has the rule "equal", and got different values'
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


class Rules(nn.Module):
    """One buffer per rule, and one without."""

    lockstep_buffer_rules = {
        "load": "sum", "seen": "sum", "final": "last", "cache": "equal", "mean": "mean",
    }  # fmt: skip

    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.full((2,), 5.0))
        self.register_buffer("seen", torch.full((), 3, dtype=torch.int32))
        self.register_buffer("final", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("other", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        with torch.no_grad():
            for name in self.writes:
                getattr(self, f"write_{name}")(inputs)
        return (inputs * self.weight).sum(dim=1)

    def write_load(self, inputs):
        self.load += inputs.sum(dim=0)

    def write_seen(self, inputs):
        self.seen += len(inputs)

    def write_final(self, inputs):
        self.final = inputs[-1, 0]

    def write_cache(self, inputs):
        self.cache = torch.tensor(7.0)

    def write_unequal(self, inputs):
        self.cache = inputs[0, 0]

    def write_other(self, inputs):
        self.other = torch.tensor(1.0)  # equal everywhere, as a sum may be by chance

    def write_longer(self, inputs):
        if inputs[0, 0] == 0:  # in the first micro-batch
            self.cache = torch.zeros(int(inputs[1, 0]) + 1)


INPUTS = torch.arange(24.0).view(12, 2)


def train_with_rules(*writes):
    model = Rules()
    model.writes = writes
    trainer = ls.Trainer(
        model, lambda outputs, targets: (outputs - targets).mean(), SGD, microbatches=4
    )
    try:
        trainer.step((INPUTS, torch.zeros(12)))
    except BufferMismatchError as error:
        return str(error)
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_each_rule_gives_what_one_forward_of_the_whole_batch_gives(ranks):
    """Sums were averaged, and a count of 3 per micro-batch stayed 3."""
    whole = Rules()
    whole.writes = ("load", "seen", "final", "cache")
    whole(INPUTS)
    expected = {name: buffer.tolist() for name, buffer in whole.named_buffers()}
    for n in (1, 3):
        assert ranks(train_with_rules, n, *whole.writes) == [expected] * n


@pytest.mark.parametrize(
    ("write", "said"),
    [
        ("other", 'buffer other was written .* lockstep_buffer_rules = {"other": RULE}.* Rules'),
        ("unequal", 'buffer cache has the rule "equal", and got different values'),
        ("longer", r"buffer cache changed its shape .* \(\), which became \(3,\)"),
    ],
)
def test_what_no_rule_can_merge_is_named_on_every_rank(ranks, write, said):
    for n in (1, 3):
        for message in ranks(train_with_rules, n, write):
            assert re.search(said, message), message


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"loads": "sum"}, "names 'loads', and the module's buffers are: load, seen"),
        ({"load": "summe"}, "is 'summe': expected one of 'mean', 'sum', 'last', 'equal'"),
        ({"seen": "mean"}, "is 'mean', which a torch.int32 buffer cannot follow"),
        (["load"], "is a list: expected a dict"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_by_the_trainer(rules, said):
    model = Rules()
    model.lockstep_buffer_rules = rules
    with pytest.raises(UsageError, match=f"lockstep_buffer_rules.*{said}"):
        ls.Trainer(nn.Sequential(model), nn.MSELoss(), SGD)


def test_rules_that_differ_between_ranks_are_refused(ranks):
    def build():
        model = Rules()
        if dist.get_rank():
            model.lockstep_buffer_rules = {"load": "last"}
        with pytest.raises(DisagreementError, match="lockstep_buffer_rules") as raised:
            ls.Trainer(model, nn.MSELoss(), SGD)
        return str(raised.value)

    one, two = ranks(build, 2)
    assert one == two


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(4, momentum=None),
        torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        type("OwnNorm", (nn.BatchNorm1d,), {})(4),
    ],
)
def test_modules_of_torch_need_no_rules(module):
    trainer = ls.Trainer(module, nn.MSELoss(), SGD, microbatches=2)
    trainer.step((torch.randn(8, 4), torch.randn(8, 4)))
    trainer.step((torch.randn(8, 4), torch.randn(8, 4)))


def test_a_single_element_with_any_stride_has_bytes():
    """Torch calls it contiguous, and cannot view its bytes."""
    single = torch.ones(1, 8)[:, 0].as_strided((1,), (8,))
    assert bytes(as_bytes(single).tolist()) == bytes(as_bytes(torch.ones(1)).tolist())
    as_bytes(single).zero_()
    assert single.item() == 0
