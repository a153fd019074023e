"""The composition of a model: the proof that its forward calls its blocks in turn, and no more.

    forward          tokens instead of the inputs and of the outputs of the blocks
    block 0(token)   must get the inputs of the batch; gives the next token
    block 1(token)   must get the output of block 0, and so on
    return token     must be the output of the last block

Stages call the blocks only, so all else that forward computes would be missing. A token holds no
values. Every function of torch is refused, and so are reads of shapes and values. Therefore a
forward that succeeds does the same with all inputs. Its branches may still depend on Python values,
such as an attribute that changes later, so it is checked again in every step and evaluation. That
computes nothing, and takes some microseconds per block.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dis import get_instructions
from functools import lru_cache
from types import FunctionType
from typing import Any, NoReturn

import numpy
import torch
from torch import nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode, resolve_name

from lockstep.kernel.errors import LayoutError
from lockstep.model.blocks import BlockSequence, is_sequence
from lockstep.model.call_site import find_source
from lockstep.model.python_state import find_python_state

__all__ = ["Composition"]

FIRST = 3
EVERY = 64
"""The first checks, every 64th, and those after a change of the model's attributes also compare
the Python objects that forward may change."""

HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")

CALL = "_compiled_call_impl"
"""The attribute of a module that a call of the module calls, if it is set."""

MISSING = object()

ADVICE = "pipeline stages call only the blocks: move all else that forward does into a block"


# It has many attributes: the model is replaced part by part while its forward is checked, and
# restored.
class Composition:
    """The blocks of a model, and the check of its forward.

    Args:
        model: The whole model; its blocks may be on the meta device.
        names: The names of its blocks, in order.
        outputs: The output of every block for some input, without tensors that need memory; None
            if every output is passed on as it is, as `nn.Sequential` does.
        device: The device of the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        outputs: Sequence[Any] | None,
        device: torch.device,
    ) -> None:
        self._model = model
        self._names = list(names)
        self._device = device
        self._kind = type(model).__name__
        self._blocks = [model.get_submodule(name) for name in names]
        self._outputs = [hide_values(part) for part in outputs or range(len(names))]
        parents = {name[:end] for name in names for end in _iterate_ends(name)}
        self._containers = {
            path: module
            for path in sorted(parents)
            if (module := model.get_submodule(path)) not in self._blocks
        }
        stubs = {block: self._make_stub(block) for block in self._blocks}
        modules = dict.fromkeys(part for block in stubs for part in block.modules())
        self._replacements = [
            (vars(module), name, hide_values(0))
            for module in modules
            for name in _find_assigned(inspect.unwrap(type(module).forward))
        ]
        self._replacements += [(vars(block), CALL, stub) for block, stub in stubs.items()]
        self._has_buffers = any(module._buffers for module in modules)
        self._checks = 0
        self._contents: list[list[int]] = []
        self._inputs: tuple[Any, dict[str, Any]] = (), {}
        self._called = 0
        self._is_running = False
        self._before: dict[nn.Module, Any] = {}
        self._refusal: LayoutError | None = None

    def apply_to(self, copy: nn.Module) -> Composition:
        """Return the composition of a copy of the model."""
        return Composition(copy, self._names, self._outputs, self._device)

    def check_hooks(self) -> None:
        """Raise LayoutError if a hook would not be called, because no stage calls its module."""
        for path, module in self._containers.items():
            for name in HOOKS:
                hooks = getattr(module, f"_{name}").values()
                if any(
                    not (getattr(hook, "__module__", "") or "").startswith("lockstep.")
                    for hook in hooks
                ):
                    where = f"module {path} of {self._kind}" if path else self._kind
                    raise LayoutError(
                        f"{where} has a hook in its {name}, and pipeline stages call only its "
                        "blocks: register the hook on a block"
                    )
        for name in HOOKS:
            if getattr(module_hooks, f"_global_{name}"):
                raise LayoutError(
                    f"there is a global module hook (torch.nn.modules.module._global_{name}), and "
                    f"pipeline stages call only the blocks of {self._kind}: register the hook on "
                    "the blocks"
                )

    def check(self, data: Any) -> None:
        """Check hooks, and what forward does with such inputs in the present mode of the model.

        Writes into Python's and numpy's global generators.

        Args:
            data: The inputs of a micro-batch, as `call_model` accepts them.

        Raises:
            LayoutError: Forward does not only call the blocks one after another.
        """
        self.check_hooks()
        args = data
        kwargs = {}
        if isinstance(data, torch.Tensor) or not isinstance(data, (tuple, list, Mapping)):
            args = (data,)
        elif isinstance(data, Mapping):
            args = ()
            kwargs = dict(data)
        takes_all = isinstance(self._model, BlockSequence) or len(args) == 1
        is_unchanged = [*self._model._modules.values()] == self._blocks
        if takes_all and is_unchanged and is_sequence(self._model):
            return
        self._inputs = hide_values((*args,)), hide_values(kwargs)
        self._called = 0
        self._refusal = None
        self._checks += 1
        contents = [[*map(id, vars(module).values())] for module in self._containers.values()]
        is_changed = contents != self._contents
        self._contents = contents
        is_thorough = is_changed or self._checks <= FIRST or self._checks % EVERY == 0
        random.seed(0)
        numpy.random.seed(0)
        with self._replace_blocks():
            state = find_python_state(self._model, self._kind) if is_thorough else None
            before = {} if state is None else state.snapshot()
            self._before = {block: _read_modules(block) for block in self._blocks if is_thorough}
            value = self._call()
            if state is not None and (entry := state.find_change(before)) is not None:
                self._refuse(f"changes {entry}")
        if self._called < len(self._blocks):
            self._refuse(f"does not call block {self._names[self._called]}")
        if not _is_same(value, self._outputs[-1]):
            self._refuse(f"does not return the output of block {self._names[-1]} unchanged")
        if (random.random(), numpy.random.random()) != UNUSED:
            self._refuse("draws random numbers from Python or numpy")

    def _call(self) -> Any:
        """Return the result of forward; raise the first refusal, even if forward caught it."""
        args, kwargs = self._inputs
        try:
            with _TokenMode(self._refuse, self._device):
                self._guard = GlobalStateGuard()
                self._settings = self._read_settings()
                self._is_running = True
                value = self._model(*args, **kwargs)
        except Exception as error:
            self._is_running = False
            if self._refusal is None and type(error).__module__.startswith("torch._dynamo."):
                self._refuse("is compiled by torch.compile, or calls what is")
            if self._refusal is None:
                first = (str(error).splitlines() or [""])[0]
                self._refuse(f"raises {type(error).__name__} ({first})")
        finally:
            self._is_running = False
        if self._refusal is not None:
            raise self._refusal
        return value

    @contextmanager
    def _replace_blocks(self) -> Iterator[None]:
        """Replace every call of a block in the body, hooks included, by its stub.

        What a block assigns to its attributes in forward is a token, too.
        """
        replaced = [
            (scope, name, scope.get(name, MISSING)) for scope, name, _ in self._replacements
        ]
        for scope, name, value in self._replacements:
            scope[name] = value
        try:
            yield
        finally:
            for scope, name, value in replaced:
                if value is MISSING:
                    del scope[name]
                else:
                    scope[name] = value

    def _make_stub(self, block: nn.Module) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            number = self._called
            if number == len(self._blocks) or block is not self._blocks[number]:
                self._refuse(f"calls block {self._names[self._blocks.index(block)]} out of turn")
            name = self._names[number]
            if not self._guard.check():
                self._refuse(f"calls block {name} with another {self._guard.reason().strip()}")
            if (settings := self._read_settings()) != self._settings:
                changed = next(n for n in settings if settings[n] != self._settings[n])
                self._refuse(f"calls block {name} with another {changed}")
            if self._before and self._before[block] != _read_modules(block):
                self._refuse(f"changes block {name} before it calls it")
            expected = ((self._outputs[number - 1],), {}) if number else self._inputs
            if not _is_same((args, kwargs), expected) and not _are_bound_alike(
                block, (args, kwargs), expected
            ):
                source = f"output of block {self._names[number - 1]}" if number else "inputs"
                self._refuse(f"does not pass the {source} on to block {name} unchanged")
            self._called += 1
            return self._outputs[number]

        return stub

    def _read_settings(self) -> dict[str, Any]:
        """Return settings of torch that a `with` statement changes, without those of the guard."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # Checkpointing computes the same, unless the second forward writes buffers again.
        if hooks and not self._has_buffers and hooks[0].__module__ == "torch.utils.checkpoint":
            hooks = None
        return {
            "inference mode": torch.is_inference_mode_enabled(),
            "pair of saved tensor hooks, as torch.utils.checkpoint does": hooks,
            "number of dispatch modes": torch._C._len_torch_dispatch_stack(),
            "number of function modes": torch._C._len_torch_function_stack(),
            "backend of scaled_dot_product_attention": (
                torch._C._get_math_sdp_enabled(),
                torch._C._get_flash_sdp_enabled(),
                torch._C._get_mem_efficient_sdp_enabled(),
            ),
            "use of oneDNN": torch._C._get_mkldnn_enabled(),
            "cache of parametrizations": nn.utils.parametrize._cache_enabled,
        }

    def _refuse(self, what: str) -> NoReturn:
        if self._refusal is None:
            where = f" ({find_source(sys._getframe())})" if self._is_running else ""
            self._refusal = LayoutError(
                f"the forward of {self._kind} does more than call its blocks one after another: it "
                f"{what}{where}; {ADVICE}"
            )
        raise self._refusal


class _TokenMode(TorchFunctionMode):
    """Refuses every function of torch except a few that compute nothing."""

    def __init__(self, refuse: Callable[[str], NoReturn], device: torch.device) -> None:
        super().__init__()
        self._refuse = refuse
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch._C._set_grad_enabled, torch.device):  # seen at the next block
            return func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return self._device
        name = resolve_name(func) or str(func)
        if name.startswith("profiler."):  # torch.profiler.record_function
            return func(*args, **(kwargs or {}))
        self._refuse(f"calls {name}")


def hide_values(value: Any) -> Any:
    """Return a nested value with a token in place of everything but None and containers."""
    return _hide(value, {})


def _hide(value: Any, tokens: dict[int, torch.Tensor]) -> Any:
    if value is None:
        return None
    if type(value) in (tuple, list):
        return type(value)(_hide(part, tokens) for part in value)
    if type(value) is dict:
        return {name: _hide(part, tokens) for name, part in value.items()}
    if id(value) not in tokens:
        tokens[id(value)] = torch.empty(0, device="meta")
    return tokens[id(value)]


@lru_cache(maxsize=1000)
def _find_assigned(function: Any) -> list[str]:
    """Return the names of the attributes that a function assigns."""
    if not isinstance(function, FunctionType):
        return []
    names = (op.argval for op in get_instructions(function) if op.opname == "STORE_ATTR")
    return list(dict.fromkeys(names))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two nested values contain the same objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_is_same, one.values(), other.values()))
    # Attributes of a tensor do not cross to another stage.
    return one is other and not getattr(one, "__dict__", None)


def _are_bound_alike(block: nn.Module, one: Any, other: Any) -> bool:
    """Return whether two calls of a block give its arguments the same values."""
    try:
        signature = inspect.signature(block.forward)
        bound = [signature.bind(*args, **kwargs) for args, kwargs in (one, other)]
    except (TypeError, ValueError):
        return False
    for call in bound:
        call.apply_defaults()
    return _is_same(*(dict(call.arguments) for call in bound))


def _read_modules(block: nn.Module) -> list[Any]:
    """Return the modes, the numbers of hooks and the ids of the attributes of a block's modules."""
    return [
        (
            module.training,
            [len(getattr(module, f"_{name}")) for name in HOOKS],
            {name: id(value) for name, value in vars(module).items()},
        )
        for module in block.modules()
    ]


def _iterate_ends(name: str) -> Iterator[int]:
    """Return the lengths of the paths of all modules that contain a module."""
    yield 0
    yield from (number for number, character in enumerate(name) if character == ".")


UNUSED = random.Random(0).random(), numpy.random.RandomState(0).random()
"""The first numbers of Python's and numpy's generators that are seeded with 0."""
