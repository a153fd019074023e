"""States of trainings, as a checkpoint holds them, without a training."""

from typing import Any

import torch


def complete(steps: int, **state: Any) -> dict[str, Any]:
    """Return a state that has every entry that a checkpoint must have, and those of `state`."""
    sums = {"loss": "0", "metrics": {}, "samples": 0, "seconds": 0.0}
    return {
        "model": {}, "optimizer": {}, "parameter_groups": [{"lr": 0.1, "params": []}],
        "scheduler": None, "ema": None, "ema_updates": None, "generators": {}, "stateful": {},
        "history": {"open": sums}, "known_samplers": {}, "script": {"entries": [], "digests": {}},
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
