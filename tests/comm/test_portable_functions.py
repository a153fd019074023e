"""Elementwise functions whose bits depend on no processor: results, forms and restored kernels."""

import math

import numpy
import pytest
import torch

from lockstep.comm.portable_products import use_portable_products

FUNCTIONS = ("sqrt", "asin", "acos", "atan", "tan")
REFERENCES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def functions():
    use_portable_products()
    yield
    use_portable_products(False)


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
