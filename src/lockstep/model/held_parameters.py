"""Held parameters: what a trainer took when it was made, compared in every step.

    before the micro-batches    the modules, the parameters, their memory and the optimizer's groups
                                are those of the construction, or of the last step
    after them                  so they are, and no parameter was written
    in the graph of the loss    every leaf that requires a gradient belongs to a trainer

All comparisons are loops in C over lists that were made before: identities, addresses, strides,
the counters by which autograd notices writes, and up to three samples of 64 bytes of the memory of
each parameter, since writes through `.data` change no counter. The ranks compare a hash of the
samples.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from lockstep.kernel.norm import is_dense
from lockstep.sharded_tensors import is_sharded, local_part

__all__ = ["HeldParameters", "explain_write"]

SAMPLE = 64
"""The bytes per sample of a parameter's memory."""

INPUT = "input"
"""The place of a leaf that no optimizer has."""

_get_versions = attrgetter("_version")
_get_group = itemgetter("params")


class Moment(NamedTuple):
    """The parameters before or after the micro-batches of a step."""

    pointers: list[int]
    versions: list[int]
    samples: bytes


# It has many attributes: what it holds, in the forms that a step compares in few calls.
class HeldParameters:
    """The modules and parameters that a trainer holds.

    Args:
        modules: The modules that a step calls, by their names in messages.
        foreign: The names of those that another trainer may train, or the script.
        optimizer: The optimizer of the other modules' parameters; None: it is not compared.
        is_shared: Whether the memory of the parameters is shared by all ranks.
        blocks: The names of the blocks, if stages hold them and their parameters by name.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        foreign: frozenset[str] = frozenset(),
        optimizer: Optimizer | None = None,
        *,
        is_shared: bool = False,
        blocks: Sequence[str] = (),
    ) -> None:
        self._roots = dict(modules)
        self._foreign = foreign
        self._optimizer = optimizer
        self._is_shared = is_shared
        self._blocks = (*blocks,)
        self._begun: Moment | None = None
        self._committed: Moment | None = None
        self._outside: list[tuple[ref[torch.Tensor], object]] = []
        self._has_warned = False
        self.warnings: list[str] = []
        """Sentences about the current step."""
        self.hash = ""
        """A hash of samples of the parameters before the step; "" if ranks hold shards of them."""
        self.take()
        HOLDERS.add(self)

    def take(self) -> None:
        """Hold the modules and parameters as they are now."""
        self._modules = self._find_modules()
        self._parameters = self._find_parameters()
        self._own = set(map(id, self._parameters.values()))
        self._trained = set(map(id, self._roots[""].parameters())) if "" in self._roots else set()
        foreign = self._find_parameters(is_foreign=True)
        self._foreign_names = {id(parameter): name for name, parameter in foreign.items()}
        every = [part for root in self._roots.values() for part in root.modules()]
        self._entries: list[dict[str, Any]] = [
            held for part in every for held in (part._modules, part._parameters)
        ]
        tensors = {
            id(parameter): parameter
            for parameter in chain(foreign.values(), self._parameters.values())
        }
        self._tensors = [*map(local_part, tensors.values())]
        self._has_shards = any(map(is_sharded, tensors.values()))
        own_names = {id(parameter): name for name, parameter in reversed(self._parameters.items())}
        self._names = [(self._foreign_names | own_names)[number] for number in tensors]
        self._identities = self._find_identities()
        self._groups = self._find_groups()
        self.take_memory()

    def list_modules(self) -> list[nn.Module]:
        """Return the modules of the training, with their submodules."""
        return [part for root in self._roots.values() for part in root.modules()]

    def take_memory(self) -> None:
        """Hold the memory of the parameters as it is now."""
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._pointers = [*map(torch.Tensor.data_ptr, self._tensors)]
        self._strides = [*map(torch.Tensor.stride, self._tensors)]
        self._layouts = [_describe_layout(tensor) for tensor in self._tensors]
        self._samples = [[*_find_samples(tensor)] for tensor in self._tensors]
        self._views = [*chain.from_iterable(self._samples)]

    # --- around the micro-batches --------------------------------------------------------------

    def begin(self) -> str:
        """Compare with what is held; return why the step is impossible, "" if it is not."""
        failure = ""
        pointers = [*map(torch.Tensor.data_ptr, self._tensors)]
        strides = [*map(torch.Tensor.stride, self._tensors)]
        if has_changed := pointers != self._pointers or strides != self._strides:
            failure = self._explain_memory(pointers)
        is_same = self._find_identities() == self._identities
        if not is_same or self._find_groups() != self._groups:
            failure = self.explain_structure() or self._explain_groups() or failure
            has_changed = True
        self._begun = None
        self.hash = ""
        if not failure and self._is_shared:
            failure = self._explain_writes(has_changed)
        if not failure:
            if has_changed:
                self.take()
                pointers = self._pointers
            samples = b"".join(self._views)
            self._begun = Moment(pointers, [*map(_get_versions, self._counted)], samples)
            if not self._has_shards:
                self.hash = xxhash.xxh3_64_hexdigest(samples)
        return failure

    def finish(self) -> str:
        """Compare with the beginning of the step; return what forward or backward changed."""
        begun = self._begun
        if begun is None or (now := self._read()) == begun:
            return ""
        written = self._find_written(begun, now, {*map(id, self._tensors)})
        return explain_write(written) if written else ""

    def commit(self) -> None:
        """Note the parameters after the update, if all ranks can write them."""
        if self._is_shared:
            self._committed = self._read()

    def _explain_writes(self, has_changed: bool) -> str:
        """Name a shared parameter that was written since the last step; "" for none.

        Args:
            has_changed: Whether the model has changed. A parametrization counts as a write of its
                parameter, whose values remain.
        """
        before = self._committed
        self._committed = None
        if before is None or (now := self._read()) == before:
            return ""
        if has_changed:
            before = before._replace(versions=now.versions)
        written = self._find_written(before, now, self._own)
        return written and (
            f"the parameter {written} was written after the step before, and with storage="
            '"shared" the ranks have one copy of it, which each of them would write: call '
            'trainer.load_state_dict() on every rank, or train with storage="replicated"'
        )

    def _read(self) -> Moment:
        pointers = [*map(torch.Tensor.data_ptr, self._tensors)]
        is_there = pointers == self._pointers  # other memory may have been freed
        return Moment(
            pointers,
            [*map(_get_versions, self._counted)],
            b"".join(self._views) if is_there else b"",
        )

    # --- the graph of a loss -------------------------------------------------------------------

    def check_graph(self, root: torch.Tensor, place: object) -> str:
        """Return why a graph has a leaf that nobody trains alike on all ranks; "" if it has none.

        A leaf that the script made for one micro-batch, such as a perturbation, is no state, nor is
        an input that requires a gradient, unless an optimizer has it.

        Args:
            root: The loss, or an output of a stage.
            place: The step and the micro-batch.
        """
        if self._has_shards:  # whose graphs have whole parameters, which torch gathers
            return ""
        strangers = [
            leaf
            for leaf in find_leaves(root)
            if id(leaf) not in self._trained
            and not any(id(leaf) in holder._trained for holder in HOLDERS)
        ]
        self._outside = [entry for entry in self._outside if entry[0]() is not None]
        for leaf in strangers:
            if (name := self._foreign_names.get(id(leaf))) is not None:
                self._note_untrained(name)
                continue
            known = next((entry for entry in self._outside if entry[0]() is leaf), None)
            if known is None:
                self._outside.append((ref(leaf), place))
            elif known[1] not in (place, INPUT):
                if isinstance(leaf, nn.Parameter) or _has_optimizer(leaf):
                    return explain_stranger(leaf)
                self._outside.remove(known)
                self._outside.append((ref(leaf), INPUT))
        return ""

    def _note_untrained(self, name: str) -> None:
        if not self.warnings and not self._has_warned:
            self._has_warned = True
            self.warnings.append(
                f"the parameter {name} of extra_modules gets a gradient, and no Trainer trains it: "
                "call requires_grad_(False) on the module, make it a part of the model, or give it "
                "a Trainer of its own"
            )

    def _find_identities(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._entries)))]

    def _find_groups(self) -> list[int]:
        if self._optimizer is None:
            return []
        groups = self._optimizer.param_groups
        if self._is_shared:  # whose groups hold pieces of parameters
            return [len(groups)]
        return [*map(id, chain.from_iterable(map(_get_group, groups)))]

    def _find_modules(self) -> dict[str, nn.Module]:
        return {
            name: part
            for root, module in self._roots.items()
            if root not in self._foreign
            for name, part in module.named_modules(prefix=root, remove_duplicate=False)
        }

    def _find_parameters(self, is_foreign: bool = False) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for root, module in self._roots.items()
            if (root in self._foreign) == is_foreign
            for name, parameter in module.named_parameters(prefix=root, remove_duplicate=False)
        }

    # --- what has changed ----------------------------------------------------------------------

    def explain_structure(self) -> str:
        """Name the first module or parameter that was added, replaced or removed; "" if legal."""
        advice = (
            "change the model before ls.Trainer or ls.exact gets it, or set up another training "
            "after the change"
        )
        modules = self._find_modules()
        parameters = self._find_parameters()
        now = {id(parameter) for parameter in parameters.values()}
        for name, parameter in parameters.items():
            if id(parameter) not in self._own:
                verb = "replaced" if name in self._parameters else "added"
                return f"the parameter {name} was {verb} after the training was set up; {advice}"
        for name, module in self._modules.items():
            if modules.get(name) is not module:
                what = f"the module {name} ({type(module).__name__})"
                verb = "replaced" if name in modules else "removed"
                return f"{what} was {verb} after the training was set up; {advice}"
        inside = tuple(f"{name}." for name in self._blocks)
        for name, module in modules.items():
            if name not in self._modules and inside and not name.startswith(inside):
                what = f"the module {name} ({type(module).__name__})"
                return f"{what} was added after the training was set up; {advice}"
        for name, parameter in self._parameters.items():
            if id(parameter) not in now or (inside and name not in parameters):
                verb = "renamed" if id(parameter) in now else "removed"
                return f"the parameter {name} was {verb} after the training was set up; {advice}"
        return ""

    def _explain_groups(self) -> str:
        """Name a change of the optimizer's parameter groups that the Trainer cannot follow."""
        assert self._optimizer is not None
        if self._is_shared and self._find_groups() != self._groups:
            return (
                "trainer.optimizer got a parameter group after the training was set up, and with "
                'storage="shared" its parameters would have no pieces: give the optimizer all '
                "parameters when you make the Trainer, with requires_grad_(False) for those that "
                'train later, or train with storage="replicated"'
            )
        return "" if self._is_shared else find_stranger(self._optimizer, self._own)

    def _explain_memory(self, pointers: list[int]) -> str:
        """Name a parameter whose memory changed in a way that the Trainer cannot follow."""
        for number, parameter in enumerate(self._tensors):
            if id(parameter) not in self._own:
                continue
            name = self._names[number]
            held = self._layouts[number]
            if (now := _describe_layout(parameter)) != held:
                return (
                    f"the parameter {name} changed from {held} to {now} after the training "
                    "was set up: convert the model before ls.Trainer or ls.exact gets it"
                )
            if self._is_shared and pointers[number] != self._pointers[number]:
                return (
                    f"the parameter {name} was given other memory, such as by assigning to .data "
                    'or by a second Trainer, and with storage="shared" the ranks read and update '
                    "the shared memory: write into the parameter (copy_), or train with "
                    'storage="replicated"'
                )
        return ""

    def _find_written(self, before: Moment, after: Moment, among: Collection[int]) -> str:
        """Return the name of a parameter that was written between two moments; "" for none.

        Args:
            before: The earlier moment.
            after: The later moment.
            among: The ids of the parameters that count.
        """
        versions = zip(self._counted, before.versions, after.versions, strict=True)
        written = {id(tensor) for tensor, old, new in versions if old != new}
        pointers = zip(self._tensors, before.pointers, after.pointers, strict=True)
        written |= {id(tensor) for tensor, old, new in pointers if old != new}
        end = 0
        for tensor, views in zip(self._tensors, self._samples, strict=True):
            begin = end
            end = end + sum(map(len, views))
            if before.samples[begin:end] != after.samples[begin:end] and after.samples:
                written.add(id(tensor))
        written &= {*among}
        named = zip(self._names, self._tensors, strict=True)
        return next((name for name, tensor in named if id(tensor) in written), "")


