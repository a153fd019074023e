"""The errors of the backend "lockstep" have types, wherever they are raised."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.comm.backend_errors import BackendError, Failure, PeerLostError
from lockstep.comm.shared_memory import empty_shared
from lockstep.kernel.errors import CommunicationError, LockstepError, LostError, RankError

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")


def catch(call) -> BaseException:
    """Return what a call raises."""
    with pytest.raises(BackendError) as caught:
        call()
    return caught.value


def describe(error: Any) -> tuple[Any, ...]:
    """Return the type of an error of the backend, and what is known about it."""
    return type(error), error.rank, error.observed, error.operation, error.reason, str(error)


@pytest.fixture
def see_rank_one_die(ranks, tmp_path):
    """Return a function that returns what rank 0 has found, while rank 1 was killed."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        def note(path: Path) -> None:
            path.write_bytes(pickle.dumps(function(*arguments)))

        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            ranks(note, 2, tmp_path / "found", backend="lockstep")
        return pickle.loads((tmp_path / "found").read_bytes())

    return run


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_rank_one(kind: str) -> list[tuple[Any, ...]]:
    """Raise the loss of rank 1 in every way that a program may meet it."""
    if dist.get_rank() == 1:
        if kind == "ended":
            die()
        dist.destroy_process_group()
        return []
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    message = dist.irecv(tensor, 1)
    assert work is not None
    assert message is not None
    calls = [work.wait, work.wait, work.get_future().wait, work.get_future().value]
    calls += [message.wait, message.get_future().wait, dist.barrier]
    calls += [lambda: backend.of_group(None).all_gather_bytes(b"")]
    return [describe(catch(call)) for call in calls]


@pytest.mark.parametrize("kind", ["ended", "left"])
def test_the_loss_of_a_rank_has_a_type_in_works_futures_and_calls(ranks, see_rank_one_die, kind):
    if kind == "ended":
        found = see_rank_one_die(lose_rank_one, kind)
    else:
        found = ranks(lose_rank_one, 2, kind, backend="lockstep")[0]
    assert {each[:3] for each in found} == {(PeerLostError, 1, kind)}
    names = ["all_reduce #1"] * 4 + ["recv from rank 1 (tag 0)"] * 2
    assert [each[3] for each in found] == [*names, "barrier #2", "all_gather_bytes #3"]
    for _, _, _, operation, reason, message in found:
        assert reason.startswith("rank 1 died" if kind == "ended" else "rank 1 has left the group")
        assert message == f"rank 0: {operation} on group default failed: {reason}"


def lose_rank_one_in_backward() -> type:
    """The engine of autograd makes the exception from its type and message alone."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    if dist.get_rank() == 1:
        die()
    return type(catch(lambda: model(torch.ones(2, 4)).sum().backward()))


def test_the_loss_of_a_rank_has_a_type_in_backward(see_rank_one_die):
    assert see_rank_one_die(lose_rank_one_in_backward) is PeerLostError


def publish_and_die() -> tuple[Any, ...]:
    """Rank 1 is killed between publishing where its memory is and the first look at it."""
    store = dist.distributed_c10d._get_default_store()
    native = backend.of_group(None)
    rank = dist.get_rank()
    tensor = empty_shared(1 << 20, dtype=torch.float32).fill_(1.0)
    bucket = backend.load_native().Bucket(
        torch.float32, 1 << 20, [(0, 1 << 20)], [[(0, 1)], [(1, 2)]], 2
    )
    packed = empty_shared((1 << 22) + 1, dtype=torch.uint8).fill_(1)
    present = torch.zeros(1, dtype=torch.uint8)

    def begin():
        return native.reproducible_all_reduce(bucket, packed, tensor, present, in_steps=True)

    if rank == 1:
        begin()
        native.advance()
        store.set("published", str(os.getpid()))
        die()
    with suppress(ProcessLookupError):
        process = os.pidfd_open(int(store.get("published")))
        assert select.select([process], [], [], 30)[0]
        os.close(process)
    return describe(catch(begin().wait))


def test_memory_of_a_rank_that_has_died_is_the_loss_of_that_rank(see_rank_one_die):
    kind, rank, observed, operation, _, message = see_rank_one_die(publish_and_die)
    assert (kind, rank, operation) == (PeerLostError, 1, "reproducible_all_reduce #1")
    assert observed in ("ended", "unopened")  # what is noticed first
    assert message.startswith("rank 0: reproducible_all_reduce #1 on group default failed: rank 1 ")


def disagree() -> tuple[type, str]:
    error = catch(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())))
    dist.barrier()  # the group stays usable
    return type(error), str(error)


def test_a_failure_without_a_lost_rank_has_another_type(ranks):
    for rank, (kind, message) in enumerate(ranks(disagree, 2, backend="lockstep")):
        assert kind is BackendError
        assert message.startswith(f"rank {rank}: the ranks of group default disagree in call #1")


def test_errors_are_those_of_lockstep_and_of_torch():
    for kind in (LockstepError, CommunicationError, LostError, dist.DistBackendError, RuntimeError):
        assert issubclass(PeerLostError, kind)
    assert not issubclass(BackendError, LostError)


def test_a_failure_is_the_same_for_ranks_that_read_it():
    failure = Failure("rank 1 closed its connection", "closed", 1)
    assert Failure.decode(failure.encode().encode()) == failure
    assert Failure.decode(b'["a", "anything", "b"]') == Failure("a")
    assert Failure.decode(b"damaged") == Failure("damaged")
    error = failure.make_error("message", "barrier #2")
    assert Failure.of(error) == failure
    assert describe(error) == (PeerLostError, 1, "closed", "barrier #2", failure.reason, "message")
    assert type(Failure("slow").make_error("message", "")) is BackendError
    assert Failure.of(ValueError("first\nsecond")) == Failure("first")
