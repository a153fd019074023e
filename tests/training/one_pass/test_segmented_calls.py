"""Products and sums of rows for each micro-batch, added along the tree, against separate ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    use_portable_products()  # as every test of this process
    yield
    torch.set_num_threads(threads)


def add_segments(
    compute: Callable[[slice], torch.Tensor], terms: int, segments: int
) -> torch.Tensor:
    """Return the sum along the tree of the results for the rows of each segment."""
    each = terms // segments
    sums = TreeAccumulator[torch.Tensor](segments, torch.add)
    for segment in range(segments):
        sums.put((segment, segment + 1), compute(slice(segment * each, (segment + 1) * each)))
    ((_, total),) = sums.nodes.items()
    return total


def make_calls(
    operator: Callable[[], Any],
    slices: Sequence[tuple[int, int]],
    segments: int,
    results: Sequence[int] = (-1,),
    turns: int = 1,
) -> Any:
    """Return what calls an operator for the rows of each segment."""
    native = load_native()
    recorded = native.RecordedCalls(restores=True, keeps=False, joins_losses=False, first=None)
    recorded.run(operator)
    (call,) = recorded.calls
    rule = native.SegmentRule(
        [*slices], [*results], [], draws=False, turns=turns, keeps_parts=False
    )
    return native.SegmentedCalls([(call[0], call[1], rule, call[-1])], segments, False)


TERMS = [(0, 1), (1, 0)]
"""The dimensions of a product that are divided."""


@st.composite
def operands(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return two matrices and the number of segments of their terms."""
    segments = draw(st.integers(1, 9))
    terms = draw(st.integers(1, 40))
    rows = draw(st.integers(1, 600))
    columns = draw(st.integers(1, 600))
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
    calls = make_calls(lambda: torch.mm(a, b), TERMS, segments)
    with torch.no_grad():
        found = calls.run(lambda: torch.mm(a, b))
    assert not calls.find_difference()
    torch.set_num_threads(1)
    expected = add_segments(lambda part: a[:, part] @ b[part], len(b), segments)
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    assert all(have_same_bits([(found, expected)])), (a.shape, b.shape, segments)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 5)])
def test_products_of_segments_are_one_call(dtype: torch.dtype, count: int) -> None:
    a = torch.randn(8, 32).to(dtype)
    b = torch.randn(32, 8).to(dtype)
    calls = make_calls(lambda: torch.mm(a, b), TERMS, 4)
    with torch.no_grad(), torch.autograd.profiler.profile() as profile:
        calls.run(lambda: torch.mm(a, b))
    called = [event for event in profile.function_events if event.name == "aten::mm"]
    assert len(called) == count  # the one that is seen, and one for each segment


