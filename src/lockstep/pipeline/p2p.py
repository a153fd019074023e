"""The link: one direction of one boundary, from the rank of a stage to that of its neighbour.

    page      | length of description | state | bytes inside | micro-batch | attempt | draws |
              | description (JSON), where it changed | small tensors, as they lay in 64 bytes |
    beyond    a description or tensors that find no room in the page: a message each

Both ends know the order of the messages from the schedule, and the page says which
micro-batch it is of. What the tensors look like is said when it changes, so nearly
every page holds 32 bytes and the numbers themselves, which stay where they came to, or is
followed by tensors that travel from where they lie to where they shall lie, without
a copy between.

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
from lockstep.pipeline.draws import NO_DRAWS, Draws

__all__ = ["Receiver", "Sender"]

PAGE = 1024
HEADER = struct.Struct("<IIIIQII")
FINE, FAILED = 0, 1
OTHERS, STATE = 1, 2
"""Flags of draws: from Python's or numpy's generators; the state of torch's is the last tensor."""


def _rounded(size: int) -> int:
    return -(-size // 64) * 64


BARE = _rounded(HEADER.size)  # where tensors begin in a page without a description


def _inside(forms: Sequence[Form], begin: int) -> list[int] | None:
    """Return where in the page each tensor's bytes lie, or None where they find no room."""
    places = []
    for form in forms:
        places.append(begin + form.lead)
        begin += _rounded(form.lead + form.nbytes)
        if begin > PAGE:
            return None
    return places


@dataclass
class Known:
    """What both ends know of the last value: pages that say nothing new repeat it.

    `places` is where its tensors lie in a page without a description.
    """

    pattern: Pattern
    forms: list[Form]

    def __post_init__(self) -> None:
        """Place the tensors."""
        self.places = _inside(self.forms, BARE)


@dataclass
class Sender:
    """The sending end, towards rank `peer` of `group`."""

    group: Any
    peer: int
    tag: int
    known: Known | None = None
    waiting: deque[tuple[list[Any], list[torch.Tensor]]] = field(default_factory=deque)

    def send(
        self,
        pattern: Pattern,
        tensors: Sequence[torch.Tensor],
        attempt: int,
        leaf: int,
        draws: Draws = NO_DRAWS,
    ) -> None:
        """Start sending a value that was flattened; what it needs is kept until it is sent."""
        self.reap()
        flags = OTHERS * draws.others
        if draws.state is not None:
            flags |= STATE
            tensors = [*tensors, torch.frombuffer(bytearray(draws.state), dtype=torch.uint8)]
        forms = [form_of(tensor) for tensor in tensors]
        text = b""
        if self.known is None or self.known.forms != forms or self.known.pattern != pattern:
            self.known = Known(pattern, forms)
            text = json.dumps(described(pattern, forms)).encode()
        fits = HEADER.size + len(text) <= PAGE
        begin, places = BARE, self.known.places
        if text:
            begin = _rounded(HEADER.size + len(text))
            places = _inside(forms, begin) if fits else None
        page = torch.empty(PAGE, dtype=torch.uint8)
        written = memoryview(page.numpy())  # type: ignore[arg-type]
        begin = begin if places else 0
        HEADER.pack_into(written, 0, len(text), FINE, begin, leaf, attempt, draws.call, flags)
        if text and fits:
            written[HEADER.size : HEADER.size + len(text)] = text
        vectors = [octets(*pair) for pair in zip(tensors, forms, strict=True)]
        messages = [page]
        if not fits:
            messages.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if places:
            for vector, place in zip(vectors, places, strict=True):
                page[place : place + len(vector)].copy_(vector)
        else:
            messages += [vector for vector in vectors if len(vector)]
        works = [self.group.send([message], self.peer, self.tag) for message in messages]
        self.waiting.append((works, [*messages, *tensors]))

    def fail(self, sentence: str, attempt: int) -> None:
        """Tell the other end that nothing more comes, and why."""
        text = sentence.encode()[: PAGE - HEADER.size]
        page = bytearray(PAGE)
        HEADER.pack_into(page, 0, len(text), FAILED, 0, 0, attempt, 0, 0)
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
    known: Known | None = None
    received: int = 0
    draws: Draws = NO_DRAWS
    """What came with the value that came last."""
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
        return self.known.forms

    def receive(
        self, attempt: int, leaf: int, more: bool = False
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
        length, state, begin, leaf_sent, attempt_sent, call, flags = HEADER.unpack_from(page)
        if state == FAILED:
            raise StoppedError(bytes(page[HEADER.size : HEADER.size + length]).decode())
        if (attempt_sent, leaf_sent) != (attempt, leaf):
            raise WorkError(
                f"rank {self.peer} sent micro-batch {leaf_sent} of attempt {attempt_sent} where "
                f"micro-batch {leaf} of attempt {attempt} was expected: all ranks must make the "
                "same calls of the trainer"
            )
        if length:
            self.known = Known(*read(json.loads(self._text(page, length))))
        assert self.known is not None
        self.received += PAGE
        if begin:
            tensors = self._inside(cover, self.known, begin)
        else:
            tensors = self._behind(self.known.forms)
        if more:
            self.post()
        generators = tensors.pop().cpu().numpy().tobytes() if flags & STATE else None
        self.draws = Draws(call, bool(flags & OTHERS), generators)
        return self.known.pattern, tensors

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

    def _inside(self, cover: torch.Tensor, known: Known, begin: int) -> list[torch.Tensor]:
        """Return the tensors that came in the page; it is their memory from now on."""
        first = begin == BARE
        places = known.places if first else _inside(known.forms, begin)
        assert places is not None
        if self.device.type != "cpu":
            cover = cover.to(self.device)
        return [landed(cover, *pair) for pair in zip(places, known.forms, strict=True)]

    def _behind(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        """Return the tensors that come behind the page, each in memory of its own."""
        rooms = [room(form, self.device) for form in forms]
        wanted = [
            space[form.lead :] for space, form in zip(rooms, forms, strict=True) if form.nbytes
        ]
        works = [self.group.recv([space], self.peer, self.tag) for space in wanted]
        for work in works:
            self._wait(work)
        self.received += sum(map(len, wanted))
        return [landed(space, form.lead, form) for space, form in zip(rooms, forms, strict=True)]
