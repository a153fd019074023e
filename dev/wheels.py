"""Builds one wheel per Python, with bindings for every torch of a matrix.

    pyproject.toml            for each torch
    [tool.lockstep.wheels] ──> an environment ──> source distribution ──> wheel with its binding
                                                                            │
                               each environment loads its binding <── one merged wheel

    python dev/wheels.py [--python 3.11,3.12] [--torch 2.12.1,2.13.0] [--out dist]

Users of another torch run `lockstep build`. This program needs the standard library only.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

__all__ = [
    "ROOT",
    "RUNNING",
    "WheelError",
    "build",
    "choose",
    "copy_sources",
    "is_for",
    "list_bindings",
    "merge",
    "read_matrix",
]

ROOT = Path(__file__).resolve().parent.parent
BINDINGS = "lockstep/bindings/"
REASON = f"{BINDINGS}reason.txt"  # why an installation has no binding
RUNNING = "{}.{}".format(*sys.version_info)
BUILD_TOOLS = ("setuptools>=77", "ninja", "numpy")
COMMAND_SECONDS = 3600.0  # timeout of one program, such as the download of a torch

SDIST = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
TRIAL = """
import sys
sys.path.insert(0, sys.argv[1])
from lockstep.comm import backend
sys.exit(backend.reason_unavailable())
"""


class WheelError(Exception):
    """A wheel cannot be built; the text says which one and why."""


def read_matrix(text: str) -> dict[str, tuple[str, ...]]:
    """Return the versions of "python" and "torch" in a pyproject.toml, in its order."""
    table = tomllib.loads(text)["tool"]["lockstep"]["wheels"]
    return {name: tuple(table[name]) for name in ("python", "torch")}


def choose(what: str, wanted: str, matrix: Sequence[str]) -> tuple[str, ...]:
    """Return the versions of a matrix that are wanted, in its order.

    Args:
        what: "python" or "torch".
        wanted: Versions separated by commas; "" for all.
        matrix: All versions.

    Raises:
        WheelError: A wanted version is not in the matrix.
    """
    names = [version.removeprefix(f"{what}==") for version in wanted.split(",") if version]
    if unknown := [version for version in names if version not in matrix]:
        raise WheelError(
            f"{what} {', '.join(unknown)} is not in [tool.lockstep.wheels] of pyproject.toml, "
            f"which has {', '.join(matrix)}: add it there, or choose one of these"
        )
    return tuple(version for version in matrix if not names or version in names)


def is_for(built: str, version: str) -> bool:
    """Return whether a binding built for torch `built` belongs to `version` of the matrix.

    A `version` without "+" matches any local version, because pip chooses the build: "2.13.0" may
    be "2.13.0+cu130".
    """
    return built == version or ("+" not in version and built.partition("+")[0] == version)


def merge(wheels: Sequence[Path], out: Path) -> Path:
    """Merge wheels that only differ in their bindings into one wheel with all bindings.

    Args:
        wheels: The wheels, which have the same file name.
        out: The folder of the new wheel.

    Raises:
        WheelError: The wheels have different names, or differ in other files.
    """
    if len({wheel.name for wheel in wheels}) != 1:
        raise WheelError(f"wheels with different names: {', '.join(w.name for w in wheels)}")
    members: dict[str, tuple[ZipInfo, bytes]] = {}
    for wheel in wheels:
        for info, content in _read(wheel):
            _, known = members.setdefault(info.filename, (info, content))
            if known != content and not info.filename.endswith(".dist-info/RECORD"):
                raise WheelError(
                    f"{wheel} and {wheels[0]} have different files {info.filename}: build both "
                    "from the same sources"
                )
    record = next(name for name in members if name.endswith(".dist-info/RECORD"))
    info, _ = members.pop(record)
    out.mkdir(parents=True, exist_ok=True)
    merged = out / wheels[0].name
    with ZipFile(merged, "w", ZIP_DEFLATED) as file:
        for each, content in members.values():
            file.writestr(each, content)
        contents = {name: content for name, (_, content) in members.items()}
        file.writestr(info, _format_record(contents, record))
    return merged


def _read(wheel: Path) -> Iterator[tuple[ZipInfo, bytes]]:
    with ZipFile(wheel) as file:
        for info in file.infolist():
            yield info, file.read(info)


def _format_record(contents: dict[str, bytes], record: str) -> str:
    """Return the text of RECORD: every file with its hash and size."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(content)))
    writer.writerow((record, "", ""))
    return text.getvalue()


def list_bindings(wheel: Path) -> list[str]:
    """Return the versions of torch for which a wheel has bindings."""
    keys = (
        json.loads(content)
        for info, content in _read(wheel)
        if info.filename.startswith(BINDINGS) and info.filename.endswith("/key.json")
    )
    return sorted(key["torch"] for key in keys if "torch" in key)


