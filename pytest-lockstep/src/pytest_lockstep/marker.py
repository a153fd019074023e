"""`@pytest.mark.ranks(...)` and `@rank_fixture`: the requirements of a test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

__all__ = [
    "CASE",
    "LEAKS",
    "RankSettings",
    "is_rank_fixture",
    "is_sent",
    "parse_marker",
    "rank_fixture",
]

CASE = "_ranks_case"
"""The fixture whose parameter is the number of ranks and the backend of a case."""

LEAKS = ("groups", "processes", "shared memory", "threads")
"""The kinds of leaks."""

RANK_FIXTURE = "_is_rank_fixture"

SENT_BUILTINS = ("tmp_path", "tmpdir")
"""The built-in fixtures of pytest whose values are sent to the ranks. The other ones, such as
monkeypatch, capsys and caplog, act in each rank."""


@dataclass(frozen=True)
class RankSettings:
    """The arguments of `@pytest.mark.ranks`.

    Attributes:
        widths: Numbers of ranks; each number is a separate case.
        timeout: Deadline of one case in seconds; None for the value of `--ranks-timeout`.
        joins: Whether the ranks join torch.distributed's default group before the test.
        allowed_leaks: The kinds of `LEAKS` that do not fail the test.
        backends: Backends to run the test on; empty for those of `--ranks-backend`.
    """

    widths: tuple[int, ...]
    timeout: float | None = None
    joins: bool = True
    allowed_leaks: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()


def parse_marker(mark: pytest.Mark) -> RankSettings:
    """Return the settings of a marker.

    Raises:
        ValueError: An argument is not valid; the message says which one and what to write.
    """

    def read(
        *widths: int,
        timeout: float | None = None,
        init: bool = True,
        allow_leaks: str | Sequence[str] = (),
        backend: str | Sequence[str] = (),
    ) -> RankSettings:
        allowed = (allow_leaks,) if isinstance(allow_leaks, str) else tuple(allow_leaks)
        backends = (backend,) if isinstance(backend, str) else tuple(backend)
        return RankSettings(widths, timeout, init, allowed, backends)

    try:
        given = inspect.signature(read).bind(*mark.args, **mark.kwargs)
        settings = read(*given.args, **given.kwargs)
    except TypeError as error:
        raise ValueError(
            f"@pytest.mark.ranks {error}; it takes numbers of ranks, timeout, init, "
            f"allow_leaks and backend"
        ) from None
    for width in settings.widths:
        if not isinstance(width, int) or isinstance(width, bool) or width < 1:
            raise ValueError(
                f"@pytest.mark.ranks({width!r}): expected numbers of ranks from 1, such as "
                f"@pytest.mark.ranks(1, 2, 4)"
            )
    if not settings.widths or len(set(settings.widths)) < len(settings.widths):
        raise ValueError(
            "@pytest.mark.ranks expects different numbers of ranks, such as "
            "@pytest.mark.ranks(1, 2, 4)"
        )
    if settings.timeout is not None and settings.timeout <= 0:
        raise ValueError(
            f"@pytest.mark.ranks(timeout={settings.timeout}): expected a positive number of seconds"
        )
    for name in settings.allowed_leaks:
        if name not in LEAKS:
            raise ValueError(
                f"@pytest.mark.ranks(allow_leaks={name!r}): choose from {', '.join(LEAKS)}"
            )
    return settings


def rank_fixture(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    params: Sequence[Any] | None = None,
    ids: Any = None,
    autouse: bool = False,
) -> Any:
    """Declare a fixture that is built in every rank of a test, after the ranks joined their group.

    It may depend on other fixtures, whose values are sent to the ranks, and on `rank`,
    `world_size` and `group`. The code after its `yield` runs in the rank too. The scope is always
    the test, because its ranks end with it.

    Args:
        function: The fixture function.
        name: Name of the fixture; None for the name of the function.
        params: As for `pytest.fixture`: one case per value.
        ids: As for `pytest.fixture`.
        autouse: Whether it is built for every test that sees it and runs on ranks.
    """

    def declare(function: Callable[..., Any]) -> Any:
        setattr(function, RANK_FIXTURE, True)
        return pytest.fixture(function, name=name, params=params, ids=ids, autouse=autouse)

    return declare if function is None else declare(function)


def is_rank_fixture(definition: pytest.FixtureDef[Any]) -> bool:
    """Return whether a fixture is built in the ranks."""
    return getattr(definition.func, RANK_FIXTURE, False) is True


def is_sent(definition: pytest.FixtureDef[Any]) -> bool:
    """Return whether a fixture runs in pytest's own process, and its value is sent to the ranks."""
    module = str(getattr(definition.func, "__module__", ""))
    is_builtin = module.startswith("_pytest.")  # also parameters and xunit's setup methods
    if is_builtin:
        return definition.argname in SENT_BUILTINS
    return not is_rank_fixture(definition)
