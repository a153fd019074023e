"""Probes of an optimizer: copies of it step small parameters, before the first step.

    complete state    a copy that continues from the state dict computes the same bits
    stages            a parameter gets the same bits if others are on the meta device
    shared storage    an element gets the same bits if the pieces of a parameter are stepped alone

The optimizers of torch pass by construction and are not probed. Copies have no hooks, and the
generators of random numbers are restored. A step that raises on every copy is left to the first
real step, which raises the same error.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lockstep.checksum import checksum
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.seeds import isolated, seed_all
from lockstep.launcher.world import world
from lockstep.messages import log
from lockstep.model.generator_states import state_of_others, state_of_torch

__all__ = [
    "find_foreign_code",
    "find_nested",
    "load_whole_state",
    "require_complete_state",
    "require_separate",
    "without_hooks",
]

STEPS = 10
"""Steps before and after the state dict is read: enough for slow weights that move every 10."""

SMALL = 4  # elements per dimension of a small parameter
PIECE = 64  # elements, a multiple of the length of vector instructions
GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

Names = Mapping[torch.Tensor, str]
Gradients = Sequence[Mapping[str, torch.Tensor]]  # per step, by the parameter's name

OPAQUE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, str, bytes)


# --- hooks and replaced methods --------------------------------------------------------------


@contextmanager
def without_hooks() -> Iterator[None]:
    """Call no hooks that are registered for the steps of all optimizers."""
    kept = {name: getattr(torch_optimizer, name) for name in GLOBAL_HOOKS}
    try:
        for name in GLOBAL_HOOKS:
            setattr(torch_optimizer, name, OrderedDict())
        yield
    finally:
        for name, hooks in kept.items():
            setattr(torch_optimizer, name, hooks)


def find_foreign_code(optimizers: Sequence[Optimizer]) -> str:
    """Describe code that a step calls in addition to the optimizer's class; "" if there is none.

    Such code is a hook, or a `step` that was replaced on the object. torch's own hooks, and those
    with the attribute `lockstep_elementwise`, are permitted.
    """
    for optimizer in optimizers:
        own = vars(optimizer)
        for hooks, method in (
            (own.get("_optimizer_step_pre_hooks", {}), "register_step_pre_hook"),
            (own.get("_optimizer_step_post_hooks", {}), "register_step_post_hook"),
            (torch_optimizer._global_optimizer_pre_hooks, "register_optimizer_step_pre_hook"),
            (torch_optimizer._global_optimizer_post_hooks, "register_optimizer_step_post_hook"),
        ):
            for hook in hooks.values():
                is_torchs = (getattr(hook, "__module__", None) or "").startswith("torch.")
                if not is_torchs and not getattr(hook, "lockstep_elementwise", False):
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    kind = type(optimizer).__name__
                    return f"the hook {name.rpartition('.')[2]} of {kind} ({method})"
        step = own.get("step")
        # Schedulers wrap the method of the class.
        if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:
            return f"the method step that was replaced on the object of {type(optimizer).__name__}"
    return ""


# --- probes ----------------------------------------------------------------------------------


def require_complete_state(
    optimizer: Optimizer, names: Names, sparse: Collection[torch.Tensor], device: torch.device
) -> None:
    """Raise UsageError if the optimizer's state dict lacks a value that its steps change.

    Args:
        optimizer: An optimizer that has not stepped.
        names: The names of the model's parameters.
        sparse: The parameters whose gradients are sparse.
        device: The device of the parameters.
    """
    if _is_torchs(optimizer):
        return
    kind = type(optimizer).__name__
    advice = (
        "keep every value that a step changes in optimizer.state[parameter] or in param_groups; "
        "for several optimizers pass a list of ls.OptimizerConfig to the trainer"
    )
    with _probing(names, device):
        try:
            trial = _Trial(optimizer, names, sparse, device)
        except Exception as error:  # of any kind: a real step may work, or will raise it
            if world().rank == 0:
                log(
                    f"cannot check that state_dict() of {kind} is complete, because a copy of it "
                    f"raised {type(error).__name__}: {error}"
                )
            return
        if not all(isinstance(key, torch.Tensor) for key in trial.whole.optimizer.state):
            raise UsageError(f"{kind} keeps a state that belongs to no parameter: {advice}")
        try:
            resumed = trial.make_copy()
            for name, parameter in resumed.parameters.items():
                parameter.data.copy_(trial.values[name])
            load_whole_state(resumed.optimizer, trial.state)
            seed_all(1, device)
            resumed.step(trial.gradients[STEPS:])
        except Exception as error:
            raise UsageError(
                f"{kind} does not continue from its state_dict(), of which a checkpoint has the "
                f'entries "state" and "param_groups": {type(error).__name__}: {error}; {advice}'
            ) from error
        ours, theirs = trial.whole.hash_reachable(), resumed.hash_reachable()
        differing = [path for path in ours if ours[path] != theirs.get(path)]
        if differing or trial.whole.hash_parameters() != resumed.hash_parameters():
            hidden = [path for path in differing if not path.startswith("state[")]
            raise UsageError(
                f"{kind} changes {(hidden or ['a value'])[0]}, which its state_dict() does not "
                f"contain, so a resumed run would give other bits: {advice}"
            )


def require_separate(
    optimizer: Optimizer,
    names: Names,
    sparse: Collection[torch.Tensor],
    device: torch.device,
    *,
    elements: bool = False,
) -> None:
    """Raise LayoutError if a step on a part of the model gives other bits than the whole step.

    Args:
        optimizer: An optimizer that has not stepped.
        names: The names of the model's parameters.
        sparse: The parameters whose gradients are sparse.
        device: The device of the parameters.
        elements: Whether a part has slices of the parameters, instead of some whole parameters.
    """
    if _is_torchs(optimizer):
        return
    kind = type(optimizer).__name__
    what, others = ("element", "elements") if elements else ("parameter", "parameters or gradients")
    advice = (
        'train without stages and with storage="replicated", or with an optimizer that treats '
        f"each {what} by itself"
    )
    with _probing(names, device):
        try:
            trial = _Trial(optimizer, names, sparse, device, (3 * PIECE,) if elements else None)
        except Exception:  # the first real step raises it
            return
        for state in [] if elements else trial.whole.optimizer.state.values():
            for key, value in state.items():
                if not isinstance(value, (torch.Tensor, int, float, str, type(None))):
                    raise LayoutError(
                        f"{kind} keeps {key!r} as a {type(value).__name__}, which cannot be "
                        f"gathered from stages: keep tensors and numbers, or {advice}"
                    )
        expected = trial.whole.hash_parameters()
        for here in [trial.chosen] if elements else [trial.chosen[::2], trial.chosen[1::2]]:
            part, failure = trial.make_copy(here), ""
            try:
                gradients = [{name: step[name] for name in here} for step in trial.gradients]
                if elements:
                    part.step_pieces(gradients, (0, PIECE, 3 * PIECE))
                else:
                    part.step(gradients)
            except Exception as error:
                failure = f" ({type(error).__name__}: {error})"
            hashes = part.hash_parameters()
            if failure or trial.has_drawn or any(hashes[name] != expected[name] for name in here):
                how = "draws random numbers" if trial.has_drawn else f"reads other {others}"
                raise LayoutError(
                    f"{kind} {how} when it updates a part of the model, as each rank does"
                    f"{failure}: {advice}"
                )


def load_whole_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict, and keep the dtypes and scalars with which it was saved.

    torch converts all but "step" to the parameter's dtype, so NAdam's product of momenta, ASGD's
    averaging coefficients and float32 moments would be rounded for bfloat16 parameters.
    """
    optimizer.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    state = optimizer.state
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            loaded = state[parameter].get(key) if isinstance(value, torch.Tensor) else None
            if loaded is not None and (value.dim() == 0 or value.dtype != loaded.dtype):
                state[parameter][key] = value.detach().clone().to(loaded.device)


