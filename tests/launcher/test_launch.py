"""A function on N ranks: what comes back, and what comes back when it fails."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import warm
from lockstep.kernel.errors import LaunchEnvironmentError, RankError, UsageError
from lockstep.launcher.environment import OF_ELASTIC


def reduced() -> list[float]:
    tensor = torch.full((2,), float(ls.rank() + 1))
    dist.all_reduce(tensor)
    return tensor.tolist()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_join_one_world(ranks, n):
    assert ranks(reduced, n) == [[n * (n + 1) / 2] * 2] * n


def test_values_come_in_rank_order(ranks):
    offset = 10
    assert ranks(lambda more: offset + ls.rank() + more, 4, 100) == [110, 111, 112, 113]


def test_a_value_may_be_large(ranks):
    values = ranks(lambda: torch.full((1 << 21,), float(ls.rank())), 2)
    assert [value.numel() for value in values] == [1 << 21] * 2
    assert [value[0].item() for value in values] == [0.0, 1.0]


def fail(how: str) -> None:
    if ls.rank() == 1:
        if how == "raise":
            raise ValueError("no such luck")
        if how == "sentence":
            raise LaunchEnvironmentError("nobody is here")
        if how == "exit":
            sys.exit(3)
        if how == "vanish":
            os._exit(0)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "return":
            return
    dist.barrier()
    dist.barrier()


LINE = fail.__code__.co_firstlineno


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raise", f"rank 1 raised ValueError: no such luck (test_launch.py:{LINE + 3})"),
        ("sentence", "rank 1 failed: nobody is here"),
        ("exit", "rank 1 exited with status 3"),
        ("killed", "rank 1 was killed by SIGKILL"),
    ],
)
def test_exception_names_the_rank_that_failed_first(ranks, how, sentence):
    with pytest.raises(RankError) as caught:
        ranks(fail, 3, how)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("how", ["return", "vanish"])
def test_a_rank_that_returned_early_is_named(ranks, how):
    with pytest.raises(
        RankError, match=r"^rank 1 returned while rank [02] still waited in barrier #1 "
    ):
        ranks(fail, 3, how)


def test_the_traceback_is_a_note(ranks):
    with pytest.raises(RankError) as caught:
        ranks(fail, 2, "raise")
    (note,) = caught.value.__notes__
    assert 'raise ValueError("no such luck")' in note
    assert "lockstep/launcher" not in note


def test_arguments_in_the_wrong_order_and_a_limit_of_open_files(monkeypatch):
    with pytest.raises(UsageError, match=r"function comes first, as in launch\(fail, nprocs=2\)$"):
        ls.launch(2, fail)
    with pytest.raises(UsageError, match=r"^launch\(fail, 2\): expected the arguments as a tuple"):
        ls.launch(fail, 2)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 1024))
    with pytest.raises(UsageError, match=r"^a process may open 16 files \(ulimit -n\), but starti"):
        ls.launch(fail, ("return",), nprocs=2)


def test_a_fork_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "limited.py").write_text("""
import errno, os
from lockstep.launcher import fork_server_main
def limited():
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
os.fork = limited
main = fork_server_main.main
""")
    server = warm.SPAWN_FORK_SERVER(
        f"limited.main({{}}, {os.getpid()}, [])", path=[str(tmp_path), *filter(None, sys.path)]
    )
    monkeypatch.setattr("lockstep.launcher.launch.get_fork_server", lambda **_: server)
    try:
        with pytest.raises(RankError) as caught:
            ls.launch(print, timeout=60)
    finally:
        server.close()
    assert str(caught.value).startswith(
        "rank 0 could not be started: fork failed (Resource temporarily unavailable); see ulimit -u"
    )


def test_a_timeout_ends_ranks_that_do_not_return():
    with pytest.raises(
        RankError, match=r"^ranks 0 and 1 had not returned after 0.3 s and were ended"
    ):
        ls.launch(signal.pause, nprocs=2, timeout=0.3)


def test_breakpoints_of_ranks_without_input_are_skipped(capfd):
    def stop_on_rank_1() -> int:
        for _ in range(2 * ls.rank()):
            breakpoint()
        return ls.rank()

    assert ls.launch(stop_on_rank_1, nprocs=2, timeout=60) == [0, 1]
    shown = capfd.readouterr().err
    assert shown.count("breakpoint() is skipped on rank 1: only rank 0 has the") == 1


@pytest.mark.parametrize("seed", [None, "5"])
def test_every_launch_hashes_strings_alike(seed, monkeypatch):
    """Otherwise each launch would iterate a set of words in another order."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("PYTHON_OF_THIS_TEST", "1")  # a fork server of its own
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    python = [sys.executable, "-c", "print(hash('word'))"]
    environ = {**os.environ, "PYTHONHASHSEED": seed or "0"}
    expected = int(subprocess.run(python, env=environ, check=True, stdout=subprocess.PIPE).stdout)
    assert ls.launch(hash, nprocs=2, args=("word",)) == [expected] * 2


def test_pass_rank():
    assert ls.launch(lambda rank, more: rank + more, (5,), 2, pass_rank=True) == [5, 6]


def test_ranks_that_a_member_of_an_elastic_run_launches_are_no_members(monkeypatch):
    for name in OF_ELASTIC:
        monkeypatch.setenv(name, "1")
    assert ls.launch(lambda: [name for name in OF_ELASTIC if name in os.environ]) == [[]]


class Scripted:
    """Refuses to be pickled as torch's ScriptFunction does, by the base class of the errors."""

    def __reduce__(self):
        raise pickle.PickleError("as a ScriptFunction says")


def test_functions_and_values_that_cannot_be_pickled():
    lock = threading.Lock()
    with pytest.raises(
        UsageError, match=r"cannot send the function .* cannot pickle '_thread.lock'"
    ):
        ls.launch(lambda: lock.locked())
    with pytest.raises(RankError, match=r"rank 0 raised TypeError: cannot pickle '_thread.lock'"):
        ls.launch(threading.Lock)
    with pytest.raises(UsageError, match=r"cannot send the function .* as a ScriptFunction says"):
        ls.launch(print, (Scripted(),))


@pytest.mark.parametrize("arguments", [{"nprocs": 0}, {"timeout": 0}])
def test_invalid_arguments(arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        ls.launch(print, **arguments)


@pytest.mark.parametrize("start", [lambda: ls.launch(print), lambda: ls.Driver(nprocs=1)])
def test_a_deleted_working_directory_is_refused_before_anything_starts(
    tmp_path, monkeypatch, start
):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(UsageError, match="the working directory has been deleted"):
        start()
