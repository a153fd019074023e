"""Products of the rows of each micro-batch, added along the tree, against separate products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm import backend
from lockstep.comm.native_module import load_native
from lockstep.kernel.buffers import have_same_bits
from lockstep.kernel.tree import TreeAccumulator
from lockstep.portable.products import use_portable_products

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    threads = torch.get_num_threads()
    use_portable_products()
    yield
    torch.set_num_threads(threads)


def add_segments(a: torch.Tensor, b: torch.Tensor, segments: int) -> torch.Tensor:
    """Return the sum along the tree of one product per segment."""
    terms = a.shape[1] // segments
    sums = TreeAccumulator[torch.Tensor](segments, torch.add)
    for segment in range(segments):
        part = slice(segment * terms, (segment + 1) * terms)
        sums.put((segment, segment + 1), a[:, part] @ b[part])
    ((_, total),) = sums.nodes.items()
    return total


def make_calls(a: torch.Tensor, b: torch.Tensor, segments: int) -> Any:
    """Return what calls `mm` for the terms of each segment."""
    native = load_native()
    recorded = native.RecordedCalls(restores=True, keeps=False, first=None)
    recorded.run(lambda: torch.mm(a, b))
    (call,) = recorded.calls
    rule = native.SegmentRule([(0, 1), (1, 0)], [-1], [], draws=False, turns=1, keeps_parts=False)
    return native.SegmentedCalls([(call[0], call[1], rule, call[-1])], segments)


@st.composite
def operands(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return two matrices and the number of segments of their terms."""
    segments = draw(st.integers(1, 9))
    terms = draw(st.integers(1, 40))
    rows, columns = draw(st.integers(1, 600)), draw(st.integers(1, 600))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    a = torch.randn(segments * terms, rows, generator=generator).to(dtype).t()
    b = torch.randn(segments * terms, columns, generator=generator).to(dtype)
    if draw(st.booleans()):
        a = a.contiguous()
    if draw(st.booleans()):
        b = b.t().contiguous().t()
    if draw(st.booleans()):
        b = b[:, :1].expand(b.shape)
    if draw(st.booleans()):
        a[0, 0] = draw(st.sampled_from([torch.nan, torch.inf, -0.0, 1e-40]))
    return a, b, segments


@given(operands(), st.integers(1, 4))
def test_products_of_segments_have_the_bits_of_separate_products(
    given: tuple[torch.Tensor, torch.Tensor, int], threads: int
) -> None:
    torch.set_num_threads(threads)
    a, b, segments = given
    calls = make_calls(a, b, segments)
    with torch.no_grad():
        found = calls.run(lambda: torch.mm(a, b))
    assert not calls.find_difference()
    torch.set_num_threads(1)
    expected = add_segments(a, b, segments)
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    assert all(have_same_bits([(found, expected)])), (a.shape, b.shape, segments)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 5)])
def test_products_of_segments_are_one_call(dtype: torch.dtype, count: int) -> None:
    a, b = torch.randn(8, 32).to(dtype), torch.randn(32, 8).to(dtype)
    calls = make_calls(a, b, 4)
    with torch.no_grad(), torch.autograd.profiler.profile() as profile:
        calls.run(lambda: torch.mm(a, b))
    called = [event for event in profile.function_events if event.name == "aten::mm"]
    assert len(called) == count  # the one that is seen, and one for each segment


def test_products_that_need_gradients_are_called_for_each_segment() -> None:
    a, b = torch.randn(8, 32, requires_grad=True), torch.randn(32, 8)
    calls = make_calls(a, b, 4)
    result = calls.run(lambda: torch.mm(a, b))
    result.sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, b.sum(1).expand(8, 32))
