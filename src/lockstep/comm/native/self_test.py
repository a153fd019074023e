"""The self-test of a new binding: in a new process, two ranks add exactly and reach a barrier.

A binding that crashes or hangs does so here, before any run can load it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from lockstep.comm.native.binding import load_file

__all__ = ["SelfTestError", "run_self_test"]

TIMEOUT = 120.0  # seconds for importing torch and for all calls
CALL_TIMEOUT = 60.0  # seconds that a rank waits for the other

LENGTH = 1000


class SelfTestError(Exception):
    """The binding does not work; the message is one sentence."""


def run_self_test(module: Path) -> None:
    """Test a binding in a new process.

    Args:
        module: The file of the native module.

    Raises:
        SelfTestError: The binding cannot be loaded, crashes, hangs, or computes a wrong sum.
    """
    package = str(Path(__file__).parents[3])
    code = (
        f"import sys; sys.path.insert(0, {package!r}); import lockstep; del sys.path[0]; "
        "from lockstep.comm.native.self_test import run_ranks; run_ranks(*sys.argv[1:])"
    )
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(module), folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # ended together with the ranks
        )
        try:
            _, said = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise SelfTestError(f"two ranks did not end within {TIMEOUT:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stderr.close()  # type: ignore[union-attr]
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise SelfTestError(f"a rank was killed by {name}")
    if process.returncode:
        lines = said.strip().splitlines() or [f"exit status {process.returncode}"]
        raise SelfTestError(lines[-1])


def run_ranks(module: str, folder: str) -> None:
    """Run two ranks in forks of this process; raise an error, or exit, if a rank fails."""
    import torch
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    torch.set_num_threads(1)
    try:
        start_processes(_run_rank, (Path(module), Path(folder)), 2, start_method="fork")
    except ProcessExitedException as error:
        sys.exit(f"rank {error.error_index} was killed by {error.signal_name}")


def _run_rank(rank: int, module: Path, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    native = load_file(module)
    store = FileStore(str(folder / "store"), 2)
    timeout = timedelta(seconds=CALL_TIMEOUT)
    backend = native.create(store, rank, 2, timeout, "self-test", [0, 1])
    # The sum depends on the order: leaves 1 and 2 are each half a unit in the last place of leaf
    # 0. Added to it one by one they are rounded away; their sum would not be.
    leaves = [torch.ones(LENGTH), *torch.full((2, LENGTH), 2.0**-24)]
    nodes_by_rank = [[(0, 1)], [(1, 2), (2, 3)]]
    own = [leaves[first] for first, _ in nodes_by_rank[rank]]
    packed = native.empty([4 * LENGTH * len(own) + len(own)], torch.uint8)
    values = packed[: -len(own)].view(torch.float32).view(len(own), LENGTH)
    for row, leaf in zip(values, own, strict=True):
        row.copy_(leaf)
    packed[-len(own) :] = 1  # every leaf has a new value
    bucket = native.Bucket(torch.float32, LENGTH, [(0, LENGTH)], nodes_by_rank, leaves=3)
    backend.reproducible_all_reduce(
        bucket, packed, values[0], torch.zeros(1, dtype=torch.uint8)
    ).wait()
    if not torch.equal(values[0], (leaves[0] + leaves[1]) + leaves[2]):
        raise SelfTestError(f"rank {rank}: a sum is {values[0][0].item()}, not 1.0")
    backend.barrier(dist.BarrierOptions()).wait()
