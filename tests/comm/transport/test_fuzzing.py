"""Strangers send anything to each listening port of Lockstep; peers with the secret are served.

The attacks follow from a seed. All connections stay open until the end, so the strangers hold as
many slots as they can get.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest

import lockstep as ls
from lockstep.comm.transport.handshake import GREETING, call
from lockstep.comm.transport.listener import SLOTS, MessageListener
from lockstep.comm.transport.message_codec import (
    CONTENT_PART,
    SIZES,
    SIZES_PART,
    ForgedMessage,
    prove,
)
from lockstep.comm.transport.message_connection import connect_to
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.rendezvous import GREETING as TCP_STORE_GREETING
from lockstep.tools.remote.connection import MAX_PAYLOAD
from lockstep.tools.remote.connection import PURPOSE as DRIVER

SECRET = b"s" * 32
PATIENCE = 30.0  # seconds in which a peer must be served
MEMORY = 64 << 20  # bytes by which this process may grow


class Exploit:
    """What a pickle would create if anybody loaded it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.abort, ()


@dataclass
class Service:
    """A listening port with its purpose, and a function that a peer with the secret calls."""

    port: int
    purpose: str
    use: Callable[[], None]


@contextlib.contextmanager
def messages(purpose: str = "fuzzing", max_payload: int = 0) -> Iterator[Service]:
    listening = listen("127.0.0.1", 0)
    with MessageListener(listening, SECRET, purpose, max_payload=max_payload) as listener:
        accepted = []

        def use() -> None:
            with connect_to("127.0.0.1", listener.port, SECRET, purpose, PATIENCE) as here:
                here.send({"number": 1})
                while True:  # attackers with the secret were accepted before
                    there = listener.accept(PATIENCE)
                    accepted.append(there)
                    with contextlib.suppress(ForgedMessage, EOFError, OSError):
                        if there.receive(0.0 if accepted[:-1] else PATIENCE) == {"number": 1}:
                            break
                there.send({"number": 2})
                assert here.receive(PATIENCE) == {"number": 2}

        try:
            yield Service(listener.port, purpose, use)
        finally:
            for connection in accepted:
                connection.close()


class Attacker:
    """Connections to a service, each with something that no peer would send."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.random = random.Random(seed)
        self.open: list[socket.socket] = []
        self.recorded = self._record_handshake()
        self.attacks = [
            self.send_noise, self.send_protocol, self.send_beginning, self.send_noise_later,
            self.replay, self.send_slowly, self.leave, self.misuse_the_secret,
        ]  # fmt: skip

    def attack(self, count: int) -> None:
        """Connect `count` times, and keep those connections open that the service keeps open."""
        for _ in range(count):
            with contextlib.suppress(OSError):  # the service closed the connection
                self.random.choice(self.attacks)()

    def close(self) -> None:
        for end in self.open:
            end.close()

    def _connect(self) -> socket.socket:
        endpoint = ("127.0.0.1", self.service.port)
        self.open.append(socket.create_connection(endpoint, PATIENCE))
        return self.open[-1]

    def _record_handshake(self) -> list[bytes]:
        """Return what a peer with the secret sends, as a listener on the network sees it."""
        sent = []
        steps = call(SECRET, self.service.purpose)
        with socket.create_connection(("127.0.0.1", self.service.port), PATIENCE) as end:
            step = next(steps)
            while step.keys is None:
                sent.append(step.send)
                end.sendall(step.send)
                step = steps.send(end.recv(step.size, socket.MSG_WAITALL))
        return sent

    def _introduction(self) -> bytes:
        return next(call(bytes(32), self.service.purpose)).send

    def send_noise(self) -> None:
        self._connect().sendall(self.random.randbytes(self.random.choice([1, 17, 200, 5000])))

    def send_protocol(self) -> None:
        self._connect().sendall(
            self.random.choice([
                b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
                TCP_STORE_GREETING,
                pickle.dumps(Exploit()),
                b"\xff" * 4096,
                struct.pack("<Q", 1 << 62) + bytes(64),
                GREETING + pickle.dumps(Exploit()) + bytes(200),
            ])
        )  # fmt: skip

    def send_beginning(self) -> None:
        content = self.random.choice([self._introduction(), b"".join(self.recorded)])
        self._connect().sendall(content[: self.random.randrange(len(content))])

    def send_noise_later(self) -> None:
        content = self.random.choice([GREETING, self._introduction()])
        self._connect().sendall(content + self.random.randbytes(300))

    def replay(self) -> None:
        end = self._connect()
        end.settimeout(0.05)
        for content in self.recorded:
            end.sendall(content)
            if self.random.random() < 0.5:
                end.recv(33)

    def send_slowly(self) -> None:
        end = self._connect()
        content = self._introduction()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in content[: self.random.randrange(30)]:
            end.sendall(bytes([byte]))

    def leave(self) -> None:
        end = self._connect()
        if self.random.random() < 0.5:  # with a reset instead of an end
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()

    def misuse_the_secret(self) -> None:
        """Send what no peer sends on a connection that is authenticated."""
        connection = connect_to("127.0.0.1", self.service.port, SECRET, self.service.purpose)
        end = socket.socket(fileno=os.dup(connection.fileno()))
        self.open.append(end)
        key = connection._codec._sending
        content = pickle.dumps(Exploit())
        connection.close()
        large = SIZES.pack(0xFFFFFFFF, 1 << 60)
        sizes = SIZES.pack(len(content), 0)
        end.sendall(
            self.random.choice([
                self.random.randbytes(100),
                large + prove(key, SIZES_PART, 0, large) + bytes(1000),
                sizes + prove(key, SIZES_PART, 0, sizes)
                + content + prove(key, CONTENT_PART, 0, content),
                sizes + bytes(32) + content,
            ])
        )  # fmt: skip


SERVICES = {
    "messages": messages,
    "driver": lambda: messages(DRIVER, MAX_PAYLOAD),
}


def check_service(name: str, seed: int, count: int) -> None:
    with SERVICES[name]() as service:
        attacker = Attacker(service, seed)
        try:
            service.use()
            before = psutil.Process().memory_info().rss
            attacker.attack(count)
            assert len(attacker.open) > count // 2  # the attacks took place
            started = time.monotonic()
            service.use()
            assert time.monotonic() - started < PATIENCE
            assert psutil.Process().memory_info().rss - before < MEMORY
        finally:
            attacker.close()


@pytest.mark.parametrize("name", SERVICES)
def test_a_peer_is_served_after_anything_that_strangers_send(name, capfd):
    check_service(name, seed=1, count=3 * SLOTS)
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", SERVICES)
def test_a_peer_is_served_after_many_attacks(name, seed, capfd):
    check_service(name, seed, count=1500)
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_a_driver_and_its_workers_go_on_under_attack(capfd):
    """Every port that a driver and its workers listen at."""
    with ls.Driver(nprocs=2, timeout=PATIENCE) as driver:
        pids = [os.getpid(), *driver.run(os.getpid)]
        ports = {
            connection.laddr.port
            for pid in [*pids, *(child.pid for child in psutil.Process().children(recursive=True))]
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(ports) == 1  # workers on this host listen at none
        attacked = []
        for port in sorted(ports):
            with contextlib.suppress(OSError):
                noise = random.Random(port)
                for size in (1, 17, 200, 5000) * 50:
                    end = socket.create_connection(("127.0.0.1", port), PATIENCE)
                    attacked.append(end)
                    with contextlib.suppress(OSError):
                        end.sendall(noise.randbytes(size))
        try:
            assert driver.run(ls.rank) == [0, 1]
        finally:
            for end in attacked:
                end.close()
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
