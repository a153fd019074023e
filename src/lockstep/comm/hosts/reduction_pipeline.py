"""The pipeline of one reduction across hosts: chunks of slices, and the messages between hosts.

    chunk i          the ranks of a host publish it; each rank combines the terms of the slices
                     that it handles, and sends them to the ranks that add them
    chunk i - 1      each owner receives the terms of its slice from the other hosts, combines them
                     with those of its own host in the order of the tree, and sends the result back;
                     in an exchange, both hosts add, and no result is sent
    chunk i - 3      the results have arrived; every rank of the host takes them; at the end, those
                     of the last three chunks together

When a rank waits for a chunk, the messages of two later steps are queued in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from lockstep.comm.bucket import round_up
from lockstep.comm.hosts.compression import Codec
from lockstep.comm.hosts.reduction_plan import ReductionPlan, Term
from lockstep.comm.reduction_arithmetic import Reduction
from lockstep.kernel.tree import Node

__all__ = ["COMPARED", "SLOTS", "Agreement", "Pipeline", "Values"]

DELAY = 3
"""The number of chunks between the publication of a chunk and the use of its results."""

SLOTS = DELAY + 2
"""The number of staging buffers of a rank. A rank writes the buffer of chunk i while other ranks
may still read that of chunk i - 4. It reduces chunk i - 1 while chunk i + 2 is received."""

AHEAD = 2
"""The number of chunks whose receives are posted early. Gloo announces a receive in the connection
that it shares with data, and the sender waits for that."""


class Values(Protocol):
    """The values of the ranks of a host, in memory that they share; chunks count from 0."""

    def load(self, chunk: int) -> None:
        """Put this rank's values of a chunk there."""

    def publish(self) -> None:
        """Wait until all ranks of the host have loaded the chunk, unless they had before."""

    def read(self, rank: int, number: int, slice_: int, chunk: int) -> torch.Tensor:
        """Return the values of node `number` of a rank of this host."""

    def result(self, slice_: int, chunk: int) -> torch.Tensor:
        """Return the memory for the result of a slice that this rank handles."""

    def spread(self, slice_: int, chunk: int) -> None:
        """Write a result of this rank to the other ranks of the host, unless they read it."""

    def store(self, chunk: int) -> None:
        """Take the results of a chunk, of which all ranks of the host have theirs."""

    def end(self) -> None:
        """Finish the call."""

    def parts(
        self, inputs: Sequence[Sequence[tuple[int, int]]], slice_: int, chunk: int
    ) -> list[tuple[slice, list[bool]]]:
        """Return the parts of a chunk of a slice, and which inputs are present in each.

        Args:
            inputs: For each input, the (rank, number of the node) of the values that it combines.
            slice_: The slice.
            chunk: The chunk.

        Returns:
            Presence is a flag per input; an empty list means that all are present.
        """


@dataclass(frozen=True)
class Agreement:
    """What the ranks that make the same call have in common.

    Attributes:
        tag: A number, different for different calls: receives are posted before the calls are
            compared, and must not match the messages of another call.
        join: Waits for the ranks of this host, and raises an error if they make different calls;
            None if they have been compared. The first chunk is published by it.
        check: Compares the calls with those of other hosts, and raises an error if they differ. It
            is called when the first messages have been sent.
    """

    tag: int = 0
    join: Callable[[], object] | None = None
    check: Callable[[], object] = lambda: None

    def joined(self) -> Agreement:
        """Compare the calls of this host now, if they have not been compared; return the rest."""
        if self.join is None:
            return self
        self.join()
        return replace(self, join=None)

    @property
    def tags(self) -> tuple[int, int, int]:
        """The tags of terms, results and flags, below those of all other messages."""
        first = self.tag % (1 << 28) * 4
        return first, first + 1, first + 2


COMPARED = Agreement()
"""The agreement of a caller which knows that all ranks make the same call."""


