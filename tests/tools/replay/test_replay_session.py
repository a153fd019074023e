"""Replay sessions in this process: recording the operators of a step changes no bit of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.audit.operator_difference import first_operator_difference
from lockstep.audit.operator_tracer import OperatorTracer
from lockstep.launcher.launch import launch_in_this_process
from lockstep.tools.replay.replay_session import ReplaySession
from lockstep.tools.replay.result import Level, ReplayedStep, ReplayRequest
from lockstep.training.session import SessionComplete, open_session
from models import Branches, Words, blocks, picture_batches, pictures, row_batches, word_batches

pytestmark = pytest.mark.usefixtures("world_of_one")
STEPS = 3


def replayed(
    train: Callable[[], Any], level: Level = "operators", first: int = 1
) -> list[ReplayedStep]:
    """Return the last steps of a program, as a replay of it in this process records them."""
    steps: list[ReplayedStep] = []
    request = ReplayRequest(Path(), first, STEPS - 1, level=level)
    session = ReplaySession(request, (None, 0), None, steps.append)
    torch.manual_seed(0)
    with open_session(session), pytest.raises(SessionComplete):
        train()
    return steps


@pytest.mark.parametrize("wanted", [(0, 0), (1, 0), (1, 1), (None, 0)])
def test_each_call_of_launch_has_its_own_trainers(wanted):
    def train(*seeds: int) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            options: dict[str, Any] = {"microbatches": 4, "seed": seed, "loggers": None}
            trainer = ls.Trainer(Words(), nn.CrossEntropyLoss(), SGD, **options)
            for batch in word_batches([11, 8, 8]):
                trainer.step(batch)

    steps: list[ReplayedStep] = []
    request = ReplayRequest(Path(), 1, STEPS - 1)
    session = ReplaySession(request, wanted, None, steps.append)

    def run_program() -> None:
        ls.launch(train, (1,))
        ls.launch(train, (2, 3))
        train(4)

    with open_session(session), launch_in_this_process(), pytest.raises(SessionComplete):
        run_program()
    seed = {(0, 0): 1, (1, 0): 2, (1, 1): 3, (None, 0): 4}[wanted]
    assert steps == replayed(partial(train, seed), "result")


class Attention(nn.Module):
    """Attention without dropout takes another kernel than with it; a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.recurrent = nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, 13)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        values = self.embed(words)
        query = values.unsqueeze(1)
        values = F.scaled_dot_product_attention(query, query, query, is_causal=True)[:, 0]
        values = self.attention(values, values, values, need_weights=False)[0]
        return self.head(self.recurrent(values)[0].mean(dim=1))


