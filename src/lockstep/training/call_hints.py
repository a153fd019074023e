"""Errors for wrong calls of a trainer; each names the correct call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, TypeVar

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

INSTEAD = {
    "train": f"write `{LOOP}`; the model is in training mode in a step",
    "fit": f"write `{LOOP}`",
    "eval": "write `trainer.evaluate(dataset, batch_size)`; the model is in evaluation mode there",
    "validate": "write `trainer.evaluate(dataset, batch_size)`",
    "test": "write `trainer.evaluate(dataset, batch_size)`",
    "forward": "call `trainer.model`",
    "parameters": "write `trainer.model.parameters()`",
    "backward": f"`trainer.step(batch)` runs it; for a loop of your own write `{MANUAL_STEP}` and "
    "`step.backward(loss)`",
    "zero_grad": "gradients of a step are cleared by the next one; remove this call",
    "save": "write `trainer.save_weights(path)`, or `trainer.save_checkpoint(path)` to resume",
    "load": "write `trainer.resume(path)` for a checkpoint, or load weights into the model before "
    "the trainer is made",
    "average": "write `trainer.ema_model`",
    "ema": "write `trainer.ema_model`",
    "last": "write `trainer.last_result`; `trainer.step(batch)` returns the loss, and after `with "
    "trainer.manual_step() as step:` read `step.result.loss`",
    "lr": "write `trainer.optimizer.param_groups[0]['lr']`",
}
"""The correct call, by the name of a method or attribute in other libraries."""


ARGUMENTS = {
    "accumulation_steps": "microbatches=, which are computed one after the other",
    "batch_size": "trainer.batches(dataset, batch_size)",
    "clip_grad_norm": "max_grad_norm=",
    "criterion": "the second argument, the loss",
    "ema": "ema_decay=",
    "epochs": "a loop: for epoch in range(epochs)",
    "gradient_accumulation_steps": "microbatches=, which are computed one after the other",
    "grad_clip": "max_grad_norm=",
    "logger": "loggers=",
    "loss_fn": "the second argument, the loss",
    "lr": "an optimizer factory, partial(torch.optim.SGD, lr=0.1)",
    "lr_scheduler": "ls.OptimizerConfig(factory, scheduler=...)",
    "max_epochs": "a loop: for epoch in range(epochs)",
    "precision": "autocast_dtype=torch.bfloat16",
    "record": "loggers=",
    "scheduler": "ls.OptimizerConfig(factory, scheduler=...)",
    "stages": "pipeline=ls.PipelineConfig(stages=2)",
}
"""The correct argument of Trainer, by the name of an argument in other libraries."""


def explain_calls(trainer: type[Class]) -> type[Class]:
    """Make a trainer class answer wrong calls and unknown names with the correct call.

    Signatures and types stay as they are. Wrong arguments raise UsageError instead of TypeError;
    an unknown name still raises AttributeError.
    """
    methods: dict[str, Callable[..., Any]] = {
        name: _explain_arguments(getattr(trainer, name), sentence)
        for name, sentence in CALLS.items()
    }
    methods["__init__"] = _explain_construction(trainer)
    for name, method in (methods | {"__getattr__": _refuse_name}).items():
        setattr(trainer, name, method)  # type checkers do not see __getattr__
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


def _refuse_name(trainer: object, name: str) -> NoReturn:
    close = get_close_matches(
        name, [attribute for attribute in dir(trainer) if attribute[0] != "_"], 1
    )
    hint = INSTEAD.get(name) or (f"did you mean {close[0]}?" if close else "")
    hint = f": {hint}" if hint else ""
    raise AttributeError(f"a trainer has no attribute {name!r}{hint}", name=name, obj=trainer)
