"""Processes that cannot go on in place are replaced, from the newest state that is left."""

from __future__ import annotations

import random
import re

import pytest

from replaced_training import Training, read_training, run, train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the same training on one rank, by its form."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {form: train(folder / form, form=form) for form in ("one", "two")}


def require_same(found: Training, expected: Training) -> None:
    assert found.results == expected.results
    assert found.losses == expected.losses
    assert found.steps == list(range(12))


def require_repeated_work(found: Training) -> None:
    """Require of every round that it says what it repeats: not less than the recorded steps."""
    begun = 0.0
    for line, seconds in zip(found.rounds, found.repeated, strict=True):
        assert seconds - 0.01 <= line["undone"] <= line["noticed"] - begun
        begun = line["continued"]


def again(steps: int) -> str:
    """Return what rank 0 says about recorded steps that it repeats."""
    if not steps:
        return ""
    return (
        f"; {steps} step{'' if steps == 1 else 's'} {'is' if steps == 1 else 'are'} computed again"
    )


def sources(found: Training) -> list[str]:
    """Return from what each round went on, as rank 0 said."""
    lines = [line.partition("continues from ")[2] for line in found.said]
    return [line for line in lines if line]


def test_replicas_of_stages_hand_over_what_is_left(tmp_path, undisturbed):
    """One before there are stages; one rank; one of each replica; one that has committed."""
    kills = "forward:0:0 forward:2:1 forward:5:0,3 stepped:9:2"
    found = train(tmp_path / "run", kills, ranks=4, stages=2)
    require_same(found, undisturbed["one"])
    assert sources(found) == [
        "step 0, handed over by members 1 and 2",
        "step 2, handed over by members 4 and 7",
        "step 5, handed over by members 9 and 10",
        "step 10, handed over by members 12 and 13",  # the step was prepared by all
    ]
    assert [line["step"] for line in found.rounds] == [0, 2, 5, 10]
    lost = [{each["member"] for each in line["lost"]} for line in found.rounds]
    assert lost == [{0}, {5}, {8, 11}, {14}]
    assert found.rounds[1]["joined"] == [8, 9, 10, 11]
    require_repeated_work(found)
    assert all(line["undone"] > 0.0 for line in found.rounds[:3])


def test_one_replica_goes_on_from_its_checkpoint(tmp_path, undisturbed):
    found = train(tmp_path / "run", "forward:7:1", ranks=2, stages=2, every=2)
    require_same(found, undisturbed["one"])
    expected = [[f"the checkpoint of step {step}{again(7 - step)}"] for step in (6, 4)]
    assert sources(found) in expected
    require_repeated_work(found)
    assert found.repeated[0] > 0.0


def test_shared_parameters_are_handed_over_unless_a_rank_dies_while_it_writes(
    tmp_path, undisturbed
):
    kills = "forward:3:1 optimizer:7:1 evaluation:12:0"
    found = train(tmp_path / "run", kills, ranks=2, storage="shared", every=2)
    require_same(found, undisturbed["one"])
    first, second, third = sources(found)
    assert first == "step 3, handed over by member 0"
    assert re.fullmatch("the checkpoint of step [46]; [13] steps? (is|are) computed again", second)
    assert third == "step 12, handed over by member 5"
    require_repeated_work(found)


def test_gloo_waits_for_no_rank_that_does_not_notice(tmp_path, undisturbed):
    """The second one dies before it has recorded the step, which the others have committed."""
    found = train(tmp_path / "run", "forward:5:1 stepped:8:0", ranks=3, backend="gloo")
    require_same(found, undisturbed["one"])
    first, second = sources(found)
    assert re.fullmatch(r"step 5, handed over by member [02]", first)
    assert re.fullmatch(r"step 9, handed over by member [45]", second)


def test_shards_continue_from_the_newest_checkpoint(tmp_path, undisturbed):
    """A peer notices in a block's exchange, in that of a step, and while it gathers for a digest.

    Nobody else has the shards of a lost rank, so the latest checkpoint is at most two steps old.
    """
    kills = "backward:3:0 optimizer:5:1 stepped:7:0 digest:12:1"
    found = train(tmp_path / "run", kills, ranks=2, storage="sharded", every=1)
    require_same(found, undisturbed["one"])
    require_repeated_work(found)
    assert max(found.repeated_steps) in (1, 2)
    assert sources(found) == [
        f"the checkpoint of step {line['step']}{again(steps)}"
        for line, steps in zip(found.rounds, found.repeated_steps, strict=True)
    ]


