"""Which binding is loaded, and what is said if there is none."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.comm.native import binding
from lockstep.comm.native.binding import BindingError, find_bindings, load_binding
from lockstep.comm.native.binding_folder import write_abi
from lockstep.comm.native.build import MODULE
from lockstep.comm.native.extension_abi import ExtensionABI

ABI = ExtensionABI(
    "2.13.0", "a" * 40, 1, "cpython-311-x86_64-linux-gnu", "linux-x86_64", "b", "-O3"
)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The user's cache and the package's folder, both empty, of a process with the ABI `ABI`."""
    cache = tmp_path / "cache/lockstep/bindings"
    package = tmp_path / "package"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(binding, "PACKAGE_FOLDER", package)
    monkeypatch.setattr(binding, "current_abi", lambda: ABI)
    monkeypatch.setattr(sys, "platform", "linux")
    return cache, package


def add(folder: Path, abi: ExtensionABI) -> Path:
    made = folder / abi.name
    made.mkdir(parents=True)
    module = made / MODULE
    module.write_text(f"no module, of {folder}")
    write_abi(made, abi)
    for path in (module, module.with_name("key.json"), made, folder, folder.parent):
        path.chmod(0o700)
    return module


def why() -> str:
    with pytest.raises(BindingError) as caught:
        find_bindings()
    assert str(caught.value) == f"{caught.value.reason}: {caught.value.advice}"
    return str(caught.value)


def test_nothing_built(folders, monkeypatch):
    assert why() == "it has not been built for torch 2.13.0 yet: run `lockstep build`"

    def fail():
        raise PermissionError(13, "Permission denied", "/csrc/heap.cpp")

    monkeypatch.setattr(binding, "current_abi", fail)
    assert why().startswith("the C++ source /csrc/heap.cpp cannot be read (Permission denied): ")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why() == "it needs Linux, and this is darwin: use gloo"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"torch": "2.12.0+cpu"}, "it was built for torch 2.12.0+cpu, and this is torch 2.13.0"),
        ({"torch_git": "c" * 40}, "it was built for other C++ sources, or for another build of"),
        (
            {"sources": "c"},
            "it was built for other C++ sources, or for another build of this torch",
        ),
        ({"python": "cpython-312"}, "it was built for another Python than cpython-311-x86_64"),
    ],
)
@pytest.mark.parametrize("place", [0, 1], ids=["cache", "package"])
def test_a_binding_of_another_abi_is_named_and_never_loaded(
    folders, place, changed, sentence, monkeypatch
):
    monkeypatch.setattr(binding, "load_file", lambda path: pytest.fail(f"{path} was loaded"))
    add(folders[place], replace(ABI, **changed))
    add(folders[place], replace(ABI, torch="1.0", python="far"))  # of another interpreter
    assert why().startswith(sentence)
    assert why().endswith(": run `lockstep build`")
    with pytest.raises(BindingError, match="run `lockstep build`"):
        load_binding()


def test_a_cache_that_others_can_write_is_not_used(folders, monkeypatch):
    cache, package = folders
    add(cache, ABI)
    cache.chmod(0o777)
    assert why() == (
        f"the cache is not used, because {cache} is writable for others (mode 0777): correct that "
        f"or set XDG_CACHE_HOME to a folder of user {os.geteuid()}, then run `lockstep build`"
    )
    module = add(package, ABI)  # the package's own is used all the same
    assert find_bindings() == [module]
    cache.chmod(0o700)
    cache.parent.chmod(0o770)
    assert find_bindings() == [module]


def test_the_binding_of_the_cache_comes_first_if_it_loads(folders, monkeypatch):
    cache, package = folders
    built = add(cache, ABI)
    installed = add(package, ABI)
    assert find_bindings() == [built, installed]
    with pytest.raises(BindingError, match=r"it cannot be loaded \(.*\): run `lockstep build`"):
        load_binding()

    def load(path: Path) -> object:
        if path == built:
            raise ImportError("failed to map segment")
        return "the module"

    monkeypatch.setattr(binding, "load_file", load)
    assert load_binding() == "the module"
