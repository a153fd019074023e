"""Overhead of a trainer: a step of a tiny network in micro-batches.

    python benchmarks/overhead.py [--ranks 1 2 4] [--microbatches 8 64] [--rounds 300]

Two linear layers, 256 samples, one thread, nothing recorded. Contenders take turns, for ten steps
at a time as in a training, each on a batch that is written anew before it. On one rank: plain
PyTorch that accumulates gradients, and plain PyTorch with the batch in one pass, `trainer.step`,
`trainer.manual_step`, the loops of `ls.exact` (over batches, and over micro-batches), and those of
Lightning Fabric and Accelerate that are installed. On several ranks, the first ones are
DistributedDataParallel with `no_sync`, and with one pass per rank. The steps are those of rank 0,
as medians and quartiles. The ratios are those of the medians of two contenders in each turn. The
losses of one rank are compared.
"""

import argparse
import importlib.util
import statistics
import time
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.training.script_loop.exact_batch import ExactBatch

WIDTH = 64
CLASSES = 10
SAMPLES = 256
SGD = partial(torch.optim.SGD, lr=0.01)
WARM = 20
TURN = 10  # steps


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def accumulate(model, optimizer, backward, parts, unsynchronized=nullcontext):
    """Return the mean loss of a step that adds the gradients of its micro-batches."""
    optimizer.zero_grad()
    total = 0.0
    loss_function = nn.CrossEntropyLoss()
    for number, (inputs, targets) in enumerate(parts):
        with unsynchronized() if number < len(parts) - 1 else nullcontext():
            loss = loss_function(model(inputs), targets) / len(parts)
            backward(loss)
        total += loss.item()
    optimizer.step()
    return total


def plain(microbatches):
    model = network()
    optimizer = SGD(model.parameters())

    def step(inputs, targets):
        parts = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
        return accumulate(model, optimizer, torch.Tensor.backward, parts)

    return step


def make_trainer(microbatches):
    return ls.Trainer(
        network(), nn.CrossEntropyLoss(), SGD, microbatches=microbatches, loggers=(), progress=False
    )


def lockstep(microbatches):
    trainer = make_trainer(microbatches)
    return lambda inputs, targets: trainer.step((inputs, targets))


def manual(microbatches):
    trainer = make_trainer(microbatches)
    loss_function = nn.CrossEntropyLoss()

    def train(inputs, targets):
        with trainer.manual_step() as step:
            for one, other in step.microbatches((inputs, targets)):
                step.backward(loss_function(trainer.model(one), other))
        return step.result.loss

    return train


def nested(microbatches):
    model = network()
    loss_function = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters())
    handle = ls.exact(model, optimizer, microbatches=microbatches, loggers=(), progress=False)

    def step(inputs, targets):
        # What `handle.batches` yields, divided from the same tensors as for the others.
        batch = ExactBatch(handle.parallel.split((inputs, targets)), handle._script_steps)
        for one, other in batch:
            batch.backward(loss_function(model(one), other))
        optimizer.step()
        optimizer.zero_grad()
        return batch.loss

    return step


def fabric(microbatches):
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    module = network()
    model, optimizer = made.setup(module, SGD(module.parameters()))

    def step(inputs, targets):
        parts = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
        unsynchronized = partial(made.no_backward_sync, model)
        return accumulate(model, optimizer, made.backward, parts, unsynchronized)

    return step


def accelerate(microbatches):
    from accelerate import Accelerator

    made = Accelerator(cpu=True, gradient_accumulation_steps=microbatches)
    module = network()
    model, optimizer = made.prepare(module, SGD(module.parameters()))
    loss_function = nn.CrossEntropyLoss()

    def step(inputs, targets):
        total = 0.0
        pairs = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
        for one, other in pairs:
            with made.accumulate(model):
                loss = loss_function(model(one), other)
                made.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / microbatches
        return total

    return step


