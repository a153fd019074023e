"""The world of ranks, as seen from one of them.

`init` joins it; `world`, `rank`, `world_size` and `local_rank` describe it; `shutdown` leaves it.
In between, programs call `torch.distributed`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from lockstep.call_checks import check_call
from lockstep.comm import backend as comm
from lockstep.comm.hosts.connections import close_connections as close_connections_of
from lockstep.comm.hosts.identity import declare_world
from lockstep.comm.ipc_all_reduce import close_all
from lockstep.kernel.errors import RendezvousError, UsageError
from lockstep.launcher.backend_choice import BackendChoice, choose_backend
from lockstep.launcher.device_choice import (
    choose_device,
    find_bound_device,
    find_device_backend,
    is_shared_by_ranks,
    may_be_shared,
    select_device,
)
from lockstep.launcher.environment import JOIN, RankInfo, is_elastic_on_hosts, read_rank_info
from lockstep.launcher.rank_process import report_to_launcher
from lockstep.launcher.rendezvous import choose_interface, find_place, leave_store, wait_for_ranks
from lockstep.launcher.signals import print_stack_on_signal
from lockstep.malloc import keep_freed_memory
from lockstep.messages import escape_control, log
from lockstep.portable.kernels import choose_kernels, restore_kernels
from lockstep.processor_core import divide_cores

__all__ = [
    "World",
    "close_world_connections",
    "cpu_backend",
    "get_timeout",
    "init",
    "leave_round",
    "local_rank",
    "rank",
    "rejoin",
    "shutdown",
    "world",
    "world_size",
]


@dataclass(frozen=True)
class World:
    """A rank's view of its world.

    Attributes:
        rank: Global rank, from 0.
        world_size: Number of ranks.
        local_rank: Rank within its host, from 0.
        local_world_size: Number of ranks on its host.
        host: Index of its host, from 0.
        device: The device that this rank computes on.
        backend: The backend of `torch.distributed`: "lockstep", "gloo", or for
            accelerators two of them, such as "cpu:gloo,cuda:nccl".
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: int
    device: torch.device
    backend: str


JOIN_TIMEOUT = 10.0  # seconds to connect the ranks of a new round, all of which are alive

# The state between init() and shutdown(), and what shutdown() has to undo. A process has one
# default process group in torch, so it has one world here.
_current: World | None = None
_arguments: tuple[object, ...] = ()
_variables_set: list[str] = []  # environment variables that init() has set


@check_call("init")
def init(
    *,
    backend: str | None = None,
    timeout: float = 300.0,
    threads: int | None = None,
    device: str | torch.device | None = None,
    portable: bool | None = None,
) -> World:
    """Join the world that the environment describes, and return this rank's view of it.

    A single process (plain `python`) forms a world of one, in which the collectives of
    `torch.distributed` work too. A default process group that exists already is adopted.
    A second call with the same arguments returns the same world. Deterministic algorithms are
    switched on, because the determinism guarantee needs them.

    Args:
        backend: The backend of `torch.distributed`. None: for ranks on accelerators torch's
            backend for them (NCCL for CUDA), and Gloo for their CPU tensors; for ranks on CPUs
            the backend "lockstep" if it can be used, else Gloo.
        timeout: The seconds to wait for the other ranks, and for each collective.
        threads: The number of torch's intra-op threads of this rank. None: with portable bits,
            which do not depend on it, the cores that this process may use, divided by its ranks
            on this host; otherwise 1, because it must be the same on every rank.
        device: The device of this rank. None: the accelerator with its local rank if there is
            one, else the CPU.
        portable: Whether to compute the same bits on every x86-64 processor with AVX2. True: it
            must be called before torch computes anything. False: with torch's own kernels. None:
            as LOCKSTEP_PORTABLE says (1 or 0), which `lockstep run --portable` and `--no-portable`
            set; without it, portable bits on the CPU where this process can compute them, and
            otherwise a sentence that says why it cannot.

    Raises:
        LaunchEnvironmentError: The environment variables contradict each other.
        UsageError: An earlier call had other arguments, or an argument is not valid.
        RendezvousError: The other ranks did not join before the timeout.
    """
    return _join_world(backend, timeout, threads, device, portable)


