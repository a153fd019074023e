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

from lockstep.comm.bucket import round_up
from lockstep.comm.hosts.link import HostLink
from lockstep.comm.hosts.packed_values import PackedValues
from lockstep.comm.hosts.reduction_plan import ReductionPlan, Term
from lockstep.comm.native_module import load_native
from lockstep.kernel.tree import Node

__all__ = ["ReductionPipeline"]

DELAY = 3
"""The number of chunks between the terms of a chunk and the arrival of its results."""

SLOTS = DELAY + 2
"""The number of buffers of a rank for each of its messages. It reduces chunk i - 1 while chunk
i + 2 is received, and what it sends of a chunk is waited for with the results."""

AHEAD = 2
"""The number of chunks whose receives are posted early. Gloo announces a receive in the connection
that it shares with data, and the sender waits for that."""


class ReductionPipeline:
    """The messages of one sum.

    Args:
        link: The messages and buffers of this rank.
        plan: Which rank combines and sends what.
        values: The values of the ranks of this host.
        dtype: The dtype of the values.
        sizes: The number of elements of each slice.
        chunk: The number of elements of a chunk of a slice.
        tags: The tags of terms and of results.
        check: Compares the call with those of other hosts, and raises an error if they differ. It
            is called when the first messages have been sent.
    """

    def __init__(
        self,
        link: HostLink,
        plan: ReductionPlan,
        values: PackedValues,
        dtype: torch.dtype,
        sizes: Sequence[int],
        chunk: int,
        tags: tuple[int, int],
        check: Callable[[], object],
    ) -> None:
        self._term_tag, self._result_tag = tags
        self._check = check
        self._link, self._plan, self._dtype = link, plan, dtype
        self._values, self._sizes, self._chunk = values, sizes, chunk
        self._handled = plan.handled(link.rank)
        self._others = [host for host in range(len(plan.map.hosts)) if host != link.host]
        # Works that send, by chunk; (work, values, term) that are received, by chunk and slice;
        # (slice, work) of the results that are received, by chunk.
        self._sends: dict[int, list[Any]] = {}
        self._terms: dict[tuple[int, int], list[tuple[Any, torch.Tensor, Term]]] = {}
        self._results: dict[int, list[tuple[int, Any]]] = {}
        # In an exchange, the term of this host by chunk and slice.
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
        link, plan = self._link, self._plan
        sends = self._sends.setdefault(chunk, [])
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            receivers = plan.receivers(link.rank, slice_)
            if not size or not receivers:
                continue
            for n, term in enumerate(plan.terms[link.host]):
                value = self._term(term, f"term {slice_} {n}", slice_, chunk, size)
                if plan.is_exchange:
                    self._exchanged[chunk, slice_] = value
                sends += [link.send(value, rank, self._term_tag) for rank in receivers]

    def _receive_chunk(self, chunk: int) -> None:
        """Start to receive the terms that this rank adds, and the results of other slices."""
        plan, link = self._plan, self._link
        results = self._results.setdefault(chunk, [])
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            if not size:
                continue
            if plan.reduces(link.rank, slice_):
                receives = self._terms[chunk, slice_] = []
                for host in self._others:
                    for n, term in enumerate(plan.terms[host]):
                        name = f"received {slice_} {host} {n}"
                        buffer = link.buffer(name, chunk % SLOTS, size, self._dtype)
                        handler = plan.handler(slice_, host)
                        work = link.receive(buffer, handler, self._term_tag)
                        receives.append((work, buffer, term))
            elif plan.returns:
                target = self._values.result(slice_, chunk)
                results.append((slice_, link.receive(target, slice_, self._result_tag)))

    def _inputs(self, term: Term, slice_: int, chunk: int) -> list[torch.Tensor]:
        return [self._values.read(rank, n, slice_, chunk) for rank, n in term.inputs]

    def _term(self, term: Term, name: str, slice_: int, chunk: int, size: int) -> torch.Tensor:
        """Return the value of a term of this host."""
        inputs = self._inputs(term, slice_, chunk)
        if len(inputs) == 1 and not self._plan.is_exchange:
            return inputs[0]  # in shared memory, which does not change before the result comes
        buffer = self._link.buffer(name, chunk % SLOTS, size, self._dtype)
        keys = [[key] for key in term.inputs]
        add_nodes = load_native().add_nodes
        for part, present in self._values.parts(keys, slice_, chunk):
            parts = [values[part] for values in inputs]
            add_nodes(parts, term.nodes, term.leaves, present, buffer[part])
        return buffer

    def _reduce(self, chunk: int) -> None:
        """Reduce a chunk of the slices that this rank reduces; send a result that is returned."""
        link, plan, add_nodes = self._link, self._plan, load_native().add_nodes
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            if not size or not plan.reduces(link.rank, slice_):
                continue
            inputs: list[torch.Tensor] = []
            nodes: list[Node] = []
            keys: list[Sequence[tuple[int, int]]] = []
            terms: list[tuple[torch.Tensor, Term]] = []
            for term in plan.terms[link.host]:
                if plan.is_exchange:
                    terms.append((self._exchanged.pop((chunk, slice_)), term))
                else:
                    keys += [[key] for key in term.inputs]
                    inputs += self._inputs(term, slice_, chunk)
                    nodes += [(term.node[0] + a, term.node[0] + b) for a, b in term.nodes]
            for work, values, term in self._terms.pop((chunk, slice_)):
                work.wait()
                terms.append((values, term))
            for value, term in terms:
                keys.append(term.inputs)
                inputs.append(value)
                nodes.append(term.node)
            result = self._values.result(slice_, chunk)
            for part, present in self._values.parts(keys, slice_, chunk):
                parts = [values[part] for values in inputs]
                add_nodes(parts, nodes, plan.leaves, present, result[part])
            if plan.returns:
                for host in self._others:
                    handler = plan.handler(slice_, host)
                    work = link.send(result, handler, self._result_tag)
                    self._sends[chunk].append(work)
            self._values.spread(slice_, chunk)

    def _finish(self, chunk: int) -> None:
        """Wait for the messages of a chunk."""
        for slice_, work in self._results.pop(chunk):
            work.wait()
            self._values.spread(slice_, chunk)
        for work in self._sends.pop(chunk):
            work.wait()