def find_nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer, and those that it holds in attributes."""
    if _is_torchs(optimizer):
        return [optimizer]
    return [value for _, value in _reach(optimizer, {}) if isinstance(value, Optimizer)]


def _is_torchs(optimizer: Optimizer) -> bool:
    """Return whether class and step are those of torch, which could have been patched."""
    step = inspect.unwrap(type(optimizer).step)
    return all(part.__module__.startswith("torch.optim.") for part in (type(optimizer), step))


@contextmanager
def _probing(names: Names, device: torch.device) -> Iterator[None]:
    """Call no hooks, restore the generators, and require that the model is not changed."""
    versions = [parameter._version for parameter in names]
    with without_hooks(), isolated(device, everything=True):
        seed_all(0, device)
        yield
    changed = [name for parameter, name in names.items() if versions.pop(0) != parameter._version]
    if changed:
        raise UsageError(
            f"the optimizer writes to {changed[0]} through another reference than its param_groups "
            "(a closure, a global): update only the parameters in its groups"
        )


# --- copies ----------------------------------------------------------------------------------


class _Trial:
    """Small parameters that stand for those of an optimizer, and random gradients for them.

    Raises the exception of the optimizer if its copies cannot step.

    Attributes:
        chosen: The names of the parameters that get gradients: two for each parameter group,
            dtype, number of dimensions and kind of gradient.
        gradients: The gradients of each step.
        whole: A copy that has taken all steps with all gradients.
        state: Its state dict after `STEPS` steps; it has taken as many again.
        values: Its parameters at that time.
        has_drawn: Whether its steps drew random numbers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Names,
        sparse: Collection[torch.Tensor],
        device: torch.device,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self._optimizer, self._device = optimizer, device
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._originals = {
            names.get(parameter, str(n)): parameter for n, parameter in enumerate(parameters)
        }
        self._sparse = {name for name, parameter in self._originals.items() if parameter in sparse}
        self.chosen = self._choose()
        sizes = [size for parameter in parameters for size in parameter.shape]
        for largest in (SMALL, max([SMALL, *sizes])):
            random = torch.Generator().manual_seed(0)
            self._values = {
                name: self._draw(
                    random, shape or [min(s, largest) for s in parameter.shape], parameter
                )
                for name, parameter in self._originals.items()
            }
            self.gradients = [self._draw_gradients(random) for _ in range(2 * STEPS)]
            try:
                self.whole = self.make_copy()
                self.whole.step(self.gradients[:STEPS])
                self.state = copy.deepcopy(self.whole.optimizer.state_dict())
                self.values = {n: p.detach().clone() for n, p in self.whole.parameters.items()}
                seed_all(1, device)
                generators = state_of_torch(device), state_of_others()
                self.whole.step(self.gradients[STEPS:])
                self.has_drawn = generators != (state_of_torch(device), state_of_others())
                return
            except Exception:  # it may hold tensors with the shapes of its parameters
                if largest > SMALL or shape is not None:
                    raise
        raise AssertionError("unreachable")

    def _choose(self) -> list[str]:
        counts: dict[tuple[Any, ...], int] = {}
        group_of = {
            parameter: n
            for n, g in enumerate(self._optimizer.param_groups)
            for parameter in g["params"]
        }
        chosen = []
        for name, parameter in self._originals.items():
            kind = group_of[parameter], parameter.dtype, parameter.dim(), name in self._sparse
            counts[kind] = counts.get(kind, 0) + parameter.requires_grad
            if parameter.requires_grad and counts[kind] <= 2:
                chosen.append(name)
        return chosen

    def _draw(
        self, random: torch.Generator, shape: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(self._device, like.dtype)

    def _draw_gradients(self, random: torch.Generator) -> dict[str, torch.Tensor]:
        values = {}
        for number, name in enumerate(self.chosen):
            value = self._values[name]
            gradient = self._draw(random, value.shape, value) * (1 + number)
            if name in self._sparse:
                gradient[:1] = 0
                gradient = gradient.to_sparse(1).coalesce()
            values[name] = gradient
        return values

    def make_copy(self, here: Collection[str] | None = None) -> _Copy:
        """Return a copy of the optimizer; chosen parameters that are not `here` are on meta."""
        parameters: dict[str, nn.Parameter] = {}
        memo: dict[int, Any] = {}
        for name, original in self._originals.items():
            value = self._values[name].clone()
            if here is not None and name in self.chosen and name not in here:
                value = value.to("meta")
            parameters[name] = nn.Parameter(value, requires_grad=original.requires_grad)
            memo[id(original)] = parameters[name]
        nested = find_nested(self._optimizer)
        # Optimizer.__getstate__ leaves attributes of subclasses out.
        memo |= {id(inner): object.__new__(type(inner)) for inner in nested}
        for inner in nested:
            attributes = {
                name: OrderedDict() if name.endswith("_hooks") else value
                for name, value in vars(inner).items()
                if name != "step"
            }
            vars(memo[id(inner)]).update(copy.deepcopy(attributes, memo))
        return _Copy(memo[id(self._optimizer)], parameters, self.chosen)


class _Copy:
    """A copy of an optimizer, its parameters by name, and the names of those with gradients."""

    def __init__(
        self, optimizer: Optimizer, parameters: dict[str, nn.Parameter], chosen: Sequence[str]
    ) -> None:
        self.optimizer, self.parameters, self._chosen = optimizer, parameters, chosen

    def step(self, gradients: Gradients) -> None:
        """Step once for each entry."""
        for gradient in gradients:
            for name, parameter in self.parameters.items():
                parameter.grad = gradient[name].clone() if name in gradient else None
            type(self.optimizer).step(self.optimizer)

    def step_pieces(self, gradients: Gradients, cuts: Sequence[int]) -> None:
        """Step pieces of the parameters one by one, as shared storage does."""
        names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in self.parameters.items()
        }
        chunks = [
            (group, name, slice(begin, end), nn.Parameter(parameter.detach()[begin:end]))
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if (name := names[parameter]) in self._chosen
            for begin, end in pairwise(cuts)
        ]
        for gradient in gradients:
            for group, name, part, piece in chunks:
                piece.grad = gradient[name][part].clone()
                group["params"] = [piece]
                self.optimizer.param_groups = [group]
                type(self.optimizer).step(self.optimizer)

    def hash_parameters(self) -> dict[str, int]:
        """Return hashes of the parameters with gradients."""
        return {name: checksum(self.parameters[name]) for name in self._chosen}

    def hash_reachable(self) -> dict[str, int]:
        """Return hashes of the tensors in the optimizer's attributes, by their paths."""
        names: dict[Any, str] = {parameter: name for name, parameter in self.parameters.items()}
        return {
            path: checksum(value)
            for path, value in _reach(self.optimizer, names)
            if isinstance(value, torch.Tensor) and value not in names
        }


def _reach(root: Any, names: Mapping[Any, str]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and optimizers in attributes and containers, with their paths.

    Args:
        root: The object to begin with.
        names: The names of parameters, which are keys of states.
    """
    seen: set[int] = set()
    queue = deque([("", root)])
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, OPAQUE):
            continue
        seen.add(id(value))
        members: Iterable[tuple[str, Any]] = ()
        if isinstance(value, (torch.Tensor, Optimizer)):
            yield path, value
        if isinstance(value, torch.Tensor):
            continue
        if isinstance(value, Mapping):
            members = [
                (f"{path}[{(names.get(key, '?') if isinstance(key, torch.Tensor) else key)!r}]", v)
                for key, v in value.items()
            ]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            members = [(f"{path}[{number}]", member) for number, member in enumerate(value)]
        elif hasattr(value, "__dict__"):
            members = [
                (f"{path}.{name}".lstrip("."), member) for name, member in vars(value).items()
            ]
        queue.extend(members)
