"""Rounds of members that are killed at chosen places, seen from outside."""

from __future__ import annotations

import json
import operator
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from time import monotonic
from types import SimpleNamespace

import pytest

from lockstep.elastic import coordinator, member_exits
from lockstep.elastic.current_round import CurrentRound
from lockstep.elastic.elastic_launch import launch_elastic
from lockstep.elastic.member_exits import MemberExits
from lockstep.elastic.newcomers import Newcomers
from lockstep.elastic.scale_request import request_ranks
from lockstep.kernel.errors import LockstepError
from lockstep.launcher import supervisor
from lockstep.launcher.failure_attribution import Outcome
from lockstep.launcher.fork_server import get_fork_server_pid
from lockstep.launcher.launch_script import Interrupted
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.messages import log
from lockstep.tools.commands.run import command, make_config
from members import CLI, write_script
from processes import alive, restoring_handlers, until

PATIENCE = 60.0


Run = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run the script in an elastic run of this process, which has a warm fork server.

    `watch` is called in the launcher with its supervisor, rounds and folder.
    """
    monkeypatch.chdir(tmp_path)

    def run(*flags, watch=None, **environ):
        with monkeypatch.context() as patched:
            for name, value in write_script(tmp_path, **environ).items():
                patched.setenv(name, value)
            params = command.make_context("run", [*flags, "train.py"]).params
            config = make_config(params.pop("script"), params.pop("arguments"), params)
            try:
                with restoring_handlers():  # a program that was interrupted ignores further signals
                    status = launch_elastic(config, watch)
            except LockstepError as error:
                log(str(error))
                status = error.exit_status
            except Interrupted as interruption:
                status = interruption.exit_status
        written = capfd.readouterr()
        return CompletedProcess(flags, status, written.out, written.err)

    return run


def read_rounds(done: CompletedProcess[str]) -> list[dict[str, object]]:
    """Return the rounds that the script's first rank of each has printed."""
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def said(done: CompletedProcess[str]) -> list[str]:
    """Return what the launcher has said, without where the run is."""
    lines = done.stderr.splitlines()
    assert all(line.startswith("lockstep: ") for line in lines), done.stderr
    assert lines[-1].startswith("lockstep: the run is in runs/train-")
    return [line.removeprefix("lockstep: ") for line in lines[:-1]]


def list_state_folders(launcher: int) -> list[Path]:
    return [*Path("/dev/shm").glob(f"lockstep-{launcher}-*")]


def require_success(done: CompletedProcess[str], ranks: int = 3) -> None:
    assert done.returncode == 0, done.stderr
    # Not necessarily the last line: a member that leaves may print later than rank 0.
    results = [line for line in done.stdout.splitlines() if "] right " in line]
    assert len(results) == 1, done.stdout
    assert results[0].endswith(f"] right {ranks}")


def test_a_killed_rank_is_replaced(run, tmp_path):
    seen = []  # of the newcomer

    def observe(ranks, rounds, folder):
        form_round = ranks.after_events

        def form_and_observe():
            error = form_round()
            if 3 in ranks.processes.outcomes:
                seen.append(
                    (
                        ranks.processes.outcomes[3].is_outside,
                        ranks.processes.outcomes[3].rank_in_world,
                    )
                )
            return error

        ranks.after_events = form_and_observe

    done = run("--max", "3", watch=observe, KILLS="1:5:barrier")
    require_success(done)
    assert said(done) == [
        "member 1 was killed by SIGKILL",
        "round 1: 2 ranks",
        "round 2: 3 ranks, member 3 joined",
    ]
    assert list(dict.fromkeys(seen)) == [(True, None), (False, 2)]
    first, second = read_rounds(done)
    assert first["operation"] == 5
    assert first["lost"] == [{"member": 1, "signal": 9}]
    assert (second["joined"], second["lost"]) == ([3], [])
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "rank-3.log").exists()
    description = json.loads((folder / "launch.json").read_text())
    assert (description["nprocs"], description["min_nprocs"]) == (3, 1)