def distributed(microbatches):
    model = DistributedDataParallel(network())
    optimizer = SGD(model.parameters())
    rank = ls.rank()
    ranks = ls.world_size()

    def step(inputs, targets):
        parts = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
        own = parts[rank * len(parts) // ranks : (rank + 1) * len(parts) // ranks]
        return accumulate(model, optimizer, torch.Tensor.backward, own, model.no_sync)

    return step


def flat(microbatches):
    model = network()
    loss_function = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters())
    handle = ls.exact(model, optimizer, microbatches=microbatches, loggers=(), progress=False)
    rank = ls.rank()
    ranks = ls.world_size()

    def step(inputs, targets):
        parts = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
        own = parts[rank * len(parts) // ranks : (rank + 1) * len(parts) // ranks]
        total = 0.0
        for one, other in handle.microbatches(own):
            loss = loss_function(model(one), other)
            handle.weigh(loss).backward()
            total += loss.item() / len(own)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def contenders(ranks):
    own = {"trainer.step": lockstep, "manual_step": manual, "exact.batches": nested}
    own |= {"exact.microbatches": flat}
    if ranks > 1:
        name = "DistributedDataParallel"
        return {name: distributed, f"{name}, one pass": lambda _: distributed(ranks)} | own
    peers = {"lightning_fabric": ("Fabric", fabric), "accelerate": ("Accelerate", accelerate)}
    found = [pair for name, pair in peers.items() if importlib.util.find_spec(name)]
    whole = {"plain PyTorch, one pass": lambda _: plain(1)}
    return {"plain PyTorch": plain} | whole | own | dict(found)


def measure(ranks, microbatches, rounds, names):
    """Return the seconds of each contender's steps on this rank, by turns."""
    ls.init()
    torch.set_num_threads(1)
    chosen = {name: make for name, make in contenders(ranks).items() if name in names or not names}
    steps = {name: make(microbatches) for name, make in chosen.items()}
    generator = torch.Generator()
    targets = torch.arange(SAMPLES) % CLASSES
    times = {name: [] for name in steps}
    for first in range(0, WARM + rounds, TURN):
        losses = {name: [] for name in steps}
        turn = {name: [] for name in steps}
        order = list(steps)[:: 1 if first // TURN % 2 else -1]
        for name in order:
            step = steps[name]
            # The same batches for all, since their losses are compared. They are made before the
            # first step: ranks that share a core would wait for those of the others.
            generator.manual_seed(first)
            batches = torch.randn(TURN, SAMPLES, WIDTH, generator=generator).unbind()
            torch.distributed.barrier()
            for batch in batches:
                began = time.perf_counter()
                losses[name].append(step(batch, targets))
                turn[name].append(time.perf_counter() - began)
        if first >= WARM:
            for name, seconds in turn.items():
                times[name].append(seconds)
        expected = torch.tensor(next(iter(losses.values())))
        wrong = [
            name
            for name, found in losses.items()
            if not torch.allclose(torch.tensor(found), expected, atol=1e-3)
        ]
        if wrong and ranks == 1:
            raise SystemExit(f"the losses of {wrong[0]} differ: {losses}")
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--contenders", nargs="+", default=[], metavar="NAME")
    given = parser.parse_args()
    for ranks in given.ranks:
        known = contenders(ranks)
        if given.contenders and known.keys().isdisjoint(given.contenders):
            parser.error(f"with --ranks {ranks}, the contenders are {', '.join(known)}")
    print("| ranks | micro-batches | contender | step | relative to the first |")
    print("|---|---|---|---|---|")
    for ranks in given.ranks:
        for microbatches in given.microbatches:
            work = partial(measure, ranks, microbatches, given.rounds, given.contenders)
            times = ls.launch(work, nprocs=ranks)[0]
            first = [statistics.median(turn) for turn in next(iter(times.values()))]
            for name, turns in times.items():
                seconds = [1e3 * each for turn in turns for each in turn]
                step = describe(seconds, " ms")
                own = [statistics.median(turn) for turn in turns]
                ratio = describe([one / other for one, other in zip(own, first, strict=True)])
                print(f"| {ranks} | {microbatches} | {name} | {step} | {ratio} |", flush=True)


def describe(values, unit=""):
    """Return the median and the quartiles of values."""
    low, middle, high = statistics.quantiles(values)
    return f"{middle:.2f}{unit} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
