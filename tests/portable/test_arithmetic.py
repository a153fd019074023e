"""The fingerprint of arithmetic: what it depends on, what it does not, and its cache."""

import json
from unittest import mock

import pytest
import torch

import warm
from lockstep.comm.native.binding_folder import get_cache_folder
from lockstep.portable import arithmetic, arithmetic_families
from lockstep.portable.arithmetic_difference import find_differences, name_differences, parse
from lockstep.record.run_environment import find_environment_differences

PRINT = "from lockstep.portable import arithmetic; print(arithmetic.compute())"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arithmetic.measure_arithmetic.cache_clear()
    yield get_cache_folder().with_name("arithmetic")
    arithmetic.measure_arithmetic.cache_clear()


def measure_again():
    """Return the fingerprint as another process would, and whether it was computed."""
    arithmetic.measure_arithmetic.cache_clear()
    with mock.patch.object(arithmetic, "compute", wraps=arithmetic.compute) as compute:
        return arithmetic.measure_arithmetic(), compute.called


def test_settings_of_a_program_change_nothing():
    expected = arithmetic.compute()
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    try:
        torch._C._set_mkldnn_enabled(False)
        with torch.autocast("cpu"):
            assert arithmetic.compute() == expected
        assert not torch.backends.mkldnn.enabled
        assert torch.get_num_threads() == 3
    finally:
        torch._C._set_mkldnn_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_kernels_are_named():
    here = warm.run([warm.sys.executable, "-c", PRINT], timeout=120, text=True).stdout.strip()
    environ = {**warm.os.environ, "ATEN_CPU_CAPABILITY": "default"}
    there = warm.run([warm.sys.executable, "-c", PRINT], timeout=120, env=environ, text=True)
    differences = find_differences(here, there.stdout.strip())
    assert {"softmax", "elementwise functions"} <= {*differences}
    assert "numpy" not in differences  # it has not read that variable


def test_every_family_has_a_hash_of_its_own(monkeypatch):
    """A hash that did not depend on the results would not tell processors apart."""
    before = parse(arithmetic.compute())
    assert len({*before.values()}) == len(before) == 11
    values = arithmetic_families.make_values

    def other(*shape, seed=1, dtype=torch.float32):
        return values(*shape, seed=seed + 1, dtype=dtype)

    monkeypatch.setattr(arithmetic_families, "make_values", other)
    monkeypatch.setattr(
        torch, "randperm", lambda count, **_: torch.arange(count)
    )  # has no values among its inputs
    after = parse(arithmetic.compute())
    assert [name for name in before if before[name] == after[name]] == []


def test_the_cache_spares_the_computation(cache):
    first, is_computed = measure_again()
    assert is_computed
    assert measure_again() == (first, False)


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"probe": "x"}', '{"probe": "PROBE", "arithmetic": "x=1"}']
)
def test_an_entry_that_does_not_fit_is_replaced(cache, damage):
    first, _ = measure_again()
    (file,) = cache.iterdir()
    probe = json.loads(file.read_bytes())["probe"]
    file.write_text(damage.replace("PROBE", probe))
    assert measure_again() == (first, True)
    assert measure_again() == (first, False)


def test_an_entry_of_other_kernels_does_not_count(cache):
    """Such as those of an emulated processor, with the description of the real one."""
    first, _ = measure_again()
    (file,) = cache.iterdir()
    entry = json.loads(file.read_bytes())
    file.write_text(json.dumps({"probe": "01234567", "arithmetic": entry["arithmetic"]}))
    assert measure_again() == (first, True)


def test_an_entry_that_others_may_write_does_not_count(cache):
    first, _ = measure_again()
    cache.chmod(0o777)
    assert measure_again() == (first, True)


def test_a_cache_that_cannot_be_written_is_not_needed(cache):
    cache.parent.mkdir()
    cache.write_text("a file")
    first, _ = measure_again()
    assert measure_again() == (first, True)


def test_differences_are_named():
    assert name_differences("a=1, b=2, c=3", "a=1, b=2, c=3") == ""
    assert name_differences("a=1, b=2", "a=1, b=3") == "b"
    assert name_differences("a=1, b=2, c=3", "a=2, b=3, d=3") == "a, b, c and d"


def test_another_processor_is_a_difference_unless_its_bits_are_portable():
    one = {"processor": "A", "instructions": "AVX2", "arithmetic": "a=1", "portable": False}
    two = {**one, "processor": "B", "instructions": "AVX512"}
    assert find_environment_differences(one, two) == [
        "processor is B, it was A: the bits may differ",
        "instructions is AVX512, it was AVX2: the bits may differ",
    ]
    assert find_environment_differences(one, {**two, "arithmetic": "a=2"}) == [
        "B (AVX512) computes a with other bits than A (AVX2): the bits differ"
    ]
    assert find_environment_differences({**one, "portable": True}, {**two, "portable": True}) == []
    assert find_environment_differences({"processor": "A"}, {"processor": "A", **two}) == [
        "processor is B, it was A: the bits may differ"
    ]
