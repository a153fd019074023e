"""Gradients of sharded models: what is gathered and trained, and the dtype of their sums."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import LockstepError

MICROBATCHES = 4
SGD = partial(torch.optim.SGD, lr=0.1)


def make_network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def wrap(model: nn.Module, kind: str) -> nn.Module:
    """Shard a model or replicate it.

    Args:
        model: The model.
        kind: "sharded", with blocks, "whole", without, "copies" on two hosts, or "replicated".
    """
    if kind == "replicated":
        return DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    options = {}
    if kind == "copies":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.children() if kind != "whole" else ():
        if next(block.parameters(), None) is not None:
            fully_shard(block, **options)
    fully_shard(model, **options)
    return model


class Loop:
    """A loop with `ls.exact`.

    Attributes:
        within: Called with the number of the micro-batch on this rank, and the moment in it.
    """

    def __init__(self, kind: str, make: Callable[[], nn.Module] = make_network) -> None:
        self.inner = make()
        self.model = wrap(self.inner, kind)
        self.exact = ls.exact(self.model, MICROBATCHES)
        self.optimizer = SGD(self.model.parameters())
        self.within: Callable[[int, str], None] = lambda number, moment: None

    def compute(self) -> None:
        """Compute the micro-batches of a step."""
        for number in range(MICROBATCHES // dist.get_world_size()):
            self.within(number, "before")
            self.exact.begin()
            inputs = torch.randn(2, 6)  # drawn by the micro-batch
            outputs = self.model(inputs)
            self.within(number, "between")
            loss = F.cross_entropy(outputs, torch.tensor([0, 1]))
            self.exact.weigh(loss).backward()

    def take(self) -> None:
        self.compute()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        return ls.digest(self.inner)


# --- what is gathered ----------------------------------------------------------------------------


def evaluate(loop: Loop, has_gradients: bool = False) -> None:
    loop.model.eval()
    with torch.set_grad_enabled(has_gradients):
        loop.model(torch.ones(2, 6))
    loop.model.train()


def halve(loop: Loop) -> None:
    with torch.no_grad():
        for parameter in loop.optimizer.param_groups[0]["params"]:
            parameter.mul_(0.5)


def train_with_evaluations(kind: str) -> list[str]:
    """Return digests of trainings with calls of the model that no backward pass follows."""
    found = []
    for has_gradients in (False, True):
        for moment in ("before the update", "after it", "after it, then the weights change"):
            loop = Loop(kind)
            for _ in range(3):
                loop.compute()
                if moment == "before the update":
                    evaluate(loop, has_gradients)
                loop.update()
                if moment != "before the update":
                    evaluate(loop, has_gradients)
                if moment.endswith("change"):
                    halve(loop)
            found.append(loop.digest())
    return found


@pytest.mark.parametrize(("kind", "n"), [("sharded", 1), ("sharded", 2), ("whole", 2)])
def test_a_call_without_backward_leaves_no_stale_weights(ranks, capfd, kind, n):
    (expected,) = ranks(train_with_evaluations, 1, "replicated")
    assert len({*expected}) == 2
    assert ranks(train_with_evaluations, n, kind) == [expected] * n
    assert "computed a wrong result" not in capfd.readouterr().err  # of an audit


def train_with_calls_and_writes(kind: str) -> list[Any]:
    """Return what nested loops compute that use `model.parameters()` after calls of the model."""
    found: list[Any] = []
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(24, 6, generator=generator), torch.arange(24) % 4)
    for moment in ("before", "within", "complete", "updated"):
        model: Any = make_network()
        called = wrap(model, kind)
        optimizer = SGD(model.parameters())
        exact = ls.exact(called, optimizer, MICROBATCHES, loggers=())

        def call(now: str, moment: str = moment, called: Any = called) -> None:
            if now == moment:
                called(torch.ones(2, 6))  # with gradients, and without backward

        for batch in exact.batches(data, batch_size=8, epoch=0):
            call("before")
            for inputs, targets in batch:
                batch.backward(F.cross_entropy(called(inputs), targets))
                call("within")
            call("complete")
            found.append(exact.clip_grad_norm_(0.1).hex())
            optimizer.step()
            optimizer.zero_grad()
            call("updated")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        found.append(ls.digest(model))
    return found


@pytest.mark.parametrize(("kind", "n"), [("sharded", 1), ("sharded", 2), ("whole", 2)])
def test_a_call_without_backward_leaves_the_shards_in_place(ranks, kind, n):
    (expected,) = ranks(train_with_calls_and_writes, 1, "replicated")
    assert ranks(train_with_calls_and_writes, n, kind) == [expected] * n


def evaluate_after_writes(storage: str) -> list[float]:
    """Return losses of a trainer's model, called by the script, between writes to its weights."""
    torch.manual_seed(0)
    options = {"microbatches": MICROBATCHES, "loggers": (), "storage": storage}
    trainer: Any = ls.Trainer(make_network(), nn.CrossEntropyLoss(), SGD, **options)
    losses = [trainer.step((torch.ones(8, 6), torch.arange(8) % 4))]
    for has_gradients in (True, False, True):
        with torch.set_grad_enabled(has_gradients):
            losses.append(float(trainer.model(torch.ones(2, 6)).sum()))
        with torch.no_grad():
            for parameter in trainer.optimizer.param_groups[0]["params"]:
                parameter.mul_(0.5)
    losses.append(trainer.step((torch.ones(8, 6), torch.arange(8) % 4)))
    return losses


