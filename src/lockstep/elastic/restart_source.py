"""The origin of a round: from what its new processes continue, and whom they replace.

    launcher                                processes of the next round
    runs/NAME/                              LOCKSTEP_RUN        as in every round
        checkpoints/step-30/
                                            LOCKSTEP_ROUND      who died

They continue from the newest checkpoint, or else from the beginning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.launcher.environment import ROUND

__all__ = ["RestartSource", "find_restart_source"]


@dataclass(frozen=True)
class RestartSource:
    """Why new processes began a round.

    Attributes:
        round: The number of the round that they begin.
        lost: The members that died: [{"member": 2, "signal": 9}].
        joined: The members of the round, which are all new.
        left: The members of the last round that were not lost.
        noticed: When the death was noticed, as Unix time.
        interrupted: When training stopped, as Unix time: before `noticed` if rounds since then
            ended before their processes had come to where training stopped.
    """

    round: int
    lost: list[dict[str, int]]
    joined: list[int]
    left: list[int]
    noticed: float
    interrupted: float

    def variables(self) -> dict[str, str]:
        """Return the variables that tell the ranks about it."""
        return {ROUND: json.dumps(vars(self))}

    def describe_round(self) -> dict[str, Any]:
        """Return the fields of the record's line "round" that the launcher knows."""
        names = ("round", "lost", "joined", "left", "noticed")
        return {name: getattr(self, name) for name in names}


def find_restart_source(environ: Mapping[str, str] = os.environ) -> RestartSource | None:
    """Return the origin of this process's round; None for one that replaces nobody."""
    if not environ.get(ROUND):
        return None
    return RestartSource(**json.loads(environ[ROUND]))
