"""Rule 5, the rules by which the results of micro-batches for a buffer are merged.

A module declares those of its own buffers, on its class or on itself:

    lockstep_buffer_rules = {"load": "sum", "steps": "equal"}

`lockstep.kernel.buffers` says what each rule means.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

__all__ = ["ATTRIBUTE", "RULES", "describe_buffer_rules", "find_rule"]

RULES = ("mean", "sum", "last", "equal")
ATTRIBUTE = "lockstep_buffer_rules"

NORM = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "equal"}
KNOWN: tuple[tuple[type, Mapping[str, str]], ...] = (
    (_NormBase, NORM),
    (_SpectralNorm, {"_u": "equal", "_v": "equal"}),
)
"""The rules of torch's own modules."""


def describe_buffer_rules(module: nn.Module) -> Mapping[str, str]:
    """Return the rules that a module declares for its own buffers, by name."""
    rules = vars(module).get(ATTRIBUTE)
    return (getattr(type(module), ATTRIBUTE, None) or {}) if rules is None else rules


def find_rule(module: nn.Module, name: str) -> str | None:
    """Return the rule of a module's buffer; None if it has none."""
    if name in (rules := describe_buffer_rules(module)):
        return rules[name]
    for kind, known in KNOWN:
        if isinstance(module, kind):
            return known.get(name)
    is_vector = name.endswith(("_u", "_v"))  # of torch.nn.utils.spectral_norm
    hooks = module._forward_pre_hooks.values() if is_vector else ()
    return "equal" if any(isinstance(hook, SpectralNorm) for hook in hooks) else None
