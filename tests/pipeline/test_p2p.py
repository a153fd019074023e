"""Transfer between stages on an accelerator over Gloo, which sends from the CPU only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.comm.collectives import is_staged, send_tensors
from lockstep.pipeline.boundary import flatten
from lockstep.pipeline.p2p import GroupSize, Receiver, RngState, Sender
from simulated import ranks

SIZES = (3, 5000)  # in the page, and in messages of their own


def transfer():
    """Send values from rank 0 to rank 1; return what arrived there, and where."""
    device = lockstep.init(device="simulated:0", backend="gloo").device
    group = dist.group.WORLD
    assert is_staged(device)
    assert not is_staged(torch.device("cpu"))
    states = RngState(2), RngState(3, torch_state=b"state")
    received = []
    try:
        if lockstep.rank() == 0:
            sender = Sender(group, 1, 7, device)
            for index, size in enumerate(SIZES):
                # The stream of the device runs late: without waiting for it, other bytes are sent.
                flat = flatten(torch.arange(size, device=device) * 2.0)
                sender.send(*flat, 0, index, states[index], GroupSize(8, index))
            sender.drain()
        else:
            receiver = Receiver(group, 0, 7, device)
            for index in range(len(SIZES)):
                _, (tensor,) = receiver.receive(0, index)
                state = receiver.rng_state
                received.append((tensor.device.type, tensor.cpu(), state, receiver.group_size))
        moved = torch.full((9,), float(lockstep.rank() + 1), device=device)
        send_tensors([moved], group, 0, [1])
        return received, moved.cpu()
    finally:
        lockstep.shutdown()


def test_tensors_of_an_accelerator_are_staged_for_gloo():
    (_, first), (received, second) = ranks.run(transfer, 2, device="")
    assert torch.equal(first, second)
    for index, (kind, tensor, state, group) in enumerate(received):
        size = SIZES[index]
        assert group == (8, index)
        assert kind == "simulated"
        assert torch.equal(tensor, torch.arange(size) * 2.0)
        assert state.torch_state == (b"state" if size == SIZES[1] else None)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_other_tensors_are_sent_from_their_own_memory(world_of_one, kind):
    assert not is_staged(torch.device(kind))
