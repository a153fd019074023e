"""The buffers of a stage, of which several micro-batches are in flight."""

from __future__ import annotations

import torch

from lockstep.kernel.buffers import Buffers

__all__ = ["PausedBuffers", "StageBuffers"]

PausedBuffers = list[tuple[torch.Tensor | None, torch.Tensor | None]]
"""For each buffer, its value in a paused micro-batch, and the copy that was installed."""


class StageBuffers(Buffers):
    """The buffers of one stage, which can be put aside."""

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
