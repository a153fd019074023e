"""Side effects: writes of a step to more than gradients and buffers, which break determinism.

Each rank computes some of the micro-batches of a batch. State that passes from one micro-batch
to the next depends on the number of ranks, unless the trainer merges it, as it does with
gradients and buffers. Therefore the state before and after the micro-batches is compared:

    start of a step                                end of its micro-batches
    parameters ───────────────────── same? ──────> if written in forward:     StateError

The ranks also compare a hash of samples of their parameters (`lockstep.model.held_parameters`), and
all tensors if it differs. State in attributes, globals, closures and generators is found by the
audit (`lockstep.audit`), if the results depend on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checksum import checksum
from lockstep.comm.collectives import all_gather_bytes
from lockstep.kernel.errors import DisagreementError, LockstepError, StateError
from lockstep.kernel.rank_status import StatusSummary, merge_by_name
from lockstep.kernel.step_context import StepContext, StepObserver
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.held_parameters import (
    HeldParameters,
    count_operations,
    has_nodes_between,
)
from lockstep.sharded_tensors import is_sharded

__all__ = ["StateMutationCheck", "require_same_weights"]

FIRST = 3
GRAPHS_EVERY = 100
"""The steps whose graphs are read: the first FIRST steps, and each multiple of GRAPHS_EVERY.

They are computed one micro-batch at a time, as are the audited steps, among which they are."""

WeightHashes = dict[str, str | None]
"""For each position in a replica, the hash of the parameters before the step.

It is "" if they are not compared, and None if ranks differ.
"""


class StateMutationCheck(StepHook, StepObserver):
    """The hook that compares the state of modules before and after a step's micro-batches.

    In some steps it also observes the graphs of the micro-batches.

    Args:
        modules: The model, or its blocks on this rank, and the other modules that a step
            calls, by their names in messages.
        held: What the trainer holds.
    """

    name = "state"

    def __init__(self, modules: Mapping[str, nn.Module], held: HeldParameters) -> None:
        self._modules = dict(modules)
        self.held = held
        self._begun = -1  # the number of the first operation of the first micro-batch
        self._backwards: dict[int, int] = {}  # those of the ends of micro-batches
        self._stranger = ""  # the failure of `record_graph` in this step
        self._failure = ""  # why the results of this step depend on the layout

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Compare these modules from now on."""
        self._modules = dict(modules)

    # --- in a step -----------------------------------------------------------------------------

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None] | None:
        """Record the state before the first micro-batch, and watch the micro-batches."""
        self._stranger = ""
        self._failure = self.held.begin()
        self._begun = -1
        if step.number < FIRST or step.number % GRAPHS_EVERY == 0:
            step.observers.append(self)
            self._backwards = {}
            if batch is None:
                step.backward_checks.append(self._note_backward)
        return self._explaining(step) if self._failure else None

    @contextmanager
    def _explaining(self, step: StepContext) -> Iterator[None]:
        """Explain an error of the body by the failure that has been found before it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, LockstepError):
                raise StateError(f"{step.where}: {self._failure}") from error
            raise

    def status(self, step: StepContext) -> WeightHashes:
        """Compare the state after the last micro-batch with the recorded one."""
        position = str(step.parallel.position)
        is_stopped = step.failure is not None and step.is_stopped
        if not is_stopped:
            self._compare()
            for sentence in self.held.warnings:
                step.warn(step.where, sentence)
            self.held.warnings = []
        if self._failure:
            step.refuse(self._failure)
        if is_stopped:
            return {position: ""}
        return {position: self.held.hash}

    def merge(self, left: WeightHashes, right: WeightHashes) -> WeightHashes:
        """Return the value of two ranges of ranks: a hash is None if it differs."""
        return merge_by_name(left, right, lambda one, two: one if one == two else None)

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Raise DisagreementError if ranks have other weights."""
        if summary.failure is None and None in summary.hooks[self.name].values():
            hashes = {
                ".".join(filter(None, (root, name))): checksum(tensor)
                for root, module in self._modules.items()
                for name, tensor in module.named_parameters()
                if not is_sharded(tensor)  # each rank has another part
            }
            require_same_weights(hashes, step.label.about, step.parallel.group)

    def begin_microbatch(self) -> None:
        """Note where the first micro-batch begins, after the batch was split."""
        if self._begun < 0:
            self._begun = count_operations()

    def _note_backward(self, microbatch: int) -> None:
        """Note which operations belong to the micro-batches so far."""
        self._backwards[microbatch] = count_operations()

    def record_graph(self, root: torch.Tensor, place: tuple[int, int]) -> None:
        """Compare the leaves of a graph with the parameters that trainers hold."""
        earlier = [end for number, end in self._backwards.items() if number != place[1]]
        if earlier and not self._failure and has_nodes_between(root, self._begun, max(earlier)):
            self._failure = (
                f"the loss of micro-batch {place[1]} depends on the graph of an earlier "
                "micro-batch, which may be on another rank: detach() what the loop keeps of a "
                "micro-batch, or leave it out of the loss"
            )
        self._stranger = self._stranger or self.held.check_graph(root, place)

    def _compare(self) -> None:
        """Compare the state after the last micro-batch with the recorded one."""
        self._failure = self._failure or self.held.finish()
        if self._stranger and not self._failure:  # perhaps forward has added it to the model
            self._failure = self.held.explain_structure() or self._stranger


def require_same_weights(
    mine: Mapping[str, int], about: str, group: dist.ProcessGroup | None
) -> None:
    """Find and report the first tensor in which ranks differ.

    A collective call, for steps in which a hash of the tensors differs between ranks.

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