def _join_world(
    backend: str | None = None,
    timeout: float = 300.0,
    threads: int | None = None,
    device: str | torch.device | None = None,
    portable: bool | None = None,
    torch_threads: int = 1,
) -> World:
    """As `init`, with the number of threads that torch's own kernels use by default."""
    global _current, _arguments
    arguments = backend, timeout, threads, None if device is None else str(device), portable
    if _current is not None and dist.is_initialized():
        if arguments != _arguments:
            raise UsageError(
                f"lockstep.init() was called before with other arguments: "
                f"{_format_arguments(_arguments)}, now {_format_arguments(arguments)}; call it "
                f"once, or call lockstep.shutdown() in between"
            )
        return _current
    rank_info = read_rank_info(os.environ)
    store = None
    is_joining = bool(os.environ.get(JOIN))
    if not dist.is_initialized():
        comm.register()  # if torch has not called the entry point
        _check_arguments(backend, timeout, threads)
        if not is_joining:
            store = wait_for_ranks(rank_info, timeout)
    if store is not None and rank_info.unknown:
        rank_info = find_place(store, rank_info)
    chosen = choose_device(device, rank_info)
    if not _choose_kernels(portable, chosen, rank_info):
        threads = threads or torch_threads
    _configure_torch(threads or divide_cores(rank_info.local_world_size), chosen)
    if not dist.is_initialized():
        is_shared = False
        if backend is None and store is not None and may_be_shared(chosen, rank_info):
            is_shared = is_shared_by_ranks(chosen, store, rank_info)
        name = backend or default_backend(chosen, rank_info, is_shared)
        if name == "lockstep" and store is not None and not rank_info.is_single_host:
            is_requested = backend is not None or "LOCKSTEP_BACKEND" in os.environ
            name = _agree_on_backend(store, rank_info, is_requested)
        is_single_host = rank_info.is_single_host and not is_elastic_on_hosts(os.environ)
        declare_world(is_single_host)
        try:
            _check_backend(name)  # LOCKSTEP_BACKEND may have named it
            if store is None:
                _wait_alone(rank_info, name, timeout, chosen)
            else:
                _join(rank_info, name, timeout, chosen, store)
        except BaseException:
            _unset_variables()
            raise
    _current = _describe_world(rank_info, chosen, is_joining)
    _arguments = arguments
    if is_elastic_on_hosts(os.environ) and _current.rank == 0 and not is_joining:
        # Those that join later cannot ask the others.
        report_to_launcher({"kind": "backend", "name": _current.backend})
    print_stack_on_signal()
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    return _current


def cpu_backend() -> str:
    """Return the name of the backend for CPU tensors of one host if the user gives none.

    That is the value of the environment variable LOCKSTEP_BACKEND if it is set; otherwise
    "lockstep" if its extension is built, else "gloo".
    """
    return default_backend(torch.device("cpu"), RankInfo())


def default_backend(device: torch.device, rank_info: RankInfo, is_shared: bool = False) -> str:
    """Return the backend of `torch.distributed` for tensors on `device` and on the CPU.

    `is_shared` says whether several ranks compute on one device. For ranks on several hosts
    "lockstep" is preliminary: see `_agree_on_backend`.
    """
    choose = functools.partial(
        choose_backend,
        kind=device.type,
        device_backend=find_device_backend(device),
        is_shared=is_shared,
        is_single_host=rank_info.is_single_host,
        requested=os.environ.get("LOCKSTEP_BACKEND"),
    )
    choice = choose(unavailable=None)
    if choice.name != comm.NAME or not rank_info.is_single_host:
        if rank_info.rank == 0:
            _explain(choice)
        return choice.name
    comm.register()
    reason = comm.reason_unavailable()
    choice = choose(unavailable=None if reason is None else f"here: {reason}")
    if rank_info.rank == 0 and rank_info.world_size > 1 and JOIN not in os.environ:
        _explain(choice)
    return choice.name


