"""The world of ranks, as one of them sees it.

`init` joins it, `world` and the four numbers describe it, `shutdown` leaves it.
The calls between are `torch.distributed`'s own.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic

from lockstep.errors import RendezvousError, UsageError
from lockstep.launcher import environment, rendezvous
from lockstep.launcher.allocator import keep_freed_memory
from lockstep.launcher.environment import Place
from lockstep.messages import escape_control, say

__all__ = [
    "World",
    "cpu_backend",
    "init",
    "local_rank",
    "local_world_size",
    "rank",
    "shutdown",
    "world",
    "world_size",
]


@dataclass(frozen=True)
class World:
    """A rank's view of its world; `host` is the index of its machine.

    `backend` is what `torch.distributed` was given: "lockstep", "gloo", or for GPUs
    "cpu:gloo,cuda:nccl".
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: int
    device: torch.device
    backend: str


# What is here between init() and shutdown(), and what to undo. A process has one
# default group in torch, so it has one world here.
_current: World | None = None
_asked: tuple[object, ...] = ()
_borrowed: list[str] = []  # environment variables that init() set


def init(
    *,
    backend: str | None = None,
    timeout: float = 300.0,
    threads: int = 1,
    device: str | torch.device | None = None,
) -> World:
    """Join the world that the environment describes, and return this rank's view of it.

    Alone (plain `python`) it makes a world of one, in which the collectives of
    `torch.distributed` work too. A default group that exists already is adopted.
    Called again with the same arguments it returns the same world.

    `backend` None chooses NCCL for GPU tensors with the CPU backend beside it.
    `timeout` in seconds is the deadline for finding the other ranks and for every
    collective. `threads` sets torch's intra-op threads, which are part of the
    promise of equal bits, as are deterministic algorithms, switched on here.
    `device` None is this rank's GPU (by local rank) where there is one.

    Raises PlaceError where the environment contradicts itself, UsageError for a
    second call that asks for something else, RendezvousError where the other
    ranks did not come before the deadline.
    """
    global _current, _asked
    asked = (backend, timeout, threads, None if device is None else str(device))
    if _current is not None and dist.is_initialized():
        if asked != _asked:
            raise UsageError(
                f"lockstep.init() was called before with other arguments: {_spoken(_asked)}, now "
                f"{_spoken(asked)}; call it once, or lockstep.shutdown() between"
            )
        return _current
    place = environment.place(os.environ)
    chosen = _device(device, place)
    _settle(threads, chosen)
    if not dist.is_initialized():
        _native()  # its name must be known to torch before it is asked for
        try:
            _join(place, backend or default_backend(chosen, place), timeout, chosen)
        except BaseException:
            _give_back()
            raise
    _current, _asked = _describe(place, chosen), asked
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    return _current


def cpu_backend(one_host: bool = True) -> str:
    """Return the name of the backend for CPU tensors, where the user names none.

    The environment variable LOCKSTEP_BACKEND names one; else it is "lockstep" where
    its extension is built and all ranks are on one host, and "gloo" elsewhere.
    """
    asked = os.environ.get("LOCKSTEP_BACKEND")
    if asked:
        return asked
    return "lockstep" if one_host and _native().available() else "gloo"


def default_backend(device: torch.device, place: Place) -> str:
    """Return what `torch.distributed` is given for tensors on `device` and on the CPU."""
    if device.type == "cuda":
        # A name with a colon gives torch no default backend for the CPU beside it.
        return "cpu:gloo,cuda:nccl"
    name = cpu_backend(place.local_world_size == place.world_size)
    reason = _native().reason_unavailable()
    if name == "gloo" and reason and place.rank == 0 and place.world_size > 1:
        say(
            "ranks talk through gloo, many times more slowly than through the backend "
            f"'lockstep', which can't be used here; {reason}"
        )
    return name


def _native() -> Any:
    """Return lockstep.comm.backend: by name, because this module lies below it."""
    module = importlib.import_module("lockstep.comm.backend")
    module.register()
    return module


def world() -> World:
    """Return the world that `init` joined; UsageError where there is none."""
    if _current is None or not dist.is_initialized():
        raise UsageError("there is no world yet: call lockstep.init() first")
    return _current


def rank() -> int:
    """Return this process's rank; known from the environment also before `init`."""
    return _numbers().rank


def world_size() -> int:
    """Return the number of ranks; known from the environment also before `init`."""
    return _numbers().world_size


def local_rank() -> int:
    """Return this process's rank on its host; known also before `init`."""
    return _numbers().local_rank


def local_world_size() -> int:
    """Return the number of ranks on this host; known also before `init`."""
    return _numbers().local_world_size


