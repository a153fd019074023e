"""The times and the memory of the ranks in a step, and between two steps."""

import json
import time
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.comm.activity import Waited
from lockstep.kernel.rank_status import DETAILED_RANKS
from lockstep.kernel.step_context import StepTimes
from lockstep.training import step_usage
from lockstep.training.step_usage import RankTimes, RankUsage, StepUsage


def usage(rank, compute=3.0, data=0.0, idle=0.0, outside=0.0):
    return RankUsage.of(RankTimes(rank, compute, data, idle, 100 + rank, outside))


def test_waiting_is_the_time_until_the_last_rank_arrived():
    found = usage(0).merge(usage(1, compute=4.0, data=0.5, idle=0.5))
    by_first = found.compute_rows(arrived=3.0, exchanged=2.5, reduced=1.0, updated=0.5)
    by_second = found.compute_rows(arrived=5.0, exchanged=0.5, reduced=1.0, updated=0.5)
    assert by_first == by_second == [[3.5, 1.5, 2.0, 0.0], [4.5, 1.5, 0.5, 0.5]]
    assert found.list_memory() == [100, 101]
    assert RankUsage.unpack(json.loads(json.dumps(found))) == found


def test_many_ranks_have_rows_of_the_first_ones_and_wait_for_all():
    found = usage(0)
    for rank in range(1, 2 * DETAILED_RANKS):
        found = found.merge(usage(rank, compute=9.0 if rank == 100 else 1.0))
    rows = found.compute_rows(3.0, 6.0, 0.0, 0.0)
    assert len(rows) == len(found.list_memory()) == DETAILED_RANKS
    assert rows[1] == [1.0, 0.0, 8.0, 0.0]


def test_a_rank_that_works_between_steps_lets_the_others_wait():
    found = usage(0).merge(usage(1, outside=2.0))
    rows = found.compute_rows(arrived=3.0, exchanged=2.5, reduced=0.0, updated=0.0)
    assert rows == [[3.0, 0.5, 2.0, 0.0], [3.0, 0.5, 0.0, 0.0]]
    assert found.list_outside() == [0.0, 2.0]


def make_step(begun, seconds=0.0, rank=0, replicas=2):
    parallel = SimpleNamespace(rank=rank, replicas=replicas, stages=1)
    times = StepTimes(begun=begun, computed=begun + 1.0, arrived=begun + 1.0)
    batch = SimpleNamespace(seconds=seconds)
    return SimpleNamespace(parallel=parallel, times=times, batch=batch)


@pytest.fixture
def clock(monkeypatch):
    """The time at which a step ends."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(step_usage.time, "perf_counter", lambda: now.seconds)
    return now


def test_the_time_between_steps_is_without_loading_and_waiting(clock, monkeypatch):
    hook = StepUsage()

    def outside(step):
        clock.seconds = step.times.begun
        hook.begin(step, None)
        return hook.status(step).rows[0].outside

    assert outside(make_step(5.0)) == 0.0  # nothing is known of the time before
    clock.seconds = 7.0
    hook.measure(make_step(5.0), usage(0))
    monkeypatch.setattr(Waited, "seconds", Waited.seconds + 0.5)  # as in an evaluation
    second = make_step(11.0, seconds=1.0)
    assert outside(second) == 11.0 - 7.0 - 1.0 - 0.5
    assert hook.measure(second, usage(0, outside=2.5))["outside"] == [2.5]
    assert outside(make_step(12.0, seconds=9.0)) == 0.0
    assert outside(make_step(99.0)) == 0.0  # the attempt before was undone


def test_waiting_within_a_step_is_not_computing(clock, monkeypatch):
    """Such as for parameters that are gathered, or for the neighbors of a stage."""
    hook = StepUsage()
    step = make_step(5.0)
    hook.begin(step, None)
    monkeypatch.setattr(Waited, "seconds", Waited.seconds + 0.25)
    (row,) = hook.status(step).rows
    assert (row.compute, row.idle) == (0.75, 0.25)


def test_the_time_in_which_ranks_come_and_go_is_not_between_steps(clock):
    hook = StepUsage()
    hook.measure(make_step(5.0), usage(0))
    step = make_step(11.0, replicas=3)
    clock.seconds = 11.0
    hook.begin(step, None)
    assert hook.status(step).rows[0].outside == 0.0


def train_with_slow_rank(where: str) -> list[list[float]]:
    """Return the times outside of each step, of both ranks; rank 1 sleeps somewhere."""
    found: list[list[float]] = []

    def sleep(here: str) -> None:
        if here == where and ls.rank() == 1:
            time.sleep(0.05)

    def note(result) -> None:
        found.append(result.outside)
        sleep("callback")

    sgd = partial(torch.optim.SGD, lr=0.1)
    model = nn.Linear(4, 2)
    loss = nn.CrossEntropyLoss()
    trainer = ls.Trainer(model, loss, sgd, microbatches=2, callbacks=note, progress=False)
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    for batch in trainer.batches(data, batch_size=4):
        sleep("loop")
        trainer.step(batch)
        if where == "evaluation":  # in which rank 0 waits for rank 1
            trainer.evaluate(SlowData(), batch_size=4)
    return found


class SlowData(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if ls.rank() == 1:
            time.sleep(0.02)
        return torch.ones(4), 1


@pytest.mark.parametrize("where", ["loop", "callback", "evaluation"])
def test_the_time_between_steps_is_that_of_the_rank_that_spends_it(ranks, where):
    first, second = ranks(train_with_slow_rank, 2, where)
    assert first == second
    assert len(first) == 4
    assert first[0] == [0.0, 0.0]
    quick, slow = zip(*first[1:], strict=True)
    assert min(slow) >= 0.049
    assert sum(quick) < sum(slow)


class Lines:
    """A logger that keeps [compute, communication, waiting, data, outside] of each rank's steps."""

    def __init__(self) -> None:
        self.steps: list[list[list[float]]] = []

    def write(self, kind, **fields) -> None:
        if kind == "step":
            rows = zip(fields["ranks"], fields["outside"], strict=True)
            self.steps.append([[*row, outside] for row, outside in rows])

    def close(self) -> None:
        """Do nothing."""


