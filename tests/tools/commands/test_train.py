"""`lockstep train`: the main job, and one sentence for each mistake."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import lockstep as ls
import warm
from lockstep import cli
from lockstep.comm import backend
from lockstep.kernel.errors import LockstepError, RankError
from lockstep.launcher import run_folder
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.launch_script import launch_script
from lockstep.portable import kernels
from lockstep.portable.arithmetic_difference import parse
from lockstep.portable.arithmetic_families import FAMILIES
from lockstep.record.reader import read_run
from lockstep.tools.commands.recorded_options import resolve_options
from lockstep.tools.commands.train import _list_words, command
from lockstep.tools.recipes import digits

FIELDS = {
    "recipe", "world_size", "replicas", "stages", "microbatches", "epochs", "steps", "samples",
    "loss", "accuracy", "digest", "seconds", "samples_per_second", "resumed_from_step",
}  # fmt: skip


DIGEST = "06ec0a1a6094bc348013507bd4622c81b97ab9e5792dbddbbe8410eda38c264a"
OPTIMIZER_DIGEST = "27422d8ccc13a3eaa525f9ff44e7c9c9a2f70413ebae69d4c8d949798d8f9fff"
"""Of an epoch of 9 steps with portable bits and torch 2.13."""

FEW_STEPS = ("--epochs", 1, "--batch-size", 160)
"""An epoch of 9 steps, where the result of the training does not matter."""


def train(*arguments):
    """Run the command in this process; return (exit status, what it printed)."""
    outcome = CliRunner().invoke(cli.cli, ["train", *map(str, arguments), "-q"])
    if isinstance(outcome.exception, LockstepError):
        return outcome.exception.exit_status, str(outcome.exception)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.exit_code, outcome.output


def test_one_digest_loss_and_accuracy_for_every_number_of_ranks(tmp_path):
    summaries = []
    for n in (1, 3):
        status, output = train(
            "digits", "-n", n, "--epochs", 1, "--seed", 7, "--json", "--runs", tmp_path
        )  # fmt: skip
        assert status == 0
        summary = json.loads(output.splitlines()[-1])
        summaries.append(summary)
        assert set(summary) >= FIELDS
        assert summary["world_size"] == summary["replicas"] == n
        assert (summary["epochs"], summary["steps"], summary["samples"]) == (1, 45, 1438)
        weights = load_file(Path(summary["run"]) / "weights.safetensors")
        assert ls.digest(weights) == summary["digest"]
        assert summary["resumed_from_step"] is None
    for name in ("digest", "optimizer_digest", "loss", "accuracy"):
        assert len({summary[name] for summary in summaries}) == 1
    assert summaries[0]["accuracy"] > 0.2


@pytest.mark.skipif(not backend.available(), reason="portable bits need the extension")
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="digests of torch 2.13")
def test_the_digest_is_that_of_every_processor(tmp_path):
    arguments = ("digits", *FEW_STEPS, "--portable", "--json", "--runs", tmp_path)
    _, output = train(*arguments, "--name", "mine")
    summary = json.loads(output.splitlines()[-1])
    assert summary["portable"]
    assert (summary["digest"], summary["optimizer_digest"]) == (DIGEST, OPTIMIZER_DIGEST), (
        "this machine computes other bits than every x86-64 processor with AVX2 must compute in "
        "portable mode; if the recipe or the kernels changed on purpose, change this digest, the "
        "README's and kernels.CONSTANTS"
    )
    assert read_run(tmp_path / "mine").header["options"]["portable"]
    status, message = train("--resume", tmp_path / "mine", "--no-portable")
    assert (status, message) == (
        2,
        f"--portable: the run {tmp_path}/mine keeps its recipe and options when it is resumed; "
        "omit it, or start a new run",
    )


IN_THIS_PROCESS = """
import json, sys
from lockstep.portable import arithmetic
from lockstep.tools.commands.recorded_options import resolve_options
from lockstep.tools.recipes.digits import train
given = json.loads(sys.argv[1])
summary = train(resolve_options("digits", given), sys.argv[2])
print(json.dumps([summary["digest"], arithmetic.compute()]))
"""
OPTIONS = {"microbatches": 8, "seed": 0, "threads": 1, "workers": 0, "portable": None}
OPTIONS |= dict.fromkeys(("bf16", "quiet"), False)


@pytest.mark.stress
@pytest.mark.skipif(not backend.available(), reason="portable bits need the extension")
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="apt install qemu-user")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("processor", ["Haswell", "Skylake-Client", "EPYC-Rome"])
def test_emulated_processors_compute_the_same_bits(tmp_path, processor):
    """Both vendors, without AVX-512. An emulator computes approximate instructions exactly.

    Processors without AVX2, such as Denverton, cannot: their description is that of the machine.
    """
    given = json.dumps(OPTIONS | {"epochs": 1, "batch_size": 160, "portable": True, "quiet": True})
    emulator = ["qemu-x86_64", "-cpu", processor, sys.executable]
    ended = subprocess.run(
        [*emulator, "-c", IN_THIS_PROCESS, given, str(tmp_path)],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    digest, arithmetic = json.loads(ended.stdout.splitlines()[-1])
    hashes = parse(arithmetic)
    expected = parse(kernels.CONSTANTS["2.13"])
    assert {name: hashes[name] for name in expected} == expected
    assert digest == DIGEST


def test_bits_need_not_be_portable(tmp_path, monkeypatch):
    options = (*FEW_STEPS, "--json", "--runs", tmp_path)
    _, output = train("digits", *options, "--no-portable")
    alone = json.loads(output.splitlines()[-1])
    assert (alone["portable"], alone["digest"] == DIGEST) == (False, False)
    assert parse(alone["arithmetic"]).keys() == FAMILIES.keys()
    monkeypatch.setenv("LOCKSTEP_PORTABLE", "0")
    _, output = train("digits", *options)
    assert json.loads(output.splitlines()[-1])["digest"] == alone["digest"]


def test_a_machine_without_portable_bits_trains_nevertheless(monkeypatch):
    given = []
    monkeypatch.setattr(digits, "init", lambda **options: given.append(options))
    monkeypatch.setattr(digits, "has_portable_bits", lambda: False)
    options = resolve_options("digits", OPTIONS)
    assert digits._join(options).portable is False
    assert given == [{"threads": 1, "device": "cpu", "portable": None}]


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A run of few steps: its folder, the digest of its weights, and what was printed."""
    folder = tmp_path_factory.mktemp("few") / "mine"
    status, output = train("digits", *FEW_STEPS, "--runs", folder.parent, "--name", "mine")
    assert status == 0
    return folder, ls.digest(load_file(folder / "weights.safetensors")), output


