"""The server of a run's store: keys and values for processes that have the run's secret.

    torch ──> SecretStore (secret_store.py) ══ messages ══> StoreServer ──> StoreTable

torch's TCPStore authenticates nobody. This store has its operations, on authenticated connections
(`lockstep.transport`). The table is a pure state machine: `handle` takes a request and returns
answers. One thread serves all connections; it does not need torch.

    request                                          answer
    {"do": "set", "items": {key: value}}             {}
    {"do": "get", "keys": [...]}                     {"values": [...]}, once all keys exist
    {"do": "wait", "keys": [...]}                    {}, once all keys exist
    {"do": "check", "keys": [...]}                   {"found": whether all keys exist}
    {"do": "add", "key", "number"}                   {"number": the sum}
    {"do": "compare_set", "key", "old", "new"}       {"value": what the key has now}
    {"do": "append", "key", "value"}                 {}
    {"do": "delete", "key"}                          {"found": whether it existed}
    {"do": "list"}                                   {"keys": [...]}
    {"do": "count"}                                  {"number": of keys}

Values are text in base64. Every request has an "id", which its answer repeats. A connection has
at most one request that waits; a new request replaces it.
"""

from __future__ import annotations

import base64
import contextlib
import queue
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.transport.credentials import Identity
from lockstep.transport.frame import ForgedFrame, FrameSocket
from lockstep.transport.listener import Listener
from lockstep.transport.message_codec import MessageCodec
from lockstep.transport.message_connection import derive_credentials

__all__ = ["PURPOSE", "Message", "StoreServer", "StoreTable", "decode", "encode"]

PURPOSE = "store of a run"
SILENCE = 10.0  # seconds; the server itself never waits for a connection
MAX_UNSENT = 1 << 24  # bytes of answers that a client has not read
CHUNK = 1 << 16  # bytes

Message = dict[str, Any]


def encode(value: bytes) -> str:
    """Return a value as it is sent."""
    return base64.b64encode(value).decode()


def decode(text: str) -> bytes:
    """Return the value that was sent as `text`; ValueError if it is no base64."""
    return base64.b64decode(text, validate=True)


@dataclass
class WaitingRequest:
    """A request that is answered once all its keys exist."""

    client: Hashable
    request: Message
    missing: set[str]