def build(versions: Iterable[str], out: Path, given: Path | None, folder: Path) -> Path:
    """Build a wheel with bindings for all `versions` of torch.

    Args:
        versions: Versions of torch.
        out: The folder of the wheel.
        given: A wheel that already has bindings for some of these versions; None for none.
        folder: An empty folder for environments, sources and wheels of one torch each.
    """
    have = list_bindings(given) if given else []
    environments = {}
    wheels = [given] if given else []
    for version in versions:
        if any(is_for(binding, version) for binding in have):
            continue
        print(f"torch {version}: making an environment", flush=True)
        python = _make_environment(version, folder / f"torch-{version}")
        environments[version] = python
        print(f"torch {version}: building", flush=True)
        wheels.append(_build_one(version, python, folder))
    merged = merge(wheels, out)
    unpacked = folder / "unpacked"
    with ZipFile(merged) as file:
        file.extractall(unpacked)
    no_cache = {"XDG_CACHE_HOME": str(folder / "cache")}  # loads only the wheel's bindings
    for version, python in environments.items():
        print(f"torch {version}: trying the wheel", flush=True)
        what = f"torch {version} does not load its binding of {merged.name}"
        _run([python, "-c", TRIAL, str(unpacked)], what, cwd=folder, variables=no_cache)
    return merged


def _make_environment(version: str, folder: Path) -> str:
    """Return the interpreter of a new environment with one version of torch."""
    _run([sys.executable, "-m", "venv", str(folder)], f"no environment for torch {version}")
    python = str(folder / "bin" / "python")
    what = f"torch {version} cannot be installed for Python {RUNNING} (leave it out with TORCH=...)"
    _run([python, "-m", "pip", "install", "--quiet", f"torch=={version}", *BUILD_TOOLS], what)
    return python


def _build_one(version: str, python: str, folder: Path) -> Path:
    """Return a wheel with the binding of one torch, built from a source distribution."""
    what = f"the wheel for torch {version} is not built"
    own = folder / f"build-{version}"
    _run([python, "-c", SDIST, str(own)], what, cwd=copy_sources(own / "tree"))
    (archive,) = own.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(own, filter="data")
    sources = own / archive.name.removesuffix(".tar.gz")
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    _run([*command, "--wheel-dir", str(own), str(sources)], what)
    (wheel,) = own.glob("*.whl")
    if not any(is_for(binding, version) for binding in list_bindings(wheel)):
        reasons = [text.decode() for info, text in _read(wheel) if info.filename == REASON]
        raise WheelError(f"{what}: {''.join(reasons).strip() or 'it has no binding'}")
    return wheel


def copy_sources(folder: Path) -> Path:
    """Copy the files that a build needs, so that the build leaves nothing in the checkout."""
    built = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "bindings")
    shutil.copytree(ROOT / "src", folder / "src", ignore=built)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def _run(
    command: Sequence[str],
    what: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a program; raise WheelError with `what` and its last line if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WheelError(f"{what}: no end after {COMMAND_SECONDS:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        raise WheelError(f"{what}: {said[-1].strip() if said else f'status {done.returncode}'}")


def _delegate(version: str, options: argparse.Namespace) -> None:
    """Build the wheel for another Python, with that Python."""
    python = shutil.which(f"python{version}")
    if python is None:
        raise WheelError(f"there is no python{version} (leave it out with PYTHONS=...)")
    command = [python, __file__, "--python", version, "--torch", options.torch]
    if subprocess.run([*command, "--out", str(options.out)], check=False).returncode:
        raise WheelError(f"no wheel for Python {version}")


def main() -> None:
    """Build the wheels that the command line names."""
    parser = argparse.ArgumentParser(description="Build wheels with bindings for several torches.")
    for name in ("python", "torch"):
        text = f"Versions of {name} in the matrix, separated by commas.  [default: all]"
        parser.add_argument(f"--{name}", default="", help=text)
    parser.add_argument(
        "--out", type=Path, default=Path("dist"), help="Folder of the wheels.  [default: dist]"
    )
    parser.add_argument("--merge", type=Path, help="A wheel that gets the missing bindings.")
    for what in ("python", "torch"):
        text = f"Print the {what} that cibuildwheel builds with, and do nothing else."
        parser.add_argument(f"--print-{what}", action="store_true", help=text)
    options = parser.parse_args()
    matrix = read_matrix((ROOT / "pyproject.toml").read_text())
    if options.print_python or options.print_torch:
        print(RUNNING if options.print_python else matrix["torch"][-1])
        return
    try:
        torches = choose("torch", options.torch, matrix["torch"])
        for version in choose("python", options.python, matrix["python"]):
            if version != RUNNING:
                _delegate(version, options)
                continue
            with tempfile.TemporaryDirectory(prefix="lockstep-wheels-") as folder:
                wheel = build(torches, options.out, options.merge, Path(folder))
            bindings = ", ".join(list_bindings(wheel))
            size = wheel.stat().st_size / 1e6
            print(f"{wheel}: {size:.1f} MB, with bindings for torch {bindings}", flush=True)
    except WheelError as error:
        sys.exit(f"wheels: {error}")


if __name__ == "__main__":
    main()
