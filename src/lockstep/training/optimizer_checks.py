"""The requirements on an optimizer, checked before the first step.

    complete state    a copy that continues from the state dict computes the same bits
    elementwise       where each rank steps a part of the parameters: no hooks, and it treats each
                      parameter by itself (stages), or each element (shared and sharded storage)

The optimizers of torch are known. Others declare what they treat by itself, and the completeness of
their state is probed on copies that step small parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lockstep.checksum import checksum
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.seeds import isolated, seed_all
from lockstep.messages import log

__all__ = [
    "find_foreign_code",
    "find_nested",
    "is_torchs",
    "load_whole_state",
    "make_twin",
    "require_complete_state",
    "require_elementwise",
    "require_parameterwise",
    "require_state_of",
    "without_hooks",
]

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip
"""The optimizers of torch that treat each element of a parameter by itself."""

STEPS = 61
"""Steps before and after the state dict is read: enough for slow weights that move every 50.

A prime number, which finds counters of shorter periods.
"""

FEW_STEPS = 11
"""The same with whole parameters, each of which may have hundreds of megabytes of gradients."""

SMALL = 4  # elements per dimension of a small parameter
GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

Names = Mapping[torch.Tensor, str]
NamedTensors = dict[str, torch.Tensor]  # by the parameter's name


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


# --- parts of the parameters -----------------------------------------------------------------


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise LayoutError for an optimizer that may not be stepped on slices of parameters."""
    name = type(optimizer).__name__
    is_declared = getattr(optimizer, "lockstep_elementwise", False)
    if type(optimizer) in ELEMENTWISE or is_declared:
        return
    if is_torchs(optimizer):
        raise LayoutError(
            f"torch's {name} does not treat each element of a parameter by itself, so it cannot "
            "step slices of parameters",
            ': use another optimizer, such as AdamW, or train with storage="replicated"',
        )
    raise LayoutError(
        f"{name} is not known to treat each element of a parameter by itself, so it cannot "
        "step slices of parameters",
        f": if it does, set {name}.lockstep_elementwise = True, and otherwise train with "
        'storage="replicated"',
    )


