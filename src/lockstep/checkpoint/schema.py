"""The required contents of a checkpoint's manifest and state, checked before anything is loaded.

Entries of other names are accepted: newer versions add some. What is inside the entries of a state
is checked by those who load it.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

import torch

__all__ = ["find_manifest_mismatch", "find_state_mismatch"]

CHECKSUM = re.compile(r"[0-9a-f]{32}")
FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
COUNT = range(1 << 53)  # of steps, samples or bytes; more is damage

STATE: dict[str, Any] = {
    "model": dict, "optimizer": dict, "parameter_groups": list, "scheduler": (dict, type(None)),
    "ema": (dict, type(None)), "ema_updates": (torch.Tensor, type(None)), "generators": dict,
    "stateful": dict, "history": dict, "script": dict, "seed": int,
    "settings": dict, "environment": dict, "sources": dict,
}  # fmt: skip
COUNTS = ("steps", "epoch", "microbatches", "trainer")


def find_manifest_mismatch(manifest: Any) -> str:
    """Return in words what is wrong with a manifest; "" if nothing is."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return "it names no files"
    for name in ("format", "step"):
        if not _is_count(manifest.get(name)):
            return f"{name} is {reprlib.repr(manifest.get(name))}"
    for name, entry in manifest["files"].items():
        if not FILE_NAME.fullmatch(name):
            return f"the file name {reprlib.repr(name)}"
        if not isinstance(entry, dict) or not _is_count(entry.get("bytes")):
            return f"the size of {name} is missing"
        if not CHECKSUM.fullmatch(str(entry.get("xxh3"))):
            return f"the checksum of {name} is missing"
    return ""


def find_state_mismatch(state: dict[str, Any]) -> str:
    """Return in words which entry of a state is wrong; "" if none is."""
    entries = {name: state.get(name) for name in (*STATE, *COUNTS)}
    for name, value in entries.items():
        fits = _is_count(value) if name in COUNTS else isinstance(value, STATE[name])
        if name not in state or not fits or isinstance(value, bool):
            return f"{name} is {'missing' if name not in state else reprlib.repr(value)}"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value in COUNT
