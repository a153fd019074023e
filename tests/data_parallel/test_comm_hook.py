"""Communication hooks: torch's own and one of a user's, on DistributedDataParallel."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from averaging import expected_gradients, inputs_of, net, same, uses_some
from lockstep.kernel.errors import RankError, UsageError

RANKS = 2


class TopK:
    """The largest tenth of each bucket, the rest kept for the next step; added in rank order."""

    def __init__(self, share: float = 0.1) -> None:
        self.share = share
        self.kept: dict[int, torch.Tensor] = {}

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if bucket.index() in self.kept:
            buffer.add_(self.kept[bucket.index()])
        ranks, count = dist.get_world_size(), max(1, int(self.share * buffer.numel()))
        _, mine = torch.topk(buffer.abs(), count)
        indices, values = torch.empty(ranks, count, dtype=torch.int64), torch.empty(ranks, count)
        dist.all_gather_into_tensor(indices.view(-1), mine)
        dist.all_gather_into_tensor(values.view(-1), buffer[mine])
        self.kept[bucket.index()] = buffer.clone().index_fill_(0, mine, 0)
        means = torch.zeros_like(buffer)
        for row in range(ranks):
            means[indices[row]] += values[row] / ranks
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(means)
        return future


def hooks() -> dict[str, tuple[Any, Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post

    power = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
    local = post.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
    return {
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "powerSGD": (power, powerSGD_hook.powerSGD_hook),
        "fp16 around it": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "post-local SGD": (local, post.post_localSGD_hook),
        "top-k": (None, TopK()),
    }


NAMES = ("allreduce", "fp16", "bf16", "powerSGD", "fp16 around it", "post-local SGD", "top-k")


def train(name: str, view: bool) -> list[Any]:
    # PowerSGD and top-k look at a bucket as a whole, so their bits depend on its size.
    size = 1.0 if view and name not in ("powerSGD", "top-k") else 3000 / 2**20
    model = ls.DistributedDataParallel(net(), bucket_cap_mb=size, gradient_as_bucket_view=view)
    state, hook = hooks()[name]
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = []
    for step in (0, 0, 1, 2, 3):  # the first twice, so that the bucket has been used before
        optimizer.zero_grad()
        rank = dist.get_rank()
        model(inputs_of(rank, step), uses_some(rank)).square().mean().backward()
        kept.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        if len(kept) > 1:
            optimizer.step()
    return [kept[1], ls.digest(model.state_dict())]


def train_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES:
        try:
            found[name] = [train(name, view=number % 2 == 1) for number in range(2)]
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def results(ranks):
    """Return what every rank found with each hook."""
    return ranks(train_all, RANKS, timeout=20.0, deadline=110.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_gives_the_same_bits_on_all_ranks_and_run_to_run(results, name):
    runs = []
    for found in results:
        assert not isinstance(found[name], str), found[name]
        runs += [digest for _, digest in found[name]]
    assert len(set(runs)) == 1


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("allreduce", 1e-6), ("fp16", 2e-3), ("bf16", 1e-2), ("fp16 around it", 2e-3)],
)
def test_a_hook_that_only_rounds_gives_the_mean(results, name, tolerance):
    """And a parameter that nobody used keeps no gradient."""
    (first, _), _ = results[0][name]
    for gradient, mean in zip(first, expected_gradients(RANKS), strict=True):
        assert (gradient is None) == (mean is None)
        if mean is not None:
            torch.testing.assert_close(gradient, mean, rtol=tolerance, atol=tolerance)


def test_top_k_sends_the_largest_entries(results):
    (first, _), _ = results[0]["top-k"]
    mean = expected_gradients(RANKS)[-1]
    sent = first[-1] != 0
    assert 0 < sent.sum() <= mean.numel()
    assert not all(same(first, expected_gradients(RANKS)))


def test_a_second_hook_is_refused():
    ls.init()
    model = ls.DistributedDataParallel(net())
    model.register_comm_hook(None, TopK())
    with pytest.raises(UsageError, match="register only one"):
        model.register_comm_hook(None, TopK())
    ls.shutdown()


def test_ranks_with_different_hooks_are_told_apart(ranks):
    def register():
        names = ("allreduce_hook", "fp16_compress_hook")
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, names[dist.get_rank()])
        ls.DistributedDataParallel(net()).register_comm_hook(None, hook)

    with pytest.raises(RankError, match="rank 1: the communication hook is fp16_compress_hook"):
        ranks(register, 2)
