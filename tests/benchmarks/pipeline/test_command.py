"""`python -m benchmarks.pipeline`: from the flags to the tables, the JSON and the picture."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.pipeline import __main__ as program
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.comparison import Outcome
from lockstep.kernel.errors import WorkError


def run(*flags):
    return CliRunner().invoke(program.command, [*flags])


def test_a_measurement_from_flags_to_files(tmp_path):
    file = tmp_path / "a.json"
    picture = tmp_path / "a.svg"
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


def test_wrong_or_missing_results_raise():
    case = Case("tiny", 4, 8, 32)
    right = Outcome("copies", case, [1.0])
    program.judge([[right]])
    with pytest.raises(WorkError, match="wrong answers: rpc at 4: losses"):
        program.judge([[right, Outcome("rpc", case, [1.0], wrong="losses ...")]])
    with pytest.raises(WorkError, match="nothing could be measured: no luck"):
        program.judge([[Outcome("copies", case, error="no luck")]])
