"""The settings of modules that a script changes between steps, in checkpoints.

    model[0].weight.requires_grad_(False)   a frozen parameter           restored
    model[1].eval()                         a mode                       restored
    model[2].p = 0.5                        a plain value, a tensor      restored
    model[3].activation = F.relu            a function, another object   if it differs: an error
    model[4].register_forward_hook(...)     a hook                       if it differs: a warning

A checkpoint holds the settings that differ from those at the construction of the trainer. The
others are those of the script, which may have changed since. A resumed script does not execute the
bodies of loops again, so its modules get the settings of the checkpoint when it has reached its
position. Attributes in `lockstep_ignore` are left as they are.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint.tensor_file import DTYPES
from lockstep.kernel.errors import UsageError
from lockstep.messages import log
from lockstep.model.compilation import is_plain_call
from lockstep.model.description import (
    PLAIN,
    describe_value,
    ignored_attributes,
    iterate_attributes,
)

__all__ = ["ModuleSettings"]

CALL = "_compiled_call_impl"
"""The attribute with what torch calls instead of a module's own call."""

LARGEST = 1000
"""The largest container that is restored, in members."""

LARGEST_TENSOR = 65_536
"""The largest tensor that is restored although another one was in its place, in elements.

Larger ones are activations rather than settings.
"""

SCALARS = PLAIN | {str}
CONTAINERS = (list, tuple, set, frozenset, dict, deque, OrderedDict, Counter)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Opaque(str):
    """The description of a value that cannot be restored."""


DELETED = Opaque("missing")
COMPILED = Opaque("compiled")
UNKNOWN = Opaque()
"""A container of values that cannot be described, such as a list of activations."""


class HeldSetting(NamedTuple):
    """A value with tensors: the value, a copy without tensors, and the tensors with versions."""

    value: Any
    rest: Any
    tensors: tuple[tuple[torch.Tensor, int], ...]

    def is_restored(self, initial: Any) -> bool:
        """Return whether a checkpoint holds the value, which has changed since `initial`."""
        ids = [id(tensor) for tensor, _ in self.tensors]
        if isinstance(initial, HeldSetting) and ids == [
            id(tensor) for tensor, _ in initial.tensors
        ]:
            return True
        return sum(tensor.numel() for tensor, _ in self.tensors) <= LARGEST_TENSOR


