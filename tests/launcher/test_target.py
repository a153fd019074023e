"""A target is found without running any of it."""

import sys

import pytest

from lockstep.kernel.errors import UsageError
from lockstep.launcher.target import check_target

RUN = "raise AssertionError('it was imported')\n"


@pytest.mark.parametrize(
    ("target", "is_found"),
    [
        ("project.jobs.train", True),
        ("project.jobs", True),  # has a __main__
        ("project", False),
        ("nowhere.train", False),
        ("project.jobs.nothing", False),
    ],
)
def test_modules_are_found_without_an_import(tmp_path, monkeypatch, target, is_found):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "project" / "jobs"
    package.mkdir(parents=True)
    for name in ("../__init__.py", "__init__.py", "__main__.py", "train.py"):
        (package / name).write_text(RUN)
    if is_found:
        check_target("module", target)
    else:
        with pytest.raises(UsageError, match=r"there is no module|without a __main__"):
            check_target("module", target)
    assert not any(name.startswith("project") for name in sys.modules)
