"""Recorded fingerprints of units: the same hashes in every layout, and no other bits."""

from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.checksum import checksum
from lockstep.kernel.errors import StateError, UsageError
from lockstep.model.fingerprint_file import (
    FOLDER,
    list_fingerprints,
    read_fingerprints,
)
from lockstep.training.fingerprint_recorder import VARIABLE, read_selection

ADAM = partial(torch.optim.AdamW, lr=0.01)


class Block(nn.Module):
    """A residual block that draws, and whose output has two consumers in the next one."""

    def __init__(self, width=6):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.inner(x).relu()


def model():
    torch.manual_seed(3)
    blocks = [nn.Linear(4, 6), Block(), Block(), nn.Sequential(nn.ReLU(inplace=True)), Block()]
    return nn.Sequential(*blocks, nn.Linear(6, 3))


def batches(count, size=12):
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, 4, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def train(folder, steps=3, fingerprints="unit", **options):
    """Train and record; return the digests."""
    options = {"microbatches": 4, "seed": 2} | options
    with ls.Trainer(
        model(), nn.CrossEntropyLoss(), ADAM, loggers=folder, fingerprints=fingerprints, **options
    ) as trainer:
        for batch in batches(steps):
            trainer.step(batch)
        return trainer.digest(), trainer.optimizer_digest()


def merged(fingerprints):
    """Return what all ranks recorded of a step, by micro-batch; stages in their order."""
    found = {}
    for each in fingerprints:
        for leaf, value in each.data.items():
            assert found.setdefault(("data", leaf), value) == value
        for name in ("backward", "leaf_gradients", "leaf_buffers"):
            for leaf, values in getattr(each, name).items():
                for key, value in values.items():
                    assert (name, leaf, key) not in found, "only one rank computes it"
                    found[name, leaf, key] = value
        for leaf, loss in each.losses.items():
            found["losses", leaf] = loss
        found["loss"] = each.loss
        for name in ("before", "gradients", "state"):
            for key, value in getattr(each, name).items():
                assert found.setdefault((name, key), value) == value
    calls = sorted((place, calls) for each in fingerprints for place, calls in each.calls.items())
    for (leaf, _), parts in calls:
        found.setdefault(("calls", leaf), []).extend(parts)
    return found


def stages(count, **options):
    return {"pipeline": ls.PipelineConfig(stages=count, **options)}


LAYOUTS = {
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "shared": (2, {"storage": "shared"}),
    "sharded": (2, {"storage": "sharded"}),
    "1f1b": (2, stages(2, balance=[2, 4], schedule="1f1b")),
    "zero bubble": (2, stages(2, balance=[3, 3], schedule="zero-bubble")),
    "2 x 2": (4, stages(2, balance=[4, 2])),
    "recomputed": (1, {"activation_checkpointing": True}),
}


def test_the_hashes_are_the_same_in_every_layout_and_change_no_bit(ranks, world_of_one, tmp_path):
    digests = train(tmp_path / "plain", fingerprints=None)
    assert not (tmp_path / "plain" / FOLDER).exists()
    assert train(tmp_path / "whole") == digests
    found = read_fingerprints(tmp_path / "whole")
    assert found.remarks == []
    assert list(found.steps) == [0, 1, 2]
    whole = {step: merged(each) for step, each in found.steps.items()}
    first = whole[0]
    inputs, _ = batches(1)[0]
    assert first["calls", 1][0] == ("enter", "0", (checksum(inputs[3:6]),))
    units = [str(number) for number in range(6)]
    assert [name for kind, name, _ in first["calls", 3] if kind == "enter"] == units
    for leaf in range(4):
        for unit in units:
            assert ("backward", leaf, (unit, 0, 0)) in first
        for name, _ in model().named_parameters():
            assert ("leaf_gradients", leaf, name) in first
    assert len({first["leaf_buffers", leaf, "1.inner.1.running_mean"] for leaf in range(4)}) == 4
    assert (
        first["state", "0.weight"] == whole[1]["before", "0.weight"] != first["before", "0.weight"]
    )
    assert ("gradients", "5.bias") in first
    for name, (nprocs, options) in LAYOUTS.items():
        folder = tmp_path / name
        done = ranks(partial(train, folder, **options), nprocs)
        assert {*done} == {digests}, name
        there = read_fingerprints(folder)
        assert there.remarks == []
        assert len(list((folder / FOLDER).iterdir())) == nprocs
        for step, each in there.steps.items():
            here = whole[step]
            if name == "shared":  # `.grad` holds no sums there
                here = {key: value for key, value in here.items() if key[0] != "gradients"}
            assert merged(each) == here, f"step {step} with {name}"


