"""Contenders: training on several ranks, each as its users write it.

    copies           every rank by itself, nothing is exchanged: what computing alone costs
    memcpy           no training: every rank copies as many bytes as its gradients have
    ddp-*, fsdp-*    torch's own, on Gloo and on the backend "lockstep"
    exact-*          `lockstep.exact` with a model without a wrapper, in a loop over batches
    exact-ddp-*      the same around DistributedDataParallel, in a loop over micro-batches
    trainer          `lockstep.Trainer`
    shared           the same with one copy of the parameters for all ranks of the host
    stock-*          in a process as torch leaves it: Lockstep's ranks keep freed memory,
                     and so do all the others here

Every contender computes the same micro-batches: a rank's part of the batch in as many
backward passes as asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from benchmarks.step.networks import NETWORKS, OPTIMIZERS, Batch, Network, blocks, count
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.training.script_loop.exact_batch import ExactBatch

__all__ = ["CONTENDERS", "Case", "Contender", "Fixed", "Training", "loss", "part"]

loss = nn.CrossEntropyLoss()


@dataclass(frozen=True)
class Case:
    """What is trained: a network, an optimizer, samples and micro-batches of one rank."""

    network: str
    optimizer: str
    samples: int
    microbatches: int = 1

    @property
    def net(self) -> Network:
        """The network by its name."""
        return NETWORKS[self.network]

    def batch(self, ranks: int, turn: int) -> Batch:
        """Return a global batch of `ranks` ranks, one for each `turn`."""
        return self.net.batch(self.samples * ranks, 1 + turn)

    def leaves(self, ranks: int) -> int:
        """Return the micro-batches of a global batch of `ranks` ranks."""
        return self.microbatches * ranks

    def optimize(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters."""
        return OPTIMIZERS[self.optimizer](parameters)


@dataclass(frozen=True)
class Fixed(Case):
    """A case whose global batch is the same on any number of ranks: `samples` in all."""

    def batch(self, ranks: int, turn: int) -> Batch:
        """Return the global batch."""
        return super().batch(1, turn)

    def leaves(self, ranks: int) -> int:
        """Return its micro-batches."""
        return self.microbatches


class Training:
    """A training that can be stepped; `batch` is the global one, of which a rank takes its part."""

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter, whole, by its name; called on every rank."""
        raise NotImplementedError


class Loop(Training):
    """A loop of one's own around a module, wrapped or not."""

    def __init__(self, case: Case, module: nn.Module) -> None:
        self.module = module
        self._count = case.microbatches
        self._optimizer = case.optimize(module.parameters())

    def step(self, batch: Batch) -> None:
        """Run a backward for each micro-batch; the last one may exchange gradients."""
        self._optimizer.zero_grad()
        inputs, targets = part(batch)
        cut = zip(inputs.tensor_split(self._count), targets.tensor_split(self._count), strict=True)
        for number, (data, classes) in enumerate(cut):
            with self.kept_local(number + 1 < self._count):
                value = loss(self.module(data), classes)
                (value * (len(data) / len(inputs))).backward()
        self._optimizer.step()

    def kept_local(self, local: bool) -> AbstractContextManager[Any]:
        """Return a context in which gradients stay on their rank, where the module has one."""
        silent: Callable[[], AbstractContextManager[Any]] | None
        silent = getattr(self.module, "no_sync", None)
        return silent() if local and silent is not None else nullcontext()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of the module inside the wrapper."""
        inside: nn.Module = getattr(self.module, "module", self.module)
        yield from ((name, each.detach()) for name, each in inside.named_parameters())


class Sharded(Loop):
    """The loop around a module whose parameters lie in slices on all ranks."""

    def __init__(self, case: Case) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = case.net.model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(case, model)

    def kept_local(self, local: bool) -> AbstractContextManager[Any]:
        """Switch the exchange of gradients; there is no context for it."""
        sharded: Any = self.module
        sharded.set_requires_gradient_sync(not local)
        return nullcontext()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one parameter after another."""
        for name, each in self.module.named_parameters():
            yield name, each.full_tensor().detach()  # type: ignore[attr-defined]


class Trained(Training):
    """`lockstep.Trainer`, which cuts the global batch by itself."""

    def __init__(self, case: Case, **options: Any) -> None:
        count = case.leaves(dist.get_world_size())
        self._trainer = lockstep.Trainer(
            case.net.model(), loss, case.optimize, microbatches=count, **options
        )

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        self._trainer.step(batch)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of the trainer's module."""
        named = self._trainer.module.named_parameters()
        yield from ((name, each.detach()) for name, each in named)


class Copied(Training):
    """A copy of as many bytes as the gradients have, from memory to memory of the rank."""

    def __init__(self, case: Case) -> None:
        self._source = torch.ones(count(case.net))
        self._target = torch.zeros_like(self._source)

    def step(self, batch: Batch) -> None:
        """Copy once."""
        self._target.copy_(self._source)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing."""
        yield from ()


def part(batch: Batch) -> Batch:
    """Return this rank's part of a global batch."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    inputs, targets = (each.tensor_split(ranks)[rank] for each in batch)
    return inputs, targets