class Scaled(nn.Module):
    """A hook that writes to the gradient, a sparse gradient, a function of functorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, sparse=True)
        self.head = nn.Linear(6, 13)
        self.head.weight.register_post_accumulate_grad_hook(self._halve)

    @staticmethod
    def _halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return torch.func.vmap(lambda row: self.head(row.mean(dim=0)))(self.embed(words))


ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

TRAININGS: dict[str, tuple[Callable[[], nn.Module], Any, Any, dict[str, Any]]] = {
    "pictures": (pictures, picture_batches, SGD, {}),
    "clipped, averaged": (
        pictures,
        picture_batches,
        ADAM,
        {"max_grad_norm": 0.1, "ema_decay": 0.9},
    ),
    "bfloat16": (pictures, picture_batches, ADAM, {"autocast_dtype": torch.bfloat16}),
    "float16": (pictures, picture_batches, ADAM, {"autocast_dtype": torch.float16}),
    "words": (Words, word_batches, partial(ADAM, foreach=True), {}),
    "attention": (Attention, word_batches, partial(ADAM, fused=True), {}),
    "branches": (Branches, row_batches, SGD, {}),
    "sparse": (Scaled, word_batches, partial(torch.optim.SGD, lr=0.1), {}),
    "recomputed": (blocks, row_batches, SGD, {"activation_checkpointing": True}),
}


def train_by_name(name: str, change: Change | None = None) -> None:
    """Run a training of TRAININGS, with a change or as it is."""
    make, batches, optimizer, options = TRAININGS[name]
    model = make()
    if change is not None:
        change.edit(model)
        options = options | change.options
        optimizer = change.optimizer or optimizer
    options = {"microbatches": 4, "seed": 7, "loggers": None} | options
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), optimizer, **options)
    for batch in batches([11, 8, 8]):
        if change is not None:
            change.between(trainer)
        trainer.step(batch)


@cache
def traced_steps(name: str) -> list[ReplayedStep]:
    """Return all steps of a training, replayed once for all tests."""
    return replayed(partial(train_by_name, name), first=0)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_traced_step_has_the_same_bits(name):
    train = partial(train_by_name, name)
    traced = traced_steps(name)[1:]
    again = replayed(train)
    plain = replayed(train, "result")
    assert [(each.loss, each.norm, each.digest) for each in traced] == [
        (each.loss, each.norm, each.digest) for each in plain
    ]
    for each, other in zip(traced, again, strict=True):
        assert each.operators == other.operators
        assert first_operator_difference(each.operators, other.operators) is None
        places = list(dict.fromkeys((call.phase, call.microbatch) for call in each.operators))
        for microbatch in range(4):
            parts = [phase for phase, of in places if of == microbatch]
            rest = [each for each in parts if each != "forward"]
            assert rest in (["data", "backward", "reduction"], ["data", "backward"])
        assert places[-2:] == [("reduction", None), ("optimizer", None)]
    assert not plain[0].operators


def masked(mask: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    def compute(x: torch.Tensor) -> torch.Tensor:
        torch.tensor(next(NUMBERS))  # such as a time, which nothing reads
        return x * torch.tensor(mask)

    return compute


def scattered(rows: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def compute(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(3, 3)
        out[torch.arange(3) * rows[0] + rows[1]] = x
        return out * torch.arange(9.0).view(3, 3)

    return compute


def partly(operator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def compute(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(7, 3)
        operator(x, 1, out=out[:3])
        out[3:6].copy_(x)  # overwrites another part
        return out[:6].exp()

    return compute


def unsqueezed(factor: float | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def compute(x: torch.Tensor) -> torch.Tensor:
        return (x if factor is None else (x[..., None] * factor).squeeze(-1)).exp()

    return compute


NUMBERS = count()

FUNCTIONS = {
    "a constant": (masked([1.0, 0.0, 1.0]), masked([1.0, 0.0, 0.0]), "output", "aten.lift_fresh"),
    "indices of a write to empty memory": (
        scattered([1, 0]), scattered([-1, 2]), "arguments", "aten.mul.Tensor"
    ),
    "what is written to a part": (partly(torch.add), partly(torch.sub), "call", "aten.sub.out"),
    "an operator behind a view": (unsqueezed(None), unsqueezed(2.0), "call", "aten.mul.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_made_the_values_that_an_operator_reads(name):
    first, second, kind, operator = FUNCTIONS[name]
    calls = []
    for compute in (first, second, first):
        tracer = OperatorTracer({})
        with tracer.tracing("forward"):
            compute(torch.arange(9.0).view(3, 3))
        calls.append(tracer.calls)
    a, b, again = calls
    found = first_operator_difference(a, b)
    assert found is not None
    assert found.b is not None
    assert (found.kind, b[found.b].operator) == (kind, operator)
    assert first_operator_difference(a, again) is None


@dataclass(frozen=True)
class Change:
    """One change of a training, and the operator that makes the first difference.

    Attributes:
        training: The training, from TRAININGS.
        kind: As `OperatorDifference` has it.
        phase: As `OperatorCall` has it.
        operator: The operator, in the changed training where it has one there.
        unit: The module; "" outside of modules.
        microbatch: The micro-batch; None between them.
        options: Other options of the trainer.
        optimizer: Another optimizer.
        edit: Changes the model.
        between: Called before each step with the trainer.
        step: The step, before which both trainings are equal.
    """

    training: str
    kind: str
    phase: str
    operator: str
    unit: str = ""
    microbatch: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    edit: Callable[[nn.Module], None] = lambda model: None
    between: Callable[[ls.Trainer], None] = lambda trainer: None
    step: int = 0


def scale_gradient(path: str) -> Callable[[nn.Module], None]:
    """Return an edit that multiplies the gradient of a module's output by 1.001."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 1.001)

    return lambda model: model.get_submodule(path).register_forward_hook(hook) and None


def count_twice(model: nn.Module) -> None:
    """Update the statistics of the first batch norm twice."""

    def hook(module: Any, args: Any) -> None:
        module.running_mean.mul_(0.9)

    model[1].register_forward_pre_hook(hook)


def write_weight(trainer: ls.Trainer) -> None:
    """Write a weight without torch's knowledge, before the second step."""
    if trainer.steps == 1:
        trainer.module.get_parameter("head.bias").detach().numpy()[3] += 1.0