class Branching(nn.Module):
    """A model without blocks; calls one module twice, and another never."""

    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(self.first(x)).detach() + x), x.sum()


def test_a_model_without_blocks_has_its_modules(world_of_one, tmp_path):
    trainer = ls.Trainer(
        Branching(), nn.CrossEntropyLoss(), ADAM, microbatches=2, loggers=tmp_path,
        fingerprints="unit", audit=False,  # which warns of two backward passes
    )  # fmt: skip
    with trainer, trainer.manual_step() as step:
        for inputs, targets in step.microbatches(batches(1)[0]):
            loss = nn.functional.cross_entropy(trainer.model(inputs)[0], targets)
            step.backward(loss / 2, retain_graph=True)
            step.backward(loss / 2)
    (found,) = read_fingerprints(tmp_path).steps[0]
    names = [(kind, name) for kind, name, _ in found.calls[0, 0]]
    assert names[:3] == [("enter", "Branching"), ("enter", "first"), ("leave", "first")]
    assert names.count(("enter", "first")) == 2
    assert {*found.backward[0]} == {("Branching", 0, 0), ("last", 0, 0)}
    assert {*found.leaf_gradients[1]} == {"last.weight", "last.bias"}


class Plain(nn.Module):
    """A model without blocks, whose class `fully_shard` replaces by another one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def test_a_sharded_model_has_the_names_of_its_own_modules(world_of_one, tmp_path):
    found = []
    for storage in ("replicated", "sharded"):
        torch.manual_seed(1)
        with ls.Trainer(
            Plain(), nn.CrossEntropyLoss(), ADAM, microbatches=2, storage=storage,
            loggers=tmp_path / storage, fingerprints="unit",
        ) as trainer:  # fmt: skip
            trainer.step(batches(1)[0])
        found.append(merged(read_fingerprints(tmp_path / storage).steps[0]))
    assert found[0] == found[1]
    assert ("backward", 0, ("Plain", 0, 0)) in found[0]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("unit", range(300)),
        ("unit:100-110", range(100, 111)),
        ("unit:7", [7]),
        ("unit:290-", range(290, 300)),
        ("unit:%50", range(0, 300, 50)),
        ("unit:0-1, %100,7", [0, 1, 7, 100, 200]),
    ],
)
def test_steps_are_selected(text, steps, monkeypatch):
    assert [step for step in range(300) if step in read_selection(text)] == list(steps)
    monkeypatch.setenv(VARIABLE, text)
    assert read_selection(None) == read_selection(text)
    assert read_selection("unit:5").ranges == ((5, 5),), "the argument comes first"


@pytest.mark.parametrize("text", ["units", "unit:", "unit:%0", "unit:a", "unit:1-2-3", "step:4"])
def test_another_form_is_one_sentence(text, monkeypatch):
    with pytest.raises(
        UsageError, match=r"fingerprints='.*' is not one of \"unit\" \(every step\)"
    ):
        read_selection(text)
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=VARIABLE):
        read_selection(None)


def test_chosen_steps_of_a_run_whose_script_says_nothing(
    world_of_one, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv(VARIABLE, "unit:%2")
    train(tmp_path / "run", steps=5, fingerprints=None)
    assert list(read_fingerprints(tmp_path / "run").steps) == [0, 2, 4]
    assert read_fingerprints(tmp_path / "elsewhere").steps == {}
    train([], steps=2, fingerprints=None)
    assert capfd.readouterr().err.count("no fingerprints are kept, because the run is not") == 1


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight += 1
        return self.layer(x)


def test_a_step_that_fails_is_not_recorded_and_fails_as_without(world_of_one, tmp_path):
    trainer = ls.Trainer(
        Writing(),
        nn.CrossEntropyLoss(),
        ADAM,
        microbatches=2,
        loggers=tmp_path,
        fingerprints="unit",
    )
    with pytest.raises(StateError):
        trainer.step(batches(1)[0])
    trainer.finish("failed")
    assert read_fingerprints(tmp_path).steps == {}
    hooks = [each._forward_hooks or each._forward_pre_hooks for each in trainer.module.modules()]
    assert not any(hooks)


def resumable(folder, steps, resume, **options):
    with ls.Trainer(
        model(), nn.CrossEntropyLoss(), ADAM, microbatches=4,
        checkpoint=ls.CheckpointConfig(every_steps=2, folder=folder),
        **{"fingerprints": "unit"} | options,
    ) as trainer:  # fmt: skip
        if resume:
            trainer.resume(folder / "checkpoints" / "step-2")
        for batch in batches(steps):
            trainer.step(batch)
            trainer._run._checkpoints.writer.wait()
        return trainer.digest()


def test_a_resumed_run_continues_its_files_in_another_layout(ranks, world_of_one, tmp_path):
    digest = resumable(tmp_path / "run", 5, resume=False)
    files = tmp_path / "run" / FOLDER
    whole = read_fingerprints(tmp_path / "run")
    with (files / "rank-0.jsonl").open("a") as file:
        file.write('{"kind":"step","st')  # killed while it wrote a line
    (lines,) = [path.read_text().splitlines() for path in files.iterdir()]
    ranks(partial(resumable, tmp_path / "run", 4, resume=True), 2)
    there = read_fingerprints(tmp_path / "run")
    assert there.remarks == []
    assert list(there.steps) == [0, 1, 2, 3], "steps from 2 on were taken again"
    assert [len(each) for each in there.steps.values()] == [1, 1, 2, 2]
    for step, each in there.steps.items():
        assert merged(each) == merged(whole.steps[step])
    assert (files / "rank-0.jsonl").read_text().splitlines()[: len(lines)] == lines
    assert digest


def test_steps_of_an_abandoned_attempt_do_not_count(world_of_one, tmp_path):
    """Also where the run is resumed without fingerprints, so that no launch follows."""
    resumable(tmp_path / "run", 5, resume=False)
    assert list(read_fingerprints(tmp_path / "run").steps) == [0, 1, 2, 3, 4]
    resumable(tmp_path / "run", 4, resume=True, fingerprints=None)
    assert list(read_fingerprints(tmp_path / "run").steps) == [0, 1]
    assert list(list_fingerprints(tmp_path / "run").steps) == [0, 1]
    resumable(tmp_path / "run", 4, resume=True, fingerprints="unit:3")
    assert list(read_fingerprints(tmp_path / "run").steps) == [0, 1, 3]


def test_damaged_lines_of_a_file_are_skipped(world_of_one, tmp_path):
    train(tmp_path, steps=3)
    path = tmp_path / FOLDER / "rank-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "[]\n{}\n", '{"kind":"step","step":0}\n', *lines[2:]]))
    found = read_fingerprints(tmp_path)
    assert "3 lines could not be read" in found.remarks[-1]
    assert list(found.steps) == [0, 1, 2]


def test_a_file_that_cannot_be_written_ends_no_training(world_of_one, tmp_path, capfd):
    (tmp_path / FOLDER).write_text("in the way")
    train(tmp_path, steps=3)
    said = capfd.readouterr().err
    assert said.count("the training continues without fingerprints of this rank") == 1
    assert (tmp_path / FOLDER).read_text() == "in the way"