def test_weights_that_a_script_writes_are_those_of_the_next_call(ranks):
    (expected,) = ranks(evaluate_after_writes, 1, "replicated")
    assert ranks(evaluate_after_writes, 2, "sharded") == [expected] * 2


class Dropping(nn.Module):
    """Leaves out one of its layers on one rank."""

    def __init__(self, dropped: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[1] = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6))
        self.dropped = dropped

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if not (dist.get_rank() == 1 and number == self.dropped):
                inputs = layer(inputs)
        return inputs


def drop_a_layer(dropped: int) -> str:
    options = {"pipeline": ls.PipelineConfig(blocks="layers"), "loggers": (), "storage": "sharded"}
    trainer: Any = ls.Trainer(Dropping(dropped), nn.MSELoss(), SGD, **options)
    with pytest.raises(LockstepError) as caught:
        trainer.step((torch.ones(8, 6), torch.ones(8, 6)))
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize(
    ("dropped", "others"),
    [
        (0, "layers.1 while rank 0 is gathering the parameters of layers.0"),
        (2, "layers.1 while rank 0 is gathering the parameters of layers.2"),  # in backward
    ],
)
def test_a_block_that_one_rank_skips_is_named(ranks, dropped, others, backend):
    for said in ranks(partial(drop_a_layer, dropped), 2, backend=backend):
        begin = "DisagreementError: rank 1 is gathering the parameters of "
        assert said.startswith(begin + others), said
        assert "all ranks call the same blocks in the same order" in said


class Viewing(nn.Linear):
    """Returns a view."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).view(-1, 6)


def list_warnings_of_views() -> list[str]:
    options = {"pipeline": ls.PipelineConfig(blocks=["0"]), "loggers": (), "storage": "sharded"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Sequential(Viewing(6, 6), nn.Linear(6, 6))
        trainer: Any = ls.Trainer(model, nn.MSELoss(), SGD, **options)
        trainer.step((torch.ones(8, 6), torch.ones(8, 6)))
    return [str(one.message) for one in caught if "returned a view" in str(one.message)]


def test_one_rank_alone_warns_of_a_block_that_returns_a_view(ranks):
    first, second = ranks(list_warnings_of_views, 2)
    assert first
    assert not second


# --- what is trained -----------------------------------------------------------------------------


def freeze(loop: Loop, is_trained: bool) -> None:
    loop.inner[0].requires_grad_(is_trained)
    loop.inner[2].weight.requires_grad_(is_trained)


def train_with_frozen_steps(kind: str) -> list[str]:
    """Return digests of trainings that freeze and thaw parameters between steps."""
    found = []
    for calls in (None, False, True):  # of the model in between, with gradients or not
        loop = Loop(kind)
        for step in range(5):
            if calls is not None:
                evaluate(loop, calls)
            freeze(loop, step in (1, 4))
            loop.take()
            found.append(loop.digest())
    return found


@pytest.mark.parametrize(
    ("kind", "n"), [("sharded", 1), ("sharded", 2), ("whole", 2), ("copies", 4)]
)
def test_parameters_may_be_frozen_and_thawed_between_steps(ranks, kind, n):
    (expected,) = ranks(train_with_frozen_steps, 1, "replicated")
    assert ranks(train_with_frozen_steps, n, kind) == [expected] * n


def switch_within_a_step(moment: str) -> list[str]:
    """Return what is said if a parameter is frozen in the middle of a step, in both loops."""
    said = []
    loop = Loop("sharded")
    loop.within = lambda number, now: (
        loop.inner[0].requires_grad_(False) if (number, now) == (1, moment) else None
    )
    with pytest.raises(LockstepError) as caught:
        loop.take()
    said.append(str(caught.value))
    torch.manual_seed(0)
    options = {"microbatches": MICROBATCHES, "loggers": (), "storage": "sharded"}
    trainer: Any = ls.Trainer(make_network(), None, SGD, **options)
    with pytest.raises(LockstepError) as caught:
        take_manual_step(trainer, moment)
    said.append(str(caught.value))
    return said


def take_manual_step(trainer: Any, moment: str) -> None:
    batch = torch.ones(8, 6), torch.arange(8) % 4
    with trainer.manual_step() as step:
        for number, (inputs, targets) in enumerate(step.microbatches(batch)):
            if (number, moment) == (1, "before"):
                trainer.module[0].requires_grad_(False)
            outputs = trainer.model(inputs)
            if (number, moment) == (1, "between"):
                trainer.module[0].requires_grad_(False)
            step.backward(F.cross_entropy(outputs, targets))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_parameters_may_not_be_frozen_within_a_step(ranks, moment, n):
    for said in ranks(partial(switch_within_a_step, moment), n):
        for each in said:
            settings = "model.0.weight.requires_grad is False in micro-batch "
            assert settings in each, said


def freeze_on_one_rank() -> str:
    loop = Loop("sharded")
    loop.take()
    loop.inner[2].weight.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(LockstepError) as caught:
        loop.take()
    return str(caught.value)


def test_a_parameter_that_one_rank_alone_freezes_is_refused_on_every_rank(ranks):
    for said in ranks(freeze_on_one_rank, 2):
        assert "the ranks train different parameters of 2 in the same turn" in said


# --- the dtype of sums ---------------------------------------------------------------------------


class Base(nn.Linear):
    """Computes in the dtype of its weight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.to(self.weight.dtype)).float()