@pytest.mark.parametrize(
    ("kills", "dead"),
    [
        ("1:5:barrier 2:5:barrier", {1, 2}),  # two at once
        ("0:3:prepare 1:3:commit", {0, 1}),  # one after the other, in the same operation
        ("2:5:prepare 1:5:reported", {1, 2}),  # while the others wait for the next round
        ("2:5:commit 0:6:connect", {0, 2}),  # while the next round connects
        ("1:4:prepare 3:0:share", {1, 3}),  # a newcomer that gets the state
        ("1:4:prepare 3:0:ready", {1, 3}),  # a newcomer that waits
    ],
)
def test_several_killed_ranks_are_replaced(run, kills, dead):
    done = run("--min", "1", "--max", "3", KILLS=kills)
    require_success(done)
    killed = {int(line.split()[1]) for line in said(done) if "was killed by SIGKILL" in line}
    assert killed == dead
    rounds = read_rounds(done)
    assert rounds[-1]["world_size"] == 3
    joined = [member for each in rounds for member in each["joined"]]
    assert len(joined) - len(set(joined) & dead) == len(dead - {3})


@pytest.mark.parametrize(("place", "number"), [("admit", 1), ("connect", 2), ("share", 2)])
def test_nobody_waits_for_newcomers_when_the_only_state_is_lost(run, monkeypatch, place, number):
    """Those that are getting it, or are about to, notice and leave at once."""
    monkeypatch.setattr(coordinator, "REPORT_TIMEOUT", 1e9)
    monkeypatch.setattr(member_exits, "LEAVE_TIMEOUT", 1e9)
    done = run("--max", "2", KILLS=f"1:4:prepare 0:r{number}:{place}", RANKS="2")
    require_success(done, 2)
    joined = ["round 2: 2 ranks, member 2 joined"] * (number - 1)
    assert said(done) == [
        *("member 1 was killed by SIGKILL", "round 1: 1 rank", *joined),
        *("member 0 was killed by SIGKILL", f"round {number + 1}: 2 ranks, in new processes"),
    ]


def test_processes_that_cannot_stay_are_replaced(run):
    """By new ones that get the state, which another member writes if the first one is killed."""
    done = run("--max", "3", KILLS="2:5:barrier 0:6:transfer_state", CAN_STAY="no")
    require_success(done)
    assert said(done) == [
        "member 2 was killed by SIGKILL",
        "member 0 was killed by SIGKILL",
        "round 1: 3 ranks, in new processes",
    ]
    assert not list_state_folders(os.getpid())


def test_nobody_waits_for_a_member_that_is_not_needed(run):
    """One that has not noticed the loss is killed if another one can hand over the state."""
    done = run("--max", "3", KILLS="2:5:barrier", CAN_STAY="no", SILENT="0")
    require_success(done)
    assert said(done)[1:] == ["round 1: 3 ranks, in new processes"]


