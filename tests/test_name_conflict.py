"""A distribution whose files have replaced those of Lockstep is named, with the remedy."""

import sys
from types import ModuleType

import pytest

from lockstep.cli import main
from pytest_lockstep.launcher import Launcher

MESSAGE = (
    "the module lockstep is not that of torch-lockstep: another distribution replaced its files; "
    "run `pip uninstall lockstep-clock`, and install torch-lockstep again"
)


@pytest.fixture
def other_distribution(tmp_path, monkeypatch):
    """Another distribution with a module of this name was installed last."""
    metadata = tmp_path / "lockstep_clock-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: lockstep-clock\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("lockstep\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "lockstep", ModuleType("lockstep"))


def test_a_command_names_the_other_distribution(other_distribution, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lockstep", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr()
    assert " ".join(said.err.split()) == f"lockstep: {MESSAGE}"
    assert said.out == ""


def test_the_plugin_of_pytest_names_it_before_it_starts_a_process(other_distribution):
    with pytest.raises(pytest.UsageError) as caught:
        Launcher(None)._start_template(trains=False)
    assert str(caught.value) == MESSAGE
