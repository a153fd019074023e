"""The pipeline of one sum across hosts: chunks of slices, and the messages between hosts.

    chunk i          each rank combines the terms of the slices that it handles, and sends them to
                     the ranks that add them
    chunk i - 1      each owner receives the terms of its slice from the other hosts, combines them
                     with those of its own host in the order of the tree, and sends the result back;
                     in an exchange, both hosts add, and no result is sent
    chunk i - 3      the results have arrived, and are written to every rank of the host

Every node is rounded to the dtype of the values, as on one host. When a rank waits for a chunk, the
messages of two later steps are queued in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.comm import native_module
from lockstep.comm.bucket import round_up
from lockstep.comm.hosts.compression import Codec
from lockstep.comm.hosts.packed_values import PackedValues
from lockstep.comm.hosts.reduction import HostReducer
from lockstep.comm.hosts.reduction_plan import ReductionPlan, Term
from lockstep.kernel.tree import Node

__all__ = ["Pipeline"]

DELAY = 3
"""The number of chunks between the terms of a chunk and the arrival of its results."""

SLOTS = DELAY + 2
"""The number of buffers of a rank for each of its messages. It reduces chunk i - 1 while chunk
i + 2 is received, and what it sends of a chunk is waited for with the results."""

AHEAD = 2
"""The number of chunks whose receives are posted early. Gloo announces a receive in the connection
that it shares with data, and the sender waits for that."""


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
    """The messages of one sum.

    Args:
        reducer: The messages and buffers of this rank.
        plan: Which rank combines and sends what.
        values: The values of the ranks of this host.
        dtype: The dtype of the values.
        divisor: The number by which the sum is divided.
        sizes: The number of elements of each slice.
        chunk: The number of elements of a chunk of a slice.
        codec: How messages are compressed; None if they are not.
        tags: The tags of terms and of results.
        check: Compares the call with those of other hosts, and raises an error if they differ. It
            is called when the first messages have been sent.
    """

    def __init__(
        self,
        reducer: HostReducer,
        plan: ReductionPlan,
        values: PackedValues,
        dtype: torch.dtype,
        divisor: float,
        sizes: Sequence[int],
        chunk: int,
        codec: Codec | None,
        tags: tuple[int, int],
        check: Callable[[], object],
    ) -> None:
        self._term_tag, self._result_tag = tags
        self._check = check
        self._reducer, self._plan, self._dtype, self._divisor = reducer, plan, dtype, divisor
        self._codec = codec
        self._rounding = None if codec is None or codec.is_lossless else codec
        self._values, self._sizes, self._chunk = values, sizes, chunk
        self._handled = plan.handled(reducer.rank)
        self._others = [host for host in range(len(plan.map.hosts)) if host != reducer.host]
        # By chunk: works that send, and (slice, works) that receive terms and results.
        self._sends: dict[int, list[Any]] = {}
        self._terms: dict[tuple[int, int], list[tuple[Receipt, Term]]] = {}  # by slice, too
        self._results: dict[int, list[tuple[int, Receipt]]] = {}
        # In an exchange, the term of this host by chunk and slice, as the other host receives it.
        self._exchanged: dict[tuple[int, int], torch.Tensor] = {}

    def run(self) -> None:
        """Pass all chunks through the pipeline."""
        chunks = round_up(max(self._sizes, default=0), self._chunk) // self._chunk
        for early in range(min(AHEAD, chunks)):
            self._receive_chunk(early)
        for i in range(chunks):
            if i >= DELAY:
                self._finish(i - DELAY)
            if i + AHEAD < chunks:
                self._receive_chunk(i + AHEAD)
            self._send_terms(i)
            if i == 0:
                self._check()
            else:
                self._reduce(i - 1)
        if chunks:
            self._reduce(chunks - 1)
        else:
            self._check()
        for i in range(max(chunks - DELAY, 0), chunks):
            self._finish(i)
        self._values.end()

    def _size(self, slice_: int, chunk: int) -> int:
        return max(0, min(self._chunk, self._sizes[slice_] - chunk * self._chunk))

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
                sends += [reducer.send(message, rank, self._term_tag) for rank in receivers]

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
                    for n, term in enumerate(plan.terms[host]):
                        name = f"received {slice_} {host} {n}"
                        buffer = reducer.buffer(name, chunk % SLOTS, size, self._dtype)
                        handler = plan.handler(slice_, host)
                        receives.append(
                            (self._receive(buffer, handler, self._term_tag, name, chunk), term)
                        )
            elif plan.returns:
                target = self._values.result(slice_, chunk)
                receipt = self._receive(target, slice_, self._result_tag, f"result {slice_}", chunk)
                results.append((slice_, receipt))

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
        inputs = self._inputs(term, slice_, chunk)
        if len(inputs) == 1 and not self._plan.is_exchange:
            return inputs[0]  # in shared memory, which does not change before the result comes
        buffer = self._reducer.buffer(name, chunk % SLOTS, size, self._dtype)
        keys = [[key] for key in term.inputs]
        add_nodes = native_module.load().add_nodes
        for part, present in self._values.parts(keys, slice_, chunk):
            parts = [values[part] for values in inputs]
            add_nodes(parts, term.nodes, term.leaves, present, 1.0, buffer[part])
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
        reducer, plan, add_nodes = self._reducer, self._plan, native_module.load().add_nodes
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            if not size or not plan.reduces(reducer.rank, slice_):
                continue
            inputs: list[torch.Tensor] = []
            nodes: list[Node] = []
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
                    keys += [[key] for key in term.inputs]
                    inputs += self._inputs(term, slice_, chunk)
                    nodes += [(term.node[0] + a, term.node[0] + b) for a, b in term.nodes]
            received = self._terms.pop((chunk, slice_))
            terms += [(receipt.wait(), term) for receipt, term in received]
            for value, term in terms:
                keys.append(term.inputs)
                inputs.append(value)
                nodes.append(term.node)
            result = self._values.result(slice_, chunk)
            for part, present in self._values.parts(keys, slice_, chunk):
                parts = [values[part] for values in inputs]
                add_nodes(parts, nodes, plan.leaves, present, self._divisor, result[part])
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