def test_the_digests_are_among_the_last_lines(mine):
    folder, digest, output = mine
    assert digest in output.splitlines()[-2]
    assert "optimizer state and of the weights" in output.splitlines()[-1]
    header = read_run(folder).header
    assert (
        header["optimizer"].items() >= {"class": "SGD", "momentum": 0.9, "nesterov": False}.items()
    )
    assert "lr" not in header["optimizer"], "it is part of every step"
    assert header["layout"]["storage"] == "replicated"


def launched(folder, *arguments):
    """Launch two ranks that run the command each; return the folder of the launch."""
    config = LaunchConfig("lockstep", ("train", *arguments), "module", 2, log_dir=str(folder))
    assert launch_script(config) == 0
    (found,) = folder.iterdir()
    return found


def test_ranks_of_a_launch_train_as_its_ranks(tmp_path, capfd, mine):
    folder = launched(tmp_path / "runs", "digits", *map(str, FEW_STEPS), "--json", "-q")
    printed = [line for line in capfd.readouterr().out.splitlines() if line]
    assert len(printed) == 1, "rank 0 alone prints the summary"
    summary = json.loads(printed[0].removeprefix("[0] "))
    _, digest, _ = mine
    assert summary["digest"] == digest
    assert summary["world_size"] == 2
    assert summary["run"] == os.path.relpath(folder)
    assert (folder / "weights.safetensors").exists()
    run = read_run(folder)
    assert run.end["digest"] == digest
    assert (run.header["recipe"], run.layout["world_size"]) == ("digits", 2)


def test_an_elastic_run_prints_the_summary_last_and_can_be_resumed(tmp_path, mine, undisturbed):
    _, digest, _ = mine
    elastic = ("digits", *FEW_STEPS, "--min", 1, "--max", 2, "--json", "--runs", tmp_path)
    status, output = train(*elastic, "--name", "elastic")
    assert status == 0
    summary = json.loads(output.splitlines()[-1])
    assert summary.keys() == undisturbed.keys()
    assert summary["digest"] == digest
    assert summary["world_size"] == 2
    assert Path(summary["run"]).resolve() == (tmp_path / "elastic").resolve()
    status, output = train("--resume", tmp_path / "elastic", "--min", 1, "--json")
    again = json.loads(output.splitlines()[-1])
    assert (again["digest"], again["resumed_from_step"]) == (digest, 9)


