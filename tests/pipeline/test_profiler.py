"""The profiler, with a clock that only the blocks advance."""

import pytest
import torch
from torch import nn

from lockstep.launcher.world import World
from lockstep.pipeline import profiler
from lockstep.pipeline.profiler import profile_blocks
from lockstep.training.parallel_setup import make_parallel_context


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Block(nn.Module):
    """Advances the clock by the given seconds, one entry per call."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock = clock
        self.seconds = seconds
        self.calls = 0

    def forward(self, inputs):
        self.clock.now += self.seconds[self.calls]
        self.calls += 1
        return inputs * self.weight


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(profiler, "time", clock)
    return clock


def profile(blocks, recompute=False):
    alone = World(0, 1, 0, 1, 0, torch.device("cpu"), "gloo")
    parallel = make_parallel_context(
        alone, 1, lambda *_: None, None, None, (), activation_checkpointing=recompute
    )
    named = {str(number): block for number, block in enumerate(blocks)}
    return profile_blocks(named, (torch.ones(2, 3),), parallel)


def test_what_disturbs_one_pass_does_not_count(clock):
    first = Block(clock, [0.9, 0.1, 0.7, 0.1, 0.1])
    second = Block(clock, [0.9, 0.4, 0.2, 0.2, 0.4])
    costs = profile([first, second])
    assert costs.forward == pytest.approx((0.1, 0.2))
    assert (first.calls, second.calls) == (5, 5)
    assert costs.held == (24.0, 24.0)


def test_slow_blocks_are_measured_twice(clock):
    block = Block(clock, [9.0, 8.0])
    assert profile([block]).forward == pytest.approx((8.0,))
    assert block.calls == 2
    assert block.weight.grad is None


def test_a_block_that_is_recomputed_costs_its_forward_again_in_backward(clock):
    block = Block(clock, [0.3, 0.5] * 5)
    costs = profile([block], recompute=True)
    assert block.calls == 10
    assert (costs.forward, costs.backward) == (pytest.approx((0.3,)), pytest.approx((0.5,)))
