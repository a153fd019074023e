"""Deferred initialization: models whose tensors get memory only on the ranks that need them.

    given as                        on a rank that needs the block    on other ranks
    factories [make_0, make_1, ...] called                            called under
                                                                      torch.device("meta")
    modules on the meta device      get memory, reset_parameters()    stay as they are
    modules with weights            moved to the rank's device        freed, once partitioned

A model on the meta device that is not a list gets its memory module by module (`initialize`).

A tensor on the meta device has a name, a shape, strides and a dtype, but no memory. The random
numbers of block b are seeded with key(seed, b), so its initial weights depend neither on the
rank that builds it nor on the other blocks that this rank builds.

A parameter stays the same object when it gets or loses its memory, so that optimizers, tied
modules and recurrent layers, which hold weak references to their weights, still refer to it.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.seeds import isolated, key, seed_all
from lockstep.model.blocks import BlockSequence
from lockstep.sharded_tensors import is_sharded, read_version

__all__ = [
    "BlockLike",
    "BlocksLike",
    "ModelLike",
    "Released",
    "build",
    "build_sequence",
    "find_uninitialized",
    "initialize",
    "make_meta",
    "make_released",
    "materialize",
    "materialize_block",
    "move_to_device",
    "named_tensors",
    "release",
]

BlockLike = nn.Module | Callable[[], nn.Module]
BlocksLike = BlockLike | Sequence[BlockLike]
ModelLike = nn.Module | Sequence[BlockLike]


def build(blocks: BlocksLike, seed: int = 0, device: str | torch.device = "cpu") -> nn.Module:
    """Build a model with the same initial weights on every rank.

    Args:
        blocks: A list of modules, or of callables that return one, which becomes an
            `nn.Sequential`; or one module or callable, which becomes the model itself. Modules
            on the meta device get memory and reset their parameters; other modules keep their
            weights.
        seed: The seed of the initial weights.
        device: The device of the model.

    Raises:
        UsageError: A callable does not return a module, or a module on the meta device has no
            method `reset_parameters()`.
    """
    if isinstance(blocks, Sequence):
        return build_sequence(blocks, range(len(blocks)), seed, device)
    return materialize_block(blocks, seed, 0, device)


def build_sequence(
    blocks: Sequence[BlockLike],
    held: Collection[int],
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> nn.Sequential:
    """Build a sequence of blocks, of which this rank holds some.

    If blocks on the meta device share tensors, all blocks are built, since the first block with a
    tensor initializes it.

    Args:
        blocks: Modules or callables that return one.
        held: The numbers of the blocks that this rank holds. The others stay on the meta
            device, unless they were given with weights.
        seed: The seed of the initial weights.
        device: The device of the held blocks.
    """
    here = range(len(blocks)) if _has_shared_tensors(blocks) else held
    built = {number: materialize_block(blocks[number], seed, number, device) for number in here}
    used = {id(tensor) for block in built.values() for tensor in named_tensors(block).values()}
    return BlockSequence(
        *(
            built[number] if number in built else _build_on_meta(block, seed, number, device, used)
            for number, block in enumerate(blocks)
        )
    )


def materialize_block(
    block: BlockLike, seed: int, number: int, device: str | torch.device = "cpu"
) -> nn.Module:
    """Return block `number`, with memory on `device`; the generators are restored."""
    device = torch.device(device)
    with isolated(device, everything=True), device:
        seed_all(key(seed, number), device)
        made = _made(block, number)
        if any(tensor.is_meta for tensor in named_tensors(made).values()):
            _reset(made, number, device)
    return made.to(device)


def _build_on_meta(
    block: BlockLike, seed: int, number: int, device: str | torch.device, used: Collection[int]
) -> nn.Module:
    """Return block `number` on the meta device, except the tensors whose id is in `used`.

    A factory that cannot run on the meta device runs with memory, which is freed at once.
    """
    if isinstance(block, nn.Module):
        return move_to_device(block, device)
    try:
        with isolated(everything=True), warnings.catch_warnings(), torch.device("meta"):
            seed_all(key(seed, number))  # attributes may be random, and ranks compare them
            # torch warns for each weight that a factory loads into a meta tensor.
            warnings.filterwarnings("ignore", ".*from a non-meta parameter", UserWarning)
            made = _made(block, number)
    except Exception:  # perhaps because of the meta device; else it is raised again below
        made = materialize_block(block, seed, number, device)
    kept = {name for name, tensor in named_tensors(made).items() if id(tensor) in used}
    release(made, kept.__contains__)
    return made


def _made(block: BlockLike, number: int) -> nn.Module:
    made = block if isinstance(block, nn.Module) or not callable(block) else block()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"block {number} is a {type(made).__name__}: pass modules, or callables without "
            "arguments that return one"
        )
    return made


def _has_shared_tensors(blocks: Sequence[BlockLike]) -> bool:
    """Return whether several blocks contain the same tensor on the meta device."""
    given = [block for block in blocks if isinstance(block, nn.Module)]
    tensors = [tensor for block in given for tensor in named_tensors(block).values()]
    uses = Counter(id(tensor) for tensor in tensors if tensor.is_meta)
    return any(count > 1 for count in uses.values())


def _reset(module: nn.Module, number: int, device: str | torch.device) -> None:
    """Give memory to tensors on the meta device, and reset the parameters of their modules."""
    uninitialized = [
        (name, part)
        for name, part in module.named_modules()
        if any(tensor.is_meta for tensor in [*part.parameters(False), *part.buffers(False)])
    ]
    materialize(module, device)
    for name, part in uninitialized:
        if (reset := _find_reset(part)) is None:
            where = f"{name} of block {number}" if name else f"block {number}"
            raise UsageError(
                f"{where}, a {type(part).__name__}, is on the meta device and has no "
                "method reset_parameters(): pass a callable that builds the block instead"
            )
        reset()


def _find_reset(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that initializes the tensors of a module; None if it has none."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def find_uninitialized(model: nn.Module, missing: Collection[str]) -> list[str]:
    """Return those of the missing tensors whose module has no method `reset_parameters()`."""
    return [n for n in missing if not _find_reset(model.get_submodule(n.rpartition(".")[0]))]


def initialize(
    model: nn.Module, missing: Collection[str], device: str | torch.device
) -> Iterator[str]:
    """Initialize tensors on the meta device; yield the name of each module that has its weights.

    A module comes after its children, as constructors end. `reset_parameters` therefore draws the
    numbers from torch's generators that it draws in the constructor of a model with memory.
    Tensors of a module without this method are filled with NaN.

    Args:
        model: The model.
        missing: The names of the tensors to initialize.
        device: Their device.

    Raises:
        UsageError: A module initializes parameters that have been sharded by now, or integers
            without a method.
    """
    device = torch.device(device)
    missing = frozenset(missing)
    # Not the tensors, which are freed once their block is sharded.
    known = {id(tensor) for name, tensor in named_tensors(model).items() if name in missing}
    owners = {name.rpartition(".")[0] for name in missing}
    # Other modules may have a method for the parameters of their children, if all are missing.
    chosen = owners | {
        name
        for name, part in model.named_modules()
        if (own := {id(parameter) for parameter in part.parameters()}) and own <= known
    }
    buffers = {name for name, _ in model.named_buffers() if name in missing}
    materialize(model, device, buffers.__contains__)  # at once, since blocks may share some
    for name, part in _children_first(model):
        for parameter in part.parameters(recurse=False):
            if id(parameter) in known and parameter.is_meta:
                _reallocate(parameter, device)
        if name in chosen and (reset := _find_reset(part)):
            with device:
                _reset_unsharded(part, reset, name)
        elif name in owners:
            for entry, tensor in (part._parameters | part._buffers).items():
                if tensor is not None and (f"{name}.{entry}" if name else entry) in missing:
                    _fill_with_nan(tensor, part, name)
        yield name


def _children_first(
    model: nn.Module, name: str = "", known: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of a model once, after its children."""
    known = set() if known is None else known
    known.add(model)
    for child, part in model.named_children():
        if part not in known:
            yield from _children_first(part, f"{name}.{child}" if name else child, known)
    yield name, model


