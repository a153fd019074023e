"""The server of a run's store: keys and values for processes that have the run's secret.

    torch ──> SecretStore (secret_store.py) ══ messages ══> StoreServer

torch's TCPStore authenticates nobody. This server has its operations, on authenticated connections
(`lockstep.comm.transport`), each of which has a thread. It does not need torch. A request that
waits for keys waits in Python: a thread that returns from C++ while the interpreter exits would
abort the process.

    request                                          answer
    {"do": "set", "items": {key: value}}             {}
    {"do": "wait", "keys": [...], "seconds"}         {"result": whether all keys exist in time}
    {"do": "get", "keys": [...], "seconds"}          {"result": [values], False if too late}
    {"do": "check", "keys": [...]}                   {"result": whether all keys exist}
    {"do": "add", "key", "number"}                   {"result": the sum}
    {"do": "compare_set", "key", "old", "new"}       {"result": what the key has now}
    {"do": "append", "key", "value"}                 {}
    {"do": "delete", "key"}                          {"result": whether it existed}
    {"do": "list"}                                   {"result": [keys]}

Values are text in base64.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.comm.transport.listener import MessageListener
from lockstep.comm.transport.message_codec import ForgedMessage
from lockstep.comm.transport.message_connection import MessageConnection

__all__ = ["PURPOSE", "StoreServer", "decode", "encode"]

PURPOSE = "store of a run"


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
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._changes: dict[str, threading.Condition] = {}  # of keys that a client waits for
        self._clients: dict[MessageConnection, threading.Thread] = {}
        self._is_open = True
        self._listener = MessageListener(listening, secret, PURPOSE, refused, self._accept)
        self.port = self._listener.port

    def close(self) -> None:
        """Stop serving, and close all connections."""
        self._is_open = False
        self._listener.close()
        with self._lock:
            self._announce(list(self._changes))
        for connection, thread in list(self._clients.items()):
            connection.shut_down()
            thread.join()

    def _accept(self, connection: MessageConnection) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="lockstep store", daemon=True
        )
        # A thread that ends stays here until then, so that `close` waits for it.
        self._clients = {
            client: running for client, running in self._clients.items() if running.is_alive()
        }
        self._clients[connection] = thread
        thread.start()

    def _serve(self, connection: MessageConnection) -> None:
        # A client that loses its connection has a message of its own.
        with connection, contextlib.suppress(OSError, EOFError, ForgedMessage, ValueError):
            while True:
                request = connection.receive(timeout=None)
                connection.send(self._answer(request))

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request; raise ValueError if it is not one of this protocol."""
        try:
            with self._lock:
                return {"result": self._execute(request)}
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError("not a request") from error

    def _execute(self, request: Mapping[str, Any]) -> Any:
        operation = request["do"]
        if operation in ("wait", "get"):
            is_complete = self._wait(request["keys"], time.monotonic() + request["seconds"])
            if operation == "wait" or not is_complete:
                return is_complete
            return [encode(self._values[key]) for key in request["keys"]]
        if operation == "check":
            return all(key in self._values for key in request["keys"])
        if operation == "list":
            return list(self._values)
        if operation == "set":
            values = {str(key): decode(text) for key, text in request["items"].items()}
            self._values |= values
            return self._announce(values)
        return self._execute_on_key(operation, str(request["key"]), request)

    def _execute_on_key(self, operation: str, key: str, request: Mapping[str, Any]) -> Any:
        value = self._values.get(key)
        result: Any = None
        match operation:
            case "delete":
                return self._values.pop(key, None) is not None
            case "add":
                result = int(value or b"0") + int(request["number"])
                self._values[key] = str(result).encode()
            case "append":
                self._values[key] = (value or b"") + decode(request["value"])
            case "compare_set":
                old, new = decode(request["old"]), decode(request["new"])
                if (value or b"") != old:
                    return encode(old if value is None else value)  # as torch's stores answer
                self._values[key] = new
                result = encode(new)
            case _:
                raise ValueError(f"{operation!r} is not an operation")
        self._announce([key])
        return result

    def _wait(self, keys: list[str], deadline: float) -> bool:
        """Return whether all keys exist before the deadline; others may run in the meantime."""
        while missing := [key for key in keys if key not in self._values]:
            if not self._is_open:
                raise EOFError
            changed = self._changes.setdefault(missing[0], threading.Condition(self._lock))
            if not changed.wait(max(0.0, deadline - time.monotonic())):
                return False
        return True

    def _announce(self, keys: Iterable[str]) -> None:
        """Wake the requests that wait for keys."""
        for key in keys:
            if (changed := self._changes.pop(key, None)) is not None:
                changed.notify_all()
