"""The ABI of an extension: the torch, the Python and the C++ sources that it is compiled for.

torch has no stable interface for backends of `torch.distributed`, so an extension works with one
build of torch only. Its ABI is stored beside it, and a process loads only an extension with its
own ABI: at best, any other would fail with `undefined symbol`.

setup.py imports this module: it needs torch and the standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import asdict, dataclass, fields
from pathlib import Path

__all__ = [
    "CSRC",
    "FLAGS",
    "ExtensionABI",
    "current_abi",
    "hash_sources",
    "list_sources",
]

CSRC = Path(__file__).parents[2] / "csrc"

# No fused multiply-add: all processors must compute the same bits. Signed integers wrap.
# With errno of math functions, a square root is a call; with traps, a choice between two numbers is
# a branch: loops with them are not vectorized.
FLAGS = (
    "-std=c++20", "-O3", "-DNDEBUG", "-fwrapv", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fPIC", "-pthread", "-fvisibility=hidden", "-g0",
)  # fmt: skip


@dataclass(frozen=True)
class ExtensionABI:
    """The versions that an extension depends on; it can be loaded if they are equal.

    Attributes:
        torch: `torch.__version__`.
        torch_git: The commit that torch was built from.
        cxx_abi: 1 if torch was built with the C++11 ABI of libstdc++, else 0.
        python: ABI of the interpreter, such as "cpython-311-x86_64-linux-gnu".
        platform: System and processor, such as "linux-x86_64".
        sources: Hash of the C++ sources.
        flags: Flags of the compiler.
    """

    torch: str
    torch_git: str
    cxx_abi: int
    python: str
    platform: str
    sources: str
    flags: str

    @property
    def name(self) -> str:
        """The name of the extension's folder: a short hash."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the ABI as JSON; equal ones have equal JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ExtensionABI:
        """Return the ABI that `to_json` wrote.

        Raises:
            ValueError: The text is not an ABI, or one of another version of Lockstep.
        """
        values = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError("not the ABI of an extension")
        return cls(**values)


@functools.cache
def current_abi() -> ExtensionABI:
    """Return the ABI of the extension that this process needs; imports torch."""
    import torch

    return ExtensionABI(
        torch=str(torch.__version__),
        torch_git=str(torch.version.git_version),
        cxx_abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
        python=str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        platform=sysconfig.get_platform(),
        sources=hash_sources(CSRC),
        flags=" ".join(FLAGS),
    )


def list_sources(folder: Path, *suffixes: str) -> list[str]:
    """Return the paths of the files below a folder with one of the suffixes, sorted."""
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(path for path in paths if path.endswith(suffixes))


def hash_sources(folder: Path) -> str:
    """Return a hash of the names and contents of the C++ sources in a folder."""
    # Every rank does this: os.walk and SHA-256 take 3 ms, Path.rglob and BLAKE2b took 11 ms.
    hashed = hashlib.sha256()
    for path in list_sources(folder, ".cpp", ".h", ".inc"):
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        hashed.update(f"{path[len(str(folder)) :]} {len(content)}\n".encode())
        hashed.update(content)
    return hashed.hexdigest()[:32]