@st.composite
def alternating(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return two matrices, the number of segments of their rows, and that of the turns."""
    segments = draw(st.integers(1, 9))
    turns = draw(st.integers(1, 5))
    terms = segments * turns * draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    sizes = draw(st.tuples(st.integers(1, 70), st.integers(1, 70)))
    a, b = (torch.randn(terms, size, generator=generator) for size in sizes)
    return a, b, segments, turns


def take_turns(rows: torch.Tensor, part: slice, segments: int, turns: int) -> torch.Tensor:
    """Return the rows of a segment, which are in every turn."""
    number = part.start * segments // len(rows)
    return rows.unflatten(0, (turns, segments, -1))[:, number].flatten(0, 1)


@given(alternating(), st.integers(1, 4))
def test_rows_that_alternate_have_the_bits_of_separate_ones(
    given: tuple[torch.Tensor, torch.Tensor, int, int], threads: int
) -> None:
    torch.set_num_threads(threads)
    a, b, segments, turns = given
    factors = a.t()
    product = make_calls(lambda: torch.mm(factors, b), TERMS, segments, turns=turns)
    total = make_calls(lambda: torch.sum(a, [0]), [(0, 0)], segments, turns=turns)
    with torch.no_grad():
        found = [product.run(lambda: torch.mm(factors, b)), total.run(lambda: torch.sum(a, [0]))]
    torch.set_num_threads(1)

    def take(rows: torch.Tensor, part: slice) -> torch.Tensor:
        return take_turns(rows, part, segments, turns)

    expected = [
        add_segments(lambda part: take(a, part).t() @ take(b, part), len(a), segments),
        add_segments(lambda part: take(a, part).sum(0), len(a), segments),
    ]
    assert all(have_same_bits([*zip(found, expected, strict=True)]))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 150), st.integers(1, 4), st.data())
def test_layer_norm_of_segments_has_the_bits_of_separate_ones(
    segments: int, each: int, width: int, threads: int, data: st.DataObject
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rows = torch.randn(segments * each, 3, width, generator=generator)
    gradient = torch.randn(rows.shape, generator=generator)
    weight = torch.randn(width, generator=generator)
    bias = torch.zeros(width)
    mask = data.draw(st.lists(st.booleans(), min_size=3, max_size=3).filter(any))
    _, means, inverses = torch.native_layer_norm(rows, [width], weight, bias, 1e-5)

    def backward(part: slice = slice(None)) -> Any:
        parts = [tensor[part].clone() for tensor in (gradient, rows, means, inverses)]
        return torch.ops.aten.native_layer_norm_backward(
            parts[0], parts[1], [width], parts[2], parts[3], weight, bias, mask
        )

    whole = (gradient, rows, [width], means, inverses, weight, bias, mask)

    def call() -> Any:
        return torch.ops.aten.native_layer_norm_backward(*whole)

    calls = make_calls(call, [(n, 0) for n in range(4)], segments, (0, -1, -1))
    with torch.no_grad():
        found = calls.run(call)
    assert not calls.find_difference()
    torch.set_num_threads(1)
    alone = [backward(slice(n * each, (n + 1) * each)) for n in range(segments)]
    for number, result in enumerate(found):
        own = [results[number] for results in alone]
        assert (result is None) == (own[0] is None)
        if result is not None:
            expected = (
                torch.cat(own)
                if number == 0
                else add_segments(lambda part, of=own: of[part.start], segments, segments)
            )
            assert all(have_same_bits([(result, expected)])), number


def test_layer_norm_of_segments_is_one_call() -> None:
    rows = torch.randn(8, 3, 6)
    weight = torch.randn(6)
    _, means, inverses = torch.native_layer_norm(rows, [6], weight, weight, 1e-5)
    whole = (rows, rows, [6], means, inverses, weight, weight, [True, True, True])

    def call() -> Any:
        return torch.ops.aten.native_layer_norm_backward(*whole)

    calls = make_calls(call, [(n, 0) for n in range(4)], 4, (0, -1, -1))
    with torch.no_grad(), torch.autograd.profiler.profile() as profile:
        calls.run(call)
    names = [event.name for event in profile.function_events]
    assert names.count("aten::native_layer_norm_backward") == 2  # that of the rows, in the seen one


class Convolution:
    """A convolution of the samples of several segments, and its backward pass for some of them."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.segments = draw(st.integers(1, 9))
        channels = draw(st.integers(1, 40))
        outputs = draw(st.integers(1, 40))
        sizes = [draw(st.integers(3, 12)) for _ in range(2)]
        kernel = [draw(st.integers(1, 3)) for _ in range(2)]
        self._stride = [draw(st.integers(1, 2))] * 2
        self._padding = [draw(st.integers(0, 1))] * 2
        self._mask = draw(st.lists(st.booleans(), min_size=3, max_size=3).filter(any))
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

        def make(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator)
            values[values.abs() < 0.2] = -0.0
            return values.to(dtype)

        self.samples = self.segments * draw(st.integers(1, 4))
        self._weight = make(outputs, channels, *kernel)
        self._input = make(self.samples, channels, *sizes)
        if draw(st.booleans()):
            self._input = self._input.contiguous(memory_format=torch.channels_last)
        result = torch.conv2d(self._input, self._weight, None, self._stride, self._padding)
        self._gradient = make(*result.shape)

    def backward(self, part: slice = slice(None)) -> Callable[[], Any]:
        """Return what computes the gradients of the input, the weight and the bias."""
        parts = (self._gradient[part].clone(), self._input[part].clone(), self._weight)
        sizes = [len(self._weight)]
        others = ([1, 1], False, [0, 0], 1, self._mask)
        return lambda: torch.ops.aten.convolution_backward(
            *parts, sizes, self._stride, self._padding, *others
        )


def find_layout(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions that have several elements."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@given(st.composite(Convolution)(), st.integers(1, 4))
def test_convolutions_of_segments_have_the_bits_of_separate_ones(
    convolution: Convolution, threads: int
) -> None:
    torch.set_num_threads(threads)
    segments = convolution.segments
    backward = convolution.backward()
    calls = make_calls(backward, [(0, 0), (1, 0)], segments, (0, -1, -1))
    with torch.no_grad():
        found = calls.run(backward)
    torch.set_num_threads(1)
    each = convolution.samples // segments
    alone = [convolution.backward(slice(n * each, (n + 1) * each))() for n in range(segments)]
    for number, gradient in enumerate(found):
        own = [gradients[number] for gradients in alone]
        if gradient is None:
            assert own == [None] * segments
            continue
        expected = (
            torch.cat(own)
            if number == 0
            else add_segments(lambda part, of=own: of[part.start], segments, segments)
        )
        assert find_layout(gradient) == find_layout(expected)
        assert all(have_same_bits([(gradient, expected)])), number


def test_convolutions_of_segments_are_one_call() -> None:
    parts = (torch.randn(8, 4, 3, 3), torch.randn(8, 2, 3, 3), torch.randn(4, 2, 3, 3))
    others = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])

    def backward() -> Any:
        return torch.ops.aten.convolution_backward(*parts, *others)

    calls = make_calls(backward, [(0, 0), (1, 0)], 4, (0, -1, -1))
    with torch.no_grad(), torch.autograd.profiler.profile() as profile:
        calls.run(backward)
    called = [event.name for event in profile.function_events]
    assert called.count("aten::convolution_backward") == 1  # the one that is seen


