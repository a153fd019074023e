"""The front door: the public names, and a package that opens quickly."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep as ls
from lockstep import errors

NAMES = [
    "CheckpointConfig",
    "DistributedDataParallel",
    "Driver",
    "LockstepError",
    "OptimizerConfig",
    "PipelineConfig",
    "Trainer",
    "accuracy",
    "build",
    "digest",
    "empty_shared",
    "init",
    "launch",
    "local_rank",
    "loggers",
    "partition",
    "rank",
    "shutdown",
    "target_weight",
    "world",
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
    assert len(inspect.signature(ls.Trainer).parameters) <= 19


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


@pytest.mark.parametrize("statement", ["import lockstep", "import lockstep.cli"])
def test_importing_it_does_not_import_torch(statement):
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
