"""Equal bits in your own training loop: `ls.exact` on a model in torch's DistributedDataParallel.

    begin of micro-batch m    generators seeded with (seed, step, m), fresh buffers
    forward, backward         your code
    end of backward           `.grad` becomes leaf m of the tree, buffers are collected
    end of the last one       leaves are added over all ranks into `.grad`, buffers are merged
    optimizer.step()          your code; the generators continue as if the step had drawn nothing

DistributedDataParallel gives all ranks the same weights, and is idle afterwards: the trainer's
reducer adds the gradients (`lockstep.training.exact_step`). A model that `fully_shard` has sharded
exchanges gradients in backward, in the order of the tree, and `.grad` has this rank's shards
(`lockstep.data_parallel.sharded_gradients`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map_only

from lockstep.audit.audit_config import AuditConfig, read_audit
from lockstep.audit.call_audit import SEVERAL_CALLS, CallAudit
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data.microbatch import align_tensors
from lockstep.data.microbatch_sampler import LoadedHere, MicrobatchSampler, PlannedMicrobatch
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.data_parallel.sharded_gradients import (
    ShardedGradients,
    find_mesh,
    is_fully_sharded,
)
from lockstep.data_parallel.sharded_norm import clip_grad_norm_
from lockstep.kernel.errors import UsageError
from lockstep.kernel.rng_scopes import BEFORE, find_scopes
from lockstep.kernel.seeds import torch_generators
from lockstep.kernel.step_hooks import StepResult
from lockstep.messages import log
from lockstep.model.across_ranks import verify_across_ranks
from lockstep.model.backward_watch import BackwardWatch
from lockstep.model.blocks import find_block_names
from lockstep.model.description import describe_arithmetic, describe_tensors
from lockstep.model.native_seeder import make_rng_scopes, make_seeder
from lockstep.model.watched_calls import Arguments
from lockstep.training.exact_observation import ExactObservation
from lockstep.training.exact_step import ExactModel, ExactStep
from lockstep.training.sharded_step import require_shardable
from lockstep.training.trainer_hooks import current_session
from lockstep.training.unsupported_modules import reject_unsupported_modules

__all__ = ["Exact", "exact"]

Item = TypeVar("Item")

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that have a handle."""


