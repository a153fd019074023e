"""Products and convolutions whose bits depend on the operands only, against fused additions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm import backend, native_module
from lockstep.comm.native.binding import BindingError
from lockstep.errors import UsageError
from lockstep.portable.products import use_portable_products

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

KERNELS = ["plain", "avx2", "avx512"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def use(kernels: str) -> None:
    try:
        native_module.load_native().use_portable_kernels(True, kernels)
    except ValueError:
        pytest.skip(f"this processor has no {kernels}")


def find_kernels() -> list[str]:
    """Return the names of the kernels that this processor has."""
    found = []
    for name in KERNELS:
        try:
            native_module.load_native().use_portable_kernels(True, name)
            found.append(name)
        except ValueError:
            pass
    use_portable_products()
    return found


@pytest.fixture(scope="module")
def kernel_names() -> list[str]:
    return find_kernels()


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    threads = torch.get_num_threads()
    native_module.load_native().use_portable_kernels(True)
    yield
    use_portable_products()
    torch.set_num_threads(threads)


# ---- the reference: a chain of fused multiply-adds, from numpy's rounded operations ----


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two halves with half of the bits, whose sum is x (Veltkamp)."""
    scaled = x * x.dtype.type(2**12 + 1 if x.dtype == np.float32 else 2**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def add_exactly(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded sum and its error (Knuth)."""
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def multiply_exactly(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded product and its error (Dekker)."""
    product = a * b
    (a1, a0) = split(a)
    (b1, b0) = split(b)
    return product, ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0


def add_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a + b; an inexact sum is the neighbor whose last bit is 1."""
    total, error = add_exactly(a, b)
    integers = total.view(np.int32 if total.dtype == np.float32 else np.int64)
    neighbors = np.nextafter(total, np.copysign(np.inf, error).astype(total.dtype))
    return np.where((error != 0) & (integers % 2 == 0), neighbors, total)


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c, rounded once (Boldo and Melquiond)."""
    product, error = multiply_exactly(a, b)
    high, low = add_exactly(c, error)
    total, rest = add_exactly(product, high)
    return total + add_to_odd(rest, low)


def multiply_in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sums of a @ b; of bfloat16 in float32."""
    wide = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
    x = a.to(wide).numpy()
    y = b.to(wide).numpy()
    total = np.zeros((*x.shape[:-1], y.shape[-1]), dtype=x.dtype)
    for p in range(x.shape[-1]):
        total = fused_multiply_add(*np.broadcast_arrays(x[..., p, None], y[..., None, p, :], total))
    return torch.from_numpy(total)


def expect(a, b, c=None, alpha=1.0, beta=0.0):
    """Return alpha * (a @ b) + beta * c by the definition in gemm.h."""
    total = multiply_in_order(a, b)
    if (alpha, beta) != (1, 0):
        total = total * alpha
    if beta != 0:
        total = total + c.to(total.dtype) * beta
    return total.to(a.dtype)


def draw(generator, sizes, dtype, layout="row"):
    """Return normal numbers, in one of several layouts."""
    if layout == "column":
        return draw(generator, [*sizes[:-2], sizes[-1], sizes[-2]], dtype).mT
    if layout == "every third":
        return draw(generator, [*sizes[:-1], 3 * sizes[-1]], dtype)[..., 1::3]
    if layout == "wide rows":
        return draw(generator, [*sizes[:-1], sizes[-1] + 5], dtype)[..., 2:-3]
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)


LAYOUTS = ["row", "column", "every third", "wide rows"]
LENGTH = st.integers(1, 20) | st.sampled_from([31, 32, 33, 47])
layout = st.sampled_from(LAYOUTS)


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[result.element_size()]
    same = result.contiguous().view(integers) == expected.contiguous().view(integers)
    assert same.all(), (~same).nonzero()[0].tolist()


@pytest.mark.hypothesis
@given(
    m=LENGTH, n=LENGTH, k=LENGTH, seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(layout, layout, layout, layout),
    factors=st.sampled_from([(1, 0), (1, 1), (0.3, 0), (0.3, -1.7), (-2, 1)]),
)  # fmt: skip
def test_products_add_in_order(kernel_names, m, n, k, seed, dtype, layouts, factors):
    generator = torch.Generator().manual_seed(seed)
    a, b, c, out = (
        draw(generator, sizes, dtype, layout)
        for sizes, layout in zip(((m, k), (k, n), (m, n), (m, n)), layouts, strict=True)
    )
    alpha, beta = factors
    expected = expect(a, b, c, alpha, beta)
    for kernels in kernel_names:
        use(kernels)
        result = torch.addmm(c, a, b, alpha=alpha, beta=beta, out=out)
        assert result.data_ptr() == out.data_ptr()
        assert_same(out, expected)


def test_long_sums_continue(kernel_names):
    # More products than one part of k holds, more rows and columns than a packed part.
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        a = draw(generator, (180, 700), dtype)
        b = draw(generator, (700, 37), dtype)
        expected = expect(a, b)
        for kernels in kernel_names:
            use(kernels)
            assert_same(a @ b, expected)
            assert_same((b.T.contiguous() @ a.T).T, expected)


def test_torch_adds_in_another_order():
    # Otherwise no test shows that the kernels of torch were replaced.
    generator = torch.Generator().manual_seed(0)
    a, b = (draw(generator, sizes, torch.float32) for sizes in ((20, 3000), (3000, 20)))
    expected = expect(a, b)
    assert_same(a @ b, expected)
    use_portable_products(False)
    assert not torch.equal(a @ b, expected)
    use_portable_products()
    assert_same(a @ b, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_forms_of_the_operators(dtype):
    generator = torch.Generator().manual_seed(1)
    long = 1500  # torch's kernels add this many products in another order

    def new(*sizes):
        return draw(generator, sizes, dtype)

    a = new(5, long)
    b = new(long, 7)
    c = new(5, 7)
    x = new(long)
    y = new(5)
    as_ = new(3, 5, long)
    bs = new(3, long, 7)
    cs = new(3, 5, 7)
    product = expect(a, b)
    products = expect(as_, bs)
    added = expect(a, b, c, alpha=0.5, beta=3.0)
    all_added = expect(as_, bs, cs, alpha=0.5, beta=3.0)
    vector = expect(a, x[:, None]).squeeze(1)
    vector_added = expect(a, x[:, None], y[:, None], alpha=0.5, beta=3.0).squeeze(1)
    bias = new(7)
    factors = {"alpha": 0.5, "beta": 3.0}
    for result, expected in [
        (torch.mm(a, b), product),
        (torch.mm(a, b, out=new(5, 7)), product),
        (torch.mm(a, b, out=new(0)), product),
        (torch.addmm(c, a, b, **factors), added),
        (torch.addmm(c, a, b, **factors, out=new(5, 7)), added),
        (c.clone().addmm_(a, b, **factors), added),
        (torch.bmm(as_, bs), products),
        (torch.bmm(as_, bs, out=new(3, 5, 7)), products),
        (torch.baddbmm(cs, as_, bs, **factors), all_added),
        (torch.baddbmm(cs, as_, bs, **factors, out=new(3, 5, 7)), all_added),
        (cs.clone().baddbmm_(as_, bs, **factors), all_added),
        (torch.mv(a, x), vector),
        (torch.mv(a, x, out=new(5)), vector),
        (torch.addmv(y, a, x, **factors), vector_added),
        (torch.addmv(y, a, x, **factors, out=new(5)), vector_added),
        (y.clone().addmv_(a, x, **factors), vector_added),
        (a @ x, vector),
        (x @ a.T, vector),
        (as_ @ b, expect(as_, b)),
        (torch.einsum("bik,bkj->bij", as_, bs), products),
        (torch.nn.functional.linear(a, b.T), product),
        (torch.nn.functional.linear(a, b.T, bias), expect(a, b, bias, 1, 1.0)),
        (torch.nn.functional.linear(as_, b.T, bias), expect(as_, b, bias, 1, 1.0)),
        (torch.tensordot(as_, b, dims=1), expect(as_, b)),
    ]:
        assert_same(result, expected)


@pytest.mark.parametrize("use_gelu", [False, True])
def test_products_of_layers_that_evaluate_are_ours(use_gelu):
    """A transformer's layer calls another operator if it needs no gradients."""
    bias = torch.randn(9)
    a = torch.randn(45, 12)
    b = torch.randn(9, 12).t()
    expected = torch.addmm(bias, a, b)
    expected = torch.nn.functional.gelu(expected) if use_gelu else expected.relu()
    assert torch.equal(torch._addmm_activation(bias, a, b, use_gelu=use_gelu), expected)
    layer = torch.nn.TransformerEncoderLayer(12, 2, 9, batch_first=True).eval()
    samples = torch.randn(9, 5, 12)
    with torch.no_grad():
        assert torch.equal(layer(samples)[2:5], layer(samples[2:5]))


def test_in_place_into_every_layout():
    generator = torch.Generator().manual_seed(2)
    a = draw(generator, (9, 40), torch.float32)
    b = draw(generator, (40, 21), torch.float32)
    for layout in LAYOUTS:
        c = draw(generator, (9, 21), torch.float32, layout)
        expected = expect(a, b, c, 1, 1.0)
        assert_same(c.addmm_(a, b), expected)


def test_result_in_the_memory_of_an_operand():
    generator = torch.Generator().manual_seed(3)
    square = draw(generator, (40, 40), torch.float32)
    b = draw(generator, (40, 40), torch.float32)
    expected = expect(square, b)
    torch.mm(square, b, out=square)
    assert_same(square, expected)
    rows = draw(generator, (41, 40), torch.float32)
    expected = expect(square, b, rows[1:], 1, 1.0)
    torch.addmm(rows[1:], square, b, out=rows[:-1])
    assert_same(rows[:-1], expected)


def test_threads_do_not_matter(kernel_names):
    generator = torch.Generator().manual_seed(4)
    cases = [((300, 500), (500, 400)), ((8, 2000), (2000, 700)), ((64, 40, 33), (64, 33, 50))]
    for dtype in DTYPES:
        for size_a, size_b in cases:
            a = draw(generator, size_a, dtype)
            b = draw(generator, size_b, dtype)
            results = []
            for kernels in kernel_names[1:] or kernel_names:
                use(kernels)
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    results.append(a @ b)
            for result in results[1:]:
                assert_same(result, results[0])


def test_nan_and_infinity():
    nan = float("nan")
    inf = float("inf")
    a = torch.tensor([[1.0, nan], [inf, 1.0], [inf, -inf], [0.0, 0.0]])
    b = torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    for dtype in DTYPES:
        x = a.to(dtype)
        y = b.to(dtype)
        expected = torch.tensor([[nan, nan], [inf, inf], [nan, nan], [0, 0]], dtype=dtype)
        assert torch.equal((x @ y).nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))
        c = torch.full((4, 2), nan, dtype=dtype)
        result = torch.addmm(c, x, y, beta=0)
        assert torch.equal(result.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))
        assert torch.addmm(c, x, y).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("beta", [0, 1, 0.5])