def _agree_on_backend(store: Store, rank_info: RankInfo, is_requested: bool) -> str:
    """Return the backend of ranks on several hosts: Gloo, if "lockstep" is missing on any host.

    Raises:
        RendezvousError: It is missing, and the user has requested it; raised on every rank.
    """
    missing = "lockstep/backend/missing"
    chosen = "lockstep/backend/chosen"
    reason = comm.reason_unavailable()
    if reason is not None:
        store.compare_set(missing, "", f"on host {socket.gethostname()}: {reason}")
    if store.add("lockstep/backend/arrived", 1) == rank_info.world_size:
        is_missing = store.check([missing])
        store.set(chosen, store.get(missing).decode(errors="replace") if is_missing else "")
    obstacle = escape_control(store.get(chosen).decode(errors="replace"))
    if obstacle and is_requested:
        raise RendezvousError(
            f"rank {rank_info.rank}: the backend 'lockstep' is not available {obstacle}; use "
            "'gloo', or make it available on every host"
        )
    choice = choose_backend(is_single_host=False, unavailable=obstacle or None)
    if rank_info.rank == 0:
        _explain(choice)
    return choice.name


@functools.cache
def _explain(choice: BackendChoice) -> None:
    """Print why a slower backend is used, if one is; only once per process."""
    if choice.is_slower:
        log(f"using the backend {choice.name}, {choice.reason}")


def world() -> World:
    """Return the world that `init` joined; raise UsageError if there is none."""
    if _current is None or not dist.is_initialized():
        raise UsageError("this process has not joined a world: call lockstep.init() first")
    return _current


def require_world(*, keeps_threads: bool = False) -> World:
    """Return the world; join it if `init` was not called.

    Args:
        keeps_threads: Whether to keep the number of threads if bits depend on it.
    """
    if _current is not None and dist.is_initialized():
        return _current
    return _join_world(torch_threads=torch.get_num_threads() if keeps_threads else 1)


def rank() -> int:
    """Return this process's rank; before `init`, as given by the environment."""
    return _ranks().rank


def world_size() -> int:
    """Return the number of ranks; before `init`, as given by the environment."""
    return _ranks().world_size


def local_rank() -> int:
    """Return this process's rank on its host; before `init`, as given by the environment."""
    return _ranks().local_rank


# --- the rounds of an elastic run ----------------------------------------------------------


def get_timeout() -> float:
    """Return the seconds that this rank waits for the others."""
    return float(str(_arguments[1])) if _arguments else 300.0


def leave_round() -> None:
    """Leave the group of a round that is over; ranks that wait for this one notice at once."""
    close_world_connections()
    close_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def close_world_connections() -> None:
    """Shut down the network connections of the default group; calls that wait for them raise.

    May be called on any thread. Does nothing for a group in shared memory, which has none.
    """
    if (group := dist.group.WORLD) is not None:
        with contextlib.suppress(RuntimeError):  # it has no backend for the CPU
            backend: Any = group._get_backend(torch.device("cpu"))
            gloo = getattr(getattr(backend, "host_group", None), "gloo", backend)
            if isinstance(gloo, dist.ProcessGroupGloo):
                close_connections_of(gloo)


