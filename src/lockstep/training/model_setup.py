"""The beginning: a trainer's model on this rank, with the blocks alive that are held here.

    a module             moved to the rank's device, and agreed on as it is
    a list of blocks     balance, or one block a stage?
                           yes   this rank's blocks come to life, the rest is on the meta device
                           no    all do, until the first batch has decided on the cut

Then every tensor's first holder gives it to the others that need it. Parameters that are
tied by their memory alone stay so only where all of them stay where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import nn

from lockstep.comm.collectives import all_gather_bytes
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.errors import DisagreementError, LayoutError, UsageError
from lockstep.model.agreement import broadcast_weights
from lockstep.model.compilation import check_static
from lockstep.model.deferred_init import BlockLike, build, build_sequence, move_to_device
from lockstep.model.forward import Metric
from lockstep.model.memory_overlap import allocate_repeated, find_parameter_overlaps
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.executor import PipelineExecutor
from lockstep.pipeline.partition import find_block_names
from lockstep.pipeline.partitioner import Partitioner, PipelineConfig
from lockstep.pipeline.placement import Placement
from lockstep.training.optimization import Optimization
from lockstep.training.shared_storage import share_parameters
from lockstep.training.whole_model import WholeModelExecutor

__all__ = ["Storage", "build_executor", "build_model", "check_options", "distribute_weights"]

Storage = Literal["replicated", "shared"]


def check_options(
    loss: object,
    metrics: Mapping[str, Metric] | None,
    max_grad_norm: float | None,
    storage: str,
    pipeline: PipelineConfig,
) -> None:
    """Raise UsageError or LayoutError for options that cannot work."""
    if loss is None and metrics:
        raise UsageError(
            f"metrics={[*metrics]}: metrics are functions of (outputs, targets), which a model "
            "that returns its loss (loss=None) does not separate; compute them in your own loop "
            "and pass them to step.backward(loss, metrics={...})"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(f"max_grad_norm={max_grad_norm}: expected a positive number")
    if storage not in get_args(Storage):
        raise UsageError(f'storage must be "replicated" or "shared", not {storage!r}')
    if storage == "shared" and pipeline.stages > 1:
        raise LayoutError(
            'storage="shared" needs the whole model on every rank: train without pipeline=, or '
            'with storage="replicated"'
        )


def build_model(
    model: nn.Module | Sequence[BlockLike],
    parallel: ParallelContext,
    seed: int,
    config: PipelineConfig,
) -> tuple[nn.Module, Partitioner]:
    """Return the model, with this rank's blocks at least, and its stages as requested.

    Raises:
        UsageError: The model is none, or on every rank, where a block cannot be built on one.
        LayoutError: The model cannot be partitioned as requested.
    """
    _check_is_model(model)
    if not isinstance(model, nn.Module) and len(model) == config.stages > 1:
        config = replace(config, balance=config.balance or [1] * config.stages)
    if isinstance(model, nn.Module) or config.blocks is not None:
        whole = model if isinstance(model, nn.Module) else build(model, seed, parallel.device)
        check_static(whole)
        whole = move_to_device(whole, parallel.device)
        # A compiled model is a wrapper, whose name is in front of every parameter's.
        names = [] if hasattr(whole, "_orig_mod") else find_block_names(whole, config.blocks)
        return whole, Partitioner.from_config(parallel, whole, names, config)
    numbers = [str(number) for number in range(len(model))]
    partitioner = Partitioner.from_config(parallel, nn.Sequential(), numbers, config)
    return _build_blocks(model, seed, partitioner), partitioner


def _check_is_model(model: object) -> None:
    if not isinstance(model, (nn.Module, Sequence)):
        is_exported = type(model).__name__ == "ExportedProgram"
        advice = "its .module()" if is_exported else "a torch.nn.Module, or a list of blocks"
        raise UsageError(f"the model is of type {type(model).__name__}: pass {advice}")


def _build_blocks(blocks: Sequence[BlockLike], seed: int, partitioner: Partitioner) -> nn.Module:
    """Build this rank's blocks; where that fails on one rank, no other waits for it."""
    failure: Exception | None = None
    said = ""
    try:
        model = build_sequence(
            blocks, partitioner.find_local_blocks(), seed, partitioner.parallel.device
        )
    except Exception as error:  # whatever it is, the other ranks wait for the outcome
        failure = error
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    everyone = all_gather_bytes(said.encode(), "building the blocks", partitioner.parallel.group)
    if failure is not None:
        raise failure
    for rank, each in enumerate(everyone):
        if each:
            raise UsageError(
                f"stopped because rank {rank} could not build its blocks: {each.decode()}"
            )
    return model


