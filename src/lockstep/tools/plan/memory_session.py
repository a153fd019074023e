"""The session of `lockstep plan`: the memory of a script's training, measured in its steps.

Trainer()         the process without the model: its memory less that of the parameters
first steps       the peak of the memory, in a thread; the outputs of the blocks, by hooks
after the last    the state of the optimizer; SessionComplete unwinds the script
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lockstep.kernel.errors import UsageError
from lockstep.kernel.step_context import Position, StepContext
from lockstep.kernel.step_hooks import StepResult
from lockstep.launcher.world import world
from lockstep.malloc import release_freed_memory
from lockstep.model.blocks import Blocks, find_block_names
from lockstep.model.deferred_init import named_tensors
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.tools.plan.live_tensors import LiveTensors
from lockstep.tools.plan.memory_plan import TrainingMemory, count_sums
from lockstep.training.optimizer_checks import require_elementwise
from lockstep.training.session import ObservedTrainer, SessionComplete
from lockstep.training.storage.sharded_step import require_shardable

__all__ = ["MemorySession", "count_parameter_bytes", "measuring_outputs", "read_process"]

STEPS = 3
"""The steps until the memory of a process stays the same: the first one makes the optimizer's
state, and the later ones use the memory that the first has freed."""

INTERVAL = 0.005
"""Seconds between two readings of the memory."""

PRIVATE = "/proc/self/smaps_rollup", ("Private_Dirty:",)
RESIDENT = "/proc/self/status", ("RssAnon:", "RssShmem:")


class MemorySession:
    """The measurement of the first trainer of a script, on a single rank.

    Args:
        record: Called with the `TrainingMemory`.
        ranks: The number of ranks of the plan.

    Attributes:
        optimizers: The optimizers of the training.
    """

    def __init__(self, record: Callable[[TrainingMemory], None], ranks: int) -> None:
        self._record = record
        self._ranks = ranks
        self._blocks: Blocks | None = None
        self._observed: ObservedTrainer | None = None
        self.optimizers: Sequence[Optimizer] = ()

    def options(self, model: nn.Module | Any, given: PipelineConfig) -> tuple[PipelineConfig, bool]:
        """Return one stage, and storage that is not shared."""
        self._blocks = given.blocks
        return PipelineConfig(blocks=given.blocks), False

    def attach(self, trainer: ObservedTrainer) -> MeasuredTrainer:
        """Return the observer of a newly constructed trainer.

        Raises:
            UsageError: The memory of such a training cannot be planned.
        """
        self.optimizers = trainer.optimizers
        self._observed = trainer
        if trainer.parallel.device.type != "cpu":
            raise UsageError(
                f"lockstep plan measures trainings on the CPU, and this one is on "
                f"{trainer.parallel.device}: hide the accelerators, for instance by "
                "CUDA_VISIBLE_DEVICES="
            )
        return MeasuredTrainer(self, trainer, find_block_names(trainer.module, self._blocks))

    def find_refusals(self, module: nn.Module) -> dict[str, str]:
        """Return why the backend or an optimizer excludes "shared" or "sharded" storage."""
        names: dict[torch.Tensor, str] = {one: name for name, one in module.named_parameters()}
        backend = "" if world().backend == "lockstep" else 'it needs the backend "lockstep"'
        refusals = {"shared": backend, "sharded": ""}
        if len(self.optimizers) > 1:
            refusals["shared"] = "it steps one optimizer"
        for optimizer in self.optimizers:
            checks: dict[str, Callable[[], None]] = {
                "shared": partial(require_elementwise, optimizer),
                "sharded": partial(require_shardable, optimizer, names, self._ranks),
            }
            for storage, check in checks.items():
                try:
                    check()
                except UsageError as error:
                    refusals[storage] = refusals[storage] or error.reason
        return {storage: reason for storage, reason in refusals.items() if reason}

    def end(self, training: TrainingMemory) -> NoReturn:
        """Record what was measured, and raise SessionComplete, which ends the script."""
        self._record(training)
        raise SessionComplete

    def settle(self) -> None:
        """Commit the last step of a loop, after the program has ended."""
        if self._observed is not None:
            self._observed.settle()

    def record_unfinished(self) -> None:
        """Do nothing: steps that do not end are not measured."""


class MeasuredTrainer:
    """The observer of one trainer."""

    checkpoint: Path | None = None

    def __init__(self, session: MemorySession, trainer: ObservedTrainer, blocks: list[str]) -> None:
        self._session = session
        self._trainer = trainer
        self._blocks = [trainer.module.get_submodule(name) for name in blocks]
        self._outputs = [0] * len(blocks)
        self._steps = 0
        self._live = LiveTensors()
        self._live.ignore(named_tensors(trainer.module).values())
        self._parameters = count_parameter_bytes(trainer.module)
        self._gradients = count_parameter_bytes(trainer.module, only_trainable=True)
        self._process, self._shared = read_process(self._parameters)
        self._peak = PeakMemory()

    def begin_step(self, step: int) -> MeasuredTrainer:
        """Return this object, which observes the step."""
        return self

    def recording(self, step: StepContext, position: Position) -> AbstractContextManager[None]:
        """Return the context in which the first step is measured."""
        return nullcontext() if self._steps else self._measure()

    @contextmanager
    def _measure(self) -> Iterator[None]:
        # A dispatch mode does not see the tensors of a compiled graph.
        eager = torch.compiler.set_stance("force_eager")
        with eager, measuring_outputs(self._blocks, self._outputs), self._live:
            yield

    def commit(self, result: StepResult) -> None:
        """Record the memory and raise SessionComplete after the last step."""
        self._steps += 1
        if self._steps < STEPS:
            return
        leaves = len(result.losses)
        state = self._trainer.optimizer_state().values()
        optimizer = sum(value.nbytes for value in state if torch.is_tensor(value))
        sums = self._gradients * count_sums(range(leaves), leaves)
        activations = max(self._live.peak - sums, 0)
        self._session.end(
            TrainingMemory(
                parameters=self._parameters,
                gradients=self._gradients,
                optimizer=optimizer,
                activations=activations,
                unused=max(self._peak.stop() - optimizer - sums - activations, 0),
                process=self._process,
                shared=self._shared,
                leaves=leaves,
                refusals=self._session.find_refusals(self._trainer.module),
                blocks=tuple(map(count_parameter_bytes, self._blocks)),
                outputs=tuple(self._outputs),
                is_exact=self._trainer.is_exact,
            )
        )


def count_parameter_bytes(module: nn.Module, *, only_trainable: bool = False) -> int:
    """Return the bytes of the parameters of a module."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad or not only_trainable)


