"""Listening sockets and addresses."""

from __future__ import annotations

import errno
import socket

import pytest

from lockstep.kernel.errors import UsageError
from lockstep.launcher.listening_socket import (
    find_obstacle,
    listen,
    parse_endpoint,
    resolve_address,
)


def test_port_0_is_a_free_port_of_the_loopback_interface():
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]


def test_a_port_in_use_is_an_error_that_names_the_option():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"^port {port} at 127.0.0.1 is in use.*--master-port"
        ):
            listen("127.0.0.1", port)
        with pytest.raises(UsageError, match=r"or by a launcher with the same --node-rank: give"):
            listen("127.0.0.1", port, is_single_host=False)


def test_an_address_outside_a_container_is_bound_on_every_interface():
    with listen("192.0.2.1", 0) as listening:  # an address for documentation, nobody's
        assert listening.getsockname()[0] == "0.0.0.0"


def test_a_name_with_two_addresses_always_resolves_to_the_same_one(monkeypatch):
    entries = [
        (family, socket.SOCK_STREAM, 6, "", (address, 0))
        for family, address in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
    ]
    for order in (entries, entries[::-1]):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, answer=order, **__: answer)
        assert resolve_address("localhost") == (socket.AF_INET, "127.0.0.1")


def test_an_unknown_name_is_an_error():
    with pytest.raises(UsageError, match=r"^MASTER_ADDR is 'a\.invalid', which cannot be resolved"):
        resolve_address("a.invalid")


def test_an_address_that_cannot_be_reached_is_named(monkeypatch):
    with listen("127.0.0.1", 0) as listening:
        assert find_obstacle(listening) == ""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

        monkeypatch.setattr(socket, "create_connection", refuse)
        assert find_obstacle(listening) == (
            "this host cannot connect to its own address 127.0.0.1 (network is unreachable): is "
            "the loopback interface up? (ip link set lo up)"
        )


def test_endpoints():
    assert parse_endpoint("gpu1") == ("gpu1", 29500)
    assert parse_endpoint("gpu1:7") == ("gpu1", 7)
    assert parse_endpoint("[::1]:7") == ("::1", 7)
    assert parse_endpoint("[::1]") == parse_endpoint("::1") == ("::1", 29500)
    with pytest.raises(UsageError, match=r"^--connect gpu1:x: expected HOST:PORT"):
        parse_endpoint("gpu1:x", "--connect")