def shutdown() -> None:
    """Leave the world; harmless when there is none. Done at exit by itself."""
    global _current, _asked
    atexit.unregister(shutdown)
    if _current is not None and dist.is_initialized():
        dist.destroy_process_group()
    _current, _asked = None, ()
    _give_back()


def _stay_in_parent() -> None:
    """Keep a forked child that exits from leaving the world in its parent's name."""
    atexit.unregister(shutdown)
    atexit.unregister(rendezvous.leave)


os.register_at_fork(after_in_child=_stay_in_parent)


def _borrow(variable: str, value: str) -> None:
    """Set an environment variable until shutdown(), unless the user has set it."""
    if variable not in os.environ:
        os.environ[variable] = value
        _borrowed.append(variable)


def _give_back() -> None:
    """Unset the environment variables that init() set."""
    while _borrowed:
        os.environ.pop(_borrowed.pop(), None)


def _numbers() -> World | Place:
    if _current is not None and dist.is_initialized():
        return _current
    return environment.place(os.environ)


def _spoken(asked: tuple[object, ...]) -> str:
    names = ("backend", "timeout", "threads", "device")
    return ", ".join(f"{name}={value}" for name, value in zip(names, asked, strict=True))


def _device(asked: str | torch.device | None, place: Place) -> torch.device:
    wanted = None if asked is None else torch.device(asked)
    if wanted is not None and (wanted.type != "cuda" or wanted.index is not None):
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None and not count:
        return torch.device("cpu")
    if place.local_rank >= count:
        raise UsageError(
            f"rank {place.rank} has local rank {place.local_rank}, but this host has {count} "
            f"GPU(s): start at most {count} ranks here, or ask for init(device='cpu')"
        )
    return torch.device("cuda", place.local_rank)


def _settle(threads: int, device: torch.device) -> None:
    """Set what bits depend on, before the first operation."""
    if threads < 1:
        raise UsageError(f"init(threads={threads}): a rank computes with at least one thread")
    keep_freed_memory()
    torch.set_num_threads(threads)
    if device.type == "cuda":
        # cuBLAS is deterministic only with a workspace of its own, chosen before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    # Not use_deterministic_algorithms(True): that imports torch's compiler, in 1.4 seconds.
    # The compiler reads the variable when it is imported, and its own setting afterwards.
    torch.set_deterministic_debug_mode("error")
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:
        _borrow("TORCHINDUCTOR_DETERMINISTIC", "1")
    # Deterministic algorithms fill every empty tensor: 68 us for 4 MiB, for no bit of a result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _join(place: Place, backend: str, timeout: float, device: torch.device) -> None:
    if timeout <= 0:
        raise UsageError(f"init(timeout={timeout}): a deadline is a positive number of seconds")
    _check_backend(backend)
    if backend == "lockstep":
        # DistributedDataParallel then has its buckets in shared memory, where they are added.
        _borrow("DDP_DISABLE_COMM_MEM", "0")
    began = time.monotonic()
    store = rendezvous.meet(place, timeout)
    _choose_interface(place)
    atexit.unregister(rendezvous.leave)
    atexit.register(rendezvous.leave)  # called after shutdown(), which is registered later
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        said = escape_control(str(error).partition("\n")[0])
        seconds = round(time.monotonic() - began)
        raise RendezvousError(
            f"rank {place.rank}: all {place.world_size} ranks came, but {backend} could not "
            f"connect them{f' in {seconds} s' if seconds else ''}: {said}"
        ) from error


def _check_backend(backend: str) -> None:
    """Refuse a backend that is not here, before the other ranks are waited for."""
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            here = [each for each in dist.Backend.backend_list if dist.is_backend_available(each)]
            raise UsageError(
                f"init(backend={backend!r}): torch has no backend {name!r} here; there are "
                f"{', '.join(each for each in here if each != 'undefined')}"
            )


def _choose_interface(place: Place) -> None:
    """Keep Gloo on the right interface: by itself it takes that of the host's name."""
    name = rendezvous.interface(place)
    if name is not None:
        _borrow("GLOO_SOCKET_IFNAME", name)


def _describe(place: Place, device: torch.device) -> World:
    """Describe the default group; where it was made by others, it is right and not `place`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    same = (rank, size) == (place.rank, place.world_size)
    return World(
        rank=rank,
        world_size=size,
        local_rank=place.local_rank if same else rank,
        local_world_size=place.local_world_size if same else size,
        host=place.host if same else 0,
        device=device,
        backend=_backend_name(),
    )


def _backend_name() -> str:
    """Return one name where all devices share a backend: torch says "cpu:gloo,cuda:gloo"."""
    config = str(dist.get_backend_config())
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config
