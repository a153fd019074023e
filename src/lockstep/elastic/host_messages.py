"""The messages between the launcher of host 0 and the agents of other hosts, and their forms.

    launcher of host 0                                    agent of another host
      <─ join         asks to take part
      ── welcome      the seconds of silence after which a host is lost, and the run's folder
      ── refuse       it cannot take part, or not yet
      ── start        start a process
      ── send         pass the message to a member
      ── signal       send a signal to a member
      ── release      nothing more is needed from a member that has exited
      ── end          the run has ended
      <─ started      a member has a process
      <─ begun        these members have published an operation
      <─ report       a member has sent this message, `age` seconds ago
      <─ exit         a member has exited
      <─ leave        the host was asked to stop
      <> heartbeat    nothing else was sent for a while

The other end has the secret of the run, or the run has none. A message of another form ends the
connection, and not the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FROM_AGENT", "FROM_MEMBER", "TO_AGENT", "is_well_formed"]

Form = type | tuple[type, ...] | list[type] | dict[type, type]
"""The types of a field; a list or dictionary stands for one whose values have a type."""

Forms = Mapping[str, Mapping[str, Form]]

NUMBER = (int, float)
TEXT = (str, type(None))

FROM_AGENT: Forms = {
    "join": {"host": int, "name": str, "nnodes": int, "version": str},
    "started": {"member": int, "pid": int},
    "begun": {"members": [int]},
    "report": {"member": int, "message": dict, "age": NUMBER},
    "exit": {"member": int, "status": int, "hint": str},
    "leave": {},
}

TO_AGENT: Forms = {
    "welcome": {"silence": NUMBER, "folder": TEXT},
    "refuse": {"reason": str, "is_final": bool},
    "start": {"member": int, "local_rank": int, "variables": {str: str}},
    "send": {"member": int, "message": dict},
    "signal": {"member": int, "number": int, "group": bool},
    "release": {"member": int},
    "end": {"status": int, "reason": str},
}

FROM_MEMBER: Forms = {
    "waiting": {"ranks": [int]},
    "ready": {},
    "round_over": {
        "round": int,
        "operation": int,
        "is_prepared": bool,
        "reason": str,
        "can_stay": bool,
        "can_transfer_state": bool,
        "part": int,
        "parts": int,
        "microbatches": int,
        "has_state": bool,
    },
    "transferred": {"checkpoints": str},
    "resumed": {},
    "backend": {"name": str},
    "error": {
        "time": NUMBER,
        "type": str,
        "message": str,
        "where": str,
        "traceback": str,
        "plain": bool,
    },
}
"""What an agent passes on (`coordinator.py`, `rank_process.describe_error`)."""


def is_well_formed(message: Mapping[str, Any], forms: Forms) -> bool:
    """Return whether a message has one of the forms; further fields are ignored."""
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in forms:
        return False
    return all(_has_form(message.get(name), form) for name, form in forms[kind].items())


def _has_form(value: object, form: Form) -> bool:
    if isinstance(form, list):
        return isinstance(value, list) and all(type(item) is form[0] for item in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(type(item) is str for item in value.values())
    types = form if isinstance(form, tuple) else (form,)
    return type(value) in types  # not isinstance: True is no number
