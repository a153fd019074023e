"""A pipeline by remote procedure calls: ResNet-50 in two shards, driven by a master.

    master     cuts the batch, calls forward, computes the loss, calls backward and step
    worker 1   conv1 ... layer2     ──activations──>     worker 2   layer3 ... fc

A pipeline with `torch.distributed.rpc`: modules are created on their workers, and
references to outputs, autograd and an optimizer span the processes. The outputs of
all splits return to the master before any backward begins. `torch.distributed.rpc`
is in maintenance mode, and its messages are not authenticated, so here they stay on
this host. `lockstep.Trainer(stages=2)` does the same work without a master.

    python -m examples.rpc_pipeline --splits 1,2,4,8
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.nn import functional as F

import lockstep as ls
from examples.resnet import resnet50

__all__ = ["CUT", "Master", "Shard", "joined", "main"]

MASTER = "master"
WORKERS = ("worker1", "worker2")
CUT = 11
"""The blocks of ResNet-50 in the first shard: the stem, layer1 and layer2."""

SEED = 0
THREADS = 128  # must exceed the splits: a split that waits for its inputs occupies a thread


class Shard(nn.Module):
    """A range of a model's blocks, on its worker; one thread computes one split at a time."""

    def __init__(self, build: Callable[[], Any], begin: int, end: int | None) -> None:
        super().__init__()
        torch.manual_seed(SEED)  # both workers build the same model and keep their part
        self.blocks = nn.Sequential(*build().blocks()[begin:end])
        self._lock = threading.Lock()

    def forward(self, inputs: Any) -> torch.Tensor:
        """Fetch the inputs from the owner of the reference `inputs`, and compute the outputs."""
        here = inputs.to_here()
        with self._lock:
            torch.set_num_threads(1)  # applies to this thread, one of those that serve calls
            return self.blocks(here)  # type: ignore[no-any-return]

    def references(self) -> list[Any]:
        """Return a reference to each parameter, for an optimizer elsewhere."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Master:
    """Drives two shards; each worker keeps its part of the model that `build` returns."""

    def __init__(self, build: Callable[[], Any], cut: int, lr: float) -> None:
        first, second = WORKERS
        self.first = rpc.remote(first, Shard, (build, 0, cut))
        self.second = rpc.remote(second, Shard, (build, cut, None))
        parameters = self.first.rpc_sync().references() + self.second.rpc_sync().references()
        self.optimizer = optimizer_of(parameters, lr)

    def forward(self, inputs: torch.Tensor, splits: int) -> torch.Tensor:
        """Return the outputs; the second worker computes a split while the first has the next."""
        coming = []
        for part in inputs.chunk(splits):
            between = self.first.remote().forward(rpc.RRef(part))
            coming.append(self.second.rpc_async().forward(between))
        return torch.cat(torch.futures.wait_all(coming))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, splits: int) -> float:
        """Train on one batch and return its loss."""
        with autograd.context() as context:
            loss = F.cross_entropy(self.forward(inputs, splits), targets)
            autograd.backward(context, [loss])  # type: ignore[attr-defined]
            self.optimizer.step(context)
        return loss.item()


class PlainSGD(torch.optim.SGD):
    """SGD under another name: torch's own would make workers run deprecated TorchScript."""


def optimizer_of(parameters: list[Any], lr: float) -> Any:
    """Return SGD for parameters in other processes; each owner updates its parameters."""
    with warnings.catch_warnings():
        # The import of its module uses the deprecated torch.jit.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import DistributedOptimizer
    # It warns that this optimizer does not use TorchScript.
    logging.getLogger(DistributedOptimizer.__module__).setLevel(logging.ERROR)
    return DistributedOptimizer(PlainSGD, parameters, lr=lr)


@contextlib.contextmanager
def joined(rank: int, rendezvous: str, timeout: float) -> Iterator[None]:
    """Join the master and the workers at the file `rendezvous`; leave together after the body."""
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # anyone who can connect can run code here
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{rendezvous}", rpc_timeout=timeout, num_worker_threads=THREADS
    )
    names = (MASTER, *WORKERS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own use
        rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    yield
    rpc.shutdown(timeout=timeout)  # a worker serves calls in here, until the master calls it too


@dataclass(frozen=True)
class Job:
    """The options of the command line."""

    splits: tuple[int, ...]
    batches: int
    batch_size: int
    size: int
    timeout: float


def run(job: Job, rendezvous: str) -> None:
    """Train as the master, rank 0, or serve as a worker."""
    torch.set_num_threads(1)
    with joined(ls.rank(), rendezvous, job.timeout):
        if ls.rank() == 0:
            master = Master(resnet50, CUT, lr=0.05)
            for splits in job.splits:
                print(f"{splits} splits  {measured(master, job, splits):.2f} s a batch", flush=True)


def measured(master: Master, job: Job, splits: int) -> float:
    """Train on a few batches; return the mean time per batch in seconds."""
    generator = torch.Generator().manual_seed(SEED)
    begun = time.perf_counter()
    for _ in range(job.batches):
        shape = (job.batch_size, 3, job.size, job.size)
        inputs = torch.randn(shape, generator=generator)
        targets = torch.randint(1000, (job.batch_size,), generator=generator)
        master.step(inputs, targets, splits)
    return (time.perf_counter() - begun) / job.batches


def main() -> None:
    """Read the command line, and start the master and two workers."""
    parser = argparse.ArgumentParser(description="ResNet-50 in two shards by remote calls.")
    parser.add_argument("--splits", default="1,2,4,8", help="parts of a batch in the pipeline")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=120)
    parser.add_argument("--size", type=int, default=128, help="width and height of pictures")
    parser.add_argument("--timeout", type=float, default=300.0, help="of each call, seconds")
    given = vars(parser.parse_args())
    splits = tuple(int(text) for text in given.pop("splits").split(","))
    with tempfile.TemporaryDirectory() as folder:
        ls.launch(run, (Job(splits, **given), f"{folder}/rendezvous"), 1 + len(WORKERS))


if __name__ == "__main__":
    # Workers find functions and classes by module name, which must not be __main__.
    from examples import rpc_pipeline

    rpc_pipeline.main()
