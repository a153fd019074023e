"""The store of a run with a secret: its server and torch's view of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore

from lockstep.comm.transport.message_connection import connect_to
from lockstep.kernel.errors import UsageError
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.secret_store import SecretStore
from lockstep.launcher.store_server import PURPOSE, StoreServer, decode, encode

SECRET = b"s" * 32
PATIENCE = 30.0

keys = st.sampled_from(["a", "b"])
texts = st.text("01", max_size=2)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
seconds = st.sampled_from([0.0, -1.0, float("nan"), float("-inf"), "1", None])  # none that waits
OPERATIONS = ["set", "get", "wait", "check", "add", "compare_set", "append", "delete", "list"]
NAMES = ["items", "keys", "key", "number", "old", "new", "value"]


@pytest.fixture(scope="module")
def server():
    server = StoreServer(listen("127.0.0.1", 0), SECRET)
    yield server
    server.close()


@pytest.fixture(scope="module")
def stores(server):
    """Two clients, and a number to make keys unique."""
    made = [SecretStore("127.0.0.1", server.port, SECRET, PATIENCE) for _ in range(2)]
    for store in made:
        store.check(["a"])  # the server's thread for this client answers, so it has started
    yield made
    for store in made:
        store._connection.close()


calls = st.one_of(
    st.tuples(st.just("set"), keys, texts),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("add"), keys, st.integers(-5, 5)),
    st.tuples(st.just("check"), st.lists(keys, max_size=3)),
    st.tuples(st.just("compare_set"), keys, texts, texts),
    st.tuples(st.just("append"), keys, texts),
    st.tuples(st.just("delete_key"), keys),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.lists(texts, min_size=2, max_size=2)),
)
numbers = iter(range(1 << 30))


@given(st.lists(st.tuples(st.integers(0, 1), calls), max_size=12))
def test_it_does_what_torchs_stores_do(stores, steps):
    prefix = f"{next(numbers)}"
    here = [PrefixStore(prefix, store) for store in stores]
    there = HashStore()
    there.set_timeout(timedelta(milliseconds=1))
    for which, (name, *arguments) in steps:
        if name == "get" and not there.check([arguments[0]]):
            continue  # it would wait
        if name == "add" and there.check([arguments[0]]):
            with contextlib.suppress(ValueError):
                int(there.get(arguments[0]) or "x")
                assert here[which].add(*arguments) == there.add(*arguments)
            continue
        if name == "append" and not arguments[1]:
            continue  # torch's stores differ in whether this creates the key
        assert getattr(here[which], name)(*arguments) == getattr(there, name)(*arguments)


def test_a_client_waits_for_a_key_of_another(stores):
    first, second = stores
    got = []
    waiter = threading.Thread(target=lambda: got.append(first.get("late")))
    waiter.start()
    second.set("late", "x")
    waiter.join()
    assert got == [b"x"]
    first.wait(["late"], timedelta(seconds=PATIENCE))
    assert first.multi_get(["late", "late"]) == [b"x", b"x"]
    assert first.num_keys() == len(first.list_keys()) > 0


def test_a_client_that_waited_too_long_can_ask_again(stores):
    first, second = stores
    started = time.monotonic()
    with pytest.raises(DistStoreError, match=r"wait timeout after 0.05 s, keys: never"):
        first.wait(["never"], timedelta(seconds=0.05))
    assert time.monotonic() - started >= 0.05
    second.set("never", "x")
    assert first.get("never") == b"x"


def interrupt(*arguments) -> None:
    raise KeyboardInterrupt


def test_a_client_that_was_interrupted_can_ask_again(server, monkeypatch):
    store = SecretStore("127.0.0.1", server.port, SECRET, PATIENCE)
    with monkeypatch.context() as patched:
        patched.setattr(store._connection, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.get("never")
    store.set("a", "c")  # while the server still waits for the first key
    assert store.get("a") == b"c"
    store._connection.close()


def test_a_clone_has_its_own_connection(stores):
    clone = stores[0].clone()
    try:
        clone.set("from the clone", "x")
        assert stores[0].get("from the clone") == b"x"
        assert clone._connection is not stores[0]._connection
    finally:
        clone._connection.close()


def test_another_secret_is_refused(server):
    with pytest.raises(UsageError, match="holds another key"):
        SecretStore("127.0.0.1", server.port, b"o" * 32, PATIENCE)


def test_a_server_that_left():
    server = StoreServer(listen("127.0.0.1", 0), SECRET)
    store = SecretStore("127.0.0.1", server.port, SECRET, PATIENCE)
    store.set("a", "b")
    server.close()
    with pytest.raises(DistNetworkError, match=r"the store at 127\.0\.0\.1:\d+ is gone"):
        store.get("a")
    store._connection.close()


def test_a_client_that_reads_no_answers_does_not_stop_the_others(server, stores):
    stores[0].set("large", b"x" * 500_000)
    with connect_to("127.0.0.1", server.port, SECRET, PURPOSE) as greedy:
        with contextlib.suppress(OSError):  # the server closes the connection in the end
            for number in range(200):
                greedy.send({"id": number, "do": "get", "keys": ["large"]})
        assert stores[1].get("large") == b"x" * 500_000


def test_values_are_sent_as_text():
    assert decode(encode(bytes(range(256)))) == bytes(range(256))
    with pytest.raises(ValueError, match="base64"):
        decode("?")


@example({"do": "get", "keys": ["", []], "seconds": 0.0})
@example({"do": "add", "key": "a", "number": 1 << 70})
@given(
    st.fixed_dictionaries(
        {"do": st.sampled_from(OPERATIONS) | json_values, "seconds": seconds},
        optional=dict.fromkeys(NAMES, json_values),
    )
)
def test_a_messageof_any_form_is_answered_or_refused_with_valueerror(server, message):
    with contextlib.suppress(ValueError):
        server._answer(message)


def test_a_client_that_sends_other_requests_loses_its_connection(server, stores):
    with connect_to("127.0.0.1", server.port, SECRET, PURPOSE) as other:
        other.send({"do": "run", "id": 1})
        with pytest.raises((EOFError, ConnectionError)):
            other.receive(PATIENCE)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"\x80\x04K\x01.")
    stores[0].set("still", "there")
    assert stores[1].get("still") == b"there"
