"""The file of a target is found without running any of it."""

import sys

import pytest

from lockstep.launcher import launch_script
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.target import find_source

TRAINING = "import torch\noptimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)\n"
RUN = "raise AssertionError('it was imported')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working folder with a package whose import fails."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "project" / "jobs"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.write_text(RUN)
    (package / "train.py").write_text(RUN + TRAINING)
    (package / "__main__.py").write_text(RUN)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "target", "found", "is_training"),
    [
        ("module", "project.jobs.train", "project/jobs/train.py", True),
        ("module", "project.jobs", "project/jobs/__main__.py", False),
        ("module", "project", None, False),  # has no __main__
        ("module", "nowhere.train", None, False),
        ("module", "sys", None, False),  # has no file
        ("script", "project/jobs/train.py", "project/jobs/train.py", True),
        ("script", "project/jobs", "project/jobs/__main__.py", False),
        ("script", "nowhere.py", "nowhere.py", False),
        ("program", "project/jobs/train.py", None, False),
    ],
)
def test_the_source_decides_whether_ranks_are_prepared_for_a_training(
    folder, kind, target, found, is_training
):
    source = find_source(kind, target)
    assert (source and source.absolute()) == (found and folder / found)
    assert launch_script._is_training(LaunchConfig(target, kind=kind)) is is_training
    assert not any(name.startswith("project") for name in sys.modules)