CHANGES = {
    "a wrong gradient": Change(
        "attention", "call", "backward", "aten.mul.Tensor", "recurrent", 0,
        edit=lambda model: model.recurrent.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 1.001,)
        ) and None,
    ),
    "a wrong gradient in a part that is recomputed": Change(
        "recomputed", "call", "backward", "aten.mul.Tensor", "0.inner.2", 0,
        edit=scale_gradient("0"),
    ),
    "statistics updated twice": Change(
        "bfloat16", "call", "forward", "aten.mul_.Tensor", "1", 0, edit=count_twice
    ),
    "another precision": Change(
        "pictures", "call", "forward", "aten._to_copy", "0", 0,
        options={"autocast_dtype": torch.bfloat16},
    ),
    "another limit of the norm": Change(
        "clipped, averaged", "arguments", "reduction", "aten.mul_.Tensor",
        options={"max_grad_norm": 0.2},
    ),
    "another decay of the average": Change(
        "clipped, averaged", "arguments", "optimizer", "aten._foreach_lerp_.Scalar",
        options={"ema_decay": 0.8}, step=1,  # the first one copies the weights
    ),
    "another option, foreach": Change(
        "words", "arguments", "optimizer", "aten._foreach_add_.Scalar",
        optimizer=partial(ADAM, foreach=True, eps=1e-6),
    ),
    "another option, fused": Change(
        "attention", "arguments", "optimizer", "aten._fused_adamw_",
        optimizer=partial(ADAM, fused=True, weight_decay=0.1),
    ),
    "a weight written from outside": Change(
        "attention", "input", "forward", "aten.addmm", "head", 0, between=write_weight, step=1
    ),
    "another seed": Change(
        "words", "generator", "forward", "aten.bernoulli_.float", "block.self_attn", 0,
        options={"seed": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_operator_that_makes_the_first_difference_is_named(name):
    change = CHANGES[name]
    changed = partial(train_by_name, change.training, change)
    a = traced_steps(change.training)[change.step].operators
    b = replayed(changed, first=change.step)[0].operators
    found = first_operator_difference(a, b)
    assert found is not None
    call = b[found.b] if found.b is not None else a[found.a]
    got = (found.kind, call.phase, call.operator, call.unit, call.microbatch)
    assert got == (change.kind, change.phase, change.operator, change.unit, change.microbatch)


class Gated(nn.Module):
    """A part to be compiled, with batch norm and dropout, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Dropout(0.3))
        self.head = nn.Linear(9, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.body(rows))


def train_compiled(backend: Any) -> None:
    model = Gated()
    model.body = torch.compile(model.body, backend=backend)
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), ADAM, microbatches=4, loggers=None)
    for batch in row_batches([8, 8, 8]):
        trainer.step(batch)


def test_a_compiled_module_stays_compiled():
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            counts[-1] += 1
            return graph(*args)

        graphs.append(graph)
        return run

    counts: list[int] = []
    found = []
    for level in ("result", "operators"):
        torch._dynamo.reset()
        counts.append(0)
        found.append(replayed(partial(train_compiled, compiler), level))
    assert counts == [12, 12]
    plain, traced = ([(each.norm, each.digest) for each in steps] for steps in found)
    assert plain == traced


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own
def test_a_graph_of_inductor_is_one_operator(monkeypatch):
    import torch._inductor.config as config

    monkeypatch.setattr(config, "wrap_inductor_compiled_regions", False)
    monkeypatch.setattr(config, "compile_threads", 1)  # in this process
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread of inductor's progress
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which inductor sets
    found = {}
    for level in ("result", "operators"):
        torch._dynamo.reset()
        found[level] = replayed(partial(train_compiled, "inductor"), level)
    for plain, traced in zip(found["result"], found["operators"], strict=True):
        assert (plain.norm, plain.digest) == (traced.norm, traced.digest)
        first = [
            each
            for each in traced.operators
            if (each.microbatch, each.operator) == (0, "inductor_compiled_code")
        ]
        assert [(each.phase, each.unit) for each in first] == [
            ("forward", "body"),
            ("backward", "body"),
        ]
        forward, backward = first
        assert forward.input_types[0] == "body.0.weight: float32[9, 6]"
        assert forward.source.startswith(Path(__file__).name)
        assert "in forward" in forward.source
        # Batch norm's buffers are written in place, and its counter.
        assert {"float32[9]", "int64[]"} <= {*forward.output_types}
        assert forward.generator[0] != forward.generator[1]
        assert backward.output_types[0] == "float32[9, 6]"
        own = [each for each in traced.operators if each.unit.startswith("body")]
        assert len(own) == 8
