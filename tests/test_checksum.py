"""Checksums: equal exactly where dtype, shape and bits are."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep as ls
from lockstep.checksum import _pieces, checksum, name_optimizer_tensors
from lockstep.kernel.errors import UsageError

VALUES = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def test_equal_bits_have_equal_checksums_however_they_lie():
    assert checksum(VALUES) == checksum(VALUES.clone())
    assert checksum(VALUES) == checksum(VALUES.t().contiguous().t())
    assert checksum(VALUES) == checksum(torch.stack([VALUES, VALUES], dim=2)[:, :, 0])


@pytest.mark.parametrize(
    "other",
    [
        VALUES.flip(0),
        VALUES.reshape(4, 3),
        VALUES.to(torch.float64),
        VALUES.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(5.0000005)),
        VALUES.view(torch.int32),
    ],
    ids=["order", "shape", "dtype", "one bit", "same bytes"],
)
def test_a_difference_shows(other):
    assert checksum(VALUES) != checksum(other)


def test_negative_zero_is_not_zero():
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
        lambda x: x.to(torch.bfloat16),
        lambda x: x[:, :0],
        lambda x: x.to("meta"),
        lambda x: x.to_mkldnn(),
        lambda x: torch.nested.nested_tensor([x, x[1:]], layout=torch.strided),
        lambda x: torch.nested.nested_tensor([x, x[1:]], layout=torch.jagged),
    ],
    ids=[
        "coo", "csr", "csc", "conjugate", "quantized", "bfloat16", "empty", "meta",
        "mkldnn", "nested", "jagged",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_every_kind_of_tensor_has_one(make):
    assert checksum(make(VALUES)) == checksum(make(VALUES.clone()))
    if make(VALUES).numel() and not make(VALUES).is_meta:
        assert checksum(make(VALUES)) != checksum(make(VALUES + 1))


def test_large_tensors_are_copied_in_pieces(monkeypatch):
    expanded = VALUES.t().unsqueeze(0).expand(3, 4, 3)
    for each in (VALUES.t(), VALUES[None, :, ::2], expanded):
        whole = checksum(each.contiguous())
        monkeypatch.setattr("lockstep.checksum.PIECE_BYTES", 8)
        assert checksum(each) == whole
        assert len(list(_pieces(each))) > each.shape[0]
        monkeypatch.undo()


STATE = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(True), "c": torch.empty(0)}


def test_it_is_sha256_over_name_dtype_shape_and_bytes_in_sorted_order():
    sha = hashlib.sha256()
    sha.update(b"a|torch.bool|()|" + b"\x01")
    sha.update(b"b|torch.float32|(2, 3)|" + STATE["b"].numpy().tobytes())
    sha.update(b"c|torch.float32|(0,)|")
    assert ls.digest(STATE) == sha.hexdigest()


def test_one_element_of_any_stride_has_a_checksum_and_a_digest():
    one = VALUES[1:2, 0]
    assert (one.stride(), one.is_contiguous()) == ((4,), True)
    assert checksum(one) == checksum(torch.tensor([4.0]))
    assert ls.digest({"a": one}) == ls.digest({"a": torch.tensor([4.0])})


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


def test_a_module_has_the_digest_of_its_state_dict():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert ls.digest(module) == ls.digest(module.state_dict())
    compiled = torch.nn.Module()
    compiled.add_module("_orig_mod", module)  # as torch.compile does
    assert ls.digest(compiled) == ls.digest(module)


class WithDigest:
    def digest(self) -> str:
        raise AssertionError("not called")


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (VALUES, "^ls.digest takes a module or its state dict, not an object of type Tensor$"),
        ([VALUES], "^ls.digest takes a module or its state dict, not an object of type list$"),
        (WithDigest(), "not an object of type WithDigest: call its method digest()"),
        (torch.nn.Linear(2, 2, device="meta"), "^weight has no values on this rank: call digest"),
        ({"model": STATE, "steps": 3}, r"pass state\['model'\], or call digest\(\) or"),
    ],
    ids=["tensor", "list", "trainer", "meta", "nested"],
)
def test_what_has_no_digest_is_named(state, sentence):
    """A nested state dict had the digest of its numbers, whatever its tensors were."""
    with pytest.raises(UsageError, match=sentence):
        ls.digest(state)


def test_bfloat16_and_complex_have_bytes_too():
    values = [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64)]
    assert len({ls.digest({"x": value}) for value in values}) == 2


def test_optimizer_state_is_named_after_the_parameters():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    assert set(name_optimizer_tensors({"layer.weight": optimizer.state[weight]})) == {
        "layer.weight/step",
        "layer.weight/exp_avg",
        "layer.weight/exp_avg_sq",
    }
