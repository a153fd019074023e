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
                               (a single leaf is copied, unless
                               autograd has created it there)
    to add it over ranks       in place                          those of the backend
    to write the sum           none: `.grad` is a view           none: `.grad` is a view

The members of the buckets are known before the step: the parameters that got a gradient
on some rank in the previous step, which all ranks know from the masks that they exchanged.
If they are few and small, they are sent with the statuses of the ranks (`pack`). Other
buckets may therefore be launched while the last backward pass runs, as soon as
`lockstep.data_parallel.readiness` counts them as complete. On an accelerator the current stream
waits for those of all gradients first (`lockstep.data_parallel.gradient_streams`), and the stream
of the backend waits for the current one. Other parameters that get a
gradient are added to further buckets at the end of the step. Sparse gradients, whose rows are
not known in advance, are exchanged last (`lockstep.comm.sparse_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from lockstep.comm import native_module
from lockstep.comm.bucket import Bucket, plan
from lockstep.comm.memory_format import is_in_format_of
from lockstep.comm.native_all_reduce import native_backend
from lockstep.comm.reproducible_all_reduce import (
    ReproducibleAllReduce,
    add_lists,
    adds_in_place,
    in_format_of,
    in_layout_of,
    reproducible_all_reduce,
)
from lockstep.comm.sparse_gradients import add_sparse, sum_sparse_gradients
from lockstep.data_parallel.gradient_places import GradientPlaces, gets_place
from lockstep.data_parallel.gradient_streams import GradientStreams
from lockstep.data_parallel.readiness import GradientReadiness, GradientState
from lockstep.data_parallel.shards import Shards
from lockstep.devices import is_accelerator
from lockstep.kernel.errors import GradientError, LayoutError
from lockstep.kernel.splitting import Hosts, assign_nodes
from lockstep.kernel.tree import Node, TreeAccumulator

__all__ = ["BUCKET_BYTES", "GradientReducer"]

BUCKET_BYTES = 16 << 20
"""The bytes per bucket, chosen by measurement: see "Bucket sizes" in LOG.md."""

GradientList = list[torch.Tensor | None]
"""The gradient of every parameter; None for a parameter without one."""


class GradientReducer:
    """Adds the gradients of one step over its micro-batches and over the ranks.

    After `reduce`, each `.grad` holds the sum, a 64-byte aligned view of a bucket, until the
    next step begins. If user code keeps a reference to such a view, the memory of its bucket is
    not reused, and the next step allocates new memory.

    With `shards`, a rank gets only the sums of its own pieces, in `sums`, as vectors by the
    index of the parameter; `.grad` stays None.

    Args:
        parameters: Names and parameters, the same on every rank.
        group: The ranks that add; None for the default group.
        shards: The pieces of the parameters, whose sums each rank gets; None for whole gradients.
        modules: Modules whose backward hooks may read `.grad`.
        sparse: The parameters whose gradients may be sparse; empty with `shards`.
        compression: How sums are compressed between hosts; None if they are not.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        shards: Shards | None = None,
        modules: Iterable[torch.nn.Module] = (),
        sparse: Collection[torch.Tensor] = (),
        compression: str | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._tensors = [parameter for _, parameter in parameters]
        is_native = native_module.reason_unavailable() is None
        self._add_natively = native_module.load().accumulate_gradients if is_native else None
        self._sparse = {n for n, (_, each) in enumerate(parameters) if each in sparse}
        self._group = group
        self._compression = compression
        self._shards = shards
        self.sums: dict[int, torch.Tensor] = {}
        # This step: its micro-batches, this rank's partial sums, the nodes of every rank.
        self._leaves = 0
        self._partial_sums: TreeAccumulator[GradientList] | None = None
        self._nodes_by_rank: Sequence[Sequence[Node]] = ()
        self._announce: Callable[[], object] | None = None
        # The micro-batch that is being accumulated: its left siblings in the tree, and the node and
        # the values of their sum.
        self._siblings: list[GradientList] | None = None
        self._node: Node = (0, 0)
        self._values: GradientList = []
        # The planned buckets, which are kept between steps with their memory while the number
        # of leaves and the expected parameters stay the same.
        self._planned_for: tuple[int, ...] = ()
        self._is_launched_early = self._is_packed = False
        self._bucket_sums: list[ReproducibleAllReduce] = []
        self._further_sums: list[ReproducibleAllReduce] = []  # of this step only
        self._own_references: list[int] = []  # the number of them to the memory of each sum
        self._destinations: dict[Node, dict[int, torch.Tensor]] = {}
        self._launched = 0
        # The places of the last micro-batch of this rank, and the parameters that may have one.
        self._places, self._are_places_valid = GradientPlaces([]), True
        self._may_have_place = {*range(len(self._parameters))} if is_native else set[int]()
        self._streams = GradientStreams(parameters[0][1].device if parameters else None)
        self.enter_group()
        # The watched backward pass.
        self._readiness = GradientReadiness(
            [parameter for _, parameter in parameters], self._on_gradient, modules
        )
        self._failure = ""

    def enter_group(self) -> None:
        """Discard the plans for the ranks of an earlier group; `.grad` does not change."""
        self._ranks = dist.get_world_size(self._group)
        trainable = (n for n, (_, each) in enumerate(self._parameters) if each.requires_grad)
        self._expect(self._without_sparse(trainable))
        self._discard_plans()
        self._launched, self._siblings, self._partial_sums = 0, None, None

    def _expect(self, indices: list[int]) -> None:
        """Expect gradients of these parameters in the next step, the same ones on all ranks."""
        self._expected = indices
        self._is_planned = self._ranks > 1 and self._overlaps_backward(indices)

    def _discard_plans(self) -> None:
        self._planned_for, self._destinations = (), {}
        self._places, self._are_places_valid = GradientPlaces([]), True
        self._bucket_sums, self._own_references = [], []

    # --- while the micro-batches are computed ------------------------------------------------

    def begin(
        self, leaves: int, hosts: Hosts, announce: Callable[[], object] | None = None
    ) -> None:
        """Start a step and empty `.grad`.

        Args:
            leaves: The number of micro-batches of the batch.
            hosts: The ranks of each host, which compute neighboring micro-batches.
            announce: A function that compares this step with the steps of the other ranks, and
                raises an error if they differ. None: buckets are not launched before `reduce`, and
                neither is the only bucket of small gradients (`_gains_from_early_launch`).
        """
        self.clear()
        self._leaves, self._announce = leaves, announce
        self._partial_sums = TreeAccumulator(leaves, add_lists)
        self._nodes_by_rank = assign_nodes(leaves, hosts)
        if self._is_planned:
            self._prepare(self._expected)
            self._announce = announce if self._is_launched_early else None
        if not self._are_places_valid:
            self._make_places()

    def clear(self) -> None:
        """Empty `.grad` of every parameter, and discard the accumulated gradients."""
        self.sums, self._further_sums, self._values = {}, [], []
        for _, parameter in self._parameters:
            parameter.grad = None
        # Do not reuse the buckets if they were launched and never finished, because other ranks
        # may still write to the memory, or if user code refers to gradients of the previous step,
        # such as an optimizer that compares gradients, or the variable of a finished loop.
        if self._launched or [each.uses() for each in self._bucket_sums] != self._own_references:
            self._discard_plans()
        self._launched, self._siblings, self._partial_sums = 0, None, None
        self._is_packed = False
        self._streams.clear()
        self._failure = ""

    def current(self) -> dict[str, torch.Tensor]:
        """Return the gradients in `.grad` by the names of their parameters."""
        return {name: each.grad for name, each in self._parameters if each.grad is not None}

    def accumulate(self, microbatch: int) -> None:
        """Move the gradients in `.grad` to the leaf of `microbatch`."""
        is_new = self._siblings is None
        self._open(microbatch)
        if not (is_new and self._accumulate_together()):
            for index in range(len(self._parameters)):
                self._accumulate_one(index)
        self._close()

    def skip(self, microbatch: int) -> None:
        """Leave the leaf of a micro-batch that is not computed empty, without reading `.grad`."""
        self._open(microbatch)
        for index in range(len(self._parameters)):
            self._add(index, None)
        self._close()

    def _open(self, microbatch: int) -> None:
        """Begin to accumulate the gradients of `microbatch`, unless this has begun already."""
        if self._siblings is None:
            assert self._partial_sums is not None
            self._siblings, self._node = self._partial_sums.pop_left_siblings(microbatch)
            self._values = [None] * len(self._parameters)

    def _accumulate_together(self) -> bool:
        """Move all gradients out of `.grad` in one call of the native module, in the usual case.

        Returns:
            Whether this is the usual case: gradients have the dtype and layout of their
            parameters, and every sibling has gradients of the same parameters.
        """
        assert self._siblings is not None
        if self._sparse or self._add_natively is None:
            return False
        outs = self._destinations.get(self._node, {})
        places = [outs.get(index) for index in range(len(self._tensors))] if outs else []
        values = self._add_natively(self._tensors, self._siblings, places)
        if values is None:
            return False
        self._values = values
        return True

    def _accumulate_one(self, index: int) -> None:
        """Move one parameter's gradient out of `.grad`, unless it has been moved already."""
        name, parameter = self._parameters[index]
        if self._values[index] is None:
            may_be_sparse = index in self._sparse
            gradient, parameter.grad = _gradient(name, parameter, may_be_sparse), None
            self._add(index, gradient)
        elif parameter.grad is not None:
            self._fail_late(index)

    @torch.no_grad()
    def _add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add one parameter's gradient, or None, to its siblings in the tree."""
        assert self._siblings is not None
        terms = [each for values in self._siblings if (each := values[index]) is not None]
        if gradient is not None:
            terms.insert(0, gradient)
        if not terms:
            return
        if index in self._sparse:
            for left in terms:  # the gradient itself, then its left siblings
                self._values[index] = add_sparse(left, self._values[index])
            return
        *others, last = terms
        if not others:
            self._values[index] = last  # `launch` copies it to its destination
            return
        destination = self._destinations.get(self._node, {}).get(index)
        if self._places.is_taken(index, gradient):
            destination = None  # `launch_next` gives it another one
        value = others[0]
        for left in others[1:]:
            value = left.add_(value)
        out = last if destination is None else destination
        self._values[index] = torch.add(last, value, out=out)

    def _close(self) -> None:
        """Put the sums of the micro-batch and its siblings into the tree."""
        assert self._partial_sums is not None
        self._partial_sums.nodes[self._node] = self._values
        self._siblings = None

    def pack(self) -> bytes:
        """Return this rank's sums for the end of its status, if those of all ranks contain them.

        The gradients of a small model are exchanged with the statuses, so that `reduce` need not
        wait for the other ranks again. For others, nothing is returned, on every rank. Call it on
        all ranks of the group or on none.
        """
        self._is_packed = (
            self._is_planned
            and not self._is_launched_early
            and len(self._bucket_sums) == 1
            and self._bucket_sums[0].fits_messages
        )
        if not self._is_packed:
            return b""
        assert self._partial_sums is not None
        return self._bucket_sums[0].pack(self._partial_sums.nodes)

    def used_parameter_mask(self) -> str:
        """Return, as a hex number, a mask whose bit n is set if parameter n has a gradient here."""
        assert self._partial_sums is not None
        columns = zip(*self._partial_sums.nodes.values(), strict=True)
        return f"{sum(1 << index for index, column in enumerate(columns) if _any(column)):x}"

    # --- while the last backward pass runs -----------------------------------------------------

    @contextmanager
    def watch_backward(self, loss: torch.Tensor, microbatch: int) -> Iterator[None]:
        """Accumulate gradients and launch buckets while the body runs backward from `loss`.

        Use it for the last micro-batch of this rank, if its gradients come from this backward pass
        alone. The first pass only records how gradients arrive.
        """
        with self._readiness.watch(loss) as may_accumulate:
            in_places: AbstractContextManager[None] = nullcontext()
            if may_accumulate:
                self._open(microbatch)
                in_places = self._places.watch()
            try:
                with in_places:
                    yield
            finally:
                if self._readiness.has_late_callback:
                    self._failure = (
                        "a callback was queued for the end of backward (queue_callback), for the "
                        "first time since training began, after gradients had already been moved "
                        "out of .grad; queue it from the first step on"
                    )

    def _on_gradient(self, index: int) -> None:
        """Accumulate a complete gradient, and launch the buckets that it completes."""
        if self._siblings is not None:
            self._places.note(index, self._tensors[index])
        state = self._readiness.mark(index)
        if state is GradientState.LATE:
            self._fail_late(index)
        elif state is GradientState.COMPLETE:
            self._streams.note()
            self._accumulate_one(index)
            while self._launched < self._readiness.complete_buckets:
                self.launch_next()
            if self._launched:  # add as soon as the other ranks are ready, without waiting
                self._bucket_sums[self._launched - 1].advance()

    def _fail_late(self, index: int) -> None:
        self._failure = (
            f"the gradient of {self._parameters[index][0]} arrived in two parts, unlike in the "
            "steps before; if a part of the model uses torch.utils.checkpoint, pass "
            "use_reentrant=False, and call backward(final=True) once per micro-batch"
        )

    @property
    def failure(self) -> str:
        """The reason why a gradient was accumulated too early in this step; "" for none."""
        return self._failure

    def reduce(
        self, nodes: Sequence[Sequence[Node]], mask: str, statuses: Sequence[bytes] = ()
    ) -> None:
        """Set `.grad` of every parameter to the sum over all micro-batches, on every rank.

        A parameter without a gradient in any micro-batch keeps `.grad = None`.

        Args:
            nodes: The nodes of each rank of the group.
            mask: The union of the used-parameter masks of all ranks.
            statuses: The messages of all ranks that end with what `pack` returned there.
        """
        assert self._partial_sums is not None
        if len(nodes) > 1:
            self._reduce_over_ranks(_list_used(mask), statuses)
        else:
            (sums,) = self._partial_sums.nodes.values()
            for index, gradient in enumerate(sums):
                if self._shards is None:
                    self._tensors[index].grad = gradient
                elif gradient is not None:
                    self.sums[index] = gradient
        self._launched, self._partial_sums = 0, None

    @torch.no_grad()
    def _reduce_over_ranks(self, used: Sequence[int], statuses: Sequence[bytes]) -> None:
        """Add this rank's sums and those of the others; `used` are the parameters with one."""
        assert self._partial_sums is not None
        held = self._partial_sums.nodes
        if self._is_planned:
            if self._is_packed:
                pairs = self._bucket_sums[0].add_packed(statuses)
            else:
                pairs = self._add_planned_buckets()
            more = self._plan(sorted({*self._without_sparse(used)} - {*self._expected}))
            self._further_sums = self._make_sums(more)
            pairs += reproducible_all_reduce(self._further_sums, held)
        else:
            self._prepare(self._without_sparse(used))
            pairs = reproducible_all_reduce(self._bucket_sums, held)
        dense = self._without_sparse(used)
        expected = dense if self._shards is None else self._shards.covered
        for index, gradient in pairs:
            parameter = self._parameters[index][1]
            if gradient is not None and self._shards is not None:
                self.sums[index] = gradient
            elif gradient is not None:
                parameter.grad = in_layout_of(gradient, parameter)
        sparse = [index for index in used if index in self._sparse]
        if sparse:
            models = {index: self._parameters[index][1] for index in sparse}
            sums_of_rows = sum_sparse_gradients(held, sparse, self._leaves, models, self._group)
            for index, gradient in sums_of_rows.items():
                models[index].grad = gradient
        if expected != self._expected:
            self._expect(expected)

    def _add_planned_buckets(self) -> list[tuple[int, torch.Tensor | None]]:
        while self._launched < len(self._bucket_sums):
            self.launch_next()
        for each in self._bucket_sums:
            each.combine()
        return [pair for each in self._bucket_sums for pair in each.gather()]

    @property
    def bucket_sums(self) -> list[torch.Tensor]:
        """The sums of each bucket of the shards; only this rank's slices are defined."""
        return [each.sums for each in [*self._bucket_sums, *self._further_sums]]

    def _without_sparse(self, indices: Iterable[int]) -> list[int]:
        return [index for index in indices if index not in self._sparse]

    # --- buckets -------------------------------------------------------------------------------

    @property
    def can_launch_early(self) -> bool:
        """Whether buckets may be launched before `reduce` is called."""
        return self._is_planned and self._announce is not None

    def launch_remaining(self) -> None:
        """Launch the remaining planned buckets, if this is allowed before `reduce`."""
        while self.can_launch_early and self._launched < len(self._bucket_sums):
            self.launch_next()

    def launch_next(self) -> None:
        """Launch the next planned bucket; before the first one, announce the step."""
        assert self._partial_sums is not None
        if not self._launched and self._announce is not None:
            self._announce()
        held = dict(self._partial_sums.nodes)
        if self._siblings is not None:
            held[self._node] = self._values
        bucket_sum = self._bucket_sums[self._launched]
        members = bucket_sum.bucket.members
        last = held.get(self._node, [])
        is_taken = self._places.is_taken
        if taken := [m.index for m in members if last and is_taken(m.index, last[m.index])]:
            bucket_sum = self._move(self._launched, taken)
        self._streams.join(values[each.index] for values in held.values() for each in members)
        is_backward_running = self._siblings is not None
        bucket_sum.launch(held, in_steps=is_backward_running)
        self._launched += 1
        if is_backward_running:
            self._release_gradients(bucket_sum.bucket)

    def _move(self, number: int, taken: Collection[int]) -> ReproducibleAllReduce:
        """Give a bucket new memory, because these places in it are taken; use them no more.

        The others are used again from the next step on.
        """
        bucket = self._bucket_sums[number].bucket
        self._places.give_up(member.index for member in bucket.members)
        self._may_have_place -= {*taken}
        self._are_places_valid = False
        (moved,) = self._make_sums([bucket])
        self._bucket_sums[number] = moved
        for node in self._destinations:
            self._destinations[node] |= self._destinations_of(node, [moved])
        self._own_references[number] = moved.uses()
        return moved

    def _release_gradients(self, bucket: Bucket) -> None:
        """Free gradients that have been packed; their destinations mark them as present."""
        for member in bucket.members:
            destination = self._destinations[self._node].get(member.index)
            if destination is not None and self._values[member.index] is not None:
                self._values[member.index] = destination

    def _overlaps_backward(self, indices: Sequence[int]) -> bool:
        """Return whether the exchange of these gradients may run beside a backward pass.

        The backend "lockstep" adds them in place, and those of accelerators have streams of their
        own. Gloo would take the processor that backward needs.
        """
        parameters = [self._parameters[index][1] for index in indices]
        kinds = {(each.device, each.dtype) for each in parameters}
        return all(is_accelerator(kind[0]) or adds_in_place(*kind, self._group) for kind in kinds)

    def _prepare(self, indices: Sequence[int]) -> None:
        """Prepare the buckets of these parameters and the destinations of this rank's nodes."""
        planned_for = (self._leaves, *indices)
        if planned_for == self._planned_for:
            return
        self._discard_plans()  # free the old memory first
        self._planned_for = planned_for
        buckets = self._plan(indices)
        if self._shards is not None:
            buckets = self._shards.buckets
        self._is_launched_early = _gains_from_early_launch(buckets)
        self._bucket_sums = self._make_sums(buckets)
        self._readiness.set_buckets([[m.index for m in each.members] for each in buckets])
        own_nodes = self._nodes_by_rank[dist.get_rank(self._group)]
        self._destinations = {
            node: self._destinations_of(node, self._bucket_sums) for node in own_nodes
        }
        self._make_places()

    def _make_places(self) -> None:
        """Let autograd create the gradients of the last micro-batch in the planned buckets."""
        own_nodes = self._nodes_by_rank[dist.get_rank(self._group)]
        sums = self._bucket_sums if self._is_planned and own_nodes else []
        places = {
            member.index: each.place(own_nodes[-1], member)
            for each in sums
            for member in each.bucket.members
            if member.index in self._may_have_place
        }
        self._places = GradientPlaces([places.get(n) for n in range(len(self._parameters))])
        self._are_places_valid = True
        places.clear()  # their references are not counted, unlike those of the object
        self._own_references = [each.uses() for each in self._bucket_sums]

    def _destinations_of(
        self, node: Node, sums: Sequence[ReproducibleAllReduce]
    ) -> dict[int, torch.Tensor]:
        """Return the destinations of the values of one of this rank's nodes, by parameter."""
        return {
            member.index: in_layout_of(place, self._parameters[member.index][1])
            for each in sums
            for member in each.bucket.members
            if (place := each.place(node, member)) is not None
        }

    def _plan(self, indices: Sequence[int]) -> list[Bucket]:
        """Plan buckets for these parameters; with shards, only for those that have none yet."""
        if self._shards is not None:
            for name, parameter in (self._parameters[index] for index in indices):
                if native_backend(parameter.device, parameter.dtype, self._group) is None:
                    raise LayoutError(
                        f"parameter {name} ({parameter.dtype}) was frozen when the Trainer was "
                        'made and has a gradient now, which storage="shared" cannot update: train '
                        'with storage="replicated"'
                    )
            return self._shards.cover(indices)
        parameters = [self._parameters[index][1] for index in indices]
        numels = [parameter.numel() for parameter in parameters]
        dtypes = [parameter.dtype for parameter in parameters]
        # A bias joins the bucket of its weight, which saves the waits of an exchange.
        return plan(numels, dtypes, BUCKET_BYTES, indices, overflow=BUCKET_BYTES // 16)

    def _make_sums(self, buckets: Sequence[Bucket]) -> list[ReproducibleAllReduce]:
        shards = self._shards
        return [
            ReproducibleAllReduce(
                bucket,
                self._nodes_by_rank,
                self._leaves,
                self._parameters[bucket.members[0].index][1].device,
                self._group,
                cuts=[] if shards is None else shards.find_cuts(bucket),
                compression=self._compression,
            )
            for bucket in buckets
        ]


def _gradient(name: str, parameter: torch.nn.Parameter, may_be_sparse: bool) -> torch.Tensor | None:
    """Return a parameter's gradient, coalesced or in the memory format of the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse and not may_be_sparse:
        raise GradientError(
            f"parameter {name} has a sparse gradient, which is supported only for the weights of "
            "Embedding and EmbeddingBag with sparse=True: use one of these modules, or sparse=False"
        )
    if gradient.dtype != parameter.dtype:
        raise GradientError(
            f"parameter {name} is {parameter.dtype} and its gradient {gradient.dtype}"
        )
    gradient = gradient.detach()
    if gradient.is_sparse:
        return gradient.coalesce()
    if is_in_format_of(gradient, parameter):
        return gradient
    # The norm of a gradient depends on the order of its elements in memory.
    return in_format_of(gradient, parameter)


def _gains_from_early_launch(buckets: Sequence[Bucket]) -> bool:
    """Return whether launching these buckets in backward saves more than its announcement costs.

    The only bucket is complete when backward ends, and small gradients get no places.
    """
    members = [(each.numel, bucket.dtype) for bucket in buckets for each in bucket.members]
    return len(buckets) > 1 or any(gets_place(n * dtype.itemsize) for n, dtype in members)


def _any(column: Sequence[torch.Tensor | None]) -> bool:
    return any(value is not None for value in column)


def _list_used(mask: str) -> list[int]:
    """Return the indices of the parameters in a used-parameter mask."""
    bits = int(mask, 16)
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
