"""Gradient reducer of the trainer: sums of micro-batch gradients, added along the tree.

    backward of micro-batch m ──> .grad of every parameter ──> leaf m of the tree
    after the last            ──> this rank's nodes ──reproducible sum──> .grad, on every rank

Autograd never adds two micro-batches: after each backward pass the gradients are moved
out of `.grad` and added as soon as both siblings are known. A rank holds at most log2(M) + 1
partial sums at a time, for M micro-batches.

On the backend "lockstep" the last addition of a node writes directly to the bucket in shared
memory, where the reproducible sum reads it and is stored in its place:

    passes over a gradient     lockstep                          other backends
    to write it to the bucket  none: the last addition does      one copy into the message
                               (a single leaf is copied)
    to add it over ranks       in place                          those of the backend
    to write the sum           none: `.grad` is a view           none: `.grad` is a view

Two ranks on another backend that hold one node each save the copy, too: they add in place
(`lockstep.comm.pair_all_reduce`).

The members of the buckets are known before the step: the parameters that got a gradient
on some rank in the previous step, which all ranks know from the masks that they exchanged.
If they are few and small, they are sent with the statuses of the ranks (`pack`). Other
buckets may therefore be launched while the last backward pass runs, as soon as
`lockstep.data_parallel.bucket_ready_tracker` counts them as complete. On an accelerator the
current stream waits for those of all gradients first (`lockstep.data_parallel.gradient_streams`),
and the stream of the backend waits for the current one. Other parameters that get a gradient are
added to further buckets at the end of the step. Sparse gradients, whose rows are not known in
advance, are exchanged last (`lockstep.comm.sparse_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from lockstep.comm.memory_format import in_layout_of
from lockstep.comm.native_module import load_native, reason_unavailable
from lockstep.comm.reproducible_all_reduce import ReproducibleAllReduce, reproducible_all_reduce
from lockstep.comm.sparse_gradients import sum_sparse_gradients
from lockstep.data.assignment import Hosts, assign_nodes
from lockstep.data_parallel.bucket_ready_tracker import BucketReadyTracker
from lockstep.data_parallel.gradient_streams import GradientStreams
from lockstep.data_parallel.local_sums import LocalSums
from lockstep.data_parallel.planned_buckets import BucketPlanner, PlannedBuckets, StepTree
from lockstep.data_parallel.shared_pieces import SharedPieces
from lockstep.kernel.errors import UsageError
from lockstep.kernel.tree import Node
from lockstep.model.gradient_hashes import (
    NO_HASHES,
    LateCallbackError,
    hash_gradients,
    hashing_gradients,
)
from lockstep.model.watched_calls import ComputeAgain

__all__ = ["GradientReducer"]


# It has many methods: those of a step's micro-batches, of its last backward pass, and of its end.
class GradientReducer:
    """Adds the gradients of one step over its micro-batches and over the ranks.

    After `reduce`, each `.grad` holds the sum, a 64-byte aligned view of a bucket, until the
    next step begins. If user code keeps a reference to such a view, the memory of its bucket is
    not reused, and the next step allocates new memory.

    With `pieces`, a rank gets only the sums of its own pieces, in `sums`, as vectors by the
    index of the parameter; `.grad` stays None.

    `LocalSums` and `BucketExchange` live for one step. `PlannedBuckets` are kept for as long as the
    same gradients are expected.

    Args:
        parameters: Names and parameters, the same on every rank.
        group: The ranks that add; None for the default group.
        pieces: The pieces of the parameters, whose sums each rank gets; None for whole gradients.
        modules: Modules whose backward hooks may read `.grad`.
        sparse: The parameters whose gradients may be sparse; empty with `pieces`.
        keeps_sums: Whether this rank's sums are kept until the step is committed, because another
            rank may be lost. They are then copied into the buckets, and not exchanged in backward.

    Attributes:
        is_observed: Whether `hash_current` is called after each micro-batch; of no importance here.
    """

    is_observed = False

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        pieces: SharedPieces | None = None,
        modules: Iterable[torch.nn.Module] = (),
        sparse: Collection[torch.Tensor] = (),
        *,
        keeps_sums: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._keeps_sums = keeps_sums
        self._sparse = {n for n, (_, parameter) in enumerate(parameters) if parameter in sparse}
        self._planner = BucketPlanner(self._parameters, group, pieces)
        is_native = reason_unavailable() is None
        self._add_natively = load_native().accumulate_gradients if is_native else None
        self._streams = GradientStreams(_find_device(self._parameters))
        self._tracker = BucketReadyTracker(
            [parameter for _, parameter in parameters], self._on_gradient, modules
        )
        self.sums: dict[int, torch.Tensor] = {}
        self._further_sums: list[ReproducibleAllReduce] = []  # of this step only
        self.enter_group()

    def enter_group(self) -> None:
        """Discard the plans for the ranks of an earlier group; `.grad` does not change."""
        self._planner.enter_group()
        trainable = (
            n for n, (_, parameter) in enumerate(self._parameters) if parameter.requires_grad
        )
        self._expect(self._without_sparse(trainable))
        self._tree = StepTree(0, ())
        self._buckets: PlannedBuckets | None = None
        self._local: LocalSums | None = None
        self._exchange: BucketExchange | None = None

    def _expect(self, indices: list[int]) -> None:
        """Expect gradients of these parameters in the next step, the same ones on all ranks."""
        self._expected = indices
        has_peers = dist.is_initialized() and dist.get_world_size(self._planner.group) > 1
        self._is_planned = has_peers and self._planner.can_overlap(indices)

    # --- while the micro-batches are computed ------------------------------------------------

    def begin(
        self, leaves: int, hosts: Hosts, announce: Callable[[], object] | None = None
    ) -> LocalSums:
        """Start a step and empty `.grad`; return the sums, to which micro-batches are added.

        Args:
            leaves: The number of micro-batches of the batch.
            hosts: The ranks of each host, which compute neighboring micro-batches.
            announce: A function that compares this step with the steps of the other ranks, and
                raises an error if they differ. None: buckets are not launched before `reduce`, and
                neither is the only bucket of small gradients
                (`PlannedBuckets.gains_from_early_launch`).
        """
        self.clear()
        self._tree = StepTree(leaves, assign_nodes(leaves, hosts))
        if self._is_planned:
            self._prepare(self._expected)
        buckets = self._buckets
        destinations = {} if buckets is None or self._keeps_sums else buckets.destinations
        local = LocalSums(self._parameters, self._sparse, leaves, destinations, self._add_natively)
        self._local = local
        if self._is_planned and buckets is not None:
            announce = None if self._keeps_sums else announce
            self._exchange = BucketExchange(buckets, local, self._streams, announce)
        return local

    def resume(
        self, sums: LocalSums | None, leaves: int, nodes_by_rank: Sequence[Sequence[Node]]
    ) -> LocalSums:
        """Continue a step with the sums of an earlier attempt at it.

        Args:
            sums: What `begin` returned in that attempt; None if this rank has made none.
            leaves: The number of micro-batches of the batch.
            nodes_by_rank: The nodes that each rank holds at the end of the step.
        """
        self.clear()
        self._tree = StepTree(leaves, nodes_by_rank)
        if sums is None:
            natively = self._add_natively
            sums = LocalSums(self._parameters, self._sparse, leaves, {}, natively)
        self._local = sums
        return sums

    def clear(self) -> None:
        """Empty `.grad` of every parameter, and discard the accumulated gradients."""
        self.sums = {}
        self._further_sums = []
        for _, parameter in self._parameters:
            parameter.grad = None
        # Do not reuse the buckets if they were launched and never finished, because other ranks
        # may still write to the memory, or if user code refers to gradients of the previous step,
        # such as an optimizer that compares gradients, or the variable of a finished loop.
        is_unfinished = self._exchange is not None and self._exchange.launched > 0
        self._local = None
        self._exchange = None
        if is_unfinished or (self._buckets is not None and self._buckets.are_in_use):
            self._buckets = None

    def hash_current(self) -> dict[str, int]:
        """Return hashes of the gradients in `.grad` by the names of their parameters."""
        return hash_gradients(self._parameters)

    def hash_again(self, compute: ComputeAgain) -> tuple[dict[str, int], torch.Tensor]:
        """Compute a micro-batch again; return the hashes of its gradients, and its loss."""
        modules = self._tracker.modules
        try:
            freed, loss = compute(lambda root: hashing_gradients(self._parameters, [root], modules))
        except LateCallbackError:
            for _, parameter in self._parameters:
                parameter.grad = None
            freed, loss = compute(lambda root: nullcontext(NO_HASHES))
        return hash_gradients(self._parameters, freed), loss

    def discard(self) -> None:
        """Do nothing: a micro-batch that is computed again leaves its gradients in `.grad` only."""

    def accumulate(self, microbatch: int) -> None:
        """Move the gradients in `.grad` to the leaf of `microbatch`."""
        assert self._local is not None
        self._local.accumulate(microbatch)

    def accumulate_node(self, node: Node) -> None:
        """Move the gradients in `.grad`, which are the sum of several micro-batches, to a node."""
        self._begun().accumulate_node(node)

    def hash_node(self, node: Node) -> dict[torch.Tensor, int]:
        """Return the checksums of a node's gradients by parameter; those of its end in `.grad`."""
        return self._begun().hash_node(node)

    def skip(self, microbatch: int) -> None:
        """Leave the leaf of a micro-batch that is not computed empty, without reading `.grad`."""
        assert self._local is not None
        self._local.skip(microbatch)

    def pack(self) -> bytes:
        """Return this rank's sums for the end of its status, if those of all ranks contain them.

        The gradients of a small model are exchanged with the statuses, so that `reduce` need not
        wait for the other ranks again. For others, nothing is returned, on every rank. Call it on
        all ranks of the group or on none.
        """
        return b"" if self._exchange is None else self._exchange.pack()

    def used_parameter_mask(self) -> str:
        """Return, as a hex number, a mask whose bit n is set if parameter n has a gradient here."""
        assert self._local is not None
        mask = 0
        for values in self._local.complete.values():
            for index, value in enumerate(values):
                if value is not None:
                    mask |= 1 << index
        return f"{mask:x}"

    @property
    def has_sparse(self) -> bool:
        """Whether gradients may be sparse."""
        return bool(self._sparse)

    @property
    def failure(self) -> str:
        """The reason why a gradient was accumulated too early in this step; "" for none."""
        return "" if self._local is None else self._local.failure

    def _begun(self) -> LocalSums:
        """Return the sums of the step, which has begun."""
        assert self._local is not None
        return self._local

    # --- while the last backward pass runs -----------------------------------------------------

    @property
    def can_launch_early(self) -> bool:
        """Whether buckets may be launched before `reduce` is called."""
        return self._exchange is not None and self._exchange.can_launch_early

    @contextmanager
    def watch_backward(self, loss: torch.Tensor, microbatch: int) -> Iterator[None]:
        """Accumulate gradients and launch buckets while the body runs backward from `loss`.

        Use it for the last micro-batch of this rank, if its gradients come from this backward pass
        alone. The first pass only records how gradients arrive.
        """
        local = self._begun()
        with self._tracker.watch(loss) as may_accumulate:
            if may_accumulate:
                local.open(microbatch)
            try:
                yield
            finally:
                if self._tracker.has_late_callback:
                    local.failure = (
                        "a callback was queued for the end of backward (queue_callback), for the "
                        "first time since training began, after gradients had already been moved "
                        "out of .grad; queue it from the first step on"
                    )

    def _on_gradient(self, index: int) -> None:
        """Accumulate a complete gradient, and launch the buckets that it completes."""
        local = self._begun()
        if self._tracker.is_late(index):
            local.fail_late(index)
        elif self._tracker.mark(index):
            self._streams.note()
            local.accumulate_one(index)
            if self._exchange is not None:
                self._exchange.launch_first(self._tracker.complete_buckets)

    def launch_remaining(self) -> None:
        """Launch the remaining planned buckets, if this is allowed before `reduce`."""
        if self._exchange is not None and self._exchange.can_launch_early:
            self._exchange.launch_all()

    # --- at its end ----------------------------------------------------------------------------

    def reduce(self, mask: str, statuses: Sequence[bytes] = ()) -> None:
        """Set `.grad` of every parameter to the sum over all micro-batches, on every rank.

        A parameter without a gradient in any micro-batch keeps `.grad = None`.

        Args:
            mask: The union of the used-parameter masks of all ranks.
            statuses: The messages of all ranks that end with what `pack` returned there.
        """
        if len(self._tree.nodes_by_rank) > 1:
            self._reduce_over_ranks(_list_used(mask), statuses)
        else:
            assert self._local is not None
            (sums,) = self._local.complete.values()
            for index, gradient in enumerate(sums):
                if self._planner.pieces is None:
                    self._parameters[index][1].grad = gradient
                elif gradient is not None:
                    self.sums[index] = gradient
        self._local = None
        self._exchange = None

    @torch.no_grad()
    def _reduce_over_ranks(self, used: Sequence[int], statuses: Sequence[bytes]) -> None:
        """Add this rank's sums and those of the others; `used` are the parameters with one."""
        held = self._begun().nodes
        pieces = self._planner.pieces
        dense = self._without_sparse(used)
        if self._exchange is not None:
            pairs = self._exchange.finish(statuses)
            further = self._planner.plan(sorted({*dense} - {*self._expected}))
            self._further_sums = self._planner.make_sums(further, self._tree)
            pairs += reproducible_all_reduce(self._further_sums, held)
        else:
            pairs = reproducible_all_reduce(self._prepare(dense).sums, held)
        for index, gradient in pairs:
            parameter = self._parameters[index][1]
            if gradient is not None and pieces is not None:
                self.sums[index] = gradient
            elif gradient is not None:
                parameter.grad = in_layout_of(gradient, parameter)
        models = {n: self._parameters[n][1] for n in used if n in self._sparse}
        if models:
            leaves = self._tree.leaves
            group = self._planner.group
            sums_of_rows = sum_sparse_gradients(held, list(models), leaves, models, group)
            for index, gradient in sums_of_rows.items():
                models[index].grad = gradient
        expected = dense if pieces is None else pieces.covered
        if expected != self._expected:
            self._expect(expected)

    def _prepare(self, indices: Sequence[int]) -> PlannedBuckets:
        """Return buckets for these parameters: those of the step before, if they are the same."""
        key = self._is_planned, self._tree, *indices
        buckets = self._buckets
        if buckets is None or buckets.key != key:
            # Free the old memory first.
            buckets = None
            self._buckets = None
            buckets = PlannedBuckets(self._planner, self._tree, indices, key)
            self._tracker.set_buckets(
                [
                    [member.index for member in bucket_sum.bucket.members]
                    for bucket_sum in buckets.sums
                ]
            )
            self._buckets = buckets
        return buckets

    def _without_sparse(self, indices: Iterable[int]) -> list[int]:
        return [index for index in indices if index not in self._sparse]


