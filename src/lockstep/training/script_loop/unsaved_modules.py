"""Modules that a loop over batches changes, and that a continued run would begin again.

Such as a mean teacher, an average of the weights, or a target network, that is neither a part of
the model nor in `stateful`. They are compared at the beginnings of the steps of one loop, in the
first steps of a process and in some later ones. What changes between two loops is not compared: a
resumed script changes it again.
"""

from __future__ import annotations

import sys
from weakref import WeakKeyDictionary

from torch import nn

from lockstep.kernel.step_context import StepContext
from lockstep.model.held_parameters import is_trained
from lockstep.model.reachable_objects import find_reachable
from lockstep.training.resume.script_position import ScriptPosition
from lockstep.training.script_loop.loop_watch import STEPS, find_in_loop, hash_tensors

__all__ = ["UnsavedModules"]

PERIOD = 100
"""The steps of which the first two are compared."""


class UnsavedModules:
    """Compares modules of a script between two batches.

    Args:
        position: The position of the script, with its registered objects.
    """

    def __init__(self, position: ScriptPosition) -> None:
        self._position = position
        self._known = WeakKeyDictionary[nn.Module, dict[str, int]]()

    def forget(self) -> None:
        """Begin another loop."""
        self._known.clear()

    def check(self, step: StepContext) -> None:
        """Refuse the step if a module has changed since an earlier step of the same loop."""
        is_first = step.attempt.number < STEPS
        if not (is_first or step.number % PERIOD < 2) or not self._position.log.is_inside_epoch:
            return
        average = self._position.state.optimization.average
        saved = find_reachable([average, *self._position.stateful.values()], "").values()
        skip = [holder.value for holder in saved]
        for holder in find_in_loop(sys._getframe(), step, skip):
            module = holder.value
            if not issubclass(type(module), nn.Module):
                continue
            hashes = hash_tensors(module)
            own = {n: one for n, one in hashes.items() if not is_trained(getattr(module, n))}
            if self._known.setdefault(module, own) != own:
                step.refuse(
                    f"the loop changes {holder.path} ({type(module).__name__}) between two "
                    "batches, and it would begin again when the run is continued: pass the module, "
                    'or what contains it, in stateful={"name": module} of ls.exact or of '
                    "CheckpointConfig"
                )
                return
