"""Errors for wrong calls of a trainer or a handle; each names the correct call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from lockstep.call_checks import check_call
from lockstep.data.dataloader import EvaluationOptions

__all__ = ["ARGUMENTS", "explain_calls", "explain_methods"]

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
    "load_state_dict": "",
    "resume": "",
    "save_weights": "",
}
"""The messages for wrong arguments, by method; "" for one that names the argument."""

ARGUMENTS = {
    "accumulation_steps": "microbatches=, which are computed one after the other",
    "batch_size": "batches(dataset, batch_size)",
    "criterion": "the second argument, the loss",
    "epochs": "a loop: for epoch in range(epochs)",
    "grad_clip": "max_grad_norm=",
    "lr": "an optimizer factory, partial(torch.optim.SGD, lr=0.1)",
    "lr_scheduler": "ls.OptimizerConfig(factory, scheduler=...)",
    "precision": "autocast_dtype=torch.bfloat16",
    "stages": "pipeline=ls.PipelineConfig(stages=2)",
}
"""The correct argument of Trainer or `ls.exact`, by the name of an argument in other libraries."""


def explain_calls(trainer: type[Class]) -> type[Class]:
    """Make a trainer class answer wrong arguments with the correct call.

    Signatures and types stay as they are. Wrong arguments raise UsageError instead of TypeError.
    """
    explain_methods(trainer, "trainer", CALLS)
    setattr(trainer, "__init__", check_call("ls.Trainer", hints=ARGUMENTS)(trainer.__init__))  # noqa: B010
    return trainer


def explain_methods(handle: type[Any], name: str, calls: Mapping[str, str]) -> None:
    """Check the arguments of methods.

    Args:
        handle: The class.
        name: The name of its instances, for messages.
        calls: The methods, each with the message for arguments that it does not have.
    """
    for method, sentence in calls.items():
        check = check_call(f"{name}.{method}", sentence, options=EvaluationOptions.__annotations__)
        setattr(handle, method, check(getattr(handle, method)))
