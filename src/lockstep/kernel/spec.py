"""The specification: the whole guarantee in plain PyTorch on one process, rule by rule.

`train` computes what Lockstep must compute in every layout, bit for bit; `evaluate` and `epoch` do
the same for evaluations and for the batches of a loader. Nothing here uses the rest of Lockstep or
is used by it, and nothing here is fast: tests compare every layout with it. Read
docs/concepts/guarantee.md beside it.

    train
      for each batch
        cut                 rule 1    into micro-batches
        for each micro-batch
          keyed             rule 3    seed the generators before each RNG scope
          shares            rule 2    scale the loss, and call backward
        tree                rule 4    add the gradients
        merge               rule 5    and the buffers
        norms               rule 6    clip, and call the optimizer
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

__all__ = [
    "cut",
    "epoch",
    "evaluate",
    "key",
    "losses_of",
    "seed_generators",
    "train",
    "tree",
]

Tensor = torch.Tensor
Weight = Callable[[Any], float]


# --- Rule 1: splitting -----------------------------------------------------------------------


def cut(samples: int, parts: int) -> list[range]:
    """Split samples into contiguous parts whose sizes differ by at most one, larger ones first."""
    sizes = [samples // parts + (part < samples % parts) for part in range(parts)]
    return [range(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(parts)]


def length(batch: Any) -> int:
    """Return the number of samples of a batch."""
    return len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0])


def part_of(batch: Any, span: range) -> Any:
    """Return the samples of a span, in separate memory."""
    if isinstance(batch, Mapping):
        return {name: part_of(part, span) for name, part in batch.items()}
    if isinstance(batch, Tensor):
        return batch[span.start : span.stop].clone()
    return [part_of(part, span) for part in batch]


# --- Rule 2: loss weights --------------------------------------------------------------------


def shares(loss: Any, weight: Weight | None, parts: list[Any], sizes: list[int]) -> list[float]:
    """Return the factor of the loss of each micro-batch."""
    if getattr(loss, "reduction", "mean") == "sum":
        return [1.0] * len(parts)
    weight = weight or weight_of(loss)
    weights = [weight(part) for part in parts] if weight else sizes
    return [value / sum(weights) for value in weights]


def weight_of(loss: Any) -> Weight | None:
    """Return what the mean of a classification loss divides by, if its options say so."""
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return None
    if loss.weight is None and loss.ignore_index == -100:
        return None
    ignored = loss.ignore_index
    class_weights = loss.weight

    def weight(part: Any) -> float:
        targets = part[-1]
        if targets.is_floating_point():
            return len(targets)
        kept = targets[targets != ignored]
        return len(kept) if class_weights is None else class_weights.double()[kept].sum().item()

    return weight


# --- Rule 3: random numbers ------------------------------------------------------------------


def key(*parts: int) -> int:
    """Return the seed of a piece of work."""
    data = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python, and numpy if it is loaded."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := cast(Any, sys.modules.get("numpy"))) is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)


def keyed(scopes: Sequence[Callable[..., Any]], prefix: tuple[int, int, int]) -> Callable[..., Any]:
    """Return the model as a function that calls its scopes in order, each under its own key.

    `prefix` is (seed, step, micro-batch).
    """
    distinct = list(dict.fromkeys(scopes))
    calls = [0] * len(distinct)

    def seed(scope: int, call: int) -> None:
        torch.default_generator.manual_seed(key(*prefix, scope, *([call] if call else [])))

    def model(*values: Any, **named: Any) -> Any:
        for scope in scopes:
            number = distinct.index(scope)
            seed(number, calls[number])
            calls[number] += 1
            values = (scope(*values, **named),)
            named = {}
        seed(len(distinct), calls[0] - 1)  # of the loss
        return values[0]

    seed_generators(key(*prefix, -1))  # of what comes before the model
    return model


def scopes_of(model: nn.Module) -> list[Callable[..., Any]]:
    """Return the RNG scopes of a model: the children of a Sequential, or the model."""
    return list(model) if type(model) is nn.Sequential else [model]


# --- Rule 4: the tree ------------------------------------------------------------------------


def tree(values: Sequence[Any]) -> Any:
    """Return node(lo, hi) = node(lo, mid) + node(mid, hi) of all values; None is absent."""
    if len(values) == 1:
        return values[0]
    mid = 1 << ((len(values) - 1).bit_length() - 1)
    left = tree(values[:mid])
    right = tree(values[mid:])
    return right if left is None else left if right is None else coalesced(left + right)


def coalesced(value: Any) -> Any:
    """Return a value; every node of a sparse gradient has each row once."""
    return value.coalesce() if isinstance(value, Tensor) and value.is_sparse else value


# --- Rule 5: buffers -------------------------------------------------------------------------


def rules_of(modules: nn.Module) -> dict[str, str]:
    """Return the rule of each buffer: that of its module, or that of torch's batch norm."""
    rules = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "equal"}
    return {
        f"{path}.{name}": rule
        for path, module in modules.named_modules()
        for name, rule in (rules | getattr(module, "lockstep_buffer_rules", {})).items()
    }


