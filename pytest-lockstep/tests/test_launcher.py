"""The plugin within pytest: what it refuses, and the options and plugins that it works with."""

from __future__ import annotations

import re

import pytest

REFUSALS = """
import pytest_lockstep
import random
import unittest

@pytest.fixture
def function():
    return lambda: 1

@pytest_lockstep.rank_fixture
def made(rank):
    return rank

@pytest.fixture
def user(made):
    return made

@pytest_lockstep.rank_fixture
def needs_function(function):
    return function

@pytest.fixture
def attribute(request):
    request.instance.value = lambda: 1

@pytest.mark.ranks(2)
def test_function(function):
    pass

@pytest.mark.ranks(2)
def test_through_rank_fixture(needs_function):
    pass

def test_without_ranks(made):
    pass

@pytest.mark.ranks(2)
def test_user(user):
    pass

@pytest.mark.ranks(2)
def test_reports(record_testsuite_property):
    pass

@pytest.mark.ranks(2, init=False)
def test_group(group):
    pass

@pytest.mark.ranks(2, init=False)
def test_not_joined(rank):
    assert not dist.is_initialized()
    import lockstep
    assert lockstep.init().rank == rank
    lockstep.shutdown()

@pytest.mark.ranks(2)
def test_breakpoint():
    breakpoint()

@pytest.mark.ranks(2)
def test_dynamic(request):
    request.getfixturevalue("function")

class TestAttribute:
    @pytest.mark.ranks(2)
    def test_method(self, attribute):
        pass

class TestOld(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_old(self):
        raise ValueError("it ran on one rank")

@pytest.mark.ranks(2)
def test_good(made):
    pass

@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [random.random()])
def test_random(value):
    pass
"""
ONLY_ONCE = """
import os
import pytest

if os.getpid() == os.getsid(0):
    raise ImportError("not in the template")

@pytest.mark.ranks(2)
def test_once():
    pass
"""

MARKERS = {
    "0": "@pytest.mark.ranks(0): expected numbers of ranks from 1",
    "": "@pytest.mark.ranks expects different numbers of ranks",
    "2, 2": "@pytest.mark.ranks expects different numbers of ranks",
    "2, timeout=0": "@pytest.mark.ranks(timeout=0): expected a positive number of seconds",
    "2, allow_leaks='files'": "@pytest.mark.ranks(allow_leaks='files'): choose from groups,",
    "2, width=3": "@pytest.mark.ranks got an unexpected keyword argument 'width'; it takes",
}


def test_what_cannot_work_says_so_in_one_sentence(run):
    result = run(REFUSALS, "-rA", test_once=ONLY_ONCE)
    output = result.stdout.str()
    result.assert_outcomes(passed=2, failed=9, errors=3)
    for sentence in (
        r"the value of the fixture 'function' cannot be sent to the ranks, where the test uses it "
        r"\(.*\): build it there, with @pytest_lockstep.rank_fixture",
        r"the value of the fixture 'function' cannot be sent to the ranks, where the rank fixture "
        r"'needs_function' uses it",
        r"the rank fixture 'rank' exists only in ranks: add @pytest.mark.ranks\(2\) to "
        r"test_without_ranks",
        r"the fixture 'user' runs in pytest's own process, but uses the rank fixture 'rank|made': "
        r"declare 'user' with @pytest_lockstep.rank_fixture",
        r"the fixture 'record_testsuite_property' cannot be used in ranks: it reports to "
        r"pytest's own process",
        r"the fixture 'group' needs ranks that join their group: remove init=False",
        r"breakpoint\(\) in a rank: run pytest with --pdb, which stops here",
        r"the fixture 'function' runs in pytest's own process and was not sent to the ranks: name "
        r"it among the arguments of the test",
        r"the attribute 'value' that a fixture has set cannot be sent to the ranks",
        r"@pytest.mark.ranks does not work on methods of unittest.TestCase: test_old",
        r"has not collected test_it.py::test_random.*: the parameters of the test must be the same",
        r"the ranks' template process could not import test_once.py, unlike pytest's own process:",
    ):
        assert re.search(sentence, output), sentence


def test_a_wrong_marker_is_one_sentence(run):
    files = {
        f"test_{number}": f"import pytest\n@pytest.mark.ranks({each})\ndef test_it(): pass\n"
        for number, each in enumerate(MARKERS)
    }
    result = run("", **files)
    result.assert_outcomes(errors=len(MARKERS))
    output = result.stdout.str()
    for sentence in MARKERS.values():
        assert sentence in output
    assert "Traceback" not in output


