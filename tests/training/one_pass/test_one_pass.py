"""Several micro-batches in one pass: the bits of separate passes, and what cannot be joined."""

import copy
import json
import os
import random
import tempfile
import uuid
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import lockstep as ls
import pytest_lockstep
from lockstep.training import model_setup
from lockstep.training.one_pass import one_pass, pass_plan, pass_trial
from lockstep.training.one_pass.one_pass import OnePass

STEPS = 4  # of which the steps 0, 1 and 2 compare, and the last one is computed in one pass
SAMPLES = 16
FEATURES = 64
CLASSES = 16


class Calls(nn.Module):
    """A model whose forward is a function of a linear layer and the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 64)
        self.head = nn.Linear(64, CLASSES)
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, *inputs, **named):
        return self._function(self, *inputs, **named)


def on_features(function, **parts):
    """Return a model that applies a function of the model to the features of a layer."""
    return Calls(lambda model, x: model.head(function(model, model.layer(x).relu())), **parts)


def with_zeros(layer):
    """Return a layer whose weights are zeros, so that its inputs get no gradient at first."""
    nn.init.zeros_(layer.weight)
    return layer


def on_images(*layers, outputs):
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(outputs, 16))


class Frozen(nn.BatchNorm2d):
    """Batch norm that is never in training."""

    def train(self, mode=True):
        return super().train(False)


class Reversed(nn.LSTM):
    """The second direction of an LSTM, with time first."""

    def __init__(self, size, hidden):
        super().__init__(size, hidden // 2, bias=False, bidirectional=True)

    def forward(self, rows):
        return super().forward(rows.transpose(0, 1))[0].transpose(0, 1)


class Twice(nn.LSTM):
    """An LSTM whose second call begins with the states of the first."""

    def forward(self, rows):
        outputs, states = super().forward(rows)
        return super().forward(outputs, states)[0]


def on_sequences(layer):
    def forward(model, x):
        rows = model.part(x.view(len(x), 4, 16) + model.position)
        rows = rows[0] if isinstance(rows, tuple) else rows
        return model.head(rows.flatten(1))

    return Calls(forward, part=layer, position=nn.Parameter(torch.randn(1, 4, 16)))


def write_where(model, x):
    x = x.clone()
    x[x > 0.5] = 0.5
    return x


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


def attend(model, x, dropout_p=0.0):
    x = torch.cat([model.first.expand(len(x), -1, -1), x.view(len(x), 4, 16)], 1) + model.position
    q, k, v = model.mix(x).view(len(x), 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p).transpose(1, 2).reshape(
        x.shape
    )
    return model.last(model.norm(x)[:, 0])


def attention():
    return Calls(
        attend,
        first=nn.Parameter(torch.zeros(1, 1, 16)),
        position=nn.Parameter(torch.randn(1, 5, 16)),
        mix=nn.Linear(16, 48),
        norm=nn.LayerNorm(16),
        last=nn.Linear(16, CLASSES),
    )


def normalize_gradient(model, x):
    """Return features plus the gradient of those after batch norm, which is differentiated."""
    (gradient,) = torch.autograd.grad(model.norm(x).square().sum(), x, create_graph=True)
    return x + 0.01 * gradient


def use_view(model, x):
    view = model.norm.running_var[None]
    return model.norm(x) * (view < 1e9)


def differentiate_weight(model, x):
    outputs = model.norm(x)
    (gradient,) = torch.autograd.grad(outputs, model.norm.weight, x.detach(), retain_graph=True)
    return outputs * (gradient.norm() < 1e9)


def write_part(model, x):
    model.seen[: len(x)] = (x.detach()[:, :1] > 1e9).float()
    return x


def observe(model, x):
    """Call a quantizer that will observe the range of all samples once it is switched on."""
    switch = torch.zeros(1, dtype=torch.int64)
    limits = torch.zeros(2)
    torch.fused_moving_avg_obs_fake_quant(
        x.detach(),
        switch,
        switch,
        model.seen,
        limits[1:],
        torch.ones(1),
        switch.int(),
        0.1,
        0,
        9,
        0,
    )
    return x


def add_rate(model, x):
    model.seen.add_(model.rate)
    return x


def count_steps(model, x):
    model.steps.add_(1)
    return x


def add_samples(model, x):
    model.seen.add_(x.detach().sum(0))
    return x


def square():
    return nn.Parameter(torch.randn(64, 64))


def scale():
    return nn.Parameter(torch.rand(64))


JOINED = {
    "a power of a weight": lambda: on_features(
        lambda model, x: x + model.layer.weight.square().mean()
    ),
    "linear layers": lambda: on_features(lambda model, x: x),
    "GELU": lambda: on_features(lambda model, x: F.gelu(x)),
    "functions of few elements": lambda: on_features(
        lambda model, x: F.pad(F.silu(model.part(x).tanh()).exp().sigmoid(), (0, 61)),
        part=nn.Linear(64, 3),
    ),
    "the largest features": lambda: on_features(
        lambda model, x: F.pad(x.topk(5, dim=1)[0], (0, 59))
    ),
    "features that begin without effect": lambda: on_features(
        lambda model, x: x + model.end(model.part(x.view(-1, 4, 16)).relu()).view(-1, 64),
        part=nn.Linear(16, 16),
        end=with_zeros(nn.Linear(16, 16)),
    ),
    "shuffled pixels": lambda: on_features(
        lambda model, x: F.pixel_shuffle(x.view(-1, 4, 4, 4), 2).flatten(1)
    ),
    "a triangle": lambda: on_features(lambda model, x: x.view(-1, 8, 8).tril().flatten(1)),
    "tensors that are broadcast": lambda: on_features(
        lambda model, x: torch.mul(*torch.broadcast_tensors(x, x[:, :1]))
    ),
    "a GRU": lambda: on_sequences(nn.GRU(16, 16, batch_first=True)),
    "a RNN": lambda: on_sequences(nn.RNN(16, 16, 2, batch_first=True)),
    "convolutions": lambda: on_images(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), outputs=16
    ),
    "a convolution in 1D": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(112, 16)
    ),
    "a transposed convolution": lambda: on_images(nn.ConvTranspose2d(1, 2, 2, 2), outputs=512),
    "group norm": lambda: on_images(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), outputs=288),
    "batch norm": lambda: on_features(lambda model, x: model.norm(x), norm=nn.BatchNorm1d(64)),
    "batch norm of images": lambda: on_images(
        nn.Conv2d(1, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4, affine=False),
        nn.Sigmoid(),
        outputs=64,
    ),
    "frozen batch norm": lambda: on_images(nn.Conv2d(1, 3, 3), Frozen(3), nn.ReLU(), outputs=108),
    "batch norm without statistics": lambda: on_features(
        lambda model, x: model.norm(x), norm=nn.BatchNorm1d(64, track_running_stats=False)
    ),
    "batch norm of sequences": lambda: on_features(
        lambda model, x: model.norm(x.view(-1, 16, 4)).flatten(1), norm=nn.BatchNorm1d(16)
    ),
    "batch norm of transposed sequences": lambda: on_features(
        lambda model, x: model.norm(x.view(-1, 4, 16).transpose(1, 2)).flatten(1),
        norm=nn.BatchNorm1d(16),
    ),
    "batch norm with the channels last": lambda: on_images(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(4),
        nn.BatchNorm2d(4),
        outputs=4,
    ),
    "batch norm with strided weights": lambda: on_features(
        lambda model, x: F.batch_norm(x, None, None, *model.table.unbind(1), training=True),
        table=nn.Parameter(torch.rand(64, 2) + 0.5),
    ),
    "batch norm that is used twice": lambda: on_features(
        lambda model, x: model.norm(model.norm(x).relu()), norm=nn.BatchNorm1d(64)
    ),
    "batch norm of no samples": lambda: on_features(
        lambda model, x: x @ model.norm(model.weight), norm=nn.BatchNorm1d(64), weight=square()
    ),
    "batch norm with frozen weights": lambda: on_features(
        lambda model, x: model.norm(x), norm=nn.BatchNorm1d(64).requires_grad_(False)
    ),
    "batch norm with one weight": lambda: on_features(
        lambda model, x: F.batch_norm(x, None, None, weight=model.scale, training=True),
        scale=scale(),
    ),
    "a counter": lambda: on_features(count_steps, steps=nn.Buffer(torch.zeros(()))),
    "attention": attention,
    "RMS norm": lambda: on_features(lambda model, x: model.norm(x), norm=nn.RMSNorm(64)),
    "broadcast parameters": lambda: on_features(
        lambda model, x: x * model.scale + model.shift, scale=scale(), shift=scale()
    ),
    "einsum": lambda: on_features(
        lambda model, x: torch.einsum("bi,ij->bj", x, model.matrix),
        matrix=nn.Parameter(torch.randn(64, 64)),
    ),
    "an embedding": lambda: on_features(
        lambda model, x: model.table((x * 9).long() % 8).sum(1), table=nn.Embedding(8, 64)
    ),
    "frozen parameters": lambda: on_features(
        lambda model, x: x + model.frozen(x), frozen=nn.Linear(64, 64).requires_grad_(False)
    ),
    "elements by their positions": lambda: on_features(
        lambda model, x: x + x[torch.arange(len(x))[:, None], x.argsort(1)]
    ),
    "two views of a sample": lambda: on_features(
        lambda model, x: sum(model.part(torch.cat([x, x * 2])).relu().chunk(2)),
        part=nn.Linear(64, 64),
    ),
    "elements that a mask overwrites": lambda: on_features(write_where),
    "a constant that is read": lambda: on_features(
        lambda model, x: x * model.fixed.tolist()[0], fixed=nn.Buffer(torch.ones(1))
    ),
    "a buffer that is read": lambda: on_features(
        lambda model, x: x + model.fixed, fixed=nn.Buffer(torch.rand(64))
    ),
}


def drop_paths(model, x):
    return x * x.new_empty(len(x), 1).bernoulli_(0.5)


def sample(model, x):
    return x + torch.randn_like(x) * F.dropout(x, 0.3).sigmoid()


def dropping_attention():
    return Calls(
        lambda model, x: attend(model, x, dropout_p=0.4),
        first=nn.Parameter(torch.zeros(1, 1, 16)),
        position=nn.Parameter(torch.randn(1, 5, 16)),
        mix=nn.Linear(16, 48),
        norm=nn.LayerNorm(16),
        last=nn.Linear(16, CLASSES),
    )


def dropping_blocks():
    """A model with blocks, each of which has separate random numbers."""
    block = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.4)) for _ in range(4)]
    return nn.Sequential(nn.Dropout(0.1), *block, nn.Linear(64, CLASSES))


TIME_FIRST = {
    "an encoder layer, with time first inside": lambda: on_sequences(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    ),
    "an encoder layer with dropout": lambda: on_sequences(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    ),
    "attention of several heads": lambda: on_sequences(SelfAttention()),
    "time first": lambda: on_features(
        lambda model, x: model.part(x.view(-1, 4, 16).transpose(0, 1)).transpose(0, 1).flatten(1),
        part=nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)),
    ),
}


def use_tied_table(model, x):
    rows = F.embedding((x[:, :4] * 9).long() % 16, model.table)
    return F.linear(rows.sum(1).tanh(), model.table) @ model.table


SHARED = {  # parameters whose gradients are sums, or are changed
    "tied weights": lambda: on_features(lambda model, x: model.layer(x).relu()),
    "weights that are used four times": lambda: on_features(
        lambda model, x: model.layer(model.layer(model.layer(x).relu()).relu())
    ),
    "a table that is also a layer": lambda: on_features(
        use_tied_table, table=nn.Parameter(torch.randn(16, 64))
    ),
    "a weight that is computed": lambda: on_features(
        lambda model, x: model.part(x), part=parametrizations.weight_norm(nn.Linear(64, 64))
    ),
    "a mean of two parameters": lambda: on_features(
        lambda model, x: x * (model.first + model.second.exp()) / 2, first=scale(), second=scale()
    ),
}


def dropping_twice():
    block = nn.Dropout(0.3)
    return nn.Sequential(block, nn.Linear(64, 64), block, nn.Linear(64, CLASSES))


DRAWING = {
    "dropout": lambda: on_features(lambda model, x: F.dropout(x)),
    "dropout in place": lambda: on_features(lambda model, x: F.dropout(x + 1, inplace=True)),
    "dropout of channels": lambda: on_images(
        nn.Conv2d(1, 8, 3), nn.Dropout2d(0.3), nn.ReLU(), outputs=288
    ),
    "alpha dropout": lambda: on_features(lambda model, x: F.alpha_dropout(x, 0.3, training=True)),
    "dropout in blocks": dropping_blocks,
    "dropout in attention": dropping_attention,
    "dropout in a block that is called twice": dropping_twice,
    "noise": lambda: on_features(lambda model, x: x + torch.rand_like(x)),
    "a sample of a distribution": lambda: on_features(sample),
    "numbers for the rows": lambda: on_features(lambda model, x: x * torch.rand(len(x), 1)),
    "numbers in given memory": lambda: on_features(
        lambda model, x: x + torch.rand(x.shape, out=torch.empty_like(x))
    ),
    "paths that are dropped": lambda: on_features(drop_paths),
}
JOINED |= {
    "a choice of numbers": lambda: on_features(lambda model, x: x * torch.where(x > 0, 0.5, 1.0)),
    "an element of each sample": lambda: on_features(
        lambda model, x: x * x.detach()[torch.arange(len(x)), x.argmax(1)][:, None]
    ),
    "an LSTM": lambda: on_sequences(nn.LSTM(16, 16, batch_first=True)),
    "an LSTM of several layers": lambda: on_sequences(
        nn.LSTM(16, 8, 3, batch_first=True, bidirectional=True, dropout=0.3)
    ),
    "an LSTM in reverse without biases": lambda: on_sequences(Reversed(16, 16)),
    "an LSTM that is called twice": lambda: on_sequences(Twice(16, 16, batch_first=True)),
}
JOINED |= SHARED | TIME_FIRST | DRAWING


def count(model, x):
    model.calls = getattr(model, "calls", 0) + 1
    return x


def write(model, x):
    model.seen += len(x)
    return x


def by_values(model, x):
    return x * 2 if x.max() > 100 else x


def over_a_limit(model, x):
    return torch.where(x.norm() > 1e9, x / x.norm(), x)


def reject(model, x):
    noise = torch.randn_like(x)
    while (noise.abs() > 2).any():
        noise = torch.where(noise.abs() > 2, torch.randn_like(x), noise)
    return x + noise


def limit_gradient(model, x):
    x.register_hook(lambda gradient: torch.where(gradient.norm() > 1e9, 0.0, gradient))
    return x


def skip_gradient(model, x):
    x.register_hook(lambda gradient: gradient * 0 if gradient.norm() > 1e9 else gradient)
    return x


def mix_gradients(model, x):
    x.register_hook(lambda gradient: gradient + 0 * gradient.flip(0))
    return x


def weigh_gradients(model, x):
    x.register_hook(lambda gradient: gradient * (1 + 0 * torch.arange(len(x)).view(-1, 1)))
    return x


def route(model, x):
    positions = (x > 0).long().cumsum(0) * 0
    return x * (positions <= len(x))


def without_effect(function):
    """Return a model that couples samples, which does not count yet."""
    return lambda: on_features(lambda model, x: x + 0 * function(x))


def with_hook():
    model = on_features(lambda model, x: x)
    model.layer.register_forward_hook(lambda *_: None)
    return model


def with_tensor_hook():
    model = on_features(lambda model, x: x)
    model.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def with_a_compiled_function():
    double = torch.compile(lambda x: 2 * x + torch.ones(64).cumsum(0), backend="eager")
    return on_features(lambda model, x: double(x))


class Limited(torch.autograd.Function):
    """Limits gradients, by the largest one of all samples in numpy."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        values = gradient.numpy()
        return torch.from_numpy(values / max(1.0, float(abs(values).max()) * 0.01))