def merge(
    start: Tensor, results: list[Tensor | None], sizes: list[int], rule: str | None
) -> Tensor:
    """Return a buffer after the step; None is the result of a micro-batch that is left out."""
    given = [result for result in results if result is not None]
    if all(torch.equal(result, start) for result in given):
        return start
    if rule == "last":
        return given[-1]
    wide = torch.float64 if start.dtype == torch.float64 else torch.float32
    if rule == "sum":
        wide = wide if start.is_floating_point() else torch.int64
        change = tree([None if r is None else r.to(wide) - start.to(wide) for r in results])
        return cast(Tensor, (start.to(wide) + change).to(start.dtype))
    if all(torch.equal(result, given[0]) for result in given):
        return given[0]
    assert rule == "mean"
    whole = sum(size for result, size in zip(results, sizes, strict=True) if result is not None)
    parts = [
        None if result is None else result.to(wide) * (size / whole)
        for result, size in zip(results, sizes, strict=True)
    ]
    return cast(Tensor, tree(parts).to(start.dtype))


# --- Rule 6: the optimizer -------------------------------------------------------------------


def norms(parameter: nn.Parameter) -> list[float]:
    """Return the norm of each block of 65,536 elements of a gradient, in memory order."""
    gradient = cast(Tensor, parameter.grad)
    if gradient.is_sparse:  # its rows, in ascending order
        values = gradient.values()
    else:
        values = gradient.permute(sorted(range(gradient.dim()), key=parameter.stride, reverse=True))
    return [torch.linalg.vector_norm(block).item() for block in values.reshape(-1).split(65536)]


# --- All rules -------------------------------------------------------------------------------


def losses_of(model: Callable[..., Any], loss: Any, batch: Any) -> Iterator[Tensor]:
    """Yield the losses of a micro-batch: one, of the loss function or of the model itself."""
    if loss is None:
        result = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        yield result["loss"] if isinstance(result, Mapping) else result
    else:
        *inputs, targets = batch
        yield loss(model(*inputs), targets)