def copies(case: Case) -> Training:
    """Train by oneself."""
    return Loop(case, case.net.model())


def distributed(case: Case, shares: bool = False) -> Training:
    """Wrap the model in torch's DistributedDataParallel.

    With `shares` it asks the backend for the memory of its buckets.
    """
    os.environ["DDP_DISABLE_COMM_MEM"] = "0" if shares else "1"
    return Loop(case, nn.parallel.DistributedDataParallel(case.net.model()))


class Exact(Loop):
    """The loop of `lockstep.exact` over batches, each of which is divided as by the trainer."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, case.net.model())
        count = case.leaves(dist.get_world_size())
        self._exact = lockstep.exact(self.module, self._optimizer, microbatches=count)

    def step(self, batch: Batch) -> None:
        """Run a backward for each micro-batch of this rank."""
        exact = self._exact
        own = ExactBatch(exact.parallel.split(batch), exact._script_steps)
        for data, classes in own:
            own.backward(loss(self.module(data), classes))
        self._optimizer.step()
        self._optimizer.zero_grad()


class ExactWrapped(Loop):
    """The loop of `lockstep.exact` over micro-batches, around DistributedDataParallel."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, nn.parallel.DistributedDataParallel(case.net.model()))
        count = case.leaves(dist.get_world_size())
        ranks = dist.get_world_size()
        self._exact = lockstep.exact(self.module, microbatches=count)
        self._share = ReplicaShare(count, on_one_host(ranks), dist.get_rank())

    def step(self, batch: Batch) -> None:
        """Run a backward for each micro-batch; the last one exchanges gradients."""
        self._optimizer.zero_grad()
        inputs, targets = batch
        pieces = self._share.pieces(len(targets))
        for _, span in self._exact.microbatches(pieces):
            own = slice(span.start, span.stop)
            value = loss(self.module(inputs[own]), targets[own])
            self._exact.weigh(value, share=len(span) / len(targets)).backward()
        self._optimizer.step()


@dataclass(frozen=True)
class Contender:
    """A contender: its backend ("" for that of `lockstep.init`), and what makes its training.

    `average` is whether its parameters are those of one training on the global
    batch, `guaranteed` whether they are so to the last bit; `stock` is a process
    in which nothing of Lockstep has set anything. `memory` is about how many
    times the parameters it holds on a rank, without the optimizer's state.
    """

    name: str
    sentence: str
    backend: str
    make: Callable[[Case], Training]
    memory: float = 2.5
    average: bool = True
    guaranteed: bool = False
    stock: bool = False


_ALL = (
    Contender(
        "copies", "plain PyTorch on every rank, nothing exchanged", "gloo", copies, average=False
    ),
    Contender(
        "memcpy", "the bytes of the gradients copied on every rank", "gloo", Copied, 2.0,
        average=False,
    ),
    Contender("ddp-gloo", "DistributedDataParallel on gloo", "gloo", distributed, 3.5),
    Contender(
        "ddp-lockstep", "DistributedDataParallel on lockstep, private buckets", "lockstep",
        distributed, 3.5,
    ),
    Contender(
        "ddp-zero-copy", "the same, its buckets in shared memory", "lockstep",
        partial(distributed, shares=True), 3.5,
    ),
    Contender("fsdp-gloo", "FSDP2 (fully_shard) on gloo", "gloo", Sharded, 2.5),
    Contender("fsdp-lockstep", "FSDP2 (fully_shard) on lockstep", "lockstep", Sharded, 2.5),
    Contender("exact-gloo", "lockstep.exact on gloo", "gloo", Exact, 4.0, guaranteed=True),
    Contender(
        "exact-lockstep", "lockstep.exact on lockstep", "lockstep", Exact, 4.0, guaranteed=True
    ),
    Contender(
        "exact-ddp-gloo", "DistributedDataParallel with lockstep.exact on gloo", "gloo",
        ExactWrapped, 4.0, guaranteed=True,
    ),
    Contender(
        "exact-ddp-lockstep", "DistributedDataParallel with lockstep.exact on lockstep",
        "lockstep", ExactWrapped, 4.0, guaranteed=True,
    ),
    Contender("trainer", "lockstep.Trainer", "", Trained, 4.0, guaranteed=True),
    Contender(
        "shared", 'lockstep.Trainer(storage="shared")', "lockstep",
        partial(Trained, storage="shared"),
        3.0, guaranteed=True,
    ),
    Contender(
        "stock-copies", "copies as torch leaves a process", "gloo", copies,
        average=False, stock=True,
    ),
    Contender(
        "stock-ddp-gloo", "ddp-gloo as torch leaves a process", "gloo", distributed, 3.5,
        stock=True,
    ),
)  # fmt: skip

CONTENDERS = {contender.name: contender for contender in _ALL}
