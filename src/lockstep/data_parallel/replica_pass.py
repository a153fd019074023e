"""One call of `ls.DataParallel`: forward and backward of all micro-batches on several devices.

    forward    scatter ─> replicas ─> one thread per device ─> merge buffers ─> gather
    backward   split the gradients of the outputs ─> one thread per device ─> add along the tree

A pass is connected to autograd by one function, whose inputs are the parameters of the module and
the arguments that need a gradient. Its backward returns their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.comm.reproducible_all_reduce import add_present
from lockstep.comm.sparse_gradients import add_sparse
from lockstep.data_parallel.device_threads import (
    Task,
    ThreadSettings,
    run_in_threads,
    run_one_by_one,
)
from lockstep.data_parallel.replica_run import ReplicaRun
from lockstep.data_parallel.scatter import GatheredTensor
from lockstep.data_parallel.unit_turns import (
    OUTSIDE,
    DrawingUnits,
    GeneratorStates,
    RandomOperators,
    UnitTurns,
)
from lockstep.kernel.errors import GradientError, StateError, UsageError
from lockstep.kernel.tree import Node, TreeAccumulator, nodes_of, total
from lockstep.model.buffers import Buffers
from lockstep.model.units import Units, find_units
from lockstep.randomness import (
    isolated,
    key_prefix,
    set_state_of_torch,
    state_of_others,
    state_of_torch,
)

__all__ = ["ReplicaPass"]

Gradients = list[torch.Tensor | None]
"""The gradient of every parameter; None for a parameter without one."""


class ReplicaPass:
    """One call of a module on all micro-batches.

    Args:
        module: The module.
        unit_names: The names of its blocks.
        runs: A function that returns the micro-batches of each device, with new replicas.
        leaves: The number of micro-batches of the batch.
        device: The first device, which gets outputs, buffers and sums.
        dim: The dimension of the samples.
        key: The seed and the number of the step, from which the seeds of units are derived.
        drawing: What is known about the units that draw; the pass adds to it.
        has_gradient: Whether a backward may follow.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_names: Sequence[str],
        runs: Callable[[], list[list[ReplicaRun]]],
        leaves: int,
        device: torch.device,
        dim: int,
        key: tuple[int, int],
        drawing: DrawingUnits,
        has_gradient: bool,
    ) -> None:
        self._module, self._unit_names = module, unit_names
        self._make_runs, self._queues = runs, runs()
        self._leaves, self._device, self._dim, self._key = leaves, device, dim, key
        self._drawing, self._has_gradient = drawing, has_gradient
        self._is_serial = drawing.is_serial or not drawing.is_known
        self._gathered: list[GatheredTensor] = []
        self._is_done = False
        self._states: GeneratorStates | None = None  # during forward, if on threads

    @property
    def _runs(self) -> list[ReplicaRun]:
        return sorted((run for queue in self._queues for run in queue), key=lambda run: run.index)

    @property
    def _devices(self) -> list[torch.device]:
        return list(dict.fromkeys(run.device for run in self._runs))

    # --- forward --------------------------------------------------------------------------------

    def forward(self) -> tuple[Any, list[GatheredTensor]]:
        """Compute all micro-batches.

        Returns:
            The outputs of the first micro-batch, and the joined values of the tensors in them.
        """
        with _isolated(self._devices):
            if not self._is_serial and not self._forward_together():
                self._is_serial, self._queues = True, self._make_runs()
            if self._is_serial:
                self._forward_one_by_one()
        runs = self._runs
        self._merge_buffers(runs)
        counts = {len(run.tensors) for run in runs}
        if counts == {0}:
            raise UsageError(
                f"{type(self._module).__name__} returned a {type(runs[0].outputs).__name__} "
                "without tensors: return tensors, or tuples, lists or mappings of them"
            )
        if len(counts) > 1:
            raise UsageError(
                f"{type(self._module).__name__} returned {min(counts)} tensors for one micro-batch "
                f"and {max(counts)} for another: return as many for each"
            )
        shares = {run.index: run.share for run in runs}
        self._gathered = [
            GatheredTensor(
                {run.index: run.tensors[position] for run in runs},
                shares, self._leaves, self._dim, self._device,
            )
            for position in range(len(runs[0].tensors))
        ]  # fmt: skip
        return runs[0].outputs, self._gathered

    def _forward_together(self) -> bool:
        """Compute the devices at the same time; return whether only known units drew."""
        states = self._states = GeneratorStates(self._devices)
        turns = UnitTurns(self._drawing.units, states)
        for run in self._runs if self._drawing.units else ():
            units = find_units(run.replica, self._unit_names)
            run.take_loss_turn = turns.install(units, key_prefix(*self._key, run.index), run.device)
        run_in_threads(self._make_tasks(ReplicaRun.forward), ThreadSettings(self._devices))
        return not states.has_changed()

    def _forward_one_by_one(self) -> None:
        """Compute one micro-batch after another, and note which units draw."""
        known = set(self._drawing.units)

        def compute(run: ReplicaRun) -> None:
            seed, step = self._key
            modules = find_units(run.replica, self._unit_names)
            names = [*(self._unit_names or [type(self._module).__name__]), "the loss"]
            operators = RandomOperators(names, run.device)
            for number, module in enumerate(modules):
                operators.watch(number, module)
            run.take_loss_turn = partial(operators.observe, len(modules))
            run.units = Units(modules, run.replica, seed, run.device)
            with run.units.install_hooks(), operators:
                run.units.begin_microbatch(step, run.index)
                others = state_of_others()
                run.forward()
                run.state, run.calls = state_of_torch(run.device), run.units.pause()
            if state_of_others() != others:
                operators.found.add(OUTSIDE)
            self._drawing.add(operators.found)

        run_one_by_one(self._make_tasks(compute), ThreadSettings(self._devices))
        if self._drawing.is_known and self._drawing.units == known:
            self._drawing.is_serial = True  # something draws that cannot be observed
        self._drawing.is_known |= not self._has_gradient

    def _make_tasks(self, work: Callable[[ReplicaRun], None]) -> list[list[Task]]:
        return [
            [Task(run.index, run.place, run.device, partial(work, run)) for run in queue]
            for queue in self._queues
        ]

    def _merge_buffers(self, runs: Sequence[ReplicaRun]) -> None:
        """Write the results of all micro-batches into the buffers of the module."""
        if runs[0].buffers is None:
            return
        buffers = Buffers({"": self._module})
        samples = sum(run.size for run in runs)
        try:
            for run in runs:
                assert run.buffers is not None
                held = run.buffers.pause()
                run.buffers.resume(held)  # for a recomputation in backward
                buffers.resume(
                    [(None if each is None else each.to(self._device), None) for each, _ in held]
                )
                buffers.collect(run.index, run.size / samples)
        finally:
            buffers.restore()
        report = buffers.hash_results(is_alone=True)
        buffers.merge(report, [nodes_of(range(self._leaves), self._leaves)], self._leaves, None)

    # --- backward -------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Gradients:
        """Return the gradients of the parameters, and then of the arguments that need one.

        Args:
            gradients: The gradients of the joined tensors.
        """
        if torch.is_grad_enabled():
            raise GradientError(
                "backward(create_graph=True) is not supported by ls.DataParallel, which computes "
                "gradients without a graph: use ls.DistributedDataParallel, or the module itself"
            )
        if self._is_done:
            raise GradientError(
                "backward was called a second time through one call of ls.DataParallel: pass "
                "retain_graph=True to the first backward"
            )
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        held: dict[Node, Gradients] = {}
        with _isolated(self._devices), _without_autocast(self._devices):
            if self._is_serial:
                held = self._backward_one_by_one(gradients, keeps_graph)
            elif all(device.type == "cpu" for device in self._devices):
                held = self._backward_together(gradients, keeps_graph)
            else:
                held = self._backward_on_accelerators(gradients, keeps_graph)
        runs = self._runs
        computed = {run.index for run in runs}
        for leaf in set(range(self._leaves)) - computed:
            held[leaf, leaf + 1] = [None] * len(runs[0].leaves)
        sums = total(
            {node: [_move(each, self._device) for each in values] for node, values in held.items()},
            self._leaves,
            _add_gradients,
        )
        inputs = self._join_input_gradients(runs)
        if not keeps_graph:
            self._is_done, self._queues = True, []
        return [*sums, *inputs]

    def _backward_together(
        self, gradients: Sequence[torch.Tensor | None], keeps_graph: bool
    ) -> dict[Node, Gradients]:
        """Run backward on one thread per device; autograd alone would use one for all."""
        folds: dict[ReplicaRun, TreeAccumulator[Gradients]] = {}  # one per device, so per thread
        for queue in self._queues:
            folds |= dict.fromkeys(queue, self._make_fold())

        def compute(run: ReplicaRun) -> None:
            run.backward(self._gathered, gradients, keeps_graph)
            folds[run].put((run.index, run.index + 1), run.take_gradients())

        # A recomputation sets the states of forward, and then restores those before: with the same
        # ones on all threads, nothing changes.
        assert self._states is not None
        for device in self._devices:
            self._states.restore(device)
        states = GeneratorStates(self._devices)
        run_in_threads(self._make_tasks(compute), ThreadSettings(self._devices))
        if states.has_changed():
            self._drawing.is_serial = True
            raise StateError(
                "random numbers were drawn in backward, which they were not in the first pass, so "
                "they depend on which thread came first: repeat the step, whose micro-batches are "
                "then computed one after another"
            )
        return {node: values for fold in folds.values() for node, values in fold.nodes.items()}

    def _backward_on_accelerators(
        self, gradients: Sequence[torch.Tensor | None], keeps_graph: bool
    ) -> dict[Node, Gradients]:
        """Run backward of all micro-batches in one call, for which autograd has threads.

        It has one per accelerator, one of which executes this function. Calls from other threads
        would wait for that one, which waits for them.
        """
        pairs = [run.pair_gradients(self._gathered, gradients) for run in self._runs]
        roots = [each for some, _ in pairs for each in some]
        given = [each for _, some in pairs for each in some]
        if roots:
            torch.autograd.backward(roots, given, retain_graph=keeps_graph)
        return self._fold_in_order()

    def _backward_one_by_one(
        self, gradients: Sequence[torch.Tensor | None], keeps_graph: bool
    ) -> dict[Node, Gradients]:
        """Run backward of one micro-batch after another, and note whether anything draws."""

        def compute(run: ReplicaRun) -> None:
            assert run.units is not None
            set_state_of_torch(run.state, run.device)
            operators = RandomOperators([], run.device)
            with run.units.install_hooks(), operators:
                run.units.resume(run.calls)
                run.backward(self._gathered, gradients, keeps_graph)
            self._drawing.is_serial |= bool(operators.found)

        run_one_by_one(self._make_tasks(compute), ThreadSettings(self._devices))
        self._drawing.is_known = True
        return self._fold_in_order()

    def _make_fold(self) -> TreeAccumulator[Gradients]:
        return TreeAccumulator(self._leaves, _add_gradients)

    def _fold_in_order(self) -> dict[Node, Gradients]:
        nodes: dict[Node, Gradients] = {}
        for queue in self._queues:
            fold = self._make_fold()
            for run in queue:
                fold.put((run.index, run.index + 1), run.take_gradients())
            nodes |= fold.nodes
        return nodes

    def _join_input_gradients(self, runs: Sequence[ReplicaRun]) -> Gradients:
        """Return the gradients of the arguments that need one."""
        columns = zip(*(run.take_input_gradients() for run in runs), strict=True)
        found: Gradients = []
        for position, column in enumerate(columns):
            leaves = [run.part.leaves[position] for run in runs]
            if all(each is None for each in column):
                found.append(None)
            elif leaves[0].dim() > self._dim:
                found.append(
                    torch.cat(
                        [
                            torch.zeros_like(leaf) if each is None else each
                            for leaf, each in zip(leaves, column, strict=True)
                        ],
                        self._dim,
                    )
                )
            else:
                nodes = {(leaf, leaf + 1): each for leaf, each in enumerate(column)}
                found.append(total(nodes, len(column), add_present))
        return found


def _add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients, the dense ones into the memory of the left one."""
    return [
        add_sparse(one, two)
        if one is not None and two is not None and (one.is_sparse or two.is_sparse)
        else add_present(one, two)
        for one, two in zip(left, right, strict=True)
    ]


def _move(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _isolated(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Return a context that restores all generators after the body."""
    stack = ExitStack()
    for number, device in enumerate(devices):
        stack.enter_context(isolated(device, everything=number == 0))
    return stack


def _without_autocast(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Return the context of a backward, which computes in the dtypes of forward."""
    kinds = {each.type for each in devices if torch.is_autocast_enabled(each.type)}
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
