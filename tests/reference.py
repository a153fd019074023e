"""The promise in plain PyTorch on one process, without a line of Lockstep.

What `train` computes here is what Lockstep must compute in every layout, bit for
bit. Read DESIGN section 1 beside it.
"""

import copy
import hashlib
import math
import struct

import torch


def key(*parts):
    data = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def cut(samples, parts):  # rule 1: contiguous, sizes differ by at most one, larger first
    sizes = [samples // parts + (part < samples % parts) for part in range(parts)]
    return [range(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(parts)]


def tree(values):  # rule 4: node(lo, hi) = node(lo, mid) + node(mid, hi); None is absent
    if len(values) == 1:
        return values[0]
    mid = 1 << ((len(values) - 1).bit_length() - 1)
    left, right = tree(values[:mid]), tree(values[mid:])
    return right if left is None else left if right is None else left + right


def merged(start, results, shares):  # rule 5
    if all(torch.equal(result, results[0]) for result in results):
        return results[0]
    wide = torch.float64 if start.dtype == torch.float64 else torch.float32
    return tree([r.to(wide) * s for r, s in zip(results, shares, strict=True)]).to(start.dtype)


def norms(gradient):  # rule 6: blocks of 65,536 elements, in memory order
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    blocks = gradient.permute(order).reshape(-1).split(65536)
    return [torch.linalg.vector_norm(block).item() for block in blocks]


def train(model, loss, optimizer, batches, microbatches=8, seed=0, clip=None):
    """Train on `batches` of (inputs, targets); return the losses."""
    optimizer, losses = optimizer(model.parameters()), []
    units = list(model) if type(model) is torch.nn.Sequential else [model]
    for step, (inputs, targets) in enumerate(batches):
        gradients, results, shares, values = [], [], [], []
        start = copy.deepcopy(dict(model.named_buffers()))
        for m, span in enumerate(cut(len(inputs), min(microbatches, len(inputs)))):
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            share = len(span) / len(inputs)  # rule 2
            value = inputs[span.start : span.stop].clone()
            for u, unit in enumerate(units):  # rule 3
                torch.default_generator.manual_seed(key(seed, step, m, u))
                value = unit(value)
            torch.default_generator.manual_seed(key(seed, step, m, len(units)))
            value = loss(value, targets[span.start : span.stop].clone())
            (value * share).backward()
            gradients.append([p.grad for p in model.parameters()])
            model.zero_grad(set_to_none=True)
            results.append({n: b.clone() for n, b in model.named_buffers()})
            shares.append(share)
            values.append(value.item() * share)
        for parameter, column in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = tree(column)
        for name, buffer in model.named_buffers():
            buffer.copy_(merged(start[name], [r[name] for r in results], shares))
        if clip is not None:  # rule 6
            present = [p.grad for p in model.parameters() if p.grad is not None]
            norm = math.sqrt(math.fsum(n * n for gradient in present for n in norms(gradient)))
            for gradient in present if norm > clip else []:
                gradient.mul_(clip / norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(tree(values))
    return losses
