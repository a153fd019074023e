"""Elementwise functions in float32: accuracy, special values, forms, and bits by position."""

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from lockstep.portable.products import use_portable_products

FUNCTIONS = {
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
}
GRADIENTS = {
    "tanh": lambda g, x: torch.ops.aten.tanh_backward(g, x.tanh()),
    "sigmoid": lambda g, x: torch.ops.aten.sigmoid_backward(g, x.sigmoid()),
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu tanh": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
}
IN_PLACE = ("exp", "log", "tanh", "erf", "sigmoid")
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e38, -3e38, 88.73, -103]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def functions():
    threads = torch.get_num_threads()
    use_portable_products()
    yield
    use_portable_products()
    torch.set_num_threads(threads)


def make(count):
    """Return numbers of all sizes and signs, the smallest and the largest among them."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.empty(count).uniform_(-40, 7, generator=generator).exp2()
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return sizes * signs


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_in_double(name):
    x = make(100_003)
    expected = FUNCTIONS[name](x.double())
    error = (FUNCTIONS[name](x) - expected).abs()
    # GELU of a large negative number is its product with what is left of 1.
    scale = x.abs() if name.startswith("gelu") else expected.abs().clamp_min(1e-36)
    is_large = expected.abs() > torch.finfo(torch.float32).max
    assert bool((error <= 3 * EPS * scale)[~(is_large | expected.isnan())].all())
    assert torch.equal(FUNCTIONS[name](x)[is_large], expected[is_large].float())
    assert torch.equal(FUNCTIONS[name](x).isnan(), expected.isnan())


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_in_double(name):
    x = make(100_003)
    gradient = make(100_019)[: len(x)].clamp(-3, 3)
    expected = GRADIENTS[name](gradient.double(), x.double())
    error = (GRADIENTS[name](gradient, x) - expected).abs()
    # They contain x (1 - s), where s is near 1.
    assert bool((error <= 4 * EPS * gradient.abs() * (1 + x.abs())).all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_are_those_of_torch(name):
    x = torch.tensor(SPECIAL)
    ours = FUNCTIONS[name](x)
    use_portable_products(False)
    torchs = FUNCTIONS[name](x)
    torch.testing.assert_close(ours, torchs, rtol=2e-6, atol=1e-37, equal_nan=True)
    zeros = (x == 0) & (name != "gelu")  # oneDNN's has no sign
    assert torch.equal(ours[zeros].signbit(), torchs[zeros].signbit())


@pytest.mark.parametrize("name", [*FUNCTIONS, *(f"{name} gradient" for name in GRADIENTS)])
def test_bits_depend_neither_on_the_place_nor_on_the_layout_nor_on_threads(name):
    if name in FUNCTIONS:
        function = FUNCTIONS[name]
    else:
        gradients = GRADIENTS[name.removesuffix(" gradient")]

        def function(x):
            return gradients(x.flip(0), x)

    torch.set_num_threads(1)
    x = make(70_000).abs().view(70, 50, 20)
    expected = function(x)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(function(x), expected)
    layouts = [(0, 2, 1), (1, 0, 2), (2, 1, 0)]
    for order in layouts if name in FUNCTIONS else layouts[:1]:
        crossed = function(x.permute(order))
        assert torch.equal(crossed, expected.permute(order))
        assert name not in FUNCTIONS or crossed.stride() == x.permute(order).stride()
    assert torch.equal(function(x[:, 1::2, ::3]), expected[:, 1::2, ::3])
    if name in FUNCTIONS:
        for begin, end in itertools.product((0, 1, 7), (8, 9, 23, 40)):
            part = x.flatten()[begin:end]
            assert torch.equal(function(part), expected.flatten()[begin:end])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_have_the_form_that_torch_gives_them(name):
    given = [
        make(120).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        make(48).view(8, 6).T[:, ::2],
        make(3)[:, None].expand(3, 4),
        torch.tensor(0.3),
        torch.empty(0, 3),
        make(9).double(),
        make(9).bfloat16(),
    ]

    def compute():
        return [FUNCTIONS[name](x) for x in given]

    ours = compute()
    use_portable_products(False)
    for one, expected in zip(ours, compute(), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        assert torch.allclose(one, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", IN_PLACE)
def test_all_forms_have_the_same_bits(name):
    x = make(1009)
    expected = FUNCTIONS[name](x).nan_to_num()

    def check(result):
        assert torch.equal(result.nan_to_num(), expected)

    check(getattr(x.clone(), f"{name}_")())
    check(FUNCTIONS[name](x, out=torch.empty(1009)))
    check(FUNCTIONS[name](x, out=torch.empty(2018)[::2]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An output with one or more elements was re")
        check(FUNCTIONS[name](x, out=torch.empty(3)))
    check(torch.func.vmap(FUNCTIONS[name])(x))
    wide = FUNCTIONS[name](x, out=torch.empty(0, dtype=torch.float64))
    torch.testing.assert_close(wide.float(), FUNCTIONS[name](x), equal_nan=True)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        getattr(torch.ones(1).expand(3), f"{name}_")()
    with pytest.raises(RuntimeError, match="can't be cast"):
        FUNCTIONS[name](x, out=torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_autograd(name):
    x = make(200)[make(200).abs() < 3].abs().requires_grad_()
    (gradient,) = torch.autograd.grad(FUNCTIONS[name](x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(FUNCTIONS[name](wide).sum(), wide, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(second.double(), expected_second, rtol=2e-5, atol=2e-5)
