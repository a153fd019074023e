"""Hand-over: the surviving ranks write their state for the processes that replace them.

    script                          safe point     a peer is lost in the step; the launcher orders
    for batch in trainer.batches:   <─ position M
        meter.start()                              to undo:    writes the state at M, at once
        trainer.step(batch)
        print(...)                                 to commit:  continues to the end of the body
                                    <─ M + 1       ... and writes the state here

It makes no collective call, since peers may be gone. Undoing a step also undoes what the loop body
has done before it, because the new processes execute the whole body. A rank therefore hands over
only if the objects that the script can change are as they were at the safe point.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.folder import find_checkpoints, read_checkpoint
from lockstep.checkpoint.save_schedule import Stateful
from lockstep.checkpoint.shards import Rows
from lockstep.checkpoint.writer import CheckpointWriter
from lockstep.elastic.membership import Membership
from lockstep.elastic.restart_source import RestartSource
from lockstep.kernel.errors import FileError
from lockstep.model.generator_states import global_states
from lockstep.training.resume.run_checkpoints import RunCheckpoints, collect_objects
from lockstep.training.resume.state_description import describe_objects
from lockstep.training.services import Services
from lockstep.training.state import TrainingState

__all__ = ["LastSafeState", "read_newest_state"]

_known: weakref.WeakSet[LastSafeState] = weakref.WeakSet()
_made = 0


class LastSafeState:
    """The hand-over of a trainer in an elastic run: notes safe points, and writes the state.

    Args:
        member: This process in the run.
        state: The state of the trainer.
        stateful: The objects that are registered with the trainer, by name.
        run: The trainer's run, by which it is found among the registered objects of others.
    """

    def __init__(
        self,
        member: Membership,
        state: TrainingState,
        stateful: Mapping[str, Stateful],
        run: object,
    ) -> None:
        global _made
        self.member = member
        self._state = state
        self._device = state.parallel.device
        self._run = weakref.ref(run)
        self._stateful = dict(stateful)
        given = stateful.values()
        self._registered = [one.engine.run for one in given if isinstance(one, Services)]
        self._watched = [one for one in given if not isinstance(one, Services)]
        self._operation = -1
        self._time = 0.0  # of the latest safe point, in Unix time
        self._generators: dict[str, Any] = {}
        self._objects = ""
        _made += 1
        _known.add(self)

    def note_safe_point(self) -> None:
        """Note that the script can be continued from here."""
        self._operation = self.member.operation
        self._time = time.time()
        self._generators = global_states(self._device)
        self._objects = self._describe_objects()

    @property
    def is_outdated(self) -> bool:
        """Whether the ranks have completed an operation since the latest safe point."""
        return self.member.operation != self._operation

    @property
    def is_possible(self) -> bool:
        """Whether this rank still has the state of the latest safe point, and it is complete."""
        return (
            self._is_alone()
            and not self.is_outdated
            and self._describe_objects() == self._objects
            and self._state.is_whole()
        )

    def write(
        self, folder: Path, common: Mapping[str, Any], part: tuple[int, int] | None, is_now: bool
    ) -> None:
        """Write this rank's part of the state into a folder.

        Args:
            folder: The folder, in which a folder "step-N" is created.
            common: The state that is equal on all ranks, and the script log.
            part: The number of this rank's part, and the number of parts; None: nothing is written.
            is_now: Whether the script is at a safe point now; False: it has passed the latest one.

        Raises:
            FileError: The state could not be written.
        """
        if part is None:
            return
        state = self._state.local_state()
        if part[0] == 0:
            state |= {
                "generators": global_states(self._device) if is_now else self._generators,
                "stateful": collect_objects(self._stateful),
                **common,
                "time": time.time() if is_now else self._time,
            }
        writer = CheckpointWriter(folder, keep=1, has_digests=False)
        writer.save(state, common["steps"], 0, part)
        writer.wait()
        if writer.latest is not None and writer.latest.failure:
            raise FileError(f"{writer.latest.path}: {writer.latest.failure}")

    def _is_alone(self) -> bool:
        """Return whether this trainer, with the trainers registered with it, is the only one.

        Calls of any other trainer would have to be answered in the new processes, too.
        """
        registered = {id(run) for run in self._registered}
        others = [other for other in _known if other is not self]
        is_complete = all(id(other._run()) in registered for other in others)
        # The calls of a trainer that the script has deleted cannot be answered.
        is_known = len(others) + 1 == _made
        has_parts = any(known._state.parallel.has_parts for known in _known)
        return is_complete and is_known and not (registered and has_parts)

    def _describe_objects(self) -> str:
        """Return a text that changes if the script changes a registered object or the model."""
        return describe_objects(self._state, self._watched)


def read_newest_state(
    origin: RestartSource, checkpoints: RunCheckpoints | None, trainer: int, rows: Rows
) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the state that a trainer of a new round continues from; called on every rank.

    Args:
        origin: The origin of the round.
        checkpoints: The checkpoints of the trainer; None for a trainer without them.
        trainer: The trainer's number in the program.
        rows: The rows of its sharded parameters.

    Returns:
        The path of the state, and the state. Its entry "is_in_memory" is true if it is not one of
        the trainer's checkpoints. (None, None) if the trainer starts from the beginning, or is
        registered with the trainer that was handed over.
    """
    if origin.state is not None:
        states = find_checkpoints(origin.state)
        if not states:
            raise FileError(f"the state that was handed over is missing in {origin.state}")
        path = states[0]
        state = read_checkpoint(states[0], rows)
        if state["trainer"] != trainer:
            return None, None
    else:
        newest = None if checkpoints is None else checkpoints.find_newest()
        if newest is None:
            return None, None
        path = newest
        state = read_checkpoint(newest, rows)
    is_in_memory = checkpoints is None or path.parent != checkpoints.folder
    if checkpoints is not None:
        checkpoints.set_aside_newer(path, state["steps"] + is_in_memory)
    return path, state | {"is_in_memory": is_in_memory}
