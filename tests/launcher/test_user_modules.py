"""The program's own modules: found whenever they are imported, and forgotten when they are gone."""

import sys
import types

import pytest

import lockstep as ls
from lockstep.launcher.user_modules import find_module_files


@pytest.fixture
def add():
    """Return a function that adds a module with a file to the imported ones."""
    names = []

    def add(name, file):
        module = types.ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module
        names.append(name)

    yield add
    for name in names:
        sys.modules.pop(name, None)


def test_modules_are_found_when_they_are_imported_and_forgotten_when_they_are_gone(add):
    before = find_module_files()
    assert __file__ in before
    add("own_one", "/home/ann/one.py")
    add("of_a_package", "/usr/lib/python3/site-packages/of_a_package.py")
    add("compiled", "/home/ann/compiled.so")
    assert find_module_files() == [*before, "/home/ann/one.py"]
    add("own_two", "sub/../two.py")
    assert find_module_files() == [*before, "/home/ann/one.py", "sub/../two.py"]
    del sys.modules["own_two"]  # the newest one
    assert find_module_files() == [*before, "/home/ann/one.py"]
    add("own_three", "/home/ann/three.py")
    del sys.modules["own_one"]
    assert find_module_files() == [*before, "/home/ann/three.py"]
    add("own_one", "/home/ann/another/one.py")
    assert find_module_files() == [*before, "/home/ann/three.py", "/home/ann/another/one.py"]


def test_a_module_that_runs_code_when_it_is_read_is_left_alone(add):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    sys.modules["lazy"] = Lazy("lazy")
    try:
        find_module_files()
    finally:
        del sys.modules["lazy"]


def test_a_rank_finds_its_own_modules_after_those_of_its_fork_server(tmp_path):
    (tmp_path / "layers.py").write_text("")

    def found():
        sys.path.insert(0, str(tmp_path))
        import layers  # noqa: F401

        return find_module_files()

    for files in ls.launch(found, nprocs=2):
        assert str(tmp_path / "layers.py") in files
