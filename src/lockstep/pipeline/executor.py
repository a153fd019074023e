"""The executor of a model in pipeline stages, one or several of which are on this rank.

first batch   partitions the model into stages, unless that was possible without data
each step     runs the batch through the stages of this rank, with a ScheduleExecutor
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data.microbatch import Batch
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.step_context import StepContext
from lockstep.model.deferred_init import named_tensors, release
from lockstep.model.evaluation import EvaluationTask
from lockstep.model.forward import Metric
from lockstep.model.python_state import find_python_states
from lockstep.model.state_mutation_check import StateMutationCheck
from lockstep.model.static_shapes import StaticShapes
from lockstep.model.watched_calls import WatchedCalls
from lockstep.pipeline.composition import Composition
from lockstep.pipeline.evaluator import PipelineEvaluator
from lockstep.pipeline.grouping import GroupSizeTuner
from lockstep.pipeline.joint_passes import JointPasses
from lockstep.pipeline.partition import Placement
from lockstep.pipeline.partitioner import Partitioner, StagePlan
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.schedule_executor import ScheduleExecutor
from lockstep.pipeline.stage import Stage
from lockstep.pipeline.tied_weights import find_tied_parameters

__all__ = ["PipelineExecutor"]


class PipelineExecutor:
    """Computes steps and evaluations through the stages of this rank.

    Args:
        partitioner: The partitioner, which plans the stages at once if it needs no data,
            otherwise with the first batch.
        module: The whole model; this rank keeps its own part.
        copies: Copies of the model, such as its average, which are partitioned in the same way.
        metrics: Functions of (outputs, targets) by name.
        seed: The seed of all random numbers.
        state_check: The check of what a step may not change, which gets this rank's modules.
        make_passes: Makes what computes several micro-batches of a stage together, from the stage,
            its modules, whether it is the last one, and why its micro-batches are computed one by
            one ("" if they are not); None: nothing does.

    Attributes:
        placement: The stages that hold each tensor; None before the model is partitioned.
        parameters: The parameters that this rank holds.
        owned_parameters: The parameters that this rank adds to the gradient norm: a tied
            parameter has one owner, so it counts once.
        passes: What computes several micro-batches together, by the number of the stage.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        module: nn.Module,
        copies: Sequence[nn.Module],
        metrics: Mapping[str, Metric],
        seed: int,
        state_check: StateMutationCheck,
        make_passes: Callable[[Stage, Mapping[str, nn.Module], bool, str], JointPasses]
        | None = None,
    ) -> None:
        self._partitioner = partitioner
        self._module = module
        self._copies = list(copies)
        self._metrics = metrics
        self._seed = seed
        self._state_check = state_check
        self._make_passes = make_passes
        self.passes: dict[int, JointPasses] = {}
        self._pipeline: Pipeline | None = None
        self._running: ScheduleExecutor | None = None
        self.placement: Placement | None = None
        self._composition: Composition | None = None
        self.parameters: list[nn.Parameter] = []
        self.owned_parameters: list[nn.Parameter] = []
        if (plan := partitioner.plan_without_data(module)) is not None:
            self._partition(plan)

    @property
    def is_ready(self) -> bool:
        """Whether the model has been partitioned."""
        return self._pipeline is not None

    @property
    def parts(self) -> list[tuple[GradientReducer, Buffers]]:
        """The gradients and buffers of each local stage in the current step."""
        if self._running is None:
            return []
        return [(stage.gradients, stage.buffers) for stage in self._linked().stages.values()]

    def prepare(self, batch: Any) -> Batch:
        """Partition the model with the first batch, unless it has been partitioned already.

        Returns:
            This rank's part of the batch.
        """
        part = self._partitioner.parallel.split(batch)
        if self._pipeline is None:
            first = part.microbatches[0] if part.microbatches else None
            with StaticShapes(self._module):  # measuring compiles blocks that steps call
                plan = self._partitioner.plan(self._module, first)
            self._partition(plan)
        return part

    @contextmanager
    def open(self, step: StepContext) -> Iterator[ScheduleExecutor]:
        """Return a context in which the body computes a step with the local stages."""
        self._running = ScheduleExecutor(
            step, self._linked(), self._metrics, self._composition, self.passes
        )
        with self._running.activate():
            yield self._running

    @property
    def group_sizes(self) -> GroupSizeTuner:
        """What chooses the size of groups on the first rank of a replica."""
        return self._linked().group_sizes

    def find_note(self) -> str:
        """Return why micro-batches of a stage here are computed one by one; "" if none are."""
        notes = {number: passes.note for number, passes in self.passes.items()}
        return next((f"stage {number}: {note}" for number, note in notes.items() if note), "")

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage of the current action; None between actions."""
        return None if self._running is None else self._running.position()

    def find_calls(self) -> list[WatchedCalls]:
        """Return the calls of the blocks of each local stage."""
        pipeline = self._linked()
        return [
            WatchedCalls(
                number,
                stage.blocks,
                stage.scopes,
                stage.buffers,
                call=stage.call_again,
                watch=stage.watch,
                obstacle="it shares weights with other stages"
                if pipeline.find_tied_parameters(number)
                else "",
                input_gradients=partial(getattr, stage, "input_gradients"),
            )
            for number, stage in pipeline.stages.items()
        ]

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Send the reduced gradients of tied parameters to every stage that holds them."""
        self._linked().broadcast_tied_gradients(attempt)

    def reset(self) -> None:
        """Replace the links between stages: messages of the failed step may be in transit."""
        self._linked().connect()

    def evaluate(
        self, model: nn.Module | None, batches: Iterable[Batch], task: EvaluationTask
    ) -> Any:
        """Evaluate the model, or one of its copies."""
        remaining = iter(batches)
        first = next(remaining)
        self.prepare(first)
        assert self.placement is not None
        evaluated = self._module if model is None else model
        composition = self._composition
        if composition is not None and evaluated is not self._module:
            composition = composition.apply_to(evaluated)
        evaluator = PipelineEvaluator(
            evaluated, self.placement, self._linked(), task, self._seed, composition
        )
        return evaluator.run(chain([first], remaining))

    def _linked(self) -> Pipeline:
        assert self._pipeline is not None, "the model has not been partitioned yet"
        return self._pipeline

    def _partition(self, plan: StagePlan) -> None:
        """Build this rank's stages, and free the rest of the model."""
        placement = Placement.from_model(self._partitioner.parallel, plan.partition, self._module)
        pipeline = self._build_pipeline(plan, placement)
        self._state_check.watch(pipeline.modules())
        pipeline.find_views(
            {
                name: tensor
                for name, tensor in named_tensors(self._module).items()
                if tensor.numel() and not tensor.is_meta and not placement.is_local(name)
            }
        )
        for module in (self._module, *self._copies):
            release(module, placement.is_local)
        self._state_check.held.take_memory()
        self.placement = placement
        self._composition = plan.composition
        self._pipeline = pipeline
        if self._make_passes is not None:
            for number, stage in pipeline.stages.items():
                modules = pipeline.add_loss(number, stage.blocks)
                is_last = number == pipeline.last
                obstacle = _find_obstacle(pipeline, stage)
                self.passes[number] = self._make_passes(stage, modules, is_last, obstacle)
        named = list(self._module.named_parameters())
        self.parameters = [tensor for name, tensor in named if placement.is_local(name)]
        self.owned_parameters = [tensor for name, tensor in named if placement.is_owned(name)]

    def _build_pipeline(self, plan: StagePlan, placement: Placement) -> Pipeline:
        """Build this rank's stages, and connect them to their neighbors."""
        model = self._module
        parallel = placement.parallel
        partition = plan.partition
        parameters = dict(model.named_parameters())
        sparse = sparse_weights(model.modules())
        blocks = [partition.select_blocks(model, n) for n in range(len(partition.ranges))]
        owners = {name: stages[0] for name, stages in placement.stages_by_name.items()}
        states = find_python_states(blocks, parallel.loss, model)
        stages = [
            Stage(
                number,
                blocks[number],
                placement.make_scopes(model, number, self._seed),
                gradients=GradientReducer(
                    [(name, parameters[name]) for name in parameters if owners[name] == number],
                    parallel.peers,
                    sparse=sparse,
                ),
                checkpointing=parallel.make_checkpointing(blocks[number]),
                device=parallel.device,
                state=states[number],
                shares_rank=len(placement.stages) > 1,
            )
            for number in placement.stages
        ]
        ties = find_tied_parameters(parameters, placement.stages_by_name)
        return Pipeline(parallel, stages, plan.schedule, plan.stages_per_rank, ties)


def _find_obstacle(pipeline: Pipeline, stage: Stage) -> str:
    """Return why a stage never computes several micro-batches together; "" if it may."""
    if pipeline.find_tied_parameters(stage.number):
        return "it shares weights with other stages"
    if stage.gradients.has_sparse:
        return "it has sparse gradients"
    is_last = stage.number == pipeline.last
    return "the model returns its loss" if is_last and pipeline.parallel.loss is None else ""
