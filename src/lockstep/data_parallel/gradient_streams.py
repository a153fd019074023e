"""The streams of an accelerator in which gradients arrive.

Autograd runs the hooks of a parameter in the stream in which the parameter was first used, and
lets the stream of the caller wait for all others only at the end of the pass. A bucket that is sent
before that may have gradients of several streams.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lockstep.devices import is_accelerator

__all__ = ["GradientStreams"]


class GradientStreams:
    """The streams of backward passes; does nothing for gradients on the CPU.

    Waiting for a stream of an earlier pass costs nothing, so none is forgotten.

    Args:
        device: The device of the gradients; None if there are none.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and is_accelerator(device) else None
        self._streams: dict[int, torch.Stream] = {}

    def note(self) -> None:
        """Note the current stream, in which a gradient has arrived."""
        if self._device is not None:
            stream = torch.accelerator.current_stream(self._device)
            self._streams[stream.stream_id] = stream

    def join(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Let the current stream wait for the noted ones, and keep gradients until it is done."""
        if self._device is None:
            return
        current = torch.accelerator.current_stream(self._device)
        others = [stream for number, stream in self._streams.items() if number != current.stream_id]
        for stream in others:
            current.wait_stream(stream)
        for gradient in gradients if others else ():
            if gradient is not None:
                gradient.record_stream(current)
