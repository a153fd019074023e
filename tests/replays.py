"""A recorded step computed again, as `lockstep replay` does."""

from __future__ import annotations

from lockstep.record.reader import read_run
from lockstep.tools.replay.recorded_program import find_base, read_program
from lockstep.tools.replay.replay_runner import run_program
from lockstep.tools.replay.result import Replay, ReplayRequest


def run_replay(request: ReplayRequest) -> Replay:
    """Compute steps of a recorded run again, from the nearest checkpoint."""
    run = read_run(request.run)
    program = read_program(run, request.first)
    base = find_base(run, request.first)
    return run_program(program, base, request)
