"""The composition: which forwards are proven to call their blocks one after another."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.kernel.errors import LayoutError, LockstepError
from lockstep.pipeline.composition import Composition

SGD = partial(torch.optim.SGD, lr=0.1)
BATCH = (torch.arange(32.0).reshape(8, 4) % 7 - 3, torch.arange(8) % 4)


class Chain(nn.Module):
    """Calls its layers with `around`, a function of a layer and its input."""

    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])
        self.around = around
        self.is_short = False

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        for layer in self.layers[: 2 if self.is_short else 3]:
            x = layer(x) if self.around is None else self.around(layer, x)
        return x


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def within(context: Callable[[], Any]) -> Callable[..., Any]:
    def around(layer, x):
        with context():
            return layer(x)

    return around


def hooked(layer, x):
    x = layer(x)
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def skipped(draw: Callable[[], Any]) -> Callable[..., Any]:
    return lambda layer, x: x if draw() < 0 else layer(x)


def swallowed(layer, x):
    try:
        x = x * 2
    except Exception:
        return layer(x)
    return layer(x)


def remembered(layer, x):
    layer.seen = x
    return layer(x)


def frozen(layer, x):
    layer.eval()
    x = layer(x)
    layer.train()
    return x


CALLS: list[int] = []
GENERATOR = random.Random(0)


def counted(layer, x):
    CALLS.append(1)
    return layer(x)


def marked(layer, x):
    x.scale = 2
    return layer(x)


AROUND = {
    "calls torch.nn.functional.dropout": lambda layer, x: F.dropout(layer(x), 0.5),
    "calls torch.Tensor.mul": lambda layer, x: layer(x) * 1.0,
    "calls torch.Tensor.detach": lambda layer, x: layer(x).detach(),
    "calls torch.Tensor.view_as": lambda layer, x: Reversed.apply(layer(x)),
    "calls torch.Tensor.register_hook": hooked,
    "calls torch.Tensor.requires_grad_": lambda layer, x: layer(x.requires_grad_()),
    "calls torch.Tensor.gt": lambda layer, x: layer(x / 4 if (x > 4).any() else x),
    "calls torch.Tensor.shape": lambda layer, x: layer(x[:99] if x.shape[0] > 99 else x),
    "calls torch.nn.functional.linear": lambda layer, x: layer.forward(x),
    "calls torch.rand": skipped(lambda: torch.rand(())),
    "draws random numbers": skipped(random.random),
    "changes GENERATOR": skipped(lambda: GENERATOR.random()),
    "calls torch.Tensor.mul (": swallowed,
    "with another grad_mode": within(torch.no_grad),
    "with another autocast": within(partial(torch.autocast, "cpu")),
    "with another pair of saved tensor hooks": within(torch.autograd.graph.save_on_cpu),
    "with another backend of scaled": within(partial(sdpa_kernel, SDPBackend.MATH)),
    "changes block layers.0 before": remembered,
    "changes block layers.0 before it": frozen,
    "changes CALLS[0]": counted,
    "does not pass the inputs on to block layers.0": marked,
    "calls block layers.0 out of turn": lambda layer, x: layer(layer(x)),
    "does not call block layers.0": lambda layer, x: x,
    "raises ValueError": lambda layer, x: int("none"),
}


INPUTS = (torch.ones(2, 4),)


def check(model: nn.Module, outputs: Any = None, data: Any = INPUTS) -> Composition:
    names = [name for name, _ in model.named_modules() if name.count(".") == 1]
    composition = Composition(model, names or ["0", "1"], outputs, torch.device("cpu"))
    composition.check(data)
    return composition


@pytest.mark.parametrize("said", AROUND)
def test_what_forward_does_around_its_blocks_is_refused_by_name(said):
    CALLS.clear()
    with pytest.raises(LayoutError) as raised:
        check(Chain(AROUND[said]))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "around",
    [
        None,
        within(torch.enable_grad),
        within(partial(torch.profiler.record_function, "layer")),
        lambda layer, x: checkpoint(layer, x, use_reentrant=False),
        lambda layer, x: nn.Identity()(layer(input=x)),
    ],
)
def test_forwards_that_only_call_their_blocks_are_accepted(around):
    before = random.getstate()
    model = Chain(around)
    check(model)
    random.setstate(before)
    assert "_compiled_call_impl" not in vars(model.layers[0])
    assert model(torch.ones(2, 4)).requires_grad


class Pair(nn.Module):
    def forward(self, first, second=None):
        return first, second


class Pairs(Chain):
    """Blocks that pass two values, which forward unpacks."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair(), Pair()])
        self.second = second

    def forward(self, first, second=None):
        x = self.layers[0](first, second=second)
        if isinstance(x, tuple):
            one, other = x
        return self.layers[1]((one, {"same": other, "old": second, "none": None}[self.second]))


