"""The check of updates of which no other rank has a copy: shared, sharded and hybrid storage.

    before the optimizer's step     parameters, gradients and state are copied: up to LARGEST
                                    elements per rank, others in each audited step
    after it                        a copy of the optimizer steps them again, on another core
    after a difference              two more computations decide; the right result is written

Each rank checks its own part, as the audit of calls does. With replicated storage the copies of the
ranks are compared instead (`lockstep.audit.replica_check`).
"""

from __future__ import annotations

import copy
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.microbatch_results import combine_hashes
from lockstep.audit.verdict import Computation, explain_processor, find_blame, judge
from lockstep.checksum import checksum
from lockstep.kernel.errors import WorkError
from lockstep.kernel.norm import BLOCK
from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.messages import log
from lockstep.processor_core import find_core, on_another_core, on_core
from lockstep.sharded_tensors import local_part
from lockstep.training.optimizer_checks import is_torchs, make_twin, without_hooks
from lockstep.training.storage.sharded_step import rounds_alike

__all__ = ["LARGEST", "UpdateCheck"]

WINDOW = 4 * BLOCK
"""The number of elements of a parameter that are copied together, a multiple of all vectors."""

LARGEST = 4 * WINDOW
"""The number of elements after which a rank checks no more in a step."""

WindowTensors = dict[str, torch.Tensor]
"""The tensors of a window: the parameter as "", and those of the optimizer's state by their key."""


