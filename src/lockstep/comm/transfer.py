"""Moving bytes: small messages that everybody gets, and one rank's tensors for all.

Everything travels as `uint8`, so that any dtype works on any backend, and in
contiguous buffers of our own: Gloo broadcasts non-contiguous tensors wrongly
without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from lockstep.errors import DisagreementError

__all__ = [
    "all_gather_bytes",
    "all_gather_single",
    "as_bytes",
    "broadcast_tensors",
    "give_tensors",
    "message_device",
]

# torch 2.13 renamed the call and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PAGE = 1024
"""Bytes of a small message that travel in one exchange, its length included."""

PIECE = 32 << 20
"""Bytes of the buffer that a broadcast is cut into."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a vector of bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device that small messages of `group` must lie on (NCCL alone wants a GPU)."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_gather_bytes(
    message: bytes, about: str, group: dist.ProcessGroup | None = None, remark: str = ""
) -> list[bytes]:
    """Return every rank's message, in rank order.

    `about` says in a few words what the rank is doing ("in step 12"); ranks that
    exchange messages about different things have gone different ways. The messages
    may differ in length. Everybody sends one page; only if some message does not
    fit there is a second exchange, as wide as the longest. A `remark` explains how this
    rank came here; it is not compared, and added to the error where `about` differs.

        page    | length of the message, 8 bytes | of the topic, 2 | topic | message ... |
        topic   | about | or: about | 0 | remark |

    Raises DisagreementError on every rank where `about` differs.
    """
    if dist.get_world_size(group) == 1:
        return [message]
    topic = about.encode()[: PAGE // 2]
    if remark:
        topic += b"\0" + remark.encode()[: PAGE // 4]
    header = len(message).to_bytes(8, "little") + len(topic).to_bytes(2, "little") + topic
    pages = _gather_equal((header + message)[:PAGE].ljust(PAGE, b"\0"), group)
    lengths = [int.from_bytes(page[:8], "little") for page in pages]
    headers = [10 + int.from_bytes(page[8:10], "little") for page in pages]
    _require_one_topic([page[10:end] for page, end in zip(pages, headers, strict=True)])
    if any(end + length > PAGE for end, length in zip(headers, lengths, strict=True)):
        bodies = _gather_equal(message.ljust(max(lengths), b"\0"), group)
    else:
        bodies = [page[end:] for page, end in zip(pages, headers, strict=True)]
    return [body[:length] for body, length in zip(bodies, lengths, strict=True)]


def _require_one_topic(topics: Sequence[bytes]) -> None:
    """Raise DisagreementError unless all ranks, in rank order, exchange about the same thing."""
    said = [topic.decode(errors="replace").partition("\0") for topic in topics]
    first, _, _ = said[0]
    for rank, (about, _, _) in enumerate(said):
        if about != first:
            remarks = [f"on rank {r}, {remark}" for r, (_, _, remark) in enumerate(said) if remark]
            explained = f" ({'; '.join(remarks)})" if remarks else ""
            raise DisagreementError(
                f"rank {rank} is {about} while rank 0 is {first}: make the same calls on every "
                f"rank, with the same arguments{explained}"
            )


def _gather_equal(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Gather messages that are equally long on all ranks."""
    width, ranks = len(message), dist.get_world_size(group)
    device = message_device(group)
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    everyone = torch.empty(ranks * width, dtype=torch.uint8, device=device)
    all_gather_single(everyone, mine, group=group)
    gathered = everyone.cpu().numpy().tobytes()
    return [gathered[rank * width : (rank + 1) * width] for rank in range(ranks)]


def _packets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device into packets of about `PIECE` bytes."""
    packets: list[list[torch.Tensor]] = []
    sizes: dict[torch.device, int] = {}
    current: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        device = tensor.device
        if device not in current or sizes[device] + tensor.nbytes > PIECE:
            current[device], sizes[device] = [], 0
            packets.append(current[device])
        current[device].append(tensor)
        sizes[device] += tensor.nbytes
    return packets


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Overwrite `tensors` on every rank with those of rank `source` of the group, bit for bit.

    Shapes and dtypes must be the same on all ranks; strides may differ. Autograd
    is not told: a graph that holds a tensor goes on with the new values.
    """
    if dist.get_world_size(group) == 1:
        return
    sender = dist.get_global_rank(group, source) if group is not None else source
    for packet in _packets(tensor for tensor in tensors if tensor.numel()):
        flat = torch.cat([as_bytes(tensor.detach().contiguous()) for tensor in packet])
        dist.broadcast(flat, sender, group=group)
        if dist.get_rank(group) == source:
            continue
        sizes = [tensor.nbytes for tensor in packet]
        for tensor, part in zip(packet, flat.split(sizes), strict=True):
            # A clone, because a view of another dtype must start at a multiple of its size.
            tensor.data.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def give_tensors(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    source: int,
    takers: Sequence[int],
) -> None:
    """Overwrite `tensors` on the ranks `takers` with those of rank `source`, bit for bit.

    As `broadcast_tensors`, for some ranks of the group; the others return at once.
    Several such calls must come in the same order on all ranks.
    """
    rank = dist.get_rank(group)
    others = [taker for taker in takers if taker != source]
    for tensor in tensors:
        if not tensor.numel():
            continue
        if rank == source and others:
            flat = as_bytes(tensor.detach().contiguous())
            for taker in others:
                dist.send(flat, group=group, group_dst=taker)
        elif rank in others:
            flat = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
            dist.recv(flat, group=group, group_src=source)
            tensor.data.copy_(flat.view(tensor.dtype).view(tensor.shape))
