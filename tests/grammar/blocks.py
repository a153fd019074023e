"""Blocks that torch has none of: each meets one rule, or one trap, of the guarantee."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """Adds what its body makes of the input to the input."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        return x + self.body(x)


class Checkpointed(nn.Module):
    """Computes its body again in backward."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class Cast(nn.Module):
    """Computes its body in another dtype, in which it also has its parameters."""

    def __init__(self, dtype, *body):
        super().__init__()
        self.dtype = dtype
        self.body = nn.Sequential(*body).to(dtype)

    def forward(self, x):
        return self.body(x.to(self.dtype)).to(x.dtype)


class Statistics(nn.Module):
    """Writes buffers of every rule in forward, also of 16 and 8 bits; one buffer is idle."""

    lockstep_buffer_rules = {
        "mean": "mean", "steps": "equal", "rounded": "mean", "load": "sum", "rough": "sum",
        "small": "sum", "final": "last",
    }  # fmt: skip

    def __init__(self, width, persistent=True):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width), persistent)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent)
        self.register_buffer("rounded", torch.zeros(width, dtype=torch.bfloat16), persistent)
        self.register_buffer("load", torch.zeros(width), persistent)
        self.register_buffer("rough", torch.zeros(width, dtype=torch.float16), persistent)
        self.register_buffer("small", torch.zeros(width, dtype=torch.int8), persistent)
        self.register_buffer("final", torch.zeros(width), persistent)
        self.register_buffer("idle", torch.arange(3.0), persistent)

    def forward(self, x):
        batch = x.detach().mean(dim=0)
        self.steps += 1
        self.load += x.detach().abs().sum(dim=0).to(self.load.dtype)
        self.rough = self.rough + batch.to(self.rough.dtype)
        self.small += (x.detach() > 0).sum(dim=0).to(torch.int8)
        self.final.copy_(x[-1].detach())
        self.mean.lerp_(batch.to(self.mean.dtype), 0.25)
        self.rounded = self.rounded * 0.5 + batch.to(self.rounded.dtype)
        return x - 0.1 * self.mean.to(x.dtype) + 0.001 * self.load.to(x.dtype).sqrt()


class Sometimes(nn.Module):
    """Has one branch that depends on the data, one that nobody takes, and a gradient of -0.0."""

    def __init__(self, width):
        super().__init__()
        self.branch = nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.zero = nn.Parameter(torch.full((3,), -0.0))

    def forward(self, x):
        if x.detach().flatten()[0] > 0:
            x = x + self.branch(x) + (self.zero * -0.0).sum()
        return x


class Noise(nn.Module):
    """Draws random numbers in forward."""

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


class PythonNoise(nn.Module):
    """Draws Python's and numpy's random numbers in forward."""

    def forward(self, x):
        import random

        import numpy

        return x * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand())


class Rounding(torch.autograd.Function):
    """A step function with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


class Rounded(nn.Module):
    """Calls an autograd function of its own."""

    def forward(self, x):
        return Rounding.apply(x)


class Scaled(nn.Module):
    """Writes into its input."""

    def forward(self, x):
        return x.mul_(0.5)


class ToComplex(nn.Module):
    """Multiplies by a complex matrix."""

    def __init__(self, width, wide):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, wide, dtype=torch.complex64) * 0.3)

    def forward(self, x):
        return torch.complex(x, -x) @ self.weight


class FromComplex(nn.Module):
    """Returns real and imaginary parts side by side."""

    def forward(self, z):
        return torch.cat([z.real, z.imag], dim=-1)


class Gapped(nn.Module):
    """Multiplies by a matrix that is a view: with gaps, or one element off its beginning."""

    def __init__(self, width, wide, gaps):
        super().__init__()
        whole = torch.randn(width, 2 * wide) * 0.3
        view = whole[:, ::2] if gaps else whole.view(-1)[1 : 1 + width * wide].view(width, wide)
        self.weight = nn.Parameter(view)

    def forward(self, x):
        return x @ self.weight


class Teacher(nn.Module):
    """Writes a parameter in forward: a copy of another one that follows it slowly."""

    def __init__(self, width):
        super().__init__()
        self.student = nn.Linear(width, width)
        self.teacher = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
            taught = self.teacher(x)
        return self.student(x) + 0.1 * taught


class Recurrent(nn.Module):
    """A recurrent layer over (batch, time, width), without its last state."""

    def __init__(self, kind, width, hidden, **options):
        super().__init__()
        self.layer = kind(width, hidden, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)

    def forward(self, x):
        return x + self.layer(x, x, x, need_weights=False)[0]


