"""DistributedDataParallel in ordinary loops, against the arithmetic that it guarantees."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from averaging import expected_gradients, inputs_of, local_gradients, net, same, uses_some
from lockstep.kernel.errors import RankError, UsageError
from pytest_lockstep import assert_same_bits

MIB = 1 << 20


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.ranks(1, 3)
@pytest.mark.usefixtures("world")
def test_gradients_are_the_mean_along_the_tree(rank, world_size):
    """Also with parameters that no rank uses, or not every rank, for any bucket size."""
    for capacity in (64, 3000, 1 << 20):  # bytes
        model = ls.DistributedDataParallel(net(seed=rank), bucket_cap_mb=capacity / MIB)
        for _ in range(2):  # the same buffers again
            model.zero_grad()
            model(inputs_of(rank), uses_some(rank)).square().mean().backward()
        assert all(same(gradients_of(model), expected_gradients(world_size)))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("world")
def test_no_sync_accumulates_and_the_next_backward_averages_the_sum(rank):
    model = ls.DistributedDataParallel(net())
    with model.no_sync():
        model(inputs_of(rank, 0), uses_some(rank)).square().mean().backward()
    assert all(same(gradients_of(model), local_gradients(rank, (0,))))
    model(inputs_of(rank, 1), uses_some(rank)).square().mean().backward()
    assert all(same(gradients_of(model), expected_gradients(2, (0, 1))))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("world")
def test_buckets_are_launched_while_backward_goes_on(rank):
    events = []
    model = ls.DistributedDataParallel(net(), bucket_cap_mb=64 / MIB)
    # The first backward shows that nothing forbids it.
    model(inputs_of(rank), True).square().mean().backward()
    launch_next = model._reducer.launch_next

    def noted():
        events.append("launch")
        launch_next()

    model._reducer.launch_next = noted
    first = model.module.first.weight
    first.register_hook(lambda gradient: events.append("first layer"))
    model(inputs_of(rank), True).square().mean().backward()
    assert events.index("launch") < events.index("first layer")


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("world")
def test_it_agrees_with_distributed_data_parallel(rank):
    ours, theirs = (
        ls.DistributedDataParallel(net()),
        DistributedDataParallel(net(), find_unused_parameters=True),
    )
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            model(inputs_of(rank, step), step % 2 == 0).square().mean().backward()
            optimizer.step()
    for pair in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-6)


def test_everybody_begins_with_rank_zeros_parameters_and_buffers(ranks):
    def begin():
        rank = dist.get_rank()
        module = net(seed=rank)
        module.mean += rank
        model = ls.DistributedDataParallel(module)
        at_start = ls.digest(model.state_dict())
        module.mean += rank
        model(inputs_of(rank), True)
        after_forward = module.mean.tolist()
        module.mean += rank
        model.eval()(inputs_of(rank), True)
        return at_start, after_forward, module.mean.tolist()

    (first, *_), (second, forward, evaluated) = ranks(begin, 2)
    assert first == second
    assert forward == [0.0, 0.0]
    assert evaluated == [1.0, 1.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_state_dict_has_the_modules_own_names(ranks, compiled):
    def names():
        module = net()
        wrapped = ls.DistributedDataParallel(
            torch.compile(module, backend="eager") if compiled else module
        )
        assert list(wrapped.state_dict()) == list(module.state_dict())
        other = net(seed=9)
        assert wrapped.load_state_dict(other.state_dict()).missing_keys == []
        assert ls.digest(module.state_dict()) == ls.digest(other.state_dict())
        outer = nn.ModuleDict({"inside": wrapped, "beside": nn.Linear(1, 1)})
        state = outer.state_dict()
        outer.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
        return list(state), list(module.state_dict()), bool(module.first.weight.any())

    ((nested, own, kept),) = ranks(names, 1, timeout=100.0)
    assert nested == [*(f"inside.{name}" for name in own), "beside.weight", "beside.bias"]
    assert not kept


@pytest.mark.usefixtures("world_of_one")
def test_a_state_dict_with_a_missing_name_is_still_refused():
    state = net().state_dict()
    state.pop("last.bias")
    with pytest.raises(RuntimeError, match=r"Missing key.*last\.bias"):
        ls.DistributedDataParallel(net()).load_state_dict(state)


def test_gradients_around_a_compiled_module_are_averaged(ranks):
    def gradients():
        rank = dist.get_rank()
        module = net()
        model = ls.DistributedDataParallel(torch.compile(module, backend="aot_eager"))
        model(inputs_of(rank), True).square().mean().backward()
        return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]

    first, second = ranks(gradients, 2, timeout=100.0)
    assert first == second
    plain = []
    for rank in range(2):
        model = net()
        model(inputs_of(rank), True).square().mean().backward()
        plain.append(model.first.weight.grad)
    assert torch.allclose(torch.tensor(first[0]), (plain[0] + plain[1]) / 2, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("world")
def test_gradients_may_be_kept_by_the_user(rank):
    """The mean is written into the user's own memory, not into a buffer used again."""
    model = ls.DistributedDataParallel(net())
    kept = []
    for step in range(2):
        model.zero_grad(set_to_none=True)
        model(inputs_of(rank, step), True).square().mean().backward()
        kept.append((model.module.last.weight.grad, model.module.last.weight.grad.clone()))
    for pair in kept:
        assert_same_bits(*pair)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("forward_between", [True, False])
