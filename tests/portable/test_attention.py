"""Attention of the portable kernels: against float64, and each head by itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm import backend
from lockstep.comm.native_module import load_native
from lockstep.portable.products import use_portable_products

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

ATTEND: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTEND_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    threads = torch.get_num_threads()
    use_portable_products()  # as every test of this process
    yield
    torch.set_num_threads(threads)


class Case:
    """The inputs of an attention."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        samples = draw(st.integers(1, 3))
        heads = draw(st.integers(1, 5))
        # Also more than the queries of a block.
        queries = draw(st.sampled_from([1, 2, 5, 17, 64, 65, 130, 200]))
        keys = draw(st.sampled_from([1, 3, 16, 17, 64, 70, 129, 260, 3000]))
        size = draw(st.sampled_from([1, 4, 16, 33]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        lengths = [queries, keys, keys, queries]
        made = [make(samples, length, heads, size).transpose(1, 2) for length in lengths]
        self.query, self.key, self.value, self.gradient = made
        if draw(st.booleans()):
            self.query = self.query.contiguous()
        self.is_causal = draw(st.booleans())
        shapes = [(queries, keys), (samples, 1, 1, keys), (samples, heads, queries, keys)]
        shape = draw(st.sampled_from([None, *shapes]))
        self.mask: torch.Tensor | None = None
        if shape is not None:
            self.mask = make(*shape).masked_fill(make(*shape) < -0.5, -math.inf)

    def compute(self, part: tuple[slice, slice] | None = None) -> list[torch.Tensor]:
        """Return the output, the logarithms of sums and the gradients, also of one head."""
        tensors = [self.query, self.key, self.value, self.gradient]
        mask = self.mask
        if part is not None:
            tensors = [tensor[part] for tensor in tensors]
            if mask is not None and mask.dim() == 4:
                mask = mask.expand(*self.query.shape[:2], *mask.shape[2:])[part]
        *inputs, gradient = tensors
        output, sums = ATTEND(*inputs, 0.0, self.is_causal, attn_mask=mask)
        gradients = ATTEND_BACKWARD(
            gradient, *inputs, output, sums, 0.0, self.is_causal, attn_mask=mask
        )
        return [output, sums, *gradients]

    def compute_in_float64(self) -> list[torch.Tensor]:
        """Return what the attention should be."""
        made = (self.query, self.key, self.value)
        query, key, value = (tensor.double().requires_grad_() for tensor in made)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if self.mask is not None:
            scores = scores + self.mask
        if self.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        is_blind = scores.amax(-1, keepdim=True) == -math.inf
        scores = scores.masked_fill(is_blind, 0)
        output = torch.softmax(scores, -1).masked_fill(is_blind, 0) @ value
        output.backward(self.gradient.double())
        sums = scores.logsumexp(-1).masked_fill(is_blind.squeeze(-1), 0)
        gradients = [tensor.grad for tensor in (query, key, value)]
        return [output.detach(), sums.detach(), *[g for g in gradients if g is not None]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(draw)


@given(cases(), st.integers(1, 4))
def test_attention_is_that_in_float64_on_any_number_of_threads(case: Case, threads: int) -> None:
    torch.set_num_threads(threads)
    found = case.compute()
    torch.set_num_threads(1)
    tolerance = 1e-4 if case.dtype == torch.float32 else 1e-10
    for one, again, expected in zip(found, case.compute(), case.compute_in_float64(), strict=True):
        assert one.dtype == case.dtype
        assert torch.equal(one, again)
        torch.testing.assert_close(
            one.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1)
        )


@given(cases())
def test_no_kernel_has_other_bits(case: Case) -> None:
    found = []
    for name in ("plain", "avx2", "avx512"):
        with contextlib.suppress(ValueError):  # not for this processor
            load_native().use_portable_kernels(True, kernels=name)
            found.append(case.compute())
    use_portable_products()
    assert len(found) > 1
    assert all(all(map(torch.equal, found[0], one)) for one in found)


@given(cases(), st.data())
def test_a_head_does_not_depend_on_the_others(case: Case, data: st.DataObject) -> None:
    numbers = [data.draw(st.integers(0, size - 1)) for size in case.query.shape[:2]]
    sample, head = (slice(number, number + 1) for number in numbers)
    for one, all_of_them in zip(case.compute((sample, head)), case.compute(), strict=True):
        assert torch.equal(one, all_of_them[sample, head])


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 5, 4),
    "heads inside": lambda: torch.randn(2, 5, 3, 4).transpose(1, 2),
    "a part": lambda: torch.randn(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)[0],
    "expanded": lambda: torch.randn(2, 1, 5, 4).expand(2, 3, 5, 4),
    "one token": lambda: torch.randn(2, 3, 1, 4),
    "large": lambda: torch.randn(2, 3, 600, 4),
    "large, heads inside": lambda: torch.randn(2, 600, 3, 4).transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_that_of_torch(layout: str) -> None:
    query = LAYOUTS[layout]()
    empty = torch.empty_strided(query.shape, query.stride(), device="meta")
    found = ATTEND(query, query, query)
    expected = ATTEND(empty, empty, empty)
    gradients = ATTEND_BACKWARD(found[0], query, query, query, *found, 0.0, False)
    of_meta = ATTEND_BACKWARD(expected[0], empty, empty, empty, *expected, 0.0, False)
    for one, other in zip((*found, *gradients), (*expected, *of_meta), strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()


def test_a_backward_pass_may_run_in_autocast() -> None:
    query = torch.randn(2, 3, 9, 8, requires_grad=True)
    output = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    output.sum().backward(retain_graph=True)
    assert query.grad is not None
    expected = query.grad.clone()
    query.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        output.sum().backward()
    assert torch.equal(query.grad, expected)


def test_a_query_whose_scores_are_minus_infinity_has_zeros() -> None:
    query = torch.full((1, 1, 2, 4), -math.inf)
    key = torch.ones(1, 1, 3, 4)
    output, sums = ATTEND(query, key, key)
    assert torch.equal(output, torch.zeros(1, 1, 2, 4))
    assert torch.equal(sums, torch.zeros(1, 1, 2))


def test_mistakes_have_the_messages_of_torch() -> None:
    query = torch.randn(2, 3, 5, 4)
    with pytest.raises(RuntimeError, match="Attention mask dim in"):
        ATTEND(query, query, query, attn_mask=torch.zeros(5))
