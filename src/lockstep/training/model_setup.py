"""The setup of a trainer's model: its blocks, weights, optimizer and executor on this rank.

    a module             moved to the rank's device
    a list of blocks     is the partition known (`balance`, or one block per stage)?
                           yes   this rank's blocks are built, the rest stays on the meta device
                           no    all blocks are built, until the first batch decides the partition

    a meta module        initialized by its modules' `reset_parameters`

Then the first rank that holds a tensor broadcasts it to the other ranks that need it. Different
parameters over the same memory are refused where they would get separate memory. With sharded
storage all of this is done block by block, and each is sharded before the next one gets memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.compiled_wrapper import unwrap
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.data_parallel.sharded_gradients import ShardedGradients
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.step_hooks import StepHook
from lockstep.malloc import return_large_blocks
from lockstep.messages import log
from lockstep.model.across_ranks import broadcast_weights, find_missing, verify_across_ranks
from lockstep.model.blocks import find_block_names
from lockstep.model.compilation import check_compilation, describe_compilation
from lockstep.model.deferred_init import (
    BlockLike,
    ModelLike,
    build,
    build_sequence,
    find_uninitialized,
    initialize,
    materialize_block,
    move_to_device,
)
from lockstep.model.description import describe_module
from lockstep.model.forward import DatasetMetric, Metric
from lockstep.model.held_parameters import HeldParameters
from lockstep.model.memory_overlap import (
    allocate_repeated,
    find_parameter_overlaps,
    find_views,
)
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.state_mutation_check import StateMutationCheck
from lockstep.pipeline.executor import PipelineExecutor
from lockstep.pipeline.partition import Placement
from lockstep.pipeline.partitioner import Partitioner, PipelineConfig
from lockstep.training.hyperparameter_check import HyperparameterCheck
from lockstep.training.one_pass.one_pass import OnePass, can_join
from lockstep.training.one_pass.stage_passes import StagePasses
from lockstep.training.optimization import Optimization, copy_on_meta, make_average
from lockstep.training.optimizer_config import OptimizerConfig
from lockstep.training.storage.sharded_storage import (
    make_mesh,
    require_shardable_model,
    shard_copy,
    shard_model,
)
from lockstep.training.storage.shared_storage import share_parameters
from lockstep.training.unsupported_modules import reject_unsupported_modules
from lockstep.training.whole_model import WholeModelExecutor

__all__ = ["ModelSetup", "set_up_model"]


@dataclass(frozen=True)
class ModelSetup:
    """The model of a trainer, with the optimizer, the executor and the checks that train it.

    Attributes:
        model: The model as it is called, possibly compiled.
        module: The model without the compiler's wrapper.
        optimization: The optimizer, the scheduler and the average of the weights.
        executor: The executor, which computes the micro-batches.
        state_check: The check of what a step may not change.
        settings: The description of the model and the optimizer, which ranks have compared.
        checks: The hooks that check the model and its settings in every step.
    """

    model: nn.Module
    module: nn.Module
    optimization: Optimization
    executor: WholeModelExecutor | PipelineExecutor
    state_check: StateMutationCheck
    settings: dict[str, str]
    checks: list[StepHook]


def set_up_model(
    model: ModelLike,
    parallel: ParallelContext,
    optimizers: Sequence[OptimizerConfig],
    metrics: Mapping[str, Metric],
    pipeline: PipelineConfig,
    seed: int,
    ema_decay: float | None,
    *,
    is_shared: bool = False,
    is_elastic: bool = False,
) -> ModelSetup:
    """Build this rank's part of the model, give all ranks the same weights, make the optimizer.

    Args:
        model: The argument of the trainer.
        parallel: The layout.
        optimizers: The optimizers with their groups and schedulers.
        metrics: The argument of the trainer.
        pipeline: How the model is split into blocks and stages.
        seed: The trainer's seed.
        ema_decay: The decay of the average of the weights; None: no average.
        is_shared: Whether the ranks of a host share one copy of the parameters.
        is_elastic: Whether the number of ranks can change.

    Raises:
        UsageError: The model cannot be trained.
        LayoutError: The model cannot be trained in this layout.
        DisagreementError: Models or optimizers differ between ranks; raised on every rank.
    """
    called, partitioner = _build_model(model, parallel, seed, pipeline)
    module: nn.Module = unwrap(called)
    modules = {"model": module} | parallel.other_modules()
    reject_unsupported_modules(modules)  # also those that callables built
    description = describe_compilation(called) | describe_module("model", module)
    verify_across_ranks("the model of a Trainer", description, "build the same model on every rank")
    is_whole = isinstance(model, nn.Module) or pipeline.blocks is not None
    blocks = model if parallel.is_sharded and not is_whole else None
    average = _distribute_weights(
        module, blocks, parallel, partitioner, seed, ema_decay, is_shared=is_shared
    )
    optimization = Optimization.make(module, optimizers, average, parallel.device)
    of_optimizer = optimization.describe()
    verify_across_ranks(
        "the optimizer of a Trainer",
        of_optimizer,
        "give every rank the same optimizer, groups and scheduler",
    )
    shards = parallel.share.shards if parallel.is_sharded else 0
    optimization.require_split(parallel.stages, is_shared, shards)
    hyperparameters = HyperparameterCheck(modules, optimization.optimizer, parallel.group)
    own_metrics = {
        name: metric for name, metric in metrics.items() if not isinstance(metric, DatasetMetric)
    }
    executor, state_check = _build_executor(
        parallel,
        called,
        partitioner,
        optimization,
        metrics=own_metrics,
        seed=seed,
        shared=is_shared,
        is_elastic=is_elastic,
    )
    checks: list[StepHook] = [hyperparameters, state_check]
    return ModelSetup(
        model=called,
        module=module,
        optimization=optimization,
        executor=executor,
        state_check=state_check,
        settings=description | of_optimizer,
        checks=checks,
    )


def _build_model(
    model: ModelLike,
    parallel: ParallelContext,
    seed: int,
    config: PipelineConfig,
) -> tuple[nn.Module, Partitioner]:
    """Return the model, with at least this rank's blocks built, and its partitioner.

    Raises:
        UsageError: The argument is not a model.
        LayoutError: The model cannot be partitioned as requested.
    """
    _check_is_model(model)
    if not isinstance(model, nn.Module) and len(model) == config.stages > 1:
        config = replace(config, balance=config.balance or [1] * config.stages)
    if isinstance(model, nn.Module) or config.blocks is not None:
        whole = model if isinstance(model, nn.Module) else build(model, seed, parallel.device)
        check_compilation(whole)
        whole = move_to_device(whole, parallel.device)
        names = find_block_names(whole, config.blocks)
        return whole, Partitioner.from_config(parallel, whole, names, config)
    numbers = [str(number) for number in range(len(model))]
    partitioner = Partitioner.from_config(parallel, nn.Sequential(), numbers, config)
    held = () if parallel.is_sharded else partitioner.find_local_blocks()
    built = build_sequence(model, held, seed, parallel.device)
    check_compilation(built)
    return built, partitioner


def _check_is_model(model: object) -> None:
    if not isinstance(model, (nn.Module, Sequence)):
        is_exported = type(model).__name__ == "ExportedProgram"
        advice = "its .module()" if is_exported else "a torch.nn.Module, or a list of blocks"
        raise UsageError(f"the model is of type {type(model).__name__}: pass {advice}")


def _build_executor(
    parallel: ParallelContext,
    model: nn.Module,
    partitioner: Partitioner,
    optimization: Optimization,
    metrics: Mapping[str, Metric],
    seed: int,
    shared: bool,
    is_elastic: bool,
) -> tuple[WholeModelExecutor | PipelineExecutor, StateMutationCheck]:
    """Return the executor of a step in this layout, and the check of what it may not change.

    Args:
        parallel: The layout.
        model: The model as it is called, possibly compiled.
        partitioner: The partitioner of the model into stages.
        optimization: The optimizer. If `shared`, its parameters and state move to shared memory.
        metrics: Functions of (outputs, targets) by name.
        seed: The trainer's seed.
        shared: Whether the ranks share one copy of the parameters.
        is_elastic: Whether the number of ranks can change.
    """
    module = optimization.module
    average = optimization.average
    if parallel.stages > 1:
        copies = [] if average is None else [average.module]
        held = HeldParameters(
            {"": module} | parallel.loss_module(),
            optimizer=optimization.optimizer,
            blocks=partitioner.block_names,
        )
        check = StateMutationCheck({}, held)
        passes = None
        if parallel.device.type == "cpu" and can_join(parallel, model, parallel.loss_module()):
            passes = partial(StagePasses, parallel, metrics)
        return PipelineExecutor(partitioner, module, copies, metrics, seed, check, passes), check
    named = list(module.named_parameters())
    called = list(parallel.modules_with(model).values())
    gradients: GradientReducer | ShardedGradients
    if parallel.is_sharded:
        gradients = ShardedGradients(named, module)
    elif shared:
        gradients, optimization.shared = share_parameters(
            named, called, optimization.optimizer, parallel
        )
    else:
        sparse = sparse_weights(module.modules())
        gradients = GradientReducer(
            named,
            parallel.group,
            modules=called,
            sparse=sparse,
            keeps_sums=is_elastic,
        )
    modules = parallel.modules_with(module)
    held = HeldParameters(
        modules,
        frozenset(modules.keys() - {"", *parallel.loss_module()}),
        optimization.optimizer,
        is_shared=shared,
    )
    names = partitioner.block_names
    make_passes = None
    is_dense = isinstance(gradients, GradientReducer) and not gradients.has_sparse
    if is_dense and can_join(parallel, model, modules):
        make_passes = partial(OnePass, parallel, model, modules, metrics)
    executor = WholeModelExecutor(
        parallel,
        model,
        module,
        gradients,
        blocks=names,
        metrics=metrics,
        seed=seed,
        make_passes=make_passes,
    )
    return executor, StateMutationCheck(modules, held)


def _distribute_weights(
    module: nn.Module,
    blocks: ModelLike | None,
    parallel: ParallelContext,
    partitioner: Partitioner,
    seed: int,
    decay: float | None,
    *,
    is_shared: bool,
) -> AveragedModel | None:
    """Initialize and broadcast the weights of the model and of the modules that a step calls.

    Args:
        module: The model.
        blocks: The blocks of a model that is built block by block, or None.
        parallel: The layout.
        partitioner: The partitioner of the model into stages.
        seed: The trainer's seed.
        decay: The decay of the average of the weights; None: no average.
        is_shared: Whether the ranks of a host share one copy of the parameters.

    Returns:
        The average of the weights, or None.

    Raises:
        LayoutError: Parameters overlap in memory, and would not in this layout.
        UsageError: An expanded tensor cannot be given separate memory, or a parameter has a dtype
            that cannot be trained.
    """
    plan = partitioner.plan_without_data() if parallel.stages > 1 else None
    modules = parallel.modules_with(module)
    allocate_repeated(modules)
    _check_dtypes(module, parallel)
    for name, called in modules.items():
        move_to_device(called, parallel.device)
        if name:
            broadcast_weights(called, parallel.group, parallel.device)
    missing = [] if blocks is not None else find_missing(module, parallel.group)
    for name in find_uninitialized(module, missing)[:1] if parallel.rank == 0 else ():
        log(
            f"{name} was built on the meta device, and its module has no method "
            "reset_parameters(): it is NaN until you load weights, for instance by "
            "ls.load_weights(trainer.module, path)"
        )
    initialized = initialize(module, missing, parallel.device)
    if parallel.is_sharded:
        _check_memory(modules, parallel, shared=False)
        mesh = make_mesh(parallel.hosts, parallel.device)
        if isinstance(blocks, Sequence):
            initialized = _build_each(blocks, module, seed, parallel, mesh)
        return _shard(module, partitioner.block_names, initialized, parallel, mesh, decay)
    for _ in initialized:
        pass
    if plan is None:
        broadcast_weights(module, parallel.group, parallel.device)
    else:
        placement = Placement.from_model(parallel, plan.partition, module)
        broadcast_weights(module, parallel.group, parallel.device, placement.is_local)
    _check_memory(modules, parallel, is_shared)
    return None if decay is None else make_average(module, decay)


def _build_each(
    blocks: Sequence[BlockLike], model: nn.Module, seed: int, parallel: ParallelContext, mesh: Any
) -> Iterator[str]:
    """Build the blocks of a model one by one; yield the name of each, and last the model's."""
    for number, block in enumerate(blocks):
        built = materialize_block(block, seed, number, parallel.device)
        model._modules[str(number)] = built
        _check_memory({str(number): built}, parallel, shared=False)
        require_shardable_model(built, mesh, str(number))
        yield str(number)
    yield ""


