"""Call sites: the module and the line of the user's program that call an operator.

forward     the innermost frame that belongs to neither torch nor Lockstep, and the innermost
            module whose call is on the stack
backward    the site of the operator that is being differentiated, found by its number in
            autograd; unless backward runs Python code: a hook, a user-defined function, a
            recomputation
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import graph as autograd_graph

from lockstep.compiled_wrapper import WRAPPER, unwrap
from lockstep.kernel.rng_scopes import is_in_backward

__all__ = [
    "CallSite",
    "CallSites",
    "class_name",
    "describe_line",
    "find_source",
    "is_code_of_user",
    "is_exchange_of_shards",
]

MODULE_CALL = nn.Module._call_impl.__code__
BACKWARD = autograd_graph._engine_run_backward.__code__

TORCH = str(Path(torch.__file__).parent)
FSDP = f"{TORCH}/distributed/fsdp"
LOCKSTEP = str(Path(__file__).parents[1])
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
PACKAGES = ("site-packages", "dist-packages")
"""The subfolders of the standard library's folder that contain other packages."""


@dataclass(frozen=True)
class CallSite:
    """The place where an operator was called.

    Attributes:
        unit: The dotted name of the innermost module; for a model itself, the name of its class.
            "" outside of modules.
        source: The line, such as "train.py:31 in forward"; "" if unknown.
        buffers: The names, in the model, of the module's buffers, by their `id`.
    """

    unit: str = ""
    source: str = ""
    buffers: Mapping[int, str] = field(default_factory=dict, compare=False)


class CallSites:
    """The search for call sites in the modules that a step calls.

    Args:
        modules: The modules by name. The name of the model is "", so that its modules have no
            prefix.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._units: dict[nn.Module, str] = {}
        self._paths: dict[nn.Module, list[str]] = {}
        self._parameters: dict[int, tuple[str, str]] = {}  # name and unit
        self._numbered: dict[int, CallSite] = {}
        for root, module in modules.items():
            for name, part in module.named_modules():
                # Without the part that torch.compile adds to each name.
                path = [key for key in (root, *name.split(".")) if key not in ("", WRAPPER)]
                self._units.setdefault(part, ".".join(path) or class_name(part))
                self._paths.setdefault(part, path)
                for own, parameter in part.named_parameters(recurse=False):
                    named = ".".join([*path, own]), self._units[part]
                    self._parameters.setdefault(id(parameter), named)

    def find(self, frame: FrameType | None) -> CallSite:
        """Return the site of the operator that is called from a frame."""
        site = self._walk(frame)
        if is_in_backward():
            known = self._differentiated()
            site = CallSite(site.unit or known.unit, site.source or known.source, site.buffers)
        # Autograd numbers an operator right before executing it. An operator that gets no number
        # finds the number of an earlier one, whose site is kept.
        self._numbered.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)
        return site

    def name(self, tensor: torch.Tensor, site: CallSite) -> str:
        """Return the name of a parameter, or of a buffer of the site's module; "" for others."""
        known = self._parameters.get(id(tensor))
        return site.buffers.get(id(tensor), "") if known is None else known[0]

    def _walk(self, frame: FrameType | None) -> CallSite:
        """Return the call site on the stack, up to the start of a backward pass."""
        module: nn.Module | None = None
        source = ""
        while frame is not None and not (module is not None and source):
            code = frame.f_code
            if code is BACKWARD:
                break
            if code is MODULE_CALL:
                candidate = frame.f_locals["self"]
                module = candidate if module is None and candidate in self._units else module
            elif not source and is_code_of_user(code):
                source = describe_line(frame)
            frame = frame.f_back
        if module is None:
            return CallSite(source=source)
        # Looked up in each call, since each micro-batch has separate buffers.
        buffers = {
            id(buffer): ".".join([*self._paths[module], name])
            for name, buffer in module._buffers.items()
        }
        return CallSite(self._units[module], source, buffers)

    def _differentiated(self) -> CallSite:
        """Return the site of the operator whose derivative autograd is computing."""
        node: Any = torch._C._current_autograd_node()
        if node is None:  # autograd is creating the initial gradient
            return CallSite()
        variable = getattr(node, "variable", None)  # only the node that writes to .grad has it
        if isinstance(variable, torch.Tensor):
            _, unit = self._parameters.get(id(variable), ("", ""))
            return CallSite(unit)
        return self._numbered.get(node._sequence_nr(), CallSite())


def find_source(frame: FrameType | None) -> str:
    """Return the line of the user's program that is being executed in a frame or its callers."""
    while frame is not None and not is_code_of_user(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else describe_line(frame)


def describe_line(frame: FrameType) -> str:
    """Return the line of a frame, such as "train.py:31 in forward"."""
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def is_exchange_of_shards(frame: FrameType | None) -> bool:
    """Return whether `fully_shard` of torch, in a frame or above it, gathers or adds tensors."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    while frame is not None and not frame.f_code.co_filename.startswith(FSDP):
        frame = frame.f_back
    return frame is not None


def class_name(module: nn.Module) -> str:
    """Return the name of a model's class, without wrappers and before it was sharded."""
    kinds = type(unwrap(module)).__mro__
    return kinds[2 if kinds[1].__name__ == "FSDPModule" else 0].__name__


@lru_cache(maxsize=10_000)
def is_code_of_user(code: CodeType) -> bool:
    """Return whether code belongs to the user's program or to a library that it uses."""
    name = code.co_filename
    if name.startswith(("<frozen", "<eval_with_key>")) or name.startswith(TORCH):
        return False
    if name.startswith(LOCKSTEP):
        return Path(name).parent.name == "recipes"
    in_library = name.startswith(STANDARD_LIBRARY)
    return not in_library or any(package in Path(name).parts for package in PACKAGES)
