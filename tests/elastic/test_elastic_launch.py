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


DIES_ONCE_PUBLISHED = """
import os, select
from contextlib import suppress
from functools import partial
from pathlib import Path
import torch
import torch.distributed as dist
import lockstep as ls
from lockstep.comm.native_all_reduce import NativeAllReduce

DIES_IN, ADDRESS = {dies_in!r}, {address!r}
victim = Path("victim")  # has its process id


def die():
    victim.with_suffix(".new").write_text(str(os.getpid()))
    victim.with_suffix(".new").rename(victim)
    os.kill(os.getpid(), 9)


def wait_until_dead():
    while not victim.exists():
        pass
    with suppress(ProcessLookupError):
        process = os.pidfd_open(int(victim.read_text()))
        assert select.select([process], [], [], 60)[0]
        os.close(process)


class Store(dist.Store):
    "The store of the victim, which dies once others can read its address."

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value):
        self.inner.set(key, value)
        if key.endswith(ADDRESS):
            die()


for name in ("get", "add", "check", "wait", "compare_set", "multi_get", "delete_key"):
    setattr(Store, name, lambda self, *given, name=name: getattr(self.inner, name)(*given))


def connect(backend, store, **options):
    if not victim.exists() and DIES_IN == "init":
        if options["rank"] == 0:
            store = Store(store)
        else:
            wait_until_dead()
    real_connect(backend, store=store, **options)


def launch(self, held, in_steps=False):
    is_first = not victim.exists() and DIES_IN == "step"
    if is_first and ls.rank() == 0:
        wait_until_dead()
    real_launch(self, held, in_steps or is_first)
    if is_first and ls.rank() == 1:
        self.advance()  # publishes where its memory is
        die()


real_connect, dist.init_process_group = dist.init_process_group, connect
real_launch, NativeAllReduce.launch = NativeAllReduce.launch, launch
ls.init(timeout=60)
torch.manual_seed(0)
model, loss = torch.nn.Linear(64, 256), torch.nn.CrossEntropyLoss()
optimizer = partial(torch.optim.SGD, lr=0.1)
trainer = ls.Trainer(model, loss, optimizer, microbatches=4, progress=False)
generator = torch.Generator().manual_seed(5)
for _ in range(3):
    inputs = torch.randn(8, 64, generator=generator)
    trainer.step((inputs, inputs.argmax(1)))
print("DIGEST", trainer.digest())
"""


@pytest.mark.parametrize(
    ("backend", "dies_in", "address"),
    [("lockstep", "init", "lockstep/address/0"), ("gloo", "init", "0/0"), ("lockstep", "step", "")],
)
def test_a_rank_may_be_killed_before_others_open_what_it_has_published(
    tmp_path, monkeypatch, capfd, backend, dies_in, address
):
    """They could not connect to it, or could not map its memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_BACKEND", backend)
    script = DIES_ONCE_PUBLISHED.format(dies_in=dies_in, address=address)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "alone.py").write_text(script.replace(repr(dies_in), "None"))

    def run(*arguments):
        with pytest.raises(SystemExit) as exited, restoring_handlers():
            command.main(arguments, standalone_mode=False)
        printed = capfd.readouterr()
        assert exited.value.code == 0, printed
        digests = {line.partition("DIGEST ")[2] for line in printed.out.splitlines()}
        return digests - {""}, printed.err

    digests, printed = run("--min", "1", "--max", "2", "train.py")
    victim = 0 if dies_in == "init" else 1
    assert f"member {victim} was killed by SIGKILL" in printed
    assert "could not connect" not in printed
    assert "cannot open" not in printed
    assert digests == run("alone.py")[0]
    assert len(digests) == 1
