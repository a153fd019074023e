"""`lockstep chaos`: ranks are killed, the bits stay; one sentence for each mistake."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import cli
from lockstep.kernel.errors import UsageError
from lockstep.record.reader import read_run
from lockstep.tools.check.chaos import Baseline, ChaosResult
from lockstep.tools.commands.chaos import describe_result

SCRIPT = """
from functools import partial
import torch
import lockstep as ls

ls.init()
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
with ls.Trainer(
    model, torch.nn.CrossEntropyLoss(), optimizer, checkpoint=ls.CheckpointConfig(every_steps=20)
) as trainer:
    for epoch in range(10):
        for batch in trainer.batches(data, 16, epoch=epoch):
            trainer.step(batch)
        trainer.evaluate(data, 32)
"""
KEYS = {
    "kills", "rounds", "digest", "baseline_digest", "equal", "median_seconds_lost",
    "max_seconds_lost", "seconds", "baseline_seconds", "repeated_microbatches",
}  # fmt: skip


@pytest.fixture
def chaos(tmp_path, monkeypatch):
    """Run the command in an empty folder; (exit status, what it printed)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments):
        outcome = CliRunner().invoke(cli, ["chaos", *map(str, arguments)])
        if not isinstance(outcome.exception, SystemExit | None):
            raise outcome.exception
        return outcome.exit_code, outcome.stdout

    return run


@pytest.mark.timeout(240)
def test_ranks_are_killed_and_the_bits_stay(chaos, tmp_path):
    status, output = chaos("-n", 3, "--kills", 2, "--seed", 3, "--json", "train.py")
    found = json.loads(output)
    assert status == 0
    assert found.keys() >= KEYS
    assert found["kills"] == found["planned"] == 2
    assert found["equal"] is True
    assert found["digest"] == found["baseline_digest"]
    assert found["rounds"] >= 2
    assert found["repeated_microbatches"] == 0
    assert found["max_seconds_lost"] >= found["median_seconds_lost"] > 0
    run = read_run(tmp_path / found["run"])
    assert run.steps.step.tolist() == list(range(40))
    assert run.remarks == []
    dead = {each["member"] for line in run.rounds for each in line["lost"]}
    assert dead >= {each["member"] for each in found["deaths"]}


@pytest.mark.parametrize(("repeated", "said"), [(0, "0 micro-batches"), (1, "1 micro-batch")])
def test_repeated_work_is_counted_in_a_sentence(repeated, said):
    baseline = Baseline(Path("runs/undisturbed"), "ab", 40, 0.01, 1.0)
    result = ChaosResult(baseline, Path("runs/chaos"), "ab", 2, [], [0.1], repeated, 3, 2.0)
    assert f"; {said} computed twice." in describe_result(result)[0]


@pytest.mark.timeout(240)
def test_another_training_is_found_to_differ(chaos, monkeypatch):
    """A reference with as many steps and another digest: exit status 1, and the way to bisect."""
    other = Baseline(Path("runs/other"), "ab" * 32, 40, 0.01, 1.0)
    monkeypatch.setattr("lockstep.tools.check.chaos.train_undisturbed", lambda *arguments: other)
    status, output = chaos("train.py", "-n", 3, "--kills", 1)
    assert status == 1
    assert "The weights differ" in output
    assert "lockstep bisect runs/other" in output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("digits", "-n", 1), "no rank is left when the only one is killed"),
        (("missing.py",), "there is no script 'missing.py'"),
    ],
)
def test_a_mistake_gets_one_sentence(chaos, arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        chaos(*arguments)


def test_options_that_a_recipe_does_not_have_are_a_usage_error(chaos, tmp_path):
    assert chaos("digits", "--epoch", 1)[0] == 2
    assert chaos("digits", "--kills", 0)[0] == 2
    assert not (tmp_path / "runs").exists(), "nothing was started"


PARTS = {
    "shared": ("-n", 3, "--kills", 3, "--seed", 9),
    "sharded": ("-n", 2, "--kills", 20, "--seed", 1),
}
SOAKS = {
    **{f"20 kills, seed {seed}": (4, 20, seed, ("--epochs", 12), {}) for seed in range(5)},
    "8 ranks": (8, 12, 5, ("--epochs", 8), {}),
    "loader workers": (4, 8, 6, ("--epochs", 8, "--workers", 2), {}),
    "2 replicas of 2 stages": (4, 4, 7, ("--epochs", 8, "--stages", 2), {}),
    "gloo": (3, 4, 8, ("--epochs", 8), {"LOCKSTEP_BACKEND": "gloo"}),
}


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("soak", SOAKS)
def test_many_kills_change_no_bit(chaos, monkeypatch, soak):
    """Together more than 100 kills; a failure names its seed, whose kills can be repeated."""
    nprocs, kills, seed, arguments, variables = SOAKS[soak]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = ("-n", nprocs, "--kills", kills, "--seed", seed, "--json")
    status, output = chaos("digits", *options, "--checkpoint-every", 20, *arguments)
    found = json.loads(output)
    assert found["failure"] is None
    assert found["kills"] == kills
    assert found["digest"] == found["baseline_digest"]
    assert status == 0


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("storage", PARTS)
def test_kills_change_no_bit_of_parts_of_parameters(chaos, tmp_path, storage):
    script = SCRIPT.replace("every_steps=20", "every_steps=1")
    storage_option = f'storage="{storage}", checkpoint='
    (tmp_path / "train.py").write_text(script.replace("checkpoint=", storage_option))
    arguments = PARTS[storage]
    status, output = chaos(*arguments, "--json", "train.py")
    assert (status, json.loads(output)["kills"]) == (0, arguments[3])
