"""Rule 1: the split of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.splitting import split_evenly


@given(st.integers(0, 500), st.integers(1, 40))
def test_spans_cover_and_differ_by_at_most_one_larger_first(total: int, parts: int) -> None:
    cuts = split_evenly(total, parts)
    sizes = [len(span) for span in cuts]
    assert [position for span in cuts for position in span] == list(range(total))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (3, 0)])
def test_impossible_spans_are_a_bug(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split_evenly(total, parts)
