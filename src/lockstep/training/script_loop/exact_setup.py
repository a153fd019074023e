"""`ls.exact`: takes a model and its optimizers as the script has made them, and returns the handle.

a model                     rank 0's weights and buffers are sent to all ranks
in DistributedDataParallel  which has done that, and is idle from now on
sharded by `fully_shard`    exchanges gradients in backward, in the order of the tree
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.audit.audit_config import AuditConfig, read_audit
from lockstep.call_checks import check_call
from lockstep.checkpoint.save_schedule import CheckpointConfig, Stateful, read_checkpoint_argument
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.compiled_wrapper import unwrap
from lockstep.data.assignment import Hosts, on_one_host
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.data_parallel.sharded_gradients import (
    ShardedGradients,
    ShardingMesh,
    find_mesh,
    free_gathered,
    is_fully_sharded,
)
from lockstep.data_parallel.sharded_norm import clip_grad_norm_
from lockstep.elastic.membership import membership
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.launcher.world import require_world
from lockstep.messages import log
from lockstep.model.across_ranks import broadcast_weights, verify_across_ranks
from lockstep.model.blocks import find_block_names
from lockstep.model.buffer_exchange import GroupExchange
from lockstep.model.collective_calls import wrap_collective_calls
from lockstep.model.description import (
    describe_arithmetic,
    describe_module,
    describe_optimizer,
    describe_tensors,
)
from lockstep.model.group_exchange import GroupMessages
from lockstep.model.held_parameters import HeldParameters
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.state_mutation_check import StateMutationCheck
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.portable.arithmetic import has_portable_bits
from lockstep.sharded_tensors import is_sharded
from lockstep.training.call_hints import ARGUMENTS, explain_methods
from lockstep.training.engine import Engine, EngineOptions
from lockstep.training.hyperparameter_check import HyperparameterCheck
from lockstep.training.learning_rate_schedule import LearningRateSchedule
from lockstep.training.model_setup import ModelSetup
from lockstep.training.one_pass.one_pass import can_join
from lockstep.training.one_pass.script_passes import ScriptPasses
from lockstep.training.optimization import Optimization
from lockstep.training.optimizer_checks import require_complete_state
from lockstep.training.optimizer_config import OptimizerConfig, reject_broken_fused
from lockstep.training.parallel_setup import find_replica_hosts
from lockstep.training.run_record import LoggerLike
from lockstep.training.script_loop.draws_check import DrawsCheck
from lockstep.training.script_loop.exact import Exact
from lockstep.training.script_loop.given_weights import GivenWeights
from lockstep.training.script_loop.script_executor import ScriptExecutor, has_open_step
from lockstep.training.script_loop.script_steps import ScriptSteps, ScriptUpdate
from lockstep.training.session import current_session
from lockstep.training.unsupported_modules import reject_unsupported_modules

__all__ = ["exact"]

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that have a handle."""


@dataclass(frozen=True)
class Given:
    """The model of a script, taken apart.

    Attributes:
        called: What the script calls: the model, or a wrapper around it.
        wrapper: The DistributedDataParallel around the model; None: there is none.
        inner: The model that is called below this wrapper, perhaps compiled.
        module: The model without any wrapper.
        mesh: The ranks over which the model is sharded; None: it is not.
    """

    called: nn.Module
    wrapper: DistributedDataParallel | None
    inner: nn.Module
    module: nn.Module
    mesh: ShardingMesh | None

    @classmethod
    def of(cls, model: nn.Module) -> Given:
        """Take a model apart."""
        outer: nn.Module = unwrap(model)
        wrapper = outer if isinstance(outer, DistributedDataParallel) else None
        inner: nn.Module = model if wrapper is None else wrapper.module
        module: nn.Module = unwrap(inner)
        mesh = None
        if is_fully_sharded(module):
            free_gathered(module)
            mesh = find_mesh(module)
        # A graph that contains the whole wrapper is one scope.
        inner = inner if wrapper is None or model is wrapper else model
        return cls(model, wrapper, inner, module, mesh)