class Messenger(Protocol):
    """The messages and buffers of one rank.

    Attributes:
        rank: This rank.
        host: The number of its host.
    """

    rank: int
    host: int

    def buffer(self, name: str, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer, which is kept for the next calls."""

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to send a vector to a rank of another host."""

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to receive a vector from a rank of another host."""


class Receipt:
    """Values that are being received.

    Args:
        work: The work that receives the message.
        values: Where the values are, in the end.
        message: The memory of the compressed message.
        codec: The codec that reads it; None if the values themselves are received.
    """

    def __init__(
        self,
        work: Any,
        values: torch.Tensor,
        message: torch.Tensor | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._work, self._values, self._message, self._codec = work, values, message, codec

    def wait(self) -> torch.Tensor:
        """Wait for the message; return the values."""
        self._work.wait()
        if self._codec is not None and self._message is not None:
            self._codec.decode(self._message, self._values)
        return self._values


class Pipeline:
    """The messages of one call."""

    def __init__(
        self,
        reducer: Messenger,
        plan: ReductionPlan,
        reduction: Reduction,
        values: Values,
        sizes: Sequence[int],
        chunk: int,
        codec: Codec | None,
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._term_tag, self._result_tag, _ = agreement.tags
        self._reducer, self._plan, self._reduction = reducer, plan, reduction
        self._codec = codec
        self._rounding = None if codec is None or codec.is_lossless else codec
        self._values, self._sizes, self._chunk = values, sizes, chunk
        self._handled = plan.handled(reducer.rank)
        self._others = [each for each in range(len(plan.map.hosts)) if each != reducer.host]
        # By chunk: works that send, and (slice, works) that receive terms and results.
        self._sends: dict[int, list[Any]] = {}
        self._terms: dict[tuple[int, int], list[tuple[Receipt, Term]]] = {}  # by slice, too
        self._results: dict[int, list[tuple[int, Receipt]]] = {}
        # In an exchange, the term of this host by chunk and slice, as the other host receives it.
        self._exchanged: dict[tuple[int, int], torch.Tensor] = {}

    def run(self) -> int:
        """Pass all chunks through the pipeline; return their number."""
        values, agreement = self._values, self._agreement
        chunks = round_up(max(self._sizes, default=0), self._chunk) // self._chunk
        if not chunks:
            agreement.joined().check()
            values.end()
            return 0
        for early in range(min(AHEAD, chunks)):
            self._receive_chunk(early)
        for i in range(chunks):
            values.load(i)
            if i >= DELAY:
                self._finish(i - DELAY)
            if i == 0 and agreement.join is not None:
                agreement.join()
            else:
                values.publish()
            if i >= DELAY:
                values.store(i - DELAY)
            if i + AHEAD < chunks:
                self._receive_chunk(i + AHEAD)
            self._send_terms(i)
            if i == 0:
                agreement.check()
            else:
                self._reduce(i - 1)
        self._reduce(chunks - 1)
        last = range(max(chunks - DELAY, 0), chunks)
        for i in last:
            self._finish(i)
        values.publish()
        for i in last:
            values.store(i)
        values.end()
        return chunks

    def _size(self, slice_: int, chunk: int) -> int:
        return max(0, min(self._chunk, self._sizes[slice_] - chunk * self._chunk))

    def _term_dtype(self, host: int) -> torch.dtype:
        return self._reduction.wide if self._plan.is_wide[host] else self._reduction.dtype

    def _send_terms(self, chunk: int) -> None:
        """Send the terms of a chunk to the ranks that add them."""
        reducer, plan = self._reducer, self._plan
        sends = self._sends.setdefault(chunk, [])
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            receivers = plan.receivers(reducer.rank, slice_)
            if not size or not receivers:
                continue
            for n, term in enumerate(plan.terms[reducer.host]):
                name = f"term {slice_} {n}"
                value = self._term(term, name, slice_, chunk, size)
                message = self._encode(value, name, chunk)
                if plan.is_exchange:
                    self._exchanged[chunk, slice_] = self._as_received(value, message, name, chunk)
                sends += [reducer.send(message, each, self._term_tag) for each in receivers]

    def _receive_chunk(self, chunk: int) -> None:
        """Start to receive the terms that this rank adds, and the results of other slices."""
        plan, reducer = self._plan, self._reducer
        results = self._results.setdefault(chunk, [])
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            if not size:
                continue
            if plan.reduces(reducer.rank, slice_):
                receives = self._terms[chunk, slice_] = []
                for host in self._others:
                    dtype = self._term_dtype(host)
                    for n, term in enumerate(plan.terms[host]):
                        name = f"received {slice_} {host} {n}"
                        buffer = reducer.buffer(name, chunk % SLOTS, size, dtype)
                        handler = plan.handler(slice_, host)
                        receives.append(
                            (self._receive(buffer, handler, self._term_tag, name, chunk), term)
                        )
            elif plan.returns:
                target = self._values.result(slice_, chunk)
                name, owner = f"result {slice_}", plan.owners[slice_]
                results.append(
                    (slice_, self._receive(target, owner, self._result_tag, name, chunk))
                )

    def _receive(self, target: torch.Tensor, rank: int, tag: int, name: str, chunk: int) -> Receipt:
        """Start to receive values, compressed or not."""
        if self._codec is None:
            return Receipt(self._reducer.receive(target, rank, tag), target)
        size = self._codec.bound(target.numel())
        message = self._reducer.buffer(f"coded {name}", chunk % SLOTS, size, torch.uint8)
        work = self._reducer.receive(message, rank, tag)
        return Receipt(work, target, message, self._codec)

    def _encode(self, values: torch.Tensor, name: str, chunk: int) -> torch.Tensor:
        """Return the message with these values, compressed or not."""
        if self._codec is None:
            return values
        size = self._codec.bound(values.numel())
        buffer = self._reducer.buffer(f"coded {name}", chunk % SLOTS, size, torch.uint8)
        return self._codec.encode(values, buffer)

    def _inputs(self, term: Term, slice_: int, chunk: int) -> list[torch.Tensor]:
        return [self._values.read(rank, n, slice_, chunk) for rank, n in term.inputs]

    def _term(self, term: Term, name: str, slice_: int, chunk: int, size: int) -> torch.Tensor:
        """Return the value of a term of this host."""
        reduction = self._reduction
        inputs = self._inputs(term, slice_, chunk)
        dtype = self._term_dtype(self._reducer.host)
        if len(inputs) == 1 and not reduction.factors and not self._plan.is_exchange:
            return inputs[0]  # in shared memory, which does not change before the result comes
        buffer = self._reducer.buffer(name, chunk % SLOTS, size, dtype)
        keys = [[each] for each in term.inputs]
        for part, present in self._values.parts(keys, slice_, chunk):
            reduction.combine(
                [each[part] for each in inputs], term.nodes, term.leaves, buffer[part],
                reduction.factors_of(term), present,
            )  # fmt: skip
        return buffer

    def _as_received(
        self, value: torch.Tensor, message: torch.Tensor, name: str, chunk: int
    ) -> torch.Tensor:
        """Return the value of a term of this host, as the other hosts receive its message."""
        if self._rounding is None:
            return value
        size, dtype = value.numel(), value.dtype
        buffer = self._reducer.buffer(f"rounded {name}", chunk % SLOTS, size, dtype)
        self._rounding.decode(message, buffer)
        return buffer

    def _reduce(self, chunk: int) -> None:
        """Reduce a chunk of the slices that this rank reduces; send a result that is returned."""
        reducer, plan, reduction = self._reducer, self._plan, self._reduction
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            if not size or not plan.reduces(reducer.rank, slice_):
                continue
            inputs: list[torch.Tensor] = []
            nodes: list[Node] = []
            factors: list[float] = []
            keys: list[Sequence[tuple[int, int]]] = []
            terms: list[tuple[torch.Tensor, Term]] = []
            for number, term in enumerate(plan.terms[reducer.host]):
                if plan.is_exchange:
                    terms.append((self._exchanged.pop((chunk, slice_)), term))
                elif self._rounding is not None:
                    # Rounded as those of the other hosts are, so that the owner does not matter.
                    name = f"own {number}"
                    value = self._term(term, name, slice_, chunk, size)
                    message = self._encode(value, name, chunk)
                    terms.append((self._as_received(value, message, name, chunk), term))
                else:
                    keys += [[each] for each in term.inputs]
                    inputs += self._inputs(term, slice_, chunk)
                    nodes += [(term.node[0] + a, term.node[0] + b) for a, b in term.nodes]
                    factors += reduction.factors_of(term)
            terms += [(each.wait(), term) for each, term in self._terms.pop((chunk, slice_))]
            for value, term in terms:
                keys.append(term.inputs)
                inputs.append(value)
                nodes.append(term.node)
                if reduction.factors:
                    factors.append(1)  # its host has multiplied its values
            leaves = plan.leaves
            if reduction.is_order_free:
                nodes, leaves = [(n, n + 1) for n in range(len(inputs))], len(inputs)
            result = self._values.result(slice_, chunk)
            for part, present in self._values.parts(keys, slice_, chunk):
                reduction.combine(
                    [each[part] for each in inputs], nodes, leaves, result[part],
                    factors, present, reduction.divisor,
                )  # fmt: skip
            if plan.returns:
                message = self._encode(result, "own result", chunk)
                if self._rounding is not None:
                    self._rounding.decode(message, result)  # as the other hosts will have it
                for host in self._others:
                    handler = plan.handler(slice_, host)
                    work = reducer.send(message, handler, self._result_tag)
                    self._sends[chunk].append(work)
            self._values.spread(slice_, chunk)

    def _finish(self, chunk: int) -> None:
        """Wait for the messages of a chunk."""
        for slice_, receipt in self._results.pop(chunk):
            receipt.wait()
            self._values.spread(slice_, chunk)
        for work in self._sends.pop(chunk):
            work.wait()
