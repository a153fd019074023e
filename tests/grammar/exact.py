"""A case in a loop with `ls.exact`: its model and loss, on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from grammar import Case, case
from grammar.datasets import tensors
from grammar.loops import loop_of
from grammar.plain import tensor_batches
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.kernel import spec

STEPS = 3


def outcomes(seeds: Sequence[int]) -> list[str]:
    """Return what each case computes on this rank, or the error that it raises."""
    warnings.simplefilter("ignore")
    return [_outcome_of(case(seed)) for seed in seeds]


def fits(drawn: Case) -> bool:
    """Return whether a case has a module, a loss without buffers, and enough micro-batches."""
    loss = drawn.loss.build(drawn.model.dtype)
    has_buffers = isinstance(loss, nn.Module) and any(True for _ in loss.buffers())
    return drawn.model.form != "factories" and not has_buffers and drawn.microbatches >= 3


def _outcome_of(drawn: Case) -> str:
    try:
        return _train(drawn)
    except Exception as error:  # the same on any number of ranks
        return type(error).__name__


def _train(drawn: Case) -> str:
    model, loss = drawn.model.build(drawn.seed), drawn.loss.build(drawn.model.dtype)
    called = DistributedDataParallel(model)
    exact = ls.exact(called, drawn.microbatches, drawn.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    inputs, targets = tensors(drawn.data, drawn.model, drawn.loss, drawn.microbatches, drawn.seed)
    ranks = dist.get_world_size()
    share = ReplicaShare(drawn.microbatches, on_one_host(ranks), dist.get_rank())
    whole = [b for b in tensor_batches(drawn, inputs, targets) if spec.length(b) >= 9][:STEPS]
    for batch in whole:
        samples = spec.length(batch)
        parts = [(spec.part_of(batch, span), len(span)) for _, span in share.pieces(samples)]
        for part, size in parts:
            exact.begin()
            values: Any = loop_of("plain")(called, loss, part)
            (value,) = values
            exact.weigh(value, share=size / samples).backward()
        optimizer.step()
        optimizer.zero_grad()
    return f"{len(whole)} steps: {ls.digest(model)}"