def rejoin(store: Store, rank: int, world_size: int, hosts: Sequence[int] = ()) -> World:
    """Join the group of the next round; call it after `leave_round`.

    Args:
        store: The store of the round, which all its ranks have reached.
        rank: This process's rank in the round.
        world_size: The number of ranks.
        hosts: The index of the host of each rank; empty if all are on this one.

    Raises:
        RendezvousError: The ranks could not be connected.
    """
    global _current
    assert _current is not None, "a process rejoins the world that it has joined"
    hosts = hosts or [_current.host] * world_size
    joined = replace(
        _current,
        rank=rank,
        world_size=world_size,
        local_rank=hosts[:rank].count(hosts[rank]),
        local_world_size=hosts.count(hosts[rank]),
        host=hosts[rank],
    )
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": joined.local_rank,
        "LOCAL_WORLD_SIZE": joined.local_world_size,
    }
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.pop(JOIN, None)
    try:
        dist.init_process_group(
            _current.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=JOIN_TIMEOUT),
        )
    except (dist.DistError, RuntimeError) as error:
        # torch has counted the group, and names the next one by the count: its keys would not be
        # those of a newcomer, which counts from 0.
        dist.distributed_c10d._world.group_count = 0
        said = escape_control(str(error).partition("\n")[0])
        raise RendezvousError(f"rank {rank} could not join the round: {said}") from error
    group: Any = dist.group.WORLD
    group._get_backend(_current.device)._set_default_timeout(timedelta(seconds=get_timeout()))
    _current = joined
    return _current


def _wait_alone(rank_info: RankInfo, backend: str, timeout: float, device: torch.device) -> None:
    """Form a world of one, until the process joins a round in its first call of a trainer."""
    if is_elastic_on_hosts(os.environ):
        _choose_interface(rank_info, None, device)
    if backend == "lockstep":
        _set_variable("DDP_DISABLE_COMM_MEM", "0")
    dist.init_process_group(
        backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout)
    )
    comm.refuse_calls(
        "this process joins a running elastic run, and has no peers before the first call of its "
        "trainer: leave communication to the trainer, or run without --min and --max"
    )


def shutdown() -> None:
    """Leave the world, if this process has joined one. Also called at exit."""
    global _current, _arguments
    atexit.unregister(shutdown)
    close_all()
    if _current is not None and dist.is_initialized():
        dist.destroy_process_group()
    _current = None
    _arguments = ()
    restore_kernels()
    _unset_variables()


def _unregister_in_child() -> None:
    """Keep a forked child from leaving its parent's world when it exits."""
    atexit.unregister(shutdown)
    atexit.unregister(leave_store)


os.register_at_fork(after_in_child=_unregister_in_child)


def _set_variable(variable: str, value: str) -> None:
    """Set an environment variable until shutdown(), unless the user has set it."""
    if variable not in os.environ:
        os.environ[variable] = value
        _variables_set.append(variable)


def variables_set() -> tuple[str, ...]:
    """Return the names of the environment variables that init() has set in this process."""
    return tuple(_variables_set)


def _unset_variables() -> None:
    """Unset the environment variables that init() has set."""
    while _variables_set:
        os.environ.pop(_variables_set.pop(), None)


def _ranks() -> World | RankInfo:
    if _current is not None and dist.is_initialized():
        return _current
    return read_rank_info(os.environ)


def _format_arguments(arguments: tuple[object, ...]) -> str:
    names = ("backend", "timeout", "threads", "device", "portable")
    return ", ".join(f"{name}={value}" for name, value in zip(names, arguments, strict=True))


def _choose_kernels(portable: bool | None, device: torch.device, rank_info: RankInfo) -> bool:
    """Choose the kernels before the first computation; return whether they are portable."""
    try:
        say = _say_once if rank_info.rank == 0 else _say_nothing
        is_portable = choose_kernels(portable, device, _set_variable, say)
    except UsageError:
        restore_kernels()
        _unset_variables()
        raise
    if not is_portable:
        _unset_variables()
    return is_portable


@functools.cache
def _say_once(text: str) -> None:
    log(text)


def _say_nothing(_: str) -> None:
    """Leave it to rank 0."""


