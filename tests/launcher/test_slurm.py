"""The first host of Slurm's host lists."""

import pytest

from lockstep.kernel.errors import LaunchEnvironmentError
from lockstep.launcher.slurm import find_first_host


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a", "a"),
        ("gpu[01-04,07]", "gpu01"),
        ("a[10-12]b[3-4]", "a10b3"),
        ("login,gpu[08-11]", "login"),
        ("n[3,1]-ib", "n3-ib"),
        ("rack-1.node[099-101].site", "rack-1.node099.site"),
    ],
)
def test_the_first_name_of_a_list(text, name):
    assert find_first_host(text) == name


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a[", "a]", "a[1-2", "a[]", "a[1-]", "a[x]", "a b", "a[1,,2]",
             "a[0-99999999999999999999]", "a[[1]]", "a[1]]", "a[\u0661]", "a" * 60 + "["]
)  # fmt: skip
def test_other_text_is_an_error_that_quotes_it(text):
    with pytest.raises(LaunchEnvironmentError) as caught:
        find_first_host(text)
    assert repr(text) in str(caught.value)