class SlowOptimizer(torch.optim.SGD):
    """An optimizer that is slow on every rank."""

    def step(self, closure=None):
        time.sleep(0.02)  # the work that is measured: nothing waits for it
        return super().step(closure)


def train_loop_with_slow_rank(where: str, kind: str) -> list[list[list[float]]]:
    """Return the times of each step of a loop with `ls.exact`; rank 1 sleeps somewhere."""

    def sleep(here: str) -> None:
        if here == where and ls.rank() == 1:
            time.sleep(0.1)  # the delay that is measured: nothing waits for it

    lines = Lines()
    data = SlowData() if where == "data" else TensorDataset(torch.ones(4, 4), torch.ones(4).long())
    model = nn.Linear(4, 2)
    loss = nn.CrossEntropyLoss()
    optimizer = SlowOptimizer(model.parameters(), lr=0.1)
    exact = ls.exact(model, optimizer, microbatches=4, loggers=[lines], progress=False)

    def update() -> None:
        sleep("before the update")
        optimizer.step()
        optimizer.zero_grad()
        sleep("after the update")

    if kind == "flat":
        sampler = exact.sampler(data, batch_size=4)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    for epoch in range(3):
        sleep("between epochs")
        if kind == "flat":
            sampler.set_epoch(epoch)
            for inputs, targets in exact.microbatches(loader):
                exact.weigh(loss(model(inputs), targets)).backward()
                if exact.is_complete:
                    update()
        else:
            for batch in exact.batches(data, batch_size=4, epoch=epoch):
                for inputs, targets in batch:
                    batch.backward(loss(model(inputs), targets))
                update()
    exact.finish()
    return lines.steps if ls.rank() == 0 else []


def train_loops_with_slow_rank() -> dict[tuple[str, str], list[list[list[float]]]]:
    places = ("before the update", "after the update", "between epochs", "data")
    cases = product(("nested", "flat"), places)
    return {(kind, where): train_loop_with_slow_rank(where, kind) for kind, where in cases}


def test_the_time_in_a_loop_of_ls_exact_is_that_of_the_rank_that_spends_it(ranks):
    # A step with `ls.exact` is committed when the loop asks for the next batch.
    found, _ = ranks(train_loops_with_slow_rank, 2)
    for (_, where), steps in found.items():
        assert len(steps) == 3
        for quick, slow in steps[1:]:
            assert min(quick[0], slow[0]) >= 0.019  # the optimizer's time
            assert quick[2] > quick[1]  # it waits, and does not communicate
            if where == "data":
                assert slow[3] >= 0.039
                assert slow[3] > quick[3]
            else:
                assert slow[4] >= 0.099
                assert slow[4] > max(quick[3], quick[4])
