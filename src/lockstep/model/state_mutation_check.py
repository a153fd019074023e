"""Side effects: writes of a step to more than gradients and buffers, which break determinism.

Each rank computes some of the micro-batches of a batch. State that passes from one micro-batch
to the next depends on the number of ranks, unless the trainer merges it, as it does with
gradients and buffers. Therefore the state before and after the micro-batches is compared:

    start of a step                                end of its micro-batches
    parameters ───────────────────── same? ──────> if written in forward:             StateError
    states of private generators ─── same? ──────> if drawn from:                     StateError
    numbers in attributes ────────── same? ──────> if changed, such as a counter:     a warning
    tensors in attributes ────────── same? ──────> if replaced, such as a hidden state, and read by
                                                   the next micro-batch before:       a warning

Generators, and what `lockstep.model.held_parameters` compares of parameters, are compared in every
step, checksums and attributes in the first three and in every hundredth step. The ranks also
compare the checksums, to verify that all of them train the same weights.

A number that changes in only one step may be a cache, such as the length of the longest
sequence so far; a warning names it when it changes a second time. State in globals, closures
and other objects is not detected here: `lockstep check` compares whole runs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from lockstep.checksum import checksum
from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.generators import generator_state, is_private_generator
from lockstep.kernel.errors import DisagreementError, LockstepError, StateError
from lockstep.kernel.rank_status import StatusSummary, merge_by_name
from lockstep.kernel.step_context import StepContext, StepObserver
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.description import MACHINERY
from lockstep.model.held_parameters import HeldParameters, explain_write

__all__ = ["StateMutationCheck", "require_same_weights"]

FIRST, EVERY = 3, 100
"""The steps that are checked: the first FIRST steps, and each multiple of EVERY."""

GRAPHS_EVERY = 20
"""The graphs of losses are also read in each multiple of this step."""

LARGEST = 1000
"""The largest number of entries of a container that is compared."""

Findings = tuple[dict[str, str | None], list[tuple[int, str]]]
"""What ranks compare of their state.