def test_a_product_times_zero_is_read_where_torch_reads_it(dtype, size, beta):
    """BLAS leaves it out, and torch's own loops let a NaN of an operand through."""
    if dtype is torch.bfloat16 and size == 40 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch returns memory that it has not written here")
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 2, size, size).to(dtype)
    a[:, 0, 0] = torch.nan
    b[:, 1, 1] = torch.inf
    factors = {"alpha": 0, "beta": beta}

    def compute() -> list[torch.Tensor]:
        c[0, 0] = -0.0
        results = [torch.baddbmm(c, a, b, **factors), torch.addmm(c[0], a[0], b[0], **factors)]
        results += [torch.addmm(c[0, 0], a[0], b[0], **factors), c[0].clone()]
        results += [torch.addmv(c[0, 0], a[0], b[0, 0], **factors)]
        results[-2].addmm_(a[0], b[0], **factors)
        return results

    ours = compute()
    native_module.load_native().use_portable_kernels(False)
    for one, expected in zip(ours, compute(), strict=True):
        assert torch.equal(one.isnan(), expected.isnan())
        assert torch.allclose(one.nan_to_num(), expected.nan_to_num(), rtol=1e-2, atol=1e-2)
        if dtype != torch.bfloat16:
            assert torch.equal(one.nan_to_num().signbit(), expected.nan_to_num().signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_input", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("outputs", [1, 4])
def test_convolutions_return_the_memory_formats_of_torch(dtype, of_input, of_weight, outputs):
    torch.manual_seed(0)
    images = torch.randn(2, 4, 6, 5, dtype=dtype).contiguous(memory_format=of_input)
    weight = torch.randn(outputs, 4, 3, 2, dtype=dtype).contiguous(memory_format=of_weight)
    images.requires_grad_()
    weight.requires_grad_()

    def compute() -> list[torch.Tensor]:
        # `.grad` would get the format of its parameter.
        result = torch.nn.functional.conv2d(images, weight, padding=1)
        gradients = torch.autograd.grad(result.square().sum(), [images, weight])
        return [result, *gradients]

    ours = compute()
    native_module.load_native().use_portable_kernels(False)
    for one, expected in zip(ours, compute(), strict=True):
        assert one.stride() == expected.stride()
        assert torch.allclose(one, expected, rtol=1e-4, atol=1e-4)


def test_empty_products_and_wrong_arguments_are_those_of_torch():
    def run(function):
        try:
            return function()
        except RuntimeError as error:
            return str(error)

    c = torch.ones(2, 4)
    cases = [
        lambda: torch.mm(torch.ones(2, 0), torch.ones(0, 4)),
        lambda: torch.addmm(c, torch.ones(2, 0), torch.ones(0, 4), beta=2),
        lambda: torch.mm(torch.ones(0, 3), torch.ones(3, 4)),
        lambda: torch.bmm(torch.ones(0, 2, 3), torch.ones(0, 3, 4)),
        lambda: torch.mv(torch.ones(3, 0), torch.ones(0)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(4, 4)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4, dtype=torch.float64)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.ones(2, 4).double()),
        lambda: torch.bmm(torch.ones(2, 2, 3), torch.ones(1, 3, 4)),
        lambda: torch.addmm(torch.ones(3), torch.ones(2, 3), torch.ones(3, 4)),
        lambda: torch.addmm(c, torch.ones(2, 3), torch.ones(3, 4), alpha=1j),
        lambda: torch.ones(1, 4).addmm_(torch.ones(2, 3), torch.ones(3, 4)),
        lambda: torch.mm(torch.ones(2, 3).long(), torch.ones(3, 4).long()),
        lambda: torch.mm(torch.ones(2, 3) + 1j, torch.ones(3, 4) + 1j),
    ]
    ours = [run(case) for case in cases]
    use_portable_products(False)
    for mine, case in zip(ours, cases, strict=True):
        theirs = run(case)
        if isinstance(theirs, str):
            assert mine == theirs
        else:
            assert torch.equal(mine, theirs)