class WithoutEffect(torch.autograd.Function):
    """Its backward couples samples, which does not count yet."""

    @staticmethod
    def forward(ctx, x, couple):
        ctx.couple = couple
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.0 * ctx.couple(gradient), None


def couple_gradients(couple):
    return lambda: on_features(lambda model, x: WithoutEffect.apply(x, couple))


def with_limit():
    """Return a model with an operator that limits features by the largest one of all samples."""

    def limit(x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():  # not after a ReLU
            os._exit(1)  # as a kernel that does not check what it is given
        return x / x.abs().max().clamp(min=1000.0)

    name = f"lockstep_tests::limit_{uuid.uuid4().hex}"
    made = torch.library.custom_op(name, limit, mutates_args=())
    made.register_autograd(lambda ctx, gradient: gradient / 1000)
    return on_features(lambda model, x: made(x))


# Of zeros, every operator has the rows that it should have.
COUPLES_EVENTS = {
    "cumsum": lambda event: event.cumsum(0),
    "cumsum of integers": lambda event: event.long().cumsum(0),
    "flip": lambda event: event.flip(0),
    "roll": lambda event: event.roll(1, 0),
    "index": lambda event: event[(event[:, 0] > 0).long()],
    "index with a gap": lambda event: event[:, :, None].expand(-1, 2, 3)[
        event[:, 0].long(), :, torch.ones(len(event), dtype=torch.long)
    ],
    "gather": lambda event: event.gather(0, event.long()),
    "index_select": lambda event: event.index_select(0, event[:, 0].long()),
    "conv1d": lambda event: F.conv1d(event.t()[None], torch.ones(1, 1, 3), padding=1)[0].t(),
    "reshape": lambda event: event.expand(-1, 64).t().reshape(-1, 64),
    "sum": lambda event: event.expand(-1, 64).view(-1, 16, 4).transpose(0, 1).contiguous().sum(0),
}


def couple_events(couple):
    def compute(model, x):
        rows = couple((x[:, :1] > 50).float()).float()
        return x * (1 + rows[:, :1])

    return on_features(compute)


SEPARATE = {
    "numpy in the backward pass": (
        lambda: on_features(lambda model, x: Limited.apply(x)),
        "values of samples are read by numpy() or tolist()",
    ),
    "an operator of another library": (
        with_limit,
        "is no operator of torch, and may combine samples",
    ),
    **{
        f"events, {name}": (lambda couple=couple: couple_events(couple), "has other bits")
        for name, couple in COUPLES_EVENTS.items()
    },
    "a compiled function": (with_a_compiled_function, "other operators"),
    "statistics of batch norm that are used": (
        lambda: on_features(
            lambda model, x: model.norm(x) * (model.norm.running_var < 1e9),
            norm=nn.BatchNorm1d(64),
        ),
        "forward uses running statistics after batch norm has changed them",
    ),
    "batch norm with the mean of all steps": (
        lambda: on_features(lambda model, x: model.norm(x), norm=nn.BatchNorm1d(64, momentum=None)),
        "aten::native_batch_norm was not called as in the first step",
    ),
    "a view of statistics that is used": (
        lambda: on_features(use_view, norm=nn.BatchNorm1d(64)),
        "forward uses running statistics after batch norm has changed them",
    ),
    "statistics that are no buffers": (
        lambda: on_features(
            lambda model, x: F.batch_norm(x, *model.statistics, training=True),
            statistics=[torch.zeros(64), torch.ones(64)],
        ),
        "batch norm writes running statistics that are no buffers",
    ),
    "the gradient of the weight of batch norm": (
        lambda: on_features(
            differentiate_weight, norm=nn.BatchNorm1d(64, track_running_stats=False)
        ),
        "aten::native_batch_norm_backward combines samples",
    ),
    "a part of a buffer for the samples": (
        lambda: on_features(write_part, seen=nn.Buffer(torch.zeros(64, 1))),
        "aten::slice takes as many rows of a tensor as there are samples",
    ),
    "limits of all samples in a buffer": (
        lambda: on_features(observe, seen=nn.Buffer(torch.zeros(1))),
        "writes a tensor that all samples share",
    ),
    "a gradient of batch norm that is differentiated": (
        lambda: on_features(normalize_gradient, norm=nn.BatchNorm1d(64)),
        "other operators follow aten::native_batch_norm_backward",
    ),
    "a sum of the samples in a buffer": (
        lambda: on_features(add_samples, seen=nn.Buffer(torch.zeros(64))),
        "aten::sum combines samples",
    ),
    "a mean": (lambda: on_features(lambda model, x: x - x.mean(0)), "aten::mean combines samples"),
    "a norm": (lambda: on_features(lambda model, x: x / x.norm()), "combines samples"),
    "a norm that seldom counts": (lambda: on_features(over_a_limit), "combines samples"),
    "values": (lambda: on_features(by_values), "aten::max combines samples"),
    "a softmax over samples": (
        lambda: on_features(lambda model, x: x * x.softmax(0)),
        "other bits",
    ),
    "a sum over samples": (lambda: on_features(lambda model, x: x.cumsum(0)), "other bits"),
    "the order of samples": (lambda: on_features(lambda model, x: x + x.roll(1, 0)), "other bits"),
    "sorted samples": (lambda: on_features(lambda model, x: x.sort(0).values), "other bits"),
    "the order of samples, without effect": (without_effect(lambda x: x.flip(0)), "aten::flip has"),
    "a softmax, without effect": (without_effect(lambda x: x.softmax(0)), "aten::softmax has"),
    "a sum over samples, without effect": (
        without_effect(lambda x: x.cumsum(0)),
        "aten::cumsum has other bits for several micro-batches",
    ),
    "sorted samples, without effect": (
        without_effect(lambda x: x.argsort(0)),
        "has other bits for several micro-batches",
    ),
    "a limit for all samples": (
        without_effect(lambda x: x <= 2.0 * len(x)),
        "aten::le gets 4.0 for one micro-batch and 32.0 for 8",
    ),
    "a whole limit for all samples": (
        without_effect(lambda x: x <= len(x)),
        "aten::le gets 2 for one micro-batch and 16 for 8",
    ),
    "a mask of all samples": (
        lambda: on_features(lambda model, x: x[x[:, 0] > -1e9]),
        "aten::index depends on how many values of all samples fit",
    ),
    "writing where a mask says": (
        lambda: on_features(lambda model, x: x.index_put((x[:, 0] > -1e9,), x * 2)),
        "aten::index_put depends on how many values",
    ),
    "the positions of all samples": (
        without_effect(lambda x: x[(x.detach()[:, 0] > -1e9).nonzero()[:, 0]]),
        "aten::nonzero depends on how many values",
    ),
    "a selection of all samples": (
        without_effect(lambda x: x.masked_select(x > -1e9).view(-1, 64)),
        "aten::masked_select depends on how many values",
    ),
    "repeated samples": (
        without_effect(lambda x: x.repeat_interleave((x[:, 0] > -1e9).long(), 0)),
        "aten::repeat_interleave depends on how many values",
    ),
    "values in a list": (
        lambda: on_features(lambda model, x: x * (max(x[:, 0].tolist()) < 1e9)),
        "values of samples are read by numpy() or tolist()",
    ),
    "values in an array": (
        lambda: on_features(lambda model, x: x * (numpy.asarray(x.detach()).max() < 1e9)),
        "values of samples are read by numpy() or tolist()",
    ),
    "a loop that draws again": (lambda: on_features(reject), ""),
    "numbers within limits": (
        lambda: on_features(lambda model, x: x + nn.init.trunc_normal_(torch.empty_like(x))),
        "",
    ),
    "a limit of a gradient": (
        lambda: on_features(limit_gradient),
        "aten::where uses the gradient of a parameter for samples",
    ),
    "a gradient that may be skipped": (
        lambda: on_features(skip_gradient),
        "reads the gradient of a parameter",
    ),
    "the order of gradients, without effect": (
        lambda: on_features(mix_gradients),
        "aten::flip has other bits for several micro-batches",
    ),
    "positions of samples as numbers": (
        lambda: on_features(lambda model, x: x + 0 * torch.arange(len(x))[:, None]),
        "aten::mul computes with the positions of all samples",
    ),
    "positions of samples in a gradient": (
        lambda: on_features(weigh_gradients),
        "aten::mul computes with the positions of all samples",
    ),
    "numbers in the order of samples": (
        lambda: on_features(lambda model, x: x + (0 * torch.linspace(0, 1, len(x)))[:, None]),
        "aten::linspace gets other numbers for several micro-batches",
    ),
    "the largest of neighbouring samples": (  # its backward pass writes at positions in a plane
        without_effect(lambda x: F.max_pool1d(x.t()[None], 3, 1, 1)[0].t()),
        "aten::max_pool1d has other bits for several micro-batches",
    ),
    "short vectors of one column": (
        lambda: on_features(
            lambda model, x: F.pad((model.part(x).abs() + 0.1) ** 1.5, (0, 63)),
            part=nn.Linear(64, 1),
        ),
        "aten::pow may round the last elements of the shape (2, 1) differently",
    ),
    "products of samples": (
        lambda: on_features(lambda model, x: x + (x @ x.t()) @ x),
        "does not have one part per sample",
    ),
    "one sample": (lambda: on_features(lambda model, x: x + x[0]), "aten::select combines samples"),
    "some rows": (lambda: on_features(lambda model, x: x + x[x[:, 0] > 0].sum()), ""),
    "the number of samples": (lambda: on_features(lambda model, x: x / len(x)), "other bits"),
    "dropout of a weight": (
        lambda: on_features(lambda model, x: x @ F.dropout(model.weight), weight=square()),
        "aten::bernoulli_ draws the same numbers for several samples",
    ),
    "one number for a micro-batch": (
        lambda: on_features(lambda model, x: x * torch.rand(())),
        "aten::uniform_ draws the same numbers for several samples",
    ),
    "a permutation": (
        lambda: on_features(lambda model, x: x + x[torch.randperm(len(x))]),
        "aten::randperm draws random numbers",
    ),
    "a generator in an operator": (
        lambda: on_features(lambda model, x: F.rrelu(x, training=True)),
        "aten::rrelu draws random numbers",
    ),
    "Python's generator": (
        lambda: on_features(lambda model, x: x * random.random()),
        "random numbers that are not drawn by torch's operators",
    ),
    "numpy's generator": (
        lambda: on_features(lambda model, x: x * numpy.random.rand()),
        "random numbers that are not drawn by torch's operators",
    ),
    "short vectors": (
        lambda: on_features(
            lambda model, x: F.pad(model.part(x).log1p(), (0, 61)), part=nn.Linear(64, 3)
        ),
        "aten::log1p may round the last elements of the shape (2, 3) differently",
    ),
    "a buffer that is written": (
        lambda: on_features(write, seen=nn.Buffer(torch.zeros(()))),
        "aten::add_ gets other numbers for several micro-batches",
    ),
    "an attribute": (lambda: on_features(count), "forward changes"),
    "gradients in another order, without effect": (
        couple_gradients(lambda gradient: gradient.flip(0)),
        "aten::flip has other bits",
    ),
    "a softmax of gradients, without effect": (
        couple_gradients(lambda gradient: gradient.softmax(0)),
        "aten::softmax has other bits",
    ),
    "a sum over gradients, without effect": (
        couple_gradients(lambda gradient: gradient.cumsum(0)),
        "aten::cumsum has other bits",
    ),
    "inputs that are written, without effect": (
        lambda: Calls(lambda model, x: model.head(model.layer(x.clamp_(-9, 9)).relu())),
        "the inputs of the batch are written",
    ),
    "a softmax over halves": (
        lambda: on_features(lambda model, x: x.view(2, -1, 64).softmax(0).view(-1, 64)),
        None,
    ),
    "a hook": (with_hook, None),
    "a hook on a parameter": (with_tensor_hook, None),
}
RULES = {
    "a counter": {"steps": "equal"},
    "a buffer that is written": {"seen": "sum"},
    "a sum of the samples in a buffer": {"seen": "sum"},
    "a part of a buffer for the samples": {"seen": "last"},
    "limits of all samples in a buffer": {"seen": "last"},
}


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


OF_CLASSES = nn.CrossEntropyLoss()


def train(model, batches, *, is_joined, loss=OF_CLASSES, **options):
    """Return the digests, the number of micro-batches in joint passes, and the note."""
    joined = []

    def compute(self, step, buffers, group):
        results = original(self, step, buffers, group)
        joined.append(0 if results is None else len(group))
        return results

    original = OnePass.compute
    with mock.patch.object(OnePass, "compute", compute):
        trainer = ls.Trainer(
            model,
            copy.deepcopy(loss),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            microbatches=8,
            loggers=[],
            audit=ls.AuditConfig(max_corrections=0),
            **options,
        )
        joint = trainer.engine.setup.executor.one_pass
        assert joint is not None
        if not is_joined:
            trainer.engine.setup.executor.one_pass = None
        for batch in batches:
            trainer.step(batch)
    return trainer.digest(), trainer.optimizer_digest(), sum(joined), joint.known.note


def compare(make, rules=None, batches=None, **options):
    """Return whether one pass has the bits of separate ones, what it computed, and the note."""
    found = []
    for is_joined in (False, True):
        torch.manual_seed(0)
        model = make()
        if rules:
            model.lockstep_buffer_rules = rules
        found.append(train(model, batches or [data()] * STEPS, is_joined=is_joined, **options))
    (*separate, _, _), (*joined, count, note) = found
    return separate == joined, count, note


def on_portable_ranks(function, ranks=1):
    def call():
        ls.init(portable=True, threads=1)
        return function()

    return pytest_lockstep.run(call, ranks=ranks, timeout=300, init=False)


@pytest.fixture(scope="module")
def compared():
    """What every model does, computed in one process."""

    def compare_all():
        joined = {name: compare(make, RULES.get(name)) for name, make in JOINED.items()}
        separate = {name: compare(make, RULES.get(name)) for name, (make, _) in SEPARATE.items()}
        return joined | separate

    return on_portable_ranks(compare_all)[0]


@pytest.mark.parametrize("name", JOINED)
def test_one_pass_has_the_bits_of_separate_ones(name, compared):
    assert compared[name] == (True, 8 * (STEPS - 3), "")


@pytest.mark.parametrize("name", SEPARATE)
def test_a_model_that_couples_samples_or_draws_is_computed_separately(name, compared):
    is_equal, count, note = compared[name]
    assert (is_equal, count) == (True, 0), note
    if SEPARATE[name][1] is None:
        return
    assert note
    assert SEPARATE[name][1] in note


class Centered(nn.CrossEntropyLoss):
    """A loss that moves a buffer towards the mean of the outputs."""

    def __init__(self, replaces):
        super().__init__()
        self.center = nn.Buffer(torch.zeros(16))
        self._replaces = replaces
        self.lockstep_buffer_rules = {"center": "mean"}

    def forward(self, outputs, targets):
        center = self.center.lerp(outputs.detach().mean(0), 0.1)
        if self._replaces:
            self.center = center
        else:
            self.center.copy_(center)
        return super().forward(outputs - self.center, targets)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_loss_that_writes_a_buffer_is_computed_separately(replaces):
    def train_both():
        found = []
        for is_joined in (False, True):
            torch.manual_seed(0)
            model = on_features(lambda model, x: x)
            loss = Centered(replaces)
            *bits, count, note = train(model, [data()] * STEPS, is_joined=is_joined, loss=loss)
            found.append((bits, loss.center.tolist(), count, note))
        return found

    ((separate, joined),) = on_portable_ranks(train_both)
    assert joined[:3] == (*separate[:2], 0)
    assert joined[3] == (
        "the loss writes the buffer Centered.center"
        if replaces
        else "the loss has other bits for several micro-batches"
    )


def test_metrics_see_the_statistics_of_their_micro_batch():
    def train_both():
        found = []
        for is_joined in (False, True):
            torch.manual_seed(0)
            model = on_features(lambda model, x: model.norm(x), norm=nn.BatchNorm1d(64))
            seen = []

            def read(outputs, targets, model=model, seen=seen):
                seen.append(model.norm.running_mean.sum().item())
                return outputs.detach().sum()

            *_, count, note = train(
                model, [data()] * STEPS, is_joined=is_joined, metrics={"sum": read}
            )
            found.append((seen[-8:], count, note))
        return found

    ((separate, joined),) = on_portable_ranks(train_both)
    assert joined == (separate[0], 8 * (STEPS - 3), "")
    assert len(set(joined[0])) == 8


def test_a_buffer_that_is_written_later_is_noticed():
    """It is computed in one pass again after all bits were compared."""

    def train_both():
        found = []
        for is_joined in (False, True):
            torch.manual_seed(0)
            model = on_features(
                add_rate, seen=nn.Buffer(torch.zeros(())), rate=nn.Buffer(torch.zeros(()))
            )
            model.lockstep_buffer_rules = {"seen": "equal"}
            found.append(train(model, change_rate(model), is_joined=is_joined))
        return found

    def change_rate(model):
        for step in range(STEPS + 3):
            if step == STEPS:
                model.rate.fill_(1)
            yield data()

    ((separate, joined),) = on_portable_ranks(train_both)
    assert joined[:2] == separate[:2]
    assert joined[2] == 8 * 2  # in the steps 3 and 6; all bits are compared in the others
    assert joined[3] == "forward writes the buffer seen, and did not in the first step"


def test_a_compiled_model_is_computed_separately():
    """Its operators are called with tensors that have no memory while it is compiled."""

    def train_both():
        found = []
        for is_compiled in (False, True):
            torch.manual_seed(0)
            model = on_features(lambda model, x: x.relu())
            model = torch.compile(model, backend="eager") if is_compiled else model
            trainer = ls.Trainer(
                model,
                nn.CrossEntropyLoss(),
                lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                progress=False,
            )
            found.append([trainer.step(data()) for _ in range(STEPS)])
        return found

    ((plain, compiled),) = on_portable_ranks(train_both)
    assert plain == compiled


class Changes(nn.Module):
    """A model that calls other operators, or fails, from a step on."""

    def __init__(self, change):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.change = change
        self.is_changed = False

    def forward(self, x):
        x = self.layer(x)
        return self.change(x) if self.is_changed else x


class Late(torch.utils.data.Dataset):
    """Batches, before one of which the model changes."""

    def __init__(self, model, step):
        self.model = model
        self.step = step

    def __iter__(self):
        for step in range(8):
            self.model.is_changed = step >= self.step
            yield data()


LATE = {
    "mean": lambda x: x - x.mean(0),
    "tanh": lambda x: x.tanh(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "fails": lambda x: x[:, 99],
}


class Rolls(Changes):
    """A model that mixes samples from a step on, by the same operators."""

    def forward(self, x):
        return self.layer(x.roll(int(self.is_changed), 0))


class Scales(Changes):
    """A model with a factor that depends on the number of samples from a step on."""

    def forward(self, x):
        return self.layer(x) * (2.0 / len(x) if self.is_changed else 1.0)


class Lifts(Changes):
    """The same with a tensor."""

    def forward(self, x):
        return self.layer(x) * torch.tensor(2.0 / len(x) if self.is_changed else 1.0)


class Powers(Changes):
    """A model with a power that is a product, and from a step on another one."""

    def forward(self, x):
        rows = self.layer(x)
        with torch.no_grad():
            weights = rows[:, :9].abs().pow(2.3 if self.is_changed else 2.0)
        return torch.cat([rows[:, :9] * weights, rows[:, 9:]], 1)


class Uses(Changes):
    """A model that uses fewer features from a step on."""

    used = (torch.arange(FEATURES) < FEATURES, torch.arange(FEATURES) < 5)

    def forward(self, x):
        used = self.used[self.is_changed]
        return self.layer(x) * x[:, used].sigmoid().mean(1, keepdim=True)


CHANGING = {"roll": Rolls, "mul": Scales, "lift_fresh": Lifts, "pow": Powers, "sigmoid": Uses}
"""Models that call the same operators otherwise, by the first one of which this is noticed."""


def change_late(change, *, is_joined):
    torch.manual_seed(0)
    model = CHANGING[change](None) if change in CHANGING else Changes(LATE[change])
    return train(model, Late(model, 4), is_joined=is_joined)


def fail_late():
    with pytest.raises(IndexError, match="index 99 is out of bounds") as raised:
        change_late("fails", is_joined=True)
    return raised.value.__notes__


def compare_limited():
    """Return the comparison, and the numbers of micro-batches in its passes."""
    sizes = set()

    def compute(self, step, buffers, group):
        results = original(self, step, buffers, group)
        if results is not None:
            sizes.add(len(group))
        return results

    original = OnePass.compute
    with (
        mock.patch.object(pass_trial, "MOST_BYTES", 4 * 4 * (2 * (64 + 64 + 2 * 16) + 2)),
        mock.patch.object(OnePass, "compute", compute),
    ):
        return compare(JOINED["linear layers"], batches=[data()] * 8), sizes


def compare_limited_parts():
    with mock.patch.object(pass_plan, "MOST_PARTS", 8 * 64 * 64 * 4):
        return [compare(SHARED[name]) for name in ("tied weights", "a mean of two parameters")]


def compare_drawing_losses():
    make = DRAWING["dropout in a block that is called twice"]
    return compare(make, loss=Drawing())


def compare_mappings():
    inputs, targets = data()
    batch = ({"features": inputs}, targets)

    def make():
        return Calls(lambda model, named: model.head(model.layer(named["features"])))

    return compare(make, batches=[batch] * STEPS)


class Outputs:
    def __init__(self, logits):
        self.logits = logits


def compare_objects():
    def make():
        return Calls(lambda model, x: (model.head(model.layer(x)), Outputs(x)))

    def ignore(outputs, targets):
        return F.cross_entropy(outputs[0], targets)

    def use(outputs, targets):
        return ignore(outputs, targets) + 0 * outputs[1].logits.mean(0).mean()

    return compare(make, loss=ignore), compare(make, loss=use)


CONVOLUTIONS = {
    "conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 4, 3, stride=16), nn.Flatten(), nn.Linear(16, 16)
    ),
    "conv3d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4, 4)), nn.Conv3d(1, 4, 3), nn.Flatten(), nn.Linear(32, 16)
    ),
    "conv_transpose2d": lambda: on_images(nn.ConvTranspose2d(1, 2, 2, 2), outputs=512),
}


