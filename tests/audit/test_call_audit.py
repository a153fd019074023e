"""Manual steps and pipeline stages: each rank repeats one call of its own, which changes no bit."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.audit.recorded_call import RecordedCall
from lockstep.kernel.errors import LockstepError
from lockstep.training import step_environment
from records import FindingLogger

SGD = partial(torch.optim.SGD, lr=0.1)
STEPS = 3


class Block(nn.Module):
    """Draws, writes a buffer, and may keep its first output: what it adds to later ones."""

    lockstep_buffer_rules = {"mean": "mean"}

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = act
        self.calls = 0
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs + 0.1 * torch.rand_like(inputs)).tanh()
        self.mean.copy_(outputs.detach().mean(0))
        return outputs if self.act is None else self.act(self, outputs)


def count(block: Any, outputs: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return outputs * (1 + block.calls / 100)


def replace(block: Any, outputs: torch.Tensor) -> torch.Tensor:
    before = block.calls
    block.calls = outputs.detach().mean(0)
    return outputs + before


KEPT = torch.zeros(6)


def replace_global(block: Any, outputs: torch.Tensor) -> torch.Tensor:
    global KEPT
    before = KEPT
    KEPT = outputs.detach().mean(0)
    return outputs + before


def replace_entry(block: Any, outputs: torch.Tensor) -> torch.Tensor:
    if block.calls == 0:
        block.calls = [torch.zeros(6)]
    before = block.calls[0]
    block.calls[0] = outputs.detach().mean(0)
    return outputs + before


def overwrite(block: Any, outputs: torch.Tensor) -> torch.Tensor:
    if isinstance(block.calls, int):
        block.calls = torch.zeros(6)
    outputs = outputs + block.calls
    block.calls.copy_(outputs.detach().mean(0))
    return outputs


def make_closure() -> Any:
    kept = torch.zeros(6)

    def replace_closure(block: Any, outputs: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        before = kept
        kept = outputs.detach().mean(0)
        return outputs + before

    return replace_closure


REPLACED = {
    replace: "{}.calls",
    replace_entry: "{}.calls[0]",
    overwrite: "{}.calls",
    replace_global: "KEPT",
    make_closure(): "kept",
}
"""What forward replaces, so that each repetition begins with what the one before it has left."""


def make_trainer(*acts: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"microbatches": 4, "loggers": (), "progress": False, **options}
    return ls.Trainer(nn.Sequential(*map(Block, acts)), nn.MSELoss(), SGD, **options)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator))
        for _ in range(STEPS)
    ]


def compute(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def take_steps(trainer: Any, body: Any = compute) -> None:
    for batch in make_batches():
        if trainer.parallel.stages > 1:
            trainer.step(batch)
            continue
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                step.backward(body(trainer.model, inputs, targets))


def train(*acts: Any, body: Any = compute, **options: Any) -> tuple[str, int, list[Any], str]:
    """Return the digest, the number of repetitions, the findings, and the error."""
    repeated = []
    repeat = RecordedCall.repeat

    def counted(call: RecordedCall, **how: bool) -> dict[str, int]:
        repeated.append(call)
        return repeat(call, **how)

    lines = FindingLogger()
    said = ""
    options = {"loggers": [lines] if ls.rank() == 0 else (), **options}
    trainer = make_trainer(*(acts or (None, None)), **options)
    RecordedCall.repeat = counted  # type: ignore[method-assign]
    try:
        take_steps(trainer, body)
    except LockstepError as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        RecordedCall.repeat = repeat  # type: ignore[method-assign]
    return trainer.digest() if not said else "", len(repeated), lines.findings, said


def staged(name: str = "1f1b", **options: Any) -> dict[str, Any]:
    return {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1], schedule=name), **options}


# --- nothing else happens ------------------------------------------------------------------------


def compute_twice(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return compute(model, inputs, targets) + compute(model, inputs, targets)


def compute_penalty(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return compute(model, inputs, targets) + model[0].linear.weight.square().sum()


@pytest.mark.ranks(1)
def test_audited_manual_steps_have_the_same_bits(capsys, monkeypatch):
    # A processor with instructions for bfloat16 would be named.
    monkeypatch.setattr(step_environment, "find_bfloat16_instructions", lambda: "")
    ls.init()
    for options in ({}, {"autocast_dtype": torch.bfloat16}, {"activation_checkpointing": True}):
        expected = train(audit=False, **options)
        assert expected[1:] == (0, [], "")
        assert train(**options) == (expected[0], STEPS, [], "")
    assert capsys.readouterr().err == ""


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("body", "reason"),
    [(compute_twice, "called several times"), (compute_penalty, "depends on parameters or on")],
)
def test_a_manual_step_that_cannot_be_audited_is_named_once(body, reason):
    ls.init()
    expected = train(audit=False, body=body)
    said = r"trainer\.manual_step\(\) cannot audit step 0, nor others like it: the "
    with pytest.warns(UserWarning, match=said + ".*" + reason) as caught:
        assert train(body=body) == expected
    assert len(caught) == 1


@pytest.mark.ranks(1)
def test_a_step_with_two_backward_passes_is_not_audited():
    ls.init()
    trainer = make_trainer(None)

    def take_step():
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(make_batches()[0]):
                step.backward(compute(trainer.model, inputs, targets))
                step.backward(trainer.model[0].linear.weight.square().sum())

    with pytest.warns(UserWarning, match="backward is called several times per micro-batch"):
        take_step()


def train_in_schedules(names: list[str], **options: Any) -> list[Any]:
    return [train(None, replace_nothing, **staged(name, **options)) for name in names]


def replace_nothing(block: Any, outputs: torch.Tensor) -> torch.Tensor:
    return outputs.mul(2)


def test_audited_stages_have_the_same_bits(ranks, capfd):
    names = ["gpipe", "1f1b", "zero-bubble"]
    expected = ranks(partial(train, None, replace_nothing, audit=False), 1)[0][0]
    for found in ranks(train_in_schedules, 2, names):
        assert found == [(expected, STEPS, [], "")] * len(names)
    (found, other) = ranks(partial(train_in_schedules, ["1f1b"], activation_checkpointing=True), 2)
    assert found == other == [(expected, STEPS, [], "")]
    assert "cannot audit" not in capfd.readouterr().err


# --- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_hidden_state_in_a_manual_step_is_named(ranks, n):
    found = ranks(partial(refuse_all, partial(place_in_stage, 1)), n)
    assert all(said == found[0] for said in found)
    for said, name in zip(found[0], ["{}.calls", *REPLACED.values()], strict=True):
        assert re.match(
            r"StateError: rank 0, step 0, micro-batch 1: computed again .*, first in "
            r"aten\.\w+(\.\w+)? of 1 \(test_call_audit\.py:\d+ in ",
            said,
        ), said
        assert f"; {name.format('Sequential.1')} changed" in said, said


def refuse_all(arrange: Any, **options: Any) -> list[str]:
    return [train(*arrange(act), **options)[3] for act in [count, *REPLACED]]


@pytest.mark.parametrize("rank", [0, 1])
def test_hidden_state_in_a_stage_is_named(ranks, rank):
    arrange = partial(place_in_stage, rank)
    found = ranks(partial(refuse_all, arrange, **staged()), 2)
    assert found[0] == found[1]
    for said, name in zip(found[0], ["{}.calls", *REPLACED.values()], strict=True):
        place = f"StateError: rank {rank}, step 0, micro-batch 1: computed again "
        assert said.startswith(place), said
        assert f"; {name.format(rank)} changed" in said, said


class Draw(nn.Module):
    """Has no parameters, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.randn(inputs.shape, generator=self.generator)


