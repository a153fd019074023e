"""The plugin as pytest loads it: options, the marker `ranks`, and the fixtures of every rank.

    pytest's process                      template process              rank processes
    collects, runs fixtures,              imports the same test         one test each,
    reports (`launcher`)                  modules, forks (`template`)   then exits (`rank`)

Nothing here imports torch or Lockstep: pytest loads this module in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_lockstep.launcher import Launcher
from pytest_lockstep.marker import CASE, parse_marker, rank_fixture

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


IS_TEMPLATE = pytest.StashKey[bool]()
"""Whether this is the template process, or a rank."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("lockstep", "tests that run on several ranks")
    group.addoption(
        "--ranks-backend",
        default="lockstep",
        metavar="NAMES",
        help="Backends of torch.distributed, separated by commas: tests run on each. "
        "[default: lockstep; gloo if it is not available]",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Deadline of each test that runs on ranks. [default: 60]",
    )
    group.addoption(
        "--ranks-pdb",
        type=int,
        default=None,
        metavar="RANK",
        help="The rank that --pdb attaches to. [default: the one that fails first]",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; in a process that runs tests, also register the launcher."""
    config.addinivalue_line(
        "markers",
        "ranks(*widths, timeout=None, init=True, allow_leaks=(), backend=()): run the test in "
        "every rank of a group, once per width and backend",
    )
    distributes = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not config.stash.get(IS_TEMPLATE, False) and not distributes:
        config.pluginmanager.register(Launcher(config), "lockstep-launcher")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create a case for each number of ranks and backend of the marker."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    try:
        settings = parse_marker(mark)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)
    backends = settings.backends or metafunc.config.getoption("ranks_backend").split(",")
    cases = [(width, backend) for width in settings.widths for backend in backends]
    ids = [
        f"{width}rank{'s' if width > 1 else ''}" + (f"-{backend}" if len(backends) > 1 else "")
        for width, backend in cases
    ]
    metafunc.fixturenames.insert(0, CASE)
    metafunc.parametrize(CASE, cases, indirect=True, ids=ids)


@pytest.fixture(name=CASE)
def _case(request: pytest.FixtureRequest) -> Any:
    return request.param


@rank_fixture
def rank() -> int:
    """The number of this rank, from 0."""
    from pytest_lockstep import rank

    return rank.get_current().rank


@rank_fixture
def world_size() -> int:
    """The number of ranks of the test."""
    from pytest_lockstep import rank

    return rank.get_current().width


@rank_fixture
def group() -> ProcessGroup:
    """torch.distributed's default group, which the ranks of the test have joined."""
    from torch import distributed

    from pytest_lockstep import rank

    rank.get_current().check_joined()
    default = distributed.group.WORLD
    assert default is not None
    return default