HOLDERS: WeakSet[HeldParameters] = WeakSet()
"""Those of all trainers of this process: the model of one may be called in a step of another."""


def is_trained(parameter: torch.Tensor) -> bool:
    """Return whether a training of this process adds the gradients of a parameter."""
    return any(id(parameter) in holder._trained for holder in HOLDERS)


def explain_write(name: str) -> str:
    """Return the sentence about a parameter that forward or backward wrote."""
    return (
        f"parameter {name} was written during forward or backward; each rank computes other "
        "micro-batches, so the ranks would end with different weights: update it after the step, "
        "on all ranks"
    )


def explain_stranger(leaf: torch.Tensor) -> str:
    """Return the sentence about a trainable tensor that is not the model's."""
    kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
    return (
        f"a {kind} of shape {tuple(leaf.shape)} that is not in the model takes part in the loss "
        "and requires a gradient, which is neither added over the ranks nor applied: make "
        "it a part of the model (an nn.Parameter in an attribute of a module), or call "
        "requires_grad_(False) on it"
    )


def find_stranger(optimizer: Optimizer, own: Collection[int]) -> str:
    """Return the sentence about a parameter of an optimizer that the model does not have."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                return (
                    f"param_groups[{number}] of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the model, so that its gradient "
                    "would not be added over the ranks: make it a part of the model before "
                    "ls.Trainer or ls.exact gets the model"
                )
    return ""


def find_leaves(root: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves of a graph that require a gradient."""
    if root.grad_fn is None:
        return [root] if root.requires_grad else []
    leaves = []
    seen = set()
    waiting = [root.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if node.next_functions:
                    waiting.append(node)
                elif (leaf := getattr(node, "variable", None)) is not None:
                    leaves.append(leaf)
    return leaves


def has_nodes_between(root: torch.Tensor, begin: int, end: int) -> bool:
    """Return whether a graph has operations that autograd has numbered from `begin` to `end`."""
    seen = set[Any]()
    waiting = [root.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if begin <= node._sequence_nr() < end:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def count_operations() -> int:
    """Return the number that autograd gives to the next operation of this thread."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    return int(node._sequence_nr())


def _describe_layout(parameter: torch.Tensor) -> str:
    kind = str(parameter.dtype).removeprefix("torch.")
    shape = list(parameter.shape)
    return f"{kind}{shape} with strides {parameter.stride()} on {parameter.device}"


def _find_samples(parameter: torch.Tensor) -> Iterator[memoryview]:
    """Yield views of the memory of a parameter: its beginning, its middle and its end."""
    size = parameter.numel() * parameter.element_size()
    if parameter.device.type != "cpu" or not size or not is_dense(parameter):
        return
    length = min(size, SAMPLE)
    begin = parameter.data_ptr()
    for offset in sorted({0, (size - length) // 2, size - length}):
        yield memoryview((ctypes.c_char * length).from_address(begin + offset)).cast("B")


def _has_optimizer(leaf: torch.Tensor) -> bool:
    """Return whether an optimizer of this process has a tensor among its parameters."""
    optimizers = [
        candidate for candidate in gc.get_objects() if issubclass(type(candidate), Optimizer)
    ]
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return any(leaf is parameter for group in groups for parameter in group["params"])
