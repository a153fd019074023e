"""`lockstep train resnet50` and its siblings: one digest on any folder, and in any layout."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import lockstep as ls
from folders import write_pictures
from lockstep import cli
from lockstep.data.loader import Batches
from lockstep.kernel.errors import LockstepError
from lockstep.tools.recipes.catalog import IMAGE_NAMES, NAMES, find_recipe
from lockstep.tools.recipes.classification import EMA_WEIGHTS, WEIGHTS, Options
from lockstep.tools.recipes.classification import evaluate as evaluation_job
from lockstep.tools.recipes.classification import train as job
from lockstep.tools.recipes.image_classification import CLASSES, describe_generated_images
from lockstep.tools.recipes.resnet import BasicBlock, ResNet
from lockstep.tools.recipes.vision_transformer import VisionTransformer

NOTICE = describe_generated_images()


def train(*arguments, recipe="resnet50"):
    """Run the command in this process; return (exit status, output, what it said beside)."""
    outcome = CliRunner().invoke(cli.cli, ["train", recipe, *map(str, arguments), "-q"])
    if isinstance(outcome.exception, LockstepError):
        return outcome.exception.exit_status, str(outcome.exception), outcome.stderr
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.exit_code, outcome.stdout, outcome.stderr


def small_resnet(options, classes):
    return ResNet((1, 1), classes, width=4, block=BasicBlock)


def small_vit(options, classes):
    return VisionTransformer(options.size, 16, 2, 2, width=8, inner=16, classes=classes)


SMALL = {
    "resnet18": replace(find_recipe("resnet18"), network=small_resnet),
    "vit": replace(find_recipe("vit"), network=small_vit),
}


def options(name, folder, workers=0, stages=1, schedule=None, **more):
    given = {"data": str(folder), "epochs": 2, "batch_size": 4, "size": 32, "bf16": False, **more}
    base = {"recipe": name, "microbatches": 4, "seed": 0, "threads": 1, "workers": workers}
    base |= {"stages": stages, "schedule": schedule}
    defaults = find_recipe(name).defaults(given)
    return Options(**base, download=False, quiet=True, **{**defaults, **given})


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures") / "all", ["a", "b"], 5)


@pytest.mark.parametrize(
    ("name", "more", "layouts"),
    [
        ("resnet18", {"mixup": 0.4}, [(3, 1), (4, 1, 2, "zero-bubble")]),
        ("vit", {"ema": 0.5, "bf16": True}, [(4, 0, 2)]),
    ],
    ids=["resnet18 with mixup", "vit with an average in bfloat16"],
)
def test_one_digest_for_every_layout_and_number_of_workers(tmp_path, pictures, name, more, layouts):
    found, averaged = [], set()
    for n, *how in ((1, 0), *layouts):
        place = tmp_path / f"run-{len(found)}"
        given = options(name, pictures, *how, **more)
        found.append(ls.launch(job, (given, SMALL[name], str(place)), n)[0])
        averaged.add((place / EMA_WEIGHTS).read_bytes() if "ema" in more else b"")
    for key in ("digest", "optimizer_digest", "loss", "accuracy", "top5_accuracy", "ema_loss"):
        assert len({summary.get(key) for summary in found}) == 1, key
    assert len(averaged) == 1
    assert ("ema_loss" in found[0]) == ("ema" in more)
    assert (found[0]["samples"], found[0]["held_out"], found[0]["steps"]) == (16, 2, 4)
    assert (found[-1]["replicas"], found[-1]["stages"]) == (2, 2)


def test_saved_weights_evaluate_to_the_results_of_the_training_in_any_layout(tmp_path, pictures):
    given = options("vit", pictures, ema=0.5)
    trained = ls.launch(job, (given, SMALL["vit"], str(tmp_path)), 1)[0]
    assert trained["ema_loss"] != trained["loss"]
    for file, prefix in ((WEIGHTS, ""), (EMA_WEIGHTS, "ema_")):
        for n, stages in ((1, 1), (2, 2)) if file == WEIGHTS else ((1, 1),):
            again = replace(given, weights=str(tmp_path / file), stages=stages, ema=None)
            found = ls.launch(evaluation_job, (again, SMALL["vit"], None), n)[0]
            for key in ("loss", "accuracy", "top5_accuracy"):
                assert found[key] == trained[prefix + key]
            assert (found["steps"], found["held_out"], found["run"]) == (0, 2, None)
            assert (found["digest"] == trained["digest"]) == (file == WEIGHTS)


def test_the_command_trains_on_a_folder_with_train_and_val_and_evaluates(tmp_path):
    write_pictures(tmp_path / "pictures" / "train", ["a", "b"], 2)
    write_pictures(tmp_path / "pictures" / "val", ["b"], 1)
    data = ("--data", tmp_path / "pictures", "--size", 40, "--json", "--runs", tmp_path / "runs")
    settings = ("--epochs", 1, "--batch-size", 4, "--microbatches", 2, "--name", "one")
    settings = (*settings, "--optimizer", "adamw")
    status, output, beside = train(*data, *settings, recipe="resnet18")
    assert status == 0, output
    assert NOTICE not in beside
    summary = json.loads(output.splitlines()[-1])
    assert (summary["samples"], summary["held_out"], summary["steps"]) == (4, 1, 1)
    assert summary["top5_accuracy"] == 1.0
    status, output, _ = train(
        "-e", "--resume", "one", "--runs", tmp_path / "runs", "--json", recipe="resnet18"
    )
    assert status == 0, output
    found = json.loads(output.splitlines()[-1])
    for key in ("loss", "accuracy", "top5_accuracy", "digest", "held_out", "run"):
        assert found[key] == summary[key], key
    assert (found["epochs"], found["resumed_from_step"]) == (0, None)
    status, message, _ = train("-e", "--resume", "one", "--runs", tmp_path / "runs", recipe="vit")
    assert status == 2
    assert "one is a run of resnet18, not of vit; omit the recipe" in message
    status, output, _ = train("--resume", "one", *data[-3:], recipe="resnet18")
    assert status == 0, output
    assert json.loads(output.splitlines()[-1])["digest"] == summary["digest"]


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
        (["--ema", 1], 2, "is not in the range 0<=x<1"),
        (["--epochs", 1, "--warmup", 2], 1, "--warmup 2 is longer than the training of 1 epoch"),
        (["--evaluate"], 2, "--evaluate needs weights: add --weights FILE, or --resume RUN"),
        (["--evaluate", "--mixup", 1], 2, "--mixup is an option of the training; omit it with"),
        (["--evaluate", "--min", 1], 2, "--min and --max are options of a training; omit them"),
        (["--new-head"], 2, "--new-head leaves out the classifier of --weights FILE: add this"),
        (["--weights", "/no.pth"], 1, "there is no file /no.pth; --weights takes a .safetensors"),
        (["--optimizer", "adamw", "--momentum", 0.5], 2, "--momentum: AdamW has no momentum"),
    ],
    ids=str,
)
def test_a_mistake_gets_one_sentence(tmp_path, arguments, status, sentence):
    found, message, beside = train(*arguments, "--runs", tmp_path)
    assert found == status
    assert sentence in message + beside
    if "--warmup" in arguments:
        assert NOTICE in beside


@pytest.mark.parametrize(
    ("recipe", "arguments", "sentence"),
    [
        ("digits", ["--size", 64], "the images of digits have a fixed size"),
        ("digits", ["--mixup", 1], "--mixup: digits has no mixup"),
        ("vit", ["--size", 40], "--size 40: vit needs a multiple of its patch of 16 pixels"),
        ("vit", ["--momentum", 0.9], "--momentum: AdamW has no momentum"),
    ],
)
def test_options_of_other_recipes_are_refused(recipe, arguments, sentence):
    status, message, _ = train(*arguments, recipe=recipe)
    assert status == 2
    assert sentence in message


def test_the_learning_rate_follows_the_batch_and_the_warm_up_the_epochs():
    chosen = find_recipe("resnet50").defaults({"data": "x", "batch_size": 64, "epochs": 18})
    assert (chosen["lr"], chosen["warmup"]) == (0.025, 1.0)
    chosen = find_recipe("vit").defaults({"data": "x", "batch_size": 4096})
    assert (chosen["lr"], chosen["warmup"], chosen["optimizer"]) == (0.003, 30.0, "adamw")
    for name in IMAGE_NAMES:
        assert find_recipe(name).defaults({"data": "x"})["size"] == 224
        assert find_recipe(name).defaults({})["size"] == 128


def test_every_name_has_a_recipe():
    assert [find_recipe(name).name for name in NAMES] == [*NAMES]


def test_generated_pictures_fit_the_networks():
    given = replace(options("resnet18", ""), data=None)
    data = find_recipe("resnet18").load(given)
    pictures, labels = next(iter(Batches(data.training, 4, microbatches=2))).microbatches[0].data
    assert pictures.shape == (2, 3, 32, 32)
    assert data.classes == CLASSES
    assert labels.max() < CLASSES
    for recipe in SMALL.values():
        assert recipe.network(given, data.classes)(pictures).shape == (2, CLASSES)


def test_each_residual_block_begins_as_its_shortcut():
    model = find_recipe("resnet18").network(options("resnet18", ""), 3)
    norms = [block.last_norm.weight for block in model.blocks() if hasattr(block, "last_norm")]
    assert len(norms) == 8
    assert not any(weight.any() for weight in norms)


def test_vectors_of_the_transformer_do_not_decay():
    model = small_vit(options("vit", ""), 3)
    groups = find_recipe("vit").parameter_groups
    decayed = {name for name, each in model.named_parameters() if not groups(name, each)}
    assert "encoder.layers.encoder_layer_0.mlp.0.weight" in decayed
    assert not {"class_token", "encoder.pos_embedding", "encoder.ln.weight"} & decayed
