"""The origin of a round: from what its new processes continue, and whom they replace.

    launcher                                processes of the next round
    runs/NAME/                              LOCKSTEP_RUN        as in every round
        checkpoints/step-30/
    /dev/shm/lockstep-7345-a1b2/
        hand-over-2/step-41/                LOCKSTEP_HANDOVER   the state that survivors wrote
                                            LOCKSTEP_ROUND      who died, and who wrote

They continue from the state that was handed over, or else from the newest checkpoint, or else from
the beginning. The folder in shared memory belongs to the launch: its launcher removes it, or the
fork server if the launcher was killed, or the next launch if both were.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launcher.environment import HANDOVER, ROUND

__all__ = ["RestartSource", "find_restart_source"]


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
