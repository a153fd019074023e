"""An elastic launch: the variables of its ranks, its run folder, and how it is resumed."""

from __future__ import annotations

import json

import pytest

from lockstep.elastic import coordinator
from lockstep.tools.commands.run import command
from processes import restoring_handlers

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
        with pytest.raises(SystemExit) as exited, restoring_handlers():
            command.main(arguments, standalone_mode=False)
        return exited.value.code, sorted(capfd.readouterr().out.splitlines())

    first = launch("--min", "1", "--max", "2", "--name", "mine", "train.py")
    assert first == (75, [f"[{rank}] {rank} 2 1 {rank} None False" for rank in range(2)])
    second = launch("--resume", "mine")
    assert second == (0, [f"[{rank}] {rank} 2 1 {rank} 1 False" for rank in range(2)])
    description = json.loads((tmp_path / "runs" / "mine" / "launch.json").read_text())
    assert (description["nprocs"], description["min_nprocs"]) == (2, 1)
    assert launch("--resume", "mine", "-n", "1") == (0, ["[0] 0 1 1 0 1 False"])


DIES_IN_INIT = """
import os
import torch.distributed as dist
import lockstep as ls

if os.environ["LOCKSTEP_MEMBER"] == "2":
    dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), 9)
ls.init()
print(ls.world_size())
"""


def test_a_rank_that_is_killed_while_the_ranks_connect_is_replaced(tmp_path, monkeypatch, capfd):
    """The others have found it in the store, and would wait for it until the limit of init."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(coordinator, "REPORT_TIMEOUT", 0.2)
    (tmp_path / "train.py").write_text(DIES_IN_INIT)
    with pytest.raises(SystemExit) as exited:
        command.main(("--min", "1", "--max", "3", "train.py"), standalone_mode=False)
    printed = capfd.readouterr()
    assert exited.value.code == 0
    assert sorted(printed.out.splitlines()) == [f"[{member}] 3" for member in (3, 4, 5)]
    assert "member 2 was killed by SIGKILL" in printed.err
