"""Counts the functions of one step: `python dev/step_calls.py [--list] [--check]`.

A whole `trainer.step`, and a batch of the nested loop of `ls.exact`, on one rank with one
micro-batch of a tiny network, when it is warm. Counted are the calls of Lockstep's Python
functions, and how often execution moves from one of its files to another, by calls and returns:
what a reader follows with a debugger.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.training.script_loop.exact_batch import ExactBatch

__all__ = ["count_calls", "main", "make_loop", "make_step"]

SOURCE = str(Path(lockstep.__file__).parent)
LIMITS = {"trainer.step": (122, 104), "exact.batches": (139, 137)}
"""The most functions and changes of file, which `make check` permits."""

WARM_STEPS = 7
"""The steps before the one that is counted, which is none of those with additional checks."""


FIRST_INSTRUCTION = 2
"""The largest offset at which the bytecode of a generator begins."""


def make_step() -> Callable[[], float]:
    """Return a warm step of a tiny network; `lockstep.init` has been called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    trainer = lockstep.Trainer(
        model, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), microbatches=1,
        loggers=(), progress=False,
    )  # fmt: skip
    batch = torch.randn(8, 8), torch.arange(8) % 2
    for _ in range(WARM_STEPS):
        trainer.step(batch)
    return partial(trainer.step, batch)


def make_loop() -> Callable[[], None]:
    """Return a warm batch of the loop of `ls.exact` over batches, with the same network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = lockstep.exact(model, optimizer, microbatches=1, loggers=(), progress=False)
    data = (torch.randn(8, 8), torch.arange(8) % 2)
    loss_function = nn.CrossEntropyLoss()

    def step() -> None:
        # What `exact.batches` yields, divided from tensors, as in `trainer.step`.
        batch = ExactBatch(exact.parallel.split(data), exact._script_steps)
        for inputs, targets in batch:
            batch.backward(loss_function(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_STEPS):
        step()
    return step


def count_calls(call: Callable[[], Any]) -> tuple[Counter[str], int]:
    """Return the calls of each function of Lockstep, and the number of changes of file.

    Comprehensions and resumed generators are no calls.
    """
    calls: Counter[str] = Counter()
    files: list[str] = []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE) or event not in ("call", "return"):
            return
        files.append(code.co_filename)
        is_resumed = code.co_flags & inspect.CO_GENERATOR and frame.f_lasti > FIRST_INSTRUCTION
        if event == "call" and not (is_resumed or code.co_name.startswith("<")):
            calls[f"{code.co_filename[len(SOURCE) + 1 :]}:{code.co_qualname}"] += 1

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls, sum(before != after for before, after in pairwise(files))


def main() -> None:
    """Print the counts, with --list every function; with --check, exit with 1 above the limits."""
    lockstep.init()
    exceeded = []
    for loop, make in {"trainer.step": make_step, "exact.batches": make_loop}.items():
        calls, changes = count_calls(make())
        if "--list" in sys.argv[1:]:
            for name, count in calls.items():
                print(f"{count:4d} {name}")
        print(f"{loop}: {calls.total()} functions, {changes} changes of file")
        functions, files = LIMITS[loop]
        if calls.total() > functions or changes > files:
            exceeded.append(
                f"{loop}: at most {functions} functions and {files} changes of file are permitted"
            )
    lockstep.shutdown()
    if "--check" in sys.argv[1:] and exceeded:
        sys.exit("\n".join(exceeded))


if __name__ == "__main__":
    main()