def test_the_command_line_of_a_rank_has_the_same_options():
    typed = [
        *("digits", "--epochs", "3", "--lr", "0.1", "--bf16"),
        *("-q", "--no-portable"),
    ]
    given = command.make_context("train", list(typed)).params
    options = {name: value for name, value in given.items() if name != "recipe"}
    words = _list_words("digits", options)
    assert command.make_context("train", words[1:]).params == given
    assert words[:2] == ["train", "digits"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("digits", "--resume", "night"), "--resume is an option of the launch here"),
    ],
)
def test_what_ranks_cannot_do_is_refused(tmp_path, capfd, arguments, sentence):
    with pytest.raises(RankError, match="exited with status 2"):
        launched(tmp_path / "runs", *arguments)
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["digits", "-n", 9], 2, "-n 9 replicas cannot share 8 micro-batches"),
        (["digits", "-n", 3, "--stages", 2], 2, "-n 3 must be a multiple of --stages 2"),
        (["digits", "-n", 6, "--stages", 2, "--microbatches", 2], 2, "3 replicas of 2 stages"),
        (["digits", "--epochs", 0], 2, "0 is not in the range"),
        (["letters"], 2, "'letters' is not 'digits'"),
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


def test_a_name_that_is_taken_is_refused_and_nothing_is_lost(mine):
    folder, _, _ = mine
    before = (folder / "record.jsonl").read_bytes()
    status, message = train("digits", *FEW_STEPS, "--runs", folder.parent, "--name", "mine")
    assert status in (1, 2)
    assert "already holds the record of a run" in message
    assert (folder / "record.jsonl").read_bytes() == before


def test_a_full_disk_ends_the_record_but_not_the_training(tmp_path):
    """No file may grow beyond 110 KiB: the weights fit, the record of 360 steps does not."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (110 << 10, 110 << 10))"
    program = f"{limit}; from lockstep.cli import main; main()"
    command = [sys.executable, "-c", program, "train", "digits", "--epochs", "1"]
    command += ["--batch-size", "4", "--microbatches", "1", "--json", "-q"]
    command += ["--name", "mine", "--runs", str(tmp_path)]
    outcome = warm.run(command, timeout=100, text=True)
    assert outcome.returncode == 1
    assert "File too large" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    weights = load_file(tmp_path / "mine" / "weights.safetensors")
    assert json.loads(outcome.stdout.splitlines()[-1])["digest"] == ls.digest(weights)


# --- resuming ---------------------------------------------------------------------------------

SAME = ("digest", "optimizer_digest", "loss", "accuracy", "steps", "samples", "epochs")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train two epochs of 45 steps; return the summary."""
    place = tmp_path_factory.mktemp("undisturbed")
    status, output = train("digits", "--epochs", 2, "--json", "--runs", place, "--name", "whole")
    assert status == 0
    return json.loads(output.splitlines()[-1])


def start(folder, *arguments):
    """Start a run in `folder` in a process of its own."""
    program = "from lockstep.cli import main; main()"
    command = [sys.executable, "-c", program, "train", "digits", "-q", "--epochs", "2"]
    command += ["--runs", str(folder.parent), "--name", folder.name, *map(str, arguments)]
    return warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_line(process, folder, kind, step):
    """Wait until the record has a line of a kind with at least this step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "record.jsonl").exists():
            run = read_run(folder)
            lines = run.checkpoints if kind == "checkpoint" else []
            numbers = [line["step"] for line in lines] + run.steps.step[-1:].tolist() * (not lines)
            if numbers and max(numbers) >= step and (lines or kind == "step"):
                return
        time.sleep(0.01)
    raise AssertionError(f"no {kind} {step}: {process.communicate(timeout=20)}")


def kill_all(process):
    """Kill a process, and all that it started."""
    started = psutil.Process(process.pid).children(recursive=True)
    for each in [process, *started]:
        each.kill()
    process.communicate(timeout=20)
    psutil.wait_procs(started, timeout=20)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Kill every process of a run on 2 ranks in its second epoch; return the run's folder."""
    folder = tmp_path_factory.mktemp("killed") / "night"
    process = start(folder, "-n", 2, "--checkpoint-every", 7, "--workers", 1)
    try:
        wait_for_line(process, folder, "checkpoint", 49)
    finally:
        kill_all(process)
    assert process.returncode == -signal.SIGKILL
    run = read_run(folder)
    assert run.state == "died"
    assert len(run.steps) < 90
    return folder


