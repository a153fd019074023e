"""Drawing: one seeded generator, and parts that can be built, and printed, as they were drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class Draw(random.Random):
    """A generator of choices; equal seeds draw equal cases on every machine."""

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random() < probability

    def pick(self, *options: Any) -> Any:
        """Return one of the options."""
        return self.choice(options)

    def some(self, **options: Any) -> dict[str, Any]:
        """Return each named option with probability 1/3; a list stands for one of its values."""
        return {
            name: self.choice(value) if isinstance(value, list) else value
            for name, value in options.items()
            if self.chance(1 / 3)
        }

    def cut(self, total: int, parts: int) -> list[int]:
        """Return `parts` sizes, each at least 1, that add up to `total`."""
        bounds = sorted(self.sample(range(1, total), parts - 1))
        return [hi - lo for lo, hi in zip([0, *bounds], [*bounds, total], strict=True)]


def described(part: Any) -> str:
    """Return what builds a part, much as Python would write it."""
    if isinstance(part, partial):
        return f"{described(part.func)}({_arguments(part.args, part.keywords)})"
    if isinstance(part, torch.Tensor):
        return f"tensor({part.tolist()})"
    if isinstance(part, torch.dtype):
        return str(part).removeprefix("torch.")
    if isinstance(part, list | tuple):
        return f"[{', '.join(map(described, part))}]"
    return getattr(part, "__name__", None) or repr(part)


def _arguments(args: Sequence[Any], named: dict[str, Any]) -> str:
    given = [f"{name}={described(value)}" for name, value in named.items()]
    return ", ".join([*map(described, args), *given])


def built(part: Any) -> Any:
    """Build a part, and first the parts among its arguments."""
    if not isinstance(part, partial):
        return part
    return part.func(*map(built, part.args), **{k: built(v) for k, v in part.keywords.items()})


Part = Callable[[], Any]
