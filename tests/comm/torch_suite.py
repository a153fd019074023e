"""Runs torch's own DistributedTest on a backend: `python torch_suite.py gloo|lockstep`.

The suite asks for backends by name, and skips most of what it has for others than gloo. So the
backend lockstep is tried under gloo's name. The last line of the output is a JSON object: the
name of each test, and whether it passed, failed or was skipped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
import unittest
from typing import Any

RANKS = 3
SECONDS = 60  # for one test


def prepare(folder: str) -> None:
    """Set what torch's modules read when they are imported."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(RANKS),
        TEMP_DIR=folder,
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS),
    )
    if "expecttest" not in sys.modules:  # a test package of torch's, of which one class is used
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub


def take_the_name_of_gloo() -> None:
    """Create the backend lockstep where torch creates gloo's."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed import distributed_test

    from lockstep.comm import backend

    native = backend.load_native()

    class Impostor(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, native.LockstepBackend)

        def __call__(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
            return native.create(
                store=store, rank=rank, size=size, timeout=timeout, name="", ranks=[]
            )

    class ProcessGroupGloo(metaclass=Impostor):
        pass

    dist.ProcessGroupGloo = ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo

    class Logger(dist.Logger):
        """Logs nothing: torch would read gloo's number of threads where the backend has none."""

        def set_construction_data_and_log(self, *arguments: Any) -> None:
            pass

        def set_runtime_stats_and_log(self) -> None:
            pass

    dist.Logger = Logger

    find = distributed_test.get_profiling_event

    def get_profiling_event(name: str, *arguments: Any, **options: Any) -> Any:
        """Find the events of the backend under the name that the suite gives it."""
        found = find(name.replace("gloo:", "lockstep:"), *arguments, **options)
        for event in found:
            event.name = event.name.replace("lockstep:", "gloo:")
        return found

    distributed_test.get_profiling_event = get_profiling_event


def load_suite() -> unittest.TestSuite:
    """Return the suite, whose ranks are forked: torch is imported once."""
    import torch.multiprocessing
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    common_utils.MAX_NUM_RETRIES = 0

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    Suite.setUpClass()
    return unittest.TestLoader().loadTestsFromTestCase(Suite)


def run(test: Any) -> str:
    """Return whether a test passed, failed or was skipped; end what it leaves."""
    result = unittest.TestResult()
    test.run(result)
    for process in getattr(test, "processes", []):
        if process.is_alive():
            process.kill()
        process.join()
    if result.failures or result.errors:
        for _, text in result.failures + result.errors:
            print(test.id(), text, sep="\n", flush=True)
        return "failed"
    return "skipped" if result.skipped else "passed"


def main(name: str) -> None:
    """Run the suite on the backend of this name."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        if name == "lockstep":
            take_the_name_of_gloo()
        print(json.dumps({test._testMethodName: run(test) for test in load_suite()}))


if __name__ == "__main__":
    main(sys.argv[1])
