"""The backend "lockstep" of a group whose ranks are on several hosts, as torch sees it.

    collectives and messages   Gloo's own, between all ranks of the group
    sums of gradients          `lockstep.comm.hosts.all_reduce`: shared memory inside a host, and
                               messages between hosts over the same connections

Each call is published for the launcher, and its error names the call and the cause that all ranks
of the group state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lockstep.comm.activity import ALL_OTHERS
from lockstep.comm.backend_errors import Failure
from lockstep.comm.hosts.connections import ProcessGroupGloo, connect
from lockstep.comm.hosts.group import GLOO_MARGIN, HostGroup
from lockstep.comm.hosts.map import HostMap
from lockstep.comm.native_module import ArgumentError, load_native, refusal
from lockstep.foreign_messages import is_gloo_timeout, is_of_gloo_connection, says_lost_peer

__all__ = ["HostProcessGroup", "create_across_hosts"]

INTERFACE = "GLOO_SOCKET_IFNAME"
"""A variable of torch, which `lockstep.init` sets to the interface of the route to other hosts."""

POLL = 1.0  # seconds between looks at what other ranks have said, while a call is waited for
MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "broadcast", "gather",
    "reduce", "scatter",
)  # fmt: skip
"""Names in messages of torch's methods, such as `allgather` and `_allgather_base`."""

# torch's types leave out constructors and overloads that its process groups in Python need.
ProcessGroup: Any = dist.ProcessGroup


class HostProcessGroup(ProcessGroup):  # type: ignore[misc]
    """A process group of ranks on several hosts.

    Args:
        group: The group, which this object closes.
        store: The store of the group.

    Attributes:
        host_group: The group.
    """

    supports_splitting = supports_coalescing = False

    def __init__(self, group: HostGroup, store: Any) -> None:
        super().__init__(group.rank, group.map.size)
        self._rank = group.rank
        self._store = store
        self.host_group = group
        # The name and the description are in torch's C++ backends, of which this group has none.
        self._name = ""
        self._description = ""
        self._calls = 0
        kind = dist.ProcessGroup.BackendType.GLOO
        self._gloo = ProcessGroup(store, group.rank, group.map.size)
        for device in self._device_types:
            self._gloo._register_backend(device, kind, group.gloo)
        self._gloo._set_default_backend(kind)

    def name(self) -> str:
        """Return the name of the backend."""
        return "lockstep"

    getBackendName = name  # what torch's C++ calls

    def setGroupName(self, name: str) -> None:  # noqa: D102
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: D102
        self._description = description
        if description not in ("", "undefined", "default_pg"):
            self.host_group.name = description

    def getGroupName(self) -> str:  # noqa: D102
        return self._name

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._description

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]  # those of Gloo

    def _get_backend(self, device: torch.device) -> HostProcessGroup:
        return self

    def _has_hooks(self) -> bool:
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.host_group.timeout = timeout.total_seconds()
        self.host_group.gloo._set_default_timeout(timeout + GLOO_MARGIN)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the operations that follow."""
        self._set_default_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def shutdown(self) -> None:
        """Leave the group."""
        self.host_group.check_process()
        self.host_group.close()

    def abort(self) -> None:
        """End the group for all its ranks."""
        group = self.host_group
        group.check_process()
        group.fail(Failure(f"{group.describe(self._rank)} aborted the group"))

    def _call(
        self, method: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> HostWork:
        group = self.host_group
        peer = None
        if method not in MESSAGES:
            self._calls += 1
            number = self._calls
            text = f"{name} #{number}"
            awaited = "the other ranks"
        elif method == "recv_anysource":
            number = 0
            text = name
            awaited = "any rank"
        else:
            number = 0
            peer = int(arguments[1])
            text = f"{name} {'to' if name == 'send' else 'from'} {group.format_rank(peer)}"
            awaited = group.describe(peer)
        self._check_usable(text)
        target = -1 if peer is None else group.global_rank(peer)
        load_native().publish_call(name, target, number, 0, group.name)
        begin = partial(getattr(self._gloo, method), *arguments, **options)
        poll = inf if method in MESSAGES else POLL
        return HostWork(group, begin, text, awaited, peer, poll)

    def _check_usable(self, call: str) -> None:
        group = self.host_group
        if reason := refusal():
            raise ArgumentError(
                f"{group.format_rank(self._rank)}: {call} on group {group.name} is refused: "
                f"{reason}"
            )
        group.check_process()
        group.check(call)


def _delegate(method: str, name: str) -> Callable[..., HostWork]:
    def call(self: HostProcessGroup, *arguments: Any, **options: Any) -> HostWork:
        return self._call(method, name, arguments, options)

    return call


def _name_call(method: str) -> str | None:
    """Return the name in messages of a method of torch's process groups that is a call."""
    plain = method.replace("_", "")
    kinds = (kind for kind in COLLECTIVES if plain.startswith(kind.replace("_", "")))
    return MESSAGES.get(method) or next(kinds, None)


for _method in dir(dist.ProcessGroup):
    if not _method.startswith("__") and (_name := _name_call(_method)) is not None:
        setattr(HostProcessGroup, _method, _delegate(_method, _name))


def is_failure(error: RuntimeError) -> bool:
    """Return whether an error of Gloo ends the group."""
    return is_of_gloo_connection(str(error)) or is_gloo_timeout(str(error))