@pytest.fixture(scope="module")
def late():
    """What models and passes do that are special in one way, computed in one process."""

    def compare_all():
        make = JOINED["linear layers"]
        found = {n: compare(make, batches=[data(n)] * 5) for n in (19, 3, 8, 16)}
        for change in ("mean", "tanh", "dropout", *CHANGING):
            found[change] = [change_late(change, is_joined=each) for each in (False, True)]
        return found | {
            "notes": fail_late(),
            "limited": compare_limited(),
            "limited parts": compare_limited_parts(),
            "drawing losses": compare_drawing_losses(),
            "a mapping": compare_mappings(),
            "an object": compare_objects(),
            "convolutions": [
                compare(make, batches=[data(8)] * STEPS) for make in CONVOLUTIONS.values()
            ],
        }

    return on_portable_ranks(compare_all)[0]


@pytest.mark.parametrize("change", ["mul", "lift_fresh", "pow", "sigmoid"])
def test_arguments_that_change_are_noticed(change, late):
    ((*separate, _, _), (*joined, _, note)) = late[change]
    assert separate == joined
    assert note == f"aten::{change} was not called as in the first step"


@pytest.mark.parametrize("change", ["mean", "tanh", "roll"])
def test_operators_that_were_not_called_before_are_noticed(change, late):
    ((*separate, _, _), (*joined, count, note)) = late[change]
    assert separate == joined
    assert note == f"aten::{change} was not called as in the first step"
    # Step 3; step 4 is computed separately; 5 compares; 6 and 7 are joined if it can be.
    assert count == (8 + 2 * 8 if change == "tanh" else 8)


