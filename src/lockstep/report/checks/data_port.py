"""A port that the system chooses, as Gloo and NCCL use them between hosts.

Firewalls often open the port of the rendezvous only. And where parts of a network have different
packet sizes (MTU), connections open and small messages arrive, but large ones never do: the host
answers each connection with a short token, and then with many bytes. It reads nothing, and waits
for nobody.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading

from lockstep.report.checks.host_report import LARGE_LOST

__all__ = ["DataPort", "describe_error", "probe_data_port"]

TIMEOUT = 5.0  # seconds for each step
LARGE = 1 << 15  # bytes: several packets of any common size, which a socket takes at once
TOKEN = 16  # bytes
BACKLOG = 64


class DataPort:
    """Answers connections to a free port with a token, on a thread of its own.

    Args:
        address: The address to listen at; "" for every address of this host.
    """

    def __init__(self, address: str) -> None:
        is_both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_both or ":" in address else socket.AF_INET
        self._listening = socket.create_server(
            (address, 0), family=family, backlog=BACKLOG, dualstack_ipv6=is_both
        )
        self.port = int(self._listening.getsockname()[1])
        self.token = secrets.token_hex(TOKEN)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                end, _ = self._listening.accept()
                self._answer(end)

    def _answer(self, end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LARGE)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
            end.send(self.token.encode())  # a packet of its own
            end.send(bytes(LARGE))


def probe_data_port(address: str, port: int, token: str) -> str:
    """Return why another host's data port does not answer, or LARGE_LOST; "" if it answers."""
    try:
        with socket.create_connection((address, port), timeout=TIMEOUT) as end:
            if not hmac.compare_digest(_receive(end, 2 * TOKEN), token.encode()):
                return "another program answers"
            try:
                _receive(end, LARGE)
            except TimeoutError:
                return LARGE_LOST
            return ""
    except OSError as error:
        return describe_error(error)


def describe_error(error: OSError) -> str:
    """Return why a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()


def _receive(end: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        content = end.recv(count - len(received))
        if not content:
            raise ConnectionError("the connection was closed")
        received += content
    return received
