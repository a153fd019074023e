"""Replay sessions in this process: recording the operators of a step changes no bit of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.replay.operator_difference import first_operator_difference
from lockstep.replay.result import Level, ReplayedStep, ReplayRequest
from lockstep.replay.session import ReplaySession
from lockstep.training.session import SessionComplete, open_session
from models import Branches, Words, blocks, picture_batches, pictures, row_batches, word_batches

pytestmark = pytest.mark.usefixtures("world_of_one")
STEPS = 3


def replayed(
    train: Callable[[], Any], level: Level = "operators", kept: int | None = None
) -> list[ReplayedStep]:
    """Return the last steps of a program, as a replay of it in this process records them."""
    steps: list[ReplayedStep] = []
    request = ReplayRequest(Path(), 1, STEPS - 1, level=level, kept=kept)
    session = ReplaySession(request, 0, None, steps.append, lambda count: None)
    torch.manual_seed(0)
    with open_session(session), pytest.raises(SessionComplete):
        train()
    return steps


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
    "words": (Words, word_batches, partial(ADAM, foreach=True), {}),
    "attention": (Attention, word_batches, partial(ADAM, fused=True), {}),
    "branches": (Branches, row_batches, SGD, {}),
    "sparse": (Scaled, word_batches, partial(torch.optim.SGD, lr=0.1), {}),
    "recomputed": (blocks, row_batches, SGD, {"activation_checkpointing": True}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_traced_step_has_the_same_bits(name):
    make, batches, optimizer, options = TRAININGS[name]

    def train() -> None:
        trainer = ls.Trainer(
            make(),
            nn.CrossEntropyLoss(),
            optimizer,
            microbatches=4,
            seed=7,
            loggers=None,
            **options,
        )
        for batch in batches([11, 8, 8]):
            trainer.step(batch)

    traced, again, plain = replayed(train), replayed(train), replayed(train, "result")
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
        assert forward.source.startswith("test_session.py")
        assert "in forward" in forward.source
        # Batch norm's buffers are written in place, and its counter.
        assert {"float32[9]", "int64[]"} <= {*forward.output_types}
        assert forward.generator[0] != forward.generator[1]
        assert backward.output_types[0] == "float32[9, 6]"
        own = [each for each in traced.operators if each.unit.startswith("body")]
        assert len(own) == 8
