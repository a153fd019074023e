"""Evaluation through pipeline stages: forward only.

rank 0   stage 0   F0 F1 F2 F3 | F0 F1 ...      the next batch follows at once
rank 1   stage 1      F0 F1 F2 F3 | F0 ...      computes loss and metrics of every micro-batch
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import nn

from lockstep.data.microbatch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import StoppedError
from lockstep.kernel.seeds import isolated
from lockstep.launcher.failure_codes import is_lost_peer
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.evaluation import EvaluationTask, evaluation_mode
from lockstep.pipeline.aliasing import SentTensors
from lockstep.pipeline.composition import Composition
from lockstep.pipeline.p2p import LinkError, RngState
from lockstep.pipeline.partition import Placement
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.stage import StageInput, make_first_input

__all__ = ["PipelineEvaluator"]

EVALUATION = 1 << 62
"""Added to batch numbers in messages, so that they differ from the numbers of step attempts."""


class PipelineEvaluator:
    """One evaluation of the trained model, or of a copy, through the local stages.

    `composition` is checked before, if it is given.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        pipeline: Pipeline,
        task: EvaluationTask,
        seed: int,
        composition: Composition | None,
    ) -> None:
        self._composition = composition
        self._model = model
        self._pipeline = pipeline
        self._task = task
        self._parallel = pipeline.parallel
        self._blocks = {s: placement.partition.select_blocks(model, s) for s in pipeline.stages}
        self._scopes = {s: placement.make_scopes(model, s, seed) for s in pipeline.stages}
        modules = {s: pipeline.add_loss(s, blocks) for s, blocks in self._blocks.items()}
        self._buffers = {s: Buffers(modules[s]) for s in pipeline.stages}
        self._sent: list[tuple[str, SentTensors]] = []
        self._where = f"rank {self._parallel.rank}, an evaluation"

    def run(self, batches: Iterable[Batch]) -> Any:
        """Evaluate all batches, and combine the results of all ranks."""
        failed: Exception | None = None
        failure = ""
        try:
            self._run(batches)
        except LinkError:
            raise
        except Exception as error:
            if is_lost_peer(error):
                raise
            failed = error
            message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            failure = str(error) if isinstance(error, StoppedError) else f"{self._where}: {message}"
            with suppress(RuntimeError):
                self._pipeline.fail(failure, EVALUATION)
        try:
            return self._task.combine(failure)
        except StoppedError:
            self._pipeline.connect()
            if failed is not None and not isinstance(failed, StoppedError):
                raise failed from None
            raise

    def _run(self, batches: Iterable[Batch]) -> None:
        with ExitStack() as stack:
            stack.enter_context(evaluation_mode(self._model))
            stack.enter_context(isolated(self._parallel.device, everything=True))
            stack.enter_context(CollectiveCallGuard(lambda: self._where))
            for scopes in self._scopes.values():
                stack.enter_context(scopes.install_hooks())
            for number, batch in enumerate(batches):
                if number == 0 and self._composition is not None and batch.microbatches:
                    given = make_first_input(batch.microbatches[0], self._parallel, self._where)
                    with self._parallel.autocast():
                        self._composition.check(given.data)
                self._run_batch(number, batch)

    def _run_batch(self, number: int, batch: Batch) -> None:
        for stage in sorted(self._pipeline.stages):
            for position, microbatch in enumerate(batch.microbatches):
                more = position + 1 < len(batch.microbatches)
                self._forward(stage, number, microbatch, more)
            while self._sent:
                where, sent = self._sent.pop()
                sent.check(where)
            outputs = self._pipeline.links[stage].outputs
            if outputs is not None:
                outputs.drain(
                    left=len(batch.microbatches)
                )  # limits how far this stage is ahead of the next one

    def _forward(self, stage: int, number: int, microbatch: Microbatch, more: bool) -> None:
        parallel = self._parallel
        links = self._pipeline.links[stage]
        index = microbatch.index
        rank = parallel.rank
        where = f"rank {rank}, stage {stage}, evaluation batch {number}, micro-batch {index}"
        self._where = where
        if links.inputs is None:
            given = make_first_input(microbatch, parallel, where)
        else:
            message = links.inputs.receive(EVALUATION + number, index, more)
            given = StageInput.from_message(*message, links.inputs.rng_state)
        scopes = self._scopes[stage]
        inspector = self._pipeline.stages[stage].inspector
        scopes.begin_microbatch(-1 - number, index, given.rng_state.last_call)
        with self._buffers[stage].preserve():
            with parallel.autocast():
                blocks = list(self._blocks[stage].values())
                value = inspector.call_blocks(blocks, given.data, where)
                rng_state = RngState(scopes.last_call)
                if links.outputs is None:
                    scopes.begin_loss()
                    data = parallel.move_to_device(microbatch.data)
                    compute = partial(self._task.compute, data=data, where=where)
                    result = inspector.compute_loss(compute, value, where)
                    given.received.check(where)
                else:
                    flat = inspector.flatten_output(value, blocks, given.received, where)
            scopes.pause()
            if links.outputs is None:
                self._task.add(number, microbatch, data, result, where)
        if links.outputs is not None:
            structure, tensors = flat
            links.outputs.send(structure, tensors, EVALUATION + number, index, rng_state)
            self._sent.append((where, SentTensors(tensors)))
