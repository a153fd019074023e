"""The text that `lockstep train` ends with."""

import json

import pytest

from lockstep.kernel.errors import FileError
from lockstep.tools.commands.training_summary import print_summary

SUMMARY = {
    "recipe": "vit", "world_size": 2, "epochs": 3, "steps": 12, "samples": 48, "accuracy": 0.5,
    "top5_accuracy": 0.75, "held_out": 8, "loss": 1.25, "resumed_from_step": None,
    "samples_per_second": 4.0, "seconds": 12.0, "run": "runs/one", "optimizer_digest": "0pt",
    "digest": "d16e57",
}  # fmt: skip


def test_top_1_and_top_5_of_the_weights_and_of_their_average(capsys):
    averaged = {"ema_loss": 1.5, "ema_accuracy": 0.25, "ema_top5_accuracy": 1.0}
    print_summary(SUMMARY | averaged, quiet=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trained    vit on 2 ranks: 3 epochs, 12 steps, 48 samples"
    assert lines[1] == "accuracy   top-1 50.00%, top-5 75.00% of 8 held-out samples, loss 1.2500"
    assert lines[2] == "averaged   top-1 25.00%, top-5 100.00% with averaged weights, loss 1.5000"
    assert lines[-2] == "digest     d16e57"


def test_an_evaluation_names_the_weights_and_no_run(capsys):
    found = SUMMARY | {"epochs": 0, "steps": 0, "run": None, "weights": "w.pth"}
    del found["optimizer_digest"]
    print_summary(found, quiet=False, as_json=True)
    printed, beside = capsys.readouterr()
    assert json.loads(printed) == found
    names = [line.partition(" ")[0] for line in beside.splitlines()]
    assert names == ["evaluated", "accuracy", "speed", "digest"]
    assert "vit on 2 ranks: w.pth" in beside


def test_an_incomplete_record_is_an_error_after_the_summary(capsys):
    with pytest.raises(FileError, match="disk full"):
        print_summary(SUMMARY | {"failure": "disk full"}, quiet=False, as_json=False)
    assert "d16e57" in capsys.readouterr().out
