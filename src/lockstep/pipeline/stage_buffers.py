"""The buffers of a stage that takes turns with other stages and micro-batches of its rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lockstep.kernel.buffers import Buffers
from lockstep.model.deferred_init import make_released

__all__ = ["PausedBuffers", "StageBuffers"]

PausedBuffers = list[tuple[torch.Tensor | None, torch.Tensor | None]]
"""For each buffer, its value in a paused micro-batch, and the copy that was installed."""


class StageBuffers(Buffers):
    """The buffers of one stage, which can be put aside."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self._hidden: list[torch.Tensor] = []

    def pause(self) -> PausedBuffers:
        """Remove and return the buffers of the current micro-batch, so that another can start."""
        paused: PausedBuffers = []
        for slot in self.slots:
            module, name = slot.registrations[0]
            paused.append((module._buffers[name], slot.copy))
            slot.copy = None
        self.restore()
        return paused

    def resume(self, paused: PausedBuffers) -> None:
        """Install the buffers that `pause` returned."""
        for slot, (tensor, copy) in zip(self.slots, paused, strict=True):
            slot.copy = copy
            slot.install(tensor)

    def hide(self) -> None:
        """Install tensors that blocks of another stage cannot read, until the next micro-batch."""
        if not self._hidden:
            self._hidden = [make_released(slot.tensor, slot.name) for slot in self.slots]
        for slot, hidden in zip(self.slots, self._hidden, strict=True):
            slot.install(hidden)
