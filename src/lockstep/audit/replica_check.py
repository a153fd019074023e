"""The check of what all replicas hold: parameters, buffers and the optimizer's state.

    step 5      hashes on rank 0  A     rank 1  A     rank 2  A     nothing else happens
    step 10                       A             A             B     rank 2 gets the tensors of rank
                                                                    0 if few elements differ, and
                                                                    the step begins again

Each replica updates its own copy, so a wrong update, or a bit that flips in memory, lasts. A tensor
with many other elements was written by the program, on some ranks only: that is an error. So is
any difference between the copies of a shard, which several hosts have with hybrid storage.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.microbatch_results import combine_hashes
from lockstep.audit.verdict import Computation
from lockstep.checksum import checksum
from lockstep.kernel.rank_status import StatusSummary, merge_by_name
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import CommittedStep, RepeatStep, StepHook
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.state_mutation_check import require_same_weights
from lockstep.sharded_tensors import is_sharded, local_part

__all__ = ["OddReplica", "ReplicaCheck", "find_odd_replica"]

MOST = 4
"""The largest number of elements that are restored; what differs in more was written on purpose."""


class OddReplica(NamedTuple):
    """The only replica that differs from the others.

    Attributes:
        rank: Its number among the replicas.
        source: The lowest of the other ones.
        names: The tensors that differ.
    """

    rank: int
    source: int
    names: list[str]


def find_odd_replica(hashes: Sequence[Mapping[str, int]]) -> OddReplica | None:
    """Return the only replica that differs from at least two equal ones; None if there is none.

    Args:
        hashes: For each replica, the hashes of its tensors by name.
    """
    counts = Counter(tuple(sorted(one.items())) for one in hashes)
    (common, most), *others = counts.most_common()
    if [most, *(number for _, number in others)] != [len(hashes) - 1, 1] or most < 2:
        return None
    right = dict(common)
    rank = next(number for number, one in enumerate(hashes) if dict(one) != right)
    if {*hashes[rank]} != {*right}:
        return None
    names = [name for name, value in hashes[rank].items() if value != right[name]]
    return OddReplica(rank, 1 if rank == 0 else 0, names)


class ReplicaCheck(StepHook):
    """The hook that compares what the replicas hold, in audited steps.

    Args:
        config: The settings of the audit.
        parallel: The layout.
        modules: The model and the other modules that a step calls, by their names in messages.
        optimizer_state: A function that returns the state of the optimizer by name.
        record: A function that records a finding, given its fields.
        shared: The parameters in memory that all ranks share, of which there is no other copy.
    """

    name = "replicas"

    def __init__(
        self,
        config: AuditConfig,
        parallel: ParallelContext,
        modules: Mapping[str, nn.Module],
        optimizer_state: Callable[[], Mapping[str, Any]],
        record: Callable[[Mapping[str, Any]], None],
        shared: Sequence[nn.Parameter] = (),
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._modules = modules
        self._optimizer_state = optimizer_state
        self._record = record
        self._shared = {*map(id, shared)}
        self.first, self.every = config.limits
        self._finding: dict[str, Any] | None = None

    def status(self, step: StepContext) -> dict[str, str | None]:
        """Return a hash of all that this rank holds by its stages; none if it is not audited.

        What only the ranks with the same shard hold has another hash.
        """
        if step.is_stopped or not self._config.is_audited(step.number):
            return {}
        values = self._find_values()
        self._shards = dict[str, int]()
        self._hashes = {name: _hash(one) for name, one in values.items() if not is_sharded(one)}
        hashes: dict[str, str | None] = {str(self._parallel.position): combine_hashes(self._hashes)}
        if len(self._parallel.hosts) > 1:
            about = f"shard {self._parallel.part[0]}"
            shards = {name: local_part(one) for name, one in values.items() if is_sharded(one)}
            self._shards = {f"{name} ({about})": _hash(one) for name, one in shards.items()}
            hashes |= {about: combine_hashes(self._shards)} if shards else {}
        return hashes

    def merge(
        self, left: dict[str, str | None], right: dict[str, str | None]
    ) -> dict[str, str | None]:
        """Return the common hashes of two ranges of ranks; None for those that differ."""
        return merge_by_name(left, right, lambda one, two: one if one == two else None)

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Restore the only replica that differs.

        Raises:
            RepeatStep: A replica was restored; the step has to be computed again.
            DisagreementError: Replicas differ otherwise.
        """
        differing = [name for name, bits in summary.hooks[self.name].items() if bits is None]
        if summary.failure is not None or not differing:
            return
        if not differing[0].isdigit():
            require_same_weights(self._shards, step.label.about, self._parallel.group)
        about = f"comparing replicas {step.label.about}"
        parallel = self._parallel
        mine = json.dumps([parallel.position, platform.node(), self._hashes]).encode()
        messages = [json.loads(one) for one in parallel.messages.gather(mine, about)]
        position = int(differing[0])
        ranks = [rank for rank, message in enumerate(messages) if message[0] == position]
        odd = find_odd_replica([messages[rank][2] for rank in ranks])
        if odd is None or not step.is_repeatable or not self._restore(step, odd, ranks):
            require_same_weights(self._hashes, step.label.about, parallel.group)
            return
        rank = ranks[odd.rank]
        host = messages[ranks[odd.rank]][1]
        name = odd.names[0]
        more = f" and {len(odd.names) - 1} more" if len(odd.names) > 1 else ""
        message = (
            f"step {step.number}: rank {rank} (host {host}) held other bits than all other ranks "
            f"in {name}{more}, from a wrong update or a fault in memory; they were restored from "
            f"rank {ranks[odd.source]}. Steps since the last audited one may have used them: "
            "continue from a checkpoint before it if you need the bits of an undisturbed run"
        )
        module = name.partition("/")[0].rpartition(".")[0] or None
        fault = Computation(rank, host, -1, "", is_repeated=False)
        self._finding = fault.describe_fault(step.number, None, message)
        self._finding |= {"module": module, "corrected": True}
        raise RepeatStep(f"{step.where}: the step is computed again with restored weights")

    def report(self, committed: CommittedStep) -> None:
        """Record that a replica was restored."""
        if self._finding is not None:
            self._record(self._finding)
        self._finding = None

    def _find_values(self) -> dict[str, Any]:
        """Return the tensors and numbers that this rank holds, by name."""
        values: dict[str, Any] = {}
        for root, module in self._modules.items():
            for named in (module.named_parameters, module.named_buffers):
                for name, tensor in named(prefix=root):
                    if id(tensor) not in self._shared:
                        values[name] = tensor
        values |= self._optimizer_state()
        # Without what only another stage has.
        return {
            name: value
            for name, value in values.items()
            if not (isinstance(value, torch.Tensor) and value.is_meta)
        }

    def _restore(self, step: StepContext, odd: OddReplica, ranks: Sequence[int]) -> bool:
        """Overwrite the tensors of the odd one of some ranks, unless too many elements differ.

        Returns:
            Whether they were overwritten, on every rank.
        """
        values = self._find_values() if self._parallel.rank in ranks else {}
        tensors = [values[name] for name in odd.names if name in values]
        is_number = not all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        differing = MOST + 1 if is_number else 0
        before = [] if is_number else [tensor.detach().clone() for tensor in tensors]
        if before:
            self._parallel.make_buffer_exchange().broadcast(tensors, odd.source)
            pairs = zip(before, tensors, strict=True)
            differing = max(_count_differing(old, new.detach()) for old, new in pairs)
        about = f"restoring a replica {step.label.about}"
        counts = self._parallel.messages.gather(str(differing).encode(), about)
        if int(counts[ranks[odd.rank]]) <= MOST:
            return True
        with torch.no_grad():
            for old, tensor in zip(before, tensors, strict=bool(before)):
                tensor.copy_(old)
        return False


def _hash(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return checksum(value)
    return int(xxhash.xxh3_64_intdigest(repr(value).encode()))


def _count_differing(one: torch.Tensor, two: torch.Tensor) -> int:
    """Return the number of elements with other bits."""
    bits = [tensor.contiguous().view(torch.uint8).reshape(-1, tensor.itemsize)
            for tensor in (one.reshape(-1), two.reshape(-1))]  # fmt: skip
    return int((bits[0] != bits[1]).any(dim=1).sum())
