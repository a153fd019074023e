"""The recipes by name. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.tools.recipes.classification import Recipe

__all__ = ["NAMES", "find_recipe"]

NAMES = ("digits", "mnist")


def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name; raise KeyError if there is none."""
    from lockstep.tools.recipes.digits import DIGITS
    from lockstep.tools.recipes.mnist import MNIST

    return {"digits": DIGITS, "mnist": MNIST}[name]
