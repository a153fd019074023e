"""The backend "lockstep" of a group whose ranks are on several hosts.

    torch's calls     csrc/binding/collective_backend.cpp   arguments, works, futures, one call
                                                            at a time
    HostCalls         this file                             each call: the native group of this
                                                            host, and messages to other hosts
    which rank sends  plan.py, reduction_plan.py            pure functions
    messages          link.py, messages.py                  over Gloo

Each call begins with an agreement: the ranks of a host compare what they call in shared memory,
ranks that exchange data across hosts send each other a card, ahead of the data.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
)

from lockstep.comm import native_module
from lockstep.comm.hosts.group import GroupError, HostGroup
from lockstep.comm.hosts.link import Transfer
from lockstep.comm.hosts.messages import Mailbox
from lockstep.comm.hosts.plan import all_gather_rounds, broadcast_slices, chunks_of
from lockstep.comm.hosts.reduction import HostReducer
from lockstep.comm.hosts.reduction_pipeline import Agreement

__all__ = ["HostCalls"]

CARD_TAG, DATA_TAG = 0x4C530010, 0x4C530011
CHUNK_BYTES = 4 << 20  # of a broadcast, in which shared memory and the network overlap
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

# number, uneven, op, reduction, dtype, root, count; bytes for the rank that gets the card
CARD = struct.Struct("<Q?16s12s16sqQQ")


_open: weakref.WeakSet[HostCalls] = weakref.WeakSet()  # whose connections are not closed yet


@atexit.register
def _close_connections() -> None:
    """Close what a program has left open: a thread that Gloo wakes later would end the process.

    It would wait for the interpreter's lock, which Python 3.11 answers at exit by ending the
    thread, in a destructor of C++ that must not throw.
    """
    for calls in list(_open):
        calls.close_at_exit()


class Card:
    """What a rank calls.

    Args:
        data: A packed card.
    """

    def __init__(self, data: bytes) -> None:
        number, uneven, op, reduction, dtype, root, count, size = CARD.unpack(data)
        self.op, self.reduction, self.dtype = (
            each.rstrip(b"\0").decode() for each in (op, reduction, dtype)
        )
        self.number, self.root, self.count, self.size = number, root, count, size
        key = (number, uneven, op, reduction, dtype, root)
        self.key = key if uneven else (*key, count)

    @property
    def tag(self) -> int:
        """A number that the cards of the same call have in common."""
        return zlib.crc32(repr(self.key).encode())

    @staticmethod
    def pack(call: Any, size: int) -> bytes:
        """Return the card of a call that sends `size` bytes to the reader."""
        return CARD.pack(
            call.number, call.is_uneven, call.op.encode(), call.reduction.encode(),
            call.dtype.encode()[:16], call.root, call.count, size,
        )  # fmt: skip

    def describe(self) -> str:
        """Return the call, such as "all_reduce(SUM, float32, 4 elements)"."""
        if self.op == "barrier":
            return f"{self.op} as call #{self.number}"
        first = f"{self.reduction}, " if self.reduction else ""
        root = f", root {self.root}" if self.root >= 0 else ""
        what = f"{first}{self.dtype}, {self.count} elements{root}"
        return f"{self.op}({what}) as call #{self.number}"


class HostCalls:
    """The calls of one rank, made by torch through the native module.

    Args:
        group: The group, which this object closes.

    Attributes:
        group: The group.
        reducer: The reducer of the group, for calls in its thread.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self._map, self._rank = group.map, group.rank
        self._mates = self._map.hosts[group.host]
        self._targets, self._sources = self._find_partners()
        self.reducer = HostReducer(group)
        self._mailbox = Mailbox(group)
        self._process = os.getpid()
        _open.add(self)

    # ---- collective calls; blocks are vectors of bytes, by rank ----

    def barrier(self, call: Any) -> None:
        """Wait until all ranks have come here."""
        with self._begun(call):
            leaders = [ranks[0] for ranks in self._map.hosts]
            self._compare_locally(call)
            if self._rank == self._mates[0]:
                others = [rank for rank in leaders if rank != self._rank]
                self._compare(call, self._send_cards(call, dict.fromkeys(others, 0)))
            if len(self._mates) > 1:
                self.group.local.barrier(BarrierOptions()).wait()

    def exchange(
        self,
        call: Any,
        send: Sequence[torch.Tensor],
        receive: Sequence[torch.Tensor],
        is_same_to_all: bool,
    ) -> None:
        """Send block d to rank d, and receive block s from rank s."""
        with self._begun(call):
            self._compare_locally(call)
            if call.op == "broadcast":
                is_root = self._rank == call.root
                others = [block for rank, block in enumerate(send) if rank != self._rank]
                self._broadcast(call, others[0] if is_root else receive[call.root])
            elif is_same_to_all and call.op != "gather":
                self._all_gather(call, send[self._rank], receive)
            else:
                self._exchange_pairs(call, send, receive)

    def all_reduce(self, call: Any, tensor: torch.Tensor, root: int) -> None:
        """Reduce a tensor to rank `root`, or to all ranks if it is -1."""
        with self._begun(call):
            factors, agreement = self._begin_reduction(call)
            number = REDUCTIONS.index(call.reduction)
            if root < 0:
                self.reducer.all_reduce(tensor, number, factors, agreement)
            else:
                self.reducer.reduce(tensor, number, root, factors, agreement)

    def reduce_scatter(self, call: Any, send: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Reduce tensor r of all ranks to rank r."""
        with self._begun(call):
            factors, agreement = self._begin_reduction(call)
            number = REDUCTIONS.index(call.reduction)
            self.reducer.reduce_scatter(send, result, number, factors, agreement)

    def reproducible_all_reduce(self, call: Any, function: Callable[[Agreement], None]) -> None:
        """Add a bucket of the trainer's gradients; `function` does, by `reducer`."""
        with self._begun(call):
            _, agreement = self._begin_reduction(call)
            function(agreement)

    # ---- messages ----

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Start to send a tensor to a rank; return a Work."""
        if self._map.host_of(peer) == self.group.host:
            return self.group.local.send(tensors, self._map.local_rank(peer), tag)
        return self._mailbox.send(tensors[0], peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Start to receive a tensor from a rank; return a Work."""
        if self._map.host_of(peer) == self.group.host:
            return self.group.local.recv(tensors, self._map.local_rank(peer), tag)
        return self._mailbox.recv(tensors[0], peer, tag)

    def recv_any(self, tensors: list[torch.Tensor], tag: int) -> Any:
        """Start to receive a tensor from any rank; return a Work."""
        return self._mailbox.recv_any(tensors[0], tag)

    # ---- the state of the group ----

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of the calls that follow."""
        self.group.set_timeout(seconds)

    def set_name(self, name: str) -> None:
        """Set the name of the group in messages."""
        self.group.name = name

    def describe_caller(self, thread: int) -> str:
        """Return "rank 3 on host b, in train.py:31 (step)"."""
        place = native_module.where(thread)
        return self.group.describe(self._rank) + (f", {place}" if place else "")

    def is_aborted(self) -> bool:
        """Return whether the group has failed."""
        return bool(self.group.failure)

    def abort(self) -> None:
        """End the group for all its ranks."""
        self.group.fail(f"{self.group.describe(self._rank)} aborted the group")

    def interrupt(self) -> None:
        """End the group after a signal, such as Ctrl-C."""
        self.group.fail(f"{self.group.describe(self._rank)} was interrupted")

    def close_at_exit(self) -> None:
        """Leave the group, unless this process is a fork of the one that joined it."""
        if self._process == os.getpid():
            self.shutdown()

    def shutdown(self) -> None:
        """Leave the group."""
        _open.discard(self)
        self.group.close()
        self._mailbox.close()

    # ---- agreement ----

    @contextmanager
    def _begun(self, call: Any) -> Iterator[None]:
        """Run a call; an error of any kind ends the group, so that no rank waits for this one."""
        group = self.group
        group.begin_call(f"{call.op} #{call.number}", call.timeout)
        thread = threading.get_ident()
        native_module.callers[thread] = call.caller
        try:
            yield
        except GroupError:
            raise
        except RuntimeError as error:
            raise group.explain_local(str(error)) from None
        except BaseException as error:
            group.fail(f"{group.describe(self._rank)} raised {type(error).__name__}: {error}")
            raise
        finally:
            native_module.callers.pop(thread, None)

    def _compare_locally(self, call: Any) -> None:
        """Compare the calls of the ranks of this host."""
        if len(self._mates) == 1:
            return
        own = torch.frombuffer(bytearray(Card.pack(call, 0)), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in self._mates]
        self.group.local.allgather([found], [own], AllgatherOptions()).wait()
        cards = {
            rank: Card(card.numpy().tobytes())
            for rank, card in zip(self._mates, found, strict=True)
        }
        self._check(cards, cards[self._rank])

    def _send_cards(self, call: Any, sizes: dict[int, int]) -> list[tuple[int, Any, Any, Any]]:
        """Start to exchange cards with ranks of other hosts; `sizes`: the bytes sent to each."""
        cards = []
        for peer, size in sizes.items():
            own = torch.frombuffer(bytearray(Card.pack(call, size)), dtype=torch.uint8)
            other = torch.empty_like(own)
            receiving = self.group.between.recv([other], peer, CARD_TAG)
            sending = self.group.between.send([own], peer, CARD_TAG)
            cards.append((peer, other, receiving, sending))
        return cards

    def _compare(self, call: Any, cards: list[tuple[int, Any, Any, Any]]) -> dict[int, Card]:
        """Wait for the cards of ranks of other hosts, and compare them; return them by rank."""
        found = {}
        for peer, other, receiving, sending in cards:
            receiving.wait()
            sending.wait()
            found[peer] = Card(other.numpy().tobytes())
        self._check(found, Card(Card.pack(call, 0)))
        return found

    def _check(self, cards: dict[int, Card], own: Card) -> None:
        for rank, card in cards.items():
            if card.key != own.key:
                group = self.group
                raise group.fail(
                    f"the ranks of group {group.name} disagree: {group.describe(self._rank)} "
                    f"called {own.describe()}; {group.describe(rank)} called {card.describe()}"
                )

    def _check_sizes(self, cards: dict[int, Card], expected: dict[int, int]) -> None:
        for rank, card in cards.items():
            if card.size != expected.get(rank, 0):
                group = self.group
                raise group.fail(
                    f"the ranks of group {group.name} disagree in {card.op}: {group.describe(rank)}"
                    f" sends {card.size} bytes to {group.describe(self._rank)}, which expects "
                    f"{expected.get(rank, 0)}"
                )

    def _find_partners(self) -> tuple[list[int], list[int]]:
        """Return the ranks on other hosts that this one sends its data to, and gets data from."""
        hosts = range(len(self._map.hosts))
        targets = [self._map.partner(self._rank, host) for host in hosts if host != self.group.host]
        sources = [
            rank
            for host in hosts
            if host != self.group.host
            for rank in self._map.hosts[host]
            if self._map.partner(rank, self.group.host) == self._rank
        ]
        return targets, sources

    def _begin_reduction(self, call: Any) -> tuple[list[float], Agreement]:
        """Send cards to other hosts; the ranks of this host are compared when data is ready.

        Returns:
            The factors of PREMUL_SUM, by rank, and the agreement, which compares the cards of other
            hosts: they arrive while the first data is prepared.
        """
        cards = self._send_cards(call, dict.fromkeys([*self._targets, *self._sources], 0))
        tag = Card(Card.pack(call, 0)).tag
        if call.reduction != "PREMUL_SUM":
            join, check = partial(self._compare_locally, call), partial(self._compare, call, cards)
            return [], Agreement(tag, join, check)
        self._compare_locally(call)
        self._compare(call, cards)
        factors = torch.zeros(self._map.size, dtype=torch.float64)
        factors[self._rank] = call.factor
        blocks = list(factors.view(torch.uint8).view(-1, factors.itemsize))
        self._all_gather(call, blocks[self._rank].clone(), blocks)
        return [float(each) for each in factors], Agreement(tag)

    # ---- moving data ----

    def _wait(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            transfer.wait()

    def _broadcast(self, call: Any, tensor: torch.Tensor) -> None:
        """Broadcast bytes from the root of the call."""
        group, hosts, root = self.group, self._map, call.root
        slices = broadcast_slices(hosts, root, tensor.nbytes)
        peers = {each.target for each in slices if each.source == self._rank}
        peers |= {each.source for each in slices if each.target == self._rank}
        sizes = dict.fromkeys(peers, tensor.nbytes)
        cards = self._send_cards(call, sizes)
        chunks = [
            (tensor[begin:end], broadcast_slices(hosts, root, end - begin))
            for begin, end in chunks_of(tensor.nbytes, CHUNK_BYTES)
        ]
        sending = []
        if hosts.host_of(root) == group.host:
            for number, (chunk, slices) in enumerate(chunks):
                self._broadcast_locally(chunk, hosts.local_rank(root))
                if number == 0:  # the cards arrive while the first chunk is shared
                    self._check_sizes(self._compare(call, cards), sizes)
                sending += [
                    group.between.send([chunk[each.begin : each.end]], each.target, DATA_TAG)
                    for each in slices
                    if each.source == self._rank and each.end > each.begin
                ]
            if not chunks:
                self._compare(call, cards)
            self._wait(sending)
            return
        self._check_sizes(self._compare(call, cards), sizes)
        receiving = [
            [
                group.between.recv([chunk[each.begin : each.end]], each.source, DATA_TAG)
                for each in slices
                if each.target == self._rank and each.end > each.begin
            ]
            for chunk, slices in chunks
        ]
        for (chunk, slices), transfers in zip(chunks, receiving, strict=True):
            self._wait(transfers)
            bounds = {each.target: (each.begin, each.end) for each in slices}
            self._all_gather_locally([chunk[slice(*bounds[rank])] for rank in self._mates])

    def _all_gather(self, call: Any, own: torch.Tensor, receive: Sequence[torch.Tensor]) -> None:
        """Send this rank's bytes to all ranks, and receive block s from rank s."""
        group = self.group
        targets, sources = self._targets, self._sources
        sizes = dict.fromkeys(sources, 0) | dict.fromkeys(targets, own.nbytes)
        cards = self._send_cards(call, sizes)
        if receive[self._rank].data_ptr() != own.data_ptr():
            receive[self._rank].copy_(own)
        self._all_gather_locally([receive[rank] for rank in self._mates])
        expected = {rank: receive[rank].nbytes for rank in sources}
        self._check_sizes(self._compare(call, cards), expected)
        receiving = {
            rank: group.between.recv([receive[rank]], rank, DATA_TAG)
            for rank in sources
            if receive[rank].nbytes
        }
        sending = [group.between.send([own], rank, DATA_TAG) for rank in targets if own.nbytes]
        nothing = own[:0]
        for blocks in all_gather_rounds(self._map, group.host):
            mine = blocks[self._mates.index(self._rank)]
            if mine in receiving:
                receiving[mine].wait()
            self._all_gather_locally(
                [nothing if rank is None else receive[rank] for rank in blocks]
            )
        self._wait(sending)

    def _exchange_pairs(
        self, call: Any, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]
    ) -> None:
        """Send block d to rank d and receive block s from rank s, which are all different."""
        group, mates = self.group, self._mates
        others = [rank for rank in range(self._map.size) if rank not in mates]
        if call.root >= 0 and call.root != self._rank:
            others = [call.root] if call.root in others else []
        if call.op == "scatter":  # the output may be the place of another rank's input
            output = receive[call.root]
            send = [each.clone() if do_overlap(each, output) else each for each in send]
        cards = self._send_cards(call, {rank: send[rank].nbytes for rank in others})
        if call.root < 0 or call.root in mates:
            self._exchange_locally([send[r] for r in mates], [receive[r] for r in mates])
        expected = {rank: receive[rank].nbytes for rank in others}
        self._check_sizes(self._compare(call, cards), expected)
        transfers = [
            group.between.recv([receive[rank]], rank, DATA_TAG)
            for rank in others
            if receive[rank].nbytes
        ]
        transfers += [
            group.between.send([send[rank]], rank, DATA_TAG) for rank in others if send[rank].nbytes
        ]
        self._wait(transfers)

    # ---- moving data inside this host ----

    def _broadcast_locally(self, tensor: torch.Tensor, root: int) -> None:
        if len(self._mates) == 1:
            return
        options = BroadcastOptions()
        options.rootRank = root
        self.group.local.broadcast([tensor], options).wait()

    def _all_gather_locally(self, blocks: Sequence[torch.Tensor]) -> None:
        """Give this rank's block, which is in its place already, to the other ranks."""
        if len(self._mates) == 1:
            return
        own = blocks[self._mates.index(self._rank)]
        self.group.local.allgather([list(blocks)], [own], AllgatherOptions()).wait()

    def _exchange_locally(
        self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]
    ) -> None:
        self.group.local.alltoall(list(receive), list(send), AllToAllOptions()).wait()


def do_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two vectors of bytes share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
