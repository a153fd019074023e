"""Small computations by family of operators, whose bits are the fingerprint of a processor.

Their inputs are made from integers. Nothing here draws from torch's default generators, and nothing
runs autograd: a fork of this process could not use autograd after that.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy
import torch

__all__ = ["FAMILIES", "FLOATS", "FUNCTIONS", "ComputedTensors", "make_values"]

aten = torch.ops.aten
ComputedTensors = Iterator[torch.Tensor]

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p",
    "log2", "sigmoid", "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Elementwise functions, among them all that torch computes with MKL's vector functions."""


def make_values(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers from -2 to 2, computed from integers: the same bits on every processor."""
    count = functools.reduce(lambda a, b: a * b, shape)
    numbers = torch.arange(seed, seed + count, dtype=torch.int64, device="cpu") * 2654435761
    numbers = ((numbers & 0x7FFFFFFF) ^ (numbers >> 17 & 0x7FFF)) * 1103515245 & 0x7FFFFFFF
    floats = (numbers - (1 << 30)).to(torch.float64) / (1 << 29)
    return floats.reshape(shape).to(dtype)


# --- the families -----------------------------------------------------------------------------


def _multiply(dtype: torch.dtype) -> ComputedTensors:
    of = functools.partial(make_values, dtype=dtype)
    a = of(96, 130)
    b = of(130, 70, seed=7)
    long = of(1100, 24)
    yield a @ b
    yield a.T @ of(96, 70)
    yield of(96, 70) @ b.T
    yield long.T @ long
    yield torch.addmm(of(70), a[:5], b)
    yield a @ b[:, 0]
    yield a[0] @ a[1]
    yield of(4, 17, 33) @ of(4, 33, 9, seed=3)
    yield torch.baddbmm(of(4, 17, 17), of(4, 17, 33), of(4, 17, 33, seed=5).mT, beta=0.5, alpha=0.3)


def _convolve(dtype: torch.dtype) -> ComputedTensors:
    of = functools.partial(make_values, dtype=dtype)
    cases = [
        (of(4, 1, 28, 28), of(10, 1, 5, 5), 1, 0, 1, False),
        (of(2, 16, 10, 10), of(24, 16, 3, 3), 1, 1, 1, False),
        (of(2, 16, 10, 10), of(32, 16, 1, 1), 2, 0, 1, False),
        (of(2, 16, 7, 7), of(16, 1, 3, 3), 1, 1, 16, False),
        (of(2, 8, 5, 5), of(8, 6, 3, 3), 2, 1, 1, True),
    ]
    for x, weight, stride, padding, groups, is_transposed in cases:
        channels = weight.shape[1 if is_transposed else 0]
        settings = ([stride] * 2, [padding] * 2, [1, 1], is_transposed, [0, 0], groups)
        y = aten.convolution(x, weight, of(channels), *settings)
        yield y
        yield from aten.convolution_backward(
            of(*y.shape, seed=9), x, weight, [channels], *settings, [True] * 3
        )


def _attend(dtype: torch.dtype) -> ComputedTensors:
    for tokens, is_causal in itertools.product((20, 140), (False, True)):
        q, k, v = (make_values(2, 2, tokens, 16, seed=seed, dtype=dtype) for seed in (1, 2, 3))
        y, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
        yield y
        yield from aten._scaled_dot_product_flash_attention_for_cpu_backward(
            v, q, k, v, y, log_sums, 0.0, is_causal
        )


def _recur(dtype: torch.dtype) -> ComputedTensors:
    if dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return  # composed of the operators of other families
    steps = 5
    rows = 3
    size = 7
    hidden = 19
    x = make_values(steps, rows, size)
    weights = [make_values(4 * hidden, n, seed=n) for n in (size, hidden)]
    biases = [make_values(4 * hidden, seed=n) for n in (2, 4)]
    states = [make_values(rows, hidden, seed=n) for n in (3, 5)]
    gradient = make_values(steps, rows, hidden, seed=9)
    given = (x, *weights, *biases, *states)
    settings = (2, hidden, 1, True)  # an LSTM of one layer, with biases
    for is_reverse in (False, True):
        with torch.enable_grad():  # of tensors without gradients: it keeps what backward reads
            y, *others, kept = aten.mkldnn_rnn_layer(
                *given, is_reverse, [], *settings, False, False, True
            )
        yield y
        of_results = (gradient, *states)
        yield from aten.mkldnn_rnn_layer_backward(
            *given, y, *others, *of_results, is_reverse, *settings, True, False, [], False, kept
        )


def _normalize_exponentials(dtype: torch.dtype) -> ComputedTensors:
    x = make_values(16, 201, dtype=dtype)
    gradient = make_values(16, 201, seed=5, dtype=dtype)
    for dim in (0, 1):
        y = torch.softmax(x, dim)
        yield y
        yield aten._softmax_backward_data(gradient, y, dim, dtype)
        y = torch.log_softmax(x, dim)
        yield y
        yield aten._log_softmax_backward_data(gradient, y, dim, dtype)


def _apply_functions(dtype: torch.dtype, count: int = 512) -> ComputedTensors:
    x = make_values(count, dtype=dtype)
    gradient = make_values(count, seed=5, dtype=dtype)
    inside = (x / 4 + 0.5).clamp(0.01, 0.99)  # of the domain of every function
    for name in FUNCTIONS:
        yield getattr(torch, name)(inside)
    yield torch.exp(x * 20)
    yield inside.pow(0.5)
    yield inside.pow(2.5)
    yield torch.rsqrt(inside)
    yield x.lerp(gradient, 0.3)
    yield torch.addcdiv(x, gradient, inside, value=0.1)
    yield torch.addcmul(x, gradient, inside, value=0.1)
    yield aten.tanh_backward(gradient, torch.tanh(x))
    yield aten.sigmoid_backward(gradient, torch.sigmoid(x))
    yield aten.silu(x)
    yield aten.silu_backward(gradient, x)
    for approximation in ("none", "tanh"):
        yield aten.gelu(x, approximate=approximation)
        yield aten.gelu_backward(gradient, x, approximate=approximation)


def _normalize(dtype: torch.dtype) -> ComputedTensors:
    x = make_values(6, 12, 35, dtype=dtype)
    gradient = make_values(6, 12, 35, seed=5, dtype=dtype)
    weight = make_values(12, dtype=dtype)
    bias = make_values(12, seed=3, dtype=dtype)
    batch = aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    yield from batch
    yield from aten.native_batch_norm_backward(
        gradient, x, weight, None, None, *batch[1:], True, 1e-5, [True] * 3
    )
    groups = aten.native_group_norm(x, weight, bias, 6, 12, 35, 3, 1e-5)
    yield from groups
    yield from aten.native_group_norm_backward(
        gradient, x, *groups[1:], weight, 6, 12, 35, 3, [True] * 3
    )
    rows = x.reshape(210, 12)
    of_rows = gradient.reshape(210, 12)
    layers = aten.native_layer_norm(rows, [12], weight, bias, 1e-5)
    yield from layers
    yield from aten.native_layer_norm_backward(
        of_rows, rows, [12], *layers[1:], weight, bias, [True] * 3
    )


def _reduce(dtype: torch.dtype) -> ComputedTensors:
    x = make_values(17, 528, dtype=dtype)
    for dim in (None, 0, 1):
        yield torch.sum(x, dim)
        yield torch.mean(x, dim)
        yield torch.var(x, dim)
        yield torch.linalg.vector_norm(x, dim=dim)
    yield torch.cumsum(x, 1)
    yield torch.prod(x[:, :9], 1)
    yield aten.avg_pool2d(x[:, :512].reshape(17, 2, 16, 16), [3, 3])


def _draw(dtype: torch.dtype) -> ComputedTensors:
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.empty(104, dtype=dtype, device="cpu")
    yield x.uniform_(generator=generator).clone()
    yield x.bernoulli_(0.3, generator=generator).clone()
    yield torch.randperm(31, generator=generator, device="cpu")
    if dtype is torch.float32:  # for others and for few numbers, functions of the C library
        yield x.normal_(generator=generator)


def _call_c_library(dtype: torch.dtype) -> ComputedTensors:
    """Yield results of code without vector instructions, such as that for the last elements."""
    yield from _apply_functions(dtype, count=3)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.empty(7, dtype=dtype, device="cpu")
    yield x.normal_(generator=generator).clone()
    yield x.exponential_(generator=generator)


def _use_numpy(dtype: torch.dtype) -> ComputedTensors:
    if dtype is not torch.bfloat16:  # which numpy does not have
        x = make_values(1003, dtype=dtype).numpy()
        for function in (numpy.exp, numpy.sin, numpy.tanh, numpy.sum, numpy.linalg.norm):
            yield torch.as_tensor(function(x))
        yield torch.as_tensor(x @ x)


FAMILIES: dict[str, Callable[[torch.dtype], ComputedTensors]] = {
    "matrix products": _multiply,
    "convolutions": _convolve,
    "attention": _attend,
    "LSTM layers": _recur,
    "softmax": _normalize_exponentials,
    "elementwise functions": _apply_functions,
    "normalization": _normalize,
    "reductions": _reduce,
    "random numbers": _draw,
    "functions of the C library": _call_c_library,
    "numpy": _use_numpy,
}
"""The families of operators in the order of a fingerprint, by the name that messages use."""