def resume(folder, *arguments):
    """Resume a run; return (exit status, output)."""
    found = train("--resume", folder, *arguments)
    run_folder.release_run(folder)
    return found


@pytest.mark.parametrize(
    "layout",
    [("-n", 1, "--workers", 0), ("--stages", 2, "--checkpoint-every", 1000)],
    ids=str,
)
def test_a_killed_run_goes_on_in_any_layout(tmp_path, killed, undisturbed, layout):
    folder = tmp_path / "copy"
    shutil.copytree(killed, folder)
    status, output = resume(folder, "--json", *layout)
    assert status == 0
    summary = json.loads(output.splitlines()[-1])
    assert {name: summary[name] for name in SAME} == {name: undisturbed[name] for name in SAME}
    assert 49 <= summary["resumed_from_step"] < 90
    assert summary["run"] == str(folder)
    given = dict(zip(layout[::2], layout[1::2], strict=True))
    assert summary["world_size"] == given.get("-n", 2), "as many ranks as before by default"
    run = read_run(folder)
    whole = read_run(Path(undisturbed["run"]))
    assert run.steps.step.tolist() == list(range(90)), "no batch is lost or used twice"
    assert run.steps.loss.tolist() == whole.steps.loss.tolist()
    assert [line["evaluation"] for line in run.epochs] == [
        line["evaluation"] for line in whole.epochs
    ]
    assert run.state == "done"
    assert ls.digest(load_file(folder / "weights.safetensors")) == undisturbed["digest"]


def test_a_run_that_is_done_prints_its_summary_again(tmp_path, undisturbed):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed["run"], folder)
    places = Path(undisturbed["run"]), folder
    status, output = resume(folder, "--json", "-n", 2)
    assert status == 0
    summary = json.loads(output.splitlines()[-1])
    assert {name: summary[name] for name in SAME} == {name: undisturbed[name] for name in SAME}
    assert summary["resumed_from_step"] == 90
    assert len(read_run(folder).steps) == 90
    kept = [{path.name for path in (place / "checkpoints").iterdir()} for place in places]
    assert kept[0] == kept[1]  # nothing new to save


def test_a_run_that_is_asked_to_stop_says_how_to_go_on(tmp_path, undisturbed):
    folder = tmp_path / "night"
    process = start(folder)
    try:
        wait_for_line(process, folder, "step", 3)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            kill_all(process)
    assert process.returncode == 75
    assert f"continue with: lockstep train --resume {folder}" in said
    assert "Traceback" not in said
    assert read_run(folder).state == "stopped"
    status, output = resume(folder)
    assert status == 0
    assert undisturbed["digest"] in output.splitlines()[-2]
    assert "resumed    after step " in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lr", 0.5], "--lr: the run {} keeps its recipe and options"),
        (["digits"], "RECIPE: the run {} keeps its recipe and options"),
        (["-n", 3, "--stages", 2], "-n 3 must be a multiple of --stages 2"),
    ],
    ids=str,
)
def test_a_resumed_run_keeps_what_decides_its_results(undisturbed, arguments, sentence):
    before = (Path(undisturbed["run"]) / "record.jsonl").read_bytes()
    status, message = resume(undisturbed["run"], *arguments)
    assert status == 2
    assert sentence.format(undisturbed["run"]) in message
    assert (Path(undisturbed["run"]) / "record.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (None, "there is no run"),
        ({"kind": "run", "options": {"lr": 1}}, "lockstep run --resume"),
        ({"kind": "run", "options": {"recipe": "digits"}}, "its record has no option "),
    ],
)
def test_a_folder_that_cannot_be_resumed(tmp_path, header, sentence):
    if header is not None:
        (tmp_path / "record.jsonl").write_text(json.dumps(header) + "\n")
    status, message = resume(tmp_path)
    assert status == 2
    assert sentence in message
    assert "\n" not in message


def test_a_run_that_is_going_is_not_resumed(tmp_path, monkeypatch):
    wait = functools.partial(run_folder.wait_until_free, timeout=0.2)
    monkeypatch.setattr(run_folder, "wait_until_free", wait)
    folder = tmp_path / "night"
    process = start(folder, "--epochs", 30)
    try:
        wait_for_line(process, folder, "step", 0)
        status, message = resume(folder)
        assert process.poll() is None, "it was going"
    finally:
        kill_all(process)
    assert status == 2
    assert "still" in message


def test_a_recipe_or_a_run_is_needed(tmp_path):
    status, message = train("--runs", tmp_path)
    assert status == 2
    assert "Missing argument 'RECIPE'" in message
