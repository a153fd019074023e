"""The commit rule on a rank's side, with a launcher and a group that the test stands in for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError  # type: ignore[attr-defined]

from lockstep.comm import backend
from lockstep.comm.backend_errors import BackendError, PeerLostError
from lockstep.elastic import membership as module
from lockstep.elastic.membership import Membership, Round, TransferOrder
from lockstep.kernel.errors import RendezvousError, WorkError

LOST = PeerLostError("rank 0: barrier #3 on group default failed: rank 2 died (process 7 ...)")


class Trainer:
    """Takes part, and notes what is called."""

    can_stay = True
    can_transfer_state = True
    part = (0, 1)
    microbatches = 0

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.undone: list[float] = []

    def enter_round(self, new: Round) -> None:
        self.calls.append(("enter", new.number))

    def continue_round(self, new: Round, undone: float) -> None:
        self.calls.append(("continue", new.number))
        self.undone.append(undone)

    def transfer_state(self, folder: Path) -> None:
        self.calls.append(("hand over", folder.name))

    def leave(self) -> None:
        self.calls.append("trainer leaves")


class Left(BaseException):
    """The process has exited."""


class Harness:
    """A member whose launcher answers with prepared messages, and whose groups are names.

    Attributes:
        calls: What the member does, in order.
        reports: What it has told the launcher.
        answers: What the launcher says next.
        joins: Errors of the next attempts to join a group; None for success.
        barriers: Errors of the next barriers.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.reports: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.joins: list[Exception | None] = []
        self.barriers: list[Exception | None] = []
        self.member = Membership(1)
        self.trainer = Trainer(self.calls)
        self.member.enroll(self.trainer)
        patch.setattr(module, "report_to_launcher", self.reports.append)
        patch.setattr(module, "receive_from_launcher", self.receive)
        patch.setattr(module, "get_timeout", lambda: 0.2)
        patch.setattr(module, "leave_round", lambda: self.calls.append("leave"))
        patch.setattr(module, "exit_process", self.exit)
        patch.setattr(module, "refuse_calls", lambda reason: None)  # of the whole process
        patch.setattr(self.member, "_join_group", self.join)
        patch.setattr(self.member, "pass_barrier", self.barrier)

    def receive(self, timeout: float | None) -> tuple[dict[str, Any], list[int]] | None:
        return (self.answers.pop(0), []) if self.answers else None

    def exit(self, status: int) -> None:
        assert status == 0
        raise Left

    def join(self, new: Round) -> None:
        self.calls.append(("join", new.number))
        if self.joins and (error := self.joins.pop(0)) is not None:
            raise error

    def barrier(self) -> None:
        self.calls.append("barrier")
        if self.barriers and (error := self.barriers.pop(0)) is not None:
            raise error

    def answer(self, kind: str = "round", number: int = 1, **fields: Any) -> None:
        message = {"round": number, "rank": 0, "world_size": 2, "store": "", "operation": 0}
        self.answers.append({"kind": kind, **message, "commit": False, **fields})

    def run(self, prepare: Callable[[], Any] | None = None) -> Any:
        return self.member.run(
            prepare or self.noting("prepare"),
            lambda value: self.calls.append(f"commit {value}"),
            self.noting("undo"),
        )

    def noting(self, name: str) -> Callable[[], str]:
        def note() -> str:
            self.calls.append(name)
            return name

        return note


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """Return a member in round 0, with a trainer."""
    found = Harness(monkeypatch)
    yield found
    assert not found.answers, "the member has not read all messages"


def test_an_operation_is_prepared_then_committed(harness: Harness) -> None:
    harness.run()
    assert harness.calls == ["prepare", "barrier", "commit prepare"]
    assert harness.member.operation == 1
    assert not harness.reports


def test_operations_inside_another_one_are_a_part_of_it(harness: Harness) -> None:
    harness.run(lambda: harness.run())
    assert harness.calls == ["prepare", "commit prepare", "barrier", "commit None"]
    assert harness.member.operation == 1


