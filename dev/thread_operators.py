"""Lists the CPU operators whose bits depend on the number of intra-op threads, in portable mode.

    python dev/thread_operators.py [--out FILE] [--dtypes ...] [--names ...] [--samples N]

It calls every operator of torch's own database of samples (`OpInfo`) in float32, float64 and
bfloat16, forward and backward, and compositions of layers (`LAYERS`). A dispatch mode executes each
ATen operator below them once per number of threads, on copies of the same inputs, and compares the
bits. The samples of the database are small, and torch divides no work below 32,768 elements, so
they are enlarged: by larger sizes in the functions that make them, and by repetition of their first
dimension. Each entry of the database is computed in a process of its own, for at most `SECONDS`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import resource
import signal
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.portable.variables import OF_TORCH, find_missing_variables

THREADS = (1, 2, 3, 4, 8)

DTYPES = ("float32", "float64", "bfloat16")

SIZES = {"XS": 5, "S": 33, "M": 97, "L": 211}
"""The values of the database's names for sizes: 33 * 33 * 33 exceeds 32,768."""

MOST = 250_000
"""The elements of the tensors of a sample; those with more take too long."""

SAMPLES = 2
"""The samples that are computed per operator and dtype, those with the most elements, unless
`--samples` says more: some operators are divided for any number of elements."""

SECONDS = 60

MEMORY = 8 << 30
"""The bytes that a process may allocate; a case that takes more fails, and not the machine."""

WRITTEN = {"_ctc_loss.default": 1, "_ctc_loss.Tensor": 1}
"""The number of results that torch writes completely: the second one is for the gradient only."""

Case = tuple[str, Callable[[], Any]]


class ThreadComparison(TorchDispatchMode):
    """Executes each operator with several numbers of threads, and compares the bits.

    Args:
        threads: The numbers of threads; the first is the reference, whose results are returned.

    Attributes:
        differing: The operators whose bits differ, each with the numbers of threads that gave
            other bits than the first.
        compared: The operators that were compared.
    """

    supports_higher_order_operators = True

    def __init__(self, threads: Sequence[int] = THREADS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads = threads
        self.differing: dict[str, set[int]] = {}
        self.compared: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Execute an operator, and compare its bits."""
        kwargs = dict(kwargs or {})
        is_compared = not (getattr(func, "is_view", False) or "empty" in str(func))
        if is_compared:
            self._compare(func, args, kwargs)
        torch.set_num_threads(self._threads[0])
        return func(*args, **kwargs)

    def _compare(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = str(func).removeprefix("aten.")
        self.compared.add(name)
        leaves = tree_leaves((tuple(args), kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        generators = [torch.default_generator, *given]
        states = [generator.get_state() for generator in generators]
        expected = None
        for threads in self._threads:
            _restore(generators, states)
            copies = tree_map(_copy, (tuple(args), dict(kwargs)))
            torch.set_num_threads(threads)
            results = func(*copies[0], **copies[1])
            if name in WRITTEN:
                results = results[: WRITTEN[name]]
            found = [_read(leaf) for leaf in tree_leaves((results, copies))]
            if expected is None:
                expected = found
            elif found != expected:
                self.differing.setdefault(name, set()).add(threads)
        _restore(generators, states)


def _restore(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _copy(value: Any) -> Any:
    """Return a tensor with the same elements, strides and overlaps in other memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if value.device.type != "cpu":
        return value
    base = value.detach()
    whole = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())
    copied = whole.clone().as_strided(base.size(), base.stride(), base.storage_offset())
    copied = copied.conj() if base.is_conj() else copied
    return torch._neg_view(copied) if base.is_neg() else copied


def _read(value: Any) -> Any:
    """Return what to compare of a result: the bytes of a tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or value.device.type != "cpu":
        return None
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_floating_point():  # which of two NaN a processor returns is not compared
        plain = plain.where(~plain.isnan(), torch.nan)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- the cases ----


def load_database() -> list[Any]:
    """Return the entries of torch's database, which makes larger samples afterwards."""
    if "expecttest" not in sys.modules:  # a test package of torch's, of which one class is used
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as database
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.testing._internal.opinfo"):
            vars(module).update({k: v for k, v in SIZES.items() if k in vars(module)})
    vars(database).update(SIZES)
    return list(database.op_db)