def build_executor(
    parallel: ParallelContext,
    model: nn.Module,
    module: nn.Module,
    partitioner: Partitioner,
    optimization: Optimization,
    metrics: Mapping[str, Metric],
    seed: int,
    shared: bool,
) -> WholeModelExecutor | PipelineExecutor:
    """Return what computes the micro-batches of a step in this layout.

    Args:
        parallel: The layout.
        model: The model as it is called, maybe compiled.
        module: The model without the compiler's wrapper.
        partitioner: Decides how the model is partitioned into stages.
        optimization: The optimizer, whose parameters and state are shared here if `shared`.
        metrics: Functions of (outputs, targets) by name.
        seed: The trainer's seed.
        shared: Whether the ranks hold the parameters once.
    """
    if parallel.stages > 1:
        average = optimization.average
        copies = [] if average is None else [average.module]
        return PipelineExecutor(partitioner, module, copies, metrics, seed)
    named = list(module.named_parameters())
    called = list(parallel.modules_with(model).values())
    if shared:
        gradients, optimization.sharded = share_parameters(
            named, called, optimization.optimizer, parallel
        )
    else:
        sparse = sparse_weights(module.modules())
        gradients = GradientReducer(named, parallel.group, modules=called, sparse=sparse)
    names = partitioner.block_names
    return WholeModelExecutor(parallel, model, module, gradients, names, metrics, seed)


def distribute_weights(
    module: nn.Module, parallel: ParallelContext, partitioner: Partitioner, shared: bool = False
) -> None:
    """Give this rank what it needs of the model, and of what else a step calls.

    Args:
        module: The model.
        parallel: The layout.
        partitioner: Decides how the model is partitioned into stages.
        shared: Whether the ranks will hold the parameters once.

    Raises:
        DisagreementError: Parameters have memory in common on some ranks only.
        LayoutError: Parameters have memory in common, which this layout does not keep.
        UsageError: An expanded tensor cannot have memory of its own, or a parameter has a dtype
            that cannot be trained.
    """
    plan = partitioner.plan_without_data() if parallel.stages > 1 else None
    modules = parallel.modules_with(module)
    allocate_repeated(modules)
    _check_dtypes(module, parallel)
    for name, each in modules.items():
        move_to_device(each, parallel.device)
        if name or plan is None:
            broadcast_weights(each, parallel.group, parallel.device)
        else:
            placement = Placement.from_model(parallel, plan.partition, module)
            broadcast_weights(each, parallel.group, parallel.device, placement.is_local)
    _check_memory(modules, parallel, shared)


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
    """Refuse parameters that have memory in common where they would not keep it.

    An optimizer of whole parameters on every rank steps that memory once for each of them,
    with the same bits on any number of ranks.
    """
    pairs = find_parameter_overlaps(modules, attributes=shared)
    everyone = [
        [tuple(pair) for pair in json.loads(each)]
        for each in all_gather_bytes(
            json.dumps(pairs).encode(), "comparing the memory of parameters", parallel.group
        )
    ]
    found = sorted({pair for each in everyone for pair in each})
    if not found:
        return
    first, second = found[0]
    if shared or parallel.stages > 1:
        option = 'storage="shared"' if shared else f"stages={parallel.stages}"
        raise LayoutError(
            f"{first} and {second} are different tensors over the same memory, and would get "
            f"separate memory with {option}: make them one parameter ({second} = {first}), or let "
            "one be a copy (.clone())"
        )
    for rank, theirs in enumerate(everyone):
        for first, second in [pair for pair in found if pair not in theirs]:
            other = next(r for r, each in enumerate(everyone) if (first, second) in each)
            raise DisagreementError(
                f"{first} and {second} share memory on rank {other} but not on rank {rank}: build "
                f"the model in the same way on every rank, or make them one parameter ({second} = "
                f"{first})"
            )
