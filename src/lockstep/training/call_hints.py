"""Errors for wrong calls of a trainer; each names the correct call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from lockstep.kernel.errors import UsageError

__all__ = ["explain_calls"]

Class = TypeVar("Class")

LOOP = "for batch in trainer.batches(dataset, batch_size): trainer.step(batch)"
MANUAL_STEP = "with trainer.manual_step() as step:"

CALLS = {
    "step": "trainer.step takes one batch, such as (inputs, targets), and returns its loss: write "
    f"`loss = trainer.step(batch)`, or `{MANUAL_STEP}` for a loop of your own over micro-batches",
    "manual_step": f"trainer.manual_step() takes no batch: write `{MANUAL_STEP}` and pass the "
    "batch to step.microbatches(batch)",
    "batches": "trainer.batches takes a dataset and the batch size over all ranks, or a "
    f"DataLoader: write `{LOOP}`",
    "evaluate": "trainer.evaluate takes a dataset and the batch size over all ranks, or a "
    "DataLoader: write `trainer.evaluate(dataset, batch_size)`",
    "predict": "trainer.predict takes a dataset and the batch size over all ranks, or a "
    "DataLoader: write `trainer.predict(dataset, batch_size)`",
}
"""The messages for wrong arguments, by method."""

ARGUMENTS = {
    "accumulation_steps": "microbatches=, which are computed one after the other",
    "batch_size": "trainer.batches(dataset, batch_size)",
    "criterion": "the second argument, the loss",
    "epochs": "a loop: for epoch in range(epochs)",
    "grad_clip": "max_grad_norm=",
    "lr": "an optimizer factory, partial(torch.optim.SGD, lr=0.1)",
    "lr_scheduler": "ls.OptimizerConfig(factory, scheduler=...)",
    "precision": "autocast_dtype=torch.bfloat16",
    "stages": "pipeline=ls.PipelineConfig(stages=2)",
}
"""The correct argument of Trainer, by the name of an argument in other libraries."""


def explain_calls(trainer: type[Class]) -> type[Class]:
    """Make a trainer class answer wrong arguments with the correct call.

    Signatures and types stay as they are. Wrong arguments raise UsageError instead of TypeError.
    """
    for name, sentence in CALLS.items():
        setattr(trainer, name, _explain_arguments(getattr(trainer, name), sentence))
    setattr(trainer, "__init__", _explain_construction(trainer))  # noqa: B010
    return trainer


def _explain_arguments(method: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except TypeError as error:
            traceback = error.__traceback__
            if traceback is not None and traceback.tb_next is None:  # raised by the call
                raise UsageError(sentence) from None
            raise

    return call


def _explain_construction(trainer: type[Any]) -> Callable[..., None]:
    construct: Callable[..., None] = trainer.__init__
    known = list(inspect.signature(construct).parameters)[1:]

    @wraps(construct)
    def call(self: object, *args: Any, **options: Any) -> None:
        for name in options.keys() - set(known):
            close = get_close_matches(name, known, 1)
            hint = ARGUMENTS.get(name) or (f"{close[0]}=" if close else "")
            raise UsageError(
                f"ls.Trainer has no argument {name}"
                + (f": write {hint}" if hint else f"; its arguments are {', '.join(known)}")
            )
        construct(self, *args, **options)

    return call
