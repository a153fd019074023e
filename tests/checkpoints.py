"""Checkpoints without a training, and every way to damage one."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash


def complete(steps: int, **state: Any) -> dict[str, Any]:
    """Return a state that has every entry that a checkpoint must have, and those of `state`."""
    sums = {"loss": "0", "metrics": {}, "samples": 0, "seconds": 0.0}
    return {
        "model": {}, "optimizer": {}, "parameter_groups": [{"lr": 0.1, "params": []}],
        "scheduler": None, "ema": None, "ema_updates": None, "generators": {}, "stateful": {},
        "history": {"open": sums}, "script": {"entries": [], "digests": {}},
        "steps": steps, "epoch": 0, "seed": 0, "microbatches": 1, "settings": {},
        "environment": {}, "sources": {}, "trainer": 0,
    } | state  # fmt: skip


def tensors(steps: int) -> dict[str, Any]:
    """Return a state with tensors of every kind."""
    return complete(
        steps,
        model={"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)},
        optimizer={"w": {"exp_avg": torch.ones(2, 3), "step": torch.tensor(4.0)}},
        ema={"w": torch.full((2, 3), 0.5)},
        stateful={"meter": {"total": 0.1, "parts": (1, [2]), "seen": torch.tensor([7])}},
    )


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Write other content into a file of a checkpoint, with its size and checksum."""
    (path / name).write_bytes(content)
    if name != "manifest.json":
        manifest = json.loads((path / "manifest.json").read_text())
        checksum = xxhash.xxh3_128_hexdigest(content)
        manifest["files"][name] = {"bytes": len(content), "xxh3": checksum}
        (path / "manifest.json").write_text(json.dumps(manifest))


BAD = (
    None, {}, [], "x", "", -1, 10**30, 1.5, True, [None], {"a": 1}, {"$tuple": []},
    {"$fraction": "1e999999999"}, {"$tensor": "missing"}, {"$float": "nan"},
)  # fmt: skip


def mutations(value: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield (place, JSON text) for every way to damage one entry of a JSON value."""
    for place in places(value):
        yield from ((place, text) for text in damage(value, place))


def damage(value: Any, place: tuple[Any, ...]) -> Iterator[str]:
    """Yield the JSON text of a value for every way to damage its entry at `place`."""
    copied = copy.deepcopy(value)
    parent = copied
    name = place[-1]
    for step in place[:-1]:
        parent = parent[step]
    for bad in BAD:
        parent[name] = bad
        yield json.dumps(copied)
    for text in ("[" * 100_000, "NaN", "1" + "0" * 9999):
        parent[name] = "HERE"
        yield json.dumps(copied).replace('"HERE"', text)
    del parent[name]
    yield json.dumps(copied)


def draw_damage(value: Any, draw: random.Random) -> tuple[tuple[Any, ...], str]:
    """Return the path of an entry, rarely one of many in a list, and the damaged JSON text."""
    place = ()
    inner = value
    while not place or (isinstance(inner, (dict, list)) and inner and draw.random() < 0.7):
        names = list(inner if isinstance(inner, dict) else range(len(inner)))
        place += (draw.choice(names),)
        inner = inner[place[-1]]
    return place, draw.choice(list(damage(value, place)))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all entries of a JSON value."""
    if path:
        yield path
    names = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for name in names:
        yield from places(value[name], (*path, name))
