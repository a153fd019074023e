"""Collectives of small messages and of lists of tensors.

One call gathers small messages, and every rank combines them.

Data are sent as `uint8`, so that any dtype works on any backend, and in contiguous buffers:
Gloo broadcasts non-contiguous tensors incorrectly, without an error. torch's object collectives
are not used, because they unpickle received data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.comm.backend import of_group
from lockstep.devices import is_accelerator
from lockstep.kernel.buffers import as_bytes
from lockstep.kernel.errors import DisagreementError

__all__ = [
    "all_gather_bytes",
    "all_gather_single",
    "all_reduce_messages",
    "broadcast_bytes",
    "broadcast_tensors",
    "gather_unless_equal",
    "is_staged",
    "message_device",
    "send_tensors",
    "to_pinned",
]

# torch 2.13 renamed the function and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PAGE = 1024
"""The size of the first exchange in bytes, on most backends: a header, and the message if it fits.
"""

PIECE = 32 << 20
"""The size of the buffers of a broadcast, in bytes."""

Value = TypeVar("Value")


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for small messages of a group: the CPU if its backend supports it."""
    config = dist.get_backend_config(group)
    if "cpu:" in config:
        return torch.device("cpu")
    kind = config.partition(":")[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def is_staged(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether messages between two ranks must be copied to the CPU first.

    Gloo copies tensors of a GPU to the CPU in its collectives, but not in its sends and receives,
    which end the process with "Bad address".
    """
    if not is_accelerator(device):
        return False
    config = dist.get_backend_config(group)
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return backends.get(device.type, "gloo") == "gloo"


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an accelerator's tensor in pinned memory of the CPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def all_gather_bytes(
    message: bytes, about: str, group: dist.ProcessGroup | None = None, remark: str = ""
) -> list[bytes]:
    """Gather the messages of all ranks, which may differ in length.

    Every rank sends one page, of `PAGE` bytes or, on the backend "lockstep", of as many as it
    needs up to a limit. If a message does not fit, all messages are sent in a second exchange,
    padded to the length of the longest.

        page    | length of the message, 8 bytes | of the topic, 2 | topic | message ... |
        topic   | about | or: about | 0 | remark |

    Args:
        message: The message of this rank.
        about: A few words on the rank's activity ("in step 12"), which must be equal on all ranks.
        group: The process group; None is the default group.
        remark: Additional information for the error if `about` differs; it is not compared.

    Returns:
        The messages in rank order.

    Raises:
        DisagreementError: `about` differs between ranks; raised on every rank.
    """
    if dist.get_world_size(group) == 1:
        return [message]
    topic = about.encode()[: PAGE // 2]
    if remark:
        topic += b"\0" + remark.encode()[: PAGE // 4]
    header = len(message).to_bytes(8, "little") + len(topic).to_bytes(2, "little") + topic
    with Waiting(f"all_gather, {about}"):
        pages = _gather_pages(header + message, group)
    lengths = [int.from_bytes(page[:8], "little") for page in pages]
    headers = [10 + int.from_bytes(page[8:10], "little") for page in pages]
    topics = [page[10:end] for page, end in zip(pages, headers, strict=True)]
    if topics.count(topic) < len(topics):
        _require_one_topic(topics)
    ends = map(add, headers, lengths)
    if any(end > len(page) for end, page in zip(ends, pages, strict=True)):
        with Waiting(f"all_gather of {max(lengths)} bytes, {about}"):
            bodies = _gather_equal(message.ljust(max(lengths), b"\0"), group)
    else:
        bodies = [page[end:] for page, end in zip(pages, headers, strict=True)]
    return [body[:length] for body, length in zip(bodies, lengths, strict=True)]


def all_reduce_messages(
    value: Value,
    merge: Callable[[Value, Value], Value],
    encode: Callable[[Value], bytes],
    decode: Callable[[bytes], Value],
    about: str,
    group: dist.ProcessGroup | None = None,
    remark: str = "",
) -> Value:
    """Combine the values of all ranks, in rank order, on every rank.

    Args:
        value: The value of this rank.
        merge: A function of the combined value of the ranks below one, and the value of that rank;
            it changes neither.
        encode: Returns the bytes of a value.
        decode: Returns the value of these bytes, equal to the one that was encoded.
        about: A few words on the rank's activity, as for `all_gather_bytes`.
        group: The process group; None is the default group.
        remark: As for `all_gather_bytes`.

    Raises:
        DisagreementError: `about` differs between ranks; raised on every rank.
    """
    if dist.get_world_size(group) == 1:
        return value
    messages = all_gather_bytes(encode(value), about, group, remark)
    return reduce(merge, map(decode, messages))


def gather_unless_equal(
    message: bytes, about: str, group: dist.ProcessGroup | None = None, remark: str = ""
) -> list[bytes]:
    """Return the messages of all ranks if they differ; else an empty list.

    The arguments are those of `all_gather_bytes`.
    """
    messages = all_gather_bytes(message, about, group, remark)
    return messages if messages.count(messages[0]) < len(messages) else []


def broadcast_bytes(
    message: bytes, about: str, group: dist.ProcessGroup | None = None, remark: str = ""
) -> bytes:
    """Return the message of rank 0 of the group; the arguments are those of `all_gather_bytes`."""
    mine = message if dist.get_rank(group) == 0 else b""
    return all_gather_bytes(mine, about, group, remark)[0]


def _require_one_topic(topics: Sequence[bytes]) -> None:
    """Raise DisagreementError unless the topics of all ranks, in rank order, are equal."""
    said = [topic.decode(errors="replace").partition("\0") for topic in topics]
    first, _, _ = said[0]
    for rank, (about, _, _) in enumerate(said):
        if about != first:
            remarks = [(r, remark) for r, (_, _, remark) in enumerate(said) if remark]
            raise _disagreement(rank, about, first, remarks)


def _disagreement(
    rank: int, about: str, first: str, remarks: Sequence[tuple[int, str]]
) -> DisagreementError:
    listed = [f"on rank {r}, {remark}" for r, remark in remarks]
    explained = f" ({'; '.join(listed)})" if listed else ""
    error = DisagreementError(
        f"rank {rank} is {about} while rank 0 is {first}: make the same calls on every "
        f"rank, with the same arguments{explained}"
    )
    error.cause = listed[0] if listed else ""
    return error


def _gather_pages(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Gather the first page of all messages, which need not fill it."""
    native = of_group(group)
    if native is None:
        return _gather_equal(message[:PAGE].ljust(PAGE, b"\0"), group)
    # Without torch's Python code, which takes longer than the exchange.
    pages: list[bytes] = native.all_gather_bytes(message[: native.longest_message])
    return pages


def _gather_equal(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Gather messages that have the same length on all ranks."""
    width = len(message)
    ranks = dist.get_world_size(group)
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
            current[device] = []
            sizes[device] = 0
            packets.append(current[device])
        current[device].append(tensor)
        sizes[device] += tensor.nbytes
    return packets


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Overwrite tensors on every rank with those of rank `source` of the group, bit for bit.

    Shapes and dtypes must be equal on all ranks; strides may differ. Autograd does not notice the
    change: a graph that saved a tensor continues with the new values.
    """
    if dist.get_world_size(group) == 1:
        return
    sender = dist.get_global_rank(group, source) if group is not None else source
    for packet in _packets(tensor for tensor in tensors if tensor.numel()):
        flat = torch.cat([as_bytes(tensor.detach().contiguous()) for tensor in packet])
        with Waiting(f"broadcast of {flat.numel()} bytes from rank {sender}"):
            dist.broadcast(flat, sender, group=group)
        if dist.get_rank(group) == source:
            continue
        sizes = [tensor.nbytes for tensor in packet]
        for tensor, part in zip(packet, flat.split(sizes), strict=True):
            # A clone, because a view of another dtype must be aligned to its element size.
            tensor.data.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def send_tensors(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    source: int,
    receivers: Sequence[int],
) -> None:
    """Overwrite tensors on the ranks `receivers` with those of rank `source`, bit for bit.

    Like `broadcast_tensors` for some ranks of the group; the others return immediately. All
    ranks must make such calls in the same order.
    """
    rank = dist.get_rank(group)
    others = [receiver for receiver in receivers if receiver != source]
    for tensor in tensors:
        if not tensor.numel():
            continue
        if rank == source and others:
            flat = as_bytes(tensor.detach().contiguous())
            if is_staged(flat.device, group):
                flat = to_pinned(flat)
            for receiver in others:
                with Waiting(f"send of {flat.numel()} bytes to rank {receiver} of a group"):
                    dist.send(flat, group=group, group_dst=receiver)
        elif rank in others:
            device = torch.device("cpu") if is_staged(tensor.device, group) else tensor.device
            flat = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
            with Waiting(f"receive of {flat.numel()} bytes from rank {source} of a group"):
                dist.recv(flat, group=group, group_src=source)
            tensor.data.copy_(flat.view(tensor.dtype).view(tensor.shape))