def test_a_backward_that_raised_does_not_spoil_the_next(rank, forward_between):
    model = ls.DistributedDataParallel(net(), bucket_cap_mb=64 / MIB, gradient_as_bucket_view=True)
    model(inputs_of(rank), uses_some(rank)).square().mean().backward()
    outputs, others = (model(inputs_of(rank), uses_some(rank)) for _ in range(2))

    def fail(gradient):
        raise KeyError("mine")

    handle = model.module.first.weight.register_hook(fail)
    model.zero_grad()
    with pytest.raises(KeyError, match="mine"):
        outputs.square().mean().backward()
    handle.remove()
    assert model._reducer.launched > 0
    dist.barrier()
    model.zero_grad()
    if forward_between:
        others = model(inputs_of(rank), uses_some(rank))
    others.square().mean().backward()
    assert all(same(gradients_of(model), expected_gradients(2)))


@pytest.mark.usefixtures("world_of_one")
def test_nothing_keeps_a_dropped_wrapper_alive():
    module = net()
    wrapper = ls.DistributedDataParallel(module)
    dropped = weakref.ref(wrapper._reducer)
    del wrapper
    gc.collect()
    assert dropped() is None
    module(inputs_of(0), True).sum().backward()


def test_different_models_are_told_apart(ranks):
    with pytest.raises(RankError, match=r"rank 1: model\.weight\.shape is \(3, 2\), "):
        ranks(lambda: ls.DistributedDataParallel(nn.Linear(2, 2 + dist.get_rank())), 2)


@pytest.mark.usefixtures("world_of_one")
def test_a_parameter_that_is_unfrozen_later_is_refused_by_name():
    model = ls.DistributedDataParallel(net())
    model.module.frozen.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"parameter frozen\.weight was frozen"):
        model(inputs_of(0), True)


class Rows(nn.Module):
    """Sparse gradients of a parameter that no module declares."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))

    def forward(self, indices):
        return nn.functional.embedding(indices, self.weight, sparse=True)


def test_a_sparse_gradient_that_nobody_declared_is_refused_by_name(ranks):
    def backward():
        model = ls.DistributedDataParallel(Rows())
        model(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(
        RankError, match="parameter weight has a sparse gradient, which is supported only"
    ):
        ranks(backward, 2)


@pytest.mark.parametrize("option", [{"device_ids": [0]}, {"find_unused_parameters": True}])
def test_an_option_of_torchs_class_that_has_no_use_is_named(option):
    (name,) = option
    with pytest.raises(UsageError, match=f"has no option {name}: omit it, because"):
        ls.DistributedDataParallel(nn.Linear(2, 2), **option)


def test_without_init_it_says_so():
    with pytest.raises(UsageError, match=r"call lockstep.init\(\) first"):
        ls.DistributedDataParallel(net())
