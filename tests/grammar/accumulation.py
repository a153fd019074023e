"""Gradient accumulation in plain PyTorch, on one process: what a loop with `ls.exact` must compute.

It follows the rules of `lockstep.kernel.spec`, and what a script's own loop adds: weights
that are known only after the forward, a scaler of torch, and an update that the script writes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.kernel import spec

__all__ = ["AccumulatedBatch", "Accumulation", "clip"]


@dataclass(frozen=True)
class AccumulatedBatch:
    """What is known of a batch when its gradients are in `.grad`."""

    loss: float
    norm: float
    logged: float
    """The mean of the losses, weighted by samples."""


class Accumulation:
    """The gradients and buffers of a model, batch by batch.

    Args:
        model: The model.
        scopes: Its RNG scopes.
        microbatches: The number of micro-batches of a batch.
        seed: The seed of the random numbers.
    """

    def __init__(
        self, model: nn.Module, scopes: Sequence[Callable[..., Any]], microbatches: int, seed: int
    ) -> None:
        self.model = model
        self.scopes = scopes
        self.microbatches = microbatches
        self.seed = seed
        self.steps = 0
        self.rules = spec.rules_of(nn.ModuleList([model]))

    def compute(
        self,
        batch: Any,
        losses_of: Callable[[Any, Any], Iterable[torch.Tensor]],
        factor: Callable[[Any, float], float],
        divides: bool = False,
        scale: float = 1.0,
    ) -> AccumulatedBatch:
        """Leave the gradients of a whole batch in `.grad`, multiplied by `scale`.

        Args:
            batch: The batch.
            losses_of: Yields the losses of a micro-batch, called with the model and its data.
            factor: Returns the factor of a micro-batch's loss, from its data and its share of the
                samples.
            divides: Whether the sums are divided by the sum of all factors.
            scale: What the losses are multiplied by for the backward pass.
        """
        model = self.model
        modules = nn.ModuleList([model])
        samples = spec.length(batch)
        spans = spec.cut(samples, min(self.microbatches, samples))
        sizes = [len(span) for span in spans]
        start = copy.deepcopy(dict(modules.named_buffers()))
        gradients: list[list[Any]] = []
        results: list[Any] = []
        values: list[float] = []
        factors: list[float] = []
        logged: list[tuple[int, float]] = []
        for m, span in enumerate(spans):
            for name, buffer in modules.named_buffers():
                buffer.copy_(start[name])
            part = spec.part_of(batch, span)
            share = factor(part, len(span) / samples)
            call = spec.keyed(self.scopes, (self.seed, self.steps, m))
            total = 0.0
            for value in losses_of(call, part):
                if share:
                    wide = value.float() if value.dtype == torch.float16 else value
                    with torch.autocast("cpu", enabled=False):
                        (wide * (share * scale)).backward(retain_graph=True)
                total += value.item()
            gradients.append(
                [spec.coalesced(p.grad) if share else None for p in model.parameters()]
            )
            model.zero_grad(set_to_none=True)
            results.append({name: b.clone() for name, b in modules.named_buffers()})
            factors.append(share)
            values.append(total * share if share else 0.0)
            if share:
                logged.append((len(span), total))
        weight = sum(factors) if divides else 1.0
        for parameter, column in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = spec.tree(column)
        for name, buffer in modules.named_buffers():
            merged = spec.merge(
                start[name], [r[name] for r in results], sizes, self.rules.get(name)
            )
            buffer.copy_(merged)
        norm = norm_of(model)
        present = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in present if divides else []:
            gradient.div_(weight)
        self.steps += 1
        mean = math.fsum(size * value for size, value in logged) / sum(size for size, _ in logged)
        return AccumulatedBatch(spec.tree(values) / weight, norm / weight, mean)


def norm_of(model: nn.Module) -> float:
    """Return the norm of the gradients, with the bits of the specification."""
    present = [p for p in model.parameters() if p.grad is not None]
    return math.sqrt(math.fsum(n * n for p in present for n in spec.norms(p)))


def clip(model: nn.Module, largest: float) -> float:
    """Scale the gradients to a norm of at most `largest`; return their norm before."""
    norm = norm_of(model)
    if largest < norm < math.inf:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(largest / norm)
    return norm
