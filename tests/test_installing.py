"""What is installed: the source distribution, the wheel, and pip in fresh environments."""

from __future__ import annotations

import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from environments import BUILD_TOOLS, ROOT, Environment, build, copy_sources, make_environment


@pytest.fixture(scope="module")
def build_environment(tmp_path_factory) -> Environment:
    """Return what pip builds in by default: setuptools, and no torch."""
    environment = make_environment(tmp_path_factory.mktemp("isolated") / "env", BUILD_TOOLS)
    environment.variables["LOCKSTEP_BUILD"] = "python"
    assert environment.run("-c", "import torch").returncode == 1
    return environment


@pytest.fixture(scope="module")
def sdist(build_environment, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    return build(build_environment, copy_sources(folder / "tree"), "sdist", folder / "out")


@pytest.fixture(scope="module")
def unpacked(sdist) -> Path:
    with tarfile.open(sdist) as file:
        file.extractall(sdist.parent, filter="data")
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(build_environment, unpacked) -> Path:
    """Return the wheel that pip makes of the source distribution without a compiler."""
    return build(build_environment, unpacked, "wheel", unpacked.parent)


def files(folder: Path, *patterns: str) -> set[str]:
    found = (path for pattern in patterns for path in folder.rglob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found}


SOURCES = files(ROOT / "src/lockstep", "*.py", "*.cpp", "*.h", "*.inc")
DATA = files(ROOT / "src/lockstep", "py.typed", "data/digits/*", "report/templates/*")


def test_the_source_distribution_contains_what_a_build_needs(unpacked):
    found = files(unpacked, "*")
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    needed |= {f"src/lockstep/{name}" for name in SOURCES | DATA}
    assert needed <= found
    extra = {name for name in found - needed if ".egg-info/" not in name}
    assert extra <= {"PKG-INFO", "setup.cfg"}


def test_the_wheel_of_the_source_distribution_has_all_files_and_no_others(wheel):
    with ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
    package = {name.removeprefix("lockstep/") for name in names if name.startswith("lockstep/")}
    assert package == SOURCES | DATA | {"bindings/reason.txt"}
    metadata = {name.partition("/")[2] for name in names if name.startswith("torch_lockstep-")}
    assert metadata >= {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt",
        "licenses/LICENSE", "licenses/src/lockstep/data/digits/LICENSE",
    }  # fmt: skip
    assert len(package) + len(metadata) == len(names)
