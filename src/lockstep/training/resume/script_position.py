"""The position of a script: the calls that it has completed, and the state of its training.

    resumed script │ calls in the log are answered     │ the state is restored │ calls have effects

A position is loaded from a checkpoint, or received from another rank, and restored at the call
where the interrupted script was.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from lockstep.checkpoint.folder import refusing_misfits
from lockstep.checkpoint.save_schedule import Stateful
from lockstep.launcher.rank_process import report_to_launcher
from lockstep.messages import log
from lockstep.training.resume.compatibility import (
    describe_training,
    list_changes,
    require_same_training,
)
from lockstep.training.resume.run_checkpoints import RunCheckpoints, restore_objects
from lockstep.training.resume.script_log import OpenEpoch, ScriptLog
from lockstep.training.state import TrainingState

__all__ = ["ScriptPosition"]

TENSORS = ("model", "ema", "buffers")
"""The entries of a state whose tensors are copied into those of the training."""


class ScriptPosition:
    """The position of the script of one trainer.

    Args:
        state: The state of the training.
        settings: The description of model, optimizer and arguments.
        checkpoints: The checkpoints of the run; None for a trainer without them.
        stateful: The objects that are registered with the trainer, by name.

    Attributes:
        log: The calls of the script.
        has_joined: Whether this process has joined a running elastic run.
        resumed_from: The number of steps that the training was resumed after; None if it was not.
        saved: The steps and the size of the log in the latest checkpoint.
        stateful: The objects that are registered with the trainer, by name.
        round_line: The fields of the record's line of a round, which is written after the state is
            restored.
        is_state_transferred: Whether another process of the run has handed over the state.
    """

    def __init__(
        self,
        state: TrainingState,
        settings: Mapping[str, str],
        checkpoints: RunCheckpoints | None,
        stateful: Mapping[str, Stateful],
    ) -> None:
        self.state = state
        self._settings = settings
        self._checkpoints = checkpoints
        self.log = ScriptLog()
        self.has_joined = False
        self.is_state_transferred = False
        self.resumed_from: int | None = None
        self.saved = (-1, -1)
        self.stateful = stateful
        self.round_line: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None  # until the script reaches it
        # Of a finished run, until the script trains on or ends.
        self._ended: dict[str, Any] | None = None

    @cached_property
    def training(self) -> dict[str, Any]:
        """The description of the training, which a checkpoint must match."""
        return describe_training(self._settings)

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return self.state.position.steps

    @property
    def current(self) -> tuple[int, int]:
        """The steps and the size of the log now."""
        return self.steps, self.log.size

    @property
    def is_replaying(self) -> bool:
        """Whether the script has not yet reached the position of the interrupted one."""
        return self._restored is not None

    def is_inside(self, epoch: OpenEpoch | None) -> bool:
        """Return whether the script is in the body of a loop over batches other than `epoch`."""
        return self.log.is_inside_epoch if epoch is None else not self.log.is_outermost(epoch)

    def is_safe(self, epoch: OpenEpoch | None) -> bool:
        """Return whether another process could continue the script from here."""
        return not (self.is_replaying or self.is_inside(epoch))

    def load(self, state: dict[str, Any]) -> list[str]:
        """Load a checkpoint's state and its log of calls; return the differences as sentences."""
        here = self.training
        self.state.require_same_bits(state, "checkpoint")
        require_same_training(state, here)
        with refusing_misfits("the state of the checkpoint"):
            self.log.load_state_dict(state["script"])
            # A script may add parameter groups before a later epoch, which it has not reached yet.
            if not (self.log.is_replaying and self.state.find_other_parameters(state)):
                self.state.load_local(state)
        self._restored = state
        return list_changes(state, here, self.state.optimization.describe())

    def continue_from_here(self) -> None:
        """Restore the state, if the script has repeated every call of the interrupted one."""
        if not self.log.is_replaying:
            self.restore()

    def train_longer(self) -> None:
        """Continue here if the script trains on where the interrupted run had come to its end."""
        skipped = self.log.skip_end() if self.is_replaying else ""
        if skipped:
            self.restore()
            self._ended = None  # no code of the script has run since
        elif self._restore_end():
            skipped = "ended"
        if skipped and self.state.parallel.rank == 0:
            log(f"the script trains longer than the interrupted run, which {skipped} here")

    def end(self) -> bool:
        """Restore the state of the end of the interrupted run if the script ends here, too.

        Returns:
            Whether it was restored.
        """
        is_saved = self.saved == self.current
        if not self._restore_end():
            return False
        self.log.record_end(self.steps)
        if is_saved:
            self.saved = self.current
        if self.state.parallel.rank == 0:
            log(
                "the interrupted run had ended: its last state is restored, without what the "
                "script has changed again after its last loop"
            )
        return True

    def _restore_end(self) -> bool:
        """Undo what code after the last call, which the state contains, has changed again."""
        state = self._ended
        self._ended = None
        if state is not None:
            self._load(state)
        return state is not None

    def note_answer(self, steps: int) -> None:
        """Note that a call was answered, after which `steps` steps were finished."""
        self.state.position.steps = steps
        self.continue_from_here()

    def restore(self) -> None:
        """Restore the loaded state, if there is one, and write the line of a round."""
        state = self._restored
        self._restored = None
        if state is not None:
            if self.log.has_end:
                # Tensors are copied when they are loaded; objects may use their state itself.
                tensors = {name: state[name] for name in state if name in TENSORS}
                self._ended = copy.deepcopy({k: v for k, v in state.items() if k not in tensors})
                self._ended |= tensors
            self._load(state)
            if self._checkpoints is not None:
                self._checkpoints.note_restored(state["steps"])
            if not state.get("is_in_memory"):
                self.saved = state["steps"], self.log.size
            if self.has_joined:
                self.state.position.begin_round()
        if self.round_line:
            line = self.round_line
            self.round_line = {}
            self.state.history.write("round", **line, continued=time.time())
            if state is not None or not self.is_state_transferred:
                report_to_launcher({"kind": "resumed"})

    def _load(self, state: Mapping[str, Any]) -> None:
        with refusing_misfits("the state of the checkpoint"):
            self.state.load_local(state)
            self.state.load_settings(state)
            self.state.load_position(state)
        restore_objects(self.stateful, state, self.state.parallel.device)

    def describe(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks: the positions of training and script."""
        position = self.state.position_state()
        position |= {"script": self.log.state_dict(position["steps"]), **self.training}
        return position | {"trainer": self.state.position.attempt.trainer, "time": time.time()}