def _configure_torch(threads: int, device: torch.device) -> None:
    """Set the options that the bits of results depend on, before the first operation."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    select_device(device)
    # Not use_deterministic_algorithms(True): that imports torch's compiler, which takes 1.4 s. The
    # compiler reads the variable when it is imported; after that only its own setting counts.
    torch.set_deterministic_debug_mode("error")
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:
        _set_variable("TORCHINDUCTOR_DETERMINISTIC", "1")
    # TorchScript would optimize a function after its first calls in this process, which changes the
    # bits of gradients.
    torch._C._set_graph_executor_optimize(False)
    # Otherwise torch fills every empty tensor: 68 us for 4 MiB, without an effect on results.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _join(
    rank_info: RankInfo, backend: str, timeout: float, device: torch.device, store: Store
) -> None:
    if backend == "lockstep":
        # With this variable DistributedDataParallel allocates its buckets in the shared memory of
        # the backend.
        _set_variable("DDP_DISABLE_COMM_MEM", "0")
    started = time.monotonic()
    if not _choose_interface(rank_info, store, device) and "gloo" in backend:
        raise RendezvousError(
            f"rank {rank_info.rank}: gloo connects the ranks of a host through the loopback "
            f"interface, which is down (ip link set lo up); the backend 'lockstep' does not need it"
            if rank_info.is_single_host
            else f"rank {rank_info.rank}: the address from which this host reaches the other hosts "
            f"belongs to the loopback interface, which gloo cannot use between hosts: set "
            f"GLOO_SOCKET_IFNAME to another interface"
        )
    atexit.unregister(leave_store)
    atexit.register(leave_store)  # atexit is LIFO: runs after shutdown()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=find_bound_device(device, backend),
        )
        if "gloo" in backend:
            # Gloo returns when this rank is connected. A rank that left the world at once would
            # close connections that a slower rank is still setting up, and that rank would fail.
            dist.all_reduce(torch.zeros(1))
    except (dist.DistError, RuntimeError) as error:
        said = escape_control(str(error).partition("\n")[0])
        seconds = round(time.monotonic() - started)
        raise RendezvousError(
            f"rank {rank_info.rank}: all {rank_info.world_size} ranks joined, but {backend} could "
            f"not connect them{f' in {seconds} s' if seconds else ''}: {said}"
        ) from error


def _check_arguments(backend: str | None, timeout: float, threads: int | None) -> None:
    """Raise UsageError for arguments of init() that are not valid, before waiting for ranks."""
    if not 0 < timeout < 1e9:
        raise UsageError(
            f"init(timeout={timeout}): expected a positive number of seconds, below 1e9"
        )
    if threads is not None and threads < 1:
        raise UsageError(f"init(threads={threads}): at least one thread is needed")
    if backend is not None:
        _check_backend(backend)


def _check_backend(backend: str) -> None:
    """Raise UsageError for a backend that torch does not have."""
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            known = filter(dist.is_backend_available, dist.Backend.backend_list)
            here = ", ".join(other for other in known if other != "undefined")
            raise UsageError(
                f"init(backend={backend!r}): torch has no backend {name!r} here; available: {here}"
            )


def _choose_interface(rank_info: RankInfo, store: Store | None, device: torch.device) -> bool:
    """Set the network interface of Gloo and NCCL, which would use host names or any interface.

    Returns:
        Whether one is set for Gloo, here or by the user.
    """
    name = choose_interface(rank_info, store)
    if name is not None:
        _set_variable("GLOO_SOCKET_IFNAME", name)
        if device.type == "cuda" and not rank_info.is_single_host:
            _set_variable("NCCL_SOCKET_IFNAME", f"={name}")  # "=": not any name that begins so
    return "GLOO_SOCKET_IFNAME" in os.environ


def _describe_world(rank_info: RankInfo, device: torch.device, is_joining: bool) -> World:
    """Return the world of the default group, which overrides `rank_info` if they differ.

    A process that joins later is alone in that group. It gets the rank that it will have, so that
    a script does not take it for rank 0.
    """
    given = rank_info.rank, rank_info.world_size
    rank, size = given if is_joining else (dist.get_rank(), dist.get_world_size())
    same = (rank, size) == given
    return World(
        rank=rank,
        world_size=size,
        local_rank=rank_info.local_rank if same else rank,
        local_world_size=rank_info.local_world_size if same else size,
        host=rank_info.host if same else 0,
        device=device,
        backend=_backend_name(),
    )


def _backend_name() -> str:
    """Return the backend's name; "gloo" where torch has "cpu:gloo,cuda:gloo"."""
    config = str(dist.get_backend_config())
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config
