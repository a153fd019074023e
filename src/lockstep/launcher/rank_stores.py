"""The stores through which the ranks of one launch find each other."""

from __future__ import annotations

import os

from lockstep.kernel.errors import RendezvousError
from lockstep.launcher.channel import Channel
from lockstep.launcher.listening_socket import find_obstacle, get_connectable_address, listen
from lockstep.launcher.private_store import create_store

__all__ = ["RankStores", "choose_port"]


def choose_port(address: str, port: int = 0) -> int:
    """Return a port at which rank 0 can serve a store for ranks that are all on this host.

    Only scripts that call `torch.distributed.init_process_group` themselves use that store.
    """
    with listen(address, port) as listening:
        return int(listening.getsockname()[1])


class RankStores:
    """The stores of one launch.

    Args:
        channel: The fork server's socket for this launch; the server forks a process that serves.

    Attributes:
        is_lost: Whether the process that serves has ended, so that no rank can join any longer.
    """

    def __init__(self, channel: Channel) -> None:
        self.is_lost = False
        self._channel = channel
        self._private: dict[str, int] = {}  # descriptors, by address

    def serve(self, address: str, port: int) -> int:
        """Serve a TCPStore for ranks on several hosts; return the port (0: a free one)."""
        with listen(address, port, is_single_host=False) as listening:
            if reason := find_obstacle(listening):
                raise RendezvousError(f"the store of the ranks cannot be served: {reason}")
            port = int(listening.getsockname()[1])
            host = get_connectable_address(listening)
            message = {"kind": "store", "rank": -1, "host": host, "port": port}
            self._channel.send(message, [listening.fileno()])
        self.is_lost = False
        return port

    def create(self) -> str:
        """Create the private store of ranks that are all on this host.

        Returns:
            Its address, valid until `close_private` or until this launch is closed; "" if the
            system has no such stores.
        """
        created = create_store()
        if created is None:
            return ""
        descriptor, address = created
        self._private[address] = descriptor
        return address

    def close_private(self, address: str) -> None:
        """Close a private store to ranks that have not attached to it."""
        if address in self._private:
            os.close(self._private.pop(address))

    def close(self) -> None:
        """Close all private stores."""
        for address in [*self._private]:
            self.close_private(address)