CALLS = (
    "batches",
    "clip_grad_norm_",
    "evaluate",
    "load_state_dict",
    "microbatches",
    "predict",
    "resume",
    "sampler",
    "save_weights",
    "use",
)
"""The methods whose arguments are checked."""

explain_methods(Exact, "exact", dict.fromkeys(CALLS, ""))


@check_call("ls.exact", hints=ARGUMENTS)
def exact(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | int | None = None,
    microbatches: int | None = None,
    seed: int = 0,
    *,
    scheduler: Any = None,
    checkpoint: CheckpointConfig | bool | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    loggers: LoggerLike | Sequence[LoggerLike] | None = None,
    progress: bool | None = None,
    audit: AuditConfig | bool = True,
) -> Exact:
    """Give a training loop the same bits on any number of ranks. Call this on every rank.

    Args:
        model: The model. All ranks get the weights and buffers of rank 0. It may be in torch's
            DistributedDataParallel, sharded by `fully_shard`, or compiled by `torch.compile`.
        optimizer: The optimizer of its parameters, or several; needed for checkpoints, for resuming
            and for elastic runs. Your loop calls `optimizer.step()`.
        microbatches: The number of micro-batches of a batch, at least the number of ranks; None: 8.
        seed: The random seed of the micro-batches, and of the order of the samples.
        scheduler: The learning-rate scheduler, or several, which your loop steps; saved and
            restored with the optimizer.
        checkpoint: When and where checkpoints are saved, from which `lockstep run --resume`
            continues; True for the defaults of `CheckpointConfig`. None: no checkpoints.
        stateful: Objects by name whose state is saved and restored, such as meters, a moving
            average of the weights, or another handle; as in `CheckpointConfig`. In elastic runs
            without checkpoints, a process that joins gets their state.
        loggers: Where rank 0 records the run, as for `Trainer`.
        progress: Whether rank 0 shows its progress, as for `Trainer`.
        audit: When each rank repeats a call of the model, to find hidden state and faulty
            processors: an `AuditConfig`; True for its defaults, False for never. Nothing else finds
            state in attributes and globals.

    Returns:
        The handle of the loop.

    Raises:
        UsageError: The model or its wrapper has something that cannot be exact.
        LayoutError: There are more ranks than micro-batches.
        DisagreementError: The arguments or the models differ between ranks.
    """
    # exact(model, microbatches, seed)
    if isinstance(optimizer, int) and not isinstance(optimizer, bool):
        seed = seed if microbatches is None else microbatches
        microbatches = optimizer
        optimizer = None
    microbatches = 8 if microbatches is None else int(microbatches)
    seed = int(seed)
    _require_model(model, optimizer)
    require_world(keeps_threads=True)
    wrap_collective_calls()
    given = Given.of(model)
    optimizers = _list(optimizer)
    parallel = _make_parallel_context(given, microbatches)
    _reject(given, parallel)
    _warn_of_threads(parallel)
    description = _compare(given, parallel, seed)
    if given.wrapper is None and given.mesh is None and parallel.replicas > 1:
        broadcast_weights(given.module, parallel.group, parallel.device)
    if given.mesh is not None:
        _require_shards(optimizers)
    optimization = _take_optimizers(given.module, optimizers, _list(scheduler))
    ranks = 0 if given.mesh is None else dist.get_world_size(given.mesh.shards)
    optimization.require_split(1, False, ranks)
    setup, gradients = _set_up(given, parallel, optimization, description, seed)
    objects = CheckpointConfig(stateful=stateful or {}).stateful  # checked
    config = _read_checkpoint(checkpoint, objects, optimizers)
    saved: list[Any] | None = None  # what is registered with a run that may be continued
    if _may_be_continued(config):
        saved = [*(objects if config is None else config.stateful).values()]
        sparse = sparse_weights(given.module.modules())
        for one in optimizers:
            require_complete_state(one, optimization.names, sparse, parallel.device)
    update = ScriptUpdate()
    weights = GivenWeights()
    options = EngineOptions(
        seed=seed,
        settings={"microbatches": str(microbatches), "seed": str(seed)},
        loggers=loggers,
        checkpoint=config,
        stateful=objects,
        progress=progress,
        audit=read_audit(audit),
        is_exact=True,
        hooks=[weights],
        has_optimizers=bool(optimizers),
    )
    engine = Engine(setup, parallel, options, update)
    steps = ScriptSteps(
        engine.steps,
        update,
        weights,
        parameters=setup.executor.parameters,
        sample=gradients.sample if isinstance(gradients, ShardedGradients) else None,
        wrapper=given.wrapper,
        follow=partial(_follow, optimization, ranks, may_add=saved is None),
        saved=saved,
    )
    shards = None if given.mesh is None else given.mesh.shards

    def clip(gradients: Sequence[torch.Tensor], max_norm: float, about: str) -> float:
        return clip_grad_norm_(gradients, max_norm, shards, about)

    handle = Exact(engine, steps, given.called, clip, _refuse_flat_loop(config))
    engine.end.settle = steps.settle
    _attached.add(given.module)
    if not engine.is_in_session and engine.run.is_resuming:
        handle.resume()
    return handle


