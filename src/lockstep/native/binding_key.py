"""The key of a binding: the torch, the Python and the C++ sources that it is compiled for.

torch has no stable interface for backends of `torch.distributed`, so a binding works with one
build of torch only. The key of a binding is stored beside it, and a process loads only a binding
with its own key: at best, any other would fail with `undefined symbol`.

setup.py imports this module: it needs torch and the standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import sysconfig
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lockstep.native.compilation import (
    CSRC,
    FLAGS,
    describe_compiler,
    find_compiler,
    list_sources,
)

__all__ = ["BindingKey", "core_key", "current_key", "describe_difference", "hash_sources"]


@dataclass(frozen=True)
class BindingKey:
    """The versions that a binding depends on; it can be loaded if the keys are equal.

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
        """The name of the binding's folder: a short hash of the key."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the key as JSON; equal keys have equal JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> BindingKey:
        """Return the key that `to_json` wrote.

        Raises:
            ValueError: The text is not a key, or a key of another version of Lockstep.
        """
        found = json.loads(text)
        names = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or found.keys() != names:
            raise ValueError("not the key of a binding")
        return cls(**found)


@functools.cache
def current_key() -> BindingKey:
    """Return the key of the binding that this process needs; imports torch."""
    import torch

    return BindingKey(
        torch=str(torch.__version__),
        torch_git=str(torch.version.git_version),
        cxx_abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
        python=str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        platform=sysconfig.get_platform(),
        sources=hash_sources(CSRC),
        flags=" ".join(FLAGS),
    )


def core_key(cxx_abi: int) -> dict[str, str]:
    """Return the versions that a compiled core depends on; it can be linked if they are equal.

    The compiler is one of them, because an object may need a newer libstdc++ than another
    compiler links.

    Raises:
        CompilationError: There is no compiler.
    """
    return {
        "compiler": describe_compiler(find_compiler()),
        "cxx_abi": str(cxx_abi),
        "platform": sysconfig.get_platform(),
        "sources": hash_sources(CSRC / "core"),
        "flags": " ".join(FLAGS),
    }


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


def describe_difference(found: BindingKey, wanted: BindingKey) -> str:
    """Return how a binding differs from the one that is needed: "torch 2.12.0, not 2.13.0"."""
    parts = []
    if found.platform != wanted.platform:
        parts.append(f"{found.platform}, not {wanted.platform}")
    if found.python != wanted.python:
        parts.append(f"Python {found.python}, not {wanted.python}")
    if found.torch != wanted.torch:
        parts.append(f"torch {found.torch}, not {wanted.torch}")
    elif (found.torch_git, found.cxx_abi) != (wanted.torch_git, wanted.cxx_abi):
        parts.append(
            f"another build of torch {found.torch} (commit {found.torch_git[:9]} with C++ ABI "
            f"{found.cxx_abi}, not {wanted.torch_git[:9]} with {wanted.cxx_abi})"
        )
    if found.sources != wanted.sources:
        parts.append("other C++ sources (another version of Lockstep)")
    elif found.flags != wanted.flags:
        parts.append("other flags of the compiler")
    return ", and ".join(parts)
