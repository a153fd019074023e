"""Operators of a script whose bits portable arithmetic does not cover.

    command ── launch ──> one rank: runs the script under a dispatch mode of torch
            <─ the operators that it executed, each with the reason if it is not portable

The list names families of operators that the fingerprint of arithmetic does not compute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.tools.check.check_session import CheckSession
from lockstep.tools.check.layouts import Layout
from lockstep.tools.check.session_launch import launch_session, run_script

__all__ = ["OperatorNames", "find_unportable"]

BY_NAME = {
    r"_?fft_": "FFT: MKL chooses its code by the processor",
    r"_?(linalg_(?!vector_norm|cross|vecdot)|cholesky|lu_|geqrf|or[gm]qr|triangular_solve|lstsq)": (
        "LAPACK: MKL chooses its code by the processor"
    ),
    r"exponential|geometric|log_normal|cauchy|_?standard_gamma|poisson|binomial|_sample_dir": (
        "random numbers that the C library computes"
    ),
    r"lgamma|digamma|polygamma|igamma|special_|bessel|erfinv_": (
        "functions that the C library computes"
    ),
    r"quantize|_weight_int|q_linear|_sparse|sparse_": "kernels that are not measured",
}
"""The reason why operators are not portable, by a pattern of their names."""


class OperatorNames(TorchDispatchMode):
    """Records which operators torch executes that are not portable.

    Attributes:
        reasons: The reason for each operator.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reasons: dict[str, str] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Execute an operator, and note it if it is not portable."""
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name not in self.reasons and (reason := _find_reason(name, [args, kwargs, result])):
            self.reasons[name] = reason
        return result


def _find_reason(name: str, values: Any) -> str:
    """Return why an operator is not portable; "" if it is, or if it computes no numbers."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
        return "an accelerator computes it"
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "sparse tensors"
    short = name.removeprefix("aten.")
    for pattern, reason in BY_NAME.items():
        if re.match(pattern, short):
            return reason
    if any(tensor.is_complex() for tensor in tensors):
        return "complex numbers"
    is_product = re.match(r"(add|ba?dd)?b?m[mv]\b|addbmm", short) is not None
    if is_product and any(tensor.dtype is torch.float16 for tensor in tensors):
        return "matrix products in float16"
    return ""


def find_unportable(
    script: str, arguments: Sequence[str], steps: int, timeout: float
) -> list[dict[str, str]]:
    """Run a script on one rank, and return its operators that are not portable.

    Args:
        script: The file, or a folder with a `__main__.py`.
        arguments: The script's own arguments.
        steps: The number of steps per trainer after which the run ends.
        timeout: The time limit in seconds.

    Returns:
        The operators in the order of their first calls, each with "operator" and "reason".

    Raises:
        RankError: The script failed.
    """
    run = launch_session(_start, (script, tuple(arguments), steps), timeout=timeout)
    if run.error is not None:
        raise run.error
    ((reasons,),) = run.values
    return [{"operator": name, "reason": reason} for name, reason in reasons.items()]


def _start(
    record: Callable[[dict[str, str]], None],
    folder: Path,
    script: str,
    arguments: Sequence[str],
    steps: int,
) -> tuple[CheckSession, Callable[[], None]]:
    """Return a session that ends the script, and a function that runs it and records names."""

    def run() -> None:
        names = OperatorNames()
        try:
            with names:
                run_script(script, arguments)
        finally:
            if "torch._inductor.graph" in sys.modules:
                names.reasons["torch.compile"] = "inductor generates code for the processor"
            record(names.reasons)

    return CheckSession(Layout(1), steps, lambda fingerprint: None), run
