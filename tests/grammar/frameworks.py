"""Random trainings in the loops of Lightning, transformers and Accelerate.

    habit("lightning", 1234)        what a loop does around the model of `grammar.case(1234)`
    compare("lightning", [1234])    runs it on one rank and on several, and compares the outcomes

A training has the same outcome on any number of ranks, or raises an error of Lockstep on each of
them. Run one by `PYTHONPATH=tests python -m grammar.frameworks lightning 1234`.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import lockstep as ls
import pytest_lockstep
from grammar import Case, case
from grammar.datasets import Augmented, Streamed, tensors
from grammar.drawing import Draw
from lockstep.comm.collectives import all_gather_bytes

DEADLINE = 60.0  # seconds that a rank waits for another one
AT_A_TIME = 25  # cases of one launch

RUNNERS = {
    "lightning": "grammar.in_lightning",
    "transformers": "grammar.in_transformers",
    "accelerate": "grammar.in_accelerate",
}
SOURCES = (
    "in memory",
    "in memory",
    "augmented",
    "augmented",
    "collated",
    "sampler",
    "buckets",
    "stream",
    "endless stream",
)


@dataclass(frozen=True)
class Habit:
    """What a loop does in addition to its model, as it was drawn."""

    seed: int
    microbatches: int
    size: int
    """The number of samples of a micro-batch."""
    samples: int
    held_out: int
    epochs: int
    source: str
    validated: str
    """The source of the data to evaluate; "" for no evaluation."""
    workers: int
    drop_last: bool
    optimizer: str
    schedule: str
    clip: float | None
    has_half: bool
    follows: bool
    """Whether the training ends early by a metric."""
    options: dict[str, Any] = field(hash=False)
    """What only one framework has."""
    world: int
    backend: str

    def __str__(self) -> str:
        """Describe the habit."""
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())


def fits(drawn: Case) -> bool:
    """Return whether a case has a module, and a loss without buffers."""
    loss = drawn.loss.build(drawn.model.dtype)
    has_buffers = isinstance(loss, nn.Module) and any(True for _ in loss.buffers())
    return drawn.model.form != "factories" and not has_buffers


def habit(framework: str, seed: int) -> Habit:
    """Return the habit that a seed draws."""
    draw = Draw(f"{framework} {seed}")
    drawn = case(seed)
    microbatches = max(2, drawn.microbatches)
    size = draw.randint(1, 3)
    whole = size * microbatches
    samples = draw.randint(2 * whole, 3 * whole + 2)
    drop_last = draw.chance(0.2)
    if "Norm" in str(drawn.model):  # two samples in each micro-batch
        size = max(2, size)
        samples = 3 * size * microbatches
        drop_last = True
    source = draw.choice(SOURCES) if draw.chance(0.97) else "own generator"
    if "Norm" in str(drawn.model) and source == "buckets":
        source = "augmented"
    validated = draw.pick("", *SOURCES)
    return Habit(
        seed,
        microbatches,
        size,
        samples,
        draw.randint(1, 3 * size + 2),
        draw.randint(1, 2),
        source,
        validated,
        1 if draw.chance(0.06) else 0,
        drop_last,
        draw.pick("sgd", "momentum", "adamw"),
        draw.pick("none", "step", "linear", "plateau"),
        0.1 if draw.chance(0.3) else None,
        drawn.model.dtype == torch.float32 and draw.chance(0.1),
        draw.chance(0.3),
        importlib.import_module(RUNNERS[framework]).draw_options(draw),
        draw.randint(2, min(4, microbatches)),
        draw.pick("lockstep", "lockstep", "gloo"),
    )


# --- what the runners share --------------------------------------------------------------------


class OwnGenerator(Augmented):
    """Draws from a generator of its own, which is refused."""

    generator: torch.Generator

    def __init__(self, columns: list[torch.Tensor]) -> None:
        super().__init__(columns)
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Any:
        first, *others = (column[index] for column in self.columns)
        noise = torch.rand((), generator=self.generator)
        return (first + (noise if first.is_floating_point() else noise > 0.5), *others)


class Endless(IterableDataset[Any]):
    """A stream whose length is unknown."""

    def __init__(self, columns: list[torch.Tensor]) -> None:
        self.stream = Streamed(columns)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)


class Buckets:
    """A batch sampler with lists of several sizes."""

    def __init__(self, samples: int, size: int) -> None:
        draw = Draw(samples)
        self.cuts = draw.cut(samples, -(-samples // size))

    def __len__(self) -> int:
        return len(self.cuts)

    def __iter__(self) -> Iterator[list[int]]:
        ends = torch.tensor(self.cuts).cumsum(0).tolist()
        for number in torch.randperm(len(self.cuts)).tolist():
            yield [*range(ends[number] - self.cuts[number], ends[number])]


def collate_with_noise(samples: list[Any]) -> Any:
    """Change the first input of a micro-batch at random."""
    first, *others = default_collate(samples)
    if first.is_floating_point():
        first = first * (1 + 0.1 * torch.rand(()))
    elif torch.rand(()) < 0.5:
        first = first.flip(1)
    return [first, *others]


def make_columns(drawn: Case, of: Habit, samples: int, shift: int) -> list[torch.Tensor]:
    """Return inputs and targets of so many samples."""
    data = replace(drawn.data, source="in memory", sizes=(samples,))
    inputs, targets = tensors(data, drawn.model, drawn.loss, of.microbatches, of.seed + shift)
    return [*inputs, targets]


def make_loader(of: Habit, source: str, columns: list[torch.Tensor], **options: Any) -> Any:
    """Return a DataLoader of the micro-batches of a source."""
    kinds: dict[str, Any] = {
        "augmented": Augmented,
        "stream": Streamed,
        "endless stream": Endless,
        "own generator": OwnGenerator,
    }
    dataset: Dataset[Any] = kinds.get(source, lambda given: TensorDataset(*given))(columns)
    given: dict[str, Any] = {"num_workers": of.workers, **options}
    if source == "collated":
        given["collate_fn"] = collate_with_noise
    samples = len(columns[0])
    if source == "buckets":
        given.pop("shuffle", None)
        return DataLoader(dataset, batch_sampler=Buckets(samples, of.size), **given)
    if source == "sampler":
        given["sampler"] = WeightedRandomSampler([1.0 + i % 3 for i in range(samples)], samples)
    if source in ("sampler", "stream", "endless stream"):
        given.pop("shuffle", None)
    return DataLoader(dataset, of.size, **given)


def make_optimizer(of: Habit, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a habit."""
    own = [parameter for parameter in parameters if parameter.requires_grad]
    if of.optimizer == "adamw":
        return torch.optim.AdamW(own, lr=0.01)
    momentum = 0.5 if of.optimizer == "momentum" else 0.0
    return torch.optim.SGD(own, lr=0.05, momentum=momentum)


