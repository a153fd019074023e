"""The recipes by name. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.tools.recipes.classification import Recipe

__all__ = ["IMAGE_NAMES", "NAMES", "find_recipe"]

IMAGE_NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "vit")
"""The recipes that train on image folders."""

NAMES = ("digits", "mnist", *IMAGE_NAMES)


def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name; raise KeyError if there is none."""
    if name == "digits":
        from lockstep.tools.recipes.digits import DIGITS

        return DIGITS
    if name == "mnist":
        from lockstep.tools.recipes.mnist import MNIST

        return MNIST
    from lockstep.tools.recipes.image_classification import RECIPES  # decodes images

    return {recipe.name: recipe for recipe in RECIPES}[name]
