"""One test in one rank: a fork of the template process, which has imported the test.

    join the group ── set up rank fixtures ── call ── tear down ── look for leaks ── leave
                                               │
                                               └ on a failure: report it, and wait until the
                                                 launcher has seen where the other ranks are

The test's other fixtures run in pytest's own process, which sends their values.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import pdb
import pickle
import sys
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

import pytest

from lockstep.launcher.failure_attribution import make_report
from lockstep.launcher.rank_process import (
    describe_error,
    receive_from_launcher,
    report_to_launcher,
)
from pytest_lockstep.coverage import measure_lines
from pytest_lockstep.group import join_group
from pytest_lockstep.leaks import RankLeaks
from pytest_lockstep.marker import is_sent
from pytest_lockstep.rank_order import Order, Result

__all__ = ["RankRunner", "get_current", "keep_items", "run_test"]

INNER = ("/torch/distributed/", os.path.dirname(__file__))
RELEASE_TIMEOUT = 10.0  # seconds that a failed rank waits for the launcher's permission to continue


class Rank:
    """The rank of this process."""

    def __init__(self, order: Order) -> None:
        self.rank = order.rank
        self.width = order.width
        self._order = order

    def check_joined(self) -> None:
        """Fail the test if it uses the group although its marker has `init=False`."""
        if not self._order.joins:
            pytest.fail(
                "the fixture 'group' needs ranks that join their group: remove init=False from "
                "@pytest.mark.ranks",
                pytrace=False,
            )


_items: dict[str, pytest.Item] = {}
_current: Rank | None = None


def keep_items(items: Sequence[pytest.Item]) -> None:
    """Keep the collected tests for the ranks, which are forks of this process."""
    _items.update((item.nodeid, item) for item in items)


def get_current() -> Rank:
    """Return the rank of this process."""
    assert _current is not None
    return _current


def run_test(order: Order) -> Result:
    """Run a test in this process, which is a rank."""
    global _current
    _current = Rank(order)
    atexit._clear()  # the template cleans up what it registered
    # torch logs each failing call with all of its arguments; the error says the same.
    logging.getLogger("c10d-NullHandler-default").disabled = True
    faulthandler.enable(file=2)
    sys.breakpointhook = _refuse_breakpoint
    item = _items.get(order.nodeid)
    if item is None:
        _fail(
            f"the ranks' template process has not collected {order.nodeid}: the parameters of the "
            f"test must be the same whenever its file is imported"
        )
    runner: RankRunner = item.config.pluginmanager.get_plugin("lockstep-rank")  # type: ignore[assignment]
    runner.order = order
    runner.result = Result()  # without the warnings of the template
    for name, value in order.instance.items():
        setattr(getattr(item, "instance", None), name, pickle.loads(value))
    joined = join_group(order.backend, order.timeout) if order.joins else contextlib.nullcontext()
    with measure_lines(order.coverage), joined:
        leaks = RankLeaks()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        left = [] if runner.has_failed else leaks.find(order.allowed_leaks)
    if left:
        _fail(f"the test left {', '.join(left)} behind on rank {order.rank}")
    if runner.has_failed:
        sys.exit(1)
    return runner.result


class RankRunner:
    """Runs one test through pytest's own hooks, and reports its outcome."""

    order: Order

    def __init__(self) -> None:
        self.result = Result()
        self.has_failed = False
        self._when = "setup"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Set up, call and tear down; report a failure before the teardown."""
        is_set_up = self._run(item, "setup")
        if is_set_up:
            self._run(item, "call")
        self._run(item, "teardown")
        self.result.properties = list(item.user_properties)
        return True

    def _run(self, item: pytest.Item, when: Any) -> bool:
        self._when = when
        hook = getattr(item.ihook, f"pytest_runtest_{when}")
        extra = {"nextitem": None} if when == "teardown" else {}
        call = pytest.CallInfo.from_call(lambda: hook(item=item, **extra), when=when)
        if call.excinfo is not None:
            error = call.excinfo.value
            call.excinfo = pytest.ExceptionInfo.from_exception(
                error.with_traceback(_drop_inner_frames(error.__traceback__))
            )
        report = pytest.TestReport.from_item_and_call(item, call)
        self.result.sections = list(report.sections)
        if call.excinfo is None:
            return True
        error = call.excinfo.value
        if isinstance(error, pytest.skip.Exception):
            self.result.outcome = "skipped"
            self.result.reason = str(error.msg)
        elif isinstance(error, pytest.xfail.Exception):
            self.result.outcome = "xfailed"
            self.result.reason = str(error.msg)
        elif isinstance(error, pytest.exit.Exception):
            self.result.outcome = "exit"
            self.result.reason = str(error.msg)
        elif not self.has_failed:
            self.has_failed = True
            self._report(item, error, report)
        return False

    def _report(self, item: pytest.Item, error: BaseException, report: pytest.TestReport) -> None:
        serialized = item.config.hook.pytest_report_to_serializable(
            config=item.config, report=report
        )
        described = describe_error(error)
        report_to_launcher(
            {
                **described,
                "report": serialized,
                "class": pickle.dumps(_importable(type(error))).hex(),
            }
        )
        received = receive_from_launcher(None if self.order.debugs else RELEASE_TIMEOUT)
        if received is not None and received[0]["kind"] == "debug":
            _debug(self.order.rank, report, error, received[1])

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Use the values that pytest's own process sent for the fixtures that it runs."""
        name = fixturedef.argname
        if name in self.order.values:
            value = pickle.loads(self.order.values[name])
        elif not is_sent(fixturedef):
            return
        elif self._when == "setup":
            value = None  # neither the test nor its rank fixtures take it as an argument
        else:
            pytest.fail(
                f"the fixture {name!r} runs in pytest's own process and was not sent to the "
                f"ranks: name it among the arguments of the test",
                pytrace=False,
            )
        fixturedef.func = lambda: value  # type: ignore[misc]
        fixturedef.argnames = ()  # type: ignore[misc]

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Keep a warning for pytest's own process."""
        category = warning_message.category
        if _importable(category) is category:
            said = (str(warning_message.message), category)
            self.result.warnings.append((*said, warning_message.filename, warning_message.lineno))


def _drop_inner_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the innermost frames of torch.distributed and this package, often hundreds of lines."""
    chain = []
    while frames is not None:
        chain.append(frames)
        frames = frames.tb_next
    while len(chain) > 1 and any(part in chain[-1].tb_frame.f_code.co_filename for part in INNER):
        chain.pop()
    kept: TracebackType | None = None
    for entry in reversed(chain):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _fail(sentence: str) -> NoReturn:
    """Report a failure that is not the test's own exception, and exit."""
    report_to_launcher(make_report("Failed", sentence))
    sys.exit(1)


def _importable(kind: type[BaseException]) -> type[BaseException] | None:
    """Return a class that another process can import, else None."""
    found: object = None
    with contextlib.suppress(Exception):
        found = pickle.loads(pickle.dumps(kind))
    return kind if found is kind else None


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("breakpoint() in a rank: run pytest with --pdb, which stops here")


def _debug(
    rank: int, report: pytest.TestReport, error: BaseException, streams: Sequence[int]
) -> None:
    """Open the debugger on the terminal, at the place where the test failed."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    print(f"\n{report.longreprtext}\n\nrank {rank}: post-mortem debugging")
    pdb.post_mortem(error.__traceback__)
