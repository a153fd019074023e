"""Which device a rank computes on, the backend for its tensors, and its deterministic settings.

    init(device=...)    used
    None                the accelerator with the rank's local rank; the CPU if there is none
    "cuda"              the same, of this type
    "cuda:0"            this one, which several ranks may share
    "cpu"               the CPU

A type of accelerator has settings of its own that decide whether its kernels are deterministic.
Those that torch.use_deterministic_algorithms does not cover are here.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.comm.device_ipc import BY_DEVICE_TYPE, identify_device
from lockstep.devices import count_devices, find_accelerator, is_accelerator
from lockstep.formatting import format_quantity
from lockstep.kernel.errors import UsageError
from lockstep.launcher.environment import RankInfo

__all__ = [
    "choose_device",
    "find_bound_device",
    "find_device_backend",
    "is_shared_by_ranks",
    "may_be_shared",
    "require_deterministic",
    "select_device",
]

DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic."""


def choose_device(requested: str | torch.device | None, rank_info: RankInfo) -> torch.device:
    """Return this rank's device: the requested one, the one with its local rank, or the CPU.

    Raises:
        UsageError: This process sees no such device.
    """
    try:
        wanted = None if requested is None else torch.device(requested)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(
            f"init(device={requested!r}): expected a device of torch, such as 'cpu' or 'cuda:0'"
        ) from None
    kind = find_accelerator() if wanted is None else wanted.type
    if kind is None or kind == "cpu":
        return torch.device("cpu")
    count = count_devices(kind)
    if not count:
        raise UsageError(
            f"init(device='{wanted}'): torch {torch.__version__} finds no such device on this "
            "host; `lockstep doctor` says what it finds, and init(device='cpu') trains without"
        )
    devices = format_quantity(count, f"{kind} device")
    if wanted is not None and wanted.index is not None:
        if wanted.index >= count:
            raise UsageError(
                f"init(device='{wanted}'): this process sees {devices}, numbered from 0"
            )
        return wanted
    if rank_info.local_rank >= count:
        raise UsageError(
            f"rank {rank_info.rank} has local rank {rank_info.local_rank}, but this process sees "
            f"{devices}: start at most {format_quantity(count, 'rank')} on this host; if the "
            f"launcher gives each rank a device of its own, call init(device='{kind}:0'); to "
            "train without, call init(device='cpu')"
        )
    return torch.device(kind, rank_info.local_rank)


def find_device_backend(device: torch.device) -> str:
    """Return the backend of `torch.distributed` for tensors on a device.

    Raises:
        UsageError: torch has none.
    """
    name = dist.Backend.default_device_backend_map.get(device.type)
    if name is not None and dist.is_backend_available(name):
        return name
    if device.type in dist.Backend.backend_capability["gloo"]:
        return "gloo"
    raise UsageError(
        f"torch.distributed has no backend for tensors on {device.type}: install the package that "
        "provides one, name it with init(backend=...), or call init(device='cpu')"
    )


def may_be_shared(device: torch.device, rank_info: RankInfo) -> bool:
    """Return whether several ranks could compute on a device, over Gloo; the same on all ranks."""
    return (
        is_accelerator(device)
        and rank_info.world_size > 1
        and device.type in BY_DEVICE_TYPE
        and device.type in dist.Backend.backend_capability["gloo"]
    )


def is_shared_by_ranks(device: torch.device, store: Store, rank_info: RankInfo) -> bool:
    """Return whether any two ranks compute on the same device; every rank must call this.

    Each rank sees its devices under numbers of its own if its launcher hides the others.
    """
    store.set(f"lockstep/device/{rank_info.rank}", identify_device(device))
    ranks = range(rank_info.world_size)
    return len({store.get(f"lockstep/device/{rank}") for rank in ranks}) < rank_info.world_size


def find_bound_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the device to which the default group is bound, so that it connects at once.

    None on the CPU and for Gloo: torch 2.13 creates the subgroups of a bound group by splitting
    it, for which its Gloo lacks a method.

    Args:
        device: The device of this rank.
        backend: A backend, or one per type of device such as "cpu:gloo,cuda:nccl".
    """
    by_kind = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    if not is_accelerator(device) or by_kind.get(device.type, backend) == "gloo":
        return None
    return device


def select_device(device: torch.device) -> None:
    """Make a device the current one of its type, with deterministic kernels.

    Raises:
        UsageError: A setting of the user makes kernels nondeterministic.
    """
    if not is_accelerator(device):
        return
    if device.type == "cuda":
        # Set before the first use of cuBLAS, and never unset: torch refuses to call it without.
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES[0])
        if workspace not in DETERMINISTIC_WORKSPACES:
            raise UsageError(
                f"CUBLAS_WORKSPACE_CONFIG={workspace}: cuBLAS is deterministic only with "
                f"{' or '.join(DETERMINISTIC_WORKSPACES)}; unset the variable, and the first one "
                "is used"
            )
        torch.backends.cudnn.benchmark = False
    torch.accelerator.set_device_index(device)


def require_deterministic(device: torch.device) -> None:
    """Raise UsageError if the script has switched on a choice of kernels by their speed."""
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        raise UsageError(
            "torch.backends.cudnn.benchmark is on: cuDNN then chooses kernels by timing them, and "
            "the bits differ from run to run; remove the line that sets it (ls.init() sets False)"
        )
