"""Elementwise functions whose bits depend on no processor: results, forms and restored kernels."""

import math
import warnings

import numpy
import pytest
import torch

from lockstep.portable.products import use_portable_products

FUNCTIONS = ("sqrt", "asin", "acos", "atan", "tan")
REFERENCES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def functions():
    use_portable_products()
    yield
    use_portable_products()


def inputs(dtype, *shape):
    return torch.rand(shape or (10007,), generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_roots_are_rounded_correctly(dtype):
    x = inputs(dtype, 300, 301) * 100
    for given in (x, x.T, x[::3, ::2], x[0, 0], x[:0]):
        expected = torch.from_numpy(numpy.asarray(numpy.sqrt(given.numpy())))
        results = [given.sqrt(), given**0.5, torch._foreach_sqrt([given])[0]]
        results += [given.clone().sqrt_(), given.clone().pow_(0.5)]
        results += [torch.sqrt(given, out=torch.empty(0, dtype=dtype))]
        results += [torch.pow(given, 0.5, out=torch.empty(given.shape, dtype=dtype))]
        for result in results:
            assert torch.equal(result, expected)
    assert x.T.sqrt().stride() == x.T.stride()


def test_kernels_of_torch_are_restored():
    """Otherwise this module is not needed: on AMD, MKL's square roots are approximations."""
    x = inputs(torch.float32)
    ours = x.sqrt()
    use_portable_products(False)
    torchs = x.sqrt()
    use_portable_products()
    assert torch.allclose(ours, torchs, rtol=3e-7, atol=0)
    assert torch.equal(x.sqrt(), ours)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_accurate(name, dtype):
    x = inputs(dtype) * 2 - (0 if name == "sqrt" else 1)
    if name in ("asin", "acos"):
        x[:4] = torch.tensor([1.0, -1.0, 0.0, 1.5])
    else:
        x[:4] = torch.tensor([math.inf, -0.0, 1e30, math.nan])
    function = getattr(torch, name)
    with numpy.errstate(invalid="ignore"):
        exact = getattr(numpy, REFERENCES.get(name, name))(x.double().numpy())
    expected = torch.from_numpy(exact).to(dtype)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        function(x), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    for given in (x[3:].view(-1, 4), x[3:].view(-1, 4).T, x[::5]):
        result = function(given)
        assert torch.equal(getattr(given.clone(), f"{name}_")(), result) or result.isnan().any()
        other = function(given, out=torch.empty(given.shape, dtype=dtype))
        assert torch.equal(other.nan_to_num(), result.nan_to_num())
        assert result.shape == given.shape


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_have_the_layout_and_the_type_that_torch_gives_them(name):
    function = getattr(torch, name)
    last = inputs(torch.float32, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    crossed = inputs(torch.float32, 8, 6).T[:, ::2]  # neither dense nor in order
    kinds = [torch.empty(0), torch.empty(3, 3), torch.empty(0, dtype=torch.float64)]

    def compute():
        found = []
        for given in (last, crossed, torch.arange(2)):
            found.append(function(given))
            for out in kinds:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "An output with one or more elements was re")
                    found.append(function(given, out=out.clone()))
        return found

    ours = compute()
    use_portable_products(False)
    for one, expected in zip(ours, compute(), strict=True):
        assert (one.stride(), one.dtype) == (expected.stride(), expected.dtype)
        assert torch.allclose(one, expected, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_of_another_type_has_the_same_bits(dtype):
    """Otherwise MKL would compute it."""
    x = inputs(dtype) * 100
    wide = torch.empty(0, dtype=torch.float64)
    assert torch.equal(torch.sqrt(x, out=wide), x.sqrt().double())
    whole = torch.arange(1000)
    assert torch.equal(whole**0.5, whole.float().sqrt())
    assert torch.equal(torch.pow(whole, 0.5, out=torch.empty(0)), whole.float().sqrt())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_types_are_torchs(name):
    function = getattr(torch, name)
    counts = torch.tensor([0, 1])
    assert torch.equal(function(counts), function(counts.float()))
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        getattr(counts.clone(), f"{name}_")()
    for dtype in (torch.bfloat16, torch.complex64):
        x = inputs(torch.float32).to(dtype)
        ours = function(x)
        use_portable_products(False)
        assert torch.equal(ours, function(x))
        use_portable_products()


def test_gradients_and_overlaps_are_checked_above():
    x = inputs(torch.float64, 5).requires_grad_()
    assert torch.autograd.gradcheck(torch.sqrt, x)
    assert torch.autograd.gradcheck(torch.tan, x)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.ones(1).expand(3).sqrt_()