def _count(values: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors)


def _repeat(values: Any, size: int, times: int) -> Any:
    """Repeat the tensors whose first dimension has a size, along it."""

    def enlarge(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.size(0) != size:
            return value
        enlarged = value.detach().repeat(times, *[1] * (value.dim() - 1))
        return enlarged.requires_grad_(value.requires_grad)

    return tree_map(enlarge, values)


def find_cases(entry: Any, dtype: torch.dtype, count_samples: int = SAMPLES) -> Iterator[Case]:
    """Yield calls of an entry of the database, first those large enough to be divided."""
    has_gradient = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
    samples = list(entry.sample_inputs("cpu", dtype, requires_grad=has_gradient))
    kept: dict[str, Any] = {}
    for sample in samples:
        values = (sample.input, tuple(sample.args), dict(sample.kwargs))
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        count = _count(values)
        if count > MOST or not tensors or not count:
            continue
        key = str([tuple(tensor.shape) for tensor in tensors])
        if count < 70_000 and tensors[0].dim() and tensors[0].size(0):
            size = tensors[0].size(0)
            repeated = _repeat(values, size, -(-70_001 // count))
            kept.setdefault(f"{key} repeated", repeated)
        kept.setdefault(key, values)
    largest = sorted(kept, key=lambda key: _count(kept[key]) < 32_768)
    for key in largest[: count_samples * 2]:
        yield f"{entry.formatted_name} {key}", _make_call(entry, kept[key])
    if type(entry).__name__ == "UnaryUfuncInfo":
        yield from _find_unary(entry, dtype, has_gradient)


def _find_unary(entry: Any, dtype: torch.dtype, has_gradient: bool) -> Iterator[Case]:
    low, high = entry.domain
    plain = torch.testing.make_tensor((67, 1031), dtype=dtype, device="cpu", low=low, high=high)
    forms = {
        "dense": plain,
        "transposed": plain.T,
        "every other": plain[:, ::2],
        "rows": plain[::2],
    }
    forms["part"] = plain[:, 1:1000]
    for name, form in forms.items():
        values: Any = (form.detach().requires_grad_(has_gradient), (), {})
        yield f"{entry.formatted_name} {name}", _make_call(entry, values)


def _make_call(entry: Any, values: Any) -> Callable[[], Any]:
    given, args, kwargs = values
    return lambda: differentiate(lambda: entry.op(given, *args, **kwargs), values)


def differentiate(function: Callable[[], Any], inputs: Any) -> None:
    """Compute a function and its gradients with respect to those inputs that need one."""
    results = [leaf for leaf in tree_leaves(function()) if isinstance(leaf, torch.Tensor)]
    outputs = [result for result in results if result.requires_grad]
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if outputs and wanted:
        gradients = [_make(tuple(output.shape), output.dtype, 7) for output in outputs]
        torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)


def _make(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=draw, dtype=torch.float32).to(dtype)


def find_layers(dtype: torch.dtype) -> Iterator[Case]:
    """Yield calls of layers and reductions with sizes of a training."""

    def call(function: Callable[..., Any], *shapes: Sequence[int]) -> Callable[[], None]:
        inputs = [_make(shape, dtype, i).requires_grad_() for i, shape in enumerate(shapes)]
        return lambda: differentiate(lambda: function(*inputs), inputs)

    image = (16, 33, 37, 41)
    flat = (257, 1031)
    yield "conv1d", call(F.conv1d, (64, 33, 301), (31, 33, 3), (31,))
    yield "conv2d", call(F.conv2d, image, (29, 33, 3, 3), (29,))
    yield "conv2d grouped", call(lambda a, b: F.conv2d(a, b, groups=3), image, (30, 11, 3, 3))
    yield "conv2d depthwise", call(lambda a, b: F.conv2d(a, b, groups=33), image, (33, 1, 3, 3))
    yield "conv3d", call(F.conv3d, (4, 5, 17, 19, 21), (7, 5, 3, 3, 3), (7,))
    yield "conv_transpose1d", call(F.conv_transpose1d, (64, 33, 301), (33, 17, 3))
    yield "conv_transpose2d", call(F.conv_transpose2d, image, (33, 17, 3, 3))
    yield "conv_transpose3d", call(F.conv_transpose3d, (4, 5, 17, 19, 21), (5, 7, 3, 3, 3))
    for name in ("LSTM", "GRU", "RNN"):
        torch.manual_seed(0)
        layer = getattr(torch.nn, name)(33, 47, batch_first=True).to(dtype)
        for shape in ((64, 29, 33), (513, 7, 33)):
            yield f"{name} {shape}", call(lambda a, layer=layer: layer(a)[0], shape)
    weight = (1031,)
    bias = (1031,)
    yield "layer_norm", call(lambda a, b, c: F.layer_norm(a, (1031,), b, c), flat, weight, bias)
    yield "rms_norm", call(lambda a, b: F.rms_norm(a, (1031,), b), flat, weight)
    yield "group_norm", call(lambda a, b, c: F.group_norm(a, 3, b, c), image, (33,), (33,))
    yield "instance_norm", call(F.instance_norm, image)
    for order in (torch.contiguous_format, torch.channels_last):

        def normalize(
            a: torch.Tensor,
            b: torch.Tensor,
            c: torch.Tensor,
            order: torch.memory_format = order,
        ) -> torch.Tensor:
            return F.batch_norm(a.contiguous(memory_format=order), None, None, b, c, True)

        yield f"batch_norm {order}", call(normalize, image, (33,), (33,))
    for dim in (0, 1):
        for name in ("softmax", "log_softmax"):
            function = getattr(F, name)
            yield f"{name} {dim}", call(lambda a, f=function, d=dim: f(a, d), flat)
        for name in ("sum", "mean", "prod", "var", "norm", "logsumexp", "cumsum", "amax"):
            function = getattr(torch, name)
            yield f"{name} {dim}", call(lambda a, f=function, d=dim: f(a, dim=d), flat)
    for name in ("sum", "mean", "prod", "var", "norm", "std", "nansum"):
        for whole in (flat, (1_000_003,), (3, 400_001)):
            function = getattr(torch, name)
            yield f"{name} of all {whole}", call(lambda a, f=function: f(a), whole)
    yield "dot", call(lambda a, b: a.flatten() @ b.flatten(), flat, flat)
    yield "mv", call(lambda a, b: a @ b, (2053, 1031), (1031,))
    yield (
        "cross_entropy",
        call(
            lambda a: F.cross_entropy(a, torch.arange(4096) % 101, label_smoothing=0.1), (4096, 101)
        ),
    )
    yield "mse", call(F.mse_loss, flat, flat)
    yield "bce", call(lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()), flat, flat)
    yield "smooth_l1", call(F.smooth_l1_loss, flat, flat)
    yield "sdpa", call(F.scaled_dot_product_attention, *[(8, 4, 129, 33)] * 3)
    yield (
        "sdpa causal",
        call(
            lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True),
            *[(8, 4, 129, 33)] * 3,
        ),
    )
    words = torch.randint(5000, (64, 301), generator=torch.Generator().manual_seed(0))
    yield "embedding", call(lambda a: F.embedding(words, a), (5000, 67))
    yield "embedding_bag", call(lambda a: F.embedding_bag(words, a), (5000, 67))
    yield "interpolate", call(lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), image)
    yield (
        "interpolate cubic",
        call(lambda a: F.interpolate(a, scale_factor=2, mode="bicubic"), image),
    )
    yield "dropout", call(lambda a: F.dropout(a, 0.3), flat)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam"):
        yield f"optimizer {name}", functools.partial(_optimize, name, dtype)