class Layer:
    """An LSTM layer, and its backward pass for the samples of a part."""

    results = (1, -1, -1, -1, -1, 0, 0)
    """The dimension of the samples in what the backward pass returns; -1: is added."""

    def __init__(self, steps: int, samples: int, size: int, hidden: int) -> None:
        self.rows = torch.randn(steps, samples, size)
        self.weights = [torch.randn(4 * hidden, one) for one in (size, hidden)]
        self.biases = [*torch.randn(2, 4 * hidden)]
        self.states = [*torch.randn(2, samples, hidden)]
        self.of_output = torch.randn(steps, samples, hidden)
        self.is_reverse = False
        self.has_biases = True

    def compute(self, part: slice = slice(None)) -> Callable[[], Any]:
        """Compute the layer, and return its backward pass."""
        own = [
            self.rows[:, part].contiguous(),
            *self.weights,
            *self.biases,
            *(one[part].contiguous() for one in self.states),
        ]
        options = 2, self.states[0].shape[1], 1, self.has_biases
        results = torch.ops.aten.mkldnn_rnn_layer(
            *own, self.is_reverse, [], *options, False, False, True
        )
        given = [self.of_output[:, part].contiguous(), None, own[-1]]
        return lambda: torch.ops.aten.mkldnn_rnn_layer_backward(
            *own,
            *results[:3],
            *given,
            self.is_reverse,
            *options,
            True,
            False,
            [],
            False,
            results[3],
        )

    def compute_segments(self, segments: int) -> Any:
        """Return what is computed for all segments together."""
        backward = self.compute()
        native = load_native()
        recorded = native.RecordedCalls(restores=True, keeps=False, joins_losses=False, first=None)
        recorded.run(backward)
        (call,) = recorded.calls
        cut = [(0, 1), (5, 0), (6, 0), (7, 1), (8, 0), (9, 0), (10, 1), (11, 0), (12, 1)]
        rule = native.SegmentRule(cut, [*self.results], [], draws=False, turns=1, keeps_parts=False)
        calls = native.SegmentedCalls([(call[0], call[1], rule, call[-1])], segments, False)
        with torch.no_grad():
            found = calls.run(backward)
        assert not calls.find_difference()
        return found