@contextmanager
def measuring_outputs(blocks: Sequence[nn.Module], sizes: list[int]) -> Iterator[None]:
    """Note the bytes of the largest output of each block in `sizes` while the body runs."""

    def measure(number: int, output: Any) -> None:
        size = sum(leaf.nbytes for leaf in tree_leaves(output) if torch.is_tensor(leaf))
        sizes[number] = max(sizes[number], size)

    handles = [
        block.register_forward_hook(lambda _, __, output, n=n: measure(n, output))
        for n, block in enumerate(blocks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class PeakMemory:
    """The peak of the memory that this process takes from now on, read by a thread."""

    def __init__(self) -> None:
        self._start = _read_memory(RESIDENT)
        self._peak = self._start
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-plan", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return the bytes of the peak, beyond those at the start, and end the thread."""
        self._is_over.set()
        self._thread.join()
        return self._peak - self._start

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(INTERVAL)
            self._peak = max(self._peak, _read_memory(RESIDENT))


def read_process(parameters: int) -> tuple[int, int]:
    """Return the bytes of this process without the model, private and shared with others.

    Args:
        parameters: The bytes of the model's parameters.
    """
    release_freed_memory()
    private = _read_memory(PRIVATE)
    return max(private - parameters, 0), max(_read_memory(RESIDENT) - private, 0)


def _read_memory(source: tuple[str, tuple[str, ...]]) -> int:
    """Return the bytes of this process that are not pages of files.

    Args:
        source: `PRIVATE`, without pages that processes share, or `RESIDENT`, which is read faster.
    """
    name, rows = source
    with open(name, encoding="ascii") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(rows))