def _require_model(model: Any, optimizer: Any) -> None:
    """Raise UsageError unless the model is one that can be trained."""
    if not isinstance(model, nn.Module):
        advice = "create the model first, and pass one model per call"
        if isinstance(optimizer, nn.Module):
            advice = "the model comes first: write ls.exact(model, optimizer)"
        raise UsageError(
            f"ls.exact takes an instance of torch.nn.Module as model, not {type(model).__name__}: "
            f"{advice}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("ls.exact got a model without trainable parameters")


def _list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


# --- the layout -----------------------------------------------------------------------------


def _make_parallel_context(given: Given, microbatches: int) -> ParallelContext:
    """Return the layout: the ranks of the wrapper, of the mesh, or all ranks."""
    group = None if given.wrapper is None else given.wrapper.process_group
    if given.mesh is not None:
        group = given.mesh.ranks
    if group is not None and dist.get_process_group_ranks(group) == [*range(dist.get_world_size())]:
        group = None
    ranks = dist.get_world_size(group)
    hosts: Hosts = on_one_host(ranks)
    if given.mesh is not None:
        hosts = given.mesh.hosts
    elif group is None:
        hosts = find_replica_hosts(ranks, 1)
    parallel = ParallelContext(
        microbatches=microbatches,
        rank=dist.get_rank(group),
        hosts=hosts,
        device=next(given.module.parameters()).device,
        group=group,
        peers=group,
        messages=GroupMessages(group),
        make_buffer_exchange=partial(GroupExchange, group),
        is_sharded=given.mesh is not None,
    )
    parallel.count_ignored = None  # the loss is the script's own
    return parallel


def _reject(given: Given, parallel: ParallelContext) -> None:
    """Raise UsageError for what cannot be exact."""
    module = given.module
    wrapper = given.wrapper
    session = current_session()
    if session is not None:
        pipeline, is_shared = session.options(module, PipelineConfig())
        if pipeline.stages > 1 or is_shared:
            raise LayoutError("ls.exact trains whole models, without stages or shared parameters")
    if module in _attached:
        raise UsageError(
            "ls.exact was called before with this model: use the handle it returned, or the "
            "framework's trainer that has called it, or pass a copy of the model"
        )
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise UsageError(
            "ls.exact cannot train SyncBatchNorm, whose statistics depend on the number of ranks: "
            "use BatchNorm, whose statistics are those of each micro-batch"
        )
    reject_unsupported_modules({"model": module}, allows_shards=given.mesh is not None)
    if membership() is not None:
        if _attached:
            raise UsageError(
                "ls.exact trains one model in an elastic run, and this is the second handle: train "
                "without --min and --max, or put both models into one module"
            )
        if wrapper is not None:
            raise UsageError(
                "ls.exact got a DistributedDataParallel in an elastic run, whose ranks come and "
                "go: pass the model itself"
            )
        if given.mesh is not None:
            raise UsageError(
                "ls.exact got a model sharded by fully_shard in an elastic run, and the shards of "
                'a lost rank cannot be replaced: use ls.Trainer with storage="sharded", or train '
                "without --min and --max"
            )
    if wrapper is None:
        return
    refused = {
        "a communication hook": wrapper._comm_hooks,
        "mixed_precision": wrapper.mixed_precision,
        "ignored or delayed parameters": wrapper.parameters_to_ignore,
    }
    for name, value in refused.items():
        if value:
            raise UsageError(
                f"ls.exact cannot train a DistributedDataParallel with {name}: leave it out"
            )


def _warn_of_threads(parallel: ParallelContext) -> None:
    if parallel.threads > 1 and parallel.rank == 0 and not has_portable_bits():
        log(
            f"ls.exact: bits depend on the number of intra-op threads, here {parallel.threads}, "
            "which launchers set (OMP_NUM_THREADS): call torch.set_num_threads(1), or use the "
            "same number on any number of ranks"
        )


def _compare(given: Given, parallel: ParallelContext, seed: int) -> dict[str, str]:
    """Compare the arguments and the model on all ranks; return what a checkpoint says of it."""
    if parallel.replicas > 1:
        settings = {
            "microbatches": f"{parallel.microbatches}",
            "seed": f"{seed}",
        }
        if not has_portable_bits():
            settings["intra-op threads"] = f"{parallel.threads}"
        verify_across_ranks(
            "the model of ls.exact",
            settings | describe_arithmetic() | describe_module("model", given.module),
            "pass the same arguments and the same model to ls.exact on every rank",
            parallel.group,
        )
    # Without the types of modules, which `fully_shard` replaces.
    return describe_tensors("model", given.module)


# --- the optimizers -------------------------------------------------------------------------


def _require_shards(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError for an optimizer that was made while the model was gathered."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not all(is_sharded(parameter) for group in groups for parameter in group["params"]):
        raise UsageError(
            "the optimizer has parameters that are not sharded, such as those that a call of the "
            "model has gathered: make the optimizer after fully_shard and before the first call, "
            "or call model.reshard() first"
        )


def _take_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
) -> Optimization:
    """Return the optimizers that the script has made, with their schedulers."""
    schedules = []
    for optimizer in optimizers:
        own = [one for one in schedulers if getattr(one, "optimizer", None) is optimizer]
        schedules.append(_take_optimizer(optimizer, next(iter(own), None)))
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if {*stepped}.isdisjoint(module.parameters()):
            raise UsageError(
                f"ls.exact got a {type(optimizer).__name__} without any parameter of the model: "
                "make the optimizer from model.parameters(), and pass that of another model to the "
                "handle of the other model"
            )
    known = [schedule.scheduler for schedule in schedules]
    for scheduler in schedulers:
        if scheduler in known:
            continue
        name = type(scheduler).__name__
        if any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in optimizers):
            raise UsageError(
                f"ls.exact got a {name} as a second scheduler of the same optimizer: pass one, "
                "such as torch's ChainedScheduler or SequentialLR of both"
            )
        raise UsageError(
            f"ls.exact got a {name} of an optimizer that it does not have: pass the optimizer, too"
        )
    return Optimization(module, schedules, None, is_combined=True)