@given(
    segments=st.integers(1, 5),
    samples=st.integers(1, 4),
    steps=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    is_reverse=st.booleans(),
    has_biases=st.booleans(),
    threads=st.integers(1, 4),
)
def test_lstm_layers_of_segments_have_the_bits_of_separate_ones(
    segments: int,
    samples: int,
    steps: int,
    sizes: tuple[int, int],
    is_reverse: bool,
    has_biases: bool,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    layer = Layer(steps, segments * samples, *sizes)
    layer.is_reverse = is_reverse
    layer.has_biases = has_biases
    found = layer.compute_segments(segments)
    torch.set_num_threads(1)
    alone = [layer.compute(slice(n * samples, (n + 1) * samples))() for n in range(segments)]
    for one, dimension, *parts in zip(found, layer.results, *alone, strict=True):
        if dimension >= 0:
            expected = torch.cat(parts, dimension)
        else:
            stacked = torch.stack(parts)
            expected = add_segments(lambda part, of=stacked: of[part][0], segments, segments)
        assert all(have_same_bits([(one.contiguous(), expected)]))


def test_lstm_layers_of_segments_are_one_call() -> None:
    layer = Layer(3, 32, 5, 7)
    with torch.autograd.profiler.profile() as profile:
        layer.compute_segments(16)
    called = [event.name for event in profile.function_events]
    assert called.count("aten::mkldnn_rnn_layer_backward") < 16


def test_products_that_need_gradients_are_called_for_each_segment() -> None:
    a = torch.randn(8, 32, requires_grad=True)
    b = torch.randn(32, 8)
    calls = make_calls(lambda: torch.mm(a, b), TERMS, 4)
    result = calls.run(lambda: torch.mm(a, b))
    result.sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, b.sum(1).expand(8, 32))


@given(
    segments=st.integers(1, 9),
    rows=st.integers(1, 40),
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    keeps_dimension=st.booleans(),
    threads=st.integers(1, 4),
)
def test_sums_of_segments_have_the_bits_of_separate_sums(
    segments: int,
    rows: int,
    shape: list[int],
    dtype: torch.dtype,
    keeps_dimension: bool,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    values = torch.randn(segments * rows, *shape).to(dtype)

    def compute(part: slice = slice(None)) -> torch.Tensor:
        # Copied, since rows of a separate pass are aligned.
        return values[part].clone().sum([0], keepdim=keeps_dimension)

    calls = make_calls(lambda: values.sum([0], keepdim=keeps_dimension), [(0, 0)], segments)
    with torch.no_grad():
        found = calls.run(lambda: values.sum([0], keepdim=keeps_dimension))
    assert not calls.find_difference()
    expected = add_segments(compute, segments * rows, segments)
    assert found.shape == expected.shape
    assert all(have_same_bits([(found, expected)])), (values.shape, segments)


def test_sums_of_segments_are_one_call() -> None:
    values = torch.randn(32, 64)
    calls = make_calls(lambda: values.sum([0]), [(0, 0)], 4)
    with torch.no_grad(), torch.autograd.profiler.profile() as profile:
        calls.run(lambda: values.sum([0]))
    called = [event for event in profile.function_events if event.name == "aten::sum"]
    assert len(called) == 2  # the one that is seen, and one for all segments