def test_a_lost_peer_repeats_an_operation(harness: Harness) -> None:
    failures = [LOST]

    def prepare() -> str:
        harness.calls.append("prepare")
        if failures:
            raise failures.pop()
        return "again"

    harness.answer()
    harness.run(prepare)
    expected = ["prepare", "leave", ("join", 1), ("enter", 1), "undo", ("continue", 1)]
    assert harness.calls == [*expected, "prepare", "barrier", "commit again"]
    (report,) = harness.reports
    assert report["kind"] == "round_over"
    assert (report["round"], report["operation"], report["is_prepared"]) == (0, 0, False)
    assert (report["reason"], report["can_stay"], report["has_state"]) == ("lost", True, True)
    assert (harness.member.operation, harness.member.round) == (1, 1)


@pytest.mark.parametrize("commit", [True, False])
def test_a_prepared_operation_follows_the_decision(harness: Harness, commit: bool) -> None:
    harness.barriers = [LOST]
    harness.answer(commit=commit)
    harness.run()
    begun = ["prepare", "barrier", "leave", ("join", 1), ("enter", 1)]
    committed = ["commit prepare", ("continue", 1)]
    repeated = ["undo", ("continue", 1), "prepare", "barrier", "commit prepare"]
    assert harness.calls == begun + (committed if commit else repeated)
    assert harness.reports[0]["is_prepared"] is True
    assert harness.member.operation == 1


class Clock:
    """Replaces `time`; its clock advances only when a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("fails", "undone"), [(False, 1.5), (True, 2.0)])
def test_repeated_work_ends_with_the_loss_of_a_rank(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, fails: bool, undone: float
) -> None:
    """The loss is noticed here or in the launcher; the rest is the pause, also twice."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    attempts = [2.0, 1.0]

    def prepare() -> None:
        clock.now += attempts.pop(0)
        if attempts:
            raise LOST

    def join(new: Round) -> None:
        clock.now += 4.0
        if fails and new.number == 1:
            raise LOST

    monkeypatch.setattr(harness.member, "_join_group", join)
    harness.answer(number=1, noticed=1002.25 if fails else 1001.5)
    if fails:
        harness.answer(number=2, noticed=1006.0)
    harness.run(prepare)
    assert harness.trainer.undone == [undone]


def test_a_rank_that_is_ahead_does_not_commit_for_those_behind(harness: Harness) -> None:
    harness.run()
    harness.barriers = [LOST]
    harness.answer(commit=True, operation=0)  # which this rank has committed
    harness.run()
    assert harness.calls.count("undo") == 1
    assert harness.member.operation == 2


def test_another_error_goes_its_way(harness: Harness) -> None:
    timed_out = BackendError("rank 0: barrier #3 failed: timed out after 5.0 s")
    for error in (timed_out, ValueError("broken pipe")):
        harness.barriers = [error]
        with pytest.raises(type(error)):
            harness.run()
    assert not harness.reports
    assert harness.member.operation == 0


def test_a_death_while_a_round_is_formed_ends_it_too(harness: Harness) -> None:
    harness.barriers = [LOST]
    harness.joins = [module._RoundFailed(), LOST, RendezvousError("not connected"), None]
    for number in range(1, 5):
        harness.answer(number=number, commit=True)
    harness.run()
    assert [each["round"] for each in harness.reports] == [0, 1, 2, 3]
    assert {each["operation"] for each in harness.reports} == {0}
    assert all(each["is_prepared"] for each in harness.reports)
    assert harness.calls[-2:] == ["commit prepare", ("continue", 4)]


def test_ranks_that_cannot_be_connected_give_up(harness: Harness) -> None:
    harness.barriers = [LOST]
    harness.joins = [RendezvousError("not connected")] * module.ATTEMPTS
    for number in range(module.ATTEMPTS):
        harness.answer(number=number)
    with pytest.raises(RendezvousError, match="not connected"):
        harness.run()


