"""Mean reducer of DistributedDataParallel: means over ranks, bucket by bucket, during backward.

    backward   (1) a gradient is complete (`lockstep.data_parallel.bucket_ready_tracker`)
               (2) buckets whose members are complete are launched in a fixed order,
                   the last parameters first, the same on every rank
               (3) meanwhile the previous bucket is added and gathered
    its end    (4) the other buckets are launched; members without a gradient are absent
               (5) sparse gradients are averaged: their rows are not known in advance
               (6) the means are written to `.grad`, or `.grad` becomes a view of them

If several wrapped modules use one process group, backward passes may reach them in a different
order on each rank. Then nothing is launched before the end of a pass. The ranks exchange which
modules have gradients, and do (2) to (6) for these modules in the order in which the modules were
wrapped.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.bucket import Bucket, plan
from lockstep.comm.collectives import gather_unless_equal
from lockstep.comm.device_ipc import shares_device
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.memory_format import in_format_of, in_layout_of, is_in_format_of
from lockstep.comm.reproducible_all_reduce import ReproducibleAllReduce
from lockstep.comm.sparse_gradients import average_sparse_gradients
from lockstep.data_parallel.bucket_ready_tracker import BucketReadyTracker, GradientState
from lockstep.data_parallel.comm_hook import CommHook, CommHookReduction
from lockstep.data_parallel.gradient_streams import GradientStreams
from lockstep.kernel.errors import GradientError

__all__ = ["MeanReducer"]

_reducers: weakref.WeakSet[MeanReducer] = weakref.WeakSet()
_numbers = itertools.count()


class MeanReducer:
    """Averages gradients during backward; see the steps at the top of the file.

    It has many attributes, because hooks of autograd change the state of a backward pass one
    gradient at a time, and a pass that raised leaves it to the next one.

    Args:
        named: All parameters of the model with their names, in the model's order.
        sparse: The parameters whose gradients are sparse tensors.
        bucket_bytes: The capacity of a bucket in bytes.
        group: The ranks that average; None for the default group.
        as_view: Whether `.grad` becomes a view of the means instead of a copy.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        sparse: Collection[torch.Tensor],
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
        as_view: bool,
    ) -> None:
        self.is_enabled = True
        self.scale = 1.0
        """A factor for the means; not 1 in `Join` if the mean is over the ranks with data."""
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._as_view = as_view
        trained = [n for n, parameter in enumerate(self._parameters) if parameter.requires_grad]
        self._sparse = [n for n in trained if self._parameters[n] in sparse]
        dense = [n for n in trained if n not in self._sparse]
        self._buckets = plan(
            [self._parameters[n].numel() for n in dense],
            [self._parameters[n].dtype for n in dense],
            bucket_bytes,
            indices=dense,
        )
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._node = (self._rank, self._rank + 1)
        is_shared = bool(named) and shares_device(self._parameters[0].device, group)
        nodes_by_rank = [[(rank, rank + 1)] for rank in range(self._ranks)]
        self._reductions: list[ReproducibleAllReduce] | list[CommHookReduction] = [
            make_all_reduce(
                bucket,
                nodes_by_rank,
                self._ranks,
                self._parameters[0].device,
                group,
                divisor=self._ranks,
                is_device_shared=is_shared,
            )
            for bucket in self._buckets
        ]
        self._streams = GradientStreams(self._parameters[0].device if named else None)
        self._group = group or dist.group.WORLD
        self._number = next(_numbers)
        self._has_comm_hook = False
        self._shares_group = False
        self._unaveraged: set[int] = set()  # gradients that are not averaged yet
        # The current backward pass.
        self._launched = 0
        self._is_active = False  # the pass has added to a gradient
        self._is_absent = False  # this rank takes part without gradients
        self._tracker = BucketReadyTracker(
            self._parameters, self._on_gradient, tracks_every_pass=True
        )
        self._tracker.set_buckets([[m.index for m in bucket.members] for bucket in self._buckets])
        self._tracker.register_hooks()
        self._find_others()

    @property
    def shares_group(self) -> bool:
        """Whether several reducers use this process group, and must wait for each other."""
        return self._shares_group

    @property
    def launched(self) -> int:
        """The number of buckets that have been launched in the current backward pass."""
        return self._launched

    def set_comm_hook(self, comm_hook: CommHook, state: object) -> None:
        """Average the dense gradients with a communication hook from now on."""
        self._has_comm_hook = True
        last, reductions = len(self._buckets) - 1, list[CommHookReduction]()
        for n, bucket in enumerate(self._buckets):
            previous = reductions[-1] if reductions else None
            reductions.append(
                CommHookReduction(
                    bucket, n, n == last, self._parameters, comm_hook, state, previous
                )
            )
        self._reductions = reductions

    def reset(self) -> None:
        """Discard a backward pass that raised; wait first until its launched buckets are done."""
        if self._launched:
            self._reductions[self._launched - 1].combine()
        for reduction in self._reductions[: self._launched]:
            reduction.gather()
        if self._is_active:
            self._unaveraged.clear()
        self._stop_pass()

    def watch_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        """Track the backward pass that begins at these outputs of the model.

        The gradients of the outputs are the first to arrive, so the pass that computes them is the
        outermost one.
        """
        if self._is_alone:
            return
        this = weakref.ref(self)

        def begin(_: torch.Tensor) -> None:
            owner = this()
            if owner is not None and owner.is_enabled:
                owner._follow_pass()

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(begin)

    def average_without_gradients(self) -> None:
        """Take part in the averaging of the other ranks, without gradients of this rank."""
        self._unaveraged.clear()
        self._is_absent = True
        self.finish()

    @property
    def _is_alone(self) -> bool:
        return self._ranks == 1 and not self._has_comm_hook

    # --- while a backward pass runs --------------------------------------------------------------

    def _follow_pass(self) -> None:
        """Follow the current backward pass, unless it or an outer pass is followed already."""
        if not self._tracker.is_following:
            self.reset()  # the previous pass may have raised
            self._tracker.follow(self._end_pass)

    def _on_gradient(self, index: int) -> None:
        """Do (1), and launch the buckets that are complete."""
        if self._is_alone:
            return
        if not self.is_enabled:
            self._unaveraged.add(index)
            return
        self._follow_pass()
        self._require_no_graph(index)
        state = self._tracker.mark(index)
        if state is GradientState.LATE:
            self._require_not_launched(index)
        self._unaveraged.add(index)
        self._is_active = True
        self._streams.note()
        if not self._shares_group:
            while self._launched < self._tracker.complete_buckets:
                self.launch_next()

    def _require_no_graph(self, index: int) -> None:
        gradient = self._parameters[index].grad
        if gradient is not None and gradient.requires_grad:
            raise GradientError(
                "backward(create_graph=True) is not supported by DistributedDataParallel: the "
                f"averaged gradient of {self._names[index]} would carry the graph of this rank's "
                "part only; call torch.autograd.grad(..., create_graph=True), and backward() on "
                "the value that you compute from its result"
            )

    def _require_not_launched(self, index: int) -> None:
        launched = self._buckets[: self._launched]
        if any(member.index == index for bucket in launched for member in bucket.members):
            raise GradientError(
                f"parameter {self._names[index]} got a gradient again in one backward pass, after "
                "the first one had been averaged: use checkpoint(..., use_reentrant=False)"
            )

    @torch.no_grad()
    def launch_next(self) -> None:
        """Do (2) and (3) for the next bucket."""
        number, self._launched = self._launched, self._launched + 1
        bucket = self._buckets[number]
        # A gradient of an earlier pass counts only if another rank has a new one.
        locally_unused = {member.index for member in bucket.members} - self._unaveraged
        gradients = self._gradients(bucket, locally_unused)
        self._streams.join(gradients.values())
        self._reductions[number].launch({self._node: gradients}, locally_unused)
        if number:
            self._reductions[number - 1].combine()

    def _gradients(
        self, bucket: Bucket, locally_unused: set[int]
    ) -> dict[int, torch.Tensor | None]:
        """Return the gradients of a bucket by index; None for a member without one."""
        if self._is_absent:
            return {member.index: None for member in bucket.members}
        gradients: dict[int, torch.Tensor | None] = {}
        for member in bucket.members:
            parameter = self._parameters[member.index]
            if self._as_view and member.index in locally_unused and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # may be kept, but the bucket changes
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                raise GradientError(
                    f"parameter {self._names[member.index]} has a sparse gradient, which is "
                    "supported only for the weights of Embedding and EmbeddingBag with "
                    "sparse=True: use one of these modules, or sparse=False"
                )
            if gradient is not None and not is_in_format_of(gradient, parameter):
                gradient = in_format_of(gradient, parameter)
            gradients[member.index] = gradient
        return gradients

    # --- at its end ------------------------------------------------------------------------------

    def _end_pass(self) -> None:
        """Finish this reducer, or all of the group with gradients, in the order of creation."""
        if not self._is_active:
            return  # no gradients
        if not self._shares_group:
            return self.finish()
        here = {reducer._number: reducer for reducer in _reducers if reducer._group is self._group}
        active = [number for number, reducer in here.items() if reducer._is_active]
        mine, about = json.dumps(active).encode(), "averaging gradients at the end of backward"
        messages = gather_unless_equal(mine, about, self._group) or [mine]
        for number in sorted({number for message in messages for number in json.loads(message)}):
            here[number].finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Do (4), (5) and (6)."""
        while self._launched < len(self._buckets):
            self.launch_next()
        if self._reductions:
            self._reductions[-1].combine()
        self._write(pair for reduction in self._reductions for pair in reduction.gather())
        if self._sparse:
            self._write_sparse()
        self._unaveraged.clear()
        self._stop_pass()

    def _stop_pass(self) -> None:
        self._launched = 0
        self._is_active, self._is_absent = False, False
        self._streams.clear()
        self._tracker.stop()

    def _write(self, pairs: Iterable[tuple[int, torch.Tensor | None]]) -> None:
        """Write the means to `.grad`: a copy, or a view if requested."""
        new = self._unaveraged_anywhere() if self._has_comm_hook else None
        for index, mean in pairs:
            if mean is None or (new is not None and index not in new):
                continue
            parameter = self._parameters[index]
            value = in_layout_of(mean, parameter)
            if self.scale != 1.0:
                value.mul_(self.scale)
            if self._as_view:
                parameter.grad = value
            elif parameter.grad is None:
                parameter.grad = value.clone()
            else:
                parameter.grad.copy_(value)

    def _unaveraged_anywhere(self) -> set[int]:
        """Return the parameters with a new gradient on some rank; comm hooks do not report them."""
        message = json.dumps(sorted(self._unaveraged)).encode()
        about = "averaging gradients by a hook"
        lists = gather_unless_equal(message, about, self._group) or [message]
        return {index for indices in lists for index in json.loads(indices)}

    def _write_sparse(self) -> None:
        """Average the sparse gradients; replace them, because their rows may change."""
        values = {n: None if self._is_absent else self._parameters[n].grad for n in self._sparse}
        models = {n: self._parameters[n] for n in self._sparse}
        for index, mean in average_sparse_gradients(
            values, self._unaveraged, models, self._group
        ).items():
            parameter = self._parameters[index]
            parameter.grad = mean if self.scale == 1.0 else mean * self.scale

    def _find_others(self) -> None:
        """Determine, with the other ranks, whether several reducers use this process group."""
        _reducers.add(self)
        here = [reducer for reducer in _reducers if reducer._group is self._group]
        message, about = str(len(here)).encode(), "wrapping a module in DistributedDataParallel"
        counts = gather_unless_equal(message, about, self._group) or [message]
        for reducer in here:
            reducer._shares_group = max(map(int, counts)) > 1