def _reset_unsharded(module: nn.Module, reset: Callable[[], object], name: str) -> None:
    """Call a module's method; raise UsageError if it writes sharded parameters of its children."""
    sharded = [parameter for parameter in module.parameters() if is_sharded(parameter)]
    before = [read_version(parameter) for parameter in sharded]
    reset()
    if before != [read_version(parameter) for parameter in sharded]:
        raise UsageError(
            f"reset_parameters() of {name or 'the model'}, a {type(module).__name__}, initializes "
            "parameters of blocks, which are sharded by then: let each block initialize its own, "
            "or build the model with memory"
        )


@torch.no_grad()
def _fill_with_nan(tensor: torch.Tensor, module: nn.Module, name: str) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(
            f"{name or 'the model'}, a {type(module).__name__}, has integers on the meta device "
            "and no method reset_parameters(): build it with memory"
        )
    tensor.fill_(torch.nan)


# --- memory on the device, or none on the meta device --------------------------------------------


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, then the buffers, each once, by their first names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def move_to_device(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Move tensors with memory to `device`; tensors on the meta device stay there."""
    if any(tensor.is_meta for tensor in named_tensors(module).values()):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        return module
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                shared.setdefault(id(parameter), []).append((part, name))
    moved = module.to(device)
    # For devices that are registered from outside of torch, `to` makes a new parameter for each
    # module that has it.
    for (first, its_name), *others in shared.values():
        for part, name in others:
            part._parameters[name] = first._parameters[its_name]
    return moved


def materialize(
    module: nn.Module,
    device: str | torch.device,
    is_needed: Callable[[str], bool] = lambda name: True,
) -> None:
    """Give uninitialized memory to the tensors on the meta device for which `is_needed`."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta and is_needed(name):
            _reallocate(parameter, device)
    made = {
        id(tensor): torch.empty_like(tensor, device=device)
        for name, tensor in module.named_buffers()
        if tensor.is_meta and is_needed(name)
    }
    for part in module.modules():
        for entry, tensor in part._buffers.items():
            part._buffers[entry] = made.get(id(tensor), tensor)


class Released(torch.Tensor):
    """A tensor on the meta device that raises an error where a block or the loss computes with it.

    torch itself does not: the product of a tensor and of one on the meta device is a tensor of
    arbitrary numbers. Attributes such as `shape` and `grad` are as fast as those of any tensor.

    A script that initializes the weights of all stages, as `reset_parameters()` does, draws the
    same random numbers on every rank: for a tensor that was released, they are drawn and dropped.
    What is computed from such a tensor is one, too.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    reader: ClassVar[Callable[[], str] | None] = None
    """Describes the block or the loss that is being called; None if nothing is."""
    path: str
    origin: torch.device
    """The device of the tensor before it was released, whose generator is drawn from."""

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True, since it has no memory.

        Functions of `torch.nn.init` that draw until the values fit, such as `trunc_normal_`, ask
        for this and draw nothing then. They are called with a tensor that has memory, first.
        """
        frame = sys._getframe(1)
        if frame.f_globals is vars(nn.init):
            _initialize_and_drop(self, frame)
        return True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator of Lockstep; raise LayoutError for one of a block or the loss."""
        if Released.reader is not None:
            leaves = tree_leaves((args, kwargs))
            path = next(
                getattr(leaf, "path", "a tensor") for leaf in leaves if isinstance(leaf, Released)
            )
            raise LayoutError(
                f"{Released.reader()} reads {path}, which is in another pipeline stage; a block "
                "reads only tensors of its own stage, and the loss those of the last stage: "
                "return what it needs as part of a block's output, register a parameter in both "
                "blocks, or choose a balance that keeps them in one stage"
            )
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            _draw_and_drop(function, args, kwargs)
        with torch._C._DisableTorchDispatch():
            result = function(*args, **kwargs)
        model = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Released))
        return tree_map(partial(_release_like, model), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Released:
        """Return another released tensor, for copies of the model."""
        copy = make_released(self, self.path)
        memo[id(self)] = copy
        return copy


class ReleasedParameter(Released, nn.Parameter):
    """A released parameter."""


def make_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor like this one on the meta device, also for a released one."""
    with torch._C._DisableTorchDispatch():  # what is made from a released tensor is one, too
        return torch.empty_like(tensor, device="meta", requires_grad=False)


def make_released(tensor: torch.Tensor, path: str) -> Released:
    """Return a released tensor like this one; `path` is its name in messages."""
    kind = ReleasedParameter if isinstance(tensor, nn.Parameter) else Released
    made: Released = torch.Tensor._make_subclass(kind, make_meta(tensor), tensor.requires_grad)
    made.path = path
    made.origin = tensor.origin if isinstance(tensor, Released) else tensor.device
    return made


def _release_like(model: Released, value: Any) -> Any:
    """Return what was computed from a released tensor, as one; a value with memory as it is."""
    is_result = (
        isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, Released)
    )
    if not is_result:
        return value
    made: Released = torch.Tensor._make_subclass(Released, value, value.requires_grad)
    made.path = getattr(model, "path", "a tensor")
    made.origin = model.origin
    return made