def test_a_store_that_is_gone_is_one_sentence(harness: Harness) -> None:
    harness.barriers = [LOST]
    harness.joins = [DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed")]
    harness.answer()
    with pytest.raises(WorkError, match=r"^member 1: the store of the run does not answer"):
        harness.run()


def test_a_launcher_that_does_not_answer_is_named(harness: Harness) -> None:
    harness.barriers = [LOST]
    with pytest.raises(WorkError, match=r"member 1: round 0 is over.*the launcher waits for"):
        harness.run()


def test_a_member_leaves_when_it_is_told_to(harness: Harness) -> None:
    harness.barriers = [LOST]
    harness.answer("leave")
    with pytest.raises(Left):
        harness.run()
    assert harness.calls[-2:] == ["leave", "trainer leaves"]


def test_two_trainers_cannot_stay(harness: Harness) -> None:
    harness.member.enroll(Trainer(harness.calls))
    harness.barriers = [LOST]
    harness.answer("leave")
    with pytest.raises(Left):
        harness.run()
    assert harness.reports[0]["can_stay"] is False


def test_an_undone_operation_is_handed_over_at_once(harness: Harness) -> None:
    harness.barriers = [LOST]
    harness.answer("transfer_state", folder="/handed/over")
    with pytest.raises(Left):
        harness.run()
    assert harness.calls[-3:] == ["undo", ("hand over", "over"), "trainer leaves"]


def test_a_committed_operation_is_handed_over_at_the_next_safe_point(harness: Harness) -> None:
    harness.barriers = [LOST]
    harness.answer("transfer_state", folder="/handed/over", commit=True)
    harness.run()
    assert harness.calls[-1] == "commit prepare"
    assert harness.member.transfer_folder == Path("/handed/over")
    with pytest.raises(Left):  # no safe point has come before
        harness.run()


def test_newcomers_are_counted_until_they_have_joined(harness: Harness) -> None:
    harness.answer("newcomers", count=2)
    assert harness.member.poll() == 2
    harness.answer(number=1)
    harness.member.admit()
    assert harness.reports[0]["reason"] == "admit"
    assert harness.member.newcomers == 2
    harness.answer(number=2, joined=[3, 4])
    harness.member.admit()
    assert harness.member.newcomers == 0


def test_a_newcomer_waits_and_takes_the_number_of_the_operation(harness: Harness) -> None:
    harness.member.has_state = False
    assert harness.member.is_waiting
    harness.answer("newcomers", count=1)
    harness.answer(number=4, operation=17, joined=[1])
    harness.member.join()
    assert harness.reports == [{"kind": "ready"}]
    assert (harness.member.operation, harness.member.round) == (17, 4)
    assert harness.member.has_state
    assert not harness.member.is_waiting


def test_what_a_round_tells_fits_its_message() -> None:
    message = {"kind": "round", "round": 3, "rank": 1, "world_size": 2, "store": "1 2 3"}
    message |= {"operation": 5, "commit": True, "lost": [{"member": 0, "signal": 9}]}
    found = Round.from_message(message | {"joined": [4], "pids": [10, 11], "noticed": 2.5})
    assert found == Round(
        3, 1, 2, "1 2 3", 5, True, ({"member": 0, "signal": 9},), (4,), (), 2.5, (10, 11)
    )
    assert not Membership(0).is_to_commit(TransferOrder(0, False, Path()))


def use_backend() -> None:
    dist.all_reduce(torch.ones(1))


@pytest.fixture
def permitted() -> Iterator[None]:
    """Permit every call after the test."""
    yield
    backend.refuse_calls("")


def test_a_script_communicates_before_and_after_the_training_only(
    world_of_one: None, permitted: None
) -> None:
    """Of the others, each may be at another call when a round begins."""
    member = Membership(0)
    use_backend()
    member.enroll(Trainer([]))
    use_backend()
    member.run(use_backend, lambda _: use_backend())
    with pytest.raises(backend.ArgumentError, match=r"all_reduce .* is refused: an elastic run"):
        use_backend()
    with member.inside(), member.inside():
        use_backend()
    with pytest.raises(backend.ArgumentError, match="is refused"):
        use_backend()
    member.permit_calls()
    use_backend()
    member.run(use_backend, lambda _: None)
    use_backend()


def test_where_processes_are_replaced_a_script_may_communicate(
    world_of_one: None, permitted: None
) -> None:
    member = Membership(0)
    for _ in range(2):
        member.enroll(Trainer([]))
    member.run(use_backend, lambda _: None)
    use_backend()