def _take_optimizer(optimizer: Optimizer, scheduler: Any = None) -> LearningRateSchedule:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"ls.exact got a {type(optimizer).__name__} as optimizer: pass the object whose step() "
            "your loop calls, or a list of several"
        )
    reject_broken_fused(optimizer)
    make_scheduler = None if scheduler is None else (lambda _: scheduler)
    config = OptimizerConfig(
        lambda _: optimizer, scheduler=make_scheduler, scheduler_interval="manual"
    )
    return LearningRateSchedule(config, optimizer)


def _follow(
    optimization: Optimization, shards: int, optimizer: Optimizer, *, may_add: bool
) -> None:
    """Take part in the steps of an optimizer that steps for the first time.

    Args:
        optimization: The known optimizers.
        shards: The number of ranks that share the model, or 0.
        optimizer: The optimizer.
        may_add: Whether it may be one that is not known: no other process continues the run.
    """
    if optimizer in optimization.optimizers:
        return
    if not may_add:
        raise UsageError(
            f"a {type(optimizer).__name__} that ls.exact does not know steps the model, and would "
            "be missing in checkpoints: pass all optimizers, as in ls.exact(model, [first, second])"
        )
    optimization.add(_take_optimizer(optimizer))
    optimization.require_split(1, False, shards)


