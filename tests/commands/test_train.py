"""`lockstep train`: the main job, and one sentence for each mistake."""

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep as ls
from lockstep import cli
from lockstep.data.datasets import digits
from lockstep.errors import LockstepError
from lockstep.recipes.digits import digit_network

FIELDS = {
    "recipe", "world_size", "replicas", "stages", "microbatches", "epochs", "steps", "samples",
    "loss", "accuracy", "digest", "seconds", "samples_per_second",
}  # fmt: skip


def train(*arguments):
    """Run the command in this process; return (exit status, what it printed)."""
    outcome = CliRunner().invoke(cli.cli, ["train", *map(str, arguments), "-q"])
    if isinstance(outcome.exception, LockstepError):
        return outcome.exception.exit_status, str(outcome.exception)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.exit_code, outcome.output


def test_one_digest_loss_and_accuracy_for_every_number_of_ranks(tmp_path):
    found = []
    for n in (1, 2, 3, 4):
        status, output = train(
            "digits", "-n", n, "--epochs", 1, "--seed", 7, "--json", "--runs", tmp_path,
            *(["--activation-checkpointing"] if n == 3 else []),
        )  # fmt: skip
        assert status == 0
        found.append(json.loads(output.splitlines()[-1]))
    for n, summary in enumerate(found, start=1):
        assert set(summary) >= FIELDS
        assert summary["world_size"] == summary["replicas"] == n
        assert (summary["epochs"], summary["steps"], summary["samples"]) == (1, 45, 1438)
        weights = load_file(Path(summary["run"]) / "weights.safetensors")
        assert ls.digest(weights) == summary["digest"]
    for name in ("digest", "optimizer_digest", "loss", "accuracy"):
        assert len({summary[name] for summary in found}) == 1
    assert found[0]["accuracy"] > 0.4


def test_another_seed_or_number_of_microbatches_gives_another_digest(tmp_path):
    digests = set()
    for arguments in [(), ("--seed", 1), ("--microbatches", 4)]:
        _, output = train("digits", "--epochs", 1, "--json", "--runs", tmp_path, *arguments)
        digests.add(json.loads(output)["digest"])
    assert len(digests) == 3


def test_the_digests_are_among_the_last_lines(tmp_path):
    status, output = train("digits", "--epochs", 1, "--runs", tmp_path, "--name", "mine")
    assert status == 0
    weights = load_file(tmp_path / "mine" / "weights.safetensors")
    assert ls.digest(weights) in output.splitlines()[-2]
    assert (tmp_path / "mine" / "record.jsonl").exists()


def test_the_network_is_the_tutorials():
    model = digit_network()
    assert sum(parameter.numel() for parameter in model.parameters()) == 21840
    assert model(digits().tensors[0][:2]).shape == (2, 10)


