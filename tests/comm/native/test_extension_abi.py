"""ABIs of extensions: equal if one can be loaded, and different for anything else."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from lockstep.comm.native.extension_abi import (
    CSRC,
    ExtensionABI,
    current_abi,
    hash_sources,
    list_sources,
)

ABI = ExtensionABI(
    "2.13.0", "a" * 40, 1, "cpython-311-x86_64-linux-gnu", "linux-x86_64", "b", "-O3"
)


def test_every_part_of_an_abi_changes_its_name():
    assert replace(ABI).name == ABI.name
    for field in fields(ABI):
        other = replace(ABI, **{field.name: 0 if field.name == "cxx_abi" else "other"})
        assert other.name != ABI.name, field.name


def test_abis_are_read_as_they_were_written():
    assert ExtensionABI.from_json(ABI.to_json()) == ABI
    more = asdict(ABI) | {"more": 1}
    for text in ("", "{}", "[]", "3", "{", str(more).replace("'", '"')):
        with pytest.raises(ValueError, match=r"ABI|Expecting"):
            ExtensionABI.from_json(text)


def test_the_abi_of_this_process():
    abi = current_abi()
    assert abi.torch == torch.__version__
    assert abi.torch_git == torch.version.git_version
    assert "-ffp-contract=off" in abi.flags


def test_the_hash_of_sources(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.cpp").write_text("int a;")
    (tmp_path / "b.h").write_text("int b;")
    first = hash_sources(tmp_path)
    (tmp_path / "core" / "a.cpp~").write_text("an editor's copy")
    assert hash_sources(tmp_path) == first
    (tmp_path / "core" / "a.cpp").write_text("int c;")
    second = hash_sources(tmp_path)
    (tmp_path / "b.h").rename(tmp_path / "c.h")
    third = hash_sources(tmp_path)
    (tmp_path / "d.inc").write_text("")
    assert len({first, second, third, hash_sources(tmp_path)}) == 4


def test_the_core_includes_nothing_of_torch_and_nothing_of_python():
    for path in list_sources(CSRC / "core", ".cpp", ".h", ".inc"):
        for line in Path(path).read_text().splitlines():
            if line.startswith("#include"):
                assert not any(name in line for name in ("torch", "ATen", "c10", "Python", "pyb"))