class StoreTable:
    """Keys and values, and the requests that wait for keys."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[Hashable, WaitingRequest] = {}
        self._waiting_for: defaultdict[str, set[Hashable]] = defaultdict(set)

    def handle(self, client: Hashable, request: Message) -> list[tuple[Hashable, Message]]:
        """Execute a request; return the answers that are due, each with its client.

        Raises:
            ValueError: It is not a request of this protocol, or `add` meets a value that is
                not a number.
        """
        self.forget(client)
        try:
            handler = getattr(self, f"_do_{request['do']}")
            number = request["id"]
            changed, answer = handler(request)
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError("not a request") from error
        if answer is None:
            self._park(client, request)
            return []
        answers: list[tuple[Hashable, Message]] = [(client, {"id": number, **answer})]
        for key in changed:
            answers += self._answer_waiting(key)
        return answers

    def forget(self, client: Hashable) -> None:
        """Drop the request of a client that waits, if there is one."""
        waiting = self._waiting.pop(client, None)
        for key in waiting.missing if waiting else ():
            self._waiting_for[key].discard(client)
            if not self._waiting_for[key]:
                del self._waiting_for[key]

    def _park(self, client: Hashable, request: Message) -> None:
        missing = {key for key in _keys(request) if key not in self._values}
        self._waiting[client] = WaitingRequest(client, request, missing)
        for key in missing:
            self._waiting_for[key].add(client)

    def _answer_waiting(self, key: str) -> list[tuple[Hashable, Message]]:
        answers: list[tuple[Hashable, Message]] = []
        for client in self._waiting_for.pop(key, set()):
            waiting = self._waiting[client]
            waiting.missing.discard(key)
            if not waiting.missing:
                del self._waiting[client]
                answers += self.handle(client, waiting.request)  # a key may have been deleted
        return answers

    # Each returns the keys that got a value, and the answer; None to wait for keys.

    def _do_set(self, request: Message) -> tuple[list[str], Message]:
        items = {str(key): decode(text) for key, text in request["items"].items()}
        self._values |= items
        return list(items), {}

    def _do_get(self, request: Message) -> tuple[list[str], Message | None]:
        if not self._has(request):
            return [], None
        return [], {"values": [encode(self._values[key]) for key in _keys(request)]}

    def _do_wait(self, request: Message) -> tuple[list[str], Message | None]:
        return [], {} if self._has(request) else None

    def _do_check(self, request: Message) -> tuple[list[str], Message]:
        return [], {"found": self._has(request)}

    def _do_add(self, request: Message) -> tuple[list[str], Message]:
        key = str(request["key"])
        number = int(self._values.get(key, b"0")) + int(request["number"])
        self._values[key] = str(number).encode()
        return [key], {"number": number}

    def _do_compare_set(self, request: Message) -> tuple[list[str], Message]:
        key, old, new = str(request["key"]), decode(request["old"]), decode(request["new"])
        value = self._values.get(key)
        if value is None and old:
            return [], {"value": encode(old)}  # as torch's stores answer
        if value is not None and value != old:
            return [], {"value": encode(value)}
        self._values[key] = new
        return [key], {"value": encode(new)}

    def _do_append(self, request: Message) -> tuple[list[str], Message]:
        key = str(request["key"])
        self._values[key] = self._values.get(key, b"") + decode(request["value"])
        return [key], {}

    def _do_delete(self, request: Message) -> tuple[list[str], Message]:
        return [], {"found": self._values.pop(str(request["key"]), None) is not None}

    def _do_list(self, request: Message) -> tuple[list[str], Message]:
        return [], {"keys": list(self._values)}

    def _do_count(self, request: Message) -> tuple[list[str], Message]:
        return [], {"number": len(self._values)}

    def _has(self, request: Message) -> bool:
        return all(key in self._values for key in _keys(request))


def _keys(request: Message) -> list[str]:
    keys = request["keys"]
    if not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise TypeError("the keys are not a list of text")
    return keys


@dataclass(eq=False)
class Client:
    """An authenticated connection, and the answers that it has not taken yet."""

    end: socket.socket
    codec: MessageCodec
    unsent: bytearray = field(default_factory=bytearray)


class StoreServer:
    """Serves a store on a thread, from now until `close`.

    Args:
        listening: A socket that listens. It belongs to the server from now on.
        secret: The secret of the run.
        refused: Called with a line about refused connections, every 10 s at most, on another
            thread.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        refused: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._table = StoreTable()
        self._clients: set[Client] = set()
        self._new: queue.SimpleQueue[FrameSocket | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._is_open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._thread = threading.Thread(target=self._serve, name="lockstep store", daemon=True)
        self._thread.start()
        credentials = derive_credentials(secret, PURPOSE)
        self._listener = Listener(listening, credentials, SILENCE, self._accept, refused)
        self.port = self._listener.port

    def close(self) -> None:
        """Stop serving, and close all connections."""
        self._listener.close()
        self._post(None)
        self._thread.join()
        for client in list(self._clients):
            self._drop(client)
        for end in (self._selector, self._wake, self._woken):
            end.close()

    def _accept(self, frames: FrameSocket, caller: Identity) -> None:
        self._post(frames)

    def _post(self, frames: FrameSocket | None) -> None:
        self._new.put(frames)
        self._wake.send(b"!")

    # --- on the server's thread ---------------------------------------------------------------

    def _serve(self) -> None:
        while self._is_open:
            for key, events in self._selector.select():
                key.data(events)

    def _on_wake(self, events: int) -> None:
        self._woken.recv(1)  # one byte for each entry of the queue
        frames = self._new.get()
        if frames is None:
            self._is_open = False
            return
        frames.end.setblocking(False)
        client = Client(frames.end, MessageCodec(frames.sending, frames.receiving))
        self._clients.add(client)
        self._selector.register(client.end, selectors.EVENT_READ, partial(self._on_events, client))

    def _on_events(self, client: Client, events: int) -> None:
        if client not in self._clients:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client, b"")
            if events & selectors.EVENT_READ:
                self._receive(client)
        except BlockingIOError:
            pass
        except (OSError, EOFError, ForgedFrame, ValueError):
            self._drop(client)  # the client sees it; it has a message of its own

    def _receive(self, client: Client) -> None:
        content = client.end.recv(CHUNK)
        if not content:
            raise EOFError
        for request in client.codec.decode(content):
            for receiver, answer in self._table.handle(client, request):
                assert isinstance(receiver, Client)
                if receiver is client:
                    self._send(receiver, client.codec.encode(answer))
                    continue
                try:
                    self._send(receiver, receiver.codec.encode(answer))
                except (OSError, EOFError, ValueError):
                    self._drop(receiver)

    def _send(self, client: Client, content: bytes) -> None:
        client.unsent += content
        with contextlib.suppress(BlockingIOError):
            while client.unsent:
                del client.unsent[: client.end.send(client.unsent[:CHUNK])]
        if len(client.unsent) > MAX_UNSENT:
            raise EOFError
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.end).events != wanted:
            self._selector.modify(client.end, wanted, partial(self._on_events, client))

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        self._table.forget(client)
        with contextlib.suppress(KeyError):
            self._selector.unregister(client.end)
        client.end.close()