def require_parameterwise(optimizer: Optimizer) -> None:
    """Raise LayoutError for an optimizer that may not be stepped on some of the parameters."""
    name = type(optimizer).__name__
    declared = ("lockstep_elementwise", "lockstep_parameterwise")
    if not is_torchs(optimizer) and not any(getattr(optimizer, one, False) for one in declared):
        raise LayoutError(
            f"{name} is not known to treat each parameter by itself, so it cannot step the "
            f"parameters of a pipeline stage: if it does, and draws no random numbers, set "
            f"{name}.lockstep_parameterwise = True, and otherwise train without stages"
        )


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether class and step are those of torch, which could have been patched."""
    step = inspect.unwrap(type(optimizer).step)
    modules = type(optimizer).__module__, step.__module__
    return all(f"{module}.".startswith("torch.optim.") for module in modules)


# --- a complete state ------------------------------------------------------------------------


def require_complete_state(
    optimizer: Optimizer, names: Names, sparse: Collection[torch.Tensor], device: torch.device
) -> None:
    """Raise UsageError if the optimizer's state dict lacks a value that its steps depend on.

    A step that raises on every copy is left to the first real step, which raises the same error.

    Args:
        optimizer: The optimizer, of which copies step.
        names: The names of the model's parameters.
        sparse: The parameters whose gradients are sparse.
        device: The device of the parameters.
    """
    if is_torchs(optimizer):
        return
    kind = type(optimizer).__name__
    advice = (
        "keep every value that a step changes in optimizer.state[parameter] or in param_groups; "
        "pass several optimizers as a list"
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    originals = {names.get(parameter, str(n)): parameter for n, parameter in enumerate(parameters)}
    with _probing(names, device):
        # It may hold tensors that fit whole parameters only, such as all of them in one vector.
        whole_size = max((size for p in parameters for size in p.shape), default=1)
        for largest, steps in ((SMALL, STEPS), (whole_size, FEW_STEPS)):
            values, gradients = _draw(optimizer, originals, sparse, device, largest, 2 * steps)
            try:
                whole = _Copy(optimizer, originals, values)
                whole.step(gradients[:steps])
                state = copy.deepcopy(whole.optimizer.state_dict())
                middle = {name: one.detach().clone() for name, one in whole.parameters.items()}
                seed_all(1, device)
                whole.step(gradients[steps:])
                expected = dict(whole.hash_attributes())
                break
            except Exception as error:  # of any kind: a real step may work, or will raise it
                failure = error
        else:
            if not dist.is_initialized() or dist.get_rank() == 0:
                log(
                    f"cannot check that state_dict() of {kind} is complete, because a copy of it "
                    f"raised {type(failure).__name__}: {failure}"
                )
            return
        if not all(isinstance(key, torch.Tensor) for key in whole.optimizer.state):
            raise UsageError(f"{kind} keeps a state that belongs to no parameter: {advice}")
        try:
            resumed = _Copy(optimizer, originals, middle)
            load_whole_state(resumed.optimizer, state)
            seed_all(1, device)
            resumed.step(gradients[steps:])
            hidden = [n for n, hashes in resumed.hash_attributes() if hashes != expected.get(n)]
        except Exception as error:
            raise UsageError(
                f"{kind} does not continue from its state_dict(), of which a checkpoint has the "
                f'entries "state" and "param_groups": {type(error).__name__}: {error}; {advice}'
            ) from error
        if hidden or whole.hash_parameters() != resumed.hash_parameters():
            raise UsageError(
                f"{kind} changes {(hidden or ['a value'])[0]}, which its state_dict() does not "
                f"contain, so a resumed run would give other bits: {advice}"
            )


def require_state_of(optimizers: Sequence[Optimizer], saved: Any) -> None:
    """Raise UsageError if a state dict is not one of these optimizers, one after another.

    torch loads that of another class, and fails in the next step.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise UsageError(
            'the state of the optimizer lacks the entries "state" and "param_groups": pass what '
            "state_dict() of a trainer with this optimizer has returned"
        )
    count = sum(len(optimizer.param_groups) for optimizer in optimizers)
    if len(saved["param_groups"]) != count:
        raise UsageError(
            f"the state is one of an optimizer with {len(saved['param_groups'])} parameter groups, "
            f"and here it has {count}: make the same groups before the state is loaded"
        )
    groups = iter(saved["param_groups"])
    for optimizer in optimizers:
        own = [{**next(groups)} for _ in optimizer.param_groups]
        if not is_torchs(optimizer):
            continue
        # Adds the options that earlier versions of torch did not have.
        copy.copy(optimizer).__setstate__({"state": {}, "param_groups": own})
        for group, here in zip(own, optimizer.param_groups, strict=True):
            if missing := sorted((optimizer.defaults.keys() & here.keys()) - group.keys()):
                raise UsageError(
                    f"the state is one of another optimizer than {type(optimizer).__name__}: its "
                    f"parameter groups have no {missing[0]!r}; load it into the optimizer with "
                    "which it was saved"
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


def make_twin(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Any, Any]
) -> Optimizer:
    """Return an optimizer with the same attributes that steps other parameters, without hooks.

    Call its `step` inside `without_hooks`.

    Args:
        optimizer: The optimizer.
        groups: The parameter groups of the twin.
        state: The state of the twin.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    # A scheduler puts a `step` on the object, which would step the original.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    hooks: dict[str, Any] = {name: {} for name in own if name.endswith("_hooks")}
    twin.__dict__.update({**own, **hooks, "param_groups": groups, "state": state})
    return twin


def find_nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer, and those that it holds in attributes."""
    held = list[Any]()
    for value in vars(optimizer).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    return [optimizer, *(value for value in held if isinstance(value, Optimizer))]


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