For each position in a replica, the hash of the parameters and buffers before the step, "" if they
are not compared. Then the last two ranks that wrote shared parameters since the last step, with the
name of one; the rank is -1 where the writer is unknown.
"""

Watched = tuple[nn.Module, str, str]
"""A module, an attribute of it, and the name of the attribute in messages."""


@dataclass(frozen=True)
class Snapshot:
    """The state of the modules at one moment, by name."""

    parameters: dict[str, int]
    """The checksums of parameters."""
    generators: dict[str, Any]
    """The states of private generators."""
    numbers: dict[str, str]
    """The `repr` of numbers, strings, and containers of them."""
    arrays: dict[str, tuple[object, int]]
    """The tensors and arrays in plain attributes, with their checksums."""
    tensors: dict[str, object]
    """The values of plain attributes that are tensors or contain some."""


class StateMutationCheck(StepHook):
    """The hook that compares the state of modules before and after a step's micro-batches.

    `compare_before` and `compare_after` are called in every step; `failure`, `warnings` and
    `summary` are the results of the last one.

    Args:
        modules: The model, or its blocks on this rank, and the other modules that a step
            calls, by their names in messages.
        held: What the trainer holds; None: these modules.
    """

    name = "state"

    def __init__(
        self, modules: Mapping[str, nn.Module], held: HeldParameters | None = None
    ) -> None:
        self._modules = dict(modules)
        self.held = held or HeldParameters(modules)
        self._before: Snapshot | None = None
        self._generators: dict[str, Any] = {}  # those that the last snapshot found
        self._states: dict[str, Any] = {}  # and their states at the beginning of the step
        self._changes: Counter[str] = Counter()
        self._noted: list[str] = []  # names of changed attributes in this step
        self._checksums: dict[str, int] = {}
        self._replaced: list[Watched] = []  # attributes with tensors that the last step replaced
        self._read: set[str] = set()  # those that a micro-batch read before it replaced them
        self._fresh: set[str] = set()  # those that the current micro-batch replaced
        self._stranger = ""  # the failure of `check_graph` in this step
        self.is_checked = False
        """Whether the current step is one of those whose whole state is compared."""
        self.reads_graphs = False
        """Whether the graphs of the current step are given to `check_graph`."""
        self.failure = ""
        """The reason why the results depend on the layout; "" if there is none."""
        self.warnings: list[str] = []
        """The reasons why the results may depend on the layout."""
        self.summary = ""
        """A hash of all parameters and buffers before the step; "" if the step is not checked."""

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Compare these modules from now on."""
        self._modules = dict(modules)

    # --- in a step -----------------------------------------------------------------------------

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None] | None:
        """Record the state before the first micro-batch, and watch the micro-batches."""
        self.compare_before(step.number)
        if self.is_checked or self.reads_graphs:
            step.observers.append(_MutationWatch(self))
        return self._explaining(step) if self.is_checked or self.failure else None

    @contextmanager
    def _explaining(self, step: StepContext) -> Iterator[None]:
        """Explain an error of the body by the failure that has been found before it."""
        try:
            with self.watching() if self.is_checked else nullcontext():
                yield
        except Exception as error:
            if self.failure and not isinstance(error, LockstepError):
                raise StateError(f"{step.where}: {self.failure}") from error
            raise

    def status(self, step: StepContext) -> Findings:
        """Compare the state after the last micro-batch with the recorded one."""
        position, is_stopped = str(step.parallel.position), step.is_stopped
        if not is_stopped:
            self.compare_after()
            step.warnings += (f"{step.where}: {sentence}" for sentence in self.warnings)
        if self.failure:
            step.refuse(self.failure)
        if is_stopped:
            return {position: ""}, []
        writer = self.held.writer
        writers = [] if writer is None else [(step.parallel.rank if writer[0] else -1, writer[1])]
        # A step that continues despite refusals is compared by the observer that takes them.
        return {
            position: "" if step.observers and step.tolerates_refusals else self.summary
        }, writers

    def decode(self, value: Any) -> Findings:
        """Return the value from its JSON."""
        weights, writers = value
        return weights, [(rank, name) for rank, name in writers]

    def merge(self, left: Findings, right: Findings) -> Findings:
        """Return the value of two ranges of ranks: a hash is None if it differs."""
        weights = merge_by_name(left[0], right[0], lambda one, two: one if one == two else None)
        both = left[1] and right[1]
        return weights, sorted({*left[1], *right[1]})[-2:] if both else left[1] or right[1]

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Raise an error if ranks have other weights, or wrote shared ones.

        Raises:
            StateError: Shared parameters were written by several ranks, or by unknown ones. One
                rank may write them. The others see new values without a write of their own.
            DisagreementError: Ranks have other weights.
        """
        weights, writers = summary.hooks[self.name]
        known = [writer for writer in writers if writer[0] >= 0]
        if writers and len(known) != 1:
            by = f"by ranks {known[0][0]} and {known[1][0]}" if known else "through .data"
            raise StateError(
                f"{step.where}: the parameter {writers[-1][1]} was written {by} after the "
                'step before, and with storage="shared" the ranks have one copy of it: write it on '
                "one rank, between two barriers and not through .data, call "
                "trainer.load_state_dict() on every rank, or train with replicated storage"
            )
        if summary.failure is None and None in weights.values():
            require_same_weights(self.checksums(), step.label.about, step.parallel.group)

    def undo(self) -> None:
        """Discard the findings of `compare_after`, because the step is repeated."""
        self._changes.subtract(self._noted)
        self._noted = []

    # --- before and after ----------------------------------------------------------------------

    def compare_before(self, step: int) -> None:
        """Record the state before the first micro-batch."""
        self._before, self.warnings, self._noted, self._checksums = None, [], [], {}
        self._stranger = ""
        self.failure = self.held.begin()
        self.summary = self.held.hash()
        self.is_checked = step < FIRST or step % EVERY == 0
        self.reads_graphs = self.is_checked or step % GRAPHS_EVERY == 0
        if not self.is_checked:
            self._states = self._read_generators() if self._generators else {}
            return
        self._before = self._snapshot()
        self._checksums = self._before.parameters | self._checked(nn.Module.named_buffers)
        self.summary = xxhash.xxh3_64_hexdigest(repr(self._checksums).encode())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note in the body, in some steps, which of the replaced attributes are read before.

        Attributes that only keep activations are not read. Nothing is watched if something is
        compiled, since other graphs may have other bits.
        """
        frames: Any = sys.modules.get("torch._dynamo.eval_frame")
        is_compiled = frames is not None and any(frames.cached_backends.values())
        watched = self._replaced if self.is_checked and not is_compiled else []
        kinds = {module: type(module) for module, _, _ in watched}
        self._read.clear()
        for module, kind in kinds.items():
            entries = {
                entry: _WatchedAttribute(entry, name, self._read, self._fresh)
                for owner, entry, name in watched
                if owner is module
            }
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            module.__class__ = type(kind.__name__, (kind,), entries | names)
        try:
            yield
        finally:
            for module, kind in kinds.items():
                module.__class__ = kind

    def begin_microbatch(self) -> None:
        """Begin a micro-batch, for which all attributes are those of another one."""
        self._fresh.clear()

    def check_graph(self, root: torch.Tensor, place: tuple[int, int]) -> None:
        """Compare the leaves of a graph with the parameters that trainers hold.

        Args:
            root: The loss, or an output of a stage.
            place: The step and the micro-batch.
        """
        self._stranger = self._stranger or self.held.check_graph(root, place)

    def compare_after(self) -> None:
        """Compare the state after the last micro-batch with the recorded one."""
        self.failure = self.failure or self.held.finish()
        if self._stranger and not self.failure:  # perhaps forward has added it to the model
            self.failure = self.held.explain_structure() or self._stranger
        self.warnings, self.held.warnings = self.held.warnings, []
        if self._before is None:
            if self._generators:
                self.failure = self.failure or _explain_draw(self._states, self._read_generators())
            return
        before, after = self._before, self._snapshot()
        self._before = None
        for name in _differing(before.parameters, after.parameters):
            self.failure = self.failure or explain_write(name)
        self.failure = self.failure or _explain_draw(before.generators, after.generators)
        changed = [*_differing(before.numbers, after.numbers)]
        changed += [
            name
            for name, (array, content) in after.arrays.items()
            if (old := before.arrays.get(name)) and old[0] is array and old[1] != content
        ]
        changed += self._read
        places = {name: (part, entry) for part, entry, name, _ in self._iterate_attributes()}
        self._replaced = [
            (*places[name], name)
            for name, value in after.tensors.items()
            if before.tensors.get(name) is not value
        ]
        self._noted = changed
        self._changes.update(changed)
        self.warnings += [_warning(name) for name in changed if self._changes[name] == 2]

    def checksums(self) -> dict[str, int]:
        """Return the checksums of parameters and buffers by name, of which `summary` is a hash."""
        if not self._checksums:
            self._checksums = self._checked(nn.Module.named_parameters)
        return self._checksums

    def _snapshot(self) -> Snapshot:
        attributes = {name: value for _, _, name, value in self._iterate_attributes()}
        self._generators = {
            name: value for name, value in attributes.items() if is_private_generator(value)
        }
        return Snapshot(
            parameters=self._checked(nn.Module.named_parameters),
            generators=self._read_generators(),
            numbers={
                name: text
                for name, value in attributes.items()
                if (text := _numbers(value)) is not None
            },
            arrays={
                name: (value, checksum(torch.as_tensor(value)))
                for name, value in attributes.items()
                if type(value) is torch.Tensor or _is_numeric_array(value)
            },
            tensors={name: value for name, value in attributes.items() if _holds_tensor(value)},
        )

    def _read_generators(self) -> dict[str, Any]:
        return {name: generator_state(value) for name, value in self._generators.items()}

    def _checked(self, named: Callable[[nn.Module], Iterable[tuple[str, Any]]]) -> dict[str, int]:
        return {
            ".".join(part for part in (root, name) if part): checksum(tensor)
            for root, module in self._modules.items()
            for name, tensor in named(module)
        }

    def _iterate_attributes(self) -> Iterator[tuple[nn.Module, str, str, Any]]:
        """Yield modules with the names of their attributes, names for messages, and values."""
        for root, module in self._modules.items():
            for prefix, part in module.named_modules():
                for name, value in vars(part).items():
                    if name not in MACHINERY:
                        path = ".".join(filter(None, (root, prefix, name)))
                        yield part, name, path, value