def exact(
    model: nn.Module, microbatches: int = 8, seed: int = 0, *, audit: AuditConfig | bool = True
) -> Exact:
    """Give a training loop the same bits on any number of ranks. Call this on every rank.

    Args:
        model: The model in torch's DistributedDataParallel, or sharded by torch's `fully_shard`; on
            one rank also the model itself. Any of them may be compiled by `torch.compile`.
        microbatches: The number of micro-batches of a batch, at least the number of ranks.
        seed: The random seed of the micro-batches.
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
    return Exact(model, microbatches, seed, read_audit(audit))


class Exact:
    """The handle of a training loop with equal bits; `ls.exact` returns it.

    It has many methods: the loop, its DataLoader, its optimizer and autograd each call it.

    Attributes:
        steps: The number of complete steps.
        is_complete: Whether the gradients of the whole batch are in `.grad`, on every rank: from
            the end of the last micro-batch's backward until the next micro-batch begins.
    """

    def __init__(
        self, model: nn.Module, microbatches: int, seed: int, audit: AuditConfig | None
    ) -> None:
        outer: nn.Module = getattr(model, "_orig_mod", model)
        self._wrapper = outer if isinstance(outer, DistributedDataParallel) else None
        inner: nn.Module = outer if self._wrapper is None else self._wrapper.module
        module: nn.Module = getattr(inner, "_orig_mod", inner)
        self._is_sharded = is_fully_sharded(module)
        group = None if self._wrapper is None else self._wrapper.process_group
        mesh = find_mesh(module) if self._is_sharded else None
        group = group if mesh is None else mesh.ranks
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        rank = dist.get_rank(group) if ranks > 1 else 0
        hosts = on_one_host(ranks) if mesh is None else mesh.hosts
        share = ReplicaShare(microbatches, hosts, rank, self._is_sharded)
        _reject(module, self._wrapper, 1 if self._is_sharded else ranks)
        if torch.get_num_threads() > 1 and share.replica == 0:
            log(
                f"ls.exact: bits depend on the number of intra-op threads, here "
                f"{torch.get_num_threads()}, which launchers set (OMP_NUM_THREADS): call "
                "torch.set_num_threads(1), or use the same number on any number of ranks"
            )
        self._seed = seed
        if ranks > 1:
            settings = {"microbatches": f"{microbatches}", "seed": f"{seed}"}
            settings["intra-op threads"] = f"{torch.get_num_threads()}"
            verify_across_ranks(
                "the model of ls.exact",
                settings | describe_arithmetic() | describe_tensors("model", module),
                "pass the same arguments and the same model to ls.exact on every rank",
                group,
            )
        named = list(module.named_parameters())
        # A graph that contains the whole wrapper is one scope.
        called, device = inner if model is self._wrapper else model, named[0][1].device
        scopes = find_scopes(called, find_block_names(called, None))
        rng, session = make_rng_scopes(scopes, called, seed, device), current_session()
        call = _make_call(called, self._wrapper)
        gradients: GradientReducer | ShardedGradients
        if self._is_sharded:
            gradients = ShardedGradients(named, module)
        else:
            sparse = sparse_weights(module.modules())
            gradients = GradientReducer(named, group, modules=[module], sparse=sparse)
        self._model = ExactModel(
            module,
            [parameter for _, parameter in named],
            gradients,
            rng,
            # A command that observes the steps would record the repetition.
            CallAudit(
                audit if session is None else None,
                share.replica,
                call,
                {"": module},
                rng,
                self._find_position,
                "ls.exact",
                gradients if isinstance(gradients, ShardedGradients) else None,
            ),
            share,
            group,
        )
        self._observation = None if session is None else ExactObservation(session, self._model)
        self._own = set(self._model.parameters)
        self._draws = _DrawsBetweenSteps(device)
        self._sampler: MicrobatchSampler | None = None
        self._planned: deque[PlannedMicrobatch] = deque()
        self._next_position = (0, 0)  # the epoch and the batch after the last complete step
        self._step: ExactStep | None = None
        self._ended: ExactStep | None = None  # the last step, until its optimizer is called
        self._is_weighed = self._has_warned = False
        self._complete = torch.empty(0)  # a sample of the gradients
        self._known_optimizers = weakref.WeakSet[Optimizer]()
        self._left_state = torch.empty(0)  # of torch's generator after the last micro-batch
        self.steps, self.is_complete = 0, False
        self._attach(model)

    def _attach(self, model: nn.Module) -> None:
        """Watch the calls of the model, and the steps of its optimizer."""
        own = weakref.ref(self)
        self._installed = self._model.scopes.install_hooks()
        self._installed.__enter__()
        # After this, so that a micro-batch begins before the model is called as a scope.
        BackwardWatch(model, self)

        def enter(optimizer: Optimizer, *_: Any) -> None:
            if (this := own()) is not None and this._is_own(optimizer):
                this._enter_optimizer(optimizer)

        def leave(optimizer: Optimizer, *_: Any) -> None:
            if (this := own()) is not None and this._is_own(optimizer):
                assert this._observation is not None
                this._observation.commit(optimizer)

        vars(enter)["lockstep_elementwise"] = True  # it may also see a trainer's optimizer
        weakref.finalize(self, register_optimizer_step_pre_hook(enter).remove)
        if self._observation is not None:
            weakref.finalize(self, register_optimizer_step_post_hook(leave).remove)
        _attached.add(self._model.module)
        self._keep_idle()

    def _keep_idle(self) -> None:
        """Let torch's reducer exchange nothing."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = False
            self._wrapper.require_forward_param_sync = False
            if self._wrapper.static_graph:
                self._wrapper._static_graph_delay_allreduce_enqueued = True

    # --- data ---------------------------------------------------------------------------------

    def sampler(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> MicrobatchSampler:
        """Return a batch sampler of this rank's micro-batches, for a DataLoader.

        Args:
            dataset: The map-style dataset of the DataLoader.
            batch_size: The number of samples of a batch, over all ranks.
            shuffle: Whether each epoch has another order.
            seed: The random seed of the order and of the loading of samples.
            drop_last: Whether a smaller last batch is left out.
        """
        share = self._model.share
        sampler = MicrobatchSampler(dataset, batch_size, shuffle, seed, drop_last, share)
        sampler.epoch, sampler.start = self._next_position
        self.use(sampler)
        return sampler

    def use(self, sampler: MicrobatchSampler) -> None:
        """Train on the micro-batches of a sampler that another handle has made, as in a GAN."""
        sampler.attach(self)
        self._sampler = sampler
        self._planned.clear()

    def begin_epoch(self) -> None:
        """Discard the micro-batches that an earlier iteration over the sampler has planned."""
        self._planned.clear()

    def plan(self, microbatch: PlannedMicrobatch) -> None:
        """Expect a micro-batch; the sampler calls this."""
        self._planned.append(microbatch)

    def microbatches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a loader, each of which is a micro-batch; `begin` each of them.

        Tensors that are views into larger ones are copied, since kernels may round differently
        where memory is not aligned.
        """
        for item in loader:
            self.begin()
            yield align_tensors(item)
        if self.is_complete:  # the optimizer may have been skipped
            self._close()

    def _next(self) -> PlannedMicrobatch:
        """Return the next micro-batch of this rank."""
        if self._sampler is None:
            count = self._model.share.microbatches
            pieces, remaining = self._model.share.pieces(count), self._remaining
            index, _ = pieces[-remaining if remaining else 0]
            return PlannedMicrobatch(index, 1, count, count, batch=self.steps)
        if not self._planned:
            raise UsageError(
                f"{self._place}: a micro-batch begins, and the sampler of ls.exact has yielded no "
                "other one: train on each item of the DataLoader once"
            )
        return self._planned.popleft()

    # --- a micro-batch ------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        if self._step is not None:
            return self._step.place
        return f"rank {self._model.share.replica}, step {self.steps}"

    @property
    def _current(self) -> PlannedMicrobatch | None:
        return None if self._step is None else self._step.current

    @property
    def _remaining(self) -> int:
        return 0 if self._step is None else self._step.remaining

    def begin(self) -> None:
        """Begin a micro-batch, so that random numbers before the model's forward depend on it.

        Without this call it begins at the forward. `microbatches` calls it.

        Raises:
            UsageError: The last micro-batch had no backward, or the sampler has yielded no other.
        """
        if self._current is not None:
            raise UsageError(
                f"{self._place} had no backward that reached a parameter: call loss.backward() "
                "once per micro-batch"
            )
        LoadedHere.end()
        planned = self._next()
        if self._step is None:
            self._keep_idle()
            self._close()
            self._draws.suspend()
            settings = "" if self._sampler is None else f", {self._sampler.settings}"
            self._step = ExactStep(self._model, self.steps, planned, settings)
            own = [index for index, _ in self._model.share.pieces(planned.samples)]
            self._model.audit.begin_step(self.steps, own)
            if self._observation is not None:
                self._observation.begin(self.steps, self._find_position)
        self.is_complete = self._is_weighed = False
        self._step.begin(planned)

    def weigh(
        self,
        loss: torch.Tensor,
        *,
        share: float | None = None,
        weight: float | None = None,
        divisor: float = 1,
    ) -> torch.Tensor:
        """Return the part of a micro-batch's loss in the loss of the batch; call backward on it.

        Args:
            loss: The mean loss over the samples of the current micro-batch.
            share: The factor of the loss, the same for any number of ranks; None for that of the
                samples, n_m / B, or 1 / M without a sampler.
            weight: What the mean divides by instead of the samples, such as the number of tokens;
                the gradients are divided by the sum of all weights of the batch.
            divisor: The number by which a framework divides the result before backward.

        Raises:
            UsageError: No micro-batch has begun, or dividing by `divisor` cannot be undone exactly.
        """
        if self._step is None or self._current is None:
            raise UsageError("call exact.weigh(loss) between the model's forward and backward")
        self._is_weighed = True
        part = self._step.weigh(loss, share, weight)
        if self._observation is not None:
            self._step.losses[self._current.number] = part.item()
        if divisor == 1:
            return part
        if torch.ones((), dtype=part.dtype).div(divisor).mul(divisor) != 1:
            raise UsageError(
                f"{self._place}: the loss is divided by {divisor} on this number of ranks, which "
                f"cannot be undone exactly in {part.dtype}: use another number of ranks or of "
                "micro-batches"
            )
        return part * divisor

    def refuse_audit(self, reason: str) -> None:
        """Do not call the model again after the current micro-batch; this is said once.

        Ranks still compare their weights in audited steps.
        """
        self._model.audit.refuse(reason)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients to a 2-norm of at most `max_norm`; return their norm before.

        Call it on every rank between the last backward and `optimizer.step()`. The norm has the
        same bits on any number of ranks, also if the model is sharded.

        Raises:
            UsageError: The gradients are not those of a whole batch.
        """
        if not self.is_complete:
            raise UsageError(
                f"{self._place}: exact.clip_grad_norm_() was called before the last micro-batch of "
                "the batch: call it if exact.is_complete"
            )
        gradients = [p.grad for p in self._model.parameters if p.grad is not None]
        reducer = self._model.gradients
        group = reducer.mesh.shards if isinstance(reducer, ShardedGradients) else None
        norm = clip_grad_norm_(gradients, max_norm, group, f"clipping in step {self.steps - 1}")
        self._complete = self._model.gradients.sample()
        return norm

    def _find_position(self) -> tuple[int, int] | None:
        """Return the micro-batch that is computed, in stage 0; None between two."""
        return None if self._current is None else (self._current.number, 0)

    def before_forward(self, arguments: Arguments) -> Arguments | None:
        """Begin a micro-batch at its first forward in training, unless `begin` was called."""
        if not torch.is_grad_enabled() or not self._is_trainable:
            self._model.audit.refuse(SEVERAL_CALLS)
            return None
        if self._current is None and self._model.module.training:
            drew = self._remaining and LoadedHere.restore is None
            if drew and not torch.equal(torch.default_generator.get_state(), self._left_state):
                raise UsageError(
                    f"{self._place}: random numbers were drawn between two micro-batches, before "
                    "the model was called: iterate over exact.microbatches(loader), or call "
                    "exact.begin() first"
                )
            self.begin()
        if self._current is None:
            return None
        given = align_tensors(arguments[0]), align_tensors(arguments[1])
        return self._model.audit.begin_call(given)

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let the audit record the outputs."""
        self._model.audit.end_call(outputs)

    @property
    def _is_trainable(self) -> bool:
        """Whether a parameter is trained now; a GAN may freeze one of its models for a while."""
        return any(parameter.requires_grad for parameter in self._model.parameters)

    def begin_backward(self) -> None:
        """Prepare for gradients."""
        if self._step is None or self._current is None:
            raise UsageError(
                f"{self._place}: a second backward began after that of a micro-batch: add its "
                "losses, and call backward once"
            )
        self._step.begin_backward()

    @torch.no_grad()
    def end_backward(self) -> None:
        """End the micro-batch, unless this was `torch.autograd.grad`; the last one ends a step."""
        step = self._step
        if step is None or step.current is None or not step.has_gradients:
            return
        if not self._is_weighed and not self._has_warned and self._model.share.replica == 0:
            self._has_warned = True
            log(
                "ls.exact adds the losses of all micro-batches as they are: write "
                "exact.weigh(loss).backward(), or divide each loss by the number of micro-batches "
                "of the whole batch, which does not depend on the number of ranks"
            )
        last = step.current
        self._model.audit.end_microbatch()
        step.end()
        self._left_state = torch.default_generator.get_state()
        if step.remaining == 0:
            self._step, self._ended, self.is_complete = None, step, True
            self._complete = self._model.gradients.sample()
            if self._observation is not None:
                result = StepResult(self.steps, last.epoch, step.loss, last.samples, {}, 0.0)
                self._observation.reduce(step.losses, result)
            self.steps += 1
            is_end = last.batch + 1 == last.batches
            self._next_position = (last.epoch + 1, 0) if is_end else (last.epoch, last.batch + 1)

    def _is_own(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has a parameter of the model."""
        groups = optimizer.param_groups
        return any(parameter in self._own for group in groups for parameter in group["params"])

    def _enter_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse a step of the optimizer in the middle of a batch; leave the step."""
        if self._step is not None:
            raise UsageError(
                f"{self._place}: optimizer.step() was called before the last micro-batch of the "
                "batch: call it if exact.is_complete"
            )
        if self._is_sharded:
            self._check_sharded(optimizer)
        self._close()

    def _check_sharded(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer, or gradients, whose bits depend on the number of ranks."""
        if optimizer not in self._known_optimizers:
            named = self._model.module.named_parameters()
            names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
            require_shardable(optimizer, names, self._model.share.shards)
            self._known_optimizers.add(optimizer)
        sample = self._model.gradients.sample()
        if self.is_complete and not torch.equal(sample, self._complete):
            raise UsageError(
                f"rank {self._model.share.replica}, step {self.steps - 1}: the gradients were "
                "changed after backward, and what is computed from the shards of several ranks, "
                "such as their norm, depends on the number of ranks: clip them by "
                "exact.clip_grad_norm_(max_norm), and scale the loss instead of the gradients"
            )

    def _close(self) -> None:
        """Leave the last step: the buffers and the generators are those of no micro-batch."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.close()
            self._draws.resume()

    # --- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last complete step, for any number of ranks.

        Raises:
            UsageError: A step has begun and is not complete.
        """
        if self._step is not None:
            raise UsageError(f"{self._place}: save the state of ls.exact between two steps")
        epoch, batch = self._next_position
        return {"step": self.steps, "epoch": epoch, "batch": batch, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position; the next iteration over the sampler begins there.

        Raises:
            UsageError: The state was saved with another seed or number of micro-batches.
        """
        for name, value in self._settings.items():
            if state[name] != value:
                raise UsageError(
                    f"the state was saved with {name}={state[name]}, and ls.exact has {value}: "
                    "pass the same value, which determines the bits"
                )
        self.steps, self._next_position = state["step"], (state["epoch"], state["batch"])
        if self._sampler is not None:
            self._sampler.epoch, self._sampler.start = self._next_position

    @property
    def _settings(self) -> dict[str, int]:
        return {"microbatches": self._model.share.microbatches, "seed": self._seed}


class _DrawsBetweenSteps:
    """The generators outside of steps, which do not depend on the micro-batches of this rank.

    Several handles may have open steps at once, such as those of a GAN: the generators continue
    when the optimizers of all of them have been called.
    """

    _suspended: ClassVar[weakref.WeakSet[_DrawsBetweenSteps]] = weakref.WeakSet()
    _restore: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, device: torch.device) -> None:
        while self._restore:  # of a step that was left half way
            self._restore.pop()()
        self._suspended.clear()
        self._generators = [*torch_generators(device).values()]
        self._seeder = make_seeder([BEFORE])

    def suspend(self) -> None:
        """Remember the states at the begin of a step."""
        if not self._suspended:
            states = [(generator, generator.get_state()) for generator in self._generators]
            restore_others = self._seeder.remember_others()

            def restore() -> None:
                for generator, state in states:
                    generator.set_state(state)
                restore_others()

            self._restore[:] = [restore]
        self._suspended.add(self)

    def resume(self) -> None:
        """Restore the states, unless a step of another handle is open."""
        if self in self._suspended:
            self._suspended.remove(self)
            if not self._suspended:
                self._restore.pop()()


def _make_call(called: nn.Module, wrapper: DistributedDataParallel | None) -> Callable[..., Any]:
    """Return a function that calls a model as its wrapper does, which moves inputs to a device."""
    if wrapper is None or not wrapper.device_ids:
        return called
    device = torch.device(wrapper.device_type, wrapper.device_ids[0])

    def call(*args: Any, **kwargs: Any) -> Any:
        return called(
            *tree_map_only(torch.Tensor, move, args), **tree_map_only(torch.Tensor, move, kwargs)
        )

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    return call


def _reject(module: nn.Module, wrapper: DistributedDataParallel | None, ranks: int) -> None:
    """Raise UsageError for what cannot be exact."""
    if wrapper is None and ranks > 1:
        raise UsageError(
            f"ls.exact got a {type(module).__name__} on {ranks} ranks, which may start with "
            "different weights: pass DistributedDataParallel(model)"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError("ls.exact got a model without trainable parameters")
    if module in _attached:
        raise UsageError("ls.exact was called before with this model: use the handle it returned")
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise UsageError(
            "ls.exact cannot train SyncBatchNorm, whose statistics depend on the number of ranks: "
            "use BatchNorm, whose statistics are those of each micro-batch"
        )
    reject_unsupported_modules({"model": module}, allows_shards=is_fully_sharded(module))
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
