"""The executor for a whole model on every rank, which computes one micro-batch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from lockstep.audit.microbatch_results import hash_results
from lockstep.compiled_wrapper import unwrap
from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import UsageError
from lockstep.kernel.rng_scopes import RngScopes, find_scopes
from lockstep.kernel.step_context import NOTHING, StepContext
from lockstep.model.activation_checkpointing import ActivationCheckpointing
from lockstep.model.device_errors import explain_device_error
from lockstep.model.evaluation import EvaluationTask, evaluate
from lockstep.model.forward import Metric, forward
from lockstep.model.loss_root import LossRoot, run_backward
from lockstep.model.native_seeder import make_rng_scopes
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.watched_calls import Hashing, ShardedModel, WatchedCalls, watch_calls
from lockstep.training.kept_work import KeptWork
from lockstep.training.microbatch_loop import CollectedGradients, MicrobatchLoop
from lockstep.training.one_pass.grouped_passes import GroupedPasses

__all__ = ["WholeModelExecutor"]

LEFT_EARLY = (
    "the step was left before its last micro-batch: iterate over all of step.microbatches(batch) "
    "inside `with trainer.manual_step() as step`"
)


# It has many attributes: what every step is given, and the parts of the current one.
class WholeModelExecutor:
    """The executor of steps and evaluations on a whole model.

    Args:
        parallel: The layout.
        called: The module that a step calls: `module` itself, or its compiled wrapper.
        module: The model.
        gradients: The reducer of the gradients of its parameters.
        blocks: The names of its blocks, each of which has separate random numbers.
        metrics: Functions of (outputs, targets) by name.
        seed: The seed of all random numbers.
        make_passes: Makes what computes several micro-batches together; None: nothing does.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        called: nn.Module,
        module: nn.Module,
        gradients: CollectedGradients,
        blocks: Sequence[str],
        metrics: Mapping[str, Metric],
        seed: int,
        make_passes: Callable[[RngScopes, LossRoot], GroupedPasses] | None = None,
    ) -> None:
        self._parallel = parallel
        self._called = called
        self._module = module
        self._gradients = gradients
        self._blocks = blocks
        self._metrics = metrics
        self._seed = seed
        self._modules = parallel.modules_with(module)
        self._scopes = make_rng_scopes(find_scopes(called, blocks), called, seed, parallel.device)
        self._roots = LossRoot(parallel.loss_scale)
        self._checkpointing: ActivationCheckpointing | None = None
        if parallel.activation_checkpointing:
            modules = {name: called.get_submodule(name) for name in blocks}
            self._checkpointing = ActivationCheckpointing(modules, parallel.device)
        self.one_pass = None if make_passes is None else make_passes(self._scopes, self._roots)
        self._loop: MicrobatchLoop | None = None
        self._kept: KeptWork | None = None
        self._is_first_of_round = False
        self.repeated = 0  # micro-batches of the step in which the last round ended
        self.parts: list[tuple[CollectedGradients, Buffers]] = []  # of the current step
        self.parameters = list(module.parameters())
        # Another list means that this rank has parts of the model.
        is_sharded = parallel.is_sharded
        self.owned_parameters = list(self.parameters) if is_sharded else self.parameters
        self.placement = None

    @property
    def sharded(self) -> ShardedModel | None:
        """The gradients of a model that is sharded; None: it is not."""
        return cast(ShardedModel, self._gradients) if self._parallel.is_sharded else None

    def enter_group(self) -> None:
        """Discard the plans made for the ranks of an earlier group."""
        self._gradients.enter_group()
        self._is_first_of_round = True

    def keep(self, is_kept: bool) -> None:
        """Keep what this rank has computed of the current step, or count it as repeated."""
        loop = self._loop
        self._kept = loop.keep() if loop is not None and is_kept else None
        self.repeated = 0 if loop is None or is_kept else len(loop.step.computed)

    is_ready = True
    left_early = LEFT_EARLY

    def prepare(self, batch: Any) -> Any:
        """Return the batch unchanged: a whole model needs no preparation."""
        return batch

    @contextmanager
    def open(self, step: StepContext) -> Iterator[MicrobatchLoop]:
        """Seed the generators while the body computes a step."""
        self._loop = None
        self.parts = []
        buffers = Buffers(self._modules)
        loop = MicrobatchLoop(
            step=step,
            called=self._called,
            metrics=self._metrics,
            parallel=self._parallel,
            scopes=self._scopes,
            buffers=buffers,
            gradients=self._gradients,
            roots=self._roots,
            parameters=self.parameters,
            one_pass=self.one_pass,
        )
        self._loop = loop
        self.parts = [(self._gradients, buffers)]
        self._parallel.held_nodes = None
        if self._is_first_of_round:
            loop.is_first_of_round = True
            if self._kept is not None and self._kept.step.number == step.number:
                loop.kept = self._kept
            self._kept = None
            self._is_first_of_round = False
        recomputing = explaining = NOTHING
        if self._checkpointing is not None:
            recomputing = self._checkpointing.enable(buffers)
            explaining = self._checkpointing.explain_errors()
        try:
            with recomputing, self._seed_calls():
                try:
                    with explaining:
                        yield loop
                        if step.batch is None or loop.current is not None:
                            raise UsageError(self.left_early)
                except BaseException as error:
                    loop.close(error)
                    raise
        except BaseException as error:
            # After a failed assertion the generators of the device cannot be restored either.
            if explained := explain_device_error(error, self._module, loop.place):
                raise explained from error
            raise

    def _seed_calls(self) -> AbstractContextManager[None]:
        """Return the context in which the calls of the scopes are seeded in a step."""
        return self._scopes.seed_calls()

    def repeat(self, microbatch: Microbatch, share: float) -> dict[str, int]:
        """Compute a micro-batch again, inside of `open`; return hashes of its results."""
        assert self._loop is not None
        loop = self._loop
        parameters = [part for module in self._modules.values() for part in module.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._gradients.is_observed = True
        try:
            compute = partial(self._compute_again, microbatch, share)
            hashes, loss = self._gradients.hash_again(compute)
            return hash_results([loss], hashes, loop.buffers.current())
        finally:
            self._gradients.discard()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for slot in loop.buffers.slots:
                slot.copy = None

    def _compute_again(
        self, microbatch: Microbatch, share: float, hashing: Hashing
    ) -> tuple[Mapping[str, int], torch.Tensor]:
        """Return the hashes of the gradients of a micro-batch that are freed, and its loss."""
        assert self._loop is not None
        loop = self._loop
        parallel = self._parallel
        loop.buffers.install_copies()
        self._scopes.begin_microbatch(loop.step.number, microbatch.index)
        data = parallel.move_to_device(microbatch.data)
        where = loop.step.place(microbatch.index)
        with parallel.autocast():
            loss, _ = forward(self._called, parallel.loss, {}, data, where)
        root, gradient = self._roots.find(loss, share)
        with parallel.without_autocast(), hashing(root) as freed:
            run_backward(root, gradient, retain_graph=False)
        return freed, loss.detach()

    def find_calls(self) -> list[WatchedCalls]:
        """Return the calls of the model, which the script makes in a manual step."""
        assert self._loop is not None
        modules = {"": self._module}
        watch = partial(watch_calls, self._called)
        buffers = self._loop.buffers
        sharded = self.sharded
        return [
            WatchedCalls(0, modules, self._scopes, buffers, self._called, watch, sharded=sharded)
        ]

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage that are being computed; None between them."""
        return None if self._loop is None else self._loop.position

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Do nothing: no parameter is on several stages."""

    def reset(self) -> None:
        """Do nothing: no messages are left after a failed step."""

    def evaluate(
        self, model: nn.Module | None, batches: Iterable[Batch], task: EvaluationTask
    ) -> Any:
        """Evaluate the model, or a copy of it with other weights."""
        called = self._called if model is None else model
        try:
            return evaluate(called, batches, task, self._seed, self._blocks)
        finally:
            if self._parallel.is_sharded:  # torch keeps what it gathered until a backward
                unwrap(called).reshard()
