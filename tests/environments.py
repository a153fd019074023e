"""Fresh Python environments, made in a moment and without a network.

    folder/bin/python            a virtual environment without pip
    folder/.../site-packages     what a test installs
    folder/packages              links to chosen packages of this interpreter, added by a .pth file

Lockstep itself is never linked, and neither is what its installation must not need.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from dev.wheels import RUNNING

PACKAGES = Path(sysconfig.get_path("purelib"))
LEFT_OUT = ("torch_lockstep-", "pytest_lockstep", "__editable__", "wheel")
BUILD_TOOLS = ("setuptools", "_distutils_hack", "pkg_resources")  # what an isolated build has
DEADLINE = 300.0  # seconds for one program


@functools.cache
def can_unshare() -> bool:
    """Return whether this user can start a program without a network."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


@dataclass
class Environment:
    """A virtual environment.

    Args:
        folder: Where it is.
        variables: Environment variables of its programs; it also has PATH, LANG, TMPDIR and HOME.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where packages are installed."""
        return self.folder / "lib" / f"python{RUNNING}" / "site-packages"

    def unpack(self, wheel: Path) -> None:
        """Install a wheel as pip does, without its scripts."""
        with ZipFile(wheel) as file:
            file.extractall(self.site_packages)

    def run(
        self,
        *arguments: object,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        offline: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run the interpreter.

        Args:
            arguments: Its arguments.
            cwd: The working directory; the environment's folder by default.
            variables: More environment variables.
            offline: Run it without a network, where this user may take it away.
            options: Arguments of `subprocess.run`.
        """
        without_network = ("unshare", "--net") if offline and can_unshare() else ()
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        return subprocess.run(
            [*without_network, str(self.python), *map(str, arguments)],
            cwd=cwd or self.folder,
            env={**kept, "HOME": str(self.folder / "home"), **self.variables, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            stdin=subprocess.DEVNULL,
            check=False,
            **options,
        )


def make_environment(
    folder: Path, packages: Iterable[str] | None = None, python: str = sys.executable
) -> Environment:
    """Make a virtual environment in a new folder.

    Args:
        folder: The folder, which must not exist.
        packages: The packages that it has; None for all that Lockstep needs.
        python: The interpreter, of the same version as this one.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=DEADLINE)
    (folder / "home").mkdir()
    links = folder / "packages"
    links.mkdir()
    wanted = None if packages is None else {*packages}
    for each in PACKAGES.iterdir():
        name = each.name.partition(".")[0].partition("-")[0]
        is_wanted = not each.name.startswith(LEFT_OUT) if wanted is None else name in wanted
        if is_wanted and each.suffix not in (".pth", ".pyc") and name != "__pycache__":
            (links / each.name).symlink_to(each)
    if wanted is None and (ninja := shutil.which("ninja", path=sysconfig.get_path("scripts"))):
        (folder / "bin" / "ninja").symlink_to(ninja)
    environment = Environment(folder)
    (environment.site_packages / "packages.pth").write_text(f"{links}\n")
    return environment


def pretend_torch(environment: Environment, version: str) -> None:
    """Let torch of an environment say that it is another version; all else of it is the same."""
    link = environment.folder / "packages" / "torch"
    real = link.resolve()
    link.unlink()
    link.mkdir()
    (link / "__pycache__").mkdir()
    for each in (*real.iterdir(), *real.glob("__pycache__/*")):
        if each.name != "__pycache__" and not each.name.startswith("version."):
            (link / each.relative_to(real)).symlink_to(each)
    text = re.sub(
        "__version__ = .*", f"__version__ = {version!r}", (real / "version.py").read_text()
    )
    (link / "version.py").write_text(text)


def build(
    environment: Environment,
    sources: Path,
    kind: str,
    out: Path,
    variables: Mapping[str, str] | None = None,
) -> tuple[Path, str]:
    """Build "wheel" or "sdist" as pip does: by the hook of the build backend.

    Returns:
        The file in the folder `out`, and what was printed to standard error.
    """
    out.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as b; print('built', b.build_{kind}({str(out)!r}))"
    done = environment.run("-c", code, cwd=sources, variables=variables)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1].removeprefix("built "), done.stderr
