"""Calls of sharded models: all ranks repeat theirs together, also if one alone has a difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.audit.recorded_call import RecordedCall
from lockstep.kernel.errors import LockstepError

STEPS = 3
MICROBATCHES = 4


class Network(nn.Module):
    """Draws, writes buffers, and computes one block again in backward."""

    def __init__(self, counting: Sequence[int]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.head = nn.Linear(6, 3)
        self.counting = counting
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = torch.utils.checkpoint.checkpoint(self.body, inputs, use_reentrant=False).tanh()
        if ls.rank() in self.counting:
            self.calls += 1
            outputs = outputs * (1 + self.calls / 100)
        return self.head(outputs)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.arange(20) % 3
    return [(torch.randn(20, 6, generator=generator), targets) for _ in range(STEPS)]


def plain(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets)


def reads_hidden(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden: list[Any] = []
    with model.body.register_forward_hook(lambda *given: hidden.append(given[2])):
        return plain(model, inputs, targets) + hidden[0].square().mean()


def train_manually(network: nn.Module, compute: Callable[..., Any], audit: bool) -> str:
    sgd = torch.optim.SGD
    options = {"microbatches": MICROBATCHES, "loggers": (), "audit": audit}
    trainer = ls.Trainer(network, F.cross_entropy, sgd, storage="sharded", **options)
    for batch in make_batches():
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                step.backward(compute(trainer.model, inputs, targets))
    return trainer.digest()


def train_exactly(network: nn.Module, compute: Callable[..., Any], audit: bool) -> str:
    from torch.distributed.fsdp import fully_shard

    for part in (network.body, network.head, network):
        fully_shard(part)
    exact = ls.exact(network, MICROBATCHES, audit=audit)
    optimizer = torch.optim.SGD(network.parameters())
    for inputs, targets in make_batches():
        for turn in range(MICROBATCHES // ls.world_size()):
            number = turn * ls.world_size() + ls.rank()
            own = slice(5 * number, 5 * number + 5)
            exact.begin()
            exact.weigh(compute(network, inputs[own], targets[own])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ls.digest(network)


LOOPS = {"manual": train_manually, "exact": train_exactly}


def train(name: str, counting: Sequence[int] = (), compute: Any = plain, audit: bool = True) -> Any:
    """Return the digest, or the error, and the number of repetitions on this rank."""
    repeated = []
    repeat = RecordedCall.repeat

    def counted(call: RecordedCall, *args: Any, **kwargs: Any) -> dict[str, int]:
        repeated.append(call)
        return repeat(call, *args, **kwargs)

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedCall, "repeat", counted)
        try:
            found = LOOPS[name](Network(counting), compute, audit)
        except LockstepError as error:
            found = f"{type(error).__name__}: {error}"
    return found, len(repeated)


def compare(name: str) -> list[Any]:
    expected = train(name, audit=False), train(name, compute=reads_hidden, audit=False)
    assert [repetitions for _, repetitions in expected] == [0, 0]
    return [
        train(name) == (expected[0][0], STEPS),
        train(name, compute=reads_hidden) == expected[1],
    ]


@pytest.mark.filterwarnings("ignore:.*cannot audit step 0")
@pytest.mark.parametrize("name", LOOPS)
def test_repetitions_change_no_bit_and_are_left_out_on_all_ranks(ranks, name, capfd):
    assert ranks(compare, 2, name) == [[True, True]] * 2
    said = capfd.readouterr().err
    assert "cannot audit step 0, nor others like it: the loss depends on parameters or" in said
    assert "wrong" not in said


def hide(name: str) -> list[Any]:
    """Train with hidden state on all ranks, and on rank 1 only."""
    return [train(name, counting)[0] for counting in ((0, 1), (1,))]


@pytest.mark.parametrize("name", LOOPS)
def test_hidden_state_is_named_also_if_one_rank_has_it(ranks, name):
    first, second = ranks(hide, 2, name)
    assert first == second
    for said, place in zip(first, ("rank 0, step 0, micro-batch 2", "rank 1, .* 3"), strict=True):
        where = r"first in aten\.mul\.\w+ of Network \(test_sharded_calls\.py:\d+ in forward\)"
        assert re.match(rf"StateError: {place}: .*, {where}; Network\.calls changed", said), said


def train_with_fault(name: str) -> Any:
    from bit_flips import FaultyOperator

    with FaultyOperator("tanh", rank=1, call=1, element=0, bit=20) as fault:
        return *train(name), fault.flips


@pytest.mark.parametrize("name", LOOPS)
def test_a_fault_of_one_rank_is_reported(ranks, name, capfd):
    (digest, repetitions, none), other = ranks(train_with_fault, 2, name)
    assert other == (digest, repetitions, 1)
    assert (len(digest), none) == (64, 0)
    assert repetitions > STEPS  # with those that explained the difference, on both ranks
    said = capfd.readouterr().err
    assert re.search(
        r"step 0, micro-batch 3: rank 1 \(.*, core \d+\) computed a wrong result", said
    )


def leave_out_a_microbatch() -> str:
    """Take an audited step in which the micro-batch of rank 1 has a weight of 0."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    network = nn.Linear(6, 3)
    fully_shard(network)
    exact = ls.exact(network, 2)
    exact.begin()
    loss = network(torch.randn(4, 6)).square().mean()
    try:
        exact.weigh(loss, weight=1.0 - ls.rank()).backward()
    except LockstepError as error:
        return str(error)
    raise AssertionError


def test_a_rank_whose_step_fails_takes_part_in_no_repetition_of_the_others(ranks):
    for said in ranks(leave_out_a_microbatch, 2):
        assert "micro-batch 1 has a weight of 0" in said
