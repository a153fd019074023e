"""The rendezvous check reads values that any user may have written."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

import hosts
from lockstep.kernel.errors import LaunchEnvironmentError, RendezvousError
from lockstep.launcher import late_ranks, rendezvous, rendezvous_check
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.rendezvous_check import (
    check_ranks,
    get_host_identity,
    number_hosts,
    place_rank,
    read_hosts,
)

RANK_0 = RankInfo(
    rank=0, world_size=2, local_world_size=2, master_addr="10.0.0.1", master_port=29500
)
REGISTRATION = {"rank": 1, "world_size": 2, "process": 7, "host": "gpu03", "identity": "a0"}


def check_with(key, value):
    """Return the error of rank 0 of 2 after another process wrote `value` under `key`."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("rank/1", json.dumps(REGISTRATION))
    store.add("registered", 1)
    store.set(key, value)
    try:
        check_ranks(store, RANK_0, time.monotonic() + 5)
    except (LaunchEnvironmentError, RendezvousError) as error:
        return str(error)
    return "all here"


def test_all_ranks_are_found():
    assert check_with("unread", "anything") == "all here"


@pytest.mark.parametrize(("launcher", "is_written"), [("torchrun", False), ("environment", True)])
def test_the_hosts_of_the_ranks_are_written_only_if_a_rank_may_not_know_them(launcher, is_written):
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("rank/1", json.dumps(REGISTRATION))
    store.add("registered", 1)
    check_ranks(store, replace(RANK_0, launcher=launcher), time.monotonic() + 5)
    assert store.check(["hosts"]) == is_written


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_waiting_at_a_port_prints_nothing(capfd, address):
    deadline = time.monotonic() + 1.2
    store = rendezvous._serve(listen(address, 0), deadline)
    with pytest.raises(RendezvousError, match=r"^rank 1 of 2 did not join within 1 s"):
        check_ranks(store, RANK_0, deadline)
    assert capfd.readouterr().err == ""


# Others are drawn below.
WRONG = [
    "x", "{}", "\x1b[2J", "\udcff".encode("utf-8", "replace"), "[" * 100_000,
    json.dumps([REGISTRATION]),
    json.dumps(REGISTRATION | {"more": 1}),
    json.dumps(REGISTRATION | {"rank": True}),
    json.dumps(REGISTRATION | {"world_size": 1e30}),
    json.dumps(REGISTRATION | {"host": "x" * 10_000}),
    json.dumps(REGISTRATION | {"identity": "\x1b]0;title\x07"}),
]  # fmt: skip


@pytest.mark.parametrize("key", ["size", "rank/0", "complete"])
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:30])
def test_a_foreign_value_is_an_error_that_names_its_key(key, value):
    sentence = check_with(key, value)
    assert sentence.startswith(f"rank 0: the value of '{key}' in the store at 10.0.0.1:29500 was")
    assert sentence.isprintable()
    assert len(sentence) < 500


def test_an_error_that_another_rank_found_is_raised():
    store = HashStore()
    store.set("size", json.dumps(REGISTRATION | {"world_size": 3}))
    for sentence in ("the world has 3 ranks according to rank 1 (process 7 on gpu03), but 2", "x"):
        with pytest.raises(LaunchEnvironmentError) as caught:
            check_ranks(store, RANK_0, time.monotonic() + 5)
        assert str(caught.value).startswith(sentence)
        store.set("complete", json.dumps(["contradiction", "x\n\x1b[2J"]))
    assert str(caught.value) == r"x \x1b[2J"
    assert check_with("rank/0", json.dumps(REGISTRATION | {"rank": 0})).startswith(
        "two processes are rank 0: process 7 on gpu03 and process "
    )


def wait_together(monkeypatch, late, world_size=4, timeout=1.0, launcher="lockstep"):
    """Let all ranks but `late` wait in threads; return what each raised."""
    monkeypatch.setattr(late_ranks, "NOTE_AFTER", 0.1)
    monkeypatch.setattr(late_ranks, "NOTE_INTERVAL", 0.4)
    monkeypatch.setattr(rendezvous_check, "CHECK_INTERVAL", 0.01)
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def join(rank):
        info = RankInfo(
            rank, world_size, rank % 2, 2, rank // 2, "10.0.0.1", 29500, launcher=launcher
        )
        # The last rank that comes gives up first, and so do the others.
        seconds = timeout + (rank < max(ranks)) * 30
        with pytest.raises(RendezvousError) as caught:
            check_ranks(store, info, time.monotonic() + seconds)
        return str(caught.value)

    ranks = [rank for rank in range(world_size) if rank not in late]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(join, ranks))


