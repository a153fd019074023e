"""The stores through which the ranks of one launch find each other, served by their launcher."""

from __future__ import annotations

import os
import socket

from lockstep.launcher.channel import Channel, Message
from lockstep.launcher.listening_socket import find_obstacle, get_connectable_address, listen
from lockstep.launcher.private_store import create_store
from lockstep.messages import log

__all__ = ["RankStores"]


class RankStores:
    """The stores of one launch.

    Args:
        channel: The fork server's socket for this launch; the server forks a process that serves.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._private: dict[str, int] = {}  # descriptors, by address

    def serve(self, address: str, port: int, *, is_single_host: bool = True) -> int:
        """Serve a TCPStore at `address`:`port` (0: a free port); return the port.

        Without a loopback interface nothing is served. On a single host, only scripts that call
        `torch.distributed.init_process_group` themselves need this store.
        """
        with listen(address, port, is_single_host=is_single_host) as listening:
            self.start(listening, is_single_host=is_single_host)
            return int(listening.getsockname()[1])

    def start(self, listening: socket.socket, *, is_single_host: bool = True) -> None:
        """Serve the ranks' store as `serve` does, on a socket that already listens."""
        if reason := find_obstacle(listening, is_accepted=is_single_host):
            log(f"{reason}; torch.distributed.init_process_group cannot connect the ranks")
            return
        message: Message = {
            "kind": "store",
            "rank": -1,
            # The ranks of one host have a private store: most of them never connect to this one.
            "is_on_demand": is_single_host,
            "host": get_connectable_address(listening),
            "port": int(listening.getsockname()[1]),
        }
        self._channel.send(message, [listening.fileno()])

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