def _read_checkpoint(
    checkpoint: CheckpointConfig | bool | None,
    stateful: Mapping[str, Stateful],
    optimizers: Sequence[Optimizer],
) -> CheckpointConfig | None:
    """Return the settings of checkpoints, with the objects of `stateful`."""
    config = read_checkpoint_argument(checkpoint)
    if _may_be_continued(config) and not optimizers:
        raise UsageError(
            "ls.exact needs the optimizers to save and to continue a training: write "
            "ls.exact(model, optimizer, microbatches=...)"
        )
    return config and replace(config, stateful={**config.stateful, **stateful})


def _may_be_continued(config: CheckpointConfig | None) -> bool:
    """Return whether another process may continue this training."""
    return config is not None or membership() is not None


def _refuse_flat_loop(config: CheckpointConfig | None) -> str:
    """Return why a loop over micro-batches cannot be continued; "" if it need not be."""
    if membership() is not None:
        what = "an elastic run"
    elif config is not None:
        what = "a run with checkpoint="
    else:
        return ""
    return (
        f"{what} continues in the middle of an epoch, which exact.microbatches and exact.sampler "
        "cannot: write `for batch in exact.batches(dataset, batch_size):` and a loop over each "
        "batch, or save exact.state_dict() by yourself"
    )


# --- the executor ---------------------------------------------------------------------------


def _set_up(
    given: Given,
    parallel: ParallelContext,
    optimization: Optimization,
    description: Mapping[str, str],
    seed: int,
) -> tuple[ModelSetup, GradientReducer | ShardedGradients]:
    """Return the model with its executor and its checks, and the sums of its gradients."""
    module = given.module
    named = list(module.named_parameters())
    gradients: GradientReducer | ShardedGradients
    if given.mesh is not None:
        gradients = ShardedGradients(named, module)
    else:
        sparse = sparse_weights(module.modules())
        gradients = GradientReducer(
            named,
            parallel.group,
            modules=[module],
            sparse=sparse,
            keeps_sums=membership() is not None,
        )
    blocks = find_block_names(given.inner, None)
    modules = {"": module}
    make_passes = None
    is_dense = isinstance(gradients, GradientReducer) and not gradients.has_sparse
    if is_dense and can_join(parallel, given.inner, modules):
        make_passes = partial(ScriptPasses, parallel, given.inner, modules)
    executor = ScriptExecutor(
        parallel,
        given.inner,
        module,
        gradients,
        blocks=blocks,
        metrics={},
        seed=seed,
        make_passes=make_passes,
    )
    combined = optimization.optimizer
    state_check = StateMutationCheck(modules, HeldParameters(modules, optimizer=combined))
    hyperparameters = HyperparameterCheck({"model": module}, combined, parallel.group, is_loop=True)
    settings = dict(description)
    for number, optimizer in enumerate(optimization.optimizers):
        suffix = "" if len(optimization.optimizers) == 1 else f"[{number}]"
        settings |= describe_optimizer(f"optimizer{suffix}", optimizer, optimization.names)
    setup = ModelSetup(
        model=given.inner,
        module=module,
        optimization=optimization,
        executor=executor,
        state_check=state_check,
        settings=settings,
        checks=[hyperparameters, state_check, DrawsCheck(parallel.device, has_open_step)],
    )
    return setup, gradients
