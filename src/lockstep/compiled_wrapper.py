"""The wrapper that `torch.compile(module)` puts around a module, and the module in it."""

from __future__ import annotations

from typing import Any

__all__ = ["WRAPPER", "remove_wrappers", "unwrap"]

WRAPPER = "_orig_mod"
"""The attribute of the wrapper that holds the module, and so a part of each name in it."""


def unwrap(module: Any) -> Any:
    """Return the module in the wrapper; any other object itself."""
    return getattr(module, WRAPPER, module)


def remove_wrappers(name: str) -> str:
    """Return the name of a module or tensor in the model before compilation."""
    return ".".join(part for part in name.split(".") if part != WRAPPER)
