"""Better errors for two of an accelerator: no deterministic implementation, a failed assertion."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from lockstep.foreign_messages import DEVICE_ASSERTION, NOT_DETERMINISTIC
from lockstep.kernel.errors import UsageError

__all__ = ["explain_device_error"]


def explain_device_error(error: BaseException, module: nn.Module, where: str) -> UsageError | None:
    """Return a better error for torch's error; None for other errors.

    Args:
        error: The error.
        module: The model.
        where: The rank, step and micro-batch.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if DEVICE_ASSERTION in text:
        return UsageError(
            f"{where}, or earlier: an index is out of range on the device, such as a label that is "
            "no class or a word that has no embedding; run again with CUDA_LAUNCH_BLOCKING=1, and "
            "the traceback shows the call"
        )
    match = NOT_DETERMINISTIC.search(text)
    if match is None:
        return None
    return UsageError(
        f"{where}: the operator {match[1]} has no deterministic implementation on this device, so "
        f"its results differ from call to call; {_find_caller(error.__traceback__, module)}. "
        "Replace it by one that has (torch.use_deterministic_algorithms lists them), or train on "
        "the CPU"
    )


def _find_caller(traceback: TracebackType | None, module: nn.Module) -> str:
    """Return the clause about the innermost module of a traceback; backward has none."""
    names = {id(part): name for name, part in module.named_modules()}
    clause = "torch.autograd.set_detect_anomaly(True) shows where forward called it"
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (name := names.get(id(owner))):
            clause = f"{name} ({type(owner).__name__}) calls it"
        traceback = traceback.tb_next
    return clause
