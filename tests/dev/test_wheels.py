"""Wheels with bindings for several torches: chosen from the matrix, merged, refused."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
from base64 import urlsafe_b64decode
from zipfile import ZipFile

import pytest

from dev.wheels import (
    ROOT,
    RUNNING,
    WheelError,
    choose,
    list_bindings,
    merge,
    read_matrix,
)

NAME = "torch_lockstep-1.0-cp311-cp311-linux_x86_64.whl"
TORCHES = ("2.12.0", "2.13.0", "2.13.0+cpu")


def write_wheel(folder, torch, name=NAME, code="print(1)"):
    folder.mkdir()
    with ZipFile(folder / name, "w") as file:
        file.writestr("lockstep/__init__.py", code)
        file.writestr(f"lockstep/bindings/{torch}/_native.so", f"for {torch}")
        file.writestr(f"lockstep/bindings/{torch}/key.json", json.dumps({"torch": torch}))
        file.writestr("torch_lockstep-1.0.dist-info/METADATA", "Name: torch-lockstep")
        file.writestr("torch_lockstep-1.0.dist-info/RECORD", f"of {torch}")
    return folder / name


def test_a_merged_wheel_has_all_bindings_and_a_record_of_every_file(tmp_path):
    wheels = [write_wheel(tmp_path / torch, torch) for torch in TORCHES]
    merged = merge(wheels, tmp_path / "out")
    assert merged.name == NAME
    assert list_bindings(merged) == list(TORCHES)
    with ZipFile(merged) as file:
        names = file.namelist()
        rows = list(csv.reader(file.read("torch_lockstep-1.0.dist-info/RECORD").decode().split()))
        assert len(names) == len({*names}) == len(rows) == 9
        assert file.read("lockstep/bindings/2.12.0/_native.so") == b"for 2.12.0"
        for name, digest, size in rows:
            if digest:
                algorithm, _, value = digest.partition("=")
                assert algorithm == "sha256"
                content = file.read(name)
                assert urlsafe_b64decode(value + "=") == hashlib.sha256(content).digest()
                assert int(size) == len(content)
            else:
                assert name.endswith("RECORD")


def test_wheels_that_differ_otherwise_are_not_merged(tmp_path):
    first = write_wheel(tmp_path / "a", "2.12.0")
    other = write_wheel(tmp_path / "b", "2.13.0", code="print(2)")
    with pytest.raises(WheelError, match=r"have different files lockstep/__init__\.py: build both"):
        merge([first, other], tmp_path / "out")
    renamed = write_wheel(tmp_path / "c", "2.13.0", NAME.replace("cp311", "cp312"))
    with pytest.raises(WheelError, match=r"wheels with different names: .*cp311.*cp312"):
        merge([first, renamed], tmp_path / "out")


def test_the_matrix_is_data_and_a_part_of_it_can_be_chosen():
    matrix = read_matrix('[tool.lockstep.wheels]\npython = ["3.11"]\ntorch = ["2.12.0", "2.13.0"]')
    assert matrix == {"python": ("3.11",), "torch": ("2.12.0", "2.13.0")}
    assert choose("torch", "", matrix["torch"]) == ("2.12.0", "2.13.0")
    assert choose("torch", "torch==2.13.0", matrix["torch"]) == ("2.13.0",)
    assert choose("torch", "2.13.0,2.12.0", matrix["torch"]) == ("2.12.0", "2.13.0")
    with pytest.raises(WheelError, match=r"torch 1\.0 is not in .* which has 2\.12\.0, 2\.13\.0"):
        choose("torch", "1.0", matrix["torch"])


def run(*arguments):
    return subprocess.run(
        [sys.executable, "dev/wheels.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_configuration_of_cibuildwheel_calls_what_there_is():
    text = (ROOT / "pyproject.toml").read_text()
    options = {*re.findall(r"wheels\.py (--[a-z-]+)", text)}
    assert options == {"--print-torch", "--print-python", "--python"}
    assert run("--print-torch").stdout.strip() == read_matrix(text)["torch"][-1]
    assert run("--print-python").stdout.strip() == RUNNING
    done = run("--torch", "1.0")
    assert done.returncode == 1
    assert done.stderr.startswith("wheels: torch 1.0 is not in [tool.lockstep.wheels] of pyproj")
