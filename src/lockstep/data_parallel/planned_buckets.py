"""Buckets of gradients that are added over the ranks, and their memory.

expected gradients ──BucketPlanner──> buckets ──> PlannedBuckets: memory of each bucket
destination of every node of this rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.bucket import Bucket, plan
from lockstep.comm.device_ipc import shares_device
from lockstep.comm.make_all_reduce import adds_in_place, make_all_reduce
from lockstep.comm.memory_format import in_layout_of
from lockstep.comm.reproducible_all_reduce import ReproducibleAllReduce
from lockstep.data_parallel.shared_pieces import SharedPieces
from lockstep.devices import is_accelerator
from lockstep.kernel.errors import LayoutError

__all__ = ["BUCKET_BYTES", "BucketPlanner", "PlannedBuckets", "StepTree"]

BUCKET_BYTES = 16 << 20
"""The bytes per bucket, chosen by measurement: see "Bucket sizes" in LOG.md."""

LARGE_BYTES = 64 << 10
"""The least bytes of a gradient whose only bucket is launched in backward."""


class StepTree(NamedTuple):
    """The tree of a step.

    Attributes:
        leaves: The number of micro-batches of the batch.
        nodes_by_rank: The nodes that each rank holds.
    """

    leaves: int
    nodes_by_rank: Sequence[Sequence[tuple[int, int]]]


class BucketPlanner:
    """Plans buckets for the parameters of a model; the same on every rank.

    Args:
        parameters: Names and parameters.
        group: The ranks that add; None for the default group.
        pieces: The pieces of the parameters, whose sums each rank gets; None for whole gradients.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.Tensor]],
        group: dist.ProcessGroup | None,
        pieces: SharedPieces | None,
    ) -> None:
        self.parameters = parameters
        self.group = group
        self.pieces = pieces
        self._is_device_shared = False

    def enter_group(self) -> None:
        """Find out whether the ranks share memory of their device; a collective."""
        devices = [parameter.device for _, parameter in self.parameters[:1]]
        self._is_device_shared = any(shares_device(device, self.group) for device in devices)

    def can_overlap(self, indices: Sequence[int]) -> bool:
        """Return whether the exchange of these gradients may run beside a backward pass.

        The backend "lockstep" adds them in place, and those of accelerators have streams of their
        own. Gloo would take the processor that backward needs.
        """
        parameters = [self.parameters[index][1] for index in indices]
        kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
        return all(is_accelerator(kind[0]) or adds_in_place(*kind, self.group) for kind in kinds)

    def plan(self, indices: Sequence[int]) -> list[Bucket]:
        """Plan buckets for these parameters; with pieces, only for those that have none yet."""
        if self.pieces is not None:
            for name, parameter in (self.parameters[index] for index in indices):
                if not adds_in_place(parameter.device, parameter.dtype, self.group):
                    raise LayoutError(
                        f"parameter {name} ({parameter.dtype}) was frozen when the training was "
                        'set up and has a gradient now, which storage="shared" cannot update: '
                        'train with storage="replicated"'
                    )
            return self.pieces.cover(indices)
        parameters = [self.parameters[index][1] for index in indices]
        numels = [parameter.numel() for parameter in parameters]
        dtypes = [parameter.dtype for parameter in parameters]
        # A bias joins the bucket of its weight, which saves the waits of an exchange.
        return plan(numels, dtypes, BUCKET_BYTES, indices, overflow=BUCKET_BYTES // 16)

    def make_sums(self, buckets: Sequence[Bucket], tree: StepTree) -> list[ReproducibleAllReduce]:
        """Allocate the memory of buckets."""
        pieces = self.pieces
        return [
            make_all_reduce(
                bucket,
                tree.nodes_by_rank,
                tree.leaves,
                self.parameters[bucket.members[0].index][1].device,  # of all parameters
                self.group,
                cuts=[] if pieces is None else pieces.find_cuts(bucket),
                is_device_shared=self._is_device_shared,
            )
            for bucket in buckets
        ]


class PlannedBuckets:
    """The buckets of expected gradients, kept between steps with their memory.

    Args:
        planner: The planner of the buckets.
        tree: The tree of the step.
        indices: The parameters that are expected to have a gradient.
        key: What the buckets were planned for.

    Attributes:
        key: The same.
        sums: The reproducible sum of each bucket.
        destinations: The memory in buckets for the values of this rank's nodes, by parameter.
        gains_from_early_launch: Whether launching them in backward saves more than announcing it
            costs. The only bucket is complete when backward ends.
    """

    def __init__(
        self,
        planner: BucketPlanner,
        tree: StepTree,
        indices: Sequence[int],
        key: tuple[object, ...],
    ) -> None:
        self._planner = planner
        self.key = key
        buckets = planner.plan(indices)
        if planner.pieces is not None:
            buckets = planner.pieces.buckets
        self.sums = planner.make_sums(buckets, tree)
        sizes = [m.numel * bucket.dtype.itemsize for bucket in buckets for m in bucket.members]
        self.gains_from_early_launch = len(buckets) > 1 or max(sizes, default=0) >= LARGE_BYTES
        self.destinations = {
            node: self._find_destinations(node)
            for node in tree.nodes_by_rank[dist.get_rank(planner.group)]
        }
        # References to the memory of each sum, without those of user code.
        self._references = [bucket_sum.uses() for bucket_sum in self.sums]

    @property
    def are_in_use(self) -> bool:
        """Whether user code refers to gradients of the previous step, which are in the buckets."""
        return [bucket_sum.uses() for bucket_sum in self.sums] != self._references

    def _find_destinations(self, node: tuple[int, int]) -> dict[int, torch.Tensor]:
        """Return the destinations of the values of one of this rank's nodes, by parameter."""
        parameters = self._planner.parameters
        return {
            member.index: in_layout_of(vector, parameters[member.index][1])
            for bucket_sum in self.sums
            for member in bucket_sum.bucket.members
            if (vector := bucket_sum.destination(node, member)) is not None
        }
