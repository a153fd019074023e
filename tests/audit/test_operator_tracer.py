"""The operator tracer: what it records of each kind of operator, and that it changes nothing."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.audit.operator_call import OperatorCall
from lockstep.audit.operator_tracer import OperatorTracer
from lockstep.checksum import checksum


def trace(
    body: Callable[[], Any], model: nn.Module | None = None, keep: int | None = None
) -> OperatorTracer:
    """Return the tracer after `body` ran as the forward pass of micro-batch 3."""
    tracer = OperatorTracer({} if model is None else {"": model}, keep)
    with tracer.tracing("forward", lambda: (3, 0)):
        body()
    return tracer


def calls_of(body: Callable[[], Any], model: nn.Module | None = None) -> list[OperatorCall]:
    """Return what `body` called, without the views."""
    return [each for each in trace(body, model).calls if each.outputs]


def only(calls: list[OperatorCall], operator: str) -> OperatorCall:
    (found,) = [each for each in calls if each.operator == operator]
    return found


def line_of(function: Callable[..., Any], offset: int) -> str:
    """Return how the tracer names a line of a function of this file."""
    first = inspect.getsourcelines(function)[1]
    return f"test_operator_tracer.py:{first + offset} in {function.__name__}"


# --- what is read and written ----------------------------------------------------------------


def test_inputs_outputs_and_arguments_of_a_call():
    a = torch.arange(6.0).view(2, 3)
    b = torch.ones(2, 3)
    (call,) = calls_of(lambda: torch.add(a, b, alpha=2))
    assert (call.operator, call.phase, call.microbatch) == ("aten.add.Tensor", "forward", 3)
    assert call.inputs == (checksum(a), checksum(b))
    assert call.outputs == (checksum(a + 2 * b),)
    assert call.arguments == "alpha=2"
    assert (call.input_types, call.output_types) == (("float32[2, 3]",) * 2, ("float32[2, 3]",))
    assert (call.generator, call.producers) == ((0, 0), (-1, -1))
    (call,) = calls_of(lambda: torch.cat([a, b], dim=1))
    assert (call.inputs, call.arguments) == ((checksum(a), checksum(b)), "dim=1")
    (call,) = calls_of(lambda: a.argmax().item())[1:]
    assert (call.operator, call.output_types) == ("aten._local_scalar_dense", ("int",))
    assert call.outputs != calls_of(lambda: a.argmin().item())[1].outputs


def test_an_operator_in_place_reads_and_writes():
    a = torch.arange(3.0)
    before = checksum(a)
    (call,) = calls_of(lambda: a.mul_(2))
    assert (call.inputs, call.outputs) == ((before,), (checksum(a),))
    (call,) = calls_of(lambda: a.copy_(torch.ones(())))[1:]  # its own values do not matter
    assert (call.operator, call.inputs) == ("aten.copy_", (checksum(torch.ones(())),))
    out = torch.full((3,), 7.0)
    (call,) = calls_of(lambda: torch.add(a, 1, out=out))
    assert (call.inputs, call.outputs) == ((checksum(a),), (checksum(out),))
    grid = torch.zeros(2, 3)
    row = checksum(grid[0])
    (call,) = calls_of(lambda: grid[0].add_(1))
    assert (call.inputs, call.outputs) == ((row,), (checksum(torch.ones(3)),))


def test_running_statistics_are_outputs_though_the_schema_does_not_say_so():
    norm = nn.BatchNorm1d(3)
    data = torch.randn(4, 3)
    call = only(calls_of(lambda: norm(data), norm), "aten.native_batch_norm")
    assert call.output_types[-2:] == ("running_mean: float32[3]", "running_var: float32[3]")
    assert call.outputs[-2:] == (checksum(norm.running_mean), checksum(norm.running_var))
    assert call.inputs[3] != call.outputs[3]


@pytest.mark.usefixtures("world_of_one")
def test_memory_that_was_never_written_is_the_same_every_time():
    recurrent = nn.LSTM(3, 4)

    def body() -> None:
        torch.manual_seed(0)
        a = torch.empty(2, 3)
        a[0].copy_(torch.ones(3))  # a part of it
        a.new_empty(50).uniform_().sum()
        torch.cat([a, torch.empty_like(a)]).sum()
        recurrent(torch.ones(2, 1, 3))[0].sum().backward()  # whose workspace is written in part
        recurrent.zero_grad()

    with torch.random.fork_rng():
        first = trace(body).calls
        used = [torch.randn(length) for length in range(1, 400)]
        del used  # memory that the second call may get
        assert trace(body).calls == first
    assert not torch.utils.deterministic.fill_uninitialized_memory


# --- random numbers --------------------------------------------------------------------------


# --- where it was called -----------------------------------------------------------------------


def test_hooks_and_the_sum_of_gradients_belong_to_their_parameter():
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    data = torch.randn(5, 3)

    def write(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    network[1].weight.register_post_accumulate_grad_hook(write)
    network(data).sum().backward()
    calls = calls_of(lambda: network(data).sum().backward(), network)
    scaled = only(calls, "aten.mul_.Tensor")
    assert (scaled.phase, scaled.unit, scaled.source) == ("backward", "1", line_of(write, 1))
    assert {each.unit for each in calls if each.operator == "aten.add_.Tensor"} == {"0", "1"}


# --- kinds of tensors and programs ---------------------------------------------------------------


def embed() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 2, 1])).sum().backward()
    torch.optim.SparseAdam(embedding.parameters()).step()


def transform() -> None:
    matrices = torch.arange(12.0).view(3, 2, 2)
    torch.func.vmap(lambda a: a @ a)(matrices)
    torch.func.grad(lambda a: (a * a).sum())(matrices)
    torch.func.vmap(torch.func.jacrev(torch.sin))(matrices)


def step_all(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.ones(n)) for n in (1, 3)]
    for each in parameters:
        each.grad = torch.full_like(each, 0.1)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind(parameters, lr=0.1, **options).step()


def nest() -> None:
    parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    (parts * 2).values().sum()


class Doubling(TorchDispatchMode):
    """A mode of the user's own, which calls another operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add instead of multiplying by 2."""
        if func is torch.ops.aten.mul.Tensor:
            return torch.ops.aten.add.Tensor(args[0], args[0])
        return func(*args, **(kwargs or {}))


