"""Point-to-point transfer of values between neighboring stages, in one direction per link.

    page      | length of metadata | state | micro-batch | attempt | RNG state | group size |
              | metadata (pickle), if new and if it fits                                     |
    beyond    longer metadata, and each tensor: one message each

The schedule determines the order of the messages, and each page names its micro-batch. The
metadata of the tensors is sent only when it changes, so most pages hold a header. The tensors
follow as separate messages, without an intermediate copy if they are dense; those of an accelerator
are copied to pinned memory if the backend is Gloo.

A send never blocks: its buffers are kept until it is complete. A stage that failed sends its
failure on all its links, in place of the messages that others wait for.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lockstep.comm.activity import Waiting
from lockstep.comm.collectives import is_staged, to_pinned
from lockstep.devices import is_accelerator
from lockstep.kernel.errors import CommunicationError, LostError, StoppedError, WorkError
from lockstep.launcher.failure_codes import is_lost_peer
from lockstep.pipeline.boundary import (
    Structure,
    TensorMeta,
    allocate_for,
    describe_tensor,
    view_bytes,
    view_received,
)

__all__ = [
    "INITIAL_RNG_STATE",
    "ONE_BY_ONE",
    "GroupSize",
    "LinkError",
    "Receiver",
    "RngState",
    "Sender",
]

PAGE = 1024
HEADER = struct.Struct("<IIIQIIHH")
OK = 0
FAILED = 1


class LinkError(CommunicationError):
    """A value did not come from another rank, which may still run; the link cannot be used."""


@dataclass(frozen=True)
class RngState:
    """The state of the random numbers of a micro-batch; every message carries it.

    In forward each block has its own seed. In the backward of one process, hooks and autograd
    functions draw from torch's generators, which continue from their state after the loss,
    through the blocks from the last to the first. So each stage sends the state with the
    gradients, unless nothing has been drawn since the generators were seeded for the loss.

    Attributes:
        last_call: The number of the last call of the model's first RNG scope, which is a part of
            the seed of the loss.
        torch_state: The state of torch's generators, in backward; None if nothing has been
            drawn since they were seeded for the loss.
    """

    last_call: int = 0
    torch_state: bytes | None = None


INITIAL_RNG_STATE = RngState()


class GroupSize(NamedTuple):
    """How many micro-batches the stages compute between the actions of others.

    Attributes:
        size: In forward, the number in this step, which the first rank chooses. In backward, the
            largest number for which this stage and the later ones have memory.
        joined: In backward, the largest number that one of these stages computes in one pass.
    """

    size: int = 1
    joined: int = 1


ONE_BY_ONE = GroupSize()


Metadata = tuple[Structure, list[TensorMeta]]
"""The structure of the last value and the layouts of its tensors, for pages without metadata."""


@dataclass
class Sender:
    """The sending end of a link to rank `peer` of `group`, for tensors on `device`."""

    group: Any
    peer: int
    tag: int
    device: torch.device
    known: Metadata | None = None
    waiting: deque[tuple[list[Any], list[torch.Tensor]]] = field(default_factory=deque)

    def send(
        self,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        attempt: int,
        index: int,
        rng_state: RngState = INITIAL_RNG_STATE,
        group: GroupSize = ONE_BY_ONE,
    ) -> None:
        """Start sending a flattened value; its memory is kept until the transfer is complete."""
        self.reap()
        has_state = rng_state.torch_state is not None
        if rng_state.torch_state is not None:
            tensors = [
                *tensors,
                torch.frombuffer(bytearray(rng_state.torch_state), dtype=torch.uint8),
            ]
        metas = [describe_tensor(tensor) for tensor in tensors]
        text = b""
        if self.known != (structure, metas):
            self.known = structure, metas
            text = pickle.dumps(self.known)
        fits = HEADER.size + len(text) <= PAGE
        page = torch.empty(PAGE, dtype=torch.uint8)
        written = memoryview(page.numpy())  # type: ignore[arg-type]
        call = rng_state.last_call
        HEADER.pack_into(written, 0, len(text), OK, index, attempt, call, has_state, *group)
        if text and fits:
            written[HEADER.size : HEADER.size + len(text)] = text
        vectors = [view_bytes(*pair) for pair in zip(tensors, metas, strict=True)]
        messages = [page]
        if not fits:
            messages.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        staged = is_staged(self.device, self.group)
        messages += [
            to_pinned(vector) if staged and is_accelerator(vector.device) else vector
            for vector in vectors
            if len(vector)
        ]
        works = [self.group.send([message], self.peer, self.tag) for message in messages]
        self.waiting.append((works, [*messages, *tensors]))

    def fail(self, reason: str, attempt: int) -> None:
        """Send the reason why no further values will be sent in this attempt."""
        text = reason.encode()[: PAGE - HEADER.size]
        page = bytearray(PAGE)
        HEADER.pack_into(page, 0, len(text), FAILED, 0, attempt, 0, 0, *ONE_BY_ONE)
        page[HEADER.size : HEADER.size + len(text)] = text
        cover = torch.frombuffer(page, dtype=torch.uint8)
        self.waiting.append(([self.group.send([cover], self.peer, self.tag)], [cover]))

    def reap(self) -> None:
        """Release the memory of completed transfers."""
        while self.waiting and all(work.is_completed() for work in self.waiting[0][0]):
            self.waiting.popleft()

    def drain(self, left: int = 0) -> None:
        """Wait until at most `left` values are in transit."""
        while len(self.waiting) > left:
            works, _ = self.waiting.popleft()
            with Waiting(f"send of activations or gradients to rank {self.peer}"):
                for work in works:
                    work.wait()


@dataclass
class Receiver:
    """The receiving end of a link from rank `peer` of `group`; tensors are stored on `device`."""

    group: Any
    peer: int
    tag: int
    device: torch.device
    known: Metadata | None = None
    rng_state: RngState = INITIAL_RNG_STATE
    """The random state that was received with the last value."""
    group_size: GroupSize = ONE_BY_ONE
    """The group size that was received with it."""
    _posted: tuple[Any, torch.Tensor] | None = None
    _index: int = -1

    def post(self) -> None:
        """Post the receive of the next page, so that the transfer overlaps with computation."""
        if self._posted is None:
            page = torch.empty(PAGE, dtype=torch.uint8)
            self._posted = self.group.recv([page], self.peer, self.tag), page

    @property
    def metas(self) -> list[TensorMeta]:
        """The layouts that the last received tensors had on the sender."""
        assert self.known is not None
        return self.known[1]

    def receive(
        self, attempt: int, index: int, more: bool = False
    ) -> tuple[Structure, list[torch.Tensor]]:
        """Wait for the value of a micro-batch; return its structure and tensors.

        Args:
            attempt: The number of the attempt.
            index: The number of the micro-batch.
            more: Whether another value follows, whose receive is then posted.

        Raises:
            StoppedError: The other rank failed.
            LostError: A rank is lost.
            LinkError: The value did not come, such as within the timeout.
        """
        self.post()
        assert self._posted is not None
        work, cover = self._posted
        self._index = index
        self._wait(work)
        self._posted = None
        page = memoryview(cover.numpy())  # type: ignore[arg-type]
        length, state, index_sent, attempt_sent, call, has_state, *group = HEADER.unpack_from(page)
        if state == FAILED:
            raise StoppedError(bytes(page[HEADER.size : HEADER.size + length]).decode())
        if (attempt_sent, index_sent) != (attempt, index):
            raise WorkError(
                f"rank {self.peer} sent micro-batch {index_sent} of attempt {attempt_sent} where "
                f"micro-batch {index} of attempt {attempt} was expected: all ranks must make the "
                "same calls of the trainer"
            )
        if length:
            self.known = pickle.loads(self._receive_text(page, length))
        assert self.known is not None
        structure, metas = self.known
        tensors = self._receive_tensors(metas, has_state=bool(has_state))
        if more:
            self.post()
        generators = tensors.pop().cpu().numpy().tobytes() if has_state else None
        self.rng_state = RngState(call, generators)
        self.group_size = GroupSize(*group)
        return structure, tensors

    def _wait(self, work: Any) -> None:
        try:
            with Waiting(f"receive of micro-batch {self._index} from rank {self.peer}"):
                work.wait()
        except RuntimeError as error:
            message = (str(error).splitlines() or [""])[0]
            kind = LostError if is_lost_peer(error) else LinkError
            raise kind(f"waited for rank {self.peer}: {message}") from error

    def _receive_text(self, page: memoryview, length: int) -> bytes:
        if HEADER.size + length <= PAGE:
            return bytes(page[HEADER.size : HEADER.size + length])
        text = torch.empty(length, dtype=torch.uint8)
        self._wait(self.group.recv([text], self.peer, self.tag))
        return text.numpy().tobytes()

    def _receive_tensors(
        self, metas: Sequence[TensorMeta], *, has_state: bool
    ) -> list[torch.Tensor]:
        """Receive the tensors that follow the page, each into its own memory.

        With `has_state`, the last one is the state of the generators, which is on the CPU.
        """
        staged = is_staged(self.device, self.group)
        devices = [torch.device("cpu") if staged else self.device] * len(metas)
        if has_state:
            devices[-1] = torch.device("cpu")
        rooms = [allocate_for(*pair) for pair in zip(metas, devices, strict=True)]
        wanted = [
            space[meta.padding :] for space, meta in zip(rooms, metas, strict=True) if meta.nbytes
        ]
        works = [self.group.recv([space], self.peer, self.tag) for space in wanted]
        for work in works:
            self._wait(work)
        if staged:
            tensors = rooms[:-1] if has_state else rooms
            rooms[: len(tensors)] = [tensor.to(self.device) for tensor in tensors]
        return [
            view_received(space, meta.padding, meta)
            for space, meta in zip(rooms, metas, strict=True)
        ]
