"""The devices of a rank: the CPU, or an accelerator of any kind that torch supports.

Everything above the backends asks torch through `torch.accelerator` and the module of the device's
type (`torch.cuda`, `torch.xpu`, ...). Other files depend on the kind of accelerator only where its
settings, its backend and its network interface are chosen (`lockstep.launcher`), an installation is
checked (`lockstep.tools.report.checks`), a setting is a device's name
(`lockstep.model.description`), or a fault of torch spares CUDA
(`lockstep.training.optimizer_config`).
"""

from __future__ import annotations

import torch

__all__ = [
    "count_devices",
    "device_names",
    "find_accelerator",
    "is_accelerator",
    "record_event",
    "synchronize",
]

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Kinds without float64, which are used only if the user names them."""


def find_accelerator() -> str | None:
    """Return the type of the accelerator that this process can use, such as "cuda", or None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type in WITHOUT_FLOAT64 or not count_devices(device.type):
        return None
    return device.type


def is_accelerator(device: torch.device) -> bool:
    """Return whether tensors on a device have memory of their own, beside the CPU's."""
    return device.type not in ("cpu", "meta")


def count_devices(kind: str) -> int:
    """Return how many devices of a type this process sees; 0 if torch does not support the type."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return int(module.device_count()) if module.is_available() else 0


def device_names() -> list[str]:
    """Return the name of each accelerator that this process sees, such as "NVIDIA H200"."""
    kind = find_accelerator()
    if kind is None:
        return []
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    return [str(name(index)) for index in range(count_devices(kind))]


def record_event(device: torch.device) -> torch.Event:
    """Return an event after the work that an accelerator's current stream has so far."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work; return at once for the CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
