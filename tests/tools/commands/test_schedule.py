"""`lockstep schedule`: what it draws, and what it says of numbers that cannot work."""

import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

from lockstep.cli import cli
from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.schedule_planner import plan_schedule
from lockstep.pipeline.simulation import Costs
from lockstep.tools.commands.schedule import choose_scale, draw_ranks


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
    assert output.splitlines()[-1].split() == ["1f1b", "12.0", "1.00", "25.0%", "2", "1"]


def test_all_side_by_side():
    lines = invoke("all").output.splitlines()
    table = [line.split() for line in lines[-4:]]
    assert [row[0] for row in table] == ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    assert [row[3] for row in table] == ["27.3%", "27.3%", "15.8%", "11.1%"]
    assert sum(line.startswith("rank 3") for line in lines) == 4


@pytest.mark.parametrize("columns", [20, 40, 60, 100])
def test_no_line_is_wider_than_the_terminal(columns):
    plans = [plan_schedule("1f1b", Costs.unit(3, 1), 3, count) for count in (2, 6)]
    scale = choose_scale(plans, columns)
    lines = [line.plain for plan in plans for line in draw_ranks(plan, scale)]
    assert max(map(len, lines)) <= columns + 1
    assert lines[0].startswith("rank 0  ")


def test_kinds_have_colors_on_a_color_terminal():
    plan = plan_schedule("1f1b", Costs.unit(2, 1), 2, 2)
    console = Console(color_system="standard", force_terminal=True, no_color=False, width=80)
    with console.capture() as drawn:
        console.print(draw_ranks(plan, 3)[0])
    assert "\033[37;44m0--" in drawn.get()


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (["2f2b"], LayoutError, "unknown schedule '2f2b'; choose from all, gpipe"),
        (["1f1b", "--stages", "0"], LayoutError, "at least one rank and one micro-batch"),
        (["all", "--microbatches", "-1"], LayoutError, "one micro-batch, not 4 and -1"),
        (["all", "--stages", "99999"], LayoutError, "--stages 99999: at most 128 can be drawn"),
        (["gpipe", "--stages-per-rank", "2"], LayoutError, "only the schedule interleaved"),
        (["interleaved", "--stages-per-rank", "0"], LayoutError, "stages_per_rank=0"),
    ],
)
def test_misuse_is_one_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        invoke(*arguments)


def test_the_command_does_not_import_torch():
    code = (
        "import sys; from lockstep.cli import cli; cli(['schedule', '1f1b'], standalone_mode=False)"
    )
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