class _Window(NamedTuple):
    """Elements of a parameter, in the order of its memory on this rank.

    Attributes:
        parameter: The parameter.
        group: The number of its group.
        start: The first element.
        stop: The element after the last one.
    """

    parameter: torch.Tensor
    group: int
    start: int
    stop: int

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of a tensor like the parameter; any other tensor itself."""
        here = local_part(tensor.detach())
        is_alike = here.dim() > 0 and here.numel() == local_part(self.parameter).numel()
        return here.view(-1)[self.start : self.stop] if is_alike else here

    def read(self, optimizer: Optimizer) -> WindowTensors:
        """Return the present values, in the memory that the optimizer writes."""
        state = optimizer.state.get(self.parameter, {})
        tensors = {k: self.cut(value) for k, value in state.items() if torch.is_tensor(value)}
        return {"": self.cut(self.parameter), **tensors}


@dataclass
class _Kept:
    """The values that an optimizer reads in a step, copied before it.

    Attributes:
        windows: The elements that are checked.
        options: The options of the groups.
        values: The values of each window.
        gradients: The gradient of each window.
    """

    windows: Sequence[_Window]
    options: Sequence[Mapping[str, Any]]
    values: Sequence[WindowTensors]
    gradients: Sequence[torch.Tensor]


class _Update(NamedTuple):
    """One computation of the update of some windows."""

    computation: Computation
    results: Sequence[WindowTensors]


class UpdateCheck(StepHook):
    """The hook that computes a part of this rank's updates again, in audited steps.

    An update comes after the exchange of a step, so the next step tells the other ranks.

    Args:
        config: The settings of the audit.
        rank: This rank.
        optimizers: The optimizers; those that are not torch's are not checked, since a copy of them
            may share objects with the original.
        find_name: A function that returns the name of a parameter of an optimizer.
        write: A function that writes a line to the record, given its kind and its fields.
    """

    name = "updates"

    def __init__(
        self,
        config: AuditConfig,
        rank: int,
        optimizers: Sequence[Optimizer],
        find_name: Callable[[torch.Tensor], str],
        write: Callable[..., None],
    ) -> None:
        self._config = config
        self._rank = rank
        self._find_name = find_name
        self._write = write
        self._step = -1  # the step that is audited; -1 for none
        self._kept: _Kept | None = None
        self._corrections = 0
        self._found: list[Mapping[str, Any]] = []
        self._told = 0  # how many of them are in the status of the current step
        for optimizer in filter(is_torchs, optimizers):
            optimizer.register_step_pre_hook(_OptimizerHook(self._keep))
            optimizer.register_step_post_hook(_OptimizerHook(self._verify))

    # --- in a step -----------------------------------------------------------------------------

    def begin(self, step: StepContext, batch: Any) -> None:
        """Check the update of this step, if it is audited."""
        self._step = step.number if self._config.is_audited(step.number) else -1

    def status(self, step: StepContext) -> list[Mapping[str, Any]]:
        """Return what this rank has found in earlier steps."""
        self._told = len(self._found)
        return list(self._found)

    def merge(
        self, left: list[Mapping[str, Any]], right: list[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return what two ranges of ranks have found."""
        return left + right

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Raise the first error of a rank.

        Raises:
            WorkError: A processor is faulty, and the weights contain what it has computed.
        """
        entries = summary.hooks[self.name] if summary.failure is None else []
        errors = [entry["error"] for entry in entries if "error" in entry]
        if errors:
            self._record(entries)
            raise WorkError(errors[0])

    def commit(self, step: StepContext) -> None:
        """Forget what all ranks know."""
        self._step = -1
        del self._found[: self._told]

    def report(self, committed: CommittedStep) -> None:
        """Record the findings of all ranks."""
        self._record(committed.summary.hooks[self.name])

    def _record(self, found: Sequence[Mapping[str, Any]]) -> None:
        for finding in found:
            if "error" not in finding:
                self._write("audit", **finding)

    # --- in the optimizer's step ---------------------------------------------------------------

    def _keep(self, optimizer: Optimizer) -> None:
        """Copy a part of what the optimizer reads."""
        if self._step < 0:
            return
        windows = _choose_windows(optimizer, self._config.count_audited(self._step))
        self._kept = _Kept(
            windows,
            [copy.deepcopy(_without_parameters(group)) for group in optimizer.param_groups],
            [_clone(window.read(optimizer)) for window in windows],
            [window.cut(_get_gradient(window.parameter)).clone() for window in windows],
        )

    def _verify(self, optimizer: Optimizer) -> None:
        """Compute the updates again, and correct or report a difference."""
        kept = self._kept
        self._kept = None
        if kept is None or not kept.windows:
            return
        values = [window.read(optimizer) for window in kept.windows]
        own = self._describe(values, is_repeated=False)
        again = self._repeat(optimizer, kept, on_another_core())
        if again.computation.bits == own.computation.bits:
            return
        here = partial(on_core, own.computation.core)
        there = partial(on_core, again.computation.core)
        repeated = [self._repeat(optimizer, kept, core()) for core in (here, there)]
        self._explain(kept, [own, again, *repeated])

    def _repeat(
        self, optimizer: Optimizer, kept: _Kept, somewhere: AbstractContextManager[None]
    ) -> _Update:
        """Step copies of the windows."""
        parameters: list[nn.Parameter] = []
        state: dict[Any, Any] = defaultdict(dict)
        groups: list[dict[str, Any]] = [
            {**copy.deepcopy(options), "params": []} for options in kept.options
        ]
        for window, values, gradient in zip(kept.windows, kept.values, kept.gradients, strict=True):
            copied = _clone(values)
            parameter = nn.Parameter(copied.pop(""))
            parameter.grad = gradient.clone()
            if copied:
                state[parameter] = copied
            groups[window.group]["params"].append(parameter)
            parameters.append(parameter)
        twin = make_twin(optimizer, groups, state)
        with somewhere, without_hooks():
            twin.step()
            results = [{"": one.detach(), **_tensors(twin.state[one])} for one in parameters]
            return self._describe(results, is_repeated=True)

    def _describe(self, results: Sequence[WindowTensors], *, is_repeated: bool) -> _Update:
        hashes = {
            f"{number}/{key}": checksum(tensor)
            for number, values in enumerate(results)
            for key, tensor in sorted(values.items())
        }
        bits = combine_hashes(hashes)
        place = self._rank, platform.node(), find_core()
        return _Update(Computation(*place, bits, is_repeated), results)

    def _explain(self, kept: _Kept, updates: Sequence[_Update]) -> None:
        """Correct a single wrong result; otherwise let the next step raise an error."""
        own = updates[0]
        name = self._find_name(_find_damaged(kept.windows, *updates[:2]))
        computations = [update.computation for update in updates]
        verdict = judge(computations)
        culprit = verdict.culprit
        place = f"step {self._step}"
        if not verdict.is_single or culprit is None:
            # torch's optimizers are deterministic.
            blame = find_blame(verdict.votes, "processor")
            where = f", in the update of {name}"
            reason = explain_processor(blame, place, verdict, computations, where)
            message = (
                f"{reason}. The weights contain one of these results: continue from the last "
                "checkpoint before this step, on other cores or another host"
            )
            suspect = culprit or own.computation._replace(core=-1)
            self._note(suspect, name, message, is_corrected=False)
            self._found.append({"error": message})
            return
        is_own = culprit is own.computation
        end = " when it was repeated; the weights do not contain it"
        if is_own:
            right = next(one for one in updates if one.computation.bits != culprit.bits)
            _write_back(own.results, right.results)
            end = "; the result of another computation took its place"
        message = f"{place}: {culprit.place} computed a wrong update of {name}{end}"
        self._corrections += 1
        self._note(culprit, name, message, is_corrected=is_own)
        if self._corrections > self._config.max_corrections:
            excess = self._config.explain_excess(self._corrections)
            self._found.append({"error": f"{culprit.place} {excess}"})

    def _note(self, culprit: Computation, name: str, message: str, *, is_corrected: bool) -> None:
        log(message)  # here and now: there may be no other step
        finding = culprit.describe_fault(self._step, None, message)
        module = name.rpartition(".")[0] or None
        fields = {"module": module, "corrected": is_corrected, "count": self._corrections}
        self._found.append(finding | fields)


@dataclass
class _OptimizerHook:
    """A hook of an optimizer's step, which accepts that a rank steps a part of the parameters."""

    call: Callable[[Optimizer], None]
    lockstep_elementwise = True

    def __call__(self, optimizer: Optimizer, arguments: object, options: object) -> None:
        self.call(optimizer)


