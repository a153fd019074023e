"""A store of torch that is served by a `StoreServer`, for processes with the run's secret."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    Store,
)

from lockstep.comm.transport.message_codec import ForgedMessage
from lockstep.comm.transport.message_connection import MessageConnection, connect_to
from lockstep.launcher.store_server import PURPOSE, decode, encode

__all__ = ["SecretStore"]

ANSWER_TIMEOUT = 30.0  # seconds for an answer that waits for no key
LATE = 5.0  # seconds for the answer that keys have not come in time
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
        self._endpoint = address, port, secret
        self.set_timeout(timedelta(seconds=timeout))
        self._connection: MessageConnection | None = connect_to(
            address, port, secret, PURPOSE, connect_timeout
        )
        self._lock = threading.Lock()  # torch's threads use the store, too
        self._clones: list[SecretStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        items = zip(keys, values, strict=True)
        self._ask("set", items={key: _encode(value) for key, value in items})

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return [decode(text) for text in self._ask_for("get", keys, self._default_timeout())]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._ask_for("wait", keys, timeout.total_seconds() if timeout else self._default_timeout())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask("check", keys=list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's value, a decimal number that is 0 at first; return the sum."""
        return int(self._ask("add", key=key, number=amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace the expected value ("" for a missing key); return what the key has then."""
        old, new = _encode(expected), _encode(desired)
        return decode(self._ask("compare_set", key=key, old=old, new=new))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value."""
        self._ask("append", key=key, value=_encode(value))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it had a value."""
        return bool(self._ask("delete", key=key))

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return list(self._ask("list"))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self.list_keys())

    # torch's C++ calls these two by their names in C++.
    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> SecretStore:
        """Return another connection to the same store."""
        clone = SecretStore(*self._endpoint, self._default_timeout())
        self._clones.append(clone)  # see the class: torch keeps no reference to it
        return clone

    def _default_timeout(self) -> float:
        store: Any = self  # torch's stub does not declare the property
        return float(store.timeout.total_seconds())

    def _ask_for(self, operation: str, keys: Sequence[str], seconds: float) -> Any:
        """Send a request that waits for keys, and return its result.

        Raises:
            DistStoreError: The keys did not come in time.
        """
        result = self._ask(operation, seconds + LATE, keys=list(keys), seconds=seconds)
        if result is False:
            more = ", ..." if len(keys) > SHOWN else ""
            raise DistStoreError(
                f"wait timeout after {seconds:g} s, keys: {', '.join(keys[:SHOWN])}{more}"
            )
        return result

    def _ask(self, operation: str, timeout: float = ANSWER_TIMEOUT, **request: Any) -> Any:
        """Send a request and return the result, which must come within `timeout` seconds.

        Raises:
            DistNetworkError: The server is gone.
        """
        address, port, secret = self._endpoint
        with self._lock:
            connection = self._connection or connect_to(address, port, secret, PURPOSE)
            self._connection = connection
            try:
                connection.send({"do": operation, **request})
                return connection.receive(timeout)["result"]
            except (OSError, EOFError, ForgedMessage) as error:
                connection.shut_down()
                raise DistNetworkError(f"the store at {address}:{port} is gone") from error
            except BaseException:  # the answer may come later, so the next request begins anew
                connection.close()
                self._connection = None
                raise


def _encode(value: str | bytes) -> str:
    return encode(value.encode() if isinstance(value, str) else bytes(value))
