"""Updates of which no other rank has a copy: a part is computed again, and wrong ones are named."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import LockstepError
from lockstep.training.storage.update_check import LARGEST, WINDOW, _choose_windows
from records import FindingLogger

LAYOUTS = [("shared", 2), ("sharded", 2), ("sharded", 1)]
STEPS = 4
FAULTY = 2


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 6, generator=draw), torch.arange(16) % 4) for _ in range(STEPS)]


def make_trainer(storage: str, lines: FindingLogger | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    adam = partial(torch.optim.Adam, lr=0.01)
    options = {"microbatches": 4, "audit": ls.AuditConfig(every_steps=1)} | options
    loggers = [lines] if lines is not None and ls.rank() == 0 else ()
    return ls.Trainer(
        network, nn.CrossEntropyLoss(), adam, storage=storage, loggers=loggers, **options
    )


def train(storage: str, operator: str = "", **chosen: Any) -> tuple[str, str, list[Any], str]:
    """Train with a fault of the last rank in one step; return the digests, the findings, the error.

    The calls of the fault are those of the optimizer, first in the real step.
    """
    from bit_flips import FaultyOperator  # ranks find it by its name

    lines = FindingLogger()
    trainer = make_trainer(storage, lines)
    said = ""
    chosen = {"rank": ls.world_size() - 1, "phase": "optimizer", "element": 0, **chosen}
    fault = FaultyOperator(operator, **chosen) if operator else None
    try:
        for step, batch in enumerate(make_batches()):
            if fault is not None and step == FAULTY:
                with fault:
                    trainer.step(batch)
            else:
                trainer.step(batch)
    except LockstepError as error:
        said = f"{type(error).__name__}: {error}"
    return trainer.digest(), trainer.optimizer_digest(), lines.findings, said


@pytest.mark.parametrize(("storage", "n"), LAYOUTS)
@pytest.mark.parametrize("operator", ["addcdiv_", "addcmul_"])
def test_a_wrong_update_is_corrected(ranks, storage, n, operator):
    (expected,) = ranks(partial(train, "replicated"), 1)
    found = ranks(partial(train, storage, operator, call=0), n)
    assert [(*digests, said) for *digests, _, said in found] == [(*expected[:2], "")] * n
    (finding,) = found[0][2]
    named = finding["step"], finding["rank"], finding["microbatch"], finding["corrected"]
    assert named == (FAULTY, n - 1, None, True)
    assert "the result of another computation took its place" in finding["message"]
    assert finding["module"] in ("0", "2")


@pytest.mark.parametrize(("storage", "n"), LAYOUTS[:2])
def test_a_wrong_repetition_is_named_and_changes_nothing(ranks, storage, n):
    (expected,) = ranks(partial(train, "replicated"), 1)
    found = ranks(partial(train, storage, "addcdiv_", call=4 if storage == "sharded" else 2), n)
    assert [(*digests, said) for *digests, _, said in found] == [(*expected[:2], "")] * n
    (finding,) = found[0][2]
    assert (finding["step"], finding["rank"], finding["corrected"]) == (FAULTY, n - 1, False)
    assert "when it was repeated; the weights do not contain it" in finding["message"]


@pytest.mark.parametrize(("storage", "n"), LAYOUTS)
def test_a_rank_whose_updates_are_always_wrong_ends_the_training(ranks, storage, n):
    wrong = {"element": None, "seed": 3}
    for *_, said in ranks(partial(train, storage, "addcdiv_", **wrong), n):
        place = (
            rf"WorkError: step {FAULTY}: rank {n - 1} \(host .*, cores? \d+( and \d+)?\) computed"
        )
        assert re.match(place, said), said
        assert re.search(
            r"again and again, in the update of [02]\.(weight|bias)\. The weights", said
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("storage", ["shared", "sharded"])
def test_updates_that_are_checked_have_the_same_bits_with_a_schedule(storage):
    ls.init()

    def digest(audit: Any) -> str:
        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        torch.manual_seed(0)
        config = ls.OptimizerConfig(partial(torch.optim.NAdam, lr=0.1), scheduler=schedule)
        network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        loss = nn.CrossEntropyLoss()
        options = {"microbatches": 4, "loggers": (), "storage": storage, "audit": audit}
        trainer = ls.Trainer(network, loss, config, **options)
        for batch in make_batches():
            trainer.step(batch)
        return trainer.digest() + trainer.optimizer_digest()

    assert digest(ls.AuditConfig(every_steps=1)) == digest(False)


# --- what is checked -----------------------------------------------------------------------------


def make_optimizer(sizes: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.Adam(parameters, **options)


def list_elements(optimizer: Any, turn: int) -> list[tuple[int, int, int]]:
    numbers = {id(one): n for n, one in enumerate(optimizer.param_groups[0]["params"])}
    windows = _choose_windows(optimizer, turn)
    return [(numbers[id(one.parameter)], one.start, one.stop) for one in windows]


def test_small_parameters_are_all_checked_in_every_audited_step():
    optimizer = make_optimizer([8, 0, 3])
    for turn in range(3):
        assert sorted(list_elements(optimizer, turn)) == [(0, 0, 8), (2, 0, 3)]


def test_each_audited_step_checks_other_elements_of_large_parameters():
    optimizer = make_optimizer([9 * WINDOW + 5, 3])
    turns = [list_elements(optimizer, turn) for turn in range(3)]
    assert all(sum(stop - start for _, start, stop in turn) <= LARGEST + WINDOW for turn in turns)
    assert {each for turn in turns for each in turn} == {
        *(
            (0, start, min(start + WINDOW, 9 * WINDOW + 5))
            for start in range(0, 9 * WINDOW + 5, WINDOW)
        ),
        (1, 0, 3),
    }


@pytest.mark.parametrize("kind", [{"dtype": torch.bfloat16}, {"fused": True}])
def test_a_large_parameter_whose_parts_may_round_otherwise_is_not_checked(kind):
    assert list_elements(make_optimizer([WINDOW + 1, 3], **kind), 0) == [(1, 0, 3)]
