"""`lockstep schedule`: what it draws, and what it says of numbers that cannot work."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import records
from lockstep.cli import cli
from lockstep.kernel.errors import FileError, LayoutError, UsageError


def invoke(*arguments):
    return CliRunner().invoke(cli, ["schedule", *arguments], catch_exceptions=False)


def test_the_chart_with_bubble_and_peaks():
    output = invoke("1f1b", "--stages", "2", "--microbatches", "3").output
    assert output.splitlines()[:3] == [
        "1f1b · bubble 25.0% · takes 12.0",
        "rank 0  0--1--      0=====2--1=====   2=====",
        "rank 1     0--0=====1--1=====2--2=====",
    ]
    assert "0-- forward   0== backward" in output
    assert output.splitlines()[-3].split() == ["1f1b", "12.0", "1.00", "25.0%", "2", "1", "1", "1"]


def test_all_side_by_side():
    lines = invoke("all").output.splitlines()
    table = [line.split() for line in lines if line and line.endswith(("2 2", "1 1"))]
    assert [row[0] for row in table] == ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    assert [row[3] for row in table] == ["27.3%", "27.3%", "15.8%", "11.1%"]
    assert sum(line.startswith("rank 3") for line in lines) == 4


def write_costs(folder, *forward, **others):
    costs = {"forward": forward, "input": forward, "weight": forward, "held": [1] * len(forward)}
    (folder / "costs.json").write_text(json.dumps(costs | others))
    return "--costs", str(folder / "costs.json")


def test_blocks_are_cut_into_stages(tmp_path):
    costs = write_costs(tmp_path, 1, 1, 1, 3, transfer=[0, 0, 0])
    assert invoke("1f1b", "--stages", "2", *costs).output.splitlines()[-1].endswith("3 1")


def test_schedules_for_which_there_are_too_few_blocks_are_left_out(tmp_path):
    done = invoke("all", "--stages", "2", *write_costs(tmp_path, 1, 2, 3))
    assert "interleaved is left out: 3 blocks cannot be split into 4 stages" in done.stderr
    assert "zero-bubble" in done.stdout


@pytest.mark.parametrize("place", ["costs.json", "run"])
def test_measured_costs(tmp_path, place):
    costs = {
        "forward": [0.001, 0.002], "input": [0.001, 0.002], "weight": [0.001, 0.002],
        "held": [4e6, 2e6],
    }  # fmt: skip
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    records.write(tmp_path / "run", [records.HEADER | {"costs": costs}])
    output = invoke("1f1b", "--stages", "2", "--costs", str(tmp_path / place)).output
    assert "takes 51.0 ms" in output
    assert "8.00 MB 2.00 MB" in output


def test_costs_of_a_recorded_step(tmp_path):
    records.write(tmp_path / "run", [records.HEADER, records.timeline(0)])
    output = invoke("gpipe", "--stages", "2", "--costs", str(tmp_path / "run")).output
    assert "takes 53.0 ms" in output  # 8 forwards of 2 ms, one of 2, a backward of 3, 8 of 4


@pytest.mark.parametrize("pairs", [1, 2])
def test_a_run_is_drawn_with_its_own_ranks_and_microbatches(tmp_path, pairs):
    """As a user types it, without --stages: it used to draw 4 ranks for any run."""
    records.write(tmp_path / "run", [records.HEADER, records.timeline(0, pairs)])
    output = invoke("1f1b", "--costs", str(tmp_path / "run")).output
    lines = output.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("rank")] == ["0", "1"]
    first = next(line for line in lines if line.startswith("rank 0"))
    last = 8 // pairs - 1
    assert f"{last}=" in first
    assert f"{last + 1}=" not in first


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (["2f2b"], LayoutError, "unknown schedule '2f2b'; choose from all, gpipe"),
        (["1f1b", "--stages", "0"], LayoutError, "at least one rank and one micro-batch"),
        (["all", "--microbatches", "-1"], LayoutError, "one micro-batch, not 4 and -1"),
        (["gpipe", "--stages-per-rank", "2"], LayoutError, "only the schedule interleaved"),
        (["interleaved", "--stages-per-rank", "0"], LayoutError, "stages_per_rank=0"),
        (["1f1b", "--costs", "nowhere.json"], FileError, r"cannot be read \(No such file"),
    ],
)
def test_misuse_is_one_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        invoke(*arguments)


@pytest.mark.parametrize(
    ("forward", "others", "sentence"),
    [
        ((1, 2), {}, "2 blocks cannot be split into 4 stages"),
        ((1, 2, 3, 4), {"backward": [1]}, "has 1 numbers"),
        ((1, 2, 3, -4), {}, "a cost must be finite and not negative"),
    ],
)
def test_costs_that_cannot_be_are_refused(tmp_path, forward, others, sentence):
    with pytest.raises(LayoutError, match=sentence):
        invoke("1f1b", *write_costs(tmp_path, *forward, **others))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "is not a JSON file"), ("[1]", "has no costs"), ('{"forward": 1}', "has no costs")],
)
def test_a_file_without_costs_is_named(tmp_path, text, sentence):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(FileError, match=sentence):
        invoke("1f1b", "--costs", str(tmp_path / "costs.json"))


def test_a_run_without_costs_is_named(tmp_path):
    records.write(tmp_path / "night", records.whole())
    with pytest.raises(UsageError, match="night has no measured costs"):
        invoke("1f1b", "--costs", str(tmp_path / "night"))


def test_the_command_does_not_import_torch():
    code = (
        "import sys; from lockstep.cli import cli; cli(['schedule', '1f1b'], standalone_mode=False)"
    )
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
