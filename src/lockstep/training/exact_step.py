"""One step of `ls.exact`: the leaves of this rank's micro-batches, and their sum over all ranks.

begin, end         of each micro-batch: its gradients become a leaf, its buffers are collected
end of the last    the statuses of all ranks are exchanged and compared
                   gradients are added along the tree, buffers are merged
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add, or_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.audit.call_audit import CallAudit, raise_failure
from lockstep.audit.microbatch_results import combine_hashes
from lockstep.checksum import checksum
from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.assignment import ReplicaShare
from lockstep.data.microbatch_sampler import PlannedMicrobatch
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.data_parallel.sharded_gradients import ShardedGradients
from lockstep.kernel.buffers import BufferReport, Buffers, merge_reports
from lockstep.kernel.errors import (
    BufferMismatchError,
    DisagreementError,
    LockstepError,
    UsageError,
)
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.kernel.tree import total
from lockstep.model.buffer_exchange import GroupExchange
from lockstep.model.state_mutation_check import require_same_weights
from lockstep.sharded_tensors import is_sharded, local_part, read_version

__all__ = ["ExactModel", "ExactStep"]

END = b"\0"
"""The end of a status in a message; JSON does not contain it."""


@dataclass(frozen=True)
class ExactModel:
    """What a handle of `ls.exact` trains on this rank.

    Attributes:
        module: The model without wrappers.
        parameters: Its parameters.
        gradients: The reducer of their gradients.
        scopes: The RNG scopes.
        audit: The audit.
        share: The micro-batches of this rank.
        group: The ranks; None for the default group.
    """

    module: nn.Module
    parameters: list[nn.Parameter]
    gradients: GradientReducer | ShardedGradients
    scopes: RngScopes
    audit: CallAudit
    share: ReplicaShare
    group: dist.ProcessGroup | None


class ExactStep:
    """One step.

    Args:
        model: What is trained.
        number: The number of the step.
        first: The first micro-batch of this rank.
        settings: The arguments of the sampler, which ranks compare.

    Attributes:
        current: The micro-batch that has begun; None between two.
        remaining: The number of micro-batches of this rank that have not ended.
        losses: The weighed losses of this rank's micro-batches, if a command observes the step.
        loss: The loss of the whole batch, then.
    """

    def __init__(
        self, model: ExactModel, number: int, first: PlannedMicrobatch, settings: str
    ) -> None:
        self._model, self._number, self._first = model, number, first
        self._settings = settings
        self.current: PlannedMicrobatch | None = None
        self.remaining = len(model.share.pieces(first.samples))
        self._buffers = Buffers({"": model.module})
        self._weights: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self.loss = 0.0
        self._has_begun_gradients = False
        self._audit_failure: LockstepError | None = None
        self._versions = self._read_versions()

    @property
    def place(self) -> str:
        """The rank, the step and the micro-batch, for messages."""
        current = "" if self.current is None else f", micro-batch {self.current.number}"
        return f"rank {self._model.share.replica}, step {self._number}{current}"

    def begin(self, planned: PlannedMicrobatch) -> None:
        """Begin a micro-batch: give the model fresh buffers, and seed the generators."""
        first = self._first
        if (planned.epoch, planned.batch) != (first.epoch, first.batch):
            raise UsageError(
                f"{self.place} was left before its last micro-batch, in batch {first.batch} of "
                f"epoch {first.epoch}: train on all micro-batches of a batch"
            )
        self.current = planned
        self._install_buffers()
        self._model.scopes.begin_microbatch(self._number, planned.number)

    def weigh(self, loss: torch.Tensor, share: float | None, weight: float | None) -> torch.Tensor:
        """Return the part of the current micro-batch's loss; see `Exact.weigh`."""
        current = self.current
        assert current is not None
        if weight is not None:
            self._weights[current.number] = share = float(weight)
        elif share is None:
            share = current.size / current.samples
        return (loss.float() if loss.dtype is torch.float16 else loss) * share

    def begin_backward(self) -> None:
        """Prepare for gradients, at the first backward of the step."""
        if self._has_begun_gradients:
            return
        for parameter in self._model.parameters:
            if parameter.grad is not None and _has_nonzero(local_part(parameter.grad)):
                raise UsageError(
                    f"{self.place}: gradients are left from before the step: call "
                    "optimizer.zero_grad() once per batch; to add up several batches, let the "
                    "batch_size and the number of micro-batches be larger"
                )
        self._model.gradients.begin(self._first.leaves, self._model.share.hosts)
        self._has_begun_gradients = True

    @property
    def has_gradients(self) -> bool:
        """Whether the current micro-batch has gradients."""
        return any(parameter.grad is not None for parameter in self._model.parameters)

    def end(self) -> None:
        """End a micro-batch whose backward has ended, and after the last one the step."""
        current, parameters = self.current, self._model.parameters
        assert current is not None
        if self._read_versions() != self._versions:
            raise UsageError(
                f"{self.place}: parameters were changed before the last micro-batch: call "
                "optimizer.step() if exact.is_complete"
            )
        if self._buffers.slots:
            self._buffers.collect(current.number, current.size / current.samples)
            self._buffers.restore()
        if self._weights.get(current.number) == 0:
            for parameter in parameters:
                parameter.grad = None
            self._model.gradients.skip(current.number)
        else:
            self._model.gradients.accumulate(current.number)
        self.remaining -= 1
        self.current = None
        if self.remaining == 0:
            self._audit_failure = self._model.audit.find_failure(self._buffers.preserve)
            self._reduce()
        self._install_buffers()

    def close(self) -> None:
        """Leave the step: the model has its buffers, and seeds no generator."""
        self._buffers.restore()
        self._model.scopes.pause()

    def _install_buffers(self) -> None:
        """Install fresh copies of the buffers.

        They are those of a micro-batch until its end. What is written afterwards, such as by a
        discriminator while its generator is trained, is discarded: a rank that ends its last
        micro-batch would otherwise write to the merged buffers.
        """
        for slot in self._buffers.slots:
            slot.copy = None
        self._buffers.install_copies()

    def _read_versions(self) -> list[int]:
        return [read_version(parameter) for parameter in self._model.parameters]

    def _reduce(self) -> None:
        """Add the gradients of all ranks, and merge the buffers."""
        leaves, share = self._first.leaves, self._model.share
        gradients, buffers = self._model.gradients, self._buffers
        statuses, messages = self._exchange(self._make_status())
        reports = [
            BufferReport(status["buffers"], last=status["last"]).of_replica(rank)
            for rank, status in enumerate(statuses)
        ]
        report = reduce(merge_reports, reports)
        if report.is_refused:
            reason = buffers.describe_refusal(report)[1]
            raise BufferMismatchError(f"step {self._number}: {reason}")
        nodes = share.nodes(leaves)
        used = reduce(or_, (int(status["used"], 16) for status in statuses))
        gradients.reduce(f"{used:x}", messages)
        if report.hashes:
            exchange = GroupExchange(self._model.group) if share.replicas > 1 else None
            buffers.merge(report, nodes, leaves, exchange)
        self._divide([status["weights"] for status in statuses])
        losses = [pair for status in statuses for pair in status["losses"].items()]
        if len(losses) == leaves:
            nodes_of_loss = {(int(m), int(m) + 1): float.fromhex(loss) for m, loss in losses}
            self.loss = total(nodes_of_loss, leaves, add)

    def _make_status(self) -> dict[str, Any]:
        """Return what this rank tells the others."""
        first, failure, report = self._first, self._model.gradients.failure, BufferReport([])
        named = self._model.module.named_parameters() if self._model.audit.is_due else ()
        self._held = {name: checksum(value) for name, value in named if not is_sharded(value)}
        found = self._audit_failure
        try:
            report = self._buffers.hash_results(is_alone=self._model.share.replicas == 1)
        except BufferMismatchError as error:
            failure = str(error)
        return {
            "batch": f"step {self._number}, batch {first.batch} of epoch {first.epoch}, "
            f"{first.samples} samples in {first.leaves} micro-batches{self._settings}",
            "order": first.order,
            "used": self._model.gradients.used_parameter_mask(),
            "buffers": report.hashes,
            "last": report.last,
            "losses": {index: loss.hex() for index, loss in self.losses.items()},
            "weights": {index: weight.hex() for index, weight in self._weights.items()},
            "failure": failure,
            "held": combine_hashes(self._held),
            "audit": found and [type(found).__name__, str(found)],
        }

    def _exchange(self, status: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Return the statuses of all ranks, and messages that end with small gradients.

        Raises:
            DisagreementError: The ranks train on different batches, or have other weights.
            UsageError: A rank cannot continue.
            StateError: The audit of a rank has found hidden state.
            WorkError: The audit of a rank has found a faulty processor.
        """
        messages = [json.dumps(status).encode()]
        if self._model.share.replicas > 1:
            about, packed = "adding the gradients of ls.exact", self._model.gradients.pack()
            messages = all_gather_bytes(messages[0] + END + packed, about, self._model.group)
        statuses: list[dict[str, Any]] = [json.loads(m.partition(END)[0]) for m in messages]
        for rank, other in enumerate(statuses):
            for part in ("batch", "order"):
                if other[part] != statuses[0][part]:
                    raise DisagreementError(
                        f"rank {rank} trains on {other[part]}, rank 0 on {statuses[0][part]}: make "
                        "the sampler with the same arguments, and call set_epoch on every rank"
                    )
        for rank, other in enumerate(statuses):
            if other["failure"]:
                raise UsageError(f"rank {rank}, step {self._number}: {other['failure']}")
            if other["audit"]:
                raise_failure(*other["audit"])
        if len({other["held"] for other in statuses}) > 1:
            require_same_weights(self._held, f"in step {self._number}", self._model.group)
        return statuses, messages

    def _divide(self, weights: Iterable[Mapping[str, str]]) -> None:
        """Divide the gradients by the sum of the weights of all micro-batches, if there are any."""
        known = {int(index): float.fromhex(w) for part in weights for index, w in part.items()}
        if not known:
            return
        whole = sum(known[index] for index in sorted(known))
        if len(known) < self._first.leaves or not whole > 0:
            raise UsageError(
                f"step {self._number}: {len(known)} of {self._first.leaves} micro-batches have a "
                f"weight, with a sum of {whole}: pass weight= for each, and not 0 for all of them"
            )
        for parameter in self._model.parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).div_(whole)


def _has_nonzero(gradient: torch.Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else gradient).any())