def test_gradients():
    generator = torch.Generator().manual_seed(5)
    x = draw(generator, (6, 90), torch.float32).requires_grad_()
    weight = draw(generator, (11, 90), torch.float32).requires_grad_()
    bias = draw(generator, (11,), torch.float32).requires_grad_()
    upstream = draw(generator, (6, 11), torch.float32)
    torch.nn.functional.linear(x, weight, bias).backward(upstream)
    assert_same(x.grad, expect(upstream, weight.detach()))
    assert_same(weight.grad, expect(upstream.T, x.detach()))
    double = [value.detach().double().requires_grad_() for value in (x, weight, bias)]
    assert torch.autograd.gradcheck(torch.nn.functional.linear, double)


CONVOLUTIONS = [
    # input, weight, stride, padding, dilation
    ((2, 3, 9, 11), (4, 3, 3, 3), 1, 0, 1),
    ((2, 3, 9, 11), (4, 3, 3, 3), 1, 1, 1),
    ((3, 2, 8, 8), (3, 2, 3, 3), 2, 1, 1),
    ((3, 2, 7, 9), (5, 2, 1, 1), 1, 0, 1),
    ((3, 2, 7, 9), (5, 2, 1, 1), 2, 0, 1),
    ((1, 3, 25, 24), (4, 3, 7, 5), (2, 3), (3, 1), (1, 2)),
    ((40, 3, 2, 2), (2, 3, 3, 3), 1, 1, 1),  # images that share a product
    ((2, 2, 5, 5), (2, 2, 3, 3), 1, 4, 1),  # results of padding only
    ((1, 40, 30, 30), (2, 40, 3, 3), 1, 1, 1),  # channels and positions in parts
    # Small images whose padding is left out: outputs, channels and products in several parts.
    ((9, 30, 4, 4), (170, 30, 3, 3), 1, 1, 1),
    ((8, 30, 8, 8), (2, 30, 3, 3), 1, 1, 1),
    ((9, 5, 4, 5), (3, 5, 3, 3), 2, 1, 1),
    ((21, 3, 7, 6), (4, 3, 3, 5), (1, 2), (1, 2), (2, 1)),
    ((17, 4, 12, 9), (5, 4, 3, 3), 1, 1, 1),
    ((40, 65, 2, 2), (33, 65, 3, 3), 1, 1, 1),  # channels, images and tiles of rows in parts
    ((9, 20, 5, 8), (15, 20, 3, 3), (2, 1), 1, 1),
    ((32, 150, 3, 2), (130, 150, 3, 3), 1, 1, 1),  # weights beyond the cache, two images per lane
    ((55, 7, 9, 11), (30, 7, 2, 3), (3, 2), (2, 0), (1, 2)),
]


