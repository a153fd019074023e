"""The rendezvous check reads values that any user may have written."""

import json
import time
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from lockstep.errors import LaunchEnvironmentError, RendezvousError
from lockstep.launcher import rendezvous
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.rendezvous_check import check_ranks

RANK_0 = RankInfo(
    rank=0, world_size=2, local_world_size=2, master_addr="10.0.0.1", master_port=29500
)
REGISTRATION = {"rank": 1, "world_size": 2, "process": 7, "host": "gpu03", "identity": "a0"}


def check_with(key, value):
    """Return the error of rank 0 of 2 after another process wrote `value` under `key`."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("rank/1", json.dumps(REGISTRATION))
    store.set(key, value)
    try:
        check_ranks(store, RANK_0, time.monotonic() + 5)
    except (LaunchEnvironmentError, RendezvousError) as error:
        return str(error)
    return "all here"


def test_all_ranks_are_found():
    assert check_with("unread", "anything") == "all here"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_waiting_at_a_port_prints_nothing(capfd, address):
    deadline = time.monotonic() + 1.2
    store = rendezvous._serve(listen(address, 0), deadline)
    with pytest.raises(RendezvousError, match=r"^rank 1 of 2 did not join within 1 s"):
        check_ranks(store, RANK_0, deadline)
    assert capfd.readouterr().err == ""


WRONG = [
    "x", "{}", "[]", "null", "1", '"text"', "{", "\x1b[2J", "\udcff".encode("utf-8", "replace"),
    "[" * 100_000,
    json.dumps([REGISTRATION]),
    json.dumps(REGISTRATION | {"more": 1}),
    json.dumps(REGISTRATION | {"rank": "1"}),
    json.dumps(REGISTRATION | {"rank": True}),
    json.dumps(REGISTRATION | {"world_size": -2}),
    json.dumps(REGISTRATION | {"world_size": 1e30}),
    json.dumps(REGISTRATION | {"process": 10**30}),
    json.dumps(REGISTRATION | {"host": "\x1b]0;title\x07"}),
    json.dumps(REGISTRATION | {"host": "x" * 10_000}),
    json.dumps(REGISTRATION | {"host": None}),
    json.dumps(REGISTRATION | {"identity": None}),
    json.dumps(REGISTRATION | {"identity": "\x1b]0;title\x07"}),
]  # fmt: skip


@pytest.mark.parametrize("key", ["size", "rank/0", "complete"])
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:30])
def test_a_foreign_value_is_an_error_that_names_its_key(key, value):
    sentence = check_with(key, value)
    assert sentence.startswith(f"rank 0: the value of '{key}' in the store at 10.0.0.1:29500 was")
    assert sentence.isprintable()
    assert len(sentence) < 500


def test_a_contradiction_that_another_rank_found_is_raised():
    pair = json.dumps([REGISTRATION | {"world_size": 3}, REGISTRATION])
    assert check_with("complete", pair).startswith(
        "the world has 3 ranks according to rank 1 (process 7 on gpu03), but 2 according to rank 1"
    )
    assert check_with("complete", json.dumps([REGISTRATION] * 2)).startswith(
        "two processes are rank 1: process 7 on gpu03 and process 7 on gpu03"
    )


VALUES = st.binary(max_size=200) | st.builds(
    json.dumps,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from([*REGISTRATION, "x"]), inner)
        ),
    ),
)


@given(st.sampled_from(["size", "rank/0", "complete"]), VALUES)
def test_any_value_gives_a_printable_message(key, value):
    assert check_with(key, value).isprintable()
