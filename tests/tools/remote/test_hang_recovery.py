"""A call that raises on one worker only: the others do not wait until their timeout."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
import processes
from lockstep.kernel.errors import RankError
from lockstep.tools.remote.calls import Future
from lockstep.tools.remote.hang_recovery import HangRecovery

LONG = 600.0  # seconds for a collective; a test that waits for it is ended before
until = partial(processes.until, seconds=60.0)
SGD = partial(torch.optim.SGD, lr=0.05)

RAISED = r"^rank 1 raised KeyError: 'lr' \(test_hang_recovery\.py"


def fail_or_wait() -> None:
    if ls.rank() == 1:
        raise KeyError("lr")
    dist.all_reduce(torch.ones(1))


def fail_or_look_for(path) -> None:
    if ls.rank() == 1:
        raise KeyError("lr")
    while not path.exists():
        pass


def summed() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def test_workers_that_wait_for_one_that_raised_are_released(tmp_path):
    with ls.Driver(nprocs=2, timeout=LONG) as driver:
        before = driver.run(os.getpid)
        with pytest.raises(RankError, match=RAISED):
            driver.run(fail_or_look_for, tmp_path / "go on")
        (tmp_path / "go on").touch()
        assert driver.run(summed) == [2.0] * 2  # a worker that computes is left alone
        with pytest.raises(RankError, match=RAISED):
            driver.run(fail_or_wait)
        driver.start(summed)  # after the collective, whose deadline is far away
        with pytest.raises(RankError, match=r"error: rank 1 raised KeyError: 'lr'.*restart\(\)"):
            driver.run(summed)
        assert driver.on(0).run(ls.rank) == 0
        with pytest.raises(RankError, match=r"^the world of these workers has ended"):
            driver.trainer([partial(nn.Linear, 2, 2)], nn.MSELoss(), SGD)
        driver.restart()
        assert driver.run(summed) == [2.0] * 2
        assert not set(before) & set(driver.run(os.getpid))
        assert not any(map(psutil.pid_exists, before))


def start_or_fail(started: Path) -> float:
    if ls.rank() == 1:
        until(started.exists, "rank 0 does not start")
        raise KeyError("lr")
    started.touch()
    return summed()


def test_the_next_call_is_not_paired_with_the_collective_that_still_waits(tmp_path):
    with ls.Driver(nprocs=2, timeout=LONG) as driver:
        first = driver.start(start_or_fail, tmp_path / "started")
        following = driver.start(summed)  # already sent when rank 1 raises
        with pytest.raises(RankError, match=RAISED):
            first[1].result()
        for future in (first[0], *following):  # none may return the sum of two calls
            with pytest.raises(RankError):
                future.result(60.0)
        with pytest.raises(RankError, match=r"has ended, .* error: rank 1 raised KeyError: 'lr'"):
            driver.run(summed)


def test_only_the_call_that_ended_the_world_does_not_say_so():
    recovery = HangRecovery()
    ending = [Future(0, "a call", until)]
    recovery._cause = ending
    recovery.world_error = "the world has ended after: boo"
    for futures in (ending, [*ending], None):
        error = RankError("boo")
        recovery.explain(error, futures)
        assert ("has ended" in str(error)) is (futures is not ending)


def samples() -> TensorDataset:
    return TensorDataset(torch.ones(32, 2), torch.ones(32, 2))


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_callback_that_raises_on_one_stage_ends_the_training(backend, tmp_path):
    def told(result) -> None:
        if ls.rank() == 1 and result.step == 1:
            raise ValueError("disk full")

    with ls.Driver(nprocs=2, timeout=LONG, backend=backend) as driver:
        blocks = [partial(nn.Linear, 2, 2), partial(nn.Linear, 2, 2)]
        options = {
            "pipeline": ls.PipelineConfig(stages=2),
            "callbacks": [told],
            "loggers": str(tmp_path / "run"),
        }
        trainer = driver.trainer(blocks, nn.MSELoss(), SGD, **options)
        with pytest.raises(RankError, match=r"^rank 1 raised ValueError: disk full"), trainer:
            trainer.train(samples, 8, 2)
        with pytest.raises(
            RankError, match=r"disk full .*; start new workers with driver\.restart"
        ):
            trainer.step((torch.ones(8, 2), torch.ones(8, 2)))
        with pytest.raises(RankError, match=r"rank 1 .* disk full .*restart"):
            driver.run(ls.rank)
    last = (tmp_path / "run" / "record.jsonl").read_text().splitlines()[-1]
    assert '"failed"' in last
    assert "disk full" in last
