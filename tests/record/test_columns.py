"""Steps as columns, including those of malformed lines."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.record.columns import TIME_CATEGORIES, parse_steps

JSON = st.sampled_from(
    [
        *(None, True, 3, -0.5, "x", "2.5", [], [1], {}, {"a": 1}, {"a": [1]}, {"b": None, "": 2}),
        *([[1, 2, 3, 4]], [[1, 2]], [[1, 2, 3, "x"]], [3, []]),
    ]
)
NAMES = st.sampled_from(["loss", "t", "step", "metrics", "ranks", "samples", "else"])


@given(st.lists(st.dictionaries(NAMES, JSON, max_size=4), min_size=1, max_size=6))
def test_columns_have_the_number_of_lines(lines):
    found = parse_steps(lines)
    assert {len(found.t), len(found.step), len(found.lr)} == {len(lines)}
    assert all(len(column) == len(lines) for column in found.metrics.values())
    assert found.ranks.shape[0] == len(lines)
    assert found.ranks.shape[2] == len(TIME_CATEGORIES)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_rows_of_varying_numbers_of_ranks_keep_their_positions(worlds):
    row = [1.0, 2.0, 3.0, 4.0]
    found = parse_steps([{"ranks": [row] * world} for world in worlds]).ranks
    assert (~np.isnan(found[:, :, 3])).sum(axis=1).tolist() == worlds