class OverTime(nn.Module):
    """A convolution over the time of (batch, time, width)."""

    def __init__(self, width, wide, **options):
        super().__init__()
        self.layer = nn.Conv1d(width, wide, 3, padding=1, **options)

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Mean(nn.Module):
    """Averages over some dimensions."""

    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.mean(self.dims)


class ChannelsLast(nn.Module):
    """Lays pictures out with their channels last."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last)


class Both(nn.Module):
    """A layer for each of two inputs."""

    def __init__(self, first, second):
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, a, b):
        return self.first(a) + self.second(b)


# --- values with several tensors between blocks ------------------------------------------------


class Opening(nn.Module):
    """Begins a chain whose value is a tensor and a dict that travels along.

    `alias` adds the tensor a second time: itself, or another one over its memory.
    """

    def __init__(self, body, alias="itself"):
        super().__init__()
        self.body = body
        self.alias = alias

    def forward(self, *inputs):
        h = self.body(*inputs)
        same = {"itself": h, "view": h.view_as(h), "detached": h.detach()}[self.alias]
        return h, {
            "same": same,
            "kept": torch.tanh(h) * 0.1,
            "factor": 0.5,
            "name": "a",
            "none": None,
        }


class Passing(nn.Module):
    """Applies its body to the tensor, and lets the dict pass."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, value):
        h, more = value
        return self.body(h), more


class Closing(nn.Module):
    """Ends the chain, where the dict is used."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, value):
        h, more = value
        return self.body(h) + more["factor"] * (
            more["kept"].abs().mean() + more["same"].abs().mean()
        )


class LossOpening(nn.Module):
    """Begins a chain that returns its loss: the targets travel along."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, inputs, targets):
        return self.body(inputs), {"targets": targets}


class LossClosing(nn.Module):
    """Ends a chain with its loss."""

    def __init__(self, body, loss):
        super().__init__()
        self.body = body
        self.loss = loss

    def forward(self, value):
        h, more = value
        return self.loss(self.body(h), more["targets"])


# --- models ------------------------------------------------------------------------------------


class Chain(nn.Module):
    """A model that names its blocks by a method."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def blocks(self):
        return self.layers

    def forward(self, *inputs):
        value = self.layers[0](*inputs)
        for layer in self.layers[1:]:
            value = layer(value)
        return value


class Named(nn.Module):
    """A model whose blocks are named where it is trained, by `blocks=NAMES`."""

    NAMES = ("first", "rest")

    def __init__(self, first, *rest):
        super().__init__()
        self.first = first
        self.rest = nn.ModuleList(rest)

    def forward(self, *inputs):
        value = self.first(*inputs)
        for layer in self.rest:
            value = layer(value)
        return value


class Whole(nn.Module):
    """A model that names no blocks: one unit."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class WithLoss(nn.Module):
    """A model that returns its loss: as a tensor, or in a dict."""

    def __init__(self, body, loss, answer):
        super().__init__()
        self.body = body
        self.loss = loss
        self.answer = answer

    def forward(self, inputs, targets):
        loss = self.loss(self.body(inputs), targets)
        return {"loss": loss} if self.answer == "dict" else loss


# --- layers with something written into them ------------------------------------------------------


def weight_norm(layer):
    """Return a layer whose weight is a direction and a length."""
    return parametrizations.weight_norm(layer)


def spectral_norm(layer):
    """Return a layer whose weight is divided by an estimate that is kept in buffers."""
    return parametrizations.spectral_norm(layer)


class Noisy(nn.Module):
    """A loss that draws random numbers."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), targets)


class Centred(nn.Module):
    """A loss with a buffer that it writes."""

    lockstep_buffer_rules = {"centre": "mean"}

    def __init__(self, classes):
        super().__init__()
        self.register_buffer("centre", torch.zeros(classes))

    def forward(self, outputs, targets):
        mean = outputs.detach().mean(dim=0).to(self.centre.dtype)
        self.centre = 0.9 * self.centre + 0.1 * mean
        return F.cross_entropy(outputs - self.centre.to(outputs.dtype), targets)


def summed(outputs, targets):
    """A custom loss: a sum over the samples, with the attribute that says so."""
    return (outputs.softmax(dim=1) - F.one_hot(targets, outputs.shape[1])).square().sum()


summed.reduction = "sum"


def quartic(outputs, targets):
    """A loss of one's own: a mean over the samples."""
    return ((outputs.softmax(dim=1) - F.one_hot(targets, outputs.shape[1])) ** 4).sum(1).mean()