def test_dropout_that_begins_later_is_the_reason(late):
    ((*separate, _, _), (*joined, count, note)) = late["dropout"]
    assert separate == joined
    assert note == "aten::empty_like was not called as in the first step"
    assert count == 8 + 2 * 8


def test_inputs_may_be_mappings(late):
    assert late["a mapping"] == (True, 8 * (STEPS - 3), "")


def test_an_output_of_another_type_is_not_used(late):
    ignoring, (is_equal, count, note) = late["an object"]
    assert ignoring == (True, 8 * (STEPS - 3), "")
    assert (is_equal, count) == (True, 0)
    assert "the loss uses an output of the type Outputs, which is not cut" in note


def test_convolutions_of_one_sample_are_computed_separately(late):
    for name, (is_equal, count, note) in zip(CONVOLUTIONS, late["convolutions"], strict=True):
        assert (is_equal, count) == (True, 0), name
        assert note == f"aten::{name} rounds one sample in another way than several"


def test_an_error_is_that_of_a_separate_pass(late):
    assert late["notes"] == ["in rank 0, step 4, micro-batch 0"]


@pytest.mark.parametrize(("samples", "count"), [(19, 6), (3, 3), (8, 8), (16, 8)])
def test_a_pass_is_a_node_of_equal_micro_batches(samples, count, late):
    # 19 samples: 3 3 3 2 2 2 2 2, of which 0-1 and 4-7 are alike.
    assert late[samples] == (True, count * 2, "")


