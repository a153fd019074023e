"""`lockstep train resnet50`: one digest on any folder, and generated pictures said plainly."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import lockstep as ls
from folders import write_pictures
from lockstep import cli
from lockstep.data.loader import Batches
from lockstep.errors import LockstepError
from lockstep.recipes.classification import Options
from lockstep.recipes.classification import train as job
from lockstep.recipes.resnet import ResNet
from lockstep.recipes.resnet50 import CLASSES, NOTICE, defaults, load, network


def train(*arguments):
    """Run the command in this process; return (exit status, output, what it said beside)."""
    outcome = CliRunner().invoke(cli.cli, ["train", "resnet50", *map(str, arguments), "-q"])
    if isinstance(outcome.exception, LockstepError):
        return outcome.exception.exit_status, str(outcome.exception), outcome.stderr
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.exit_code, outcome.stdout, outcome.stderr


def small(classes):
    return ResNet((1, 1), classes, width=4)


def options(folder, workers, stages=1, schedule=None):
    given = {"data": str(folder), "epochs": 2, "batch_size": 4, "size": 32}
    base = {"recipe": "resnet50", "microbatches": 4, "seed": 0, "threads": 1, "workers": workers}
    base |= {"stages": stages, "schedule": schedule}
    return Options(**base, bf16=False, download=False, quiet=True, **{**defaults(given), **given})


def test_one_digest_for_every_layout_and_number_of_workers(tmp_path):
    folder = write_pictures(tmp_path / "pictures", ["a", "b"], 5)
    found = []
    for n, *how in ((1, 0), (1, 2), (3, 1), (2, 0, 2, "zero-bubble"), (4, 1, 2)):
        place = str(tmp_path / f"run-{len(found)}")
        found.append(ls.launch(job, (options(folder, *how), load, small, place), n)[0])
    for name in ("digest", "optimizer_digest", "loss", "accuracy"):
        assert len({summary[name] for summary in found}) == 1
    assert (found[0]["samples"], found[0]["held_out"], found[0]["steps"]) == (16, 2, 4)
    assert [(each["replicas"], each["stages"]) for each in found[2:]] == [(3, 1), (1, 2), (2, 2)]


def test_the_command_trains_on_a_folder_with_train_and_val(tmp_path):
    write_pictures(tmp_path / "pictures" / "train", ["a", "b"], 2)
    write_pictures(tmp_path / "pictures" / "val", ["b"], 1)
    status, output, beside = train(
        "--data", tmp_path / "pictures", "--epochs", 1, "--batch-size", 4, "--microbatches", 2,
        "--size", 40, "--json", "--runs", tmp_path / "runs",
    )  # fmt: skip
    assert status == 0
    assert NOTICE not in beside
    summary = json.loads(output.splitlines()[-1])
    assert (summary["samples"], summary["held_out"], summary["steps"]) == (4, 1, 1)


def test_a_picture_that_cannot_be_read_ends_it_with_one_sentence(tmp_path):
    folder = write_pictures(tmp_path / "pictures", ["a", "b"], 5)
    for path in folder.rglob("*.jpg"):
        path.write_text("no picture")
    status, message, _ = train("--data", folder, "--size", 32, "--runs", tmp_path / "runs")
    assert status == 1
    assert ".jpg cannot be read as an image (unknown format, or damaged)" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--data", "/nowhere"], 1, "/nowhere is not a folder"),
        (["--download"], 2, "pass their folder with --data"),
        (["--size", 31], 2, "31 is not in the range x>=32"),
        (["--label-smoothing", 1], 2, "is not in the range 0<=x<1"),
        (["--epochs", 1, "--warmup", 2], 1, "--warmup 2 is longer than the training of 1 epoch"),
    ],
    ids=str,
)
def test_a_mistake_gets_one_sentence(tmp_path, arguments, status, sentence):
    found, message, beside = train(*arguments, "--runs", tmp_path)
    assert found == status
    assert sentence in message + beside
    if "--warmup" in arguments:
        assert NOTICE in beside


def test_the_size_of_other_recipes_pictures_cannot_be_chosen():
    outcome = CliRunner().invoke(cli.cli, ["train", "digits", "--size", "64"])
    assert "the images of digits have a fixed size" in str(outcome.exception)


def test_the_learning_rate_follows_the_batch_and_the_warm_up_the_epochs():
    chosen = defaults({"data": "pictures", "batch_size": 64, "epochs": 18})
    assert (chosen["lr"], chosen["warmup"]) == (0.025, 1.0)
    assert defaults({"data": "pictures"})["size"] == 224
    assert defaults({})["size"] == 128


def test_generated_pictures_fit_the_network():
    data = load(replace(options("", 0), data=None))
    pictures, labels = next(iter(Batches(data.training, 4, microbatches=2))).microbatches[0].data
    assert pictures.shape == (2, 3, 32, 32)
    assert data.classes == CLASSES
    assert labels.max() < CLASSES
    assert network(data.classes)(pictures).shape == (2, CLASSES)


def test_each_bottleneck_begins_as_its_shortcut():
    model = network(3)
    assert not any(block.bn3.weight.any() for block in model.blocks() if hasattr(block, "bn3"))
