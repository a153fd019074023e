"""The origin of a round: from what its new processes continue, and whom they replace.

    launcher                                processes of the next round
    runs/NAME/                              LOCKSTEP_RUN        as in every round
        checkpoints/step-30/
    /dev/shm/lockstep-7345-a1b2/
        hand-over-2/step-41/                LOCKSTEP_HANDOVER   the state that survivors wrote
                                            LOCKSTEP_ROUND      who died, and who wrote

They continue from the state that was handed over, or else from the newest checkpoint, or else from
the beginning. The folder in shared memory belongs to the launch: its launcher removes it, or the
fork server if the launcher was killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launcher.environment import HANDOVER, ROUND
from lockstep.launcher.run_folder import CHECKPOINTS

__all__ = ["RestartSource", "StateFolder", "find_restart_source"]

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class RestartSource:
    """Why new processes began a round, and what the others left them.

    Attributes:
        round: The number of the round that they begin.
        lost: The members that died: [{"member": 2, "signal": 9}].
        joined: The members of the round, which are all new.
        left: The members of the last round that were not lost.
        noticed: When the death was noticed, as Unix time.
        interrupted: When training stopped, as Unix time: before `noticed` if rounds since then
            ended before their processes had come to where training stopped.
        writers: The members of the last round that handed over their state.
        state: The folder with that state; None if nothing was handed over.
    """

    round: int
    lost: list[dict[str, int]]
    joined: list[int]
    left: list[int]
    noticed: float
    interrupted: float
    writers: list[int] = dataclasses.field(default_factory=list)
    state: Path | None = None

    def variables(self) -> dict[str, str]:
        """Return the variables that tell the ranks about it."""
        fields = {name: value for name, value in vars(self).items() if name != "state"}
        state = {} if self.state is None else {HANDOVER: str(self.state)}
        return {ROUND: json.dumps(fields), **state}

    def describe_round(self) -> dict[str, Any]:
        """Return the fields of the record's line "round" that the launcher knows."""
        names = ("round", "lost", "joined", "left", "noticed")
        return {name: getattr(self, name) for name in names}


def find_restart_source(environ: Mapping[str, str] = os.environ) -> RestartSource | None:
    """Return the origin of this process's round; None for one that replaces nobody."""
    if not environ.get(ROUND):
        return None
    state = environ.get(HANDOVER)
    return RestartSource(**json.loads(environ[ROUND]), state=Path(state) if state else None)


class StateFolder:
    """The folder in shared memory for the states of one launch, for its owner alone.

    Args:
        run: The run's folder, with its checkpoints; None if it has none.

    Attributes:
        path: Its path.
        transferred: The folder with the state that was handed over; None if there is none.
        writers: The members that wrote it.
    """

    def __init__(self, run: Path | None) -> None:
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix=f"lockstep-{os.getpid()}-", dir=parent))
        self.transferred: Path | None = None
        self.writers: list[int] = []
        self._run, self._number, self._written = run, 0, self.path / "none"
        self._known, self._fruitless = self._list_states(), 0

    def begin_transfer(self) -> Path:
        """Return a new folder into which survivors write their state."""
        self.discard()
        self._number += 1
        self._written = self.path / f"hand-over-{self._number}"
        self._written.mkdir(mode=0o700)
        return self._written

    def complete_transfer(self, writers: list[int]) -> None:
        """Take what these members have written as the state that was handed over."""
        self.transferred, self.writers = self._written, writers

    def discard(self) -> None:
        """Remove the state that was handed over, once it was read or is given up."""
        shutil.rmtree(self._written, ignore_errors=True)
        self.transferred, self.writers = None, []

    def count_fruitless(self) -> int:
        """Return how often in a row this was called and found no new state to continue from."""
        states = self._list_states()
        is_further = bool(states) and states != self._known
        self._fruitless, self._known = 1 if is_further else self._fruitless + 1, states
        return self._fruitless

    def _list_states(self) -> set[str]:
        """Return the names of the states from which new processes could continue."""
        folders = [] if self._run is None else [self._run / CHECKPOINTS]
        folders += [] if self.transferred is None else [self.transferred]
        return {state.name for folder in folders for state in folder.glob("step-*")}

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
