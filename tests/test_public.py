"""The front door: the public names, and a package that opens quickly."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep as ls
import pytest_lockstep
from lockstep import errors

NAMES = [
    "AuditConfig",
    "CheckpointConfig",
    "DataParallel",
    "DatasetMetric",
    "Driver",
    "LockstepError",
    "OptimizerConfig",
    "PipelineConfig",
    "Trainer",
    "accuracy",
    "digest",
    "exact",
    "init",
    "launch",
    "load_weights",
    "loggers",
    "partition",
    "rank",
    "shutdown",
    "target_weight",
    "world_size",
]


def test_the_public_names_are_these():
    assert sorted(ls.PUBLIC) == NAMES
    assert set(ls.__all__) == {*NAMES, "__version__"}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_explained(name):
    value = getattr(ls, name)
    assert inspect.getdoc(value)
    module = importlib.import_module(f"lockstep.{ls.PUBLIC[name]}")
    assert value is module if name == "loggers" else name in module.__all__


def test_the_signature_of_the_trainer_fits_a_screen():
    assert len(inspect.signature(ls.Trainer).parameters) <= 20


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ls.nonsense


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(inspect.getsourcefile(ls)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {
        (node.module, alias.name)
        for node in imports
        for alias in node.names
        if alias.name == alias.asname  # exported, by the rules of type checkers
    }
    expected = {(f"lockstep.{module}", name) for name, module in ls.PUBLIC.items()}
    assert seen == expected - {("lockstep.record.loggers", "loggers")} | {
        ("lockstep.record", "loggers")
    }


def test_the_drawing_of_the_errors_is_complete():
    drawn = inspect.getdoc(errors)
    for name in errors.__all__:
        assert name in drawn
        assert issubclass(getattr(errors, name), errors.LockstepError)


HELP_OF_ALL_COMMANDS = """
from click.testing import CliRunner
from lockstep.cli import COMMANDS, cli
for name in COMMANDS:
    shown = CliRunner().invoke(cli, [name, "--help"], catch_exceptions=False)
    assert shown.output.startswith("Usage: "), shown.output
"""


def imported_by(*arguments):
    """Return the modules that a new interpreter imports for its arguments."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    modules = re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", done.stderr, re.MULTILINE)
    return modules[modules.index("site") + 1 :]


@pytest.mark.parametrize(
    "arguments",
    [["-m", "lockstep", "--help"], ["-c", HELP_OF_ALL_COMMANDS]],
    ids=["help", "help of all commands"],
)
def test_help_imports_click_only(arguments):
    installed = {*importlib.metadata.packages_distributions(), "lockstep"}
    found = {name.partition(".")[0] for name in imported_by(*arguments)}
    assert found & installed == {"lockstep", "click"}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import lockstep", {"lockstep", "lockstep.version"}),
        (  # by an entry point `import torch` imports it
            "import lockstep.comm.backend",
            {
                "lockstep",
                "lockstep.comm",
                "lockstep.comm.activity",
                "lockstep.comm.backend",
                "lockstep.comm.native_module",
                "lockstep.version",
            },
        ),
    ],
)
def test_importing_it_imports_no_other_package_and_little_of_its_own(statement, expected):
    found = {*imported_by("-c", statement)}
    assert {name for name in found if name.startswith("lockstep")} == expected
    installed = {*importlib.metadata.packages_distributions()} - {"lockstep"}
    assert not {name.partition(".")[0] for name in found} & installed


def test_every_dependency_is_justified_in_the_documentation():
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    declared = [re.match(r"[a-z0-9]+", each)[0] for each in project["dependencies"]]
    page = (root / "docs/installing.md").read_text()
    assert re.findall(r"^\| `([a-z0-9]+)` \|", page, re.MULTILINE) == declared


REFERENCE = Path(__file__).parent.parent / "docs/reference/api"


def test_the_reference_has_every_public_name_once():
    """`::: lockstep.Trainer` shows a name, and `members:` of a module would show its classes."""
    pages = [path.read_text() for path in sorted(REFERENCE.glob("*.md"))]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    assert len(shown) == len({*shown})
    expected = {f"lockstep.{name}" for name in ls.__all__}
    expected |= {f"pytest_lockstep.{name}" for name in pytest_lockstep.PUBLIC}
    expected |= {f"lockstep.errors.{name}" for name in errors.__all__ if name not in NAMES}
    assert expected <= {*shown}
    for name in {*shown} - expected:  # what the public names take and return, at its own place
        module, _, attribute = name.rpartition(".")
        if name != "lockstep.errors":
            value = getattr(importlib.import_module(module), attribute)
            assert value.__module__ == module
            assert inspect.getdoc(value)


def test_a_name_that_left_says_what_takes_its_place():
    with pytest.raises(AttributeError, match=r"torch.nn.parallel.DistributedDataParallel.*exact"):
        _ = ls.DistributedDataParallel


def test_lockstep_run_imports_elastic_runs_only_for_one():
    found = imported_by("-c", "import lockstep.tools.commands.run")
    assert "lockstep.launcher.launch_script" in found
    assert not [name for name in found if name.startswith("lockstep.elastic")]


DRAWN = """\
import random
import numpy, torch

def states():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

before = states()
import lockstep as ls
for name in ls.__all__:
    getattr(ls, name)
    assert states() == before, name
"""


def test_no_public_name_draws_random_numbers():
    """rich draws when it is imported: a script's own draws were others than without Lockstep."""
    done = subprocess.run(
        [sys.executable, "-c", DRAWN], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
