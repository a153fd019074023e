"""Messages between launchers: every form is recognized, and no other one does any harm."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.transport.listener import MessageListener
from lockstep.elastic.host_connection import PURPOSE
from lockstep.elastic.host_messages import FROM_AGENT, FROM_MEMBER, TO_AGENT, is_well_formed
from lockstep.elastic.host_supervisor import AgentHost, HostSupervisor
from lockstep.launcher.channel import open_pair
from lockstep.launcher.failure_attribution import Outcome
from lockstep.launcher.hang_monitor import HangPolicy
from lockstep.launcher.rank_process import describe_error

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
EXAMPLES = {int: 1, str: "a", bool: True, dict: {}, (int, float): 0.5, (str, type(None)): None}


def make(kind: str, form: Any) -> dict[str, Any]:
    def value_of(types: Any) -> Any:
        if isinstance(types, list):
            return [EXAMPLES[types[0]]]
        return {"A": "b"} if isinstance(types, dict) else EXAMPLES[types]

    return {"kind": kind, **{name: value_of(types) for name, types in form.items()}}


@pytest.mark.parametrize("forms", [FROM_AGENT, TO_AGENT, FROM_MEMBER])
def test_a_field_of_another_type_or_a_missing_one_is_found(forms):
    for kind, form in forms.items():
        message = make(kind, form)
        assert is_well_formed(message, forms)
        assert is_well_formed({**message, "further": 1}, forms)
        for name in form:
            assert not is_well_formed({**message, name: [{}]}, forms)
            if form[name] != (str, type(None)):
                assert not is_well_formed({**message, name: None}, forms)
    assert not is_well_formed({"kind": "other"}, forms)
    assert not is_well_formed({"kind": ["start"]}, forms)


def test_a_report_of_an_exception_is_well_formed():
    with pytest.raises(OSError, match="out of paper") as raised:
        raise OSError("out of paper")
    assert is_well_formed(describe_error(raised.value), FROM_MEMBER)


class Connection:
    """Stands for the connection to an agent, which may be closed."""

    def __init__(self) -> None:
        self._end, self._other = socket.socketpair()
        self.is_closed = False

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: object) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        self._end.close()
        self._other.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[HostSupervisor]:
    ours, theirs = open_pair()
    listener = MessageListener(socket.create_server(("127.0.0.1", 0)), bytes(32), PURPOSE)
    options: dict[str, Any] = {"nnodes": 2, "silence": 10.0, "folder": None, "version": "1"}
    ranks = HostSupervisor(ours, HangPolicy(), listener, **options)
    yield ranks
    ranks.end_hosts(0, "")
    ranks.close()
    theirs.close()


@given(data=st.data())
def test_no_message_of_an_agent_ends_the_launcher(ranks, data):
    """It is processed, or ends the connection, and says nothing about members of others."""
    kind = data.draw(st.sampled_from([*FROM_AGENT, "other"]))
    message = make(kind, FROM_AGENT.get(kind, {}))
    if kind == "report":
        inner = data.draw(st.sampled_from([*FROM_MEMBER, "stack", "value"]))
        message["message"] = make(inner, FROM_MEMBER.get(inner, {}))
    for changed in (message, message.get("message", {})):
        for name in [*changed]:
            if data.draw(st.booleans()):
                changed[name] = data.draw(VALUES)
    connection = Connection()
    host = AgentHost(1, "host 1 (b)", connection)  # type: ignore[arg-type]
    ranks._hosts[1] = host
    ranks.outcomes = {0: Outcome(0), 1: Outcome(1)}
    ranks._host_of = {1: 1}
    ranks.take_agent_message(host, message)
    assert connection.is_closed == (1 not in ranks._hosts)
    if connection.is_closed:
        assert ranks.outcomes[1].status is not None
    else:
        ranks._hosts.clear()
        connection.close()
    assert ranks.outcomes[0] == Outcome(0)