def test_checkpoints_of_blocks_with_buffers_are_refused():
    """The second forward, which stages leave out, updates batch norm again."""
    model = Chain(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    model.layers[1] = nn.BatchNorm1d(4)
    with pytest.raises(LayoutError, match=r"as torch\.utils\.checkpoint does"):
        check(model)


def test_values_that_forward_unpacks_must_stay_together():
    outputs = [(torch.ones(1), torch.ones(1))] * 2
    for data in ((torch.ones(1), torch.ones(1)), {"first": torch.ones(1), "second": "text"}):
        check(Pairs("same"), outputs, data)
        for second in ("old", "none"):
            with pytest.raises(LayoutError, match=r"output of block layers\.0 on to block layers"):
                check(Pairs(second), outputs, data)


class Halting(nn.Linear):
    is_done = False

    def forward(self, x):
        x = super().forward(x)
        self.is_done = bool(x.sum() > 1e9)
        return x


def test_attributes_that_a_block_assigns_must_not_decide_what_forward_calls():
    model = Chain(lambda layer, x: x if layer.is_done else layer(x))
    model.layers = nn.ModuleList([Halting(4, 4), Halting(4, 4)])
    with pytest.raises(LayoutError, match=r"calls torch\.Tensor\.__bool__"):
        check(model)
    model(torch.ones(2, 4))
    assert model.layers[0].is_done is False


def test_a_forward_that_changes_later_is_refused_then():
    model = Chain()
    composition = check(model)
    for _ in range(4):
        composition.check(INPUTS)
    model.around = skipped(GENERATOR.random)
    with pytest.raises(LayoutError, match="it changes draw"):
        composition.check(INPUTS)
    model.around = None
    model.is_short = True
    with pytest.raises(LayoutError, match=r"does not call block layers\.2"):
        composition.check(INPUTS)
    sequence = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    composition = check(sequence)
    sequence.append(nn.Tanh())
    with pytest.raises(LayoutError, match=r"calls torch\.tanh"):
        composition.check(INPUTS)


def test_hooks_that_no_stage_calls_are_refused_by_name():
    model = Chain()
    model.layers[0].register_forward_hook(lambda *_: None)
    composition = check(model)
    for register, said in (
        (model.register_forward_hook, "Chain has a hook in its forward_hooks"),
        (model.layers.register_forward_pre_hook, "module layers of Chain has a hook"),
        (model.register_full_backward_pre_hook, "Chain has a hook in its backward_pre_hooks"),
        (nn.modules.module.register_module_forward_hook, "_global_forward_hooks"),
    ):
        handle = register(lambda *_: None)
        with pytest.raises(LayoutError, match=said):
            composition.check(INPUTS)
        handle.remove()
        composition.check(INPUTS)


def trained(make, stages=1, change=None, balance=None):
    """Return the results of a step, a change, a step and an evaluation; or the error."""
    torch.manual_seed(1)
    model = make()
    pipeline = ls.PipelineConfig(stages, balance=balance)
    try:
        trainer = ls.Trainer(
            model, F.cross_entropy, SGD, microbatches=4, pipeline=pipeline, loggers=[]
        )
        losses = [trainer.step(BATCH)]
        if change is not None:
            change(model)
        losses.append(trainer.step(BATCH))
        evaluated = trainer.evaluate(list(zip(*BATCH, strict=True)), batch_size=8).loss
        return losses, evaluated, trainer.digest()
    except LockstepError as error:
        return str(error)


class NoisyInEvaluation(Chain):
    def forward(self, x):
        return super().forward(x if self.training else x * 1)


def shorten(model: Any) -> None:
    model.is_short = True


def add_hook(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: output * 2)


def test_every_rank_refuses_what_stages_would_drop(ranks):
    """Dropout between blocks, and hooks of an `nn.Sequential`, were dropped without a word."""
    dropout = partial(Chain, lambda layer, x: F.dropout(layer(x), 0.5))
    sequence = partial(nn.Sequential, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def rank():
        return [
            trained(dropout, stages=2),
            trained(Chain, stages=2, change=shorten),
            trained(sequence, stages=2, balance=[1, 2], change=add_hook),
            trained(NoisyInEvaluation, stages=2),
            trained(Chain, stages=2, balance=[2, 1]),
        ]

    (alone,) = ranks(lambda: trained(Chain), 1)
    for first, later, hook, evaluated, honest in ranks(rank, 2):
        assert "calls torch.nn.functional.dropout" in first
        assert "does not call block layers.2" in later
        assert "Sequential has a hook in its forward_hooks" in hook
        assert "calls torch.Tensor.mul" in evaluated
        assert honest == alone
