"""Hooks that give every step the same environment: threads, kernels, no calls between ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.comm.native_module import load_native
from lockstep.kernel.errors import UsageError
from lockstep.kernel.step_context import Position, StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.launcher.device_choice import require_deterministic
from lockstep.messages import log
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.static_shapes import StaticShapes
from lockstep.model.watched_calls import ShardedModel
from lockstep.portable.arithmetic import flushes_subnormals
from lockstep.portable.variables import find_bfloat16_instructions, read_portable_request

__all__ = ["CollectiveCallCheck", "GatheredParameters", "KernelSettings", "PortabilityNotes"]


class KernelSettings(StepHook):
    """The hook that restores the number of threads, and lets graphs depend on shapes only.

    Args:
        model: The model, or its compiled wrapper.
        may_overlap: Whether steps of several models may overlap, and end in any order.
    """

    # Leaving autocast, which the executor does, restores the setting of its cache from before.
    is_outermost = True

    def __init__(self, model: nn.Module, *, may_overlap: bool = False) -> None:
        self._shapes = StaticShapes(model)
        self._may_overlap = may_overlap
        self._flushes = flushes_subnormals()

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None]:
        """Set what kernels depend on."""
        if step.parallel.device.type != "cpu":
            require_deterministic(step.parallel.device)
        if self._flushes not in (None, sys.float_info.min / 2 == 0):
            raise UsageError(
                "torch.set_flush_denormal was called after lockstep.init(), and the threads that "
                "compute keep the setting that they have: call it before"
            )
        if torch.get_num_threads() != step.parallel.threads:
            torch.set_num_threads(step.parallel.threads)
        return _overlap(self._shapes) if self._may_overlap else self._shapes


class PortabilityNotes(StepHook):
    """The hook that says which operators compute other bits on another processor.

    By default, it also says which are slower because they do not.

    Args:
        record: The function that writes a line of the record.
    """

    def __init__(self, record: Callable[..., None]) -> None:
        native = load_native()
        self._take = native.take_unportable
        self._take_bfloat16 = native.take_bfloat16
        self._take()  # what was computed before is no part of the training
        self._take_bfloat16()
        is_default = read_portable_request(os.environ) is None
        self._slower = find_bfloat16_instructions() if is_default else ""
        self._new = set[str]()
        self._said = set[str]()
        self._record = record

    def report(self, committed: CommittedStep) -> None:
        """Say which operators of the step are not portable, each of them once."""
        if self._slower and self._take_bfloat16():
            if committed.step.parallel.rank == 0:
                log(
                    "products in bfloat16 do not use this processor's instructions for them "
                    f"({self._slower}), whose bits are its own: lockstep.init(portable=False) is "
                    "faster"
                )
            self._slower = ""
        self._new.update(self._take())
        if "torch._inductor.graph" in sys.modules:  # which generates code for this processor
            self._new.add("torch.compile")
        if self._new <= self._said:
            return
        operators = sorted(self._new - self._said)
        self._said |= self._new
        message = (
            f"other processors compute other bits of this training, because of "
            f"{', '.join(operators)}"
        )
        if committed.step.parallel.rank == 0:
            log(message)
        self._record(
            "portability", step=committed.step.number, operators=operators, message=message
        )


@dataclass
class Overlap:
    """The steps that overlap, and the context that the first of them has entered."""

    count: int = 0
    entered: ExitStack = field(default_factory=ExitStack)


_overlapping = Overlap()


@contextmanager
def _overlap(context: AbstractContextManager[None]) -> Iterator[None]:
    """Enter a context in the first of several overlapping bodies, and leave it after the last."""
    if not _overlapping.count:
        _overlapping.entered.enter_context(context)
    _overlapping.count += 1
    try:
        yield
    finally:
        _overlapping.count -= 1
        if not _overlapping.count:
            _overlapping.entered.close()


class GatheredParameters(StepHook):
    """The hook that frees the gathered parameters of a sharded model before and after each step.

    Otherwise other hooks, and the script, would find them in place of the shards that are trained.

    Args:
        sharded: The gradients of the model.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None]:
        """Return the context of the micro-batches."""
        return self._sharded.computing()


class CollectiveCallCheck(StepHook):
    """The hook that refuses collective calls of the script while micro-batches are computed.

    Args:
        position: A function that returns the micro-batch and the stage that are being computed.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self._where = ""
        self._guard = CollectiveCallGuard(self._find_place)

    def begin(self, step: StepContext, batch: Any) -> CollectiveCallGuard:
        """Return the context in which such calls raise UsageError."""
        self._where = step.where
        return self._guard

    def _find_place(self) -> str:
        """Return the place of the micro-batch that is being computed; "" between them."""
        position = self._position()
        return "" if position is None else f"{self._where}, micro-batch {position[0]}"
