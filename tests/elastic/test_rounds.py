"""Rounds of members that are killed at chosen places, seen from outside."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from members import CLI, run
from processes import until


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


def find_state_folder(done: CompletedProcess[str]) -> Path:
    lines = done.stdout.splitlines()
    return Path(next(line.split()[-1] for line in lines if "states in" in line))


def require_success(done: CompletedProcess[str], ranks: int = 3) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"] right {ranks}")


def test_a_killed_rank_is_replaced(tmp_path):
    done = run(tmp_path, "--max", "3", KILLS="1:5:barrier")
    require_success(done)
    assert said(done) == [
        "member 1 was killed by SIGKILL",
        "round 1: 2 ranks",
        "round 2: 3 ranks, member 3 joined",
    ]
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
def test_several_killed_ranks_are_replaced(tmp_path, kills, dead):
    done = run(tmp_path, "--min", "1", "--max", "3", KILLS=kills)
    require_success(done)
    killed = {int(line.split()[1]) for line in said(done) if "was killed by SIGKILL" in line}
    assert killed == dead
    rounds = read_rounds(done)
    assert rounds[-1]["world_size"] == 3
    joined = [member for each in rounds for member in each["joined"]]
    assert len(joined) - len(set(joined) & dead) == len(dead - {3})


def test_processes_that_cannot_stay_are_replaced(tmp_path):
    """By new ones that get the state, which another member writes if the first one is killed."""
    done = run(tmp_path, "--max", "3", KILLS="2:5:barrier 0:6:hand_over", CAN_STAY="no")
    require_success(done)
    assert said(done) == [
        "member 2 was killed by SIGKILL",
        "member 0 was killed by SIGKILL",
        "round 1: 3 ranks, in new processes",
    ]
    assert not find_state_folder(done).exists()


def test_nobody_waits_for_a_member_that_is_not_needed(tmp_path):
    """One that has not noticed the loss is killed if another one can hand over the state."""
    done = run(tmp_path, "--max", "3", KILLS="2:5:barrier", CAN_STAY="no", SILENT="0")
    require_success(done)
    assert said(done)[1:] == ["round 1: 3 ranks, in new processes"]


def test_a_killed_launcher_leaves_no_states(tmp_path):
    """The fork server removes them after the ranks."""
    script = "import os; print(os.environ['LOCKSTEP_MIRROR'], flush=True); os.read(0, 1)"
    (tmp_path / "train.py").write_text(script)
    command = [*CLI, "--min", "1", "--max", "1", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().split()[-1]).parent
        mode = folder.stat().st_mode
        (folder / "mirror").mkdir()
        launcher.kill()
    assert stat.S_IMODE(mode) == 0o700
    until(lambda: not folder.exists(), "the states are left", 20)


def test_a_run_without_survivors_starts_anew(tmp_path):
    kills = " ".join(f"{member}:4:prepare" for member in range(3))
    done = run(tmp_path, "--max", "3", KILLS=kills)
    require_success(done)
    assert said(done)[-1] == "round 1: 3 ranks, in new processes"