def train(
    model: nn.Module,
    loss: Any,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batches: Iterable[Any],
    microbatches: int = 8,
    seed: int = 0,
    clip: float | None = None,
    *,
    scopes: Sequence[Callable[..., Any]] | None = None,
    weight: Weight | None = None,
    precision: torch.dtype | None = None,
    losses_of: Callable[..., Iterable[Tensor]] = losses_of,
    after_step: Callable[[float, bool], None] | None = None,
) -> list[float]:
    """Train on batches, and return the losses.

    Args:
        model: The model.
        loss: The loss function; None if the model returns its loss.
        optimizer: A function of the parameters that returns their optimizer.
        batches: Batches of (inputs, ..., targets) or of named inputs.
        microbatches: The number of micro-batches of a batch.
        seed: The seed of all random numbers.
        clip: The largest norm of the gradient.
        scopes: The model's RNG scopes; None for the children of a Sequential, or the model.
        weight: A function of a micro-batch that returns its weight.
        precision: The dtype of autocast.
        losses_of: Yields the losses of a micro-batch, with one backward pass for each.
        after_step: Called with each step's loss, and whether its gradients overflowed float16, so
            that the step was skipped: a schedule, an average.
    """
    updating = optimizer(model.parameters())
    losses = []
    scale = 65536.0 if precision == torch.float16 else 1.0
    scopes = scopes or scopes_of(model)
    modules = nn.ModuleList([model, loss] if isinstance(loss, nn.Module) else [model])
    rules = rules_of(modules)
    for step, batch in enumerate(batches):
        samples = length(batch)
        spans = cut(samples, min(microbatches, samples))  # rule 1
        parts = [part_of(batch, span) for span in spans]
        sizes = [len(span) for span in spans]
        gradients: list[list[Any]] = []
        results: list[dict[str, Any]] = []
        values: list[float] = []
        start = copy.deepcopy(dict(modules.named_buffers()))
        for m, share in enumerate(shares(loss, weight, parts, sizes)):
            if share == 0:  # rule 2: left out
                gradients.append([None for _ in model.parameters()])
                results.append(dict.fromkeys(start))
                values.append(0.0)
                continue
            for name, buffer in modules.named_buffers():
                buffer.copy_(start[name])
            call = keyed(scopes, (seed, step, m))  # rule 3
            total = 0.0
            with torch.autocast("cpu", precision, precision is not None, cache_enabled=False):
                for value in losses_of(call, loss, parts[m]):
                    with torch.autocast("cpu", enabled=False):
                        wide = value.float() if precision == torch.float16 else value
                        (wide * (share * scale)).backward(retain_graph=True)
                    total += value.item()
            gradients.append([coalesced(p.grad) for p in model.parameters()])
            model.zero_grad(set_to_none=True)
            results.append({n: b.clone() for n, b in modules.named_buffers()})
            values.append(total * share)
        for parameter, column in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = tree(column)  # rule 4
        for name, buffer in modules.named_buffers():  # rule 5
            buffer.copy_(merge(start[name], [r[name] for r in results], sizes, rules.get(name)))
        is_skipped = False
        if clip is not None or precision == torch.float16:  # rule 6
            present = [p for p in model.parameters() if p.grad is not None]
            for parameter in present if scale != 1 else []:
                cast(Tensor, parameter.grad).mul_(1 / scale)
            norm = math.sqrt(math.fsum(n * n for p in present for n in norms(p)))
            is_skipped = not math.isfinite(norm)
            if clip is not None and clip < norm < math.inf:
                for parameter in present:
                    cast(Tensor, parameter.grad).mul_(clip / norm)
        if is_skipped:  # fewer than the 2,000 steps after which the scale would grow
            scale /= 2
        else:
            updating.step()
        updating.zero_grad(set_to_none=True)
        losses.append(tree(values))
        if after_step is not None:
            after_step(losses[-1], is_skipped)
    return losses


def evaluate(
    model: nn.Module,
    loss: Any,
    batches: Iterable[Any],
    microbatches: int = 8,
    seed: int = 0,
    *,
    scopes: Sequence[Callable[..., Any]] | None = None,
    weight: Weight | None = None,
    precision: torch.dtype | None = None,
) -> float:
    """Return the mean loss over all samples, or their sum where the loss is one."""
    scopes = scopes or scopes_of(model)
    weight = weight or weight_of(loss)
    terms = []
    weights = []
    modules = nn.ModuleList([model, loss] if isinstance(loss, nn.Module) else [model])
    start = copy.deepcopy(dict(modules.named_buffers()))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    autocast = torch.autocast("cpu", precision, precision is not None, cache_enabled=False)
    with torch.no_grad(), autocast:
        for number, batch in enumerate(batches):
            for m, span in enumerate(cut(length(batch), min(microbatches, length(batch)))):
                part = part_of(batch, span)
                (value,) = losses_of(keyed(scopes, (seed, -1 - number, m)), loss, part)
                for name, buffer in modules.named_buffers():
                    buffer.copy_(start[name])
                weights.append(float(weight(part) if weight else len(span)))
                terms.append(value.item())
    for module, mode in modes.items():
        module.training = mode
    if getattr(loss, "reduction", "mean") == "sum":
        return math.fsum(terms)
    pairs = [(w, term) for w, term in zip(weights, terms, strict=True) if w]
    return math.fsum(w * term for w, term in pairs) / math.fsum(weights)


def epoch(
    dataset: Any,
    size: int,
    seed: int,
    number: int,
    *,
    shuffle: bool = True,
    sampler: Iterable[int] | None = None,
) -> list[Any]:
    """Return the global batches of epoch `number`: each sample loaded under its own key."""
    samples = []
    drawn = dict[int, int]()
    if isinstance(dataset, IterableDataset):
        seed_generators(key(seed, number))
        stream = iter(dataset)
        for position in range(len(cast(Sized, dataset))):
            seed_generators(key(seed, number, position))
            samples.append(next(stream))
    else:
        generator = torch.Generator().manual_seed(key(seed, number))
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for index in sampler or (order if shuffle else range(len(dataset))):
            again = drawn.get(index, 0)  # how often the sampler drew it before
            drawn[index] = again + 1
            seed_generators(key(seed, number, index, *([again] if again else [])))
            samples.append(dataset[index])
    return [default_collate(samples[at : at + size]) for at in range(0, len(samples), size)]
