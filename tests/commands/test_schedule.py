"""`lockstep schedule`: what it draws, and what it says of numbers that cannot work."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from lockstep.cli import cli
from lockstep.kernel.errors import LayoutError


def invoke(*arguments):
    return CliRunner().invoke(cli, ["schedule", *arguments], catch_exceptions=False)


def test_the_chart_with_bubble_and_peaks():
    output = invoke("--stages", "2", "--microbatches", "3").output
    assert output.splitlines()[:3] == [
        "1f1b · bubble 25.0% · takes 12.0",
        "rank 0  0--1--      0=====2--1=====   2=====",
        "rank 1     0--0=====1--1=====2--2=====",
    ]
    assert "0-- forward   0== backward" in output
    assert output.splitlines()[-1] == "peak micro-batches by rank: 2 1"


@pytest.mark.parametrize("arguments", [["--stages", "0"], ["--microbatches", "-1"]])
def test_misuse_is_one_sentence(arguments):
    with pytest.raises(LayoutError, match="at least one rank and one micro-batch"):
        invoke(*arguments)


def test_the_command_does_not_import_torch():
    code = "import sys; from lockstep.cli import cli; cli(['schedule'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
