"""The state dict of a module that wraps another one, with the names of the inner module.

wrapper.state_dict()        "weight"          and not "module.weight"
wrapper.load_state_dict()   takes both
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

__all__ = ["hide_prefix"]


def hide_prefix(wrapper: nn.Module, prefix: str) -> None:
    """Let the state dict of a wrapper have the names of the module in it.

    Args:
        wrapper: The wrapper.
        prefix: The prefix of the names of the inner module, such as "module.".
    """
    wrapper.register_state_dict_post_hook(partial(_without_prefix, prefix))
    wrapper.register_load_state_dict_pre_hook(partial(_with_prefix, prefix))


def _without_prefix(
    hidden: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Remove the prefix of the wrapped module from the names in a state dict."""
    inner = prefix + hidden
    for name in list(state):
        value = state.pop(name)  # every entry, to keep the order
        state[prefix + name[len(inner) :] if name.startswith(inner) else name] = value


def _with_prefix(
    hidden: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Add the prefix of the wrapped module to names in a state dict that lack it."""
    inner = prefix + hidden
    for name in list(state):
        value = state.pop(name)
        ours = name.startswith(prefix) and not name.startswith(inner)
        state[inner + name[len(prefix) :] if ours else name] = value
