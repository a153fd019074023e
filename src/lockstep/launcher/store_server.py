"""The server of a run's store: keys and values for processes that have the run's secret.

    torch ──> SecretStore (secret_store.py) ══ messages ══> StoreServer ──> torch's HashStore

torch's TCPStore authenticates nobody. This server offers a store of torch in its own memory on
authenticated connections (`lockstep.transport`), each of which has a thread.

    request                                          answer
    {"do": "set", "items": {key: value}}             {}
    {"do": "wait", "keys": [...], "seconds"}         {"result": whether all keys exist in time}
    {"do": "get", "keys": [...], "seconds"}          {"result": [values], None if too late}
    {"do": "check", "keys": [...]}                   {"result": whether all keys exist}
    {"do": "add", "key", "number"}                   {"result": the sum}
    {"do": "compare_set", "key", "old", "new"}       {"result": what the key has now}
    {"do": "append", "key", "value"}                 {}
    {"do": "delete", "key"}                          {"result": whether it existed}
    {"do": "list"}                                   {"result": [keys]}

Values are text in base64. Every request has an "id", which its answer repeats.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, HashStore  # type: ignore[attr-defined]

from lockstep.transport.listener import MessageListener
from lockstep.transport.message_codec import ForgedMessage
from lockstep.transport.message_connection import MessageConnection

__all__ = ["PURPOSE", "StoreServer", "decode", "encode"]

PURPOSE = "store of a run"
SLICE = 1.0  # seconds after which a waiting thread checks whether the server is still open
NO_WAIT = timedelta(milliseconds=1)  # 0 would be no timeout


def encode(value: bytes) -> str:
    """Return a value as it is sent."""
    return base64.b64encode(value).decode()


def decode(text: str) -> bytes:
    """Return the value that was sent as `text`; ValueError if it is not base64."""
    return base64.b64decode(text, validate=True)


class StoreServer:
    """Serves a store on threads, from now until `close`.

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
        self._store: Any = HashStore()  # torch's stub lacks methods
        self._store.set_timeout(NO_WAIT)
        self._clients: dict[MessageConnection, threading.Thread] = {}
        self._is_open = True
        self._listener = MessageListener(listening, secret, PURPOSE, refused, self._accept)
        self.port = self._listener.port

    def close(self) -> None:
        """Stop serving, and close all connections."""
        self._is_open = False
        self._listener.close()
        for connection, thread in list(self._clients.items()):
            connection.shut_down()
            thread.join()

    def _accept(self, connection: MessageConnection) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="lockstep store", daemon=True
        )
        self._clients[connection] = thread
        thread.start()

    def _serve(self, connection: MessageConnection) -> None:
        # A client that loses its connection has a message of its own.
        with connection, contextlib.suppress(OSError, EOFError, ForgedMessage, ValueError):
            while True:
                request = connection.receive(timeout=None)
                connection.send({"id": request.get("id"), **self._answer(request)})
        del self._clients[connection]

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request; raise ValueError if it is not one of this protocol."""
        try:
            return self._execute(request)
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ValueError("not a request") from error

    def _execute(self, request: Mapping[str, Any]) -> dict[str, Any]:
        result: Any = None
        match request["do"]:
            case "set":
                for key, text in request["items"].items():
                    self._store.set(key, decode(text))
            case "wait":
                result = self._wait(request["keys"], time.monotonic() + request["seconds"])
            case "get":
                result = self._get(request["keys"], time.monotonic() + request["seconds"])
            case "check":
                result = self._store.check(request["keys"])
            case "add":
                result = self._store.add(request["key"], request["number"])
            case "compare_set":
                old, new = decode(request["old"]), decode(request["new"])
                result = encode(self._store.compare_set(request["key"], old, new))
            case "append":
                self._store.append(request["key"], decode(request["value"]))
            case "delete":
                result = self._store.delete_key(request["key"])
            case "list":
                result = self._store.list_keys()
            case other:
                raise ValueError(f"{other!r} is not an operation")
        return {"result": result}

    def _wait(self, keys: list[str], deadline: float) -> bool:
        """Return whether all keys exist before the deadline."""
        while self._is_open:
            seconds = min(SLICE, deadline - time.monotonic())
            try:
                self._store.wait(keys, max(NO_WAIT, timedelta(seconds=seconds)))
            except DistStoreError:
                if time.monotonic() >= deadline:
                    return False
            else:
                return True
        raise EOFError

    def _get(self, keys: list[str], deadline: float) -> list[str] | None:
        while self._wait(keys, deadline):
            with contextlib.suppress(DistStoreError):  # another client has deleted a key
                return [encode(value) for value in self._store.multi_get(keys)]
        return None