def _choose_windows(optimizer: Optimizer, turn: int) -> list[_Window]:
    """Return the elements that are checked in an audited step, others in each turn."""
    windows = [
        window
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.grad is not None
        for window in _list_windows(optimizer, parameter, number)
    ]
    first = turn * LARGEST // WINDOW % max(len(windows), 1)
    chosen: list[_Window] = []
    elements = 0
    for window in (*windows[first:], *windows[:first]):
        if elements >= LARGEST:
            break
        chosen.append(window)
        elements += window.stop - window.start
    return chosen


def _list_windows(optimizer: Optimizer, parameter: torch.Tensor, group: int) -> list[_Window]:
    """Return the parts of a parameter that can be updated by themselves, with the same bits."""
    here = local_part(parameter)
    size = here.numel()
    if not here.is_contiguous():
        return []
    if size <= WINDOW:
        return [_Window(parameter, group, 0, size)] if size else []
    if not rounds_alike(optimizer, optimizer.param_groups[group], parameter.dtype):
        return []  # threads divide a part otherwise than the whole
    return [
        _Window(parameter, group, start, min(start + WINDOW, size))
        for start in range(0, size, WINDOW)
    ]


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _get_gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _tensors(state: Mapping[str, Any]) -> WindowTensors:
    return {key: value for key, value in state.items() if torch.is_tensor(value)}


def _clone(values: WindowTensors) -> WindowTensors:
    return {key: tensor.clone() for key, tensor in values.items()}


def _find_damaged(windows: Sequence[_Window], one: _Update, two: _Update) -> torch.Tensor:
    """Return the first parameter whose update differs between two computations."""
    for window, left, right in zip(windows, one.results, two.results, strict=True):
        if any(checksum(left[key]) != checksum(right[key]) for key in left):
            return window.parameter
    raise AssertionError("the updates do not differ")


@torch.no_grad()
def _write_back(values: Sequence[WindowTensors], right: Sequence[WindowTensors]) -> None:
    """Overwrite parameters and state with the right values."""
    for own, other in zip(values, right, strict=True):
        for key, tensor in own.items():
            tensor.copy_(other[key])