class BucketExchange:
    """The exchange of the planned buckets in one step.

    Args:
        buckets: The buckets.
        local: This rank's sums.
        streams: The streams in which gradients have arrived.
        announce: A function that is called before the first bucket is launched in backward; None
            if buckets are not launched before the end of the step.

    Attributes:
        launched: The number of buckets that have been launched.
    """

    def __init__(
        self,
        buckets: PlannedBuckets,
        local: LocalSums,
        streams: GradientStreams,
        announce: Callable[[], object] | None,
    ) -> None:
        self._buckets = buckets
        self._local = local
        self._streams = streams
        self._announce = announce if buckets.gains_from_early_launch else None
        self._is_packed = False
        self.launched = 0

    @property
    def can_launch_early(self) -> bool:
        """Whether buckets may be launched before the end of the step."""
        return self._announce is not None

    def pack(self) -> bytes:
        """Return this rank's sums if those of all ranks fit into their statuses."""
        sums = self._buckets.sums
        self._is_packed = (
            not self._buckets.gains_from_early_launch and len(sums) == 1 and sums[0].fits_messages
        )
        return sums[0].pack(self._local.nodes) if self._is_packed else b""

    def launch_first(self, count: int) -> None:
        """Launch the first `count` buckets that have not been launched, and add what is ready."""
        while self.launched < count:
            self.launch_next()
        for bucket_sum in self._buckets.sums[: self.launched]:
            bucket_sum.advance()  # as soon as the other ranks are ready, without waiting

    def launch_all(self) -> None:
        """Launch the remaining buckets."""
        while self.launched < len(self._buckets.sums):
            self.launch_next()

    def launch_next(self) -> None:
        """Launch the next bucket; before the first one, announce the step."""
        if not self.launched and self._announce is not None:
            self._announce()
        members = [member.index for member in self._buckets.sums[self.launched].bucket.members]
        held = self._local.nodes
        is_backward_running = self._local.is_accumulating
        self._streams.join(values[index] for values in held.values() for index in members)
        self._buckets.sums[self.launched].launch(held, in_steps=is_backward_running)
        self.launched += 1
        if is_backward_running:
            self._local.release(members)

    def finish(self, statuses: Sequence[bytes]) -> list[tuple[int, torch.Tensor | None]]:
        """Return (index, sum) of every expected gradient; the sum is None if no rank has one.

        Args:
            statuses: The messages of all ranks that end with what `pack` returned there.
        """
        sums = self._buckets.sums
        if self._is_packed:
            return sums[0].add_packed(statuses)
        self.launch_all()
        for bucket_sum in sums:
            bucket_sum.combine()
        return [pair for bucket_sum in sums for pair in bucket_sum.gather()]


def _list_used(mask: str) -> list[int]:
    """Return the indices of the parameters in a used-parameter mask."""
    bits = int(mask, 16)
    return [index for index in range(bits.bit_length()) if bits >> index & 1]


def _find_device(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> torch.device | None:
    """Return the device of all parameters; None if there are none.

    Raises:
        UsageError: They are on several devices, whose gradients cannot be added together.
    """
    first: dict[torch.device, str] = {}
    for name, parameter in parameters:
        first.setdefault(parameter.device, name)
    if len(first) > 1:
        (device, name), (other, another) = list(first.items())[:2]
        raise UsageError(
            f"the parameter {name} is on {device}, and {another} on {other}: move the model to one "
            "device, or let its parts be pipeline stages"
        )
    return next(iter(first), None)