def test_a_pass_keeps_no_more_memory_than_it_may(late):
    (is_equal, count, note), sizes = late["limited"]
    assert (is_equal, note) == (True, "")
    assert count == 8 * 4  # steps 3, 4, 6 and 7
    assert sizes == {4}  # two passes each


class Drawing(nn.Module):
    """A loss that draws random numbers."""

    def forward(self, outputs, targets):
        return F.cross_entropy(F.dropout(outputs, 0.2), targets)


def test_a_loss_draws_after_the_last_call_of_a_block(late):
    assert late["drawing losses"] == (True, 8 * (STEPS - 3), "")


def rates():
    """Return samples whose targets are numbers between 0 and 1."""
    inputs, _ = data()
    generator = torch.Generator().manual_seed(2)
    return inputs, torch.rand(SAMPLES, CLASSES, generator=generator)


class Growing:
    """Batches, and a loss whose second term grows with them, from one of them on."""

    def __init__(self, first):
        self.first = first
        self.factor = 0.0

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets) + self.factor * outputs.square().mean()

    def __deepcopy__(self, memo):
        return self

    def __iter__(self):
        for step in range(2 * STEPS):
            self.factor = max(0, 1 + step - self.first) / 10
            yield data()


class WithLoss(nn.Module):
    """A model that returns its loss, to which its weights belong."""

    def __init__(self, reduce):
        super().__init__()
        self.body = JOINED["linear layers"]()
        self.scale = nn.Parameter(torch.ones(CLASSES))
        self._reduce = reduce

    def forward(self, x, targets):
        outputs = self.body(x) * self.scale
        losses = F.cross_entropy(outputs, targets, reduction="none")
        loss = self._reduce(losses) + 0.01 * self.scale.square().sum()
        return {"loss": loss, "logits": outputs}