def _shard(
    module: nn.Module,
    blocks: Sequence[str],
    initialized: Iterator[str],
    parallel: ParallelContext,
    mesh: Any,
    decay: float | None,
) -> AveragedModel | None:
    """Give memory to each block of a model and shard it; return the average of the weights."""
    require_shardable_model(module, mesh)
    return_large_blocks()  # to the kernel, as soon as a block is sharded
    copies: dict[int, Any] = {}

    def prepare(part: nn.Module) -> None:
        broadcast_weights(part, parallel.group, parallel.device)
        if decay is not None:
            copy_on_meta(part, copies)

    shard_model(module, blocks, mesh, initialized, prepare)
    if decay is None:
        return None
    average = make_average(copies[id(module)], decay)
    shard_copy(average.module, module, blocks)
    return average


def _check_dtypes(module: nn.Module, parallel: ParallelContext) -> None:
    for name, parameter in module.named_parameters():
        half = parameter.dtype is torch.float16 and parameter.requires_grad
        if half and parallel.loss_scale is not None:
            raise UsageError(
                f"the parameter {name} is float16, and autocast_dtype=torch.float16 needs float32 "
                "parameters, whose gradients can be divided by the loss scale: call .float() on "
                "the model"
            )


def _check_memory(
    modules: Mapping[str, nn.Module], parallel: ParallelContext, shared: bool
) -> None:
    """Refuse parameters that overlap in memory if this layout would separate them.

    Without stages, and with replicated storage, the optimizer steps the memory once for each
    parameter, which gives the same bits on any number of ranks.
    """
    option = f"stages={parallel.stages}"
    if shared or parallel.is_sharded:
        option = 'storage="shared"' if shared else 'storage="sharded"'
    elif parallel.stages == 1:
        return
    pairs = find_parameter_overlaps(modules, attributes=shared)
    if shared:
        pairs += [(name, "") for name in find_views(modules[""])]
    if not pairs:
        return
    first, second = max(pairs, key=lambda pair: pair[1] != "")
    if not second:
        raise LayoutError(
            f"something refers to the memory of {first}, such as {first}.data in a list or a "
            "closure, a state_dict() or a numpy array, and would keep the old memory with storage="
            '"shared": let it be a copy (.clone()), delete it, or make it after the Trainer'
        )
    parameters = {
        ".".join(filter(None, (root, name)))
        for root, module in modules.items()
        for name, _ in module.named_parameters(remove_duplicate=False)
    }
    if {first, second} <= parameters:
        advice = f"make them one parameter ({second} = {first})"
    else:
        other = next(name for name in (second, first) if name not in parameters)
        advice = f"delete {other}, or compute it in forward"
    raise LayoutError(
        f"{first} and {second} are different tensors over the same memory, and would get separate "
        f"memory with {option}: {advice}, or let one be a copy (.clone())"
    )
