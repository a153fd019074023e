"""Features that users of torch's DistributedDataParallel use, with ours, and its errors.

All programs run in one launch of three ranks; each test looks at one of them.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from averaging import inputs_of, net, same, tree_mean, uses_some
from lockstep.comm.shared_memory import is_shared
from lockstep.kernel.errors import GradientError

RANKS = 3
MIB = 1 << 20
PROGRAMS: dict[str, Callable[[int], Any]] = {}
ON_GLOO = ("views_of_buckets", "checkpointed_reentrantly")
"""What is done another way where the backend adds nothing by itself."""


def program(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Add a function that every rank runs, given its number."""
    PROGRAMS[function.__name__] = function
    return function


def run_all(programs: dict[str, Callable[[int], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for title, function in programs.items():
        try:
            found[title] = function(dist.get_rank())
        except Exception:
            found[title] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def of_each_rank(ranks):
    """Return the values of a program on each rank; all run when the first is asked for."""

    @functools.cache
    def results(backend: str | None) -> list[dict[str, Any]]:
        chosen = {name: PROGRAMS[name] for name in ON_GLOO} if backend else PROGRAMS
        return ranks(run_all, RANKS, chosen, backend=backend, timeout=20.0, deadline=110.0)

    def values_of(title: str, backend: str | None = None) -> list[Any]:
        values = [found[title] for found in results(backend)]
        for value in values:
            assert not isinstance(value, str), value
        return values

    return values_of


def expected(
    make: Callable[[], nn.Module], backward: Callable[[nn.Module, int], None]
) -> list[Any]:
    """Return the mean along the tree of the gradients that each rank would have alone."""
    columns = []
    for rank in range(dist.get_world_size()):
        model = make()
        backward(model, rank)
        columns.append([dense(parameter.grad) for parameter in model.parameters()])
    return [tree_mean(column) for column in zip(*columns, strict=True)]


def dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of a sparse gradient's rows."""
    sparse = gradient is not None and gradient.is_sparse
    return gradient.coalesce().to_dense() if sparse else gradient


def averaged(
    make: Callable[[], nn.Module],
    backward: Callable[[nn.Module, int], None],
    rank: int,
    **options: Any,
) -> list[bool]:
    """Compare three backwards through DistributedDataParallel with the arithmetic."""
    model, found = ls.DistributedDataParallel(make(), **options), []
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        found += same([p.grad for p in model.parameters()], expected(make, backward))
    return found


def squares(model: nn.Module, rank: int) -> None:
    model(inputs_of(rank), uses_some(rank)).square().mean().backward()


class Segments(nn.Module):
    """Two segments that are computed again in backward, and one layer in both and after them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.shared, self.first, self.second = (nn.Linear(7, 7) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor, use_some: bool) -> torch.Tensor:
        hidden = inputs.requires_grad_()
        for layer in (self.first, self.second):
            segment = nn.Sequential(self.shared, nn.Tanh(), layer)
            hidden = checkpoint(segment, hidden, use_reentrant=self.reentrant)
        return self.shared(hidden)


@program
def checkpointed(rank: int) -> list[bool]:
    return averaged(lambda: Segments(False), squares, rank, bucket_cap_mb=64 / MIB)


@program
def checkpointed_reentrantly(rank: int) -> list[bool]:
    return averaged(lambda: Segments(True), squares, rank, bucket_cap_mb=64 / MIB)


@program
def checkpointed_reentrantly_in_one_round(rank: int) -> list[bool]:
    model = ls.DistributedDataParallel(Segments(True))
    rounds = []
    finish = model._reducer.finish
    model._reducer.finish = lambda: (rounds.append(1), finish())
    for _ in range(2):
        squares(model, rank)
    return [len(rounds) == 2]


@program
def in_bfloat16(rank: int) -> list[bool]:
    def backward(model: nn.Module, rank: int) -> None:
        model(inputs_of(rank).bfloat16(), uses_some(rank)).square().mean().backward()

    return averaged(lambda: net().bfloat16(), backward, rank)


def under_autocast(model: nn.Module, rank: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs_of(rank), uses_some(rank))
    outputs.float().square().mean().backward()


@program
def with_autocast(rank: int) -> list[bool]:
    return averaged(net, under_autocast, rank)


@program
def channels_last(rank: int) -> list[bool]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def backward(model: nn.Module, rank: int) -> None:
        model(
            inputs_of(rank).repeat(3, 3)[None, None].expand(2, 3, -1, -1)
        ).square().sum().backward()

    found = averaged(make, backward, rank)
    return found + averaged(make, backward, rank, gradient_as_bucket_view=True)


@program
def a_penalty_of_the_gradient(rank: int) -> list[bool]:
    def backward(model: nn.Module, rank: int) -> None:
        inputs = inputs_of(rank).requires_grad_()
        (gradient,) = torch.autograd.grad(
            model(inputs, True).square().mean(), inputs, create_graph=True
        )
        gradient.square().sum().backward()

    return averaged(net, backward, rank)


@program
def a_graph_of_the_backward_is_refused(rank: int) -> list[bool]:
    model = ls.DistributedDataParallel(net())
    loss = model(inputs_of(rank), True).square().mean()
    with warnings.catch_warnings():  # torch warns of a cycle in memory
        warnings.simplefilter("ignore")
        try:
            loss.backward(create_graph=True)
        except GradientError as error:
            return [
                "backward(create_graph=True) is not supported by DistributedDataParallel"
                in str(error)
            ]
    return [False]


@program
def compiled_around(rank: int) -> list[bool]:
    """torch.compile(DistributedDataParallel(...)), as others write it."""
    module = net()
    model = torch.compile(ls.DistributedDataParallel(module), backend="eager")
    for _ in range(2):
        module.zero_grad()
        model(inputs_of(rank), uses_some(rank)).square().mean().backward()
    return same([p.grad for p in module.parameters()], expected(net, squares))


@program
def some_ranks_only(rank: int) -> list[bool]:
    some, alone = dist.new_group([0, 2]), [dist.new_group([each]) for each in range(RANKS)]
    model = ls.DistributedDataParallel(net(), process_group=alone[1] if rank == 1 else some)
    squares(model, rank)
    columns = []
    for each in [1] if rank == 1 else [0, 2]:
        one = net()
        squares(one, each)
        columns.append([parameter.grad for parameter in one.parameters()])
    means = [tree_mean(column) for column in zip(*columns, strict=True)]
    return same([p.grad for p in model.parameters()], means)


def steps_of(model: ls.DistributedDataParallel, rank: int) -> list[list[torch.Tensor | None]]:
    """Do what a user may do with gradients between backwards."""
    found = []

    def note() -> None:
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    def backward(step: int, use: bool) -> None:
        model(inputs_of(rank, step), use).square().mean().backward()
        note()

    backward(0, rank == 1)
    backward(1, False)  # accumulates; `some` keeps what it had
    model.zero_grad(set_to_none=False)
    backward(2, rank == 0)
    model.zero_grad()
    with model.no_sync():
        backward(3, rank != 1)
    backward(4, False)
    backward(5, True)
    return found


@program
def views_of_buckets(rank: int) -> list[bool]:
    """The same gradients as without, and they lie in the bucket."""
    plain, viewed = (
        ls.DistributedDataParallel(net(), gradient_as_bucket_view=view, bucket_cap_mb=3000 / MIB)
        for view in (False, True)
    )
    # One after the other, and each alone: two on one group wait for each other.
    first, second = steps_of(plain, rank), steps_of(viewed, rank)
    found = [all(same(*pair)) for pair in zip(first, second, strict=True)]
    native = dist.get_backend() == "lockstep"
    gradient = viewed.module.last.weight.grad
    bucket = viewed.module.last.bias.grad
    return [
        *found,
        is_shared(gradient) == native,
        gradient.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr(),
    ]


@program
def scaled_losses(rank: int) -> list[Any]:
    """One rank's gradient overflows in the second step: all of them skip it."""
    model = ls.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(inputs_of(rank, step), True).square().mean()
        scaler.scale(loss * (float("inf") if (rank, step) == (1, 1) else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        found.append([ls.digest(model.state_dict()), scaler.get_scale()])
    return found


@program
def beside_a_sharded_optimizer(rank: int) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    digests = []
    for kind in ("whole", "sharded"):
        model = ls.DistributedDataParallel(net())
        if kind == "whole":
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(inputs_of(rank, step), True).square().mean().backward()
            optimizer.step()
        digests.append(ls.digest(model.state_dict()))
    return digests


class Sparse(nn.Module):
    """Embeddings with sparse gradients: used by some, by all, by nobody; and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(20, 7, sparse=True)
        self.some = nn.EmbeddingBag(9, 7, sparse=True, mode="sum")
        self.none = nn.Embedding(2, 2, sparse=True)
        self.head = nn.Linear(7, 3)

    def forward(self, inputs: torch.Tensor, use_some: bool) -> torch.Tensor:
        words = (inputs[:, 0] * 10).long().abs() % 20
        hidden = self.words(words) + self.words(words.flip(0) // 2)
        if use_some:
            hidden = hidden + self.some(words[:, None] % 9)
        return self.head(hidden)


@program
def sparse_gradients(rank: int) -> list[bool]:
    means = expected(Sparse, squares)
    model, found = ls.DistributedDataParallel(Sparse()), []
    for _ in range(2):
        model.zero_grad()
        squares(model, rank)
        gradients = [parameter.grad for parameter in model.parameters()]
        found += [gradients[0].is_sparse, gradients[1].is_sparse, gradients[2] is None]
        found += same([dense(gradient) for gradient in gradients], means)
    torch.optim.SparseAdam([model.module.words.weight]).step()
    with model.no_sync():
        squares(model, rank)  # a sum that has each row twice
    squares(model, rank)
    return [*found, model.module.words.weight.grad.is_coalesced()]


@pytest.mark.parametrize(
    "title",
    [name for name in PROGRAMS if name not in ("scaled_losses", "beside_a_sharded_optimizer")],
)
def test_gradients_are_what_the_arithmetic_says(of_each_rank, title):
    for facts in of_each_rank(title):
        assert facts
        assert all(facts), facts


@pytest.mark.parametrize("title", ON_GLOO)
def test_gradients_are_the_same_on_gloo(of_each_rank, title):
    for facts in of_each_rank(title, "gloo"):
        assert facts
        assert all(facts), facts


def test_a_rank_that_overflows_makes_all_skip_the_step(of_each_rank):
    first, second, third = of_each_rank("scaled_losses")
    assert first == second == third
    (before, scale), (skipped, half), (after, _) = first
    assert skipped == before != after
    assert half == scale / 2


def test_a_sharded_optimizer_gives_the_same_bits(of_each_rank):
    for whole, sharded in of_each_rank("beside_a_sharded_optimizer"):
        assert whole == sharded