def count_right(outputs, batch):
    return (outputs["logits"].argmax(1) == batch[1]).float().mean()


def difference(reduce):
    return lambda outputs, targets: reduce((outputs - targets).square())


JOINED_LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), data),
    "class weights": (
        lambda *pair: F.cross_entropy(*pair, weight=torch.linspace(0.5, 2, CLASSES)),
        data,
    ),
    "ignored targets": (nn.CrossEntropyLoss(ignore_index=3), data),
    "a sum": (nn.CrossEntropyLoss(reduction="sum"), data),
    "smooth labels": (nn.CrossEntropyLoss(label_smoothing=0.1), data),
    "pixels": (lambda o, y: F.cross_entropy(o.view(-1, 4, 4), y[:, None].expand(-1, 4) % 4), data),
    "log likelihood": (lambda o, y: 2 * F.nll_loss(o.log_softmax(1), y) + 0.5, data),
    "squares": (nn.MSELoss(), rates),
    "absolute differences": (nn.L1Loss(), rates),
    "smooth differences": (nn.SmoothL1Loss(), rates),
    "Huber": (nn.HuberLoss(delta=0.5), rates),
    "margins": (lambda o, y: F.soft_margin_loss(o, (y - 0.5).sign()), rates),
    "logits": (nn.BCEWithLogitsLoss(), rates),
    "the sum of logits": (nn.BCEWithLogitsLoss(reduction="sum"), rates),
    "probabilities": (lambda o, y: F.binary_cross_entropy(o.sigmoid(), y, weight=y), rates),
    "a mean": (difference(torch.mean), rates),
    "a mean in float64": (difference(partial(torch.mean, dtype=torch.float64)), rates),
    "the sum of two": (lambda o, y: F.cross_entropy(o, y) + o.square().mean(), data),
    "the mean of the columns of a matrix": (difference(lambda x: x.t().mean()), rates),
    "random numbers": (Drawing(), data),
}
SEPARATE_LOSSES = {
    "a number of samples": lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="batchmean"),
    "a mean over samples first": difference(lambda x: x.mean(0).mean()),
    "weights of logits": lambda o, y: F.binary_cross_entropy_with_logits(o, y, weight=y),
    "a loss for eight columns": lambda o, y: (
        (o[:, :8] + 0 * o.detach().mean()).square() * y[:, :8]
    ).mean(),
    "a value": difference(lambda x: x.mean() * (1 if x.mean().item() < 1e9 else 2)),
}


class Weighing:
    """Batches whose micro-batches have equal weights first, and their own ones later."""

    def __init__(self, make):
        self.make = make
        self.is_weighing = False

    def __iter__(self):
        for step in range(STEPS + 1):
            self.is_weighing = step >= STEPS - 1
            yield self.make()

    def weigh(self, batch):
        return batch[0].abs().mean() if self.is_weighing else 1.0


