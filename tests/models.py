"""Small models and batches that between them meet every rule of the guarantee."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.data_parallel import planned_buckets
from lockstep.kernel import norm as gradient_norm


class CallInBackward(torch.autograd.Function):
    """The identity; its backward calls a function."""

    @staticmethod
    def forward(ctx, value, function):
        ctx.function = function
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


def treat_as_large():
    """Let this process exchange gradients of small models early, and share their norms."""
    planned_buckets.LARGE_BYTES = 4
    gradient_norm.SHARED_ELEMENTS = 1


def pictures():
    """A plain Sequential: every layer is a unit. Batch norm's statistics and counters."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 5, 3, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(5 * 4 * 4, 10),
    )


class Words(nn.Module):
    """Embedding, attention, layer norm, dropout; one unit. A tied and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.position = nn.Parameter(torch.randn(7, 12) * 0.1, requires_grad=False)
        self.block = nn.TransformerEncoderLayer(
            12, 2, 17, dropout=0.2, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(12, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.block(self.embed(words) + self.position).mean(dim=1))


class Branches(nn.Module):
    """A branch that only some micro-batches take, one that none takes, and a gradient of -0.0."""

    lockstep_buffer_rules = {
        "seen": "mean", "steps": "equal", "rounded": "mean", "counts": "sum", "small": "sum",
        "total": "sum", "final": "last",
    }  # fmt: skip

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(6, 10)
        self.sometimes = nn.Linear(6, 10)
        self.never = nn.Linear(6, 10)
        self.zero = nn.Parameter(torch.full((3,), -0.0))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rounded", torch.zeros(6, 6, dtype=torch.bfloat16))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("small", torch.full((2,), 100, dtype=torch.uint8))  # it overflows
        self.register_buffer("total", torch.full((3,), 0.1))
        self.register_buffer("final", torch.zeros(6))
        self.register_buffer("idle", torch.arange(4.0))

    def forward(self, inputs):
        self.steps += 1
        self.seen = self.seen * 0.5 + inputs[:, :3].detach().mean(dim=0)
        self.rounded += (inputs.detach().T @ inputs.detach()).bfloat16() / len(inputs)
        self.counts += (inputs[:, :3] > 0).sum(dim=0)
        self.small += len(inputs) * 9
        self.total = self.total + inputs[:, :3].detach().sum(dim=0)
        self.final.copy_(inputs[-1].detach())
        outputs = self.always(inputs)
        if inputs[0, 0] > 0.5:  # depends on the data, so on the micro-batch
            outputs = outputs + self.sometimes(inputs)
            # The gradient is -0.0 in the leaves that have it: it must not become 0.0.
            outputs = outputs + (self.zero * -0.0).sum()
        return outputs


class Noisy(nn.Module):
    """A loss that draws random numbers of its own."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), targets)


class Checkpointed(nn.Module):
    """Dropout that is computed again during backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Tanh())
        self.head = nn.Linear(9, 10)

    def forward(self, inputs):
        return self.head(checkpoint(self.inner, inputs, use_reentrant=False))


class Block(nn.Module):
    """One unit of a Sequential that recomputes itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh())

    def forward(self, inputs):
        return checkpoint(self.inner, inputs, use_reentrant=False)


def blocks():
    return nn.Sequential(Block(), Block(), nn.Dropout(0.2), nn.Linear(6, 10))


def picture_batches(sizes):
    return _batches(sizes, lambda n, g: torch.randn(n, 1, 8, 8, generator=g))


def word_batches(sizes):
    return _batches(sizes, lambda n, g: torch.randint(0, 13, (n, 7), generator=g))


def row_batches(sizes):
    return _batches(sizes, lambda n, g: torch.randn(n, 6, generator=g))


def _batches(sizes, inputs):
    generator = torch.Generator().manual_seed(3)
    return [
        (inputs(size, generator), torch.randint(0, 10, (size,), generator=generator))
        for size in sizes
    ]


CASES = {
    "pictures": (pictures, picture_batches, nn.CrossEntropyLoss),
    "words": (Words, word_batches, nn.CrossEntropyLoss),
    "branches": (Branches, row_batches, Noisy),
    "checkpointed": (Checkpointed, row_batches, nn.CrossEntropyLoss),
    "blocks": (blocks, row_batches, Noisy),
}
