import errno
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lockstep.data.loader import Batches
from lockstep.kernel.errors import DatasetError, SampleError


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def workers() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("torch_*")} if folder.is_dir() else set()


def until(condition: Any, seconds: float = 20.0) -> bool:
    """Poll `condition` until it holds; False at the deadline."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    children = workers()
    threads = set(threading.enumerate())
    segments = shared_memory()
    yield
    gc.collect()
    assert workers() <= children
    assert set(threading.enumerate()) <= threads
    # Tests beside this one have segments too, for the moment in which they are created.
    assert until(lambda: shared_memory() <= segments, 5)


@pytest.mark.parametrize("ends", ["raise", "whole", "held"])
def test_nothing_is_left_however_iterating_ends(ends: str) -> None:
    before = workers()
    files = psutil.Process().num_fds()
    seen = []
    batches = iter(Batches(Numbers(), 4, num_workers=2))
    try:
        for _batch in batches:
            seen.append(len(workers() - before))
            if ends == "raise":
                raise KeyError
            if ends in ("break", "held"):
                break
    except KeyError:
        assert ends == "raise"
    assert seen[0] == 2
    del _batch
    if ends == "held":
        assert len(workers() - before) == 2
    del batches
    assert workers() == before
    deadline = time.monotonic() + 10  # tensors that were under way close theirs a moment later
    while psutil.Process().num_fds() > files and time.monotonic() < deadline:
        gc.collect()
    assert psutil.Process().num_fds() <= files


def test_a_worker_computes_with_one_thread() -> None:
    class Threads(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor([torch.get_num_threads(), 0 if get_worker_info() is None else 1])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for num_workers in (0, 1):
            batch = next(iter(Batches(Threads(), 2, num_workers=num_workers)))
            assert batch.microbatches[0].data.tolist() == [[1, num_workers]]
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "enlarge /dev/shm"),
        (RuntimeError("shm: No space left on device (28)"), "enlarge /dev/shm"),
        (BlockingIOError(errno.EAGAIN, "no more processes"), "use fewer workers"),
    ],
)
def test_workers_that_cannot_start_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("lockstep.data.workers.DataLoader", fail)
    pattern = rf"^the loader workers cannot be started .*{sentence}.*num_workers=0"
    with pytest.raises(SampleError, match=pattern):
        list(Batches(Numbers(), 4, shuffle=False, num_workers=2))


# When a worker dies, torch raises an exception in the main thread. It may arrive just after
# multiprocessing has opened a socket, which is then closed by garbage collection, with a warning.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_killed_worker_is_one_sentence() -> None:
    class Deadly(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.tensor(index)

    begun = time.monotonic()
    before = workers()
    with pytest.raises(SampleError, match=r"^a loader worker failed: .*(SIGKILL|Killed)") as caught:
        list(Batches(Deadly(), 4, shuffle=False, num_workers=2))
    assert time.monotonic() - begun < 20
    assert workers() == before, caught  # though the exception still holds the loader's frames


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_worker_killed_during_a_step_is_the_same_sentence() -> None:
    """torch tells the main thread at once, wherever it is."""
    before = workers()
    batches = iter(Batches(Numbers(), 4, num_workers=2))
    next(batches)
    os.kill(min(workers() - before), signal.SIGKILL)
    with pytest.raises(SampleError, match=r"^a loader worker failed: .*(SIGKILL|Killed)"):
        assert until(lambda: False)  # a step that goes on
    del batches


class Blocking(Numbers):
    """Gives 8 samples, says so, and blocks."""

    def __init__(self, reached: Path) -> None:
        self.reached = reached

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            self.reached.touch()
            time.sleep(60)
        return torch.tensor(index)


def test_a_death_whose_signal_got_lost_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler's exception can come up where Python ignores it; then torch waited on."""
    monkeypatch.setattr("lockstep.data.workers.POLL_SECONDS", 0.2)
    dataset = Blocking(tmp_path / "reached")
    before = workers()
    batches = iter(Batches(dataset, 4, shuffle=False, num_workers=1))
    assert [next(batches).size, next(batches).size] == [4, 4]
    assert until(dataset.reached.exists)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.kill(*(workers() - before), signal.SIGKILL)
        with pytest.raises(
            SampleError, match=r"^a loader worker failed: process \d+ was killed by"
        ):
            next(batches)
    finally:
        signal.signal(signal.SIGCHLD, handler)


def test_a_silent_worker_is_named_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch waits for the worker, and ends it then.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    dataset = Blocking(tmp_path / "reached")
    with pytest.raises(SampleError, match=r"returned no batch within 0\.5 s; check for a sample"):
        list(Batches(dataset, 4, shuffle=False, num_workers=1, timeout=0.5))
    assert dataset.reached.exists()


def test_workers_beside_a_gloo_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        batches = list(Batches(Numbers(), 40, num_workers=2))
        dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert sum(batch.size for batch in batches) == 400


def test_a_daemon_may_not_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(DatasetError, match="a daemon process cannot start loader workers"):
        Batches(Numbers(), 4, num_workers=1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(index) for index in range(40))


@pytest.mark.parametrize("data", [Numbers(), Stream()], ids=["map", "iterable"])
def test_the_rank_loads_what_terminated_workers_leave(
    data: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """systemd and srun send SIGTERM to the workers too, while the ranks save a checkpoint."""
    monkeypatch.setattr("lockstep.data.workers.POLL_SECONDS", 0.2)
    expected = [batch.microbatches[0].data.tolist() for batch in Batches(data, 10)]
    before = workers()
    asked = []
    batches = Batches(data, 10, num_workers=2, agree=lambda m, what: asked.append(what) or [m])
    found = []
    for batch in batches:
        found.append(batch.microbatches[0].data.tolist())
        if len(found) == 2:
            ended = workers() - before
            # not from this process: torch's workers take a signal of their parent for an order
            subprocess.run(["kill", "-TERM", *map(str, ended)], check=True)
            assert until(lambda pids=ended: all(map(dead, pids)))
    assert found == expected
    assert asked == ["beginning", "comparing samples of"]  # once, so no rank waits for another
    assert "was killed by SIGTERM; its rank loads the remaining batches" in capfd.readouterr().err
    assert batches.state_dict()["position"] == len(expected)


def dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