FEATURES = """
import helper

@pytest.mark.ranks(1, 2)
def test_one(rank, world_size):
    helper.check(rank, world_size)

@pytest.mark.ranks(2)
def test_two(rank, from_conftest):
    assert from_conftest == "conftest"

def test_plain():
    pass

@pytest.mark.ranks(2)
def test_helper_fails(rank):
    helper.check_equal([rank], [2])
"""
HELPER = """
def check(rank, size):
    if rank == 1:
        assert size == 2
    else:
        only_rank_zero()
    assert 0 <= rank < size

def only_rank_zero():
    return 0

def never():
    return 1

def check_equal(a, b):
    assert a == b
"""
CONFTEST = """
import pytest
pytest.register_assert_rewrite("helper")

@pytest.fixture(scope="session")
def from_conftest():
    return "conftest"
"""


FILES = {"helper": HELPER, "conftest": CONFTEST}


def test_coverage(run, pytester):
    result = run(FEATURES, "--cov=helper", "--cov-report=term-missing", "-W", "error", **FILES)
    result.assert_outcomes(passed=4, failed=1)
    # Rank 1's branch and rank 0's; not the function that nobody calls.
    result.stdout.re_match_lines([r"helper.py\s+11\s+1\s+91%\s+12"])
    result.stdout.fnmatch_lines(["E*At index 0 diff: * != 2"])  # the helper is rewritten
    assert not list(pytester.path.glob(".coverage.*"))


@pytest.mark.stress
def test_selection_xdist_and_import_modes(run):
    result = run(FEATURES, "-n1", "-k", "2ranks and not fails", "--durations=3", **FILES)
    result.assert_outcomes(passed=2)
    assert re.search(r"\d\.\d\ds call +test_it.py::test_one\[2ranks\]", result.stdout.str())
    importlib = ("--import-mode=importlib", "-o", "pythonpath=.")
    result = run(FEATURES, *importlib, "-x", "--deselect=test_it.py::test_two", **FILES)
    result.assert_outcomes(passed=3, failed=1, deselected=1)


STARTS_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, name="early", daemon=True).start()

@pytest.mark.ranks(2)
def test_one(): pass

@pytest.mark.ranks(2)
def test_two(): pass
"""


def test_a_template_that_cannot_be_forked_is_one_sentence(run):
    result = run(STARTS_THREAD)
    result.assert_outcomes(failed=2)
    output = result.stdout.str()
    assert output.count("importing the test files starts threads (early)") == 1
    assert output.count("see the first test that failed for this reason") == 1


def test_runs_without_ranks_start_no_process(run, pytester):
    pytester.makeconftest(
        """
        import sys
        def pytest_sessionfinish():
            heavy = [name for name in sys.modules if name.startswith(("torch", "lockstep"))]
            print("imported:", heavy)
        """
    )
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest_subprocess("-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*imported: [[]]*"])


def test_backends_and_output_without_capturing(run):
    source = """
@pytest.mark.ranks(2)
def test_backend(rank, group):
    print("on", dist.get_backend(group))
    dist.barrier()
"""
    result = run(source, "--ranks-backend=lockstep,gloo,nonsense", "-s", "-rA")
    result.assert_outcomes(passed=2, failed=1)
    output = result.stdout.str()
    for name in ("lockstep", "gloo"):
        assert f"PASSED test_it.py::test_backend[2ranks-{name}]" in output
        assert f"[0] on {name}\n" in output
        assert f"[1] on {name}\n" in output
    assert "--ranks-backend: torch has no backend 'nonsense' here; available: " in output


DEBUGGED = """
@pytest.mark.ranks(2)
def test_wrong(rank):
    secret = 40 + rank
    if rank == 1:
        assert secret == 0
    dist.barrier()

@pytest.mark.ranks(2)
def test_both_wrong(rank):
    secret = 50 + rank
    assert secret == 0

def test_after():
    pass
"""


@pytest.mark.parametrize(
    "options", ["--ranks-pdb=1", pytest.param("-k test_wrong", marks=pytest.mark.stress)]
)
def test_the_debugger_attaches_to_one_rank(run, pytester, options):
    pytester.makepyfile(test_it="import pytest\nimport torch.distributed as dist\n" + DEBUGGED)
    child = pytester.spawn_pytest(f"-p no:cacheprovider --pdb --ranks-timeout=2 {options}")
    for secret in ("41", "51") if "ranks-pdb" in options else ("41",):
        child.expect("rank 1: post-mortem debugging", timeout=60)
        child.expect("\\(Pdb\\)", timeout=60)
        child.sendline("p secret")
        child.expect(secret, timeout=60)
        child.sendline("q")
    child.expect("2 failed, 1 passed" if "ranks-pdb" in options else "1 failed", timeout=60)
    child.wait()