class ModuleSettings:
    """Reads the settings of modules, and restores those that a checkpoint holds.

    Args:
        parts: The modules, and a loss that is another object, by the names that messages use.
        device: The device of the training.
    """

    def __init__(self, parts: Mapping[str, Any], device: torch.device) -> None:
        self._parts = dict(parts)
        self._device = device
        self._initial, self._hooks = self._read()

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that have changed since the trainer was constructed.

        Returns:
            Under "values" those that can be restored, under "opaque" the descriptions of others,
            by module and attribute; under "hooks" the names of hooks by module.
        """
        settings, hooks = self._read()
        owners = dict(self._iterate_parts())
        values: dict[str, Any] = {}
        opaque: dict[str, str] = {}
        for entry in self._initial.keys() - settings.keys():
            path, _, name = entry.rpartition(".")
            if path in owners and name not in vars(owners[path]):  # not an activation
                opaque[entry] = DELETED
        for entry, value in settings.items():
            initial = self._initial.get(entry)
            if value is UNKNOWN or _is_same(value, initial):
                continue
            if isinstance(value, Opaque):
                path, _, name = entry.rpartition(".")
                is_method = callable(getattr(type(owners[path]), name, None))
                if initial is not None or is_method:  # otherwise forward may make it by itself
                    opaque[entry] = str(value)
            elif not isinstance(value, HeldSetting):
                values[entry] = value
            elif value.is_restored(initial):
                tensors = {id(tensor): tensor.detach() for tensor, _ in value.tensors}
                values[entry] = copy.deepcopy(value.value, dict(tensors))
        changed = {path: text for path, text in hooks.items() if text != self._hooks.get(path)}
        return {"values": values, "opaque": opaque, "hooks": changed}

    def describe(self) -> str:
        """Return a text that changes with a setting, except those with tensors."""
        settings, hooks = self._read()
        plain = {
            entry: value for entry, value in settings.items() if not isinstance(value, HeldSetting)
        }
        return repr([plain, hooks])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the settings of `state_dict`; the others become those of the construction.

        Raises:
            UsageError: A setting that cannot be restored has another value.
        """
        settings, hooks = self._read()
        saved = state["values"]
        opaque = state["opaque"]
        owners = dict(self._iterate_parts())
        for entry in {**settings, **opaque}:
            path, _, name = entry.rpartition(".")
            if entry not in settings and name in ignored_attributes(owners.get(path)):
                continue
            value = settings.get(entry, DELETED)
            initial = self._initial.get(entry)
            known = opaque.get(entry, initial if isinstance(initial, Opaque) else "")
            if known and entry not in saved and value is not UNKNOWN and str(value) != known:
                raise UsageError(
                    f"{entry} is {value}, and was {known} when the state was saved: a resumed "
                    "script does not execute the body of the loop again, and this value cannot be "
                    "restored; set it before the loop, or name it in the module's lockstep_ignore "
                    "if it has no effect"
                )
        for entry, value in (self._initial | saved).items():
            path, _, name = entry.rpartition(".")
            if path in owners and entry not in settings and name in vars(owners[path]):
                continue  # ignored, or an activation
            now = settings.get(entry)
            is_plain = not isinstance(now, (Opaque, HeldSetting)) and not isinstance(
                value, (Opaque, HeldSetting)
            )
            if (entry in saved or (is_plain and entry not in opaque)) and not _is_same(now, value):
                self._set(owners, path, name, value)
        for path, text in (self._hooks | state["hooks"]).items():
            if hooks.get(path, text) != text and dist.get_rank() == 0:
                log(
                    f"{path} has the hooks [{hooks[path]}], and had [{text}] when the state was "
                    "saved: register hooks before the loop, whose body a resumed script does not "
                    "execute again"
                )

    @torch.no_grad()
    def _set(self, owners: Mapping[str, Any], path: str, name: str, value: Any) -> None:
        if name == "requires_grad" and path not in owners:
            path, _, name = path.rpartition(".")
            parameter = owners[path]._parameters.get(name) if path in owners else None
            if parameter is not None:
                parameter.requires_grad_(value)
        elif path in owners:
            attributes = vars(owners[path])
            now = attributes.get(name)
            new = copy.deepcopy(value)
            if type(new) is torch.Tensor and not _fits(now, new):
                attributes[name] = new.to(self._device)
            elif type(new) is torch.Tensor:
                now.copy_(new)
            elif type(new) is type(now) and type(new) in (list, dict, set):
                now.clear()  # in place, as other objects may hold the same container
                now.extend(new) if type(new) is list else now.update(new)
            else:
                attributes[name] = new

    def _iterate_parts(self) -> Iterator[tuple[str, Any]]:
        for root, part in self._parts.items():
            if isinstance(part, nn.Module):
                yield from part.named_modules(prefix=root)
            else:
                yield root, part

    def _read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the settings by entry, and the names of hooks by module."""
        settings: dict[str, Any] = {}
        hooks: dict[str, str] = {}
        for path, part in self._iterate_parts():
            for name, value in iterate_attributes(part):
                if name == CALL:  # which Lockstep replaces to watch calls
                    if not is_plain_call(value):
                        settings[f"{path}.{name}"] = COMPILED
                    continue
                settings[f"{path}.{name}"] = value if type(value) in SCALARS else _hold(value)
            if isinstance(part, nn.Module):
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        settings[f"{path}.{name}.requires_grad"] = parameter.requires_grad
                hooks[path] = ", ".join(_name_hooks(part))
        return settings, hooks


def _hold(value: Any) -> Any:
    """Return a copy of a value, or a value with tensors, or a description."""
    tensors: dict[int, torch.Tensor] = {}
    waiting = [value]
    count = 0
    while waiting and count < LARGEST:
        part = waiting.pop()
        count += 1
        if type(part) is torch.Tensor and _can_save(part):
            tensors[id(part)] = part
        elif type(part) in CONTAINERS:
            waiting += [*part.keys(), *part.values()] if isinstance(part, dict) else part
        elif not (type(part) in SCALARS or _is_number(part)):
            is_inside = isinstance(value, (*CONTAINERS, torch.Tensor))
            return UNKNOWN if is_inside else Opaque(describe_value(value))
    if waiting:
        return UNKNOWN
    rest = copy.deepcopy(value, dict.fromkeys(tensors))
    versions = tuple((tensor, tensor._version) for tensor in tensors.values())
    return HeldSetting(value, rest, versions) if tensors else rest


def _can_save(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
    return is_dense and tensor.dtype in DTYPES and not tensor.requires_grad


def _is_number(value: Any) -> bool:
    is_numpy = isinstance(value, numpy.generic)
    return is_numpy and value.dtype.kind in "biufc" and value.itemsize <= 8


def _fits(now: Any, new: torch.Tensor) -> bool:
    return type(now) is torch.Tensor and (now.shape, now.dtype) == (new.shape, new.dtype)


def _is_same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if type(one) is not type(two) or type(one) is torch.Tensor:
        return False
    if isinstance(one, HeldSetting):
        pairs = zip(one.tensors, two.tensors, strict=False)
        is_same = all(a is b and version == other for (a, version), (b, other) in pairs)
        return is_same and len(one.tensors) == len(two.tensors) and _is_same(one.rest, two.rest)
    return bool(one == two) if type(one) in (set, frozenset) else repr(one) == repr(two)


def _name_hooks(part: nn.Module) -> Iterator[str]:
    """Yield the names of a module's hooks, without Lockstep's own, which depend on the layout."""
    for kind in HOOKS:
        for hook in getattr(part, kind).values():
            function = getattr(hook, "func", hook)  # of a partial
            module = getattr(function, "__module__", None) or type(function).__module__
            if not module.startswith("lockstep."):
                yield describe_value(hook)
