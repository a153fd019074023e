"""What is installed: source distribution, wheel, and pip in fresh environments, offline.

The compiler is a program that notes its calls and copies the binding of this checkout, so that
installing, building and loading are tested and the compiler is not (tests/comm/native).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from dev.wheels import ROOT, copy_sources
from environments import (
    BUILD_TOOLS,
    Environment,
    build,
    make_environment,
    pretend_torch,
)
from lockstep.comm import backend
from lockstep.comm.native.binding import find_bindings

needs_binding = pytest.mark.skipif(
    not backend.available(), reason="the extension is not built here"
)

COMPILER = """#!/bin/sh
echo "$*" >> {calls}
case "$*" in
    *-shared*) content={binding};;
    *) content=/dev/null;;
esac
while [ "$1" != -o ]; do shift; done
cat $content > "$2"
"""
REASON = "from lockstep.comm import backend; print(backend.reason_unavailable())"
SCRIPT = """
import lockstep as ls, torch
print(ls.init().backend, flush=True)
torch.distributed.all_reduce(torch.ones(3))
"""


@dataclass(frozen=True)
class Compiler:
    """A program that stands for the compiler.

    Args:
        program: The program.
        calls: The file with the arguments of its calls.
    """

    program: Path
    calls: Path

    @property
    def variables(self) -> dict[str, str]:
        """The variables that make a build use it."""
        return {"CXX": str(self.program)}

    def compiled(self) -> list[str]:
        """Return the sources that it was given since the last call, without folders."""
        text = self.calls.read_text() if self.calls.exists() else ""
        self.calls.unlink(missing_ok=True)
        calls = [line.split() for line in text.splitlines()]
        return [Path(call[call.index("-c") + 1]).name for call in calls if "-c" in call]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Compiler:
    folder = tmp_path_factory.mktemp("compiler")
    return write_compiler(folder)


def write_compiler(folder: Path) -> Compiler:
    found = Compiler(folder / "c++", folder / "calls")
    found.program.write_text(COMPILER.format(calls=found.calls, binding=find_bindings()[0]))
    found.program.chmod(0o755)
    return found


@pytest.fixture(scope="module")
def isolated(tmp_path_factory) -> Environment:
    """Return what pip builds in by default: setuptools, and no torch."""
    environment = make_environment(tmp_path_factory.mktemp("isolated") / "env", BUILD_TOOLS)
    assert environment.run("-c", "import torch").returncode == 1
    return environment


@pytest.fixture(scope="module")
def sdist(isolated, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    file, _ = build(isolated, copy_sources(folder / "tree"), "sdist", folder / "out")
    return file


@pytest.fixture(scope="module")
def unpacked(sdist) -> Path:
    with tarfile.open(sdist) as file:
        file.extractall(sdist.parent, filter="data")
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def plain_wheel(isolated, unpacked, compiler, tmp_path_factory) -> Path:
    """Return the wheel that pip makes by default where there is a compiler: without torch."""
    out = tmp_path_factory.mktemp("plain")
    file, _said = build(isolated, unpacked, "wheel", out, compiler.variables)
    return file


@pytest.fixture
def environment(tmp_path, compiler) -> Environment:
    """Return an environment with torch and everything else that Lockstep needs, and pip."""
    made = make_environment(tmp_path / "env")
    made.variables |= compiler.variables
    compiler.compiled()
    return made


def files(folder: Path, *patterns: str) -> set[str]:
    found = (path for pattern in patterns for path in folder.rglob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found}


def names_of(wheel: Path) -> set[str]:
    with ZipFile(wheel) as file:
        return {name for name in file.namelist() if not name.endswith("/")}


SOURCES = files(ROOT / "src/lockstep", "*.py", "*.cpp", "*.h", "*.inc")
DATA = files(ROOT / "src/lockstep", "py.typed", "data/digits/*", "report/templates/*")


def test_the_source_distribution_contains_what_a_build_needs(unpacked):
    found = files(unpacked, "*")
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    needed |= {f"src/lockstep/{name}" for name in SOURCES | DATA}
    assert needed <= found
    assert {name for name in found - needed if ".egg-info/" not in name} <= {
        "PKG-INFO",
        "setup.cfg",
    }


def test_without_a_compiler_the_wheel_has_all_files_and_says_what_it_lacks(
    isolated, unpacked, tmp_path
):
    wheel, said = build(isolated, unpacked, "wheel", tmp_path, {"CXX": "/nowhere/c++"})
    assert "py3-none-any" in wheel.name
    assert len([line for line in said.splitlines() if line.startswith("lockstep: ")]) == 1
    names = names_of(wheel)
    package = {name.removeprefix("lockstep/") for name in names if name.startswith("lockstep/")}
    assert package == SOURCES | DATA | {"bindings/reason.txt"}
    metadata = {name.partition("/")[2] for name in names if name.startswith("torch_lockstep-")}
    assert metadata >= {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt",
        "licenses/LICENSE", "licenses/src/lockstep/data/digits/LICENSE",
    }  # fmt: skip
    assert len(package) + len(metadata) == len(names)


@needs_binding
def test_installed_by_default_it_runs_on_gloo_and_one_command_builds_the_rest(
    plain_wheel, environment, compiler
):
    assert "lockstep/bindings/reason.txt" in names_of(plain_wheel)
    pip(environment, "install", plain_wheel)
    (environment.folder / "script.py").write_text(SCRIPT)
    launch = ("-m", "lockstep", "run", "-n", "2", "script.py")
    done = environment.run(*launch)
    assert done.stdout.count("gloo\n") == 2, done.stderr
    bits, told = [line for line in done.stderr.splitlines() if "backend" in line]
    assert "depend on the kind of processor and on the number of threads, because the comp" in bits
    assert told.startswith("[0] lockstep: using the backend gloo, which is many times slower")
    assert told.endswith(
        f"has not been built for torch {torch.__version__} yet: run `lockstep build`"
    )

    built = environment.run("-m", "lockstep", "build", offline=True)
    assert built.returncode == 0, built.stderr
    assert {"bind.cpp", "binding.cpp", "segment.cpp"} <= {*compiler.compiled()}
    done = environment.run(*launch)
    assert done.stdout.count("lockstep\n") == 2, done.stderr
    assert "gloo" not in done.stderr

    pip(environment, "uninstall", "--yes", "torch-lockstep")
    assert not [
        name for name in files(environment.folder, "*") if "lockstep" in name.split("home")[0]
    ]
    assert len(files(environment.folder / "home/.cache/lockstep", "_native*")) == 1


@pytest.mark.stress
@needs_binding
def test_two_environments_share_a_cache_and_an_upgraded_torch_is_named(
    plain_wheel, environment, compiler, tmp_path
):
    first = find_bindings()[0].parent
    cache = tmp_path / "cache/lockstep/bindings"
    cache.mkdir(parents=True, mode=0o700)
    shutil.copytree(first, cache / first.name)
    other = make_environment(tmp_path / "other")
    pretend_torch(other, "2.99.0+cpu")
    for each in (environment, other):
        each.variables |= {**compiler.variables, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        each.unpack(plain_wheel)
    told = other.run("-c", REASON).stdout
    assert f"it was built for torch {torch.__version__}, and this is torch 2.99.0+cpu" in told
    assert told.endswith(": run `lockstep build`\n")
    assert other.run("-m", "lockstep", "build").returncode == 0
    assert {"bind.cpp", "binding.cpp", "segment.cpp"} <= {*compiler.compiled()}
    for each in (environment, other):
        assert each.run("-c", REASON).stdout == "None\n"
    assert {path.parent.name for path in cache.glob("*/_native*")} > {first.name}


@pytest.mark.stress
@needs_binding
def test_without_isolation_the_binding_is_in_the_package(environment, unpacked, compiler):
    pip(environment, "install", "--no-build-isolation", unpacked)
    assert {"bind.cpp", "binding.cpp", "segment.cpp"} <= {*compiler.compiled()}
    assert environment.run("-c", REASON).stdout == "None\n"
    assert not (environment.folder / "home/.cache/lockstep").exists()
    pip(environment, "uninstall", "--yes", "torch-lockstep")
    assert not [name for name in files(environment.folder, "*") if "lockstep" in name]


@pytest.mark.stress
@needs_binding
def test_an_editable_installation_has_its_binding_in_the_checkout(environment, compiler, tmp_path):
    tree = copy_sources(tmp_path / "tree")
    pip(environment, "install", "--no-build-isolation", "--editable", tree)
    assert {"bind.cpp", "segment.cpp"} <= {*compiler.compiled()}
    assert environment.run("-c", REASON).stdout == "None\n"
    assert len(files(tree / "src/lockstep/bindings", "_native*")) == 1
    (tree / "src/lockstep/csrc/core/segment.cpp").write_text("// edited")
    told = environment.run("-c", REASON).stdout
    assert told.startswith("it was built for other C++ sources")
    assert told.endswith(": run `lockstep build`\n")


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Yield a folder that other users can read."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.stress
@needs_binding
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_write_to_the_package_and_builds_into_a_cache_of_its_own(
    plain_wheel, public_folder
):
    user = 65534
    python = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    if not os.path.exists(python):
        pytest.skip(f"there is no {python}, and other users may not be able to run this Python")
    compiler = write_compiler(public_folder)
    shutil.copy(find_bindings()[0], public_folder / "binding.so")
    (public_folder / "binding.so").chmod(0o644)
    compiler.program.write_text(
        COMPILER.format(calls="/dev/null", binding=public_folder / "binding.so")
    )
    environment = make_environment(public_folder / "env", python=python)
    environment.variables |= compiler.variables
    environment.unpack(plain_wheel)
    home = environment.folder / "home"
    as_user = {"user": user, "group": user, "extra_groups": []}
    shared = {"XDG_CACHE_HOME": str(public_folder / "of-root")}
    (public_folder / "of-root/lockstep").mkdir(parents=True)
    refused = environment.run("-m", "lockstep", "build", variables=shared, **as_user)
    assert refused.returncode == 1
    assert f"of-root/lockstep belongs to user 0, not to user {user}" in refused.stderr
    os.chown(home, user, user)
    built = environment.run("-m", "lockstep", "build", **as_user)
    assert built.returncode == 0, built.stderr
    assert environment.run("-c", REASON, **as_user).stdout == "None\n"
    (key,) = home.glob(".cache/lockstep/bindings/*/key.json")
    assert key.stat().st_uid == user
    assert key.parents[1].stat().st_mode & 0o777 == 0o700
    assert json.loads(key.read_text())["torch"] == torch.__version__


def pip(environment: Environment, command: str, *arguments: object) -> None:
    options = ("--no-deps", "--no-index", "--no-cache-dir") if command == "install" else ()
    done = environment.run("-m", "pip", command, "--quiet", *options, *arguments, offline=True)
    assert done.returncode == 0, done.stderr
