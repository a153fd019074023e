"""Ranks on two simulated hosts, which are network namespaces of this machine (tests/hosts.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.kernel.errors import WorkError

__all__ = ["PLACEMENTS", "measure"]

PLACEMENTS = {"contiguous": ((0, 1), (2, 3)), "alternating": ((0, 2), (1, 3))}
PORT = "29501"  # in the namespace of the first host alone
TIMEOUT = 500.0  # seconds for one measurement


def measure(
    mode: str,
    placement: str,
    mbit: float | None,
    options: dict[str, Any],
    make_network: Callable[..., Any],
) -> Any:
    """Run `benchmarks.hosts.worker` on all ranks; return what rank 0 wrote.

    Args:
        mode: "calls" or "train".
        placement: The name of a placement.
        mbit: The rate of every link in Mbit/s, or None.
        options: The options of the worker.
        make_network: `network` of tests/hosts.py.

    Raises:
        WorkError: A rank failed.
    """
    hosts = PLACEMENTS[placement]
    options = options | {"hosts": hosts}
    with tempfile.TemporaryDirectory() as folder, make_network("a", "b", mbit=mbit) as net:
        file = Path(folder, "found.json")
        command = [sys.executable, "-m", "benchmarks.hosts.worker", mode, json.dumps(options)]
        processes: list[subprocess.Popen[Any]] = []
        try:
            for number, ranks in enumerate(hosts):
                for local, rank in enumerate(ranks):
                    environment = os.environ | {
                        "RANK": str(rank), "WORLD_SIZE": "4",
                        "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2",
                        "GROUP_RANK": str(number), "MASTER_ADDR": net.a.address,
                        "MASTER_PORT": PORT,
                    }  # fmt: skip
                    host = (net.a, net.b)[number]
                    processes.append(host.popen([*command, str(file)], env=environment))
            codes = [process.wait(TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise WorkError(f"the ranks of {mode}, {placement} ended with the codes {codes}")
        return json.loads(file.read_text())