def _optimize(name: str, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(_make((257, 1031), dtype))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    for step in range(2):
        weight.grad = _make((257, 1031), dtype, step + 1)
        optimizer.step()


# ---- the comparison ----


def compare(cases: Iterator[Case], threads: Sequence[int], found: dict[str, Any]) -> None:
    """Compute cases; note the operators that differ, with the first case that shows it."""
    while True:
        try:
            case = next(cases, None)
        except Exception as error:  # the database may not support a size
            found["failed"]["samples"] = f"{type(error).__name__}: {error}"[:120]
            return
        if case is None:
            return
        name, function = case
        comparison = ThreadComparison(threads)
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings(), comparison:
                warnings.simplefilter("ignore")
                function()
        except Exception as error:
            found["failed"][name[:80]] = f"{type(error).__name__}: {error}"[:120]
        found["compared"] = sorted(comparison.compared.union(found["compared"]))
        for operator, others in comparison.differing.items():
            found["differing"].setdefault(operator, [sorted(others), name[:100]])


class _Late(BaseException):
    """The time for an entry is over."""


def _raise_late(signum: int, frame: object) -> None:
    raise _Late


def _compute(numbers: Sequence[int], entries: Sequence[Any], options: Any, connection: Any) -> None:
    """Compare entries, and send the results of each; -1 stands for the layers."""
    import lockstep

    lockstep.init(portable=True)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, most))
    signal.signal(signal.SIGALRM, _raise_late)
    for number in numbers:
        for name in options.dtypes:
            dtype = getattr(torch, name)
            if number >= 0 and dtype not in entries[number].supported_dtypes("cpu"):
                continue
            cases = (
                find_layers(dtype)
                if number < 0
                else find_cases(entries[number], dtype, options.samples)
            )
            found: dict[str, Any] = {"compared": [], "differing": {}, "failed": {}}
            signal.alarm(SECONDS * (10 if number < 0 else 1))
            try:
                compare(cases, options.threads, found)
            except _Late:
                found["failed"][f"entry {number}"] = "not in time"
            finally:
                signal.alarm(0)
            connection.send((number, name, found))
        connection.send((number, "", {}))


