from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from lockstep.data.content_hash import hash_content, hash_sample

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    label: int


class Opaque:
    """An object with a tensor, and something that differs between any two of them."""

    def __init__(self, value: float) -> None:
        self.inner = {"x": torch.tensor(value)}
        self.itself = self
        self.made = id(self)


class Picture:
    """What a picture of PIL looks like."""

    def __init__(self, octets: bytes, mode: str = "L") -> None:
        self.octets = octets
        self.mode = mode
        self.size = (len(octets), 1)

    def tobytes(self) -> bytes:
        return self.octets


X = torch.arange(6.0)


def jagged(*parts: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(parts), layout=torch.jagged)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, X.flip(0)),
        (X.view(2, 3), X.view(2, 3).t().contiguous().t()),
        ([X, X + 1], [X + 1, X]),
        ({"x": X, "y": X + 1}, {"x": X + 1, "y": X}),
        (UserDict(x=X), UserDict(x=X + 1)),
        (Pair(X, 1), Pair(X, 2)),
        (Record(X, 1), Record(X, 2)),
        (Opaque(1.0), Opaque(2.0)),
        (numpy.arange(4), numpy.arange(4.0)),
        (numpy.array(3), numpy.array(4)),
        (numpy.array(["a", 1], dtype=object), numpy.array(["a", 2], dtype=object)),
        (numpy.datetime64("2026-11-21"), numpy.datetime64("2026-11-22")),
        (numpy.array(["2026-11-21"], "M8[D]"), numpy.array(["2026-11-22"], "M8[D]")),
        (Picture(b"ab"), Picture(b"ac")),
        (Picture(b"ab"), Picture(b"ab", "P")),
        ([1, 2, "a"], [1, 2, "b"]),
        (["ab", "c"], ["a", "bc"]),
        (0.0, -0.0),
        ([[1], [2, 3]], [[1, 2], [3]]),
    ],
)
def test_other_data_has_another_fingerprint(one: Any, other: Any) -> None:
    assert hash_content(one) != hash_content(other)


def test_other_jagged_data_has_another_fingerprint() -> None:
    assert hash_content(jagged(X)) != hash_content(jagged(X + 1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, torch.cat([X, X])[6:]),
        (X[:1, None], X[:1].expand(1, 1)),
        (X.view(2, 3).to_sparse(), X.view(2, 3).to_sparse()),
        (numpy.arange(6)[::2], numpy.array([0, 2, 4])),
        ({"x": X, "y": 1}, OrderedDict(y=1, x=X.clone())),
        (Opaque(1.0), Opaque(1.0)),
        (float("nan"), float("nan")),
        ([X, None, "a"], (X, None, "a")),
    ],
)
def test_the_same_data_has_the_same_fingerprint(one: Any, other: Any) -> None:
    assert hash_content(one) == hash_content(other)
    assert len(hash_content(one)) == 16


def test_the_texts_of_a_sample_count_only_where_it_has_nothing_else() -> None:
    assert hash_sample({"x": X, "path": "/a"}) == hash_sample({"x": X, "path": "/b"})
    assert hash_sample((X, ["/a"])) == hash_sample((X, ["/b"]))
    assert hash_sample((X, 1)) != hash_sample((X, 2))
    assert hash_sample(("some words", 1)) != hash_sample(("other words", 1))
