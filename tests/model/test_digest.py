"""The digest: equal for equal bits, and for nothing else."""

import hashlib

import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep as ls
from lockstep.model.digest import name_optimizer_tensors

STATE = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(True), "c": torch.empty(0)}


def test_it_is_sha256_over_name_dtype_shape_and_bytes_in_sorted_order():
    sha = hashlib.sha256()
    sha.update(b"a|torch.bool|()|" + b"\x01")
    sha.update(b"b|torch.float32|(2, 3)|" + STATE["b"].numpy().tobytes())
    sha.update(b"c|torch.float32|(0,)|")
    assert ls.digest(STATE) == sha.hexdigest()


def test_order_and_memory_format_do_not_matter():
    other = {"c": STATE["c"], "b": STATE["b"].t().contiguous().t(), "a": STATE["a"]}
    assert other["b"].stride() != STATE["b"].stride()
    assert ls.digest(other) == ls.digest(STATE)


@given(st.sampled_from(["name", "dtype", "shape", "bit", "zero", "missing", "number"]))
def test_any_difference_shows(what):
    other = {
        "name": {**STATE, "B": STATE["b"]},
        "dtype": {**STATE, "c": STATE["c"].double()},
        "shape": {**STATE, "b": STATE["b"].view(3, 2)},
        "bit": {**STATE, "b": STATE["b"] + 1e-7},
        "zero": {**STATE, "b": STATE["b"] * -1},
        "missing": {name: STATE[name] for name in "ab"},
        "number": {**STATE, "step": 1},
    }[what]
    assert ls.digest(other) != ls.digest(STATE)


def test_numbers_count_and_other_values_do_not():
    assert ls.digest({"n": 1}) != ls.digest({"n": 2})
    assert ls.digest({"n": 1.0}) != ls.digest({"n": 1})
    assert ls.digest({**STATE, "text": "x"}) == ls.digest(STATE)


def test_bfloat16_and_complex_have_bytes_too():
    values = [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64)]
    assert len({ls.digest({"x": value}) for value in values}) == 2


def test_optimizer_state_is_named_after_the_parameters():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    assert set(name_optimizer_tensors(optimizer, {weight: "layer.weight"})) == {
        "layer.weight/step",
        "layer.weight/exp_avg",
        "layer.weight/exp_avg_sq",
    }