class WithFeatures(nn.Module):
    """A model that returns its outputs, and the features that they are computed from."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Linear(FEATURES, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        features = self.body(x)
        return self.head(features.relu()), features


def limit(x):
    """Return by how much numbers exceed a limit, which none does in the steps that compare."""
    return (x - 5).relu()


def square_of(function):
    """Return a term whose gradient differs between micro-batches."""

    def compute(x):
        value = function(x)
        return value * value

    return compute


def limit_parts(x):
    return [limit(x * k / 7).mean() for k in range(7)]


# Terms of a loss whose factor is 0 in the steps that compare, and how they are computed.
TERMS = {
    "the mean of columns": square_of(lambda x: limit(x).t().mean()),
    "a mean with time first": square_of(
        lambda x: limit(x).view(-1, 4, 5).transpose(0, 1).reshape(-1).mean()
    ),
    "losses that are joined": square_of(
        lambda x: torch.cat([limit(x).mean().view(-1), 2 * limit(-x).mean().view(-1)]).sum()
    ),
    "losses that are flattened": square_of(lambda x: torch.stack(limit_parts(x)).flatten().sum()),
    "a loss with a dimension": lambda x: (
        ((x * 1).view(-1, 8) / x.detach().abs().mean().clamp(min=5).unsqueeze(0)).square().mean()
    ),
    "a product of losses": lambda x: (
        (x * 1).square().mean()
        * (
            torch.stack([(x * k / 7).sigmoid().mean() for k in range(7)], -1).detach()
            @ torch.arange(7.0).div(3)
        )
    ),
    "a part of the columns": square_of(lambda x: (x * 1)[:, :13].mean()),
    "an expanded column": square_of(lambda x: (x * 1)[:, :1].expand(-1, 7).mean()),
    "a column that is added": lambda x: (x * 1 + x[:, :1].sigmoid()).sum(),
    "the mean of columns of products": lambda x: (limit(x).detach() * limit(x)[:, :1]).t().mean(),
    "the sum of products with columns": lambda x: (
        limit(x * x[:, :1]) * x.detach().t().contiguous().t() * 1e-4
    ).sum(),
    "a factor in float64": lambda x: (
        torch.tensor(0.3, dtype=torch.float64) * (x * 1).square().mean()
    ).float(),
}


UNALIGNED = (
    "a mean with time first",
    "a part of the columns",
    "an expanded column",
    "a column that is added",
)


def ignore_as_many(outputs, targets):
    return F.cross_entropy(outputs, targets, ignore_index=len(targets))


class LateBatches:
    """Batches, and the factor of a term, with other values after the steps that compare.

    Args:
        term: A function of the features.
    """

    def __init__(self, term=None):
        self.term = term
        self.factor = torch.zeros(())

    def __iter__(self):
        for step in range(STEPS + 3):
            inputs, targets = data(24 if self.term else SAMPLES)
            is_late = step >= STEPS - 1
            self.factor.fill_(0.003 if is_late else 0.0)
            yield (20 * inputs, targets) if is_late else (inputs, targets % 2)

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs[0], targets) + self.factor * self.term(outputs[1])

    def __deepcopy__(self, memo):
        return self


def by_targets(usual, other):
    """Return a loss that is another one if the targets of a micro-batch say so."""

    def compute(outputs, targets):
        return (other if (targets == CLASSES - 1).any() else usual)(outputs, targets)

    return compute


def of_rows(outputs, targets):
    return F.mse_loss(outputs, 3 * F.one_hot(targets, CLASSES).float())


def of_columns(outputs, targets):
    return F.mse_loss(outputs.t(), 3 * F.one_hot(targets, CLASSES).float().t())


def ends_with(function):
    return partial(Calls, lambda model, x: function(model.head(model.layer(x).relu())))


def of_first(outputs, targets):
    return F.cross_entropy(outputs[0], targets)


def of_three(outputs, targets):
    first, second, third = outputs
    is_late = (targets == CLASSES - 1).any().float()
    return F.cross_entropy(first, targets) + second.pow(2).mean() + is_late * third.abs().mean()


def of_float64(outputs, targets):
    """Return a loss whose factor is 1 in the steps that compare, which rounds nothing."""
    factor = 1 - 0.7 * (targets > 1).double().mean()
    hot = F.one_hot(targets, CLASSES).double()
    return factor * F.binary_cross_entropy_with_logits(outputs, hot)


# Outputs, and a loss that uses them in another way after the steps that compare.
OUTPUTS = {
    "smooth outputs": (ends_with(F.softplus), by_targets(of_rows, of_columns)),
    "exponential outputs": (ends_with(F.elu), by_targets(of_rows, of_columns)),
    "the number of samples": (
        ends_with(lambda x: (x, len(x))),
        by_targets(of_first, lambda o, y: of_first(o, y) / o[1]),
    ),
    "a vector without samples": (
        ends_with(lambda x: (x, torch.arange(16.0))),
        by_targets(of_first, lambda o, y: of_first(o, y) * o[1].mean()),
    ),
    "targets in float64": (ends_with(lambda x: x), of_float64),
    "the same tensor": (ends_with(lambda x: (x, x, x)), of_three),
    "rows with time first": (
        partial(
            Calls,
            lambda model, x: (model.head(model.layer(x)), limit(time_first(model.layer(x)))),
        ),
        lambda outputs, targets: of_first(outputs, targets) + outputs[1].square().mean(),
    ),
}


def with_item(outputs, targets):
    """Return a loss that is read, so that it is computed for each micro-batch."""
    loss = F.cross_entropy(outputs, targets)
    loss.item()
    return loss


def time_first(x):
    """Return four rows of each sample, in whose order samples alternate."""
    return x.view(-1, 4, 16).transpose(0, 1).reshape(-1, 16)


def samples_first(x):
    return x.view(4, -1, 16).transpose(0, 1).reshape(-1, 64)


def on_layer(function, **parts):
    """Return what makes a model whose head gets a function of the model and a layer's results."""

    def make():
        made = {name: make_part() for name, make_part in parts.items()}
        return Calls(lambda model, x: model.head(function(model, model.layer(x))), **made)

    return make


def with_pairs(model, x):
    """Return samples, with a function of those with even numbers followed by the others."""
    half = len(x) // 2
    pairs = limit(model.pair(torch.cat([x[::2], x[1::2]])))
    return x + torch.stack([pairs[:half], pairs[half:]], 1).flatten(0, 1)


def write_in_turns(model, x):
    """Return samples, with the rows that were written through a view of a tensor."""
    rows = x.detach().view(-1, 16).clone()
    rows[:, :].copy_(time_first(x.detach()))
    return (x.view(-1, 16) + limit(rows)).view(-1, 64)


# Models that couple or order samples by what is zero in the steps that compare.
LATE_MODELS = {
    "rows in two orders": on_layer(
        lambda model, x: (x.view(-1, 16) + limit(time_first(x))).view(-1, 64)
    ),
    "a mask in another order": on_layer(
        lambda model, x: x.view(-1, 16).masked_fill(time_first(x) > 5, 0.0).view(-1, 64)
    ),
    "dropout with time first": on_layer(
        lambda model, x: x + samples_first(F.dropout(limit(time_first(x)), 0.5))
    ),
    "a bias with time first": on_layer(
        lambda model, x: (
            model.part(x.view(-1, 16)).view(-1, 64)
            + samples_first(limit(time_first(x) + model.bias))
        ),
        bias=lambda: nn.Parameter(torch.zeros(16)),
        part=partial(nn.Linear, 16, 16),
    ),
    "a mask of equal rows": on_layer(
        lambda model, x: samples_first(
            time_first(x)
            + limit(time_first(x)) * F.pad(torch.zeros(len(x), 3), (1, 0), value=1.0).view(-1, 1)
        )
    ),
    "a function of equal rows": on_layer(
        lambda model, x: (
            model.part(x.view(-1, 16)).view(-1, 64)
            + limit(x + samples_first(model.part(torch.zeros(4 * len(x), 16))))
        ),
        part=partial(nn.Linear, 16, 16),
    ),
    "a function with time first": on_layer(
        lambda model, x: (
            model.part(x.view(-1, 4, 16)).view(-1, 64)
            + model.other(limit(x).view(-1, 4, 16).transpose(0, 1)).transpose(0, 1).reshape(-1, 64)
        ),
        part=partial(nn.Linear, 16, 16),
        other=partial(nn.Linear, 16, 16),
    ),
    "pairs": on_layer(with_pairs, pair=partial(nn.Linear, 64, 64)),
    "a part that is written": on_layer(write_in_turns),
    "flags of a sample": on_layer(
        lambda model, x: x * (1 + (x > 5)[(x[:, 0] > 1e9).long()].float())
    ),
    "positions": on_layer(
        lambda model, x: x + limit(x)[torch.arange(len(x)).view(2, -1).t().flatten()]
    ),
    "values among others": on_layer(
        lambda model, x: (
            x
            * torch.isin((x[:, :8] / 5).long(), (x[:, 8:16] / 5).long() + 1)
            .float()
            .mean(1, keepdim=True)
            .add(1)
        )
    ),
    "a norm of samples": on_layer(lambda model, x: x + torch.renorm(x.detach(), 2, 1, 30.0)),
}


@pytest.fixture(scope="module")
def late_uses():
    def compare_all():
        found = {}
        for name, term in TERMS.items():
            late = LateBatches(term)
            width = 20 if name in UNALIGNED else 32
            found[name] = compare(partial(WithFeatures, width), loss=late, batches=late)
        make = JOINED["linear layers"]
        found["a size"] = compare(make, loss=ignore_as_many, batches=LateBatches())
        for name, (make, loss) in OUTPUTS.items():
            found[name] = compare(make, loss=loss, batches=LateBatches())
        for name, make in LATE_MODELS.items():
            for mode, loss in {"": OF_CLASSES, ", one by one": with_item}.items():
                found[name + mode] = compare(make, loss=loss, batches=LateBatches())
        return found

    return on_portable_ranks(compare_all)[0]


