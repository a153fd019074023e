"""Rule 5, the rules by which the results of micro-batches for a buffer are merged.

A module declares those of its own buffers, on its class or on itself:

    lockstep_buffer_rules = {"load": "sum", "steps": "equal"}

`lockstep.kernel.buffers` says what each rule means.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.kernel.errors import UsageError

__all__ = ["ATTRIBUTE", "check_buffer_rules", "describe_buffer_rules", "find_rule"]

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


def check_buffer_rules(path: str, module: nn.Module) -> None:
    """Raise UsageError for a rule that does not exist, or that its buffer cannot follow.

    Args:
        path: The name of the module, for the message.
        module: The module that may declare rules.
    """
    rules = describe_buffer_rules(module)
    said = f"{path} ({type(module).__name__}).{ATTRIBUTE}"
    if not isinstance(rules, Mapping):
        raise UsageError(f"{said} is a {type(rules).__name__}: expected a dict of rules by buffer")
    for name, rule in rules.items():
        if name not in module._buffers:
            buffers = ", ".join(module._buffers) or "none"
            raise UsageError(f"{said} names {name!r}, and the module's buffers are: {buffers}")
        if rule not in RULES:
            raise UsageError(
                f"{said}[{name!r}] is {rule!r}: expected one of {', '.join(map(repr, RULES))}"
            )
        dtype = torch.float32 if (tensor := module._buffers[name]) is None else tensor.dtype
        is_sum = rule == "sum" and dtype is not torch.bool and not dtype.is_complex
        if rule in ("mean", "sum") and not (is_sum or dtype.is_floating_point):
            raise UsageError(f"{said}[{name!r}] is {rule!r}, which a {dtype} buffer cannot follow")


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
