"""The encoding keeps types and bits, names what it cannot hold, and runs nothing."""

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, StrEnum
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.encoding import MAPPINGS, SEQUENCES, decode, encode
from lockstep.checkpoint.tensor_file import DTYPES
from lockstep.kernel.errors import UsageError


def round_trip(value):
    tensors = {}
    encoded = json.loads(json.dumps(encode(value, tensors, "state")))
    return decode(encoded, tensors)


def require_same(a, b, path="state"):
    """Compare types, order and bits."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert len(a) == len(b), path
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory, path
        for (key, left), (other, right) in zip(a.items(), b.items(), strict=True):
            require_same(key, other, f"{path}: a key")
            require_same(left, right, f"{path}/{key}")
    elif isinstance(a, (list, tuple, deque)):
        assert len(a) == len(b), path
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None), path
        for left, right in zip(a, b, strict=True):
            require_same(left, right, path)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), path
        assert bits(a) == bits(b), path
    elif isinstance(a, (numpy.ndarray, numpy.generic)):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), path
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b)), path
    elif isinstance(a, complex):
        require_same(a.real, b.real, path)
        require_same(a.imag, b.imag, path)
    else:
        assert a == b, path


def bits(tensor):
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@st.composite
def tensors(draw):
    """Draw tensors of every dtype with random bits, in several memory formats."""
    dtype = draw(st.sampled_from([*DTYPES, torch.complex128]))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    octets = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        octets = bytearray(each & 1 for each in octets)
    flat = torch.frombuffer(octets, dtype=dtype) if size else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape).clone()
    if len(shape) == 4:
        return tensor.contiguous(memory_format=draw(st.sampled_from([
            torch.contiguous_format, torch.channels_last,
        ])))  # fmt: skip
    if len(shape) == 2 and draw(st.booleans()):
        return tensor.t().clone()
    return tensor


ARRAYS = [numpy.bool_, numpy.int8, numpy.uint16, numpy.int64, numpy.float16, numpy.float32]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=9),
    st.complex_numbers(), st.fractions(),
    st.sampled_from([torch.bfloat16, torch.strided, torch.channels_last, torch.device("cpu", 0)]),
    st.sampled_from([torch.Size([2, 3]), torch.Size([])]),
    st.builds(lambda kind, n: kind(n), st.sampled_from(ARRAYS), st.integers(0, 1)),
    st.builds(
        lambda kind, n: numpy.arange(n).astype(kind), st.sampled_from(ARRAYS), st.integers(0, 3)
    ),
)  # fmt: skip
KEYS = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False),
    st.tuples(st.integers(), st.text(max_size=3)), st.sampled_from(["$tensor", "$", "a/b", "a"]),
)  # fmt: skip


def containers(inner):
    dicts = st.dictionaries(KEYS, inner, max_size=4)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda found: defaultdict(list, found)),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3, 7])),
        st.frozensets(st.integers(), max_size=4),
        st.sets(st.text(max_size=3), max_size=4),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=4).map(Counter),
    )


@given(st.recursive(st.one_of(SCALARS, tensors()), containers, max_leaves=12))
def test_states_keep_types_order_and_bits(value):
    require_same(value, round_trip(value))


def test_tensors_of_any_memory_keep_their_values():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for tensor in (
        base[:, ::2], base[1:3, 2:], base[0].expand(3, 6), torch.nn.Parameter(base),
        torch.complex(base, -base).conj(), torch.complex(base, base).conj().imag,
    ):  # fmt: skip
        found = round_trip({"x": tensor})["x"]
        assert found.tolist() == tensor.tolist()
        assert not found.requires_grad
    wide = torch.randn(2, 3, 4, 5, dtype=torch.complex128).to(memory_format=torch.channels_last)
    require_same(wide, round_trip(wide))


def test_sparse_tensors_keep_their_entries_as_they_are():
    """Entries that occur twice stay apart: adding them would change later sums."""
    where = torch.tensor([[3, 1, 3]])
    what = torch.tensor([[0.1], [-0.0], [0.3]])
    twice = torch.sparse_coo_tensor(where, what, (5, 1), check_invariants=True)
    for value in (twice, twice.coalesce()):
        tensors = {}
        found = decode(json.loads(json.dumps(encode(value, tensors, "x"))), tensors)
        assert (found.is_coalesced(), found.shape) == (value.is_coalesced(), value.shape)
        require_same(found._indices(), value._indices(), "indices")
        require_same(found._values(), value._values(), "values")


def test_a_decoded_tensor_has_memory_of_its_own():
    tensors = {}
    encoded = encode({"x": torch.ones(3)}, tensors, "state")
    decode(encoded, tensors)["x"].zero_()
    assert tensors["state/x"].tolist() == [1, 1, 1]


def test_names_that_collide_are_kept_apart():
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    assert {**round_trip(value)["a"], **round_trip(value)}["b"].item() == 0
    assert round_trip(value)["a/b"].item() == 1


def test_tensors_of_other_ranks_are_left_out():
    value = {"here": torch.ones(1), "there": torch.ones(1, device="meta"), 3: {}}
    assert list(round_trip(value)) == ["here", 3]


def test_arrays_that_numpy_maps_or_swaps(recwarn):
    fixed = numpy.arange(6.0).reshape(2, 3)
    fixed.flags.writeable = False
    for array in (fixed, fixed.T, fixed[::-1], fixed.astype(">f4"), numpy.array(3.5)):
        found = round_trip(array)
        assert found.tolist() == array.tolist()
        assert found.shape == array.shape
        found += 1  # it can be written
    assert not recwarn.list  # torch warns of arrays that cannot be written


def test_strings_and_paths_of_other_types_become_plain():
    class Version(str):
        __slots__ = ()

    assert type(round_trip(Version("2.1"))) is str
    assert round_trip({"path": Path("a/b")}) == {"path": "a/b"}
    assert type(round_trip(numpy.str_("x"))) is str


def test_sets_are_written_in_one_order():
    def text(elements):
        return json.dumps(encode(set(elements), {}, "state"))

    words = [str(number) for number in range(20)]
    assert text(words) == text(reversed(words))
    assert text([8, 0, "8"]) == text(["8", 0, 8])  # integers collide in a small table


class Color(Enum):
    RED = "red"


class Name(StrEnum):
    ANNA = "anna"


@pytest.mark.parametrize(
    "value",
    [
        object(), Color.RED, Name.ANNA, len, namedtuple("Point", "x")(1), torch.Generator(),
        numpy.array(["a"]), numpy.array([object()]), numpy.datetime64("2026-11-22"),
        numpy.longdouble(1), numpy.ma.masked_array([1, 2], [True, False]),
        defaultdict(lambda: 1), torch.empty(2, layout=torch._mkldnn),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_saved_is_named_by_its_place(value):
    with pytest.raises(UsageError, match=r"^stateful\.meter\.parts\.1 (is|has)"):
        encode({"meter": {"parts": [3, value]}}, {}, "stateful")


HOSTILE = [
    {"$import": "os"}, {"$torch": "load"}, {"$torch": "ops"}, {"$torch": "__builtins__"},
    {"$torch": 3}, {"$device": "os.system"}, {"$device": 0}, {"$tensor": "missing"},
    {"$tensor": ["x", {"strides": [0]}]}, {"$tensor": ["x", {"complex": True}]}, {"$array": 3},
    {"$tensor": ["x", {"strides": [1 << 62]}]}, {"$tensor": ["x", {"strides": [1 << 34]}]},
    {"$tensor": None}, {"$tensor": {}}, {"$sparse": {"indices": 1}}, {"$deque": []},
    {"$deque": [[], "3"]}, {"$fraction": "1/0"}, {"$fraction": "1e999999999"},
    {"$fraction": "9" * 9999}, {"$fraction": 1.5}, {"$defaultdict": ["eval", [["a"]]]},
    {"$defaultdict": ["eval", []]}, {"$dict": [[[], 1]]}, {"$dict": [["a", 1], ["a", 2]]},
    {"$dict": {"ab": 1}}, {"$dict": 3}, {"$ordered": "ab"}, {"$tuple": "abc"}, {"$set": {"a": 1}},
    {"$size": "12"}, {"$bytes": "é"}, {"$bytes": "!!!!"}, {"$float": "__import__('os')"},
    {"$float": 1.5}, {"$complex": [1]}, {"$tuple": [1], "a": 2}, {"a": 1, "$b": 2},
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda value: str(value)[:50])
def test_hostile_files_run_nothing(hostile, monkeypatch):
    monkeypatch.setattr("os.system", None)
    for value in (hostile, {"a": [hostile]}):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            decode(value, {"x": torch.arange(3.0)})
        assert not isinstance(caught.value, UsageError)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([
            *SEQUENCES, *MAPPINGS, "$tensor", "$sparse", "$array", "$number", "$float", "$dict",
            "$deque", "$defaultdict", "$bytes", "$complex", "$fraction", "$torch", "$device",
            "$size", "$", "indices", "values", "shape", "coalesced", "strides", "a",
        ]),
        inner, max_size=2,
    ),
    max_leaves=8,
)  # fmt: skip


@given(JSON_VALUES)
def test_any_json_is_refused_or_decoded_to_what_encodes_to_it(value):
    """Two different files are never read as the same value."""
    tensors = {"x": torch.arange(3.0)}
    try:
        decoded = decode(value, tensors)
    except Exception:
        return
    again = decode(json.loads(json.dumps(encode(decoded, (saved := {}), "x"))), saved)
    require_same(decoded, again)
