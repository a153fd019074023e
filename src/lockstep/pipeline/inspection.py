"""Inspection: whether a stage's blocks depend only on what they are given.

In one process all blocks of a model see the same memory, the same objects, and the same
generators of Python and numpy; stages have their own. What stages cannot hand on is
refused: writes into memory that blocks share in every call, other things in the first calls
and in some later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.model.forward import called
from lockstep.pipeline.aliasing import Arrival, touching
from lockstep.pipeline.boundary import Pattern, flattened, with_aliases
from lockstep.pipeline.python_state import PythonState
from lockstep.randomness import state_of_others

__all__ = ["Inspection"]

T = TypeVar("T")

FIRST, EVERY = 16, 64
"""Which forwards and backwards are inspected: the first ones, then one of so many."""


class Inspection:
    """Calls the blocks of one stage; sometimes it checks what else they use.

    Args:
        is_first: Whether the stage is the first: its blocks may draw from Python's and
            numpy's generators, which are seeded once per micro-batch.
        state: What its blocks keep in Python.
    """

    def __init__(self, is_first: bool, state: PythonState) -> None:
        self._is_first = is_first
        self.state = state
        self._forwards, self._backwards = 0, 0
        self._draws_others = False
        self._is_due = False  # whether the forward that is computed is inspected
        self._buffers_sent: set[int] = set()
        """Positions of outputs that have been seen to be, or to lie in, a buffer."""

    def composed(
        self, blocks: Sequence[nn.Module], data: Any, place: str, others: bool
    ) -> tuple[Any, bool]:
        """Call the blocks, one after another.

        Args:
            blocks: The blocks.
            data: What the first of them is given: of the first stage as `called` takes it, of
                the others one value.
            place: Where the step is, for messages.
            others: Whether earlier stages have drawn from Python's or numpy's generators.

        Returns:
            What the last block returned, and `others` after it.
        """
        self._forwards += 1
        self._is_due = _is_inspected(self._forwards)
        if not self._is_due:
            return self._called(blocks, data, place), others or self._draws_others
        contents, before = self.state.contents(), state_of_others()
        value = self._called(blocks, data, place)
        self.state.compare(contents, place)
        if state_of_others() != before:
            if not self._is_first:
                raise UsageError(
                    f"{place}: a block draws from Python's or numpy's random numbers, which are "
                    "seeded once a micro-batch and not in every stage; draw them from torch "
                    "(torch.rand)"
                )
            self._draws_others = True
        return value, others or self._draws_others

    def handed_on(
        self, value: Any, blocks: Sequence[nn.Module], arrival: Arrival, place: str
    ) -> tuple[Pattern, list[torch.Tensor]]:
        """Check what the blocks wrote into, and flatten what they returned.

        Args:
            value: What the last block returned.
            blocks: The blocks.
            arrival: The tensors that the first of them was given.
            place: Where the step is, for messages.

        Returns:
            The pattern of the value, which names tensors that share memory; and the tensors.
        """
        arrival.check(place)
        pattern, tensors = flattened(value)
        if self._is_due:
            buffers = [each for block in blocks for each in block.buffers()]
            self._buffers_sent |= {*touching(tensors, buffers)}
        staying = [number for number in self._buffers_sent if number < len(tensors)]
        return with_aliases(pattern, arrival.aliases_among(tensors, staying)), tensors

    def loss(self, loss: Callable[[Any], T], outputs: Any, place: str, others: bool) -> T:
        """Return the loss; it may draw from Python's generators if no block has done so."""
        before = state_of_others() if others else None
        value = loss(outputs)
        if others and state_of_others() != before:
            raise UsageError(
                f"{place}: the loss draws from Python's or numpy's random numbers, and so do "
                "blocks of the first stage, whose draws the last stage does not see; draw them "
                "from torch (torch.rand)"
            )
        return value

    @contextmanager
    def backward(self, place: str) -> Iterator[None]:
        """Run a backward in the body."""
        self._backwards += 1
        before = state_of_others() if _is_inspected(self._backwards) else None
        yield
        if before is not None and state_of_others() != before:
            raise UsageError(
                f"{place}: backward (a hook or an autograd function) draws from Python's or "
                "numpy's random numbers, which stages do not hand on to each other; draw them "
                "from torch (torch.rand)"
            )

    def _called(self, blocks: Sequence[nn.Module], data: Any, place: str) -> Any:
        try:
            value = called(blocks[0], data if self._is_first else (data,), place)
            for block in blocks[1:]:
                value = called(block, (value,), place)
        except AttributeError as error:
            if (named := self.state.blame(error, place)) is not None:
                raise named from error
            raise
        return value


def _is_inspected(number: int) -> bool:
    return number <= FIRST or number % EVERY == 0