class HostWork(dist.Work):
    """A call of Gloo in progress.

    Args:
        group: The group.
        begin: Starts the call and returns Gloo's work.
        call: The call, such as "all_reduce #3".
        awaited: What it waits for: "the other ranks", or the rank at the other end of a message.
        peer: The rank at the other end of a message, if it is known.
        poll: The seconds between looks at what other ranks have said. Gloo's messages cannot be
            waited for in parts.
        patience: Seconds to wait beyond the timeout.

    Raises:
        RuntimeError: The call could not be started.
    """

    def __init__(
        self,
        group: HostGroup,
        begin: Callable[[], Any],
        call: str,
        awaited: str,
        peer: int | None,
        poll: float = inf,
        patience: float = 0.0,
    ) -> None:
        super().__init__()
        self._group = group
        self._call = call
        self._awaited = awaited
        self._peer = peer
        self._poll = poll
        self._patience = patience
        self._seconds = group.timeout
        try:
            self._work = begin()
        except RuntimeError as error:
            if not is_failure(error) or peer == group.rank:
                raise
            raise group.explain_call(call, awaited, peer, group.timeout, str(error)) from None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the call is complete.

        Args:
            timeout: The longest wait; 0 for the timeout of the group.

        Raises:
            RuntimeError: The call failed, or did not complete in time.
        """
        group = self._group
        native = load_native()
        seconds = timeout.total_seconds() or self._seconds
        deadline = time.monotonic() + seconds + self._patience
        awaited = ALL_OTHERS if self._peer is None else group.global_rank(self._peer)
        what = f"{self._call} on group {group.name}, waiting for {self._awaited}"
        native.begin_wait(what, awaited)
        try:
            while (failure := self._wait_until(deadline)) is not None:
                is_final = self._poll == inf or self._work.is_completed()
                if is_final or time.monotonic() > deadline or group.has_ended():
                    break
        finally:
            native.end_wait()
        if failure is None:
            return True
        raise group.explain_call(self._call, self._awaited, self._peer, seconds, failure)

    def _wait_until(self, deadline: float) -> str | None:
        """Wait for a part of the time; return why the call is not complete, or None if it is."""
        part = max(min(deadline - time.monotonic(), self._poll), 0.001)
        try:
            self._work.wait(timedelta(seconds=part))
        except RuntimeError as error:
            if not is_failure(error):
                raise
            return str(error)
        return None

    def synchronize(self) -> None:
        """Wait until the call is complete."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call is over."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether the call is complete and has not failed."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return why the call failed, or None."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the call writes."""
        tensors: list[torch.Tensor] = self._work.result()
        return tensors

    def get_future(self) -> Any:
        """Return Gloo's future of these tensors."""
        return self._work.get_future()

    def source_rank(self) -> int:
        """Return the rank in the group from which a message came."""
        return int(self._work._source_rank())

    _source_rank = source_rank


def create_across_hosts(
    store: Any,
    rank: int,
    hosts: Sequence[tuple[str, str]],
    timeout: timedelta,
    name: str,
    global_ranks: Sequence[int],
) -> HostProcessGroup:
    """Create the process group of this rank.

    Args:
        store: The store of the group.
        rank: This rank in the group.
        hosts: The identity and the name of the host of each rank.
        timeout: The time for the connections, and for each call.
        name: The name of the group.
        global_ranks: The ranks in the world; empty for 0, 1, ...

    Raises:
        BackendError: The ranks could not be connected.
    """
    on_hosts = HostMap.of([identity for identity, _ in hosts])
    ranks = list(global_ranks) or list(range(len(hosts)))
    shown = "default" if name in ("", "0") else name
    own = on_hosts.host_of(rank)
    local_ranks = on_hosts.hosts[own]
    local = load_native().create(
        store=PrefixStore(f"lockstep/host{own}/", store),
        rank=local_ranks.index(rank),
        size=len(local_ranks),
        timeout=timeout,
        name=shown,
        ranks=[ranks[member] for member in local_ranks],
    )
    try:
        gloo_store = PrefixStore("lockstep/gloo/", store)
        gloo = connect(gloo_store, rank, len(hosts), timeout + GLOO_MARGIN, _find_devices())
    except RuntimeError as error:
        names = [host for _, host in hosts]
        others = ", ".join(sorted({*names} - {names[rank]}))
        said = str(error).partition("\n")[0].rpartition("] ")[2]
        reason = (
            f"rank {ranks[rank]} on host {names[rank]} could not connect to the ranks on "
            f"{others} for group {shown} ({said}): check the network and the "
            "firewalls between the hosts"
        )
        # A rank that cannot be reached any longer, or could never be reached?
        failure = Failure(reason, "closed" if says_lost_peer(error) else None)
        local._abort_because(*failure.to_native())
        raise failure.make_error(reason, "init_process_group") from None
    host_names = [hosts[members[0]][1] for members in on_hosts.hosts]
    group_store = PrefixStore("lockstep/", store)
    group = HostGroup(
        on_hosts,
        rank,
        ranks,
        host_names=host_names,
        name=shown,
        store=group_store,
        local=local,
        gloo=gloo,
        timeout=timeout.total_seconds(),
    )
    return HostProcessGroup(group, group_store)


def _find_devices() -> list[Any]:
    """Return Gloo's devices of the network interfaces that are set; none if none is."""
    names = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]
