"""The roll call reads values that anybody may have written."""

import json
import time
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from lockstep.errors import PlaceError, RendezvousError
from lockstep.launcher import rollcall
from lockstep.launcher.environment import Place

PLACE = Place(rank=0, world_size=2, local_world_size=2, master_addr="10.0.0.1", master_port=29500)
IDENTITY = {"rank": 1, "world_size": 2, "process": 7, "host": "gpu03"}


def told(key, value):
    """Return what rank 0 of 2 is told where another one wrote `value` under `key`."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("rank/1", json.dumps(IDENTITY))
    store.set(key, value)
    try:
        rollcall.call(store, PLACE, time.monotonic() + 5)
    except (PlaceError, RendezvousError) as error:
        return str(error)
    return "all here"


def test_without_an_intruder_all_are_here():
    assert told("unread", "anything") == "all here"


WRONG = [
    "x", "{}", "[]", "null", "1", '"text"', "{", "\x1b[2J", "\udcff".encode("utf-8", "replace"),
    "[" * 100_000,
    json.dumps([IDENTITY]),
    json.dumps(IDENTITY | {"more": 1}),
    json.dumps(IDENTITY | {"rank": "1"}),
    json.dumps(IDENTITY | {"rank": True}),
    json.dumps(IDENTITY | {"world_size": -2}),
    json.dumps(IDENTITY | {"world_size": 1e30}),
    json.dumps(IDENTITY | {"process": 10**30}),
    json.dumps(IDENTITY | {"host": "\x1b]0;title\x07"}),
    json.dumps(IDENTITY | {"host": "x" * 10_000}),
    json.dumps(IDENTITY | {"host": None}),
]  # fmt: skip


@pytest.mark.parametrize("key", ["size", "rank/0", "complete"])
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:30])
def test_what_no_rank_writes_is_said_to_be_anothers(key, value):
    sentence = told(key, value)
    assert sentence.startswith(f"rank 0: the value of '{key}' in the store at 10.0.0.1:29500 was")
    assert sentence.isprintable()
    assert len(sentence) < 500


def test_a_contradiction_that_another_rank_found_is_told():
    pair = json.dumps([IDENTITY | {"world_size": 3}, IDENTITY])
    assert "says that the world has 3 ranks, rank 1 (process 7" in told("complete", pair)
    assert told("complete", json.dumps([IDENTITY] * 2)).startswith(
        "two processes say that they are rank 1: process 7 on gpu03 and process 7 on gpu03"
    )


VALUES = st.binary(max_size=200) | st.builds(
    json.dumps,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*IDENTITY, "x"]), inner),
    ),
)


@given(st.sampled_from(["size", "rank/0", "complete"]), VALUES)
def test_no_value_gives_anything_but_a_sentence(key, value):
    assert told(key, value).isprintable()