def convolve_in_order(x, weight, gradient, stride, padding, dilation):
    """Return the result and both gradients of a convolution by the definition in unfolding.h."""
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    patches = torch.nn.functional.unfold(x, weight.shape[2:], **options)
    flat = weight.flatten(1)
    result = multiply_in_order(flat, patches.transpose(0, 1).flatten(1))
    result = result.unflatten(1, (len(x), -1)).transpose(0, 1).reshape(gradient.shape)
    outputs = gradient.transpose(0, 1).flatten(1)
    of_weight = multiply_in_order(outputs, patches.transpose(0, 1).flatten(1).T)
    of_patches = multiply_in_order(flat.T, outputs).unflatten(1, (len(x), -1)).transpose(0, 1)
    # The elements of a pixel are added in the order of the taps, one addition each.
    of_input = torch.zeros_like(x)
    taps = weight[0, 0].numel()
    for tap in range(taps):
        only = torch.zeros_like(of_patches)
        only[:, tap::taps] = of_patches[:, tap::taps]
        of_input += torch.nn.functional.fold(only, x.shape[2:], weight.shape[2:], **options)
    return result, of_input, of_weight.view_as(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolutions_add_in_order(kernel_names, dtype):
    generator = torch.Generator().manual_seed(6)
    for sizes, weight_sizes, *options in CONVOLUTIONS:
        x = draw(generator, sizes, dtype).requires_grad_()
        weight = draw(generator, weight_sizes, dtype).requires_grad_()
        bias = draw(generator, weight_sizes[:1], dtype)
        shape = torch.nn.functional.conv2d(x, weight, None, *options).shape
        gradient = draw(generator, shape, dtype)
        expected = convolve_in_order(x.detach(), weight.detach(), gradient, *options)
        for kernels, threads, memory_format in [
            *((kernels, 1, torch.contiguous_format) for kernels in kernel_names),
            (kernel_names[-1], 3, torch.contiguous_format),
            (kernel_names[-1], 2, torch.channels_last),
        ]:
            use(kernels)
            torch.set_num_threads(threads)
            given = x.contiguous(memory_format=memory_format)
            result = torch.nn.functional.conv2d(given, weight, None, *options)
            assert result.is_contiguous(memory_format=memory_format)
            of_input, of_weight = torch.autograd.grad(result, (x, weight), gradient)
            for value, other in zip((result, of_input, of_weight), expected, strict=True):
                assert_same(value.detach(), other)
            biased = torch.nn.functional.conv2d(given, weight, bias, *options)
            assert_same(biased.detach(), expected[0] + bias[:, None, None])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1e-30], ids=str)