def make_schedule(of: Habit, optimizer: Any, steps: int) -> Any:
    """Return a scheduler that makes a step per batch; None for no such one."""
    if of.schedule == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if of.schedule == "linear":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / steps))
    return None


def loss_of(loss: Any, model: Any, batch: Sequence[Any]) -> torch.Tensor:
    """Return the loss of a micro-batch, of the loss function or of the model itself."""
    if loss is None:
        result = model(*batch)
        return result["loss"] if isinstance(result, dict) else result
    *inputs, targets = batch
    value: torch.Tensor = loss(model(*inputs), targets)
    return value


# --- running and comparing ---------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What a rank has made of a case: an outcome, or the error that it raised."""

    outcome: str = ""
    error: str = ""
    is_own: bool = False
    """Whether the error is one of Lockstep."""

    @classmethod
    def of(cls, error: Exception) -> Result:
        """Return the result of a case that raised an error."""
        own = isinstance(error, ls.LockstepError)
        place = "" if own else "".join(traceback.format_tb(error.__traceback__)[-2:])
        return cls("", f"{type(error).__name__}: {error}{place}", own)


def outcomes(framework: str, seeds: Sequence[int], backend: str) -> list[Result]:
    """Return this rank's results, up to the first case after which the ranks may disagree."""
    warnings.simplefilter("ignore")
    ls.init(backend=backend, timeout=DEADLINE)
    train = importlib.import_module(RUNNERS[framework]).train
    found: list[Result] = []
    try:
        for seed in seeds:
            try:
                result = Result(json.dumps(train(case(seed), habit(framework, seed))))
            except Exception as error:
                result = Result.of(error)
            found.append(result)
            # What a training leaves that has failed half way is not what is compared.
            if result.error:
                break
            if ls.world_size() > 1:
                all_gather_bytes(b"", f"after case {seed}")
    except Exception as error:  # another rank has left: it says why
        found[-1] = found[-1] if found[-1].error else Result.of(error)
    finally:
        ls.shutdown()
    return found