def test_a_killed_launcher_leaves_no_states(tmp_path):
    """The fork server removes them after the ranks."""
    script = "import os; print('begun', flush=True); os.read(0, 1)"
    (tmp_path / "train.py").write_text(script)
    command = [*CLI, "--min", "1", "--max", "1", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        (folder,) = list_state_folders(launcher.pid)
        mode = folder.stat().st_mode
        (folder / "hand-over-1").mkdir()
        launcher.kill()
    assert stat.S_IMODE(mode) == 0o700
    until(lambda: not folder.exists(), "the states are left", 20)


def test_a_run_without_survivors_starts_anew(run):
    kills = " ".join(f"{member}:4:prepare" for member in range(3))
    done = run("--max", "3", KILLS=kills)
    require_success(done)
    assert said(done)[-1] == "round 1: 3 ranks, in new processes"


def test_a_later_rank_0_of_a_new_process_reads_the_standard_input_again(run, tmp_path):
    (tmp_path / "input").write_text("42")
    before = os.dup(0)
    with (tmp_path / "input").open() as file:
        os.dup2(file.fileno(), 0)
    try:
        done = run("--max", "2", KILLS="0:4:prepare 1:4:prepare", RANKS="2", READS_INPUT="yes")
    finally:
        os.dup2(before, 0)
        os.close(before)
    require_success(done, 2)
    assert sorted(line for line in done.stdout.splitlines() if "input" in line) == [
        "[0] input: 42",
        "[2] input: 42",
    ]


@pytest.mark.parametrize(
    ("member", "rounds"), [(1, []), (0, ["round 1: 3 ranks, in new processes"])]
)
def test_a_rank_that_is_killed_at_the_end_of_the_script(run, member, rounds):
    """What rank 0 has not done yet is done again, once the others have ended."""
    done = run("--max", "3", KILLS=f"{member}:20:end")
    require_success(done)
    assert said(done) == [f"member {member} was killed by SIGKILL", *rounds]


def count_over_rounds(run: Run, kills: int) -> list[list[int]]:
    """Kill a rank of every full round; return the descriptors of launcher and fork server.

    Of each round these are the most that were seen, as a segment or a report may be on its way.
    """
    counts: dict[int, list[int]] = {}

    def count(ranks: RankSupervisor, rounds: object, folder: Path | None) -> None:
        form_round = ranks.after_events

        def form_and_count():
            error = form_round()
            pids = (os.getpid(), get_fork_server_pid())
            if len(rounds.members) == 2:
                found = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
                counts[rounds.number] = [*map(max, found, counts.get(rounds.number, found))]
            return error

        ranks.after_events = form_and_count

    require_success(run("--max", "2", watch=count, RANKS="2", REPEATED_KILLS=str(kills)), 2)
    assert len(counts) == kills + 1
    return [*counts.values()]


def test_nothing_grows_with_the_number_of_rounds(run):
    *before, after = count_over_rounds(run, 5)
    assert all(map(operator.le, after, map(max, *before)))


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_nothing_grows_over_many_rounds(run):
    *before, after = count_over_rounds(run, 200)
    assert all(map(operator.le, after, map(max, *before)))


@pytest.mark.parametrize(
    ("ranks", "environ", "change"),
    [
        (3, {}, "round 1: 3 ranks, member 2 joined"),
        (1, {}, "round 1: 1 rank, member 1 left"),
        (3, {"CAN_STAY": "no"}, "round 1: 3 ranks, in new processes"),
    ],
)
def test_the_number_of_ranks_is_changed(run, ranks, environ, change):
    def ask(_, rounds, folder):
        request_ranks(folder, ranks)

    done = run("--max", "2", watch=ask, RANKS=str(ranks), **environ)
    require_success(done, ranks)
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    assert said(done) == [f"the run gets {count} at its next safe point", change]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_members(run, number):
    members: list[int] = []

    def interrupt(ranks, rounds, folder):
        form_round = ranks.after_events

        def form_and_interrupt():
            error = form_round()
            if rounds.number == 2 and not members:
                members.extend(ranks.processes.pids.values())
                os.kill(os.getpid(), number)
            return error

        ranks.after_events = form_and_interrupt

    done = run("--max", "2", watch=interrupt, RANKS="9", KILLS="1:5:barrier")
    assert done.returncode == 128 + number
    said = {"SIGINT": "ending members ", "SIGTERM": "waiting up to "}
    assert f"\nlockstep: {number.name}: {said[number.name]}" in done.stderr
    assert len(members) == 2
    assert not any(map(alive, members))


def test_a_run_that_cannot_continue_while_it_stops_ends_at_once_with_the_reason(run, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE", 0.5)

    def stop(ranks, rounds, folder):
        form_round = ranks.after_events
        requests = []

        def stop_and_fail():
            if rounds.number == 2 and not requests:
                requests.append(os.kill(os.getpid(), signal.SIGTERM))
            if ranks.was_asked_to_stop:
                rounds._fail("the ranks have no state in common")
            return form_round()

        ranks.after_events = stop_and_fail

    # The members of a script that raises ignore SIGTERM. There is no member 9.
    done = run("--max", "2", watch=stop, RANKS="9", KILLS="1:5:barrier", RAISES="9:0:prepare")
    assert done.returncode == 128 + signal.SIGTERM
    assert "lockstep: round 2: the ranks have no state in common\n" in done.stderr
    assert "did not stop within" not in done.stderr


def test_an_exception_ends_the_run(run):
    """Members that wait for the next round get a message, because no signal wakes them."""
    done = run("--max", "3", RAISES="1:5:prepare")
    assert done.returncode == 1
    assert "member 1 raised OSError: out of paper" in done.stderr
    assert "; its log: runs/" in done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("[0] leaves") == lines.count("[2] leaves") == 1


def test_a_round_that_ends_though_nobody_has_died_is_formed_again(run):
    done = run("--max", "2", RANKS="2", LOSES="1:4:barrier")
    require_success(done, 2)
    assert said(done) == ["round 1: 2 ranks"]


def make_exits(
    is_store_lost: bool = False,
) -> tuple[dict[int, Outcome], CurrentRound, MemberExits]:
    """Return the outcomes of two members, the round that they are in, and its exits."""
    outcomes = {member: Outcome(member) for member in (0, 1)}
    ranks = SimpleNamespace(
        outcomes=outcomes,
        running=[1],
        pids={},
        send=lambda *_: None,
        release=lambda member: None,
        stores=SimpleNamespace(is_lost=is_store_lost),
    )
    current = CurrentRound(members=(0, 1))
    newcomers = Newcomers(lambda rank: rank)
    return outcomes, current, MemberExits(ranks, current, newcomers)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ["rendezvous", "communication", "lost", "stopped", ""])
@pytest.mark.parametrize("cause", ["death", "store", None])
def test_what_did_not_connect_or_answer_in_a_round_that_lost_a_member_is_a_consequence(code, cause):
    outcomes, current, exits = make_exits(is_store_lost=cause == "store")
    if cause == "death":
        outcomes[1].status = -signal.SIGKILL
        exits.notice_end(1, outcomes[1])
    outcomes[0].status = 1
    outcomes[0].error = {"code": code, "time": monotonic()}
    exits.notice_end(0, outcomes[0])
    is_explained = cause is not None and code != ""
    assert outcomes[0].is_replaced == (is_explained or code in ("lost", "stopped"))
    assert (0 in current.lost) == is_explained


def test_an_error_and_the_exit_after_it_may_be_noticed_at_once():
    """On a busy machine: before the death of the other member, whose consequence they are."""
    outcomes, current, exits = make_exits()
    outcomes[0].status = 1
    outcomes[0].error = {"code": "lost", "time": monotonic()}
    exits.notice_end(0, outcomes[0])
    exits.reconsider_consequences()
    assert outcomes[0].is_replaced
    outcomes[1].status = -signal.SIGKILL
    for member in (1, 0):
        exits.notice_end(member, outcomes[member])
    assert current.lost == {1: signal.SIGKILL, 0: 0}


def test_an_exception_of_a_newcomer_does_not_end_the_run(run):
    """Nor is another newcomer started, until somebody asks for it."""

    def ask(ranks, rounds, folder):
        form_round = ranks.after_events

        def form_and_ask():
            error = form_round()
            if 2 in ranks.processes.outcomes and ranks.processes.outcomes[2].status is not None:
                assert 3 not in ranks.processes.outcomes
                ranks.after_events = form_round
                request_ranks(folder, 2)
            return error

        ranks.after_events = form_and_ask

    kills = {"KILLS": "1:3:prepare", "RAISES": "2:0:start"}
    done = run("--max", "2", watch=ask, RANKS="2", **kills)
    require_success(done, 2)
    assert "member 2 did not join the others, which continue without it: it raised" in done.stderr
    assert done.stderr.count("no more are started until you run: lockstep scale") == 1
    assert "member 3 joined" in done.stderr


def test_newcomers_that_never_join_are_not_started_for_ever(run):
    """Here each dies before it is ready, and the run needs as many ranks as it has begun with."""
    kills = "1:3:prepare " + " ".join(f"{member}:0:start" for member in range(2, 12))
    done = run("--min", "2", "--max", "2", RANKS="2", KILLS=kills)
    assert done.returncode == 1
    assert done.stderr.count("before it joined the others") == 5
    assert "1 rank left, fewer than --min 2" in done.stderr


def test_rounds_that_save_nothing_are_not_started_for_ever(run):
    kills = " ".join(f"{member}:2:prepare" for member in range(40))
    done = run("--max", "1", RANKS="1", KILLS=kills)
    assert done.returncode == 1
    assert "5 rounds in a row were replaced before they had saved a state" in done.stderr