def _draw(
    optimizer: Optimizer,
    originals: Mapping[str, torch.Tensor],
    sparse: Collection[torch.Tensor],
    device: torch.device,
    largest: int,
    steps: int,
) -> tuple[NamedTensors, list[NamedTensors]]:
    """Return small random parameters, and the gradients of each step for some of them.

    Gradients are drawn for two parameters of each parameter group, dtype, number of dimensions and
    kind of gradient.
    """
    random = torch.Generator().manual_seed(0)
    values: NamedTensors = {}
    chosen: dict[tuple[Any, ...], list[str]] = {}
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    for group, (name, parameter) in zip(groups, originals.items(), strict=True):
        shape = [min(size, largest) for size in parameter.shape]
        values[name] = torch.randn(shape, generator=random).to(device, parameter.dtype)
        kind = id(group), parameter.dtype, parameter.dim(), parameter in sparse
        if parameter.requires_grad:
            chosen.setdefault(kind, []).append(name)
    gradients = list[NamedTensors]()
    for _ in range(steps):
        gradients.append({})
        for name in [name for kind in chosen.values() for name in kind[:2]]:
            like = values[name]
            gradient = torch.randn(like.shape, generator=random).to(device, like.dtype)
            if originals[name] in sparse:
                gradient[:1] = 0
                gradient = gradient.to_sparse(1).coalesce()
            gradients[-1][name] = gradient
    return values, gradients


class _Copy:
    """A copy of an optimizer, and its parameters by name.

    Args:
        optimizer: The optimizer, which has not stepped.
        originals: Its parameters.
        values: The values of those of the copy.
    """

    def __init__(
        self, optimizer: Optimizer, originals: Mapping[str, torch.Tensor], values: NamedTensors
    ) -> None:
        memo: dict[int, Any] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, original in originals.items():
            own = nn.Parameter(values[name].clone(), requires_grad=original.requires_grad)
            self.parameters[name] = own
            memo[id(original)] = own
        nested = find_nested(optimizer)
        cuts = {originals[name].shape: tuple(map(slice, one.shape)) for name, one in values.items()}
        # Optimizer.__getstate__ leaves attributes of subclasses out.
        memo |= {id(inner): object.__new__(type(inner)) for inner in nested}
        for inner in nested:
            attributes = {
                name: OrderedDict() if name.endswith("_hooks") else value
                for name, value in vars(inner).items()
                if name != "step"
            }
            whole = dict(memo)
            copy.deepcopy(attributes, whole)
            for key, value in whole.items():  # such as slow weights, cut as their parameter is
                if isinstance(value, torch.Tensor) and value.shape in cuts and key not in memo:
                    memo[key] = value[cuts[value.shape]].clone()
            vars(memo[id(inner)]).update(copy.deepcopy(attributes, memo))
        self.optimizer: Optimizer = memo[id(optimizer)]

    def step(self, gradients: Sequence[NamedTensors]) -> None:
        """Step once for each entry."""
        for gradient in gradients:
            for name, parameter in self.parameters.items():
                parameter.grad = gradient[name].clone() if name in gradient else None
            type(self.optimizer).step(self.optimizer)

    def hash_parameters(self) -> list[int]:
        """Return hashes of the parameters."""
        return [checksum(parameter) for parameter in self.parameters.values()]

    def hash_attributes(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each attribute except the state and the groups, with hashes of its tensors.

        A tensor that changes in every step may be read in few of them.
        """
        kept = self.optimizer.state, self.optimizer.param_groups, *self.parameters.values()
        for name, value in vars(self.optimizer).items():
            reached: dict[int, Any] = {id(one): None for one in kept}
            copy.deepcopy(value, reached)
            tensors = [one for one in reached.values() if isinstance(one, torch.Tensor)]
            yield name, [checksum(tensor) for tensor in tensors]
