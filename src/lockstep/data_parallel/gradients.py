"""Gradients: taken from autograd leaf by leaf, added along the tree, given back as `.grad`.

    backward of micro-batch m ──> .grad of every parameter ──> leaf m of the tree
    after the last            ──> this rank's nodes ──exact sum──> .grad, on every rank

Autograd never adds two micro-batches: after each backward the gradients are
taken out of `.grad`, and added as soon as siblings meet. A rank holds at most
log2(M) + 1 partial sums at a time.

On the backend "lockstep" the last addition of a node writes where the exact sum
reads it, in a bucket in shared memory, and the sum takes its place:

    passes over a gradient     lockstep                          other backends
    to bring it there          none, the last addition does      one copy into the message
                               (a single leaf is copied; a large
                               one but for the rank's own slice)
    to add it over ranks       in place                          the backend's own
    to bring it back           none: `.grad` is a view           none: `.grad` is a view

Which tensors a bucket holds is known before the step: those that got a gradient
in the step before, as all ranks read it in the ledger (`lockstep.data_parallel.arrival`
launches buckets while backward runs). What else got one goes in further buckets
after the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.bucket import Bucket, plan
from lockstep.comm.exact import ExactSum, add_lists, exact_sums, in_format_of, in_layout_of
from lockstep.comm.native import native_backend
from lockstep.comm.tree import Fold, Node, nodes_of
from lockstep.data.microbatch import split_evenly
from lockstep.data_parallel.arrival import Arrival
from lockstep.data_parallel.shards import Shards
from lockstep.errors import GradientError

__all__ = ["BUCKET_BYTES", "Gradients"]

BUCKET_BYTES = 16 << 20
"""Bytes of a bucket, by measurement: see "Bucket sizes" in LOG.md."""

Row = list[torch.Tensor | None]
"""A gradient, or its absence, for every parameter."""


class Gradients:
    """The gradients of `parameters` (name and tensor, the same on every rank) during one step.

    After `reduce` each `.grad` holds the sum, a 64-byte aligned view of a bucket, until
    the next step begins. Who holds on to one of them keeps the bucket's memory, and
    the next step takes new memory. With `shards` a rank gets the sums of its own
    pieces only, in `sums`, vectors by parameter's number; `.grad` stays None. `modules`
    are those whose backward hooks may look at `.grad`.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        shards: Shards | None = None,
        modules: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._ranks = dist.get_world_size(group)
        # What all ranks expect to be trained in the next step: they agree on the model.
        self._trained = [n for n, (_, each) in enumerate(parameters) if each.requires_grad]
        self._shards = shards
        self.sums: dict[int, torch.Tensor] = {}
        self._fold: Fold[Row] | None = None
        self._leaves = 0
        self._holders: list[list[Node]] = []
        # The leaf that is being taken: what it meets in the tree, what it becomes, what is there.
        self._met: list[Row] | None = None
        self._node: Node = (0, 0)
        self._row: Row = []
        # Kept between steps with their memory, for one case: the leaves and the gradients.
        self._case: tuple[int, ...] = ()
        self._sums: list[ExactSum] = []
        self._uses: list[int] = []  # of each sum's memory, by ourselves
        self._places: dict[Node, dict[int, torch.Tensor]] = {}
        self._planned = False
        self._announce: Callable[[], object] | None = None
        self._launched = 0
        self.arrival = Arrival(parameters, self, modules)

    # --- while the micro-batches are computed ------------------------------------------------

    def begin(self, leaves: int, announce: Callable[[], object] | None = None) -> None:
        """Start a step whose batch has `leaves` micro-batches; `.grad` is emptied.

        With `announce`, which tells the other ranks what this step is about (and
        raises where they do something else), buckets may be launched before
        `reduce` is called.
        """
        self.clear()
        self._leaves, self._announce = leaves, announce
        self._fold = Fold(leaves, add_lists)
        self._holders = [nodes_of(each, leaves) for each in split_evenly(leaves, self._ranks)]
        self._planned = self._ranks > 1 and self._native(self._trained)
        if self._planned:
            self._prepare(self._trained)

    def clear(self) -> None:
        """Empty `.grad` of every parameter, and forget what was taken."""
        self.sums = {}
        for _, parameter in self._parameters:
            parameter.grad = None
        # Never finished, so that the other ranks may still write there; or somebody, such as
        # an optimizer that compares gradients, holds on to those of the step before.
        if self._launched or [each.uses() for each in self._sums] != self._uses:
            self._case, self._sums, self._uses, self._places = (), [], [], {}
        self._launched, self._met, self._fold = 0, None, None

    def take(self, microbatch: int) -> None:
        """Make what autograd left in `.grad` the leaf of `microbatch`."""
        self.open(microbatch)
        for number in range(len(self._parameters)):
            self.take_one(number)
        self._close()

    def skip(self, microbatch: int) -> None:
        """Leave the leaf of `microbatch`, which is not computed, absent; `.grad` is not read."""
        self.open(microbatch)
        for number in range(len(self._parameters)):
            self._add(number, None)
        self._close()

    def open(self, microbatch: int) -> None:
        """Begin to take the gradients of `microbatch`, one after another."""
        if self._met is None:
            assert self._fold is not None
            self._met, self._node = self._fold.meet(microbatch)
            self._row = [None] * len(self._parameters)

    def take_one(self, number: int) -> None:
        """Add the gradient of one parameter to what it meets in the tree."""
        name, parameter = self._parameters[number]
        if self._row[number] is None:
            gradient, parameter.grad = _gradient(name, parameter), None
            self._add(number, gradient)

    @torch.no_grad()
    def _add(self, number: int, gradient: torch.Tensor | None) -> None:
        """Add one parameter's gradient, or its absence, to what it meets in the tree."""
        assert self._met is not None
        terms = [each for row in self._met if (each := row[number]) is not None]
        if gradient is not None:
            terms.insert(0, gradient)
        if not terms:
            return
        *others, last = terms
        place = self._places.get(self._node, {}).get(number)
        if not others:
            self._row[number] = last  # the launch brings it there
            return
        value = others[0]
        for left in others[1:]:
            value = left.add_(value)
        self._row[number] = torch.add(last, value, out=last if place is None else place)

    def _close(self) -> None:
        """Put the leaf that was taken into the tree."""
        assert self._fold is not None
        self._fold.nodes[self._node] = self._row
        self._met = None

    def present(self) -> str:
        """Return which parameters have a gradient on this rank, as the bits of a hex number."""
        assert self._fold is not None
        columns = zip(*self._fold.nodes.values(), strict=True)
        return f"{sum(1 << index for index, column in enumerate(columns) if _any(column)):x}"

    # --- buckets -------------------------------------------------------------------------------

    @property
    def eager(self) -> bool:
        """Whether buckets may be launched before `reduce` is called."""
        return self._planned and self._announce is not None

    def launch(self) -> None:
        """Launch every planned bucket that is not launched yet, if that can be done by now."""
        while self.eager and self._launched < len(self._sums):
            self.launch_next()

    def launch_next(self) -> None:
        """Launch the next planned bucket; before the first one all ranks say where they are."""
        assert self._fold is not None
        if not self._launched and self._announce is not None:
            self._announce()
        held = dict(self._fold.nodes)
        if self._met is not None:
            held[self._node] = self._row
        self._sums[self._launched].launch(held)
        self._launched += 1
        if self._met is not None:  # while backward runs: now, the values are in the cache
            self._sums[self._launched - 1].finish_here()
            self._let_go(self._sums[self._launched - 1].bucket)

    def _let_go(self, bucket: Bucket) -> None:
        """Free the gradients whose sum is there; what is left of them is that they were."""
        for member in bucket.members:
            place = self._places[self._node].get(member.index)
            if place is not None and self._row[member.index] is not None:
                self._row[member.index] = place

    @torch.no_grad()
    def reduce(self, holders: Sequence[Sequence[Node]], present: Sequence[str]) -> None:
        """Leave the sum over all micro-batches in `.grad` of every parameter, on every rank.

        `holders` lists the nodes of each rank of the group, `present` what each
        rank says of its own. A parameter that got no gradient in any micro-batch
        keeps `.grad = None`.
        """
        assert self._fold is not None
        held, trained = self._fold.nodes, _union(present)
        if len(holders) == 1:
            (sums,) = held.values()
            pairs = list(enumerate(sums))
        elif self._planned:
            while self._launched < len(self._sums):
                self.launch_next()
            pairs = [pair for each in self._sums for pair in each.gather()]
            more = self._plan(sorted({*trained} - {*self._trained}))
            pairs += exact_sums(self._exact_sums(more), held)
        else:
            self._prepare(trained)
            pairs = exact_sums(self._sums, held)
        self._launched, self._fold = 0, None
        self._trained = trained if self._shards is None else self._shards.covered
        for index, gradient in pairs:
            parameter = self._parameters[index][1]
            if gradient is not None and self._shards is not None:
                self.sums[index] = gradient
            elif gradient is not None:
                parameter.grad = in_layout_of(gradient, parameter) if len(holders) > 1 else gradient

    @property
    def buckets(self) -> list[Bucket]:
        """The planned buckets, in the order of their launch."""
        return [each.bucket for each in self._sums]

    @property
    def launched(self) -> int:
        """How many of the planned buckets are launched."""
        return self._launched

    def _native(self, numbers: Sequence[int]) -> bool:
        """Tell whether gradients of these parameters are added where they lie."""
        parameters = [self._parameters[number][1] for number in numbers]
        kinds = {(each.device, each.dtype) for each in parameters}
        return all(native_backend(*kind, self._group) is not None for kind in kinds)

    def _prepare(self, trained: Sequence[int]) -> None:
        """Have the buckets of these parameters ready, with places for this rank's nodes."""
        case = (self._leaves, *trained)
        if case == self._case:
            return
        self._case, self._sums, self._places = case, [], {}  # the old memory goes first
        buckets = self._plan(trained)
        self._sums = self._exact_sums(buckets if self._shards is None else self._shards.buckets)
        mine = self._holders[dist.get_rank(self._group)]
        self._places = {node: self._places_of(node) for node in mine}
        self._uses = [each.uses() for each in self._sums]

    def _places_of(self, node: Node) -> dict[int, torch.Tensor]:
        """Return where the values of one of this rank's nodes belong, by parameter."""
        return {
            member.index: in_layout_of(place, self._parameters[member.index][1])
            for each in self._sums
            for member in each.bucket.members
            if (place := each.place(node, member)) is not None
        }

    def _plan(self, numbers: Sequence[int]) -> list[Bucket]:
        """Plan buckets of these parameters; with shards, of those that have no place yet."""
        if self._shards is not None:
            return self._shards.cover(numbers)
        parameters = [self._parameters[number][1] for number in numbers]
        numels = [parameter.numel() for parameter in parameters]
        dtypes = [parameter.dtype for parameter in parameters]
        return plan(numels, dtypes, BUCKET_BYTES, indices=numbers)

    def _exact_sums(self, buckets: Sequence[Bucket]) -> list[ExactSum]:
        shards = self._shards
        return [
            ExactSum(
                bucket,
                self._holders,
                self._leaves,
                self._parameters[bucket.members[0].index][1].device,
                self._group,
                cuts=[] if shards is None else shards.cuts(bucket),
            )
            for bucket in buckets
        ]


def _gradient(name: str, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient in the memory format of the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise GradientError(
            f"parameter {name} has a sparse gradient, which cannot be added exactly: "
            "make its Embedding with sparse=False"
        )
    if gradient.dtype != parameter.dtype:
        raise GradientError(
            f"parameter {name} is {parameter.dtype} and its gradient {gradient.dtype}"
        )
    gradient = gradient.detach()
    if gradient.stride() == parameter.stride():
        return gradient
    # The norm of a gradient depends on the order in which its elements lie.
    return in_format_of(gradient, parameter)


def _any(column: Sequence[torch.Tensor | None]) -> bool:
    return any(value is not None for value in column)


def _union(present: Sequence[str]) -> list[int]:
    """Return the numbers of the parameters that some rank has a gradient of."""
    bits = 0
    for each in present:
        bits |= int(each, 16)
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