def test_one_rank_prints_who_is_missing_and_all_end_with_the_first(monkeypatch, capfd):
    told = wait_together(monkeypatch, late=(0, 1), timeout=1.3)
    assert len(told) == 2
    assert len(set(told)) == 1
    assert re.fullmatch(
        r"host 0 \(ranks 0 and 1 of 4\) did not join within 1 s, while the others waited at "
        r"10\.0\.0\.1:29500; check that lockstep run was started there with --node-rank 0 and can "
        r"reach 10\.0\.0\.1:29500 through every firewall",
        told[0],
    )
    notes = capfd.readouterr().err.splitlines()
    # 1.3 s after the start, at most the notes of 0.1, 0.5, 0.9 and 1.3 s have been printed.
    assert 2 <= len(notes) <= 4
    for note in notes:
        assert re.match(
            r"lockstep: rank 2 has waited \d s \(since \d\d:\d\d:\d\d\) for host 0 "
            r"\(ranks 0 and 1 of 4\), and waits \d+ s more; check that lockstep run",
            note,
        )


@pytest.mark.parametrize(
    ("is_elastic", "first", "second"), [(False, [1], [0]), (True, [1, 2, 3], [0])]
)
def test_ranks_report_which_ranks_of_their_launcher_are_missing(
    monkeypatch, is_elastic, first, second
):
    """In an elastic run, host 0's launcher also learns of a host that was lost meanwhile."""
    if is_elastic:
        monkeypatch.setenv("LOCKSTEP_ELASTIC", "1")
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    reports = []
    monkeypatch.setattr(rendezvous_check, "report_to_launcher", reports.append)
    wait_together(monkeypatch, late=(1, 2, 3), timeout=0.1)
    assert {"kind": "waiting", "ranks": first} in reports
    reports.clear()
    wait_together(monkeypatch, late=(0, 2, 3), timeout=0.1)
    assert {"kind": "waiting", "ranks": second} in reports


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


# --- who shares a host ---------------------------------------------------------------------------

UNKNOWN = ("local_rank", "local_world_size", "host")


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_local_ranks_count_the_ranks_of_a_host_in_order(identities):
    numbers = number_hosts(identities)
    assert [numbers.index(host) for host in range(max(numbers) + 1)] == sorted(
        identities.index(identity) for identity in set(identities)
    )
    size = len(identities)
    placed = [place_rank(RankInfo(rank, size, unknown=UNKNOWN), numbers) for rank in range(size)]
    assert {(info.host, info.local_rank) for info in placed} == {
        (host, local_rank) for host in set(numbers) for local_rank in range(numbers.count(host))
    }
    assert all(info.local_world_size == numbers.count(info.host) for info in placed)
    for one in placed:
        for other in placed:
            is_same = identities[one.rank] == identities[other.rank]
            assert is_same == (one.host == other.host)
            assert not (is_same and one.rank < other.rank) or one.local_rank < other.local_rank


@pytest.mark.parametrize("value", ["x", "{}", "[0]", "[0, 2]", "[0, true]", "[0, [1]]", "7"])
def test_hosts_that_no_rank_writes_are_an_error(value):
    store = HashStore()
    store.set("hosts", value)
    with pytest.raises(RendezvousError, match=r"'hosts' .* was not written by a rank of Lockstep"):
        read_hosts(store, RANK_0)


def test_what_the_environment_gives_is_kept():
    given_local = RankInfo(2, 4, 1, 2, 0, "a", 1, "mpiexec", unknown=("host",))
    assert place_rank(given_local, [0, 1, 1, 0]) == RankInfo(2, 4, 1, 2, 1, "a", 1, "mpiexec")


def test_processes_of_a_host_have_one_identity_and_other_hosts_another():
    here = get_host_identity()
    assert here == get_host_identity()
    with hosts.network("a", "b") as net:
        a, b = (host.namespaces.call(get_host_identity) for host in (net["a"], net["b"]))
    assert len({here, a, b}) == 3