class Adapted(nn.Module):
    """Has a frozen base in another dtype beside its trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Base(6, 6).to(torch.bfloat16).requires_grad_(False)
        self.low = nn.Linear(6, 3, bias=False)
        self.high = nn.Linear(3, 6, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(inputs) + self.high(self.low(inputs)))


def make_adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.Linear(6, 4))


def train_adapted(kind: str) -> str:
    loop = Loop(kind, make_adapted)
    for _ in range(3):
        loop.take()
    return loop.digest()


@pytest.mark.parametrize(("kind", "n"), [("sharded", 1), ("sharded", 2), ("copies", 4)])
def test_sums_have_the_dtype_of_the_trained_parameters(ranks, kind, n):
    (expected,) = ranks(train_adapted, 1, "replicated")
    assert ranks(train_adapted, n, kind) == [expected] * n


def train_adapted_by_trainer(storage: str) -> str:
    options = {"microbatches": MICROBATCHES, "loggers": (), "storage": storage}
    adamw = partial(torch.optim.AdamW, lr=0.01)
    trainer: Any = ls.Trainer(make_adapted(), nn.CrossEntropyLoss(), adamw, **options)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        trainer.step((torch.randn(8, 6, generator=draw), torch.arange(8) % 4))
    return trainer.digest() + trainer.optimizer_digest()


@pytest.mark.parametrize("n", [1, 2])
def test_a_frozen_base_in_16_bits_is_sharded_beside_its_adapters(ranks, n):
    """Its shards are cut after 18 elements, which no optimizer steps."""
    (expected,) = ranks(train_adapted_by_trainer, 1, "replicated")
    assert ranks(train_adapted_by_trainer, n, "sharded") == [expected] * n


def thaw_what_cannot_be_cut() -> str:
    options = {"microbatches": MICROBATCHES, "loggers": (), "storage": "sharded"}
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 128))
    fused = partial(torch.optim.AdamW, lr=0.01, fused=True)
    trainer: Any = ls.Trainer(model, nn.CrossEntropyLoss(), fused, **options)
    batch = torch.ones(8, 6), torch.arange(8)
    trainer.step(batch)
    trainer.module[0].requires_grad_(True)
    with pytest.raises(LockstepError) as caught:
        trainer.step(batch)
    return str(caught.value)


def test_a_parameter_that_thaws_must_be_cut_after_whole_vectors(ranks):
    for said in ranks(thaw_what_cannot_be_cut, 2):
        assert re.search(r"0\.weight \(6, 6\) is cut after 18 elements on 2 ranks", said), said


def train_two_dtypes() -> str:
    model = nn.Linear(6, 4)
    model.bias = nn.Parameter(model.bias.detach().double())
    with pytest.raises(LockstepError) as caught:
        ls.exact(wrap(nn.Sequential(model), "whole"), MICROBATCHES)
    return str(caught.value)


def test_parameters_of_two_dtypes_in_a_block_are_refused(ranks):
    for said in ranks(train_two_dtypes, 2):
        expected = (
            "the model has parameters of several dtypes (torch.float32, torch.float64), whose"
        )
        assert said.startswith(expected), said
