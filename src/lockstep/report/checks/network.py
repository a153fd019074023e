"""The network, as far as one host can try it: names, interfaces, ports, loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator

from lockstep.errors import LockstepError
from lockstep.formatting import format_bytes, format_duration
from lockstep.report.check_result import Finding, Question, bad, good, note

__all__ = ["host_name", "interfaces", "loopback", "place", "ports"]

PATIENCE = 10.0  # seconds a socket may take
SENT = 64 << 20
PINGS = 200


def host_name(question: Question) -> Iterator[Finding]:
    """Resolve this host's name, and see that the address is its own."""
    name = socket.gethostname()
    advice = f"add a line '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        yield note("host name", f"{name} cannot be resolved ({error.strerror})", advice)
        return
    family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        yield note("host name", f"{name} is {address}, which is not this machine", advice)
        return
    yield good("host name", f"{name} is {address}")


def interfaces(question: Question) -> Iterator[Finding]:
    """List the interfaces that are up; check the variables that name one."""
    import psutil

    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    wrong = False
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        asked = [name.lstrip("=") for name in (value or "").split(",")]
        exact = variable.startswith("GLOO") or (value or "").startswith("=")
        if not value or value.startswith("^"):
            continue
        if any(
            not any(have == name or (not exact and have.startswith(name)) for have in up)
            for name in asked
        ):
            wrong = True
            yield bad(
                "interface",
                f"{variable} is {value}, and up are {', '.join(up)}",
                f"set {variable} to one of these, or unset it",
            )
    if not wrong:
        yield good("interface", f"up: {', '.join(up) or 'none'}")


def ports(question: Question) -> Iterator[Finding]:
    """Listen on a free port of the loopback interface, and connect to it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), PATIENCE):
                server.accept()[0].close()
    except OSError as error:
        yield bad(
            "ports",
            f"a connection over 127.0.0.1 fails ({error.strerror or error})",
            "ranks cannot find each other: check the firewall and the loopback interface",
        )
        return
    given = os.environ.get("MASTER_PORT", "")
    if given.isdigit() and is_taken(int(given)):
        yield note("ports", f"MASTER_PORT is {given}, and something listens there", "unset it")
    else:
        yield good("ports", "a free port on 127.0.0.1 can be listened on and reached")


def is_taken(port: int) -> bool:
    """Whether something listens on a port of the loopback interface."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def loopback(question: Question) -> Iterator[Finding]:
    """Measure the loopback interface: throughput one way, and a message there and back."""
    try:
        speed, trip = measure_loopback()
    except OSError as error:
        yield bad("loopback", f"fails ({error.strerror or error})", "check the loopback interface")
        return
    what = f"{format_bytes(speed)}/s, a message there and back in {format_duration(trip)}"
    if speed < 0.3e9 or trip > 1e-3:
        yield note("loopback", what, "slow: is the machine busy, or the traffic filtered?")
    else:
        yield good("loopback", what)


def measure_loopback() -> tuple[float, float]:
    """Return bytes a second one way, and the median seconds of a message there and back."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = stack.enter_context(socket.create_connection(server.getsockname(), PATIENCE))
        theirs = stack.enter_context(server.accept()[0])
        for end in (ours, theirs):
            end.settimeout(PATIENCE)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=answer, args=(theirs,))
        echo.start()
        try:
            trips = [timed_trip(ours) for _ in range(PINGS)]
            began = time.perf_counter()
            ours.sendall(bytes(SENT))
            receive(ours, 1)
            seconds = time.perf_counter() - began
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            echo.join()
    return SENT / seconds, statistics.median(trips)


def timed_trip(end: socket.socket) -> float:
    """Return how long one byte takes there and back."""
    began = time.perf_counter()
    end.sendall(b"?")
    receive(end, 1)
    return time.perf_counter() - began


def answer(end: socket.socket) -> None:
    """Answer the small messages, then the large one, with a byte each."""
    with contextlib.suppress(OSError):
        for _ in range(PINGS):
            receive(end, 1)
            end.sendall(b"!")
        receive(end, SENT)
        end.sendall(b"!")


def receive(end: socket.socket, count: int) -> None:
    """Receive `count` bytes; ConnectionError if the other end is gone."""
    room = bytearray(min(count, 1 << 20))
    while count:
        got = end.recv_into(room, min(count, len(room)))
        if not got:
            raise ConnectionError("the other end is gone")
        count -= got


def place(question: Question) -> Iterator[Finding]:
    """Check that the environment's variables do not contradict each other about this rank."""
    from lockstep.launcher.environment import place as place_of

    try:
        found = place_of(os.environ)
    except LockstepError as error:
        yield bad("environment", str(error), "unset RANK, WORLD_SIZE and the like to run alone")
        return
    if found.world_size > 1:
        yield note("environment", f"says that this is rank {found.rank} of {found.world_size}")
    else:
        yield good("environment", "says that this is a process of its own")
