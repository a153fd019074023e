"""DataParallel on a simulated accelerator, whose devices have memory of their own."""

from functools import partial

import torch
from torch import nn

import lockstep as ls
import models
from simulated import ranks as simulated

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LOSS = nn.CrossEntropyLoss()


def compute_on(names):
    """Return the digests after each step, and the bits of a loss of the joined outputs."""
    torch.manual_seed(5)
    model = models.pictures()
    del model[7], model[3]  # accelerators have another dropout
    model.to(names[0])
    wrapped = ls.DataParallel(model, names, microbatches=4, seed=11)
    optimizer = SGD(model.parameters())
    digests = []
    for samples in (19, 3):
        generator = torch.Generator().manual_seed(samples)
        inputs = torch.randn(samples, 1, 8, 8, generator=generator)
        targets = torch.randint(0, 10, (samples,), generator=generator)
        optimizer.zero_grad()
        wrapped.compute_loss(LOSS, inputs, targets).backward()
        optimizer.step()
        digests.append(ls.digest(model))
        optimizer.zero_grad()
        outputs = wrapped(inputs)
        assert str(outputs.device) == names[0]
        LOSS(outputs, targets.to(names[0])).backward()
        digests.append(sum(each.grad.double().sum().item() for each in model.parameters()))
    return digests


def compute_all():
    wrapped = ls.DataParallel(nn.Linear(2, 2).to("simulated:0"))
    drawing = ls.DataParallel(
        nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4)).to("simulated:0"), [0, 1], microbatches=4
    )
    torch.manual_seed(3)
    inputs = torch.randn(8, 6)
    drawn = []
    for _ in range(2):
        drawing.steps = 0
        drawn.append(drawing(inputs).cpu())
    lists = ["cpu"], ["simulated:0", "simulated:1"], ["simulated:1", "simulated:1", "simulated:3"]
    return (
        [compute_on(names) for names in lists],
        list(map(str, wrapped.devices)),
        torch.equal(*drawn),
    )


def test_devices_with_memory_of_their_own_have_the_bits_of_the_cpu():
    ((found, devices, is_repeated),) = simulated.run(compute_all, 1, device="")
    assert all(each == found[0] for each in found)
    assert devices == [f"simulated:{index}" for index in range(simulated.DEVICES)]
    assert is_repeated
