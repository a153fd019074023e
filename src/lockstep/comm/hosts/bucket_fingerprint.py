"""What the ranks of a group across hosts compare before they add a bucket.

The ranks of a host compare it in shared memory; ranks that exchange data across hosts send it to
each other, ahead of the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.hosts.link import HostLink
from lockstep.comm.hosts.map import HostMap

__all__ = ["FINGERPRINT_BYTES", "CollectiveFingerprint", "FingerprintExchange"]

FINGERPRINT = struct.Struct("<QQ8s16s")
FINGERPRINT_BYTES = FINGERPRINT.size
FINGERPRINT_TAG = 1 << 30
"""The tag of fingerprints. Those of sums are above it; users' messages have lower ones."""


@dataclass(frozen=True)
class CollectiveFingerprint:
    """What a rank is about to add.

    Attributes:
        number: The number of the sum in its group, from 1.
        count: The number of elements of the bucket.
        digest: The digest of everything else that must be equal.
        dtype: The name of the dtype.
    """

    number: int
    count: int
    digest: bytes
    dtype: str

    @classmethod
    def unpack(cls, data: torch.Tensor) -> CollectiveFingerprint:
        """Return the fingerprint in a vector of `FINGERPRINT_BYTES` bytes."""
        number, count, digest, dtype = FINGERPRINT.unpack(data.numpy().tobytes())
        return cls(number, count, digest, dtype.rstrip(b"\0").decode())

    def pack(self) -> torch.Tensor:
        """Return the fingerprint as a vector of bytes."""
        packed = FINGERPRINT.pack(self.number, self.count, self.digest, self.dtype.encode())
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @property
    def tags(self) -> tuple[int, int, int]:
        """The tags of terms, results and flags, which differ between different sums.

        Receives are posted before the fingerprints are compared, and must not match the messages
        of another sum.
        """
        first = FINGERPRINT_TAG + 1 + zlib.crc32(self.pack().numpy().tobytes()) % (1 << 28) * 3
        return first, first + 1, first + 2

    def describe(self) -> str:
        """Return the sum, such as "reproducible_all_reduce(float32, 4 elements) as sum #2"."""
        what = f"{self.dtype}, {self.count} elements"
        return f"reproducible_all_reduce({what}) as sum #{self.number}"


class FingerprintExchange:
    """The fingerprints of the ranks on other hosts that exchange data with this one.

    Args:
        link: The messages of this rank.
        hosts: The ranks of each host.
        own: The fingerprint of this rank.
    """

    def __init__(self, link: HostLink, hosts: HostMap, own: CollectiveFingerprint) -> None:
        self._works: list[Any] = []
        self._received: dict[int, torch.Tensor] = {}
        packed = own.pack()
        for peer in hosts.partners(link.rank):
            self._received[peer] = received = torch.empty_like(packed)
            self._works.append(link.receive(received, peer, FINGERPRINT_TAG))
            self._works.append(link.send(packed, peer, FINGERPRINT_TAG))

    def wait(self) -> Mapping[int, CollectiveFingerprint]:
        """Wait for the fingerprints; return them by rank."""
        for work in self._works:
            work.wait()
        return {
            peer: CollectiveFingerprint.unpack(received)
            for peer, received in self._received.items()
        }
