"""The commands of the page on ImageNet: one digest on one host, on two, and with stages."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import hosts
import warm
from folders import write_pictures
from lockstep.record.reader import read_run
from lockstep.tools.recipes.catalog import IMAGE_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "imagenet.md").read_text()
COMMANDS = re.findall(r"^ *\$ lockstep (run .*--nnodes 2 .*)$", PAGE, re.MULTILINE)
SMALL = "--size 32 --batch-size 8 --microbatches 4 --epochs 1 --threads 1 --json -q"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures") / "all", ["a", "b"], 5)


def read_summary(process):
    """Wait for a command; return the object that it prints last."""
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    found = [line for line in output.splitlines() if '"digest"' in line]
    return json.loads(found[-1][found[-1].index("{") :]) if found else None


def start(command, folder, popen=warm.Popen, **options):
    folder.mkdir(exist_ok=True)
    return popen(
        [*warm.LOCKSTEP, *shlex.split(command)],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def read_checkpoints(folder):
    return read_run(folder).checkpoints if (folder / "record.jsonl").exists() else []


def test_the_page_has_a_command_for_each_host():
    assert [re.search(r"--node-rank (\d)", each)[1] for each in COMMANDS] == ["0", "1"]


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_give_the_digest_of_one_process(tmp_path, pictures):
    one = start(f"train resnet50 --data {pictures} {SMALL}", tmp_path / "one")
    wanted = read_summary(one)
    with hosts.network("a", "b") as net:
        running = []
        for name, command in zip("ab", COMMANDS, strict=True):
            command = command.replace("-n 4", "-n 2").replace("imagenet", str(pictures))
            command = command.replace("10.0.0.1", net["a"].address)
            running.append(
                start(f"{command} {SMALL}", tmp_path / name, net[name].popen, start=warm.Popen)
            )
        found = [read_summary(process) for process in running]
    assert found[1] is None, "host 0 prints the summary"
    for key in ("digest", "optimizer_digest", "loss", "accuracy", "top5_accuracy"):
        assert found[0][key] == wanted[key], key
    assert found[0]["world_size"] == 4
    (weights,) = (tmp_path / "a" / "runs").glob("*/weights.safetensors")
    (alone,) = (tmp_path / "one" / "runs").glob("*/weights.safetensors")
    assert weights.read_bytes() == alone.read_bytes()
    launch = f"run -n 2 -m lockstep train resnet50 --data {pictures} --evaluate --weights {weights}"
    again = read_summary(start(f"{launch} {SMALL.replace('--epochs 1', '')}", tmp_path / "again"))
    assert (again["loss"], again["digest"]) == (wanted["loss"], wanted["digest"])


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", IMAGE_NAMES)
def test_every_network_has_one_digest_in_every_layout(tmp_path, pictures, recipe):
    layouts = ["-n 1", "-n 4 --stages 2"]
    if recipe in ("resnet18", "vit"):
        layouts += ["-n 2", "-n 4", "-n 2 --stages 2"]
    digests = set()
    for number, layout in enumerate(layouts):
        command = f"train {recipe} --data {pictures} {SMALL} --mixup 0.2 --ema 0.9 {layout}"
        found = read_summary(start(command, tmp_path / f"{number}"))
        digests.add((found["digest"], found["optimizer_digest"], found["ema_loss"]))
    assert len(digests) == 1


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_a_killed_training_with_mixup_and_an_average_continues_in_stages(tmp_path, pictures):
    settings = f"{SMALL.replace('--epochs 1', '--epochs 9')} --mixup 0.2 --ema 0.9 --name one"
    command = f"train resnet18 --data {pictures} {settings} --checkpoint-every 1 --lr-decay step"
    wanted = read_summary(start(command, tmp_path / "whole"))
    killed = start(f"{command} -n 2", tmp_path / "killed")
    folder = tmp_path / "killed" / "runs" / "one"
    while not any(line["step"] > 2 for line in read_checkpoints(folder)):
        assert killed.poll() is None
        time.sleep(0.01)
    processes = psutil.Process(killed.pid).children(recursive=True)
    for process in [killed, *processes]:
        process.kill()
    killed.communicate()
    psutil.wait_procs(processes)
    again = start("train --resume one -n 2 --stages 2 --json -q", tmp_path / "killed")
    found = read_summary(again)
    for key in ("digest", "optimizer_digest", "loss", "accuracy", "ema_loss", "ema_accuracy"):
        assert found[key] == wanted[key], key
    assert 3 <= found["resumed_from_step"] < 9