@pytest.mark.parametrize(
    "name",
    [*TERMS, "a size", *OUTPUTS, *LATE_MODELS, *(f"{name}, one by one" for name in LATE_MODELS)],
)
def test_what_has_no_effect_in_the_steps_that_compare_has_the_same_bits_later(name, late_uses):
    is_same, _, note = late_uses[name]
    assert is_same, note
    assert "the bits of earlier steps" not in note


def of_marked(outputs, targets):
    """Return the loss of some samples: none of the last micro-batch."""
    marks = targets > 0
    return F.cross_entropy(outputs[marks], targets[marks], reduction="sum") + 0 * outputs.sum()


def test_a_micro_batch_may_have_no_marked_sample():
    inputs, targets = data()
    targets = targets.clamp(min=1)
    targets[-2:] = 0

    def compare_marked():
        make = JOINED["linear layers"]
        return compare(make, loss=of_marked, batches=[(inputs, targets)] * STEPS)

    assert on_portable_ranks(compare_marked)[0] == (True, 8, "")


@pytest.fixture(scope="module")
def losses():
    """What passes do with every loss, and whether they have computed all losses together."""
    kinds = []

    def attempt(self, *arguments):
        kinds.append(self.joins_losses)
        return original(self, *arguments)

    def compare_loss(loss, batches, **options):
        kinds.clear()
        found = compare(JOINED["linear layers"], loss=loss, batches=batches, **options)
        return found, {*kinds}

    original = pass_trial.JoinedPass.attempt

    def compare_all():
        with mock.patch.object(pass_trial.JoinedPass, "attempt", attempt):
            found = {
                name: compare_loss(loss, [make()] * STEPS)
                for name, (loss, make) in JOINED_LOSSES.items()
            }
            for name, loss in SEPARATE_LOSSES.items():
                found[name] = compare_loss(loss, [rates()] * STEPS)
            for name, reduce in {"returned": torch.mean, "refused": lambda x: x.max()}.items():
                make = partial(WithLoss, reduce)
                kinds.clear()
                result = compare(make, loss=None, metrics={"right": count_right})
                found[name] = result, {*kinds}
            for first in (4, 5):
                growing = Growing(first)
                found[first] = compare_loss(growing, growing)
            for name, (loss, make) in JOINED_LOSSES.items():
                batches = Weighing(make)
                found[f"{name}, weighed"] = compare_loss(loss, batches, loss_weight=batches.weigh)
            return found

    return on_portable_ranks(compare_all)[0]


@pytest.mark.parametrize("name", JOINED_LOSSES)
def test_the_losses_of_all_micro_batches_are_computed_together(name, losses):
    assert losses[name] == ((True, 8 * (STEPS - 3), ""), {True})


@pytest.mark.parametrize("name", JOINED_LOSSES)
def test_the_weights_of_micro_batches_may_differ_later(name, losses):
    assert losses[f"{name}, weighed"] == ((True, 8 * 2, ""), {True})


@pytest.mark.parametrize("name", SEPARATE_LOSSES)
def test_a_loss_that_depends_on_the_number_of_samples_is_computed_for_each(name, losses):
    assert losses[name] == ((True, 8 * (STEPS - 3), ""), {False})


def test_a_model_may_return_its_loss(losses):
    assert losses["returned"] == ((True, 8 * (STEPS - 3), ""), {True})
    assert losses["refused"] == ((True, 0, "aten::max combines samples"), set())


def test_a_loss_that_changes_is_computed_for_each_from_then_on(losses):
    # Step 5 compares all bits, and plans another pass.
    assert losses[4] == ((True, 8 * 3, ""), {True, False})  # in the steps 3, 6 and 7
    assert losses[5] == ((True, 8 * 4, ""), {True, False})  # and 4


@pytest.mark.parametrize("several", [3, pytest.param(2, marks=pytest.mark.stress)])
def test_several_threads_have_the_bits_of_one(several):
    names = ["GELU", "convolutions", "attention", "RMS norm", "dropout in blocks"]

    def train_all():
        batches = [data(1024)] * STEPS  # of several pieces, so that threads divide tensors
        found = {}
        for threads in (1, several):
            torch.set_num_threads(threads)
            for name in names:
                torch.manual_seed(0)
                is_joined = threads > 1
                found[name, threads] = train(JOINED[name](), batches, is_joined=is_joined)
        return found

    found = on_portable_ranks(train_all)[0]
    for name, threads in found:
        digest, state, count, note = found[name, threads]
        assert (digest, state, note) == (*found[name, 1][:2], ""), (name, threads)
        assert count == (8 * (STEPS - 3) if threads > 1 else 0), (name, threads)


def test_gradients_that_are_changed_keep_no_more_memory_than_they_may(late):
    tied, mean = late["limited parts"]
    refusal = "the gradients of parameters that are used twice take too much memory"
    assert tied == (True, 0, refusal)
    assert mean == (True, 8 * (STEPS - 3), "")


class Always:
    """A schedule by which passes are compared in the first step only."""

    def is_audited(self, step):
        return step == 0


def train_at_random(seeds):
    """Return the seeds whose trainings differ with and without passes, and the passes."""
    from grammar import Leg, case, training
    from grammar.layouts import Layout

    warnings.simplefilter("ignore")
    different = []
    passes = 0

    def compute(self, step, buffers, group):
        nonlocal passes
        results = original(self, step, buffers, group)
        passes += results is not None
        return results

    def repeat(*arguments):
        for batch in batches(*arguments):
            yield from [batch] * 3  # most cases have few steps

    original = OnePass.compute
    batches = training._batches
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            drawn = case(seed)
            leg = Leg(Layout(), 0, drawn.data.steps)
            with (
                mock.patch.object(ls, "AuditConfig", return_value=False),
                mock.patch.object(one_pass, "SCHEDULE", Always()),
                mock.patch.object(OnePass, "compute", compute),
                mock.patch.object(training, "_batches", repeat),
            ):
                joined = describe_outcome(training, drawn, leg, folder)
                with mock.patch.object(model_setup, "can_join", return_value=False):
                    separate = describe_outcome(training, drawn, leg, folder)
            if joined != separate:
                different.append((seed, joined, separate))
    return different, passes


def describe_outcome(training, drawn, leg, folder):
    try:
        return training.outcome_of(drawn, leg, Path(folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("first", "last"),
    [(4, 6), pytest.param(0, 60, marks=[pytest.mark.stress, pytest.mark.timeout(600)])],
)
def test_random_trainings_have_the_bits_of_separate_passes(first, last):
    different, passes = on_portable_ranks(lambda: train_at_random(range(first, last)))[0]
    assert different == []
    assert passes > 0


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.stress), 3])
def test_ranks_have_the_bits_of_one(ranks):
    def digests():
        torch.manual_seed(0)
        model = dropping_attention()
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        return train(model, [data(), data(19)] * 4, is_joined=True, loss=loss)

    (alone,) = on_portable_ranks(digests)
    together = on_portable_ranks(digests, ranks)
    assert [found[:2] for found in together] == [alone[:2]] * ranks
    assert alone[2] > 0
    assert all(found[2] > 0 for found in together)


def test_why_micro_batches_are_computed_separately_is_recorded_once(tmp_path):
    def record():
        trainer = ls.Trainer(
            SEPARATE["a mean"][0](),
            nn.CrossEntropyLoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            microbatches=8,
            loggers=[tmp_path / "run"],
        )
        for _ in range(3):
            trainer.step(data())
        trainer.finish()

    on_portable_ranks(record)
    lines = map(json.loads, (tmp_path / "run" / "record.jsonl").read_text().splitlines())
    (note,) = [line for line in lines if line["kind"] == "one_pass"]
    assert (note["step"], note["message"]) == (0, "aten::mean combines samples")