def test_a_convolution_of_images_has_the_bits_of_each_alone(kernel_names, value):
    """Zeros of the padding times such a weight are no zeros, or have another sign."""
    use(kernel_names[-1])
    generator = torch.Generator().manual_seed(7)
    x = draw(generator, (16, 3, 4, 4), torch.float32) * (1e-30 if value == -1e-30 else 1)
    weight = draw(generator, (2, 3, 3, 3), torch.float32)
    weight[1, 1, 0, 2] = value
    if value == -1e-30:
        weight = torch.full_like(weight, value)
    together = torch.nn.functional.conv2d(x, weight, padding=1)
    alone = torch.cat(
        [torch.nn.functional.conv2d(image, weight, padding=1) for image in x.split(1)]
    )
    assert_same(together, alone)
    # The image of each corner reaches other elements of the weight.
    assert math.isfinite(value) or together[:, 1].isnan().all(0).sum() >= 7
    assert not (together == 0).logical_and(together.signbit()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_of_the_padding_are_added_to_sums_that_round_to_zero(kernel_names, dtype):
    """They change the sign of -0, so they are left out only where there is none."""
    x = torch.full((1, 16, 2, 2), torch.finfo(dtype).tiny, dtype=dtype)
    weight = torch.zeros(2, 16, 3, 3, dtype=dtype, requires_grad=True)
    gradient = torch.tensor([[[-1e-30, 1], [1, 1]]] * 2, dtype=dtype)[None]
    expected = convolve_in_order(x, weight.detach(), gradient, 1, 1, 1)[2]
    use(kernel_names[-1])
    result = torch.nn.functional.conv2d(x, weight, padding=1)
    (of_weight,) = torch.autograd.grad(result, weight, gradient)
    assert_same(of_weight, expected)
    assert (of_weight[:, :, 2, 2] == 0).all()
    assert not of_weight[:, :, 2, 2].signbit().any()
    assert of_weight[:, :, 1, 1].all()


def test_gradients_of_images_that_round_to_zero_are_those_of_each_alone(kernel_names):
    weight = torch.full((2, 3, 1, 1), torch.finfo(torch.float32).tiny)
    gradient = torch.full((4, 2, 16, 16), -1e-30)
    use(kernel_names[-1])

    def differentiate(part):
        x = torch.zeros(len(part), 3, 16, 16, requires_grad=True)
        return torch.autograd.grad(torch.nn.functional.conv2d(x, weight), x, part)[0]

    together = differentiate(gradient)
    assert_same(together, torch.cat([differentiate(part[None]) for part in gradient]))
    assert not together.any()
    assert not together.signbit().any()


def test_other_convolutions_are_those_of_torch():
    functional = torch.nn.functional
    x = torch.ones(1, 4, 5, 5)
    weight = torch.ones(4, 4, 3, 3)

    def run(function):
        try:
            return function()
        except RuntimeError as error:
            return str(error)

    cases = [
        lambda: functional.conv2d(x, torch.ones(4, 2, 3, 3), groups=2),
        lambda: functional.conv_transpose2d(x, weight),
        lambda: functional.conv2d(x[:0], weight),
        lambda: functional.conv2d(x[0], weight),
        lambda: functional.conv2d(x.bfloat16(), weight.bfloat16()),
        lambda: functional.conv2d(x, torch.ones(4, 4, 7, 7)),
        lambda: functional.conv2d(x, torch.ones(4, 3, 3, 3)),
        lambda: functional.conv2d(x, weight, torch.ones(3)),
        lambda: functional.conv2d(x, weight, stride=0),
        lambda: functional.conv2d(x, weight, padding=-1),
        lambda: functional.conv2d(x, weight.double()),
        lambda: functional.conv1d(x[0], weight[0]),
    ]
    ours = [run(case) for case in cases]
    use_portable_products(False)
    for mine, case in zip(ours, cases, strict=True):
        theirs = run(case)
        assert mine == theirs if isinstance(theirs, str) else torch.equal(mine, theirs)


def test_gradients_of_convolutions():
    generator = torch.Generator().manual_seed(7)
    x = draw(generator, (2, 2, 5, 4), torch.float64).requires_grad_()
    weight = draw(generator, (3, 2, 3, 2), torch.float64).requires_grad_()
    bias = draw(generator, (3,), torch.float64).requires_grad_()

    def convolve(x, weight, bias):
        return torch.nn.functional.conv2d(x, weight, bias, stride=(2, 1), padding=1)

    assert torch.autograd.gradcheck(convolve, (x, weight, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(convolve, (x, weight, bias), fast_mode=True)


def test_digests():
    """Every processor must compute these: they are the definition, and portable mode's bits."""
    digests = {
        torch.float32: "6bbee48d3d3138f6",
        torch.float64: "0d9e41d2c834e697",
        torch.bfloat16: "9a4778b36992906d",
    }
    numbers = torch.arange(1, 1 + 130 * 270, dtype=torch.float64)
    values = (numbers * 0.6180339887498949).frac() - 0.5
    for dtype, digest in digests.items():
        a = values[: 70 * 270].view(70, 270).to(dtype)
        b = values[: 270 * 130].view(270, 130)
        product = a @ b.to(dtype)
        content = product.view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(content).hexdigest()[:16] == digest, (
            f"this processor or compiler computes other products of {dtype} than all others"
        )


def test_without_the_native_module(monkeypatch):
    def fail():
        raise BindingError("it has not been built for torch 2.13.0 yet", "run `lockstep build`")

    monkeypatch.setattr(native_module, "load_native", fail)
    native_module.reason_unavailable.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"portable mode .* run `lockstep build`"):
            use_portable_products()
    finally:
        monkeypatch.undo()
        native_module.reason_unavailable.cache_clear()
