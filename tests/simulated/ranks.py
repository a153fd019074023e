"""Ranks that have the simulated accelerator; the process of the test itself never gets it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
import pytest_lockstep

__all__ = ["DEVICES", "install", "run"]

DEVICES = 4  # of each rank, so that ranks with another local rank use another one
FOLDER = Path(__file__).parents[2] / ".cache" / "simulated"


def install() -> None:
    """Let this process have the simulated accelerator and its backend."""
    from simulated import accelerator, ipc, process_group

    accelerator.install(accelerator.build(FOLDER), DEVICES)
    process_group.register()
    ipc.register()


def run(
    fn: Callable[..., Any], n: int, *args: Any, device: str | None = None, timeout: float = 60.0
) -> list[Any]:
    """Run `fn(*args)` on `n` ranks that have called `lockstep.init`; values in rank order.

    Small models are treated as large ones (`models.treat_as_large`).

    Args:
        fn: The function; torch does not know the device where its values arrive.
        n: The number of ranks.
        args: The arguments of the function.
        device: The argument of `init`; None: what it chooses, "": `init` is not called.
        timeout: The seconds until the ranks are ended.
    """
    from simulated import accelerator

    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("the simulated accelerator needs a C++ compiler")
    accelerator.build(FOLDER)

    def call() -> Any:
        import models
        from simulated import ranks

        ranks.install()
        models.treat_as_large()
        if device == "":
            return fn(*args)
        # On the CPU with the kernels of torch, too, whose bits the accelerator has.
        lockstep.init(device=device, timeout=timeout, portable=False)
        try:
            return fn(*args)
        finally:
            lockstep.shutdown()

    return pytest_lockstep.run(call, ranks=n, timeout=timeout, init=False)
