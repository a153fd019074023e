"""Portable bits on any number of intra-op threads: operators that torch divides among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.comm import backend
from lockstep.portable.products import use_portable_products

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

THREADS = (2, 3, 8)

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    threads = torch.get_num_threads()
    use_portable_products()
    yield
    use_portable_products()
    torch.set_num_threads(threads)


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def read(results: Any) -> list[tuple[Any, ...]]:
    """Return the bits, the types and the strides of tensors."""
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    return [
        (
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            tensor.dtype,
            tensor.stride(),
        )
        for tensor in tensors
    ]


def find_differing(compute: Callable[[], Any]) -> list[int]:
    """Return the numbers of threads with which a function has other bits than with one."""
    torch.set_num_threads(1)
    expected = read(compute())
    assert expected
    differing = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        if read(compute()) != expected:
            differing.append(threads)
        assert torch.get_num_threads() == threads
    return differing


ELEMENTWISE: dict[str, Callable[[Tensor], Any]] = {
    "sigmoid": torch.sigmoid,
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "elu": F.elu,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "acos": lambda x: x.clamp(-1, 1).acos(),
    "pow": lambda x: x.abs() ** 1.3,
    "scaled sum": lambda x: x.add(x.flip(0), alpha=0.3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_do_not_depend_on_threads(name, dtype):
    x = make(131, 517, dtype=dtype).requires_grad_()

    def compute():
        result = ELEMENTWISE[name](x)
        return result, torch.autograd.grad(result, x, torch.ones_like(result))

    assert not find_differing(compute)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_of_an_elementwise_function_do_not_depend_on_threads(dtype):
    x = make(131, 517, dtype=dtype)
    images = make(3, 5, 61, 67, dtype=dtype).contiguous(memory_format=torch.channels_last)
    forms = [x, x.T, x[:, ::2], x[:, 1:500], x[::2], x[:1].expand(131, 517), images, x[:0]]
    for form in forms:
        assert not find_differing(lambda form=form: torch.sigmoid(form))
        assert not find_differing(lambda form=form: F.silu(form.clone(), inplace=True))
        assert not find_differing(lambda form=form: F.gelu(form))
        outs = (torch.empty_like(form), torch.empty(form.shape, dtype=dtype), x.new_empty(0))
        for out in outs[: 3 if form.numel() else 2]:
            fresh = torch.empty_like if out.numel() else torch.clone
            assert not find_differing(
                lambda form=form, out=out, fresh=fresh: torch.sigmoid(form, out=fresh(out))
            )
    assert not find_differing(lambda: torch.sub(x, x[0], alpha=0.7))
    assert not find_differing(lambda: torch.add(x, x[:, :1], alpha=0.7))
    assert not find_differing(lambda: torch.arange(70001).sigmoid())


def test_special_values_are_those_of_torch():
    x = make(70001)
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38]
    x[: len(special)] = torch.tensor(special)
    x[-len(special) :] = torch.tensor(special)
    x[32768 : 32768 + len(special)] = torch.tensor(special)

    def compute():
        return [function(x) for function in (torch.log1p, F.softplus, F.elu)]

    assert not find_differing(compute)
    ours = read(compute())
    torch.set_num_threads(1)
    use_portable_products(False)
    assert read(compute()) == ours


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "mish"])
def test_functions_are_accurate_in_each_piece(name):
    torch.set_num_threads(3)
    function = getattr(torch, name, None) or getattr(F, name)
    x = make(70001)
    torch.testing.assert_close(function(x), function(x.double()).float(), rtol=1e-5, atol=1e-6)


REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "mean of dims": lambda x: x.mean((0, 1), keepdim=True),
    "sum of rows": lambda x: x.sum(1),
    "sum of columns": lambda x: x.sum(0),
    "sum to one dtype": lambda x: x.sum(dtype=torch.float64),
    "var": torch.var,
    "std": lambda x: torch.std_mean(x, (0, 1)),
    "norm": torch.norm,
    "vector norm": torch.linalg.vector_norm,
    "dot": lambda x: x.flatten() @ x.flatten().flip(0),
    "prod": lambda x: (1 + x * 1e-4).prod(),
    "mse": lambda x: F.mse_loss(x, x.flip(0)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)) % x.size(1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_do_not_depend_on_threads(name, dtype):
    for rows, columns in ((131, 517), (1, 80003), (8009, 9)):
        x = make(rows, columns, dtype=dtype).requires_grad_()

        def compute(x=x):
            result = REDUCTIONS[name](x)
            first = result[0] if isinstance(result, tuple) else result
            return result, torch.autograd.grad(first, x, torch.ones_like(first))

        assert not find_differing(compute)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_does_not_depend_on_threads(dtype):
    for shape, dims in {(131, 517): (0, 1), (4, 3, 71, 73): (1, 3), (3, 90001): (1,)}.items():
        x = make(*shape, dtype=dtype).requires_grad_()
        for dim in dims:
            for function in (F.softmax, F.log_softmax):

                def compute(function=function, x=x, dim=dim):
                    result = function(x, dim)
                    return result, torch.autograd.grad(result, x, result.detach().cos())

                assert not find_differing(compute)


LAYERS: dict[str, Callable[[], tuple[torch.nn.Module, Tensor]]] = {
    "layer norm": lambda: (torch.nn.LayerNorm(517), make(131, 517)),
    "batch norm": lambda: (torch.nn.BatchNorm2d(9), make(7, 9, 31, 37)),
    "batch norm, channels last": lambda: (
        torch.nn.BatchNorm2d(9),
        make(7, 9, 31, 37).contiguous(memory_format=torch.channels_last),
    ),
    "group norm": lambda: (torch.nn.GroupNorm(3, 9), make(7, 9, 31, 37)),
    "group norm, channels last": lambda: (
        torch.nn.GroupNorm(8, 64),
        make(1, 64, 33, 64).contiguous(memory_format=torch.channels_last),
    ),
    "LSTM": lambda: (torch.nn.LSTM(33, 47, batch_first=True), make(64, 19, 33)),
    "GRU": lambda: (torch.nn.GRU(33, 47, batch_first=True), make(64, 19, 33)),
    "conv1d": lambda: (torch.nn.Conv1d(9, 11, 3), make(32, 9, 201)),
    "conv2d": lambda: (torch.nn.Conv2d(9, 11, 3), make(7, 9, 31, 37)),
    "depthwise": lambda: (torch.nn.Conv2d(9, 9, 3, groups=9), make(7, 9, 31, 37)),
    "conv3d": lambda: (torch.nn.Conv3d(3, 5, 3), make(4, 3, 13, 17, 19)),
    "transposed": lambda: (torch.nn.ConvTranspose2d(9, 11, 3), make(7, 9, 31, 37)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_do_not_depend_on_threads(name, dtype):
    def compute():
        torch.manual_seed(0)
        layer, x = LAYERS[name]()
        layer.to(dtype)
        x = x.to(dtype).requires_grad_()
        result = layer(x)
        first = result[0] if isinstance(result, tuple) else result
        weights = [*layer.parameters(), x]
        return result, torch.autograd.grad(first, weights, first.detach().cos())

    assert not find_differing(compute)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_one_head_does_not_depend_on_threads(dtype):
    parts = [make(1, 1, 512, 64, dtype=dtype, seed=seed).requires_grad_() for seed in range(3)]

    def compute():
        result = F.scaled_dot_product_attention(*parts)
        return result, torch.autograd.grad(result, parts, torch.ones_like(result))

    assert not find_differing(compute)


COMPLEX: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda x: x * x.flip(0),
    "product in place": lambda x: x.clone().mul_(x.flip(0)),
    "quotient": lambda x: x / (x.flip(0) + 3),
    "sign": torch.sgn,
    "angle": torch.angle,
    "absolute value": torch.abs,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_do_not_depend_on_threads(name):
    x = torch.complex(make(131, 517), make(131, 517, seed=1)).requires_grad_()

    def compute():
        result = COMPLEX[name](x)
        return result, torch.autograd.grad(result, x, torch.ones_like(result))

    assert not find_differing(
        lambda: [
            torch.view_as_real(one) if one.is_complex() else one for one in tree_leaves(compute())
        ]
    )


def test_gradients_of_gradients_and_autocast_do_not_depend_on_threads():
    x = make(131, 517).requires_grad_()

    def compute():
        with torch.autocast("cpu", torch.bfloat16):
            product = F.silu(x @ make(517, 67)).softmax(-1)
        (first,) = torch.autograd.grad(product.float().square().mean(), x, create_graph=True)
        return product, first, torch.autograd.grad(F.softplus(first).sum(), x)

    assert not find_differing(compute)


def test_errors_are_those_of_torch():
    torch.set_num_threads(2)
    whole = torch.arange(70001)
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        whole.sigmoid_()
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.ones(1).expand(70001).sigmoid_()
    memory = make(80001)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.sigmoid(memory[:70001], out=memory[10:70011])
    weight = make(70001).requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight.sigmoid_()
    with torch.no_grad():
        weight.sigmoid_()
    assert torch.equal(weight.detach(), make(70001).sigmoid())
    assert weight.grad_fn is None
    with torch.inference_mode():
        assert torch.equal(make(70001).sigmoid(), weight.detach())


def test_kernels_of_torch_are_restored():
    """Otherwise the pieces are not needed."""
    use_portable_products(False)
    x = make(131, 517)
    assert find_differing(lambda: [torch.sigmoid(x), F.softplus(x), x.sum(), F.softmax(x, 0)])
    use_portable_products()
    assert not find_differing(lambda: [torch.sigmoid(x), F.softplus(x), x.sum(), F.softmax(x, 0)])


LOSSES = {
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "soft_margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "poisson": lambda x, y: F.poisson_nll_loss(x, y.abs()),
    "kl_div": lambda x, y: F.kl_div(x, y.abs()),
    "gaussian": lambda x, y: F.gaussian_nll_loss(x, y, torch.ones_like(x)),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_divides_by_all_elements(name):
    """A gradient in pieces divided by the elements of its piece would be too large."""
    inputs = make(100_003)
    targets = make(100_003, seed=1)

    def compute(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        given = inputs.to(dtype).requires_grad_()
        loss = LOSSES[name](given, targets.to(dtype))
        return loss.detach(), torch.autograd.grad(loss, given)[0]

    assert find_differing(compute) == []
    torch.set_num_threads(3)
    for found, right in zip(compute(), compute(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [35, 36, 39, 40, 68, 80, 100])
def test_a_last_part_of_few_columns_is_added_as_in_the_whole(columns, dtype):
    """torch gives the last thread what is left after multiples of 128 bytes."""
    rows = 40_000 // columns
    layers = make(4, rows, columns, dtype=dtype)
    forms = [(layers[0], 0), (layers, (0, 1)), (layers, 1), (layers[..., None], (0, 1, 3))]
    forms += [(layers[0].T, 1), (layers[:1, :, :1].expand(4, rows, columns), 1)]
    for x, dim in forms:
        for reduce in (torch.sum, torch.mean, torch.nansum):
            for threads in (8, 16):
                torch.set_num_threads(1)
                expected = read(reduce(x, dim))
                torch.set_num_threads(threads)
                assert read(reduce(x, dim)) == expected, (x.shape, dim, threads)


@pytest.mark.parametrize("shape", [(3, 32), (300, 7), (40, 5, 1, 1)])
def test_batch_norm_of_one_number_per_channel_does_not_depend_on_threads(shape):
    x = make(*shape).requires_grad_()
    weight = make(shape[1], seed=1)

    def compute():
        result = F.batch_norm(x, None, None, weight, weight, training=True)
        return result, torch.autograd.grad(result, x, make(*shape, seed=2))

    assert not find_differing(compute)


def test_rows_of_one_number_are_divided():
    x = make(70_001, 1).requires_grad_()

    def compute():
        result = F.log_softmax(x, 1)
        return result, torch.autograd.grad(result, x, torch.ones_like(result))

    assert not find_differing(compute)


def test_grouped_convolutions_do_not_depend_on_threads():
    x = make(4, 6, 5, seed=1).requires_grad_()
    weight = make(6, 2, 3, 2, seed=2)
    assert not find_differing(lambda: F.conv2d(x, weight, groups=2))
    assert not find_differing(lambda: F.softshrink(make(67, 1031)[:, 1:1000]))