def enumerate_operators(options: Any) -> dict[str, Any]:
    """Compare all entries of the database, or those with some names."""
    entries = load_database()
    labels = {-1: "layers"} | {i: entry.formatted_name for i, entry in enumerate(entries)}
    numbers = [number for number in labels if not options.names or labels[number] in options.names]
    context = multiprocessing.get_context("fork")
    total: dict[str, Any] = {"compared": {}, "differing": {}, "failed": {}}
    while numbers:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_compute, args=(numbers, entries, options, sender))
        process.start()
        sender.close()
        try:
            while numbers:
                number, dtype, found = receiver.recv()
                if not dtype:
                    numbers.remove(number)
                    continue
                _add(total, labels[number], dtype, found)
        except EOFError:
            total["failed"][labels[numbers.pop(0)]] = "the process has crashed"
        process.join()
    return total


def _add(total: dict[str, Any], label: str, dtype: str, found: Mapping[str, Any]) -> None:
    for operator in found["compared"]:
        total["compared"].setdefault(operator, {})[dtype] = True
    for operator, (threads, case) in found["differing"].items():
        known = total["differing"].setdefault(operator, {})
        if dtype not in known:
            print(f"{operator} {dtype}: {threads}, {case}", flush=True)
        known.setdefault(dtype, [threads, case])
    for case, reason in found["failed"].items():
        total["failed"][f"{label} {dtype}: {case}"] = reason


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--names", nargs="+", default=())
    parser.add_argument("--samples", type=int, default=SAMPLES)
    options = parser.parse_args()
    missing = find_missing_variables(os.environ, OF_TORCH)  # which the database would read
    if missing or "OMP_WAIT_POLICY" not in os.environ:
        # Otherwise threads that wait use the cores of those that compute. torch has read it.
        environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **missing}
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)
    total = enumerate_operators(options)
    print(f"{len(total['compared'])} operators were compared; differing:")
    for name in sorted(total["differing"]):
        print(f"  {name}: {', '.join(total['differing'][name])}")
    print(f"{len(total['failed'])} cases failed")
    if options.out:
        options.out.write_text(json.dumps(total, indent=1))


if __name__ == "__main__":
    main()
