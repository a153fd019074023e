"""Inspection: checks that the blocks of a stage depend on nothing but their inputs.

In one process all blocks of a model share memory, Python objects, and the generators of Python
and numpy; each stage has separate ones. Dependencies that stages cannot transfer raise an error:
writes into shared memory, and changes of objects that several stages refer to, are detected in
every call, other dependencies in the first calls and in some later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.foreign_messages import META_DEVICE
from lockstep.kernel.errors import LayoutError, LossError
from lockstep.model.deferred_init import Released
from lockstep.model.forward import call_model
from lockstep.model.generator_states import state_of_others
from lockstep.model.python_state import PythonState
from lockstep.pipeline.aliasing import ReceivedTensors, find_overlapping
from lockstep.pipeline.boundary import Structure, add_aliases, flatten

__all__ = ["BlockInspector"]

T = TypeVar("T")

FIRST = 16
EVERY = 64
"""The first 16 forwards and backwards are inspected, then every 64th."""


class BlockInspector:
    """Calls the blocks of one stage, and inspects some of the calls.

    Args:
        is_first: Whether the stage is the first, whose data is that of the batch.
        state: The Python state of its blocks.
        names: The names of its blocks.
    """

    def __init__(self, is_first: bool, state: PythonState, names: Sequence[str]) -> None:
        self._is_first = is_first
        self._users = [f"block {name}" for name in names]
        # what is being called
        self._where = ""
        self._user = ""
        self.state = state
        self._forwards = 0
        self._backwards = 0
        self._is_due = False  # whether the current forward is inspected
        self._buffers_sent: set[int] = set()
        """Positions of outputs that were found to share memory with a buffer."""

    def call_blocks(
        self,
        blocks: Sequence[nn.Module],
        data: Any,
        where: str,
        run: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> Any:
        """Call the blocks, one after another.

        Args:
            blocks: The blocks.
            data: The arguments of the first block: in the first stage as `call_model` accepts them,
                in later stages one value.
            where: Rank, stage, step and micro-batch, for messages.
            run: What calls a function that calls the blocks; None: nothing else does.

        Returns:
            The output of the last block.
        """
        self._forwards += 1
        self._is_due = _is_inspected(self._forwards)
        call = partial(self.call_in_turn, blocks, data, where)
        if run is not None:
            call = partial(run, call)
        if not self._is_due:
            value = call()
            self.state.check(where)
            return value
        contents = self.state.snapshot()
        before = state_of_others()
        value = call()
        self.state.record_changes(contents, where)
        if state_of_others() != before:
            raise LayoutError(
                f"{where}: a block draws from Python's or numpy's random numbers, which are "
                "seeded once per micro-batch, not in every stage; draw them from torch "
                "(torch.rand)"
            )
        return value

    def flatten_output(
        self, value: Any, blocks: Sequence[nn.Module], received: ReceivedTensors, where: str
    ) -> tuple[Structure, list[torch.Tensor]]:
        """Check that the blocks wrote into no shared memory, and flatten their output.

        Args:
            value: The output of the last block.
            blocks: The blocks.
            received: The input tensors of the stage.
            where: Rank, stage, step and micro-batch, for messages.

        Returns:
            The structure of the value, including the tensors that share memory; and the tensors.
        """
        received.check(where)
        structure, tensors = flatten(value)
        if self._is_due:
            for tensor in tensors:
                names = [] if isinstance(tensor, nn.Parameter) else list(vars(tensor))
                if names:
                    raise LayoutError(
                        f"{where}: a block returned a tensor with the attribute {names[0]}, which "
                        "the next stage would not get: return the value beside the tensor, in a "
                        "tuple"
                    )
            buffers = [buffer for block in blocks for buffer in block.buffers()]
            self._buffers_sent |= {*find_overlapping(tensors, buffers)}
        local = [number for number in self._buffers_sent if number < len(tensors)]
        return add_aliases(structure, received.find_aliases(tensors, local)), tensors

    def compute_loss(self, loss: Callable[[Any], T], outputs: Any, where: str) -> T:
        """Return the loss."""
        with self._explaining(where, "the loss"):
            return loss(outputs)

    @contextmanager
    def check_backward(self, where: str) -> Iterator[None]:
        """Check that a backward in the body does not draw from Python's or numpy's generators."""
        self._backwards += 1
        before = state_of_others() if _is_inspected(self._backwards) else None
        with self._explaining(where, "a hook or an autograd function"):
            yield
        if before is not None and state_of_others() != before:
            raise LayoutError(
                f"{where}: backward (a hook or an autograd function) draws from Python's or "
                "numpy's random numbers, whose state stages do not transfer; draw them "
                "from torch (torch.rand)"
            )

    def call_in_turn(self, blocks: Sequence[nn.Module], data: Any, where: str) -> Any:
        """Call the blocks, one after another, without an inspection."""
        given = data if self._is_first else (data,)
        with self._explaining(where, ""):
            for user, block in zip(self._users, blocks, strict=True):
                self._user = user
                value = call_model(block, given, where)
                given = (value,)
        return value

    @contextmanager
    def _explaining(self, where: str, user: str) -> Iterator[None]:
        """Name what fails in the body because it reads what is in another stage."""
        self._where = where
        self._user = user
        Released.reader = self._describe_reader
        try:
            yield
        except AttributeError as error:
            if (named := self.state.explain_missing(error, where)) is not None:
                raise named from error
            raise
        except (RuntimeError, LossError) as error:
            if not META_DEVICE.search(str(error)):
                raise
            raise LayoutError(
                f"{self._describe_reader()} computes with a tensor on the meta device, which is "
                "the device of the parameters of other stages: take the device from its inputs "
                f"({(str(error).splitlines() or [''])[0]})"
            ) from error
        finally:
            Released.reader = None

    def _describe_reader(self) -> str:
        return f"{self._where}: {self._user}"


def _is_inspected(number: int) -> bool:
    return number <= FIRST or number % EVERY == 0
