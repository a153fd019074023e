"""Where ranks are, as seen from their launcher, and which of them hang."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm.activity import Activity, CallKind, State
from lockstep.kernel.errors import RankError
from lockstep.launcher import hang_monitor, supervisor
from lockstep.launcher.failure_attribution import Outcome
from lockstep.launcher.hang_monitor import (
    HangMonitor,
    HangPolicy,
    RankSnapshot,
    find_hang,
    format_report,
    take_snapshot,
)
from lockstep.launcher.launch import start
from stack_dumps import DUMP

BACKWARD = """\
Current thread 0x00007f (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 800 in _engine_run_backward
  File "/x/site-packages/torch/_tensor.py", line 600 in backward
  File "/home/me/train.py", line 32 in step
"""


# --- the decision -----------------------------------------------------------------------------


def waits(rank: int, age: float, operation: str = "all_reduce, call 4") -> RankSnapshot:
    return RankSnapshot(rank, 100 + rank, operation, age, is_waiting=True)


def computes(rank: int, age: float | None = 1.0) -> RankSnapshot:
    return RankSnapshot(rank, 100 + rank, "all_reduce, call 3", age, location="at train.py:31")


def test_ranks_that_compute_or_wait_for_less_than_the_timeout_do_not_hang():
    assert find_hang([computes(0, 900), computes(1, 900)], 60) is None
    assert find_hang([waits(0, 59), computes(1, 900)], 60) is None
    assert find_hang([waits(0, 59), waits(1, 3)], 60) is None
    assert find_hang([replace(computes(0), stopped_for=59.0), waits(1, 59)], 60) is None
    assert find_hang([], 60) is None


def test_the_rank_that_does_not_wait_is_named():
    hang = find_hang([waits(0, 312), computes(1, 313), waits(2, 300)], 240)
    assert hang is not None
    assert hang.culprit == 1
    assert str(hang) == (
        "rank 1 (process 101) is at train.py:31 (its last operation: all_reduce, call 3, "
        "5 min 13 s ago), while ranks 0 and 2 have waited 5 min 12 s in all_reduce, call 4"
    )
    assert hang.advice == "unless that is a long computation, see the stack of rank 1 below"


def test_a_stopped_rank_is_named_even_if_another_computes():
    stopped = replace(computes(2), stopped_for=70.0)
    hang = find_hang([waits(0, 61), computes(1), stopped], 60)
    assert hang is not None
    assert hang.culprit == 2
    assert str(hang) == (
        "rank 2 (process 102) has been stopped by a signal for 1 min 10 s, while rank 0 has "
        "waited 1 min 1 s in all_reduce, call 4"
    )
    assert hang.advice == "continue with kill -CONT 102"
    alone = find_hang([stopped, computes(0)], 60)
    assert alone is not None
    assert alone.culprit == 2


def test_a_rank_that_was_stopped_while_it_waited_is_stopped():
    hang = find_hang([replace(waits(0, 90), stopped_for=80.0), waits(1, 90)], 60)
    assert hang is not None
    assert hang.culprit == 0
    assert [each.rank for each in hang.waiting] == [1]


def test_a_deadlock_names_all_operations():
    hang = find_hang([waits(0, 61, "recv from rank 1"), waits(1, 62, "recv from rank 0")], 60)
    assert hang is not None
    assert hang.culprit == 0
    assert str(hang) == (
        "the ranks wait for each other: rank 0 has waited 1 min 1 s in recv from rank 1, and "
        "rank 1 has waited 1 min 2 s in recv from rank 0"
    )


MESSAGE = "recv from rank {} (tag 0) of group default"


def test_a_rank_that_waits_elsewhere_since_a_moment_is_named():
    hang = find_hang([waits(0, 61), waits(1, 2, "recv from rank 0")], 60)
    assert hang is not None
    assert hang.culprit == 1
    # It has just arrived where the other waits: both wait, for a rank of another host.
    arrived = find_hang([waits(0, 61), waits(1, 2)], 60)
    assert arrived is not None
    assert [each.rank for each in arrived.waiting] == [0, 1]
    assert str(arrived).endswith("and no rank of this launcher does anything else")


def test_a_rank_that_returned_is_named():
    hang = find_hang([waits(0, 61)], 60, returned=[1])
    assert hang is not None
    assert hang.culprit == 1
    assert str(hang) == "rank 1 returned, while rank 0 has waited 1 min 1 s in all_reduce, call 4"


def test_members_of_an_elastic_run_are_not_called_ranks():
    stopped = RankSnapshot(7, 70, stopped_for=60.0, noun="member")
    waiting = RankSnapshot(4, 40, "barrier", 50.0, is_waiting=True, noun="member")
    hang = find_hang([stopped, waiting], 40.0)
    assert "member 7 (process 70) has been stopped by a signal" in str(hang)
    assert "member 4 has waited 50 s in barrier" in str(hang)
    busy = find_hang([replace(stopped, stopped_for=None), waiting], 40.0)
    assert "see the stack of member 7 below" in busy.advice
    report = format_report([stopped, waiting], {}, [2])
    assert "member 4 (process 40): has waited" in report
    assert "member 2: has returned" in report
    assert "rank" not in f"{hang}{busy}{busy.advice}{report}"


def test_a_rank_that_has_not_been_started_is_not_said_to_be_silent():
    assert format_report([RankSnapshot(1), waits(0, 5)], {0: DUMP}).splitlines()[-2:] == [
        "rank 1: has not been started yet",
        "(most recent call first; > marks your code)",
    ]


def test_the_report_marks_user_code_and_says_who_does_not_answer():
    stopped = replace(computes(1), stopped_for=70.0)
    text = format_report([waits(2, 61), stopped, waits(0, 61)], {0: DUMP, 2: ""}, returned=[3])
    assert text.splitlines() == [
        "rank 0 (process 100): has waited 1 min 1 s in all_reduce, call 4",
        "    torch/distributed/distributed_c10d.py:3168 in all_reduce",
        "    torch/distributed/c10d_logger.py:83 in wrapper",
        "  > /home/me/train.py:31 in step",
        "  > /home/me/train.py:60 in <module>",
        "rank 1 (process 101): stopped by a signal for 1 min 10 s; continue it with kill -CONT "
        "101; last operation: all_reduce, call 3",
        "rank 2 (process 102): has waited 1 min 1 s in all_reduce, call 4",
        "    does not answer (it is not executing Python code, or blocks all signals)",
        "rank 3: has returned",
        "(most recent call first; > marks your code)",
    ]


# --- the monitor, on ranks that are not there ---------------------------------------------------


class FakeRanks:
    """Two ranks whose states a test sets."""

    def __init__(self) -> None:
        self.outcomes = {0: Outcome(0), 1: Outcome(1)}
        self.pids = {0: 100, 1: 101}
        self.stopped: set[int] = set()
        self.activities = {0: Activity(), 1: Activity()}
        self.stacks = {0: "", 1: ""}
        self.cpu = 0.0
        self.asked: list[int] = []

    def is_stopped(self, rank: int) -> bool:
        return rank in self.stopped

    def cpu_seconds(self, rank: int) -> float:
        return self.cpu

    def read_activity(self, rank: int) -> Activity:
        return self.activities[rank]

    def dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        self.asked += ranks
        return {rank: self.stacks[rank] for rank in ranks}


def monitor_of(ranks: FakeRanks, policy: HangPolicy) -> HangMonitor:
    return HangMonitor(lambda: ranks.outcomes, ranks.pids, ranks, policy)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that a test sets, in place of the monotonic one."""
    now = [1000.0]
    monkeypatch.setattr(hang_monitor.time, "monotonic", lambda: now[0])
    return now


def pass_time(clock: list[float], monitor: HangMonitor, seconds: int) -> RankError | None:
    """Call the monitor once per second; return its last answer."""
    answer = None
    for _ in range(seconds):
        clock[0] += 1.0
        answer = answer or monitor.check()
    return answer


def waiting_since(since: float) -> Activity:
    return Activity(3, "all_gather, in step 12", State.WAITING, since)


def test_a_hang_is_reported_once_and_its_end_too(clock, capsys):
    ranks = FakeRanks()
    monitor = monitor_of(ranks, HangPolicy(40.0))
    ranks.activities[1] = Activity(2, "micro-batch 1 of step 12", State.COMPUTING, 1000.0)
    ranks.activities[0] = waiting_since(1000.0)
    assert pass_time(clock, monitor, 39) is None
    assert capsys.readouterr().err == ""
    pass_time(clock, monitor, 200)
    said = capsys.readouterr().err
    assert said.startswith("lockstep: rank 1 (process 101) is busy (its last operation: micro-bat")
    assert said.count("has waited") == 2  # in the sentence, and in the table
    ranks.activities[0] = waiting_since(clock[0])
    pass_time(clock, monitor, 10)
    assert "none of them hangs any more" in capsys.readouterr().err
    pass_time(clock, monitor, 60)  # the next hang
    assert "rank 1 (process 101) is busy" in capsys.readouterr().err


def receiving(peer: int, since: float) -> Activity:
    """Return the activity of a rank that waits for a message of the backend lockstep."""
    wait = MESSAGE.format(peer)
    kind = CallKind.RECEIVE
    return Activity(wait=wait, wait_since=since, is_main_thread_waiting=True, kind=kind)


def test_a_deadlock_is_reported_once_nothing_has_moved_for_some_seconds(clock, capsys):
    ranks = FakeRanks()
    monitor = monitor_of(ranks, HangPolicy())
    ranks.activities = {rank: receiving(1 - rank, clock[0]) for rank in (0, 1)}
    ranks.stacks = {rank: DUMP for rank in (0, 1)}
    pass_time(clock, monitor, 2)
    assert capsys.readouterr().err == ""
    pass_time(clock, monitor, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(
        "lockstep: the ranks wait for each other: rank 0 has waited 4 s in "
        f"{MESSAGE.format(1)}, train.py:31, and rank 1 has waited 4 s in {MESSAGE.format(0)}, "
        "train.py:31; send first on one of the ranks, or use dist.batch_isend_irecv "
        "rank 0 (process 100): has waited 4 s in recv from rank 1"
    )
    pass_time(clock, monitor, 600)
    assert capsys.readouterr().err == ""  # also after the timeout
    ranks.activities = {rank: receiving(1 - rank, clock[0]) for rank in (0, 1)}
    pass_time(clock, monitor, 1)
    assert "none of them hangs any more" in capsys.readouterr().err


def test_ranks_that_move_or_compute_are_not_in_a_deadlock(clock):
    ranks = FakeRanks()
    monitor = monitor_of(ranks, HangPolicy(ends_launch=True))
    for _ in range(10):  # messages follow each other
        ranks.activities = {rank: receiving(1 - rank, clock[0]) for rank in (0, 1)}
        assert pass_time(clock, monitor, 2) is None
    for _ in range(10):  # a long message is on its way
        ranks.cpu += 0.9
        assert pass_time(clock, monitor, 1) is None
    assert pass_time(clock, monitor, 5) is not None


@pytest.mark.parametrize(
    ("operations", "advice"),
    [
        # The words of a call decide nothing.
        ([("x", CallKind.RECEIVE), ("y", CallKind.RECEIVE)], "send first"),
        ([("x", CallKind.RECEIVE), ("y", CallKind.SEND)], "send first"),
        ([("x", CallKind.RECEIVE), ("y", CallKind.COLLECTIVE)], "make the same calls in the same"),
        ([("x", CallKind.COLLECTIVE), ("y", CallKind.COLLECTIVE)], "make the same calls"),
        ([("x", CallKind.COLLECTIVE)] * 2, None),  # it is in progress
        ([("recv of group x", 0), (MESSAGE, CallKind.RECEIVE)], None),  # perhaps on a device
        ([("x", CallKind.RECEIVE), ("", 0)], None),  # rank 1 computes
    ],
)
def test_all_ranks_that_wait_in_different_calls_are_in_a_deadlock(
    operations, advice, clock, capsys
):
    ranks = FakeRanks()
    for rank, (wait, kind) in enumerate(operations):
        ranks.activities[rank] = Activity(
            wait=wait, wait_since=clock[0], is_main_thread_waiting=bool(wait), kind=kind
        )
    error = pass_time(clock, monitor_of(ranks, HangPolicy(ends_launch=True)), 9)
    assert (error is None) == (advice is None)
    if advice is not None:
        assert advice in " ".join(capsys.readouterr().err.split())


def test_ranks_that_publish_nothing_are_in_a_deadlock_if_all_of_the_world_receive(clock):
    receives = DUMP.replace("in all_reduce", "in recv")
    for stacks, has_other_hosts, expected in (
        ([receives, receives.replace("31", "33")], False, True),
        ([receives, receives], True, False),
        ([receives, DUMP], False, False),
    ):
        ranks = FakeRanks()
        ranks.stacks = dict(enumerate(stacks))
        policy = HangPolicy(ends_launch=True, has_other_hosts=has_other_hosts)
        error = pass_time(clock, monitor_of(ranks, policy), 30)
        assert (error is not None) == expected
        if error is not None:
            assert "rank 0 has waited 3 s in recv, train.py:31, and rank 1 has" in str(error)


def test_the_policy_decides_whether_a_hang_ends_the_launch(clock):
    ranks = FakeRanks()
    ranks.activities[0] = waiting_since(1000.0)
    assert pass_time(clock, monitor_of(ranks, HangPolicy(40.0)), 60) is None
    assert pass_time(clock, monitor_of(ranks, HangPolicy(0, ends_launch=True)), 600) is None
    error = pass_time(clock, monitor_of(ranks, HangPolicy(40.0, ends_launch=True)), 60)
    assert error is not None
    assert error.rank == 1


def test_nobody_waits_for_a_member_that_has_not_joined(clock):
    """It is busy for as long as it takes, or stopped, and not the one that hangs."""
    ranks = FakeRanks()
    ranks.outcomes[0].is_outside = True
    ranks.activities[1] = waiting_since(clock[0])
    error = pass_time(clock, monitor_of(ranks, HangPolicy(40.0, ends_launch=True)), 60)
    assert error is not None
    assert error.rank == 1
    assert "rank 0" not in str(error)
    ranks.activities[1] = Activity()
    ranks.stopped.add(0)
    monitor = monitor_of(ranks, HangPolicy(40.0, ends_launch=True))
    assert pass_time(clock, monitor, 60) is None
    ranks.outcomes[0].is_outside = False
    assert pass_time(clock, monitor, 60) is not None


def test_a_stopped_rank_is_remarked_on_early_and_hangs_later(clock, capsys):
    ranks = FakeRanks()
    ranks.stopped.add(1)
    monitor = monitor_of(ranks, HangPolicy(40.0, ends_launch=True))
    assert pass_time(clock, monitor, 30) is None
    assert capsys.readouterr().err.count("is stopped; continue it with kill -CONT 101") == 1
    error = pass_time(clock, monitor, 30)
    assert error is not None
    assert "rank 1 (process 101) has been stopped" in str(error)
    assert 1 not in ranks.asked


def test_a_rank_that_publishes_nothing_waits_where_its_stack_is_in_every_sample(clock):
    ranks = FakeRanks()
    ranks.stacks[0] = DUMP
    monitor = monitor_of(ranks, HangPolicy(40.0, ends_launch=True))
    assert pass_time(clock, monitor, 45) is None
    error = pass_time(clock, monitor, 15)
    assert error is not None
    assert "while rank 0 has waited 40 s in all_reduce, train.py:31" in str(error)


def test_a_rank_that_moves_does_not_wait(clock):
    ranks = FakeRanks()
    ranks.stacks[0] = DUMP
    monitor = monitor_of(ranks, HangPolicy(40.0, ends_launch=True))
    for line in range(8):
        ranks.stacks[0] = DUMP.replace("31", str(line))
        assert pass_time(clock, monitor, 20) is None
    for number in range(8):
        ranks.activities[0] = Activity(number)
        assert pass_time(clock, monitor, 20) is None


def test_a_rank_that_continued_after_its_last_sample_does_not_hang(clock, capsys):
    class ContinuingRanks(FakeRanks):
        """Rank 0 continues after the first sample in which it seems to hang."""

        seen_late = 0

        def dump_stacks(self, ranks: list[int]) -> dict[int, str]:
            dumps = super().dump_stacks(ranks)
            if clock[0] - 1000.0 >= 46.0:
                self.seen_late += dumps.get(0) == DUMP
                self.stacks[0] = DUMP.replace("31", "32")
            return dumps

    ranks = ContinuingRanks()
    ranks.stacks[0] = DUMP
    monitor = monitor_of(ranks, HangPolicy(40.0, ends_launch=True))
    assert pass_time(clock, monitor, 60) is None
    assert ranks.seen_late == 1
    assert capsys.readouterr().err == ""
    assert "has waited 40 s in all_reduce, train.py:32" in str(pass_time(clock, monitor, 60))


def test_a_rank_that_sleeps_in_backward_waits_and_one_that_computes_there_does_not(clock):
    for cpu, hangs in ((0.0, True), (1.0, False)):
        ranks = FakeRanks()
        ranks.stacks[0] = BACKWARD
        monitor = monitor_of(ranks, HangPolicy(40.0, ends_launch=True))
        answer = None
        for _ in range(90):
            ranks.cpu += cpu
            answer = answer or pass_time(clock, monitor, 1)
        assert (answer is not None) is hangs


def test_a_rank_that_sleeps_in_a_call_of_wait_waits(clock, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("work = start()\nwork.wait()\nselect(files)\n")
    for line, hangs in ((2, True), (3, False)):
        ranks = FakeRanks()
        ranks.stacks[0] = f'x (most recent call first):\n  File "{script}", line {line} in step\n'
        monitor = monitor_of(ranks, HangPolicy(40.0, ends_launch=True))
        answer = pass_time(clock, monitor, 90)
        assert (answer is not None) is hangs
        assert answer is None or "while rank 0 has waited 40 s in train.py:2" in str(answer)


def test_ranks_that_publish_are_never_asked(clock):
    ranks = FakeRanks()
    monitor = monitor_of(ranks, HangPolicy(40.0))
    for number in range(100):
        ranks.activities = {0: Activity(number), 1: waiting_since(clock[0])}
        pass_time(clock, monitor, 1)
    assert ranks.asked == []


def test_the_operation_of_a_rank_names_both_what_it_does_and_the_call():
    activity = replace(waiting_since(990.0), wait="all_gather, call 7", wait_since=991.0)
    asleep = replace(activity, is_main_thread_waiting=True)
    snapshot = take_snapshot(0, 100, asleep, 1000.0)
    assert snapshot.operation == "all_gather, call 7, all_gather, in step 12"
    assert (snapshot.age, snapshot.is_waiting) == (10.0, True)
    background = Activity(1, "step 3", State.COMPUTING, 995.0, wait="all_reduce", wait_since=1.0)
    assert take_snapshot(0, 100, background, 1000.0) == RankSnapshot(0, 100, "step 3", 5.0)


# --- real ranks -------------------------------------------------------------------------------


def wait_forever():
    signal.pause()


@pytest.fixture
def started():
    ls.launch(int, nprocs=1)  # a deadline includes the start of the first launch


@pytest.mark.usefixtures("started")
def test_the_error_after_a_timeout_says_where_a_rank_waits():
    line = wait_forever.__code__.co_firstlineno + 1
    with pytest.raises(RankError, match=rf"\(rank 0 was at test_hang_monitor.py:{line}\)$"):
        ls.launch(wait_forever, nprocs=1, timeout=0.5)


@pytest.mark.usefixtures("started")
def test_the_error_after_a_timeout_says_that_a_rank_is_stopped():
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RankError, match=r"\(rank 0 was stopped\)$"):
        ls.launch(stop, nprocs=1, timeout=0.5)


@pytest.fixture
def policy(monkeypatch) -> Callable[[HangPolicy], None]:
    """Return a function that sets the policy of the launches of this test."""

    def use(policy: HangPolicy) -> None:
        monkeypatch.setattr(supervisor, "HangMonitor", lambda *seen: HangMonitor(*seen[:3], policy))

    return use


def stop_here():
    os.kill(os.getpid(), signal.SIGSTOP)


def spin_here():
    while True:
        pass


def block_here():
    reading, _ = os.pipe()
    select.select([reading], [], [])


def lock_here():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_on_rank_one(backend, hang):
    rank = ls.init(backend=backend).rank
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if rank == 1:
        hang()
    dist.all_reduce(tensor)


# How the others wait depends on the backend, how the rank hangs does not.
@pytest.mark.parametrize(
    ("hang", "nprocs", "backend"),
    [
        (stop_here, 3, "lockstep"),
        (spin_here, 2, "lockstep"),
        (block_here, 2, "lockstep"),
        (lock_here, 2, "lockstep"),
        (stop_here, 3, "gloo"),
        pytest.param(spin_here, 2, "gloo", marks=pytest.mark.stress),
        (block_here, 2, "gloo"),
        pytest.param(lock_here, 2, "gloo", marks=pytest.mark.stress),
    ],
)
def test_a_rank_that_hangs_is_named_while_others_wait(hang, nprocs, backend, policy, capfd):
    # On a busy machine a rank waits for a second until all have joined a group of Gloo.
    policy(HangPolicy(1.0 if backend == "lockstep" else 2.5, ends_launch=True))
    with pytest.raises(RankError) as caught:
        ls.launch(hang_on_rank_one, (backend, hang), nprocs, timeout=60)
    assert caught.value.rank == 1
    others = "rank 0 has" if nprocs == 2 else "ranks 0 and 2 have"
    message = str(caught.value)
    assert f"while {others} waited" in message
    assert " in all_reduce" in message
    report = capfd.readouterr().err
    assert report.count("  > ") >= nprocs - (hang is stop_here)
    if hang is stop_here:
        assert "has been stopped by a signal for" in message
    else:
        assert f"in {hang.__name__}" in report
        assert message.startswith("rank 1 (process ")
        assert "at test_hang_monitor.py:" in message


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_two_receives_that_wait_for_each_other_are_a_deadlock(backend, policy, capfd, monkeypatch):
    def receive_first():
        rank = ls.init(backend=backend).rank
        tensor = torch.ones(4)
        if rank == 0:
            dist.recv(tensor, src=1)
            dist.send(tensor, dst=1)
        else:
            dist.recv(tensor, src=0)
            dist.send(tensor, dst=0)

    monkeypatch.setattr(hang_monitor, "DEADLOCK_SECONDS", 0.5)
    monkeypatch.setattr(hang_monitor, "MAX_STACK_INTERVAL", 1.0)  # Gloo publishes nothing
    policy(HangPolicy(ends_launch=True))
    with pytest.raises(RankError, match="the ranks wait for each other: rank 0 has") as e:
        ls.launch(receive_first, nprocs=2, timeout=60)
    assert ", and rank 1 has waited" in str(e.value)
    assert capfd.readouterr().err.count("in receive_first") == 2


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_long_computations_and_slow_ranks_are_not_reported(backend, policy, capfd):
    def compute(until):
        while time.monotonic() < until:
            torch.ones(1000).sum()
            time.sleep(0.002)  # for tests beside it: processor time does not make it computing

    def train():
        rank = ls.init(backend=backend).rank
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        compute(time.monotonic() + 0.25 * timeout * rank)
        begin = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.all_reduce(begin, dist.ReduceOp.MAX)
        compute(begin.item() + 1.5 * timeout)  # on all ranks
        dist.all_reduce(tensor)
        return tensor[0].item()

    timeout = 1.0 if backend == "lockstep" else 2.0
    policy(HangPolicy(timeout, ends_launch=True))
    assert ls.launch(train, nprocs=2, timeout=60) == [4.0, 4.0]
    assert capfd.readouterr().err == ""


def test_sigusr1_to_the_launcher_prints_where_the_ranks_are(monkeypatch, tmp_path):
    said = []
    done = tmp_path / "done"

    def log(sentence):
        said.append(sentence)
        done.touch()

    def wait_until_printed(launcher):
        ls.init()
        if ls.rank() == 1:
            os.kill(launcher, signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return done.exists()

    monkeypatch.setattr(hang_monitor, "log", log)
    before = signal.getsignal(signal.SIGUSR1)
    context = start(wait_until_printed, (os.getpid(),), nprocs=2, timeout=60)
    assert context.join() == [True, True]
    assert signal.getsignal(signal.SIGUSR1) == before
    (table,) = said
    assert table.startswith("where the ranks are:\nrank 0 (process ")
    assert table.count(" in wait_until_printed") == 2


def test_sigusr1_to_a_rank_prints_its_stack_and_ends_neither_it_nor_its_children(tmp_path):
    log = tmp_path / "log"

    def work():
        os.kill(os.getpid(), signal.SIGUSR1)  # before init, too
        ls.init()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getppid(), signal.SIGUSR1)  # the fork server
        ls.launch(int)  # after which the stack is printed as before
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ls.launch(work, nprocs=1, timeout=60) == [3]
    printed = Path(log).read_text()
    assert printed.count("most recent call first") == 2
    assert "in work" in printed


def test_a_handler_of_the_program_for_sigusr1_stays(monkeypatch):
    def work():
        received = []
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
        ls.init()
        os.kill(os.getpid(), signal.SIGUSR1)
        return received

    assert ls.launch(work, nprocs=1, timeout=60) == [[signal.SIGUSR1]]
