"""The trainer of a model that does not fit on this host, which measures a step without memory.

    model             its blocks are built on the meta device
    optimizer         steps tensors without memory, which makes its state
    micro-batch 0     computed by fake tensors; a dispatch mode counts the bytes that are alive

Tensors without memory have shapes and strides, so all sizes are those of a real step. Workspaces
of kernels, and memory that an allocator cannot use, are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data.dataloader import EvaluationOptions
from lockstep.data.microbatch import split_batch
from lockstep.kernel.errors import UsageError
from lockstep.model.blocks import find_block_names
from lockstep.model.deferred_init import ModelLike, build_sequence, make_meta, named_tensors
from lockstep.model.forward import forward
from lockstep.tools.plan.live_tensors import LiveTensors
from lockstep.tools.plan.memory_plan import TrainingMemory, count_sums
from lockstep.tools.plan.memory_session import (
    MemorySession,
    count_parameter_bytes,
    measuring_outputs,
    read_process,
)
from lockstep.training.optimizer_config import list_configs, make_optimizers

__all__ = ["MetaTrainer", "replace_trainer"]


def replace_trainer(session: MemorySession) -> None:
    """Let `ls.Trainer` be a `MetaTrainer` for models that are not built and do not fit."""
    package = sys.modules["lockstep"]
    build: Callable[..., Any] = package.Trainer

    def make(model: ModelLike, *arguments: Any, **options: Any) -> Any:
        if not isinstance(model, nn.Module) or any(p.is_meta for p in model.parameters()):
            computed = MetaTrainer(session, model, *arguments, **options)
            if computed.least_bytes > psutil.virtual_memory().available:
                return computed
        return build(model, *arguments, **options)

    vars(package)["Trainer"] = make


class MetaTrainer:
    """Has the methods of `ls.Trainer` that a script calls up to its first step.

    Args:
        session: The session of the command.
        model, loss, optimizer, microbatches, pipeline: As for `ls.Trainer`.
        options: Further arguments of `ls.Trainer`, which do not affect sizes.
    """

    def __init__(
        self,
        session: MemorySession,
        model: ModelLike,
        loss: Callable[..., Any] | None,
        optimizer: Any,
        *,
        microbatches: int = 8,
        pipeline: Any = None,
        **options: Any,
    ) -> None:
        self._session = session
        self._loss = loss
        self._microbatches = microbatches
        self._configs = list_configs(optimizer)
        self._model = model if isinstance(model, nn.Module) else build_sequence(model, ())
        names = find_block_names(self._model, pipeline and pipeline.blocks)
        self._blocks = [self._model.get_submodule(name) for name in names]

    def __getattr__(self, name: str) -> Any:
        """Raise UsageError for what only a trainer with a model in memory has."""
        raise UsageError(
            f"the model does not fit on this host, so lockstep plan computes a step without "
            f"memory, and the script uses trainer.{name} before its first trainer.step(batch): "
            "call step with a batch first"
        )

    @property
    def least_bytes(self) -> int:
        """The bytes of the parameters, and of the gradients of a step on one rank."""
        gradients = count_parameter_bytes(self._model, only_trainable=True)
        lists = count_sums(range(self._microbatches), self._microbatches)
        return count_parameter_bytes(self._model) + lists * gradients

    def batches(
        self, dataset: Any, batch_size: int | None = None, **options: Unpack[EvaluationOptions]
    ) -> Iterator[Any]:
        """Return a first batch, whose size is that of any other one."""
        if isinstance(dataset, DataLoader):
            return iter(dataset)
        return iter(DataLoader(dataset, batch_size, collate_fn=options.get("collate_fn")))

    def step(self, batch: Any) -> None:
        """Compute the first micro-batch without memory, record all sizes, and end the script."""
        share = ReplicaShare(self._microbatches, on_one_host(1), 0)
        split = split_batch(batch, share)
        process, shared = read_process(0)
        optimizer = self._measure_state()
        refusals = self._session.find_refusals(self._model)
        gradients = count_parameter_bytes(self._model, only_trainable=True)
        outputs = [0] * len(self._blocks)
        live = LiveTensors()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            _replace_tensors(
                self._model, lambda tensor: FakeTensor(mode, tensor, torch.device("cpu"))
            )
            live.ignore(named_tensors(self._model).values())
            with measuring_outputs(self._blocks, outputs), live:
                data = split.microbatches[0].data
                loss, _ = forward(self._model, self._loss, {}, data, "micro-batch 0")
                loss.backward()
        self._session.end(
            TrainingMemory(
                parameters=count_parameter_bytes(self._model),
                gradients=gradients,
                optimizer=optimizer,
                activations=max(live.peak - gradients, 0),
                unused=0,
                process=process,
                shared=shared,
                leaves=split.leaves,
                refusals=refusals,
                blocks=tuple(map(count_parameter_bytes, self._blocks)),
                outputs=tuple(outputs),
                is_computed=True,
            )
        )

    def _measure_state(self) -> int:
        """Return the bytes of the optimizer's state, which a step on the meta device makes."""
        _replace_tensors(self._model, make_meta)
        for parameter in self._model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        size = 0
        self._session.optimizers = make_optimizers(self._configs, self._model)
        for optimizer in self._session.optimizers:
            optimizer.step()
            leaves = tree_leaves(dict(optimizer.state))
            size += sum(leaf.nbytes for leaf in leaves if torch.is_tensor(leaf))
        self._model.zero_grad()
        return size


def _replace_tensors(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace parameters and buffers, each of which may have several names."""
    made = {id(tensor): make(tensor.detach()) for tensor in named_tensors(module).values()}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                tensor = made[id(parameter)]
                if not isinstance(tensor, nn.Parameter):
                    tensor = nn.Parameter(tensor, parameter.requires_grad)
                    made[id(parameter)] = tensor
                part._parameters[name] = tensor
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = made[id(buffer)]
