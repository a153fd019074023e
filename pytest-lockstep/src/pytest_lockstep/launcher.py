"""The plugin in the process that runs pytest: fixtures run here, tests run in the ranks."""

from __future__ import annotations

import bdb
import contextlib
import pickle
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_lockstep.coverage import read_settings
from pytest_lockstep.marker import CASE, is_rank_fixture, is_sent, parse_marker
from pytest_lockstep.rank_order import Order

if TYPE_CHECKING:
    from pytest_lockstep.case import CaseResult
    from pytest_lockstep.template import Template

__all__ = ["Launcher"]

MENTION = b"mark.ranks"
# Words of tests that make torch import its compiler, which takes a second.
TRAINS = (b"optim", b"Trainer", b"backward", b"corrupt(", b"delay(", b"kill(", b"DispatchMode")
GROUP_TIMEOUT = 60.0  # seconds by which the backend's own timeout exceeds the deadline of the test

# Fixtures of pytest that report to the process in which they run.
REFUSED = ("record_testsuite_property", "record_xml_attribute", "subtests")

RESULT = pytest.StashKey["CaseResult"]()


class InRank:
    """Stands for the value of a fixture that is built in the ranks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<rank fixture {self._name}>"

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(f"it contains the rank fixture {self._name!r}")


class RankFailedError(Exception):
    """A test failed in a rank, by an exception of a class that cannot be imported here."""


class DebuggedError(RankFailedError, bdb.BdbQuit):
    """A test failed in a rank and was debugged there."""


class Launcher:
    """Runs the tests with the marker `ranks` on ranks.

    Args:
        config: The configuration of pytest.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._template: Template | None = None
        self._has_sent = False
        self._files: list[Path] = []

    # --- the template process -----------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Start the template process before the import of a file that mentions the marker."""
        if isinstance(collector, pytest.Module) and self._template is None:
            source = _read(collector.path)
            if MENTION in source and not self._config.getoption("collectonly"):
                self._start_template(trains=_looks_like_training(source))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the files with tests on ranks; if there are none, end the template process."""
        files = [item.path for item in session.items if _is_on_ranks(item)]
        self._files = list(dict.fromkeys(files))
        if not self._files and self._template is not None:
            self.pytest_unconfigure()

    def _start_template(self, *, trains: bool) -> Template:
        from lockstep.name_conflict import find_conflict
        from pytest_lockstep.template import Template

        if conflict := find_conflict():
            raise pytest.UsageError(conflict)
        self._template = Template(self._config, trains=trains)
        return self._template

    def _get_template(self) -> Template:
        template = self._template or self._start_template(trains=True)
        if not self._has_sent:
            sources = map(_read, self._files)
            template.collect(self._files, trains=any(map(_looks_like_training, sources)))
            self._has_sent = True
        return template

    def pytest_unconfigure(self) -> None:
        """End the template process."""
        if self._template is not None:
            self._template.close()
            self._template = None

    # --- fixtures -----------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> object | None:
        """Replace the value of a rank fixture by a placeholder."""
        name = fixturedef.argname
        if not is_rank_fixture(fixturedef):
            on_ranks = isinstance(request.node, pytest.Item) and _is_on_ranks(request.node)
            if not (on_ranks and name.startswith(PER_TEST_XUNIT)):
                return None
        value = InRank(name)
        key = fixturedef.cache_key(request)  # type: ignore[arg-type]
        fixturedef.cached_result = (value, key, None)
        if reason := _find_misuse(fixturedef, request):
            error = pytest.fail.Exception(reason, pytrace=False)
            fixturedef.cached_result = (None, key, (error, None))
            raise error
        return value

    # --- tests --------------------------------------------------------------------------------

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail a test that has the marker and would run in pytest's own process."""
        if item.get_closest_marker("ranks") is not None and not _is_on_ranks(item):
            pytest.fail(
                f"@pytest.mark.ranks does not work on methods of unittest.TestCase: {item.name}",
                pytrace=False,
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a test in its ranks instead of here."""
        if not _is_on_ranks(pyfuncitem):
            return None
        result = self._run(pyfuncitem)
        pyfuncitem.stash[RESULT] = result
        for report in result.results.values():
            for said in report.warnings:
                warnings.warn_explicit(*said)
        if 0 in result.results:
            pyfuncitem.user_properties.extend(result.results[0].properties)
        _raise_outcome(result, is_debugged=self._config.getoption("usepdb"))
        return True

    def _run(self, item: pytest.Function) -> CaseResult:
        from pytest_lockstep.case import run_case
        from pytest_lockstep.template import TemplateError

        mark = item.get_closest_marker("ranks")
        assert mark is not None
        settings = parse_marker(mark)
        case: Any = item.callspec.params[CASE]
        width, backend = case
        timeout = settings.timeout or self._config.getoption("ranks_timeout")
        debugs = self._config.getoption("usepdb")
        order = Order(
            nodeid=item.nodeid,
            rank=0,
            width=width,
            backend=_choose_backend(backend),
            joins=settings.joins,
            timeout=86400.0 if debugs else timeout + GROUP_TIMEOUT,
            allowed_leaks=settings.allowed_leaks,
            values=_pickle_fixtures(item),
            instance=_pickle_instance(item),
            coverage=read_settings(),
            debugs=debugs and item.get_closest_marker("xfail") is None,
        )
        chosen = self._config.getoption("ranks_pdb")
        with self._free_terminal(debugs):
            try:
                return run_case(
                    self._get_template(),
                    order,
                    timeout,
                    is_captured=self._config.getoption("capture") != "no",
                    debugs=(lambda rank: chosen in (None, rank)) if order.debugs else None,
                )
            except TemplateError as error:
                raise pytest.fail.Exception(str(error), pytrace=False) from None

    @contextlib.contextmanager
    def _free_terminal(self, debugs: bool) -> Iterator[None]:
        """Stop capturing, so that a rank can use the terminal."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if not debugs or capture is None:
            yield
            return
        capture.suspend(in_=True)
        try:
            yield
        finally:
            capture.resume()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show the failing rank's report, the state of the other ranks, and all output."""
        report = yield
        result = item.stash.get(RESULT, None)
        if result is None or call.when != "call":
            return report
        report.sections.extend(result.sections)
        failure = result.failure
        if failure is None or failure.report is None or not report.failed:
            return report
        original: Any = self._config.hook.pytest_report_from_serializable(
            config=self._config, data=failure.report
        )
        shown = original.longrepr
        if hasattr(shown, "addsection"):
            shown.addsection("ranks", str(failure))
        if crash := getattr(shown, "reprcrash", None):
            crash.message = f"rank {failure.rank}: {crash.message}"
        report.longrepr = shown if shown is not None else str(failure)
        return report


NO_CASE = SimpleNamespace(params=())
PER_TEST_XUNIT = ("_xunit_setup_method_", "_xunit_setup_function_")
"""Fixtures that run a test's setup and teardown methods, in its ranks only."""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _looks_like_training(source: bytes) -> bool:
    """Guess whether tests train or count calls; a wrong guess costs a second in every rank."""
    return any(word in source for word in TRAINS)


def _is_on_ranks(item: object) -> bool:
    return isinstance(item, pytest.Function) and CASE in getattr(item, "callspec", NO_CASE).params


def _find_misuse(definition: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> str:
    """Return why the test cannot use a rank fixture; "" if it can."""
    name = definition.argname
    info: Any = request.node._fixtureinfo
    if not _is_on_ranks(request.node):
        if name not in _find_named(request.node, info):
            return ""  # an autouse fixture for other tests
        return (
            f"the rank fixture {name!r} exists only in ranks: add @pytest.mark.ranks(2) to "
            f"{request.node.name}"
        )
    for definitions in info.name2fixturedefs.values():
        user = definitions[-1]
        if is_sent(user) and name in user.argnames:
            return (
                f"the fixture {user.argname!r} runs in pytest's own process, but uses the rank "
                f"fixture {name!r}: declare {user.argname!r} with @pytest_lockstep.rank_fixture"
            )
    return ""


def _find_named(item: pytest.Item, info: Any) -> set[str]:
    """Return the fixtures that a test names, itself or through other fixtures."""
    named: set[str] = set()
    waiting = [*info.argnames]
    waiting += [name for mark in item.iter_markers("usefixtures") for name in mark.args]
    while waiting:
        name = waiting.pop()
        if name not in named:
            named.add(name)
            waiting += (
                info.name2fixturedefs[name][-1].argnames if name in info.name2fixturedefs else ()
            )
    return named


def _find_arguments(item: pytest.Function) -> Iterator[tuple[str, str]]:
    """Yield the fixtures that run here and that the ranks need, with their users."""
    info: Any = item._fixtureinfo
    waiting = [(name, "the test") for name in info.argnames]
    waiting += [
        (name, f"the rank fixture {definitions[-1].argname!r}")
        for definitions in info.name2fixturedefs.values()
        if is_rank_fixture(definitions[-1])
        for name in definitions[-1].argnames
    ]
    for name, user in dict(waiting).items():
        if name in REFUSED:
            pytest.fail(
                f"the fixture {name!r} cannot be used in ranks: it reports to pytest's own process",
                pytrace=False,
            )
        definitions = info.name2fixturedefs.get(name)
        if definitions and is_sent(definitions[-1]):
            yield name, user


def _pickle_fixtures(item: pytest.Function) -> dict[str, bytes]:
    """Return the pickled values of the fixtures that the ranks need."""
    return {
        name: _pickle(item.funcargs[name], f"the value of the fixture {name!r}", user)
        for name, user in _find_arguments(item)
    }


def _pickle_instance(item: pytest.Function) -> dict[str, bytes]:
    """Return the pickled attributes that fixtures have set in the test's object."""
    attributes = {} if item.instance is None else vars(item.instance)
    return {
        name: _pickle(value, f"the attribute {name!r} that a fixture has set", "the test")
        for name, value in attributes.items()
    }


def _pickle(value: object, what: str, user: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # the value's own methods may raise any
        raise pytest.fail.Exception(
            f"{what} cannot be sent to the ranks, where {user} uses it ({error}): build it there, "
            f"with @pytest_lockstep.rank_fixture",
            pytrace=False,
        ) from None


def _choose_backend(name: str) -> str:
    """Return the backend; gloo if the name is Lockstep's backend and it is not available."""
    from torch import distributed

    from lockstep.comm import backend

    if name == backend.NAME:
        backend.register()
        return name if backend.available() else "gloo"
    if not name or not distributed.is_backend_available(name):
        known = [backend for backend in distributed.Backend.backend_list if backend != "undefined"]
        here = ", ".join(backend for backend in known if distributed.is_backend_available(backend))
        pytest.fail(
            f"--ranks-backend: torch has no backend {name!r} here; available: {here}",
            pytrace=False,
        )
    return name


def _raise_outcome(result: CaseResult, *, is_debugged: bool) -> None:
    """Raise the exception that gives the test its outcome in the ranks."""
    failure = result.failure
    if failure is None:
        if result.outcome == "skipped":
            raise pytest.skip.Exception(result.reason, _use_item_location=True)
        if result.outcome == "xfailed":
            pytest.xfail(result.reason)
        if result.outcome == "exit":
            pytest.exit(result.reason)
        return
    if is_debugged:
        raise DebuggedError(str(failure))
    if failure.report is None:
        pytest.fail(str(failure), pytrace=False)
    kind = None
    with contextlib.suppress(Exception):
        kind = pickle.loads(bytes.fromhex(failure.kind))
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise RankFailedError(str(failure))
    error = kind.__new__(kind)  # the class decides whether the test is expected to fail
    error.args = (str(failure),)
    raise error