def require_same_weights(
    mine: Mapping[str, int], about: str, group: dist.ProcessGroup | None
) -> None:
    """Find and report the first tensor in which ranks differ.

    A collective call, for steps in which `StateMutationCheck.summary` differs between ranks.

    Args:
        mine: The checksums of this rank's tensors, by name.
        about: A description of the step, the same on every rank.
        group: The group of the training's ranks.

    Raises:
        DisagreementError: A tensor differs between ranks. Raised on every rank.
    """
    messages = all_gather_bytes(json.dumps(mine).encode(), f"comparing weights {about}", group)
    everyone = [json.loads(message) for message in messages]
    for name in dict.fromkeys(name for names in everyone for name in names):
        holders = [rank for rank, names in enumerate(everyone) if name in names]
        common, _ = Counter(everyone[rank][name] for rank in holders).most_common(1)[0]
        others = [rank for rank in holders if everyone[rank][name] != common]
        if others:
            rank = next(rank for rank in holders if everyone[rank][name] == common)
            raise DisagreementError(
                f"{name} has other values on rank {others[0]} than on rank {rank} {about}, "
                "although all ranks began with the same: something wrote into it on some ranks "
                "only; make every change on all ranks"
            )


def _explain_draw(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    for name in _differing(before, after):
        return (
            f"the generator {name} was used; its state continues from one micro-batch to the next, "
            "so its numbers depend on the number of ranks: draw from torch's default generator "
            "(leave generator= out), which is seeded for each micro-batch"
        )
    return ""


def _warning(name: str) -> str:
    return (
        f"the attribute {name} changes from step to step; if forward also reads it, the bits "
        "depend on the number of ranks: register a buffer for it, or keep its value by micro-batch "
        "in a loop over step.microbatches(batch), and run `lockstep check` on the script"
    )


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [name for name, value in after.items() if name in before and before[name] != value]


class _MutationWatch(StepObserver):
    """The part of the check during the micro-batches of a step."""

    def __init__(self, check: StateMutationCheck) -> None:
        self._check = check

    def begin_microbatch(self) -> None:
        """Begin a micro-batch, for which all attributes are those of another one."""
        if self._check.is_checked:
            self._check.begin_microbatch()

    def record_graph(self, root: torch.Tensor, place: tuple[int, int]) -> None:
        """Compare the leaves of a graph with the parameters that trainers hold."""
        if self._check.reads_graphs:
            self._check.check_graph(root, place)


class _WatchedAttribute:
    """An attribute of one module, in its class: notes reads before the first write.

    The value remains in the module.
    """

    def __init__(self, entry: str, name: str, read: set[str], fresh: set[str]) -> None:
        self._entry, self._name, self._read, self._fresh = entry, name, read, fresh

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        if self._name not in self._fresh:
            self._read.add(self._name)
        if self._entry in vars(module):
            return vars(module)[self._entry]
        return getattr(super(type(module), module), self._entry)

    def __set__(self, module: Any, value: Any) -> None:
        self._fresh.add(self._name)
        vars(module)[self._entry] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self._entry]


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    parts = value if isinstance(value, (list, tuple)) and len(value) <= LARGEST else (value,)
    return any(isinstance(part, torch.Tensor) for part in parts)


def _is_numeric_array(value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc"


def _numbers(value: Any) -> str | None:
    """Return the `repr` of a number, a string, or a container of these; otherwise None."""
    waiting: list[Any] = [value]
    for _ in range(LARGEST):
        if not waiting:
            return repr(value)
        member = waiting.pop()
        if isinstance(member, (list, tuple, set, frozenset, deque)):
            waiting += member
        elif isinstance(member, dict):
            waiting += [*member.keys(), *member.values()]
        elif member is not None and not isinstance(member, (bool, int, float, complex, str)):
            return None
    return None
