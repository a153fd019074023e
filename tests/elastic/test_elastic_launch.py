"""An elastic launch: what its ranks and its run folder are told, and how it is resumed."""

from __future__ import annotations

import json

import pytest

from lockstep.commands.run import command

SCRIPT = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCKSTEP_ELASTIC", "LOCKSTEP_MEMBER", "LOCKSTEP_RESUME")
print(*(os.environ.get(name) for name in names), "LOCKSTEP_JOIN" in os.environ)
assert "torch._dynamo" in sys.modules  # or every new process would import it
sys.exit(0 if "LOCKSTEP_RESUME" in os.environ else 75)
"""


def test_a_run_that_stopped_is_resumed_as_elastic_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def launch(*arguments):
        with pytest.raises(SystemExit) as exited:
            command.main(arguments, standalone_mode=False)
        return exited.value.code, sorted(capfd.readouterr().out.splitlines())

    first = launch("--min", "1", "--max", "2", "--name", "mine", "train.py")
    assert first == (75, [f"[{rank}] {rank} 2 1 {rank} None False" for rank in range(2)])
    second = launch("--resume", "mine")
    assert second == (0, [f"[{rank}] {rank} 2 1 {rank} 1 False" for rank in range(2)])
    description = json.loads((tmp_path / "runs" / "mine" / "launch.json").read_text())
    assert (description["nprocs"], description["min_nprocs"]) == (2, 1)
    assert launch("--resume", "mine", "-n", "1") == (0, ["[0] 0 1 1 0 1 False"])