def draw_in_a_stage_of_its_own() -> str:
    model = nn.Sequential(nn.Linear(6, 6), Draw(), nn.Linear(6, 6))
    pipeline = ls.PipelineConfig(stages=3, balance=[1, 1, 1])
    options = {"microbatches": 4, "loggers": (), "progress": False, "pipeline": pipeline}
    trainer = ls.Trainer(model, nn.MSELoss(), SGD, **options)
    with pytest.raises(ls.errors.StateError) as caught:
        take_steps(trainer)
    return str(caught.value)


def test_hidden_state_in_a_stage_without_parameters_is_named(ranks):
    for said in ranks(draw_in_a_stage_of_its_own, 3):
        assert said.startswith("rank 1, step 0, micro-batch 1: computed again "), said
        assert "; 1.generator changed" in said, said


def place_in_stage(rank: int, act: Any) -> tuple[Any, ...]:
    return (act, None) if rank == 0 else (None, act)


def train_with_fault(call: int, **options: Any) -> Any:
    from bit_flips import FaultyOperator

    with FaultyOperator("addmm", rank=1, phase="forward", call=call, element=0, bit=20) as fault:
        result = train(**options)
    return *result, fault.flips


def test_a_transient_fault_in_a_manual_step_is_reported(ranks, capfd):
    found = ranks(partial(train_with_fault, 2), 2)
    assert [flips for *_, flips in found] == [0, 1]
    assert [said for *_, said, _ in found] == ["", ""]
    (finding,) = found[0][2]
    assert (finding["rank"], finding["step"], finding["corrected"]) == (1, 0, False)
    assert "which the gradients contain" in finding["message"]
    assert finding["message"] in capfd.readouterr().err
