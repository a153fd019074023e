"""A store of torch that is served by a `StoreServer`, for processes with the run's secret."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    Store,
)

from lockstep.launcher.store_server import PURPOSE, Message, decode, encode
from lockstep.transport.frame import ForgedFrame
from lockstep.transport.message_connection import connect_to

__all__ = ["SecretStore"]

ANSWER_TIMEOUT = 30.0  # seconds for an answer that waits for no key
SHOWN = 3  # keys in a message


class SecretStore(Store):
    """The store at `address`:`port`; has the operations and semantics of torch's TCPStore.

    torch's process groups keep no reference to the Python object: keep one as long as a group
    uses the store.

    Args:
        address: Address of the server.
        port: Its port.
        secret: The secret of the run.
        timeout: Default timeout of `wait` and `get`, in seconds.
        connect_timeout: Seconds to try to connect.

    Raises:
        RendezvousError: Nobody answered.
        UsageError: The address is unknown, or the process there has another secret, or is not
            one of this version of Lockstep.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        timeout: float,
        *,
        connect_timeout: float = 10.0,
    ) -> None:
        super().__init__()
        self._place = address, port, secret
        self.set_timeout(timedelta(seconds=timeout))
        self._connection = connect_to(address, port, secret, PURPOSE, connect_timeout)
        self._lock = threading.Lock()  # torch's threads use the store, too
        self._numbers = itertools.count()
        self._clones: list[SecretStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self._ask("set", items={key: encode(_to_bytes(value))})

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        items = zip(keys, values, strict=True)
        self._ask("set", items={key: encode(_to_bytes(value)) for key, value in items})

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        answer = self._ask("get", self._default_timeout(), keys=list(keys))
        return [decode(text) for text in answer["values"]]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        seconds = timeout.total_seconds() if timeout else self._default_timeout()
        self._ask("wait", seconds, keys=list(keys))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask("check", keys=list(keys))["found"])

    def add(self, key: str, amount: int) -> int:
        """Add to a key's value, a decimal number that is 0 at first; return the sum."""
        return int(self._ask("add", key=key, number=amount)["number"])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace the expected value ("" for a missing key); return what the key has then."""
        old, new = encode(_to_bytes(expected)), encode(_to_bytes(desired))
        return decode(self._ask("compare_set", key=key, old=old, new=new)["value"])

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value."""
        self._ask("append", key=key, value=encode(_to_bytes(value)))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it had a value."""
        return bool(self._ask("delete", key=key)["found"])

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return list(self._ask("list")["keys"])

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("count")["number"])

    # torch's C++ calls these two by their names in C++.
    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> SecretStore:
        """Return another connection to the same store."""
        clone = SecretStore(*self._place, self._default_timeout())
        self._clones.append(clone)  # see the class: torch keeps no reference to it
        return clone

    def _default_timeout(self) -> float:
        store: Any = self  # torch's stub does not declare the property
        return float(store.timeout.total_seconds())

    def _ask(self, operation: str, wait: float = 0.0, **request: Any) -> Message:
        """Send a request and return the answer; `wait` is how long the server may wait for keys.

        Raises:
            DistStoreError: The keys did not come in time.
            DistNetworkError: The server is gone.
        """
        address, port, _ = self._place
        with self._lock:
            number = next(self._numbers)
            deadline = time.monotonic() + (wait or ANSWER_TIMEOUT)
            try:
                self._connection.send({"id": number, "do": operation, **request})
                while True:
                    answer = self._connection.receive(max(0.0, deadline - time.monotonic()))
                    if answer["id"] == number:  # not that of a request that timed out
                        return answer
            except (OSError, EOFError, ForgedFrame) as error:
                if isinstance(error, TimeoutError) and wait:
                    keys = request["keys"]
                    more = ", ..." if len(keys) > SHOWN else ""
                    raise DistStoreError(
                        f"wait timeout after {wait:g} s, keys: {', '.join(keys[:SHOWN])}{more}"
                    ) from None
                raise DistNetworkError(f"the store at {address}:{port} is gone") from error


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
