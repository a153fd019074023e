"""SIGTERM is noted, in the process that listens and nowhere else."""

import os
import signal
import threading
from functools import partial

import pytest

from lockstep.checkpoint.stop_request import StoppedOnRequest, StopRequest
from lockstep.launcher.failure_codes import STOPPED


@pytest.fixture
def request_():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    stop = StopRequest()
    stop.listen()
    yield stop
    stop.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def in_child(function):
    """Return the exit status of a forked child that calls a function."""
    if (pid := os.fork()) == 0:
        signal.alarm(30)
        try:
            function()
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_noted(request_):
    assert request_.signal == ""
    terminate()
    assert request_.signal == "SIGTERM"


def test_a_second_one_ends_the_process_unless_a_launcher_started_it(request_, monkeypatch):
    def twice(closes):
        stop = StopRequest()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop.listen()
        terminate()
        if closes:  # the rank exits, and its launcher passes the signal on only now
            stop.close()
        terminate()
        os._exit(3)

    for closes in (False, True):
        monkeypatch.delenv("RANK", raising=False)
        assert in_child(partial(twice, closes)) == -signal.SIGTERM
        monkeypatch.setenv("RANK", "0")
        assert in_child(partial(twice, closes)) == 3


def test_forked_children_keep_the_default(request_, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert in_child(terminate) == -signal.SIGTERM
    terminate()
    assert in_child(terminate) == -signal.SIGTERM  # also after the parent has noted one


def test_a_handler_of_the_program_stays_in_place():
    def handler(*_):
        raise InterruptedError

    signal.signal(signal.SIGTERM, handler)
    try:
        stop = StopRequest()
        stop.listen()
        assert signal.getsignal(signal.SIGTERM) is handler
        stop.close()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_other_threads_do_not_listen():
    stop = StopRequest()
    thread = threading.Thread(target=stop.listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_exit_status():
    with pytest.raises(SystemExit) as caught:
        raise StoppedOnRequest("stopped after step 7")
    assert caught.value.code == STOPPED == 75
    assert str(caught.value) == "stopped after step 7"