def idx(folder, part, count, labels=None):
    """Write small MNIST files."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count, dtype=torch.uint8) % 10 if labels is None else labels
    folder.mkdir(exist_ok=True)
    header = struct.pack(">IIII", 0x803, count, 28, 28)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(header + bytes(images.flatten().tolist()))
    data = struct.pack(">II", 0x801, count) + bytes(labels.tolist())
    (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(data))


def test_mnist_trains_from_its_four_files_plain_or_gzipped(tmp_path):
    idx(tmp_path / "mnist", "train", 50)
    idx(tmp_path / "mnist", "t10k", 20)
    status, output = train(
        "mnist", "-n", 2, "--data", tmp_path / "mnist", "--epochs", 1, "--batch-size", 20,
        "--json", "--runs", tmp_path / "runs",
    )  # fmt: skip
    assert status == 0
    summary = json.loads(output)
    assert (summary["samples"], summary["held_out"], summary["steps"]) == (50, 20, 3)


def truncated(folder):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])


def damaged(folder):
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])


def mislabelled(folder):
    idx(folder, "train", 50, labels=torch.full((50,), 10, dtype=torch.uint8))


def emptied(folder):
    idx(folder, "train", 0)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (truncated, "train-images-idx3-ubyte"),
        (damaged, "train-labels-idx1-ubyte.gz"),
        (mislabelled, "train-labels-idx1-ubyte.gz"),
        (emptied, "train-images-idx3-ubyte|empty|no sample"),
    ],
)
def test_a_damaged_file_is_named_in_one_sentence(tmp_path, spoil, sentence):
    idx(tmp_path / "mnist", "train", 50)
    idx(tmp_path / "mnist", "t10k", 20)
    spoil(tmp_path / "mnist")
    status, message = train("mnist", "--data", tmp_path / "mnist", "--runs", tmp_path / "runs")
    assert status in (1, 2)
    assert "\n" not in message
    assert any(part in message for part in sentence.split("|"))


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["digits", "-n", 0], 2, "0 is not in the range x>=1"),
        (["digits", "-n", -1], 2, "-1 is not in the range x>=1"),
        (["digits", "-n", 9], 2, "-n 9 replicas cannot share 8 micro-batches"),
        (["digits", "-n", 3, "--stages", 2], 2, "-n 3 must be a multiple of --stages 2"),
        (["digits", "-n", 6, "--stages", 2, "--microbatches", 2], 2, "3 replicas of 2 stages"),
        (["digits", "--schedule", "gpipe"], 2, "--schedule gpipe needs pipeline stages"),
        (["digits", "--epochs", 0], 2, "0 is not in the range"),
        (["digits", "--batch-size", 0], 2, "0 is not in the range"),
        (["digits", "--download"], 2, "there is nothing to download"),
        (["letters"], 2, "'letters' is not one of"),
        (["mnist", "--data", "/nowhere"], 1, "--download"),
        (["digits", "--runs", "/dev/null/runs"], 1, "/dev/null/runs"),
        (["digits", "--lr", 1e30, "--epochs", 1], 1, "the loss is nan; training stopped"),
    ],
    ids=str,
)
def test_a_mistake_gets_one_sentence_and_its_exit_status(tmp_path, arguments, status, sentence):
    if "--runs" not in arguments:
        arguments = [*arguments, "--runs", tmp_path]
    found, message = train(*arguments)
    assert found == status
    assert sentence in message
    assert "Traceback" not in message


def test_tensorboard_writes_into_the_folder_of_the_run(tmp_path):
    arguments = ("digits", "--epochs", 1, "--runs", tmp_path, "--name", "mine")
    assert train(*arguments, "--logger", "tensorboard")[0] == 0
    events = EventAccumulator(str(tmp_path / "mine" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(45))


def test_a_logger_whose_package_is_missing_is_refused_before_anything_is_created(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ls.loggers.MLflow, "package", "no_such_dashboard")
    loggers = ["--logger", "tensorboard", "--logger", "mlflow"]
    status, message = train("digits", "--runs", tmp_path / "runs", *loggers)
    assert status == 2
    assert message == (
        "MLflow needs the package no_such_dashboard: pip install 'torch-lockstep[mlflow]'"
    )
    assert not (tmp_path / "runs").exists()


def test_a_name_that_is_taken_is_refused_and_nothing_is_lost(tmp_path):
    assert train("digits", "--epochs", 1, "--runs", tmp_path, "--name", "mine")[0] == 0
    before = (tmp_path / "mine" / "record.jsonl").read_bytes()
    status, message = train("digits", "--epochs", 1, "--runs", tmp_path, "--name", "mine")
    assert status in (1, 2)
    assert "already holds the record of a run" in message
    assert (tmp_path / "mine" / "record.jsonl").read_bytes() == before


def test_a_full_disk_ends_the_record_but_not_the_training(tmp_path):
    """No file may grow beyond 110 KiB: the weights fit, the record of 720 steps does not."""
    arguments = "train digits --epochs 2 --batch-size 4 --microbatches 1 --json -q --name mine"
    command = f"ulimit -f 110; exec {sys.executable} -m lockstep {arguments} --runs {tmp_path}"
    outcome = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    assert outcome.returncode == 1
    assert "File too large" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    weights = load_file(tmp_path / "mine" / "weights.safetensors")
    assert json.loads(outcome.stdout.splitlines()[-1])["digest"] == ls.digest(weights)
