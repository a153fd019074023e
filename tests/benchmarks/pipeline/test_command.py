"""`python -m benchmarks.pipeline`: from the flags to the tables, the JSON and the picture."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.pipeline import __main__ as program
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.comparison import Outcome
from lockstep.comm import backend
from lockstep.kernel.errors import UsageError, WorkError


def run(*flags):
    return CliRunner().invoke(program.command, [*flags])


def test_a_measurement_from_flags_to_files(tmp_path):
    file, picture = tmp_path / "a.json", tmp_path / "a.svg"
    done = run("--model", "tiny", "--vs", "torch-gloo", "--batch", "6", "--splits", "3,1",
               "--repeats", "1", "--json", str(file), "--plot", str(picture))  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "# 2 contenders: about a minute" in done.output
    assert "one more micro-batch in the same batch" in done.output
    records = json.loads(file.read_text())
    assert [(each["contender"], each["microbatches"]) for each in records] == [
        (name, splits) for splits in (1, 3) for name in ("alone", "copies", "torch-gloo")
    ]
    for each in records:
        assert each["batch_size"] == 6
        assert 0 < each["p10_seconds"] <= each["median_seconds"] <= each["p90_seconds"]
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--splits", "1,x"], "--splits 1,x: write numbers of micro-batches"),
        (["--splits", "0,1"], "--splits 0,1: write numbers of micro-batches"),
        (["--splits", "5"], "--batch 32 cannot be cut into 5 micro-batches of one size"),
        (["--vs", "horovod"], "--vs horovod: choose from copies,rpc"),
        (["--timeout", "0"], "--timeout is a positive number"),
        (["--plot", "a.pdf"], "the suffix must be .svg or .png"),
        (["--json", "nowhere/a.json"], "there is no folder nowhere"),
        (["--batch", "32768"], "choose fewer with --vs, or a smaller --batch or --size"),
    ],
)
def test_invalid_options_raise_usage_error(flags, sentence):
    error = run(*flags).exception
    assert isinstance(error, UsageError), error
    assert sentence in str(error)


def test_without_the_native_backend_what_needs_it_is_left_out_or_refused(monkeypatch, capsys):
    monkeypatch.setattr(backend, "reason_unavailable", lambda: "not built")
    assert program.contenders("all") == ["rpc", "torch-gloo"]
    assert "without torch-lockstep" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"--vs lockstep-1 needs .*not built"):
        program.contenders("rpc,lockstep-1")


def test_the_estimate_grows_with_what_is_asked_for():
    flags = {"model": "resnet50", "batch": 32, "size": 128, "repeats": 3}
    names = ["rpc", "torch-gloo", "torch-zb"]
    some = program.estimate(flags, [8], names)
    assert some < program.estimate(flags, [1, 8], names)
    assert some < program.estimate({**flags, "repeats": 4}, [8], names)
    assert some < program.estimate({**flags, "size": 256}, [8], names)
    assert some > 2 * program.estimate({**flags, "model": "tiny"}, [8], names)


def test_wrong_or_missing_results_raise():
    case = Case("tiny", 4, 8, 32)
    right = Outcome("copies", case, [1.0])
    program.judge([[right]])
    with pytest.raises(WorkError, match="wrong answers: rpc at 4: losses"):
        program.judge([[right, Outcome("rpc", case, [1.0], wrong="losses ...")]])
    with pytest.raises(WorkError, match="nothing could be measured: no luck"):
        program.judge([[Outcome("copies", case, error="no luck")]])
