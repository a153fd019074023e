"""`lockstep doctor`: lines, JSON, exit status."""

import json

import pytest
from click.testing import CliRunner

from lockstep.cli import cli
from lockstep.kernel.errors import UsageError
from lockstep.tools.report import doctor
from lockstep.tools.report.checks import bad, good, note
from lockstep.version import VERSION


def invoke(*arguments):
    return CliRunner().invoke(cli, ["doctor", *arguments], catch_exceptions=False)


@pytest.fixture
def checks(monkeypatch):
    """Replace the doctor's checks by one with given results."""

    def replace(*results):
        monkeypatch.setattr(doctor, "CHECKS", (lambda requirements: list(results),))

    return replace


def test_all_good(checks):
    checks(good("torch", "2.13"), note("cores", "2", "be patient"))
    done = invoke()
    assert done.exit_code == 0
    assert done.output.startswith(
        f"lockstep {VERSION} doctor\n\n"
        "good  torch            2.13\n"
        "note  cores            2\n"
        "                       -> be patient\n"
    )
    assert done.output.endswith(
        "\n\nNo check failed.\nTo report a problem, paste this output into an issue.\n"
    )
    assert done.output.count("2.13") == 1


def test_the_lines_can_be_pasted(checks, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HOME", "/home/ada")
    checks(bad("python", "3.11 at /home/ada/python", "remove /home/ada/python"))
    output = invoke().output
    assert "OMP_NUM_THREADS=3" in output
    assert "3.11 at ~/python" in output
    assert "-> remove ~/python" in output
    assert "/home/ada" not in output


def test_a_bad_result_is_exit_status_1(checks):
    checks(good("torch", "2.13"), bad("ports", "closed", "open them"))
    done = invoke()
    assert done.exit_code == 1
    assert "One check failed" in done.output


@pytest.mark.parametrize("ill", [True, False])
def test_json(checks, ill):
    checks(bad("ports", "closed", "open them") if ill else good("ports", "open"))
    done = invoke("--json")
    found = json.loads(done.stdout)
    assert "ports" in done.stderr
    assert found["ok"] is not ill
    assert found["findings"][0]["subject"] == "ports"
    assert done.exit_code == int(ill)


def test_the_checks_of_this_machine():
    """All checks on this machine: whatever their results are, they are complete."""
    done = invoke("--json", "-n", "1")
    subjects = {one["subject"] for one in json.loads(done.stdout)["findings"]}
    assert {"python", "torch", "cores", "memory", "gpu", "backend", "gloo"} <= subjects


@pytest.mark.parametrize("arguments", [("-n", "0"), ("--threads", "-1")])
def test_counts_must_be_positive(arguments):
    with pytest.raises(UsageError, match="must be at least 1"):
        invoke(*arguments)