VALUE_FREE = (
    "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "rand_like", "randn_like", "randint_like", "bernoulli", "native_dropout",
)  # fmt: skip
"""The operators that draw as many random numbers for any values of their tensors."""


def _draw_and_drop(function: Any, args: Any, kwargs: Any) -> None:
    """Draw the random numbers of an operator on released tensors, as the other ranks do.

    Raises:
        LayoutError: How many numbers are drawn depends on values that this rank does not have.
    """
    name = function.name().partition("::")[2].partition(".")[0]
    paths = [leaf.path for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Released)]
    if name not in VALUE_FREE:
        raise LayoutError(
            f"{name} draws random numbers that depend on {paths[0]}, which is in another pipeline "
            "stage: draw them from a tensor that every rank has, or train without stages"
        )

    with torch._C._DisableTorchDispatch(), torch.no_grad():
        function(*tree_map(_give_memory, args), **tree_map(_give_memory, kwargs))


def _initialize_and_drop(released: Released, frame: FrameType) -> None:
    """Call the function of `torch.nn.init` in a frame with a tensor that has memory."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = {name: frame.f_locals[name] for name in names}
    if given.get("tensor") is released:
        with torch.no_grad():
            frame.f_globals[code.co_name](**given | {"tensor": _give_memory(released)})


def _give_memory(value: Any) -> Any:
    """Return a tensor of zeros like a released one; any other value itself."""
    if not isinstance(value, Released):
        return value
    # Strides, too: they decide in which order numbers are drawn.
    shape = value.shape
    strides = value.stride()
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.origin).zero_()


def release(model: nn.Module, is_kept: Callable[[str], bool]) -> None:
    """Move parameters and buffers to the meta device, except those whose first name `is_kept`."""
    for name, tensor in named_tensors(model).items():
        if not is_kept(name):
            tensor.grad = None
            other = make_released(tensor, name)
            tensor.__class__ = type(other)
            torch._C._swap_tensor_impl(tensor, other)
            cast("Released", tensor).path = name
            cast("Released", tensor).origin = other.origin


def _reallocate(parameter: nn.Parameter, device: str | torch.device) -> None:
    """Replace the memory of a parameter by uninitialized memory on `device`."""
    empty = torch.empty_like(parameter, device=device, requires_grad=False)
    # Not torch.utils.swap_tensors, which raises an error if there are weak references.
    other = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    parameter.__class__ = nn.Parameter if isinstance(parameter, Released) else type(parameter)
    torch._C._swap_tensor_impl(parameter, other)
