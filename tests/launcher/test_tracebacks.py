"""What is shown of an error that nobody catches."""

from __future__ import annotations

import subprocess
import sys
import traceback
from fractions import Fraction
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import lockstep as ls
import warm
from lockstep.comm.backend import ArgumentError
from lockstep.kernel.errors import SampleError, UsageError
from lockstep.launcher import tracebacks
from lockstep.launcher import world as joined
from lockstep.launcher.tracebacks import find_location, find_user_location, format_user_frames

HERE = Path(__file__).name
SENTENCE = "this process has not joined a world: call lockstep.init() first"


def raised() -> UsageError:
    with pytest.raises(UsageError) as caught:
        joined.world()
    return caught.value


def show(error: BaseException) -> None:
    tracebacks._show_uncaught(type(error), error, error.__traceback__)


def test_lockstep_errors_are_shown_with_the_users_frames_only(capsys, monkeypatch):
    error = raised()
    line = raised.__code__.co_firstlineno + 2
    assert find_user_location(error) == f"{HERE}:{line}"
    frames = format_user_frames(error)
    assert f"line {line}, in raised\n    joined.world()\n" in frames
    assert frames.count("File") == 1
    show(error)
    last = f"lockstep.kernel.errors.UsageError: {SENTENCE}\n"
    shown = f"Traceback (most recent call last):\n{frames}{last}"
    assert capsys.readouterr().err == shown
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "1")
    show(error)
    assert "launcher/world.py" in capsys.readouterr().err


def test_causes_in_the_users_code_are_shown_and_others_are_not(capsys):
    def fail(cause: BaseException) -> SampleError:
        error = SampleError("sample 3 cannot be loaded")
        error.__cause__ = cause
        return error

    try:
        raise ValueError("mine")
    except ValueError as mine:
        show(fail(mine))
    shown = capsys.readouterr().err
    assert 'raise ValueError("mine")\nValueError: mine\n' in shown
    assert shown.endswith("lockstep.kernel.errors.SampleError: sample 3 cannot be loaded\n")
    show(fail(KeyError("inside")))
    expected = "lockstep.kernel.errors.SampleError: sample 3 cannot be loaded\n"
    assert capsys.readouterr().err == expected


def test_errors_of_other_classes_keep_every_frame(capsys):
    with pytest.raises(AttributeError) as caught:
        ls.__getattr__("nothing")
    show(caught.value)
    assert "lockstep/__init__.py" in capsys.readouterr().err


def test_a_line_of_lockstep_is_no_location():
    error = raised()
    assert find_location(error) == find_user_location(error)
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    assert find_location(error) == find_user_location(error) == ""
    with pytest.raises(ValueError, match="Invalid") as caught:
        Fraction("text")
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert find_location(caught.value).startswith("fractions.py:")


@pytest.fixture
def shell(monkeypatch):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # of another environment, IPython warns
    without_history = Config({"HistoryManager": {"enabled": False}})
    yield InteractiveShell.instance(colors="nocolor", config=without_history)
    InteractiveShell.clear_instance()


def test_a_notebook_shows_its_own_frames_and_keeps_its_own_handler(capsys, monkeypatch, shell):
    def show_cell(cell: str) -> str:
        assert isinstance(shell.run_cell(cell).error_in_exec, ls.LockstepError)
        return capsys.readouterr().out

    shell.run_cell(
        "import lockstep as ls\nfrom lockstep.launcher import world\ndef main():\n    world.world()"
    )
    tracebacks.install()
    shown = show_cell("main()")
    assert shown.endswith(f"UsageError: {SENTENCE}\n")
    assert "in main\n    world.world()\n" in shown
    assert "world.py" not in shown
    assert "IPython" not in shown
    assert "world.py" in "".join(traceback.format_tb(sys.last_traceback))

    chained = (
        "try:\n    {}\nexcept Exception as error:\n    raise ls.LockstepError('no') from error"
    )
    assert "ZeroDivisionError: division by zero" in show_cell(chained.format("1 / 0"))
    shown = show_cell(chained.format("main()"))
    assert SENTENCE in shown
    assert "world.py" not in shown

    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "1")
    assert "world.py" in show_cell("main()")

    handled = []
    shell.set_custom_exc((ValueError,), lambda *error, **_: handled.append(error[1]))
    tracebacks.install()
    assert shell.custom_exceptions == (ValueError,)


def test_a_program_shows_its_own_line_and_keeps_its_own_hook():
    program = "import sys, lockstep as ls; from lockstep.launcher import world\n"
    program += "{}\nls.rank()\ndef main():\n    world.world()\nmain()\n"
    hook = "sys.excepthook = lambda *error: print('hooked')"
    command = [sys.executable, "-c"]
    shown = [
        subprocess.run([*command, program.format("")], capture_output=True, text=True),
        warm.run([*command, program.format(hook)], timeout=60, text=True),
    ]
    assert shown[0].stderr.splitlines()[1:] == [
        '  File "<string>", line 6, in <module>',
        '  File "<string>", line 5, in main',
        f"lockstep.kernel.errors.UsageError: {SENTENCE}",
    ]
    assert (shown[1].stdout, shown[1].stderr) == ("hooked\n", "")


def test_messages_of_the_backend_count_as_lockstep_s_and_those_of_others_do_not():
    from torch.distributed import DistBackendError  # type: ignore[attr-defined]

    from lockstep.comm.backend_errors import BackendError, PeerLostError

    assert all(
        tracebacks.is_own_error(kind("anything"))
        for kind in (BackendError, PeerLostError, ArgumentError)
    )
    said = "rank 1: barrier #2 on group default failed: rank 0 died (process 123 has ended)"
    assert not any(tracebacks.is_own_error(kind(said)) for kind in (DistBackendError, RuntimeError))