def double() -> None:
    with Doubling():
        torch.ones(3) * 2


def offload() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()):
        torch.ones(3, requires_grad=True).exp().sum().backward()


PROGRAMS: dict[str, Callable[[], Any]] = {
    "expanded": lambda: (torch.ones(3, 1).expand(3, 4) + 1).sum(),
    "transposed": lambda: (torch.arange(6.0).view(2, 3).t() * 2).contiguous(),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16) * 2,
    "complex": lambda: torch.fft.fft(torch.arange(4.0)).conj() * 1j,
    "no elements": lambda: torch.ones(0, 3).sum(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(nn.Linear(3, 2))(torch.ones(1, 3)),
    "sparse gradients": embed,
    "vmap and grad": transform,
    "foreach": partial(step_all, {"foreach": True}),
    "fused": partial(step_all, {"fused": True}),
    "one by one": partial(step_all, {"foreach": False}),
    "jagged": nest,
    "data": lambda: next(iter(torch.utils.data.DataLoader([1.0, 2.0], batch_size=2))) * 2,
    "inference": lambda: torch.inference_mode()(lambda: torch.ones(2) * 2)(),
    "a mode of the user's own": double,
    "hooks on saved tensors": offload,
    "meta": lambda: torch.ones(3, device="meta") * 2,
}


def test_an_operator_of_the_user_says_what_it_writes():
    with torch.library._scoped_library("lockstep_tests", "FRAGMENT"):

        @torch.library.custom_op("lockstep_tests::count", mutates_args={"seen"})
        def count(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            seen.add_(x.sum())
            return x * 2

        x = torch.ones(3)
        seen = torch.zeros(())
        (call,) = [each for each in calls_of(lambda: count(x, seen)) if "count" in each.operator]
        assert call.operator == "lockstep_tests.count"
        assert call.inputs == (checksum(x), checksum(torch.zeros(())))
        assert call.outputs == (checksum(x * 2), checksum(torch.tensor(3.0)))


def test_foreach_operators_name_each_parameter():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    tracer = OperatorTracer({"": model})
    with tracer.tracing("optimizer"):
        optimizer.step()
    (call,) = tracer.calls
    assert (call.operator, call.phase, call.microbatch) == (
        "aten._foreach_add_.List",
        "optimizer",
        None,
    )
    assert call.output_types == ("weight: float32[2, 3]", "bias: float32[2]")
    assert call.outputs == (checksum(model.weight), checksum(model.bias))
    assert call.arguments == "alpha=-0.5"


def test_tensors_of_one_call_are_kept():
    a = torch.arange(3.0)
    tracer = trace(lambda: (a + 1).mul_(3).sum(), keep=1)
    assert tracer.calls[1].operator == "aten.mul_.Tensor"
    assert [each.tolist() for each in tracer.kept.inputs] == [[1, 2, 3]]
    assert [each.tolist() for each in tracer.kept.outputs] == [[3, 6, 9]]
    tracer = OperatorTracer({}, keep=0)
    tracer.record_data(2, (a, {"labels": a + 1}))
    (call,) = tracer.calls
    assert (call.operator, call.phase, call.microbatch) == ("data", "data", 2)
    assert call.outputs == (checksum(a), checksum(a + 1))
    assert [each.tolist() for each in tracer.kept.outputs] == [[0, 1, 2], [1, 2, 3]]


def test_no_other_tensor_is_kept_alive():
    seen: list[weakref.ref[torch.Tensor]] = []

    def body() -> None:
        for _ in range(10):
            seen.append(weakref.ref(torch.ones(100) + 1))

    tracer = trace(body)
    gc.collect()
    assert [each() for each in seen] == [None] * 10
    assert len(tracer.calls) == 20


def test_an_error_passes_and_leaves_the_calls_before_it():
    tracer = OperatorTracer({})
    with pytest.raises(RuntimeError, match="mat1 and mat2"), tracer.tracing("forward"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert [each.operator for each in tracer.calls] == ["aten.ones", "aten.ones"]
    torch.ones(3)
    assert len(tracer.calls) == 2
