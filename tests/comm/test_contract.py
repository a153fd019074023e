"""One contract for every backend: each operation against a plain reference, for 1 to 4 ranks.

All cases of a backend and a number of ranks run in one launch; the tests below
read its results. What a backend cannot do is in `contract/limits.py`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pytest_lockstep
from contract import rounding
from contract.every import GROUPS, PATIENCE, PLACEMENTS, run_all
from contract.limits import GUARANTEE_TREE, LIMITS
from lockstep.kernel.errors import LockstepError

WIDTHS = (1, 2, 3, 4)
GLOO_WIDTHS = (2,)  # the others are left to `make soak`
ROUTES = {"small": 4, "shared": 3, "mixed": 2}  # ranks; other numbers are left to `make soak`
ALWAYS = ("aba",)  # placements on hosts; the others are left to `make soak`
LAUNCH = 100.0  # seconds for all cases of one launch


def backends() -> list[str]:
    """Return gloo, and lockstep where its extension is built, with all its routes.

    "small": pieces so small that most messages pass in several; "shared": as small, and all
    tensors in segments; "mixed": those of every second rank. "hosts": ranks on several hosts, at
    once or in turn.
    """
    if importlib.util.find_spec("lockstep.comm.backend") is None:
        return ["gloo"]
    backend = importlib.import_module("lockstep.comm.backend")
    variants = ("", "-small", "-shared", "-mixed") if backend.available() else ()
    placements = [f"-{placement}" for placement in PLACEMENTS] if backend.available() else []
    return ["gloo", *(f"lockstep{variant}" for variant in (*variants, *placements))]


@functools.cache
def found(backend: str, n: int) -> list[dict[str, Any]] | str:
    """Return what each rank found, or the sentence with which the launch ended."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return pytest_lockstep.run(
                run_all, backend, folder, ranks=n, timeout=LAUNCH, init=False
            )
        except LockstepError as error:
            running = [f"{path.name}: {path.read_text()}" for path in Path(folder).iterdir()]
            return f"{error}; the cases that ran: {sorted(running)}"


def launches() -> Iterator[Any]:
    """Return every backend with every number of ranks; some of them are left to `make soak`."""
    for backend in backends():
        for n in WIDTHS:
            route = backend.partition("-")[2]
            if PLACEMENTS.get(route, n) != n:
                continue
            is_repetition = (
                n != ROUTES.get(route) if route not in PLACEMENTS else route not in ALWAYS
            )
            is_repetition = bool(route) and is_repetition  # other routes of the same backend
            is_repetition |= backend == "gloo" and n not in GLOO_WIDTHS
            yield pytest.param(backend, n, marks=[pytest.mark.stress] * is_repetition)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("backend", "n"), [*launches()])
def test_contract(backend: str, n: int, group: str) -> None:
    ranks = found(backend, n)
    assert not isinstance(ranks, str), ranks
    wrong = {
        case: {rank: each["results"][case] for rank, each in enumerate(ranks)}
        for case in ranks[0]["results"]
        if case.split()[0] == group and any(each["results"][case] for each in ranks)
    }
    told = [
        f"{case}: rank {r}: {said}" for case, by in wrong.items() for r, said in by.items() if said
    ]
    assert not wrong, f"{len(wrong)} cases fail\n" + "\n".join(told)
    tried = [case for case in ranks[0]["results"] if case.split()[0] == group]
    assert tried, f"no case of {group} ran"


@pytest.mark.parametrize("backend", [name for name, limits in LIMITS.items() if limits])
def test_limits_are_true(backend: str) -> None:
    """A limit that no longer shows must leave the table."""
    limits = LIMITS[backend]
    outcomes = [found(backend, n) for n in (GLOO_WIDTHS if backend == "gloo" else WIDTHS)]
    for limit in limits:
        if limit.how == "breaks":
            continue
        assert any(
            limit.cases in rank["confirmed"]
            for ranks in outcomes
            if not isinstance(ranks, str)
            for rank in ranks
        ), f"{backend} can do {limit.cases!r} now"


@pytest.fixture(params=GUARANTEE_TREE)
def exact_backend(request: pytest.FixtureRequest) -> str:
    """Name a backend whose sums are the same bits everywhere."""
    if request.param not in backends():
        pytest.skip(f"{request.param} is not built here")
    name: str = request.param
    return name


@pytest.mark.parametrize("n", WIDTHS)
def test_every_rank_has_the_same_bits(exact_backend: str, n: int) -> None:
    ranks = found(exact_backend, n)
    assert not isinstance(ranks, str), ranks
    assert len({rank["digest"] for rank in ranks}) == 1


def test_every_run_has_the_same_bits(ranks: Any, exact_backend: str) -> None:
    first = found(exact_backend, 3)
    assert not isinstance(first, str), first
    again = ranks(rounding.digest, 3, backend=exact_backend, timeout=PATIENCE, deadline=LAUNCH)
    assert again == [rank["digest"] for rank in first]
