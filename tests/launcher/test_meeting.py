"""The socket at which ranks meet."""

from __future__ import annotations

import socket

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.meeting import bind, resolve


def test_a_free_port_of_the_loopback_interface_only():
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", 0) as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]


def test_a_port_in_use_is_refused_with_what_to_do():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"^port {port} at 127.0.0.1 is in use.*--master-port"
        ):
            bind("127.0.0.1", port)


def test_an_address_outside_a_container_is_bound_on_every_interface():
    with bind("192.0.2.1", 0) as listening:  # an address for documentation, nobody's
        assert listening.getsockname()[0] == "0.0.0.0"


def test_a_name_with_two_addresses_is_the_same_one_for_server_and_ranks(monkeypatch):
    found = [
        (family, socket.SOCK_STREAM, 6, "", (address, 0))
        for family, address in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
    ]
    for order in (found, found[::-1]):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, answer=order, **__: answer)
        assert resolve("localhost") == (socket.AF_INET, "127.0.0.1")


def test_a_name_of_nobody_is_refused():
    with pytest.raises(UsageError, match=r"^MASTER_ADDR is 'a\.invalid', which names no host"):
        resolve("a.invalid")
