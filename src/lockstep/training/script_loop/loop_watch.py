"""State that a script's loop keeps beside the model, compared around the body of each micro-batch.

    a generator of its own        numbers follow those of this rank's earlier micro-batches
    another module, such as a     its buffers get the values of this rank's micro-batches only:
    loss with moving centres      nothing merges them over the ranks

Both depend on the number of ranks, and no other check sees them: the audit repeats the call of the
model only. So in its first steps, the body of the loop is left with what its names refer to as it
was entered, or the step is refused on every rank. Numbers and tensors in the variables of the loop
may change, since most of them have no effect on the training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.checksum import checksum
from lockstep.data.generators import generator_state, is_private_generator
from lockstep.kernel.step_context import StepContext
from lockstep.model.call_site import PACKAGES, is_code_of_user
from lockstep.model.held_parameters import HOLDERS
from lockstep.model.reachable_objects import Holder, find_reachable_from_frame
from lockstep.sharded_tensors import local_part

__all__ = ["LoopWatch", "find_in_loop", "hash_tensors", "watch_loop"]

STEPS = 3
"""The number of steps of this process that are watched."""

MOST = 2000
"""The number of objects that are looked at; those that are nearest to the loop."""

SAMPLED = 1024
"""The number of elements of a tensor that are compared."""


class LoopWatch:
    """Compares generators and modules of a loop before and after the body of a micro-batch.

    Args:
        step: The step, which does nothing here if it is not one of the first of this process.
    """

    def __init__(self, step: StepContext) -> None:
        self._step = step
        self._is_on = step.attempt.number < STEPS
        self._is_first = True
        self._generators: list[Holder] = []
        self._modules: list[Holder] = []
        self._before: list[Any] | None = None

    def begin(self) -> None:
        """Note the state at the beginning of a micro-batch, before its data are yielded."""
        if self._is_on and self._is_first:
            self._find(sys._getframe(1))
        self._is_first = False
        self._before = self._read() if self._is_on else None

    def end(self) -> None:
        """Refuse the step if the state has changed."""
        before = self._before
        self._before = None
        if before is None:
            return
        holders = [*self._generators, *self._modules]
        for holder, one, other in zip(holders, before, self._read(), strict=True):
            if one != other:
                self._step.refuse(_explain(holder))
                return

    def _find(self, frame: FrameType | None) -> None:
        """Find the generators, and the modules of no training, that the loop refers to."""
        reached = find_in_loop(frame, self._step)
        self._generators = [one for one in reached if is_private_generator(one.value)]
        # A weak proxy of a module is none itself; Lightning keeps one of a part of the model.
        self._modules = [one for one in reached if issubclass(type(one.value), nn.Module)]

    def _read(self) -> list[Any]:
        states = [repr(generator_state(holder.value)) for holder in self._generators]
        return [*states, *(hash_tensors(holder.value) for holder in self._modules)]


def watch_loop(step: StepContext, items: Any) -> Iterator[Any]:
    """Return the generator of the micro-batches of a step, watched in the first steps."""
    if step.attempt.number < STEPS:
        items = _watch(LoopWatch(step), items)
    generator: Iterator[Any] = items
    return generator


def _watch(watch: LoopWatch, items: Any) -> Iterator[Any]:
    with closing(items):  # at once after `break`, before the step is undone
        for item in items:
            watch.begin()
            yield item
            watch.end()


def find_in_loop(
    frame: FrameType | None, step: StepContext, skip: Iterable[Any] = ()
) -> list[Holder]:
    """Return the objects of no training that the innermost frame of the script refers to.

    Args:
        frame: A frame below it.
        step: The step.
        skip: Other objects that are left out.
    """
    layout: Any = step.parallel
    known = [part for holder in HOLDERS for part in holder.list_modules()]
    known += [part for root in layout.loss_module().values() for part in root.modules()]
    caller = _find_script_frame(frame)
    return [] if caller is None else find_reachable_from_frame(caller, [*known, *skip], MOST)


def _find_script_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the script itself, which may loop through a package."""
    while frame is not None:
        code = frame.f_code
        if is_code_of_user(code) and not any(package in code.co_filename for package in PACKAGES):
            return frame
        frame = frame.f_back
    return None


def hash_tensors(module: nn.Module) -> dict[str, int]:
    """Return hashes of samples of a module's own buffers and parameters, by name."""
    tensors = {**module._buffers, **module._parameters}
    return {
        name: checksum(local_part(tensor).detach().reshape(-1)[:SAMPLED])
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and not (is_lazy(tensor) or tensor.is_meta)
    }


def _explain(holder: Holder) -> str:
    """Return the sentence about a generator or a module that has changed."""
    if isinstance(holder.value, nn.Module):
        return (
            f"the loop changes buffers or parameters of {holder.path} "
            f"({type(holder.value).__name__}) while micro-batches are computed, and each rank "
            "computes others: make the module a part of the model, with a rule in "
            "lockstep_buffer_rules for what forward writes; or change it after the step, or call "
            "its eval()"
        )
    return (
        f"the loop draws from {holder.path} ({type(holder.value).__name__}) while micro-batches "
        "are computed, and each rank computes others: draw from the global generators of torch, "
        "Python or numpy, which are seeded for every micro-batch"
    )
