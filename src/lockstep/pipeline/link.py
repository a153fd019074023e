"""The link: one direction of one boundary, from the rank of a stage to that of its neighbour.

    page      | length of description | state | bytes inside | micro-batch | step |   24 bytes
              | description (JSON), where it changed | small tensors, each on 64 bytes |
    beyond    a description or tensors that find no room in the page: a message each

Both ends know the order of the messages from the schedule, and the page says which
micro-batch it is of. What the tensors look like is said when it changes, so nearly
every page holds 24 bytes and the numbers themselves, or is followed by tensors that
travel from where they lie to where they shall lie, without a copy between.

A send never waits: what is not done yet is kept until it is. A stage that failed says
so on all its links, in place of what the others wait for.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.errors import LostError, StoppedError, WorkError
from lockstep.pipeline.boundary import Form, Pattern, described, form_of, landed, octets, read, room

__all__ = ["Receiver", "Sender"]

PAGE = 1024
HEADER = struct.Struct("<IIIIQ")
FINE, FAILED = 0, 1


def _rounded(size: int) -> int:
    return -(-size // 64) * 64


def _inside(forms: Sequence[Form], begin: int) -> list[int] | None:
    """Return where in the page each tensor lies, or None where they find no room."""
    places = []
    for form in forms:
        places.append(begin)
        begin += _rounded(form.numel * form.dtype.itemsize)
        if begin > PAGE:
            return None
    return places


@dataclass
class Sender:
    """The sending end, towards rank `peer` of `group`."""

    group: Any
    peer: int
    tag: int
    known: tuple[Pattern, list[Form]] | None = None
    waiting: deque[tuple[list[Any], list[torch.Tensor]]] = field(default_factory=deque)

    def send(self, pattern: Pattern, tensors: Sequence[torch.Tensor], step: int, leaf: int) -> None:
        """Start sending a value that was flattened; what it needs is kept until it is sent."""
        self.reap()
        forms = [form_of(tensor) for tensor in tensors]
        text = b""
        if self.known != (pattern, forms):
            self.known = (pattern, forms)
            text = json.dumps(described(pattern, forms)).encode()
        page = bytearray(PAGE)
        fits = HEADER.size + len(text) <= PAGE
        begin = _rounded(HEADER.size + len(text)) if fits else PAGE + 1
        places = _inside(forms, begin)
        HEADER.pack_into(page, 0, len(text), FINE, begin if places else 0, leaf, step)
        if fits:
            page[HEADER.size : HEADER.size + len(text)] = text
        vectors = [octets(*pair) for pair in zip(tensors, forms, strict=True)]
        cover = torch.frombuffer(page, dtype=torch.uint8)
        if places:
            for vector, place in zip(vectors, places, strict=True):
                cover[place : place + vector.numel()].copy_(vector)
        messages = [cover]
        if not fits:
            messages.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if not places:
            messages += [vector for vector in vectors if vector.numel()]
        works = [self.group.send([message], self.peer, self.tag) for message in messages]
        self.waiting.append((works, [*messages, *tensors]))

    def fail(self, sentence: str, step: int) -> None:
        """Tell the other end that nothing more comes, and why."""
        text = sentence.encode()[: PAGE - HEADER.size]
        page = bytearray(PAGE)
        HEADER.pack_into(page, 0, len(text), FAILED, 0, 0, step)
        page[HEADER.size : HEADER.size + len(text)] = text
        cover = torch.frombuffer(page, dtype=torch.uint8)
        self.waiting.append(([self.group.send([cover], self.peer, self.tag)], [cover]))

    def reap(self) -> None:
        """Let go of what has been sent."""
        while self.waiting and all(work.is_completed() for work in self.waiting[0][0]):
            self.waiting.popleft()

    def drain(self, left: int = 0) -> None:
        """Wait until at most `left` values are on their way."""
        while len(self.waiting) > left:
            works, _ = self.waiting.popleft()
            for work in works:
                work.wait()


@dataclass
class Receiver:
    """The receiving end, from rank `peer` of `group`; tensors are put on `device`."""

    group: Any
    peer: int
    tag: int
    device: torch.device
    known: tuple[Pattern, list[Form]] | None = None
    received: int = 0
    _posted: tuple[Any, torch.Tensor] | None = None

    def post(self) -> None:
        """Ask for the next page, so that it can come while something else is computed."""
        if self._posted is None:
            page = torch.empty(PAGE, dtype=torch.uint8)
            self._posted = self.group.recv([page], self.peer, self.tag), page

    @property
    def forms(self) -> list[Form]:
        """How the tensors that came last lay where they came from."""
        assert self.known is not None
        return self.known[1]

    def receive(
        self, step: int, leaf: int, more: bool = False
    ) -> tuple[Pattern, list[torch.Tensor]]:
        """Wait for the value of a micro-batch; return its pattern and tensors.

        `more` says that another value will come after this one. `received` counts
        bytes. Raises StoppedError where the other rank failed.
        """
        self.post()
        assert self._posted is not None
        work, cover = self._posted
        self._wait(work)
        self._posted = None
        page = memoryview(cover.numpy())  # type: ignore[arg-type]
        length, state, begin, leaf_sent, step_sent = HEADER.unpack_from(page)
        if state == FAILED:
            raise StoppedError(bytes(page[HEADER.size : HEADER.size + length]).decode())
        if (step_sent, leaf_sent) != (step, leaf):
            raise WorkError(
                f"rank {self.peer} sent micro-batch {leaf_sent} of step {step_sent} where "
                f"micro-batch {leaf} of step {step} was expected: all ranks must make the same "
                "calls of the trainer"
            )
        if length:
            self.known = read(json.loads(self._text(page, length)))
        assert self.known is not None
        pattern, forms = self.known
        tensors = self._tensors(cover, forms, begin)
        if more:
            self.post()
        return pattern, tensors

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            said = (str(error).splitlines() or [""])[0]
            raise LostError(f"waited for rank {self.peer}: {said}") from error

    def _text(self, page: memoryview, length: int) -> bytes:
        if HEADER.size + length <= PAGE:
            return bytes(page[HEADER.size : HEADER.size + length])
        text = torch.empty(length, dtype=torch.uint8)
        self._wait(self.group.recv([text], self.peer, self.tag))
        self.received += length
        return text.numpy().tobytes()

    def _tensors(
        self, cover: torch.Tensor, forms: Sequence[Form], begin: int
    ) -> list[torch.Tensor]:
        self.received += PAGE
        rooms = [room(form, self.device) for form in forms]
        if begin:
            places = _inside(forms, begin)
            assert places is not None
            for space, place in zip(rooms, places, strict=True):
                space.copy_(cover[place : place + space.numel()])
        else:
            wanted = [space for space in rooms if space.numel()]
            works = [self.group.recv([space], self.peer, self.tag) for space in wanted]
            for work in works:
                self._wait(work)
            self.received += sum(space.numel() for space in wanted)
        return [landed(*pair) for pair in zip(rooms, forms, strict=True)]
