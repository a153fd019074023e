"""Keys of bindings: equal if a binding can be loaded, and different for anything else."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest
import torch

from lockstep.native.binding_key import BindingKey, current_key, describe_difference, hash_sources

KEY = BindingKey("2.13.0", "a" * 40, 1, "cpython-311-x86_64-linux-gnu", "linux-x86_64", "b", "-O3")


def test_every_part_of_a_key_changes_its_name():
    assert replace(KEY).name == KEY.name
    for field in fields(KEY):
        other = replace(KEY, **{field.name: 0 if field.name == "cxx_abi" else "other"})
        assert other.name != KEY.name, field.name
        assert describe_difference(other, KEY), field.name


def test_keys_are_read_as_they_were_written():
    assert BindingKey.from_json(KEY.to_json()) == KEY
    more = asdict(KEY) | {"more": 1}
    for text in ("", "{}", "[]", "3", "{", str(more).replace("'", '"')):
        with pytest.raises(ValueError, match=r"key|Expecting"):
            BindingKey.from_json(text)


def test_differences_are_named():
    other = replace(KEY, torch="2.12.0", torch_git="c" * 40)
    assert describe_difference(other, KEY) == "torch 2.12.0, not 2.13.0"
    other = replace(KEY, torch_git="c" * 40)
    assert describe_difference(other, KEY).startswith("another build of torch 2.13.0 (commit ccc")
    other = replace(KEY, sources="x", flags="-O2", python="cpython-312-x86_64-linux-gnu")
    assert describe_difference(other, KEY) == (
        "Python cpython-312-x86_64-linux-gnu, not cpython-311-x86_64-linux-gnu, and other C++ "
        "sources (another version of Lockstep)"
    )


def test_the_key_of_this_process():
    key = current_key()
    assert key.torch == torch.__version__
    assert key.torch_git == torch.version.git_version
    assert "-ffp-contract=off" in key.flags


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
