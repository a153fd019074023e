"""The determinism guarantee in plain PyTorch on one process, without a line of Lockstep.

`train` computes what Lockstep must compute in every layout, bit for bit; `epoch` gives
the batches that its loader must give. Read docs/concepts/guarantee.md beside it.
"""

import copy
import hashlib
import math
import random
import struct
from collections.abc import Mapping

import numpy
import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate


def key(*parts):
    data = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def seed_generators(number):
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFF_FFFF)


def cut(samples, parts):  # rule 1: contiguous, sizes differ by at most one, larger first
    sizes = [samples // parts + (part < samples % parts) for part in range(parts)]
    return [range(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(parts)]


def shares(loss, weight, parts, sizes):  # rule 2: what each micro-batch's loss is scaled by
    if getattr(loss, "reduction", "mean") == "sum":
        return [1.0] * len(parts)
    weight = weight or weight_of(loss)
    weights = [weight(part) for part in parts] if weight else sizes
    return [each / sum(weights) for each in weights]


def weight_of(loss):
    """Return what the mean of a classification loss divides by, where its options say so."""
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return None
    if loss.weight is None and loss.ignore_index == -100:
        return None

    def weight(part):
        targets = part[-1]
        if targets.is_floating_point():
            return len(targets)
        kept = targets[targets != loss.ignore_index]
        return len(kept) if loss.weight is None else loss.weight.double()[kept].sum().item()

    return weight


def keyed(units, place):  # rule 3: place is (seed, step, micro-batch)
    """Return the model as a function that calls its units in order, each under its own key."""
    distinct = list(dict.fromkeys(units))
    calls = [0] * len(distinct)

    def seed(unit, call):
        torch.default_generator.manual_seed(key(*place, unit, *([call] if call else [])))

    def model(*values, **named):
        for unit in units:
            number = distinct.index(unit)
            seed(number, calls[number])
            calls[number] += 1
            values, named = (unit(*values, **named),), {}
        seed(len(distinct), calls[0] - 1)  # of the loss
        return values[0]

    seed_generators(key(*place, -1))  # of what comes before the model
    return model


def tree(values):  # rule 4: node(lo, hi) = node(lo, mid) + node(mid, hi); None is absent
    if len(values) == 1:
        return values[0]
    mid = 1 << ((len(values) - 1).bit_length() - 1)
    left, right = tree(values[:mid]), tree(values[mid:])
    return right if left is None else left if right is None else coalesced(left + right)


def coalesced(value):  # every node of a sparse gradient has each row once
    return value.coalesce() if isinstance(value, torch.Tensor) and value.is_sparse else value


def rules_of(modules):
    """Return the rule of each buffer: that of its module, or that of torch's batch norm."""
    rules = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "equal"}
    return {
        f"{path}.{name}": rule
        for path, module in modules.named_modules()
        for name, rule in (rules | getattr(module, "lockstep_buffer_rules", {})).items()
    }


def merge(start, results, sizes, rule):  # rule 5
    given = [result for result in results if result is not None]
    if all(torch.equal(result, start) for result in given):
        return start
    if rule == "last":
        return given[-1]
    if rule == "sum":
        exact = torch.float64 if start.dtype == torch.float64 else torch.float32
        wide = exact if start.is_floating_point() else torch.int64
        change = tree([None if r is None else r.to(wide) - start.to(wide) for r in results])
        return (start.to(wide) + change).to(start.dtype)
    if all(torch.equal(result, given[0]) for result in given):
        return given[0]
    assert rule == "mean"
    wide = torch.float64 if start.dtype == torch.float64 else torch.float32
    whole = sum(size for result, size in zip(results, sizes, strict=True) if result is not None)
    parts = [
        None if result is None else result.to(wide) * (size / whole)
        for result, size in zip(results, sizes, strict=True)
    ]
    return tree(parts).to(start.dtype)


def norms(parameter):  # rule 6: blocks of 65,536 elements, in the parameter's memory order
    if parameter.grad.is_sparse:  # its rows, in ascending order
        blocks = parameter.grad.values().reshape(-1).split(65536)
    else:
        order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
        blocks = parameter.grad.permute(order).reshape(-1).split(65536)
    return [torch.linalg.vector_norm(block).item() for block in blocks]


def losses_of(model, loss, batch):
    """Yield the losses of a micro-batch: one, of the loss function or of the model itself."""
    if loss is None:
        result = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        yield result["loss"] if isinstance(result, Mapping) else result
    else:
        *inputs, targets = batch
        yield loss(model(*inputs), targets)


def train(
    model, loss, optimizer, batches, microbatches=8, seed=0, clip=None, *,
    units=None, weight=None, precision=None, losses_of=losses_of, after_step=None,
):  # fmt: skip
    """Train on `batches` of (inputs, ..., targets) or of named inputs; return the losses.

    `units` are the model's blocks: of a Sequential its children, otherwise the model
    itself. `weight` gives the weight of a micro-batch. `losses_of` yields its losses, one
    backward pass for each. `after_step` is called with each step's loss, and whether its gradients
    overflowed float16, so that the step was skipped: a schedule, an average.
    """
    optimizer, losses = optimizer(model.parameters()), []
    scale = 65536.0 if precision == torch.float16 else 1.0
    units = units or (list(model) if type(model) is nn.Sequential else [model])
    modules = nn.ModuleList([model, loss] if isinstance(loss, nn.Module) else [model])
    rules = rules_of(modules)
    for step, batch in enumerate(batches):
        samples = length(batch)
        spans = cut(samples, min(microbatches, samples))
        parts, sizes = [part_of(batch, span) for span in spans], [len(span) for span in spans]
        gradients, results, values = [], [], []
        start = copy.deepcopy(dict(modules.named_buffers()))
        for m, share in enumerate(shares(loss, weight, parts, sizes)):
            if share == 0:  # rule 2: left out
                gradients.append([None for _ in model.parameters()])
                results.append(dict.fromkeys(start))
                values.append(0.0)
                continue
            for name, buffer in modules.named_buffers():
                buffer.copy_(start[name])
            call = keyed(units, (seed, step, m))
            found = 0.0
            with torch.autocast("cpu", precision, precision is not None, cache_enabled=False):
                for value in losses_of(call, loss, parts[m]):
                    with torch.autocast("cpu", enabled=False):
                        wide = value.float() if precision == torch.float16 else value
                        (wide * (share * scale)).backward(retain_graph=True)
                    found += value.item()
            gradients.append([coalesced(p.grad) for p in model.parameters()])
            model.zero_grad(set_to_none=True)
            results.append({n: b.clone() for n, b in modules.named_buffers()})
            values.append(found * share)
        for parameter, column in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = tree(column)
        for name, buffer in modules.named_buffers():
            buffer.copy_(merge(start[name], [r[name] for r in results], sizes, rules.get(name)))
        is_skipped = False
        if clip is not None or precision == torch.float16:  # rule 6
            present = [p for p in model.parameters() if p.grad is not None]
            for parameter in present if scale != 1 else []:
                parameter.grad.mul_(1 / scale)
            norm = math.sqrt(math.fsum(n * n for p in present for n in norms(p)))
            is_skipped = not math.isfinite(norm)
            for parameter in present if clip is not None and clip < norm < math.inf else []:
                parameter.grad.mul_(clip / norm)
        if is_skipped:  # fewer than the 2,000 steps after which the scale would grow
            scale /= 2
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(tree(values))
        if after_step is not None:
            after_step(losses[-1], is_skipped)
    return losses


def evaluate(
    model, loss, batches, microbatches=8, seed=0, *, units=None, weight=None, precision=None
):
    """Return the mean loss over all samples, or their sum where the loss is one."""
    units = units or (list(model) if type(model) is nn.Sequential else [model])
    weight = weight or weight_of(loss)
    terms, weights = [], []
    modules = nn.ModuleList([model, loss] if isinstance(loss, nn.Module) else [model])
    start = copy.deepcopy(dict(modules.named_buffers()))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    autocast = torch.autocast("cpu", precision, precision is not None, cache_enabled=False)
    with torch.no_grad(), autocast:
        for number, batch in enumerate(batches):
            for m, span in enumerate(cut(length(batch), min(microbatches, length(batch)))):
                part = part_of(batch, span)
                (value,) = losses_of(keyed(units, (seed, -1 - number, m)), loss, part)
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


def epoch(dataset, size, seed, number, *, shuffle=True, sampler=None):
    """Return the global batches of epoch `number`: each sample loaded under its own key."""
    samples, drawn = [], {}
    if isinstance(dataset, IterableDataset):
        seed_generators(key(seed, number))
        stream = iter(dataset)
        for position in range(len(dataset)):
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


def length(batch):
    first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(first)


def part_of(batch, span):
    """Return the samples of a span, in memory of their own."""
    if isinstance(batch, Mapping):
        return {name: part_of(part, span) for name, part in batch.items()}
    if isinstance(batch, torch.Tensor):
        return batch[span.start : span.stop].clone()
    return [part_of(part, span) for part in batch]


def digest(state):
    """Return the SHA-256 over names, dtypes, shapes and bytes, in sorted order."""
    sha = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, bool | int | float):
            value = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        rows = coalesced(value) if value.is_sparse else None
        for part in [value] if rows is None else [rows.indices(), rows.values()]:
            sha.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def optimizer_state(optimizer, model):
    """Return an optimizer's state by the names of its parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{entry}": value
        for parameter, state in optimizer.state.items()
        for entry, value in state.items()
    }
