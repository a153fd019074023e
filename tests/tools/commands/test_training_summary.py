"""The text that `lockstep train` ends with."""

import json

import pytest

from lockstep.kernel.errors import FileError
from lockstep.tools.commands.train import print_summary

SUMMARY = {
    "recipe": "digits", "world_size": 2, "epochs": 3, "steps": 12, "samples": 48, "accuracy": 0.5,
    "held_out": 8, "loss": 1.25, "resumed_from_step": None,
    "samples_per_second": 4.0, "seconds": 12.0, "run": "runs/one", "optimizer_digest": "0pt",
    "digest": "d16e57",
}  # fmt: skip


def test_it_ends_with_the_digests_and_json_is_alone_on_standard_output(capsys):
    print_summary(dict(SUMMARY), quiet=False, as_json=True)
    printed, beside = capsys.readouterr()
    assert json.loads(printed) == SUMMARY
    lines = beside.splitlines()
    assert lines[0] == "trained    digits on 2 ranks: 3 epochs, 12 steps, 48 samples"
    assert lines[1] == "accuracy   50.00% of 8 held-out samples, loss 1.2500"
    assert [line.partition(" ")[0] for line in lines[2:-1]] == [
        "speed",
        "run",
        "optimizer",
        "digest",
    ]


def test_an_incomplete_record_is_an_error_after_the_summary(capsys):
    with pytest.raises(FileError, match="disk full"):
        print_summary(SUMMARY | {"failure": "disk full"}, quiet=False, as_json=False)
    assert "d16e57" in capsys.readouterr().out