def run(framework: str, seeds: Sequence[int], world: int, backend: str) -> dict[int, list[Result]]:
    """Return the results of all ranks for each case."""
    found: dict[int, list[Result]] = {}
    waiting = [*seeds]
    while waiting:
        some = waiting[:AT_A_TIME]
        how: Any = {"ranks": world, "timeout": 20 * DEADLINE, "init": False}
        ranks = pytest_lockstep.run(outcomes, framework, some, backend, **how)
        done = max(1, min(map(len, ranks)))
        for number, seed in enumerate(some[:done]):
            found[seed] = [results[number] for results in ranks]
        waiting = waiting[done:]
    return found


def compare(framework: str, seeds: Iterable[int]) -> tuple[list[str], int]:
    """Run cases on one rank and on several; return what differs, and how many were trained."""
    chosen = [seed for seed in seeds if fits(case(seed))]
    alone = run(framework, chosen, 1, "lockstep")
    worlds: dict[tuple[int, str], list[int]] = {}
    for seed in chosen:
        drawn = habit(framework, seed)
        worlds.setdefault((drawn.world, drawn.backend), []).append(seed)
    failures = []
    for (world, backend), theirs in worlds.items():
        for seed, results in run(framework, theirs, world, backend).items():
            if trouble := find_trouble(alone[seed][0], results):
                failures.append(
                    f"{framework} {seed}: {habit(framework, seed)}\n{case(seed)}\n  {trouble}"
                )
    return failures, sum(1 for (result,) in alone.values() if result.outcome)


def find_trouble(alone: Result, results: Sequence[Result]) -> str:
    """Say what is wrong with the results of the ranks; nothing if they are as they must be."""
    if alone.error and not alone.is_own:
        return ""  # of torch or the framework, for this model
    if alone.error:
        trained = [rank for rank, result in enumerate(results) if result.outcome]
        return f"rank {trained[0]} trains, alone: {alone.error}" if trained else ""
    for rank, result in enumerate(results):
        if result.error and not result.is_own:
            return f"rank {rank}: {result.error}"
        if result.outcome and result.outcome != alone.outcome:
            return f"rank {rank} differs: {list_differences(result.outcome, alone.outcome)}"
        if bool(result.outcome) != bool(results[0].outcome):
            return f"rank {rank}: {result.error or 'trained'}, rank 0: {results[0].error}"
    return ""


def list_differences(one: str, other: str) -> str:
    """Return the parts of two outcomes that differ."""
    values = [json.loads(outcome) for outcome in (one, other)]
    differing = [name for name in values[0] if values[0][name] != values[1][name]]
    return "".join(f"\n    {name}: {[value[name] for value in values]}" for name in differing)


if __name__ == "__main__":
    found, trained = compare(sys.argv[1], [int(seed) for seed in sys.argv[2:]])
    print("\n".join(found), f"{trained} were trained", sep="\n")
    sys.exit(bool(found))
