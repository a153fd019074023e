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
from lockstep.tools.remote.future import Future
from lockstep.tools.remote.hang_recovery import COMMUNICATION, SharedCall

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
        with pytest.raises(RankError, match=RAISED):
            driver.run(fail_or_look_for, tmp_path / "go on")
        (recovery,) = driver._pool.recovery.calls
        until(lambda: recovery.checks > 3, "the driver does not check busy workers")
        (tmp_path / "go on").touch()
        assert driver.run(summed) == [2.0] * 2  # a worker that computes is left alone
        with pytest.raises(RankError, match=RAISED):
            driver.run(fail_or_wait)
        # After the collective, whose deadline is far away.
        assert driver.run(os.getpid) == [driver.on(rank).run(os.getpid) for rank in range(2)]
        with pytest.raises(RankError) as raised:
            driver.run(summed)
        assert "after this error: rank 1 raised KeyError: 'lr'" in str(raised.value)
        assert "driver.restart()" in str(raised.value)
        with pytest.raises(RankError, match=r"^the world of these workers has ended"):
            driver.trainer([partial(nn.Linear, 2, 2)], nn.MSELoss(), SGD)
        before = driver.run(os.getpid)
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
        if backend == "gloo":  # leaving the world was not enough
            until(lambda: driver._pool.workers[1].lost, "rank 1 does not exit")
            with pytest.raises(RankError, match=r"so it cannot be called; .* disk full .*restart"):
                driver.run(ls.rank)
    last = (tmp_path / "run" / "record.jsonl").read_text().splitlines()[-1]
    assert '"failed"' in last
    assert "disk full" in last


def test_checks_are_taken_at_intervals_and_find_calls_that_have_not_returned():
    futures = [Future(rank, "a call", lambda done, deadline: None) for rank in range(3)]
    recovery = SharedCall(0, futures)
    futures[2].set_result(None)
    assert (recovery.failed(), recovery.busy()) == ([], [0, 1])
    assert [recovery.start_check(), recovery.start_check()] == [True, False]
    assert recovery.checks == 1


def test_the_modules_that_communicate_exist():
    installed = [Path(package.__file__).parents[1] for package in (ls, torch)]
    for prefix in COMMUNICATION:
        assert any(list(folder.glob(f"{prefix}*")) for folder in installed), prefix
