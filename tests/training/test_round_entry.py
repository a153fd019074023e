"""Killed ranks of an elastic run: the others go on, replacements join, and no bit changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from training.elastic_training import Training, train

STEPS = 32  # a newcomer may need two of them to join on a busy machine


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Train on one rank."""
    return train(tmp_path_factory.mktemp("undisturbed") / "run", [], steps=STEPS)


def require_same(disturbed: Training, undisturbed: Training) -> None:
    """Compare digests on every rank, and the losses of the record."""
    assert disturbed.digests == undisturbed.digests
    assert disturbed.losses == undisturbed.losses
    assert disturbed.evaluations == undisturbed.evaluations


def test_a_rank_may_die_at_any_point_of_a_step(tmp_path: Path, undisturbed: Training) -> None:
    plan = [
        ["forward", [0], 0],  # in the first step
        ["backward", [2], 3],
        ["gathered", [1], 1],
        ["prepared", [0], 0],
        ["passed", [2], 0],
        ["stepped", [0], 0],
        ["item", [1], 5],
        ["merged", [2, -1], 0],  # rank 0 has prepared, and rank 1 has not
        ["optimizer", [0, 1], 0],
    ]
    disturbed = train(tmp_path / "run", plan, steps=STEPS, workers=1)
    require_same(disturbed, undisturbed)
    assert "in new processes" not in disturbed.output
    assert sum(len(line["lost"]) for line in disturbed.rounds) == 10
    assert sum(len(line["joined"]) for line in disturbed.rounds) >= 8
    steps = [line["step"] for line in disturbed.rounds]
    assert steps == sorted(steps)
    assert steps[0] == 0


def test_a_rank_may_die_between_steps(tmp_path: Path, undisturbed: Training) -> None:
    plan = [
        ["callback", [0], 0],
        ["record", [0], 2],
        ["sharing", [0], 0],  # while a newcomer gets the state, from rank 0
        ["sharing", [2], 0],
        ["shared", [2], 0],
        ["evaluation", [0], 0],
        ["epoch", [1], 0],
        ["stateful", [1], 0],
        ["joining", [2], 0],  # while the other one that is left connects to it
    ]
    disturbed = train(tmp_path / "run", plan, steps=STEPS, form="checkpoint")
    require_same(disturbed, undisturbed)
    assert "in new processes" not in disturbed.output
    saved = {path.name for path in (tmp_path / "run/recorded/checkpoints").iterdir()}
    assert f"step-{STEPS}" in saved


def test_the_only_rank_with_the_state_may_die_while_it_sends_it(
    tmp_path: Path, undisturbed: Training
) -> None:
    """A newcomer that waits for the rest of the state notices, and all begin again."""
    plan = [["forward", [1], 50], ["sending", [0], 0]]
    disturbed = train(tmp_path / "run", plan, steps=STEPS, full=2, form="checkpoint")
    require_same(disturbed, undisturbed)
    first, second = disturbed.rounds
    assert [first["lost"], second["lost"]] == [
        [{"member": 1, "signal": 9}],
        [{"member": 0, "signal": 9}],
    ]
    assert (second["left"], second["joined"]) == ([2], [3, 4])
    assert f"continues from the checkpoint of step {second['step']}" in disturbed.output
    assert second["undone"] > 0.0


def test_a_loop_of_attempts_is_repeated(tmp_path: Path, undisturbed: Training) -> None:
    plan: list[Any] = [["forward", [1], 1], ["backward", [0], 0], ["passed", [0, 2], 0]]
    plan += [["rows", [1], 0], ["rows gathered", [0], 1]]
    disturbed = train(tmp_path / "run", plan, steps=STEPS, form="attempts")
    require_same(disturbed, undisturbed)
    assert "in new processes" not in disturbed.output


def test_batches_of_the_script_are_split_anew(tmp_path: Path) -> None:
    plan: list[Any] = [["forward", [0], 0], ["backward", [1], 0]]
    disturbed = train(tmp_path / "run", plan, steps=8, form="raw")
    require_same(disturbed, train(tmp_path / "undisturbed", [], steps=8, form="raw"))


def test_processes_that_join_take_part_in_audits_and_in_the_record(tmp_path: Path) -> None:
    plan: list[Any] = [["forward", [0], 1], ["forward", [1], 4]]
    plan.append(["passed", [0], 0])  # a newcomer is the next rank 0, and writes the step's line
    options: dict[str, Any] = {"steps": 20, "form": "nested", "audit": "1"}
    disturbed = train(tmp_path / "run", plan, **options)
    require_same(disturbed, train(tmp_path / "undisturbed", [], **options))
    assert "audit" not in disturbed.output
    assert any(line["joined"] for line in disturbed.rounds)


POINTS = ["forward", "backward", "gather", "gathered", "prepared", "passed", "optimizer"]
POINTS += ["stepped", "callback", "item", "sharing", "shared", "evaluation", "epoch"]
OF_DATA = ("item", "evaluation", "epoch")
OF_NEWCOMERS = ("sharing", "shared")


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(6))
def test_random_kills_change_no_bit(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    full = draw.randint(2, 4)
    form = draw.choice(["step", "checkpoint", "attempts", "raw", "nested"])
    points = [each for each in POINTS if form != "raw" or each not in OF_DATA]
    plan: list[Any] = [["forward", [0], 1]]  # so that there are newcomers
    for _ in range(9):
        point = draw.choice(points)
        ranks = draw.sample(range(full), draw.randint(1, full - 1))
        plan.append([point, ranks, 0 if point in OF_NEWCOMERS else draw.randint(0, 3)])
    options: dict[str, Any] = {"steps": 120, "form": form}
    workers = draw.randint(0, 2) if form != "raw" else 0
    disturbed = train(tmp_path / "run", plan, full=full, workers=workers, is_random=True, **options)
    require_same(disturbed, train(tmp_path / "undisturbed", [], **options))