def test_shards_without_checkpoints_begin_again(tmp_path, undisturbed):
    found = train(tmp_path / "run", "forward:2:1", ranks=2, storage="sharded", backend="gloo")
    require_same(found, undisturbed["one"])
    advice = "; pass checkpoint=ls.CheckpointConfig()"
    assert sources(found) == [f"the beginning: no checkpoint{again(2)}{advice}"]
    assert "if a rank is killed, this training begins again" in found.said[0]


def test_shards_that_another_host_has_are_handed_over(tmp_path, undisturbed):
    found = train(tmp_path / "run", "forward:5:1", ranks=4, storage="hybrid")
    require_same(found, undisturbed["one"])
    assert sources(found) == ["step 5, handed over by members 0 and 2"]


def test_two_trainers_and_a_kill_before_there_are_any(tmp_path, undisturbed):
    """The state of a registered trainer is part of the other's."""
    kills = "start:0:1 forward:5:1 answering:0:0"  # the last before its script is at step 5 again
    found = train(tmp_path / "run", kills, ranks=2, form="two")
    require_same(found, undisturbed["two"])
    advice = "; pass checkpoint=ls.CheckpointConfig()"
    beginning = "the beginning: no checkpoint"
    first, second, *others = sources(found)
    assert [first, second] == [beginning + advice, beginning]
    # Of the last round's two processes one may be at step 5 again when the other one is killed,
    # which may be before it has said from what it goes on.
    assert len(others) in (1, 2)
    assert {*others} <= {f"step 5, handed over by member {member}" for member in (2, 5)}
    require_repeated_work(found)


@pytest.mark.parametrize(
    ("layout", "ranks", "wanted", "writers"),
    [
        ({"stages": 2}, 4, 2, "members 0 and 1"),
        ({"storage": "sharded"}, 2, 1, "members 0 and 1"),
        pytest.param({"storage": "sharded"}, 1, 2, "member 0", marks=pytest.mark.stress),
    ],
)
def test_another_number_of_ranks_costs_no_step(
    tmp_path, undisturbed, layout, ranks, wanted, writers
):
    """Nobody has died: all are at a safe point, and hand over what they have there."""
    begin = ["--min", "1", "--max", f"{ranks}", "train.py"]
    status, output, errors = run(tmp_path, begin, "", "one", layout, SCALE=f"{wanted}")
    assert status == 0, errors
    assert (tmp_path / "scaled").exists()
    found = read_training(tmp_path, output, errors)
    require_same(found, undisturbed["one"])
    (line,) = found.rounds
    assert (line["step"], line["world_size"], line["lost"], line["left"]) == (
        6,
        wanted,
        [],
        [*range(ranks)],
    )
    assert sources(found) == [f"step 6, handed over by {writers}"]
    if "storage" in layout:  # a process that waits to join would hold a whole model
        trained = {*range(ranks), *line["joined"]}
        assert {path.name for path in tmp_path.glob("made-*")} == {f"made-{n}" for n in trained}


@pytest.mark.stress
@pytest.mark.timeout(300)  # seven times two or four processes start
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, {"stages": 2}),
        (4, {"stages": 2, "backend": "gloo", "every": 1}),  # not every rank notices a loss
        (2, {"stages": 2, "every": 1}),
        (3, {"storage": "shared", "every": 1}),
        (3, {"backend": "gloo"}),
        (2, {"storage": "sharded", "every": 1}),
        (4, {"storage": "sharded", "backend": "gloo", "every": 1}),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_many_random_kills(tmp_path, undisturbed, ranks, layout, seed):
    draw = random.Random(seed)
    points = ("forward", "backward", "optimizer", "stepped")
    kills = " ".join(
        f"{draw.choice(points)}:{step}:{draw.randrange(ranks)}"
        for step in sorted(draw.sample(range(12), 6))
    )
    found = train(tmp_path / "run", kills, ranks=ranks, **layout)
    require_same(found, undisturbed["one"])
