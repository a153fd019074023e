"""Slurm's host lists stand for the names that Slurm means."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.errors import LaunchEnvironmentError
from lockstep.launcher.host_list import expand_host_list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("gpu[01-04,07]", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("gpu[08-11],login", ["gpu08", "gpu09", "gpu10", "gpu11", "login"]),
        ("n[1,3]-ib", ["n1-ib", "n3-ib"]),
        ("rack-1.node[099-101].site", [f"rack-1.node{n}.site" for n in ("099", "100", "101")]),
        ("a,b[2]", ["a", "b2"]),
    ],
)
def test_lists(text, names):
    assert list(expand_host_list(text)) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a[", "a]", "a[1-2", "a[]", "a[3-1]", "a[1-]", "a[x]", "a b", "a[1,,2]",
             "a[0-99999999999999999999]", "a[0-100000]", "a[[1]]", "a[1]]", "a[\u0661]"]
)  # fmt: skip
def test_other_text_is_an_error_that_quotes_it(text):
    with pytest.raises(LaunchEnvironmentError) as caught:
        list(expand_host_list(text))
    assert repr(text) in str(caught.value)


def test_the_first_name_of_a_long_list_comes_at_once():
    groups = "[0-9999]" * 2
    assert next(expand_host_list(f"a{groups}")) == "a00"


WORDS = st.text("abz-.", min_size=1, max_size=4)
RANGES = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=3
)
NAMES = st.lists(st.one_of(WORDS, RANGES), min_size=1, max_size=4)


def spell(parts):
    """Return a name of a list, and the names that it stands for."""
    text, choices = "", []
    for part in parts:
        if isinstance(part, str):
            text += part
            choices.append([part])
            continue
        numbers, spelled = [], []
        for first, more, width in part:
            numbers += [f"{number:0{width}}" for number in range(first, first + more + 1)]
            end = f"-{first + more:0{width}}" if more else ""
            spelled.append(f"{first:0{width}}{end}")
        text += f"[{','.join(spelled)}]"
        choices.append(numbers)
    return text, ["".join(each) for each in itertools.product(*choices)]


@given(st.lists(NAMES, min_size=1, max_size=3))
def test_a_list_stands_for_the_names_that_it_was_made_of(names):
    spelled = [spell(parts) for parts in names]
    text = ",".join(name for name, _ in spelled)
    assert list(expand_host_list(text)) == [each for _, meant in spelled for each in meant]


@given(st.text("ab[],-0159 ", max_size=12))
def test_any_text_gives_names_or_one_error(text):
    with contextlib.suppress(LaunchEnvironmentError):
        names = list(expand_host_list(text))
        assert names
        assert not any(set(name) & set("[], ") for name in names)
