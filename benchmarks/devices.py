"""Lockstep on an accelerator: equal digests in every layout, and the overhead of a step.

    python benchmarks/devices.py [--batch 256] [--image 224] [--microbatches 1 8] [--rounds 30]

The first table trains a small network with dropout and batch norm in float32 and bfloat16: alone
on the backend of the device, on 2 and 4 ranks and in 2 stages on one device, and the same on
several devices if there are. Its digests must be equal. The second one trains ResNet-50 in
bfloat16 in a world of one: plain PyTorch that accumulates the gradients of micro-batches, the
trainer, and DistributedDataParallel of torch and of Lockstep. The contenders alternate, each step
ends with a synchronization, and the deterministic settings of `ls.init` hold for all of them.

`--before MODULE:FUNCTION` calls a function in every process first. On a machine without an
accelerator, `PYTHONPATH=tests` and `--before simulated.ranks:install` use the simulated one, which
shows that the script works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.devices import count_devices, device_names, find_accelerator, synchronize
from lockstep.kernel.errors import LockstepError
from lockstep.tools.recipes.resnet import resnet18, resnet50

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WARM = 5  # rounds that are not measured
TIMEOUT = 600.0  # seconds


def prepare(before: str | None) -> None:
    """Call the function of `--before`."""
    if before is not None:
        module, _, function = before.partition(":")
        getattr(importlib.import_module(module), function)()


# --- digests -------------------------------------------------------------------------------------


def train_small(
    before: str | None, device: str, backend: str | None, options: dict[str, Any]
) -> str:
    """Train a small network on this rank; return the digest of its weights and its optimizer."""
    prepare(before)
    ls.init(device=device, backend=backend, timeout=TIMEOUT)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 10),
    )  # fmt: skip
    trainer = ls.Trainer(
        model, nn.CrossEntropyLoss(), SGD, seed=2, loggers=(), progress=False, **options
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        inputs = torch.randn(32, 3, 16, 16, generator=generator)
        trainer.step((inputs, torch.randint(0, 10, (32,), generator=generator)))
    found = f"{trainer.digest()[:12]} {trainer.optimizer_digest()[:12]}"
    ls.shutdown()
    return found


def list_layouts(kind: str, devices: int) -> list[tuple[str, int, str, str | None, dict[str, Any]]]:
    """Return the layouts: name, ranks, device, backend, options of the trainer."""
    # NCCL needs a device per rank; Gloo, where it can carry tensors of this kind, does not.
    shared = "gloo" if kind in dist.Backend.backend_capability["gloo"] else None
    stages = {"pipeline": ls.PipelineConfig(stages=2)}
    found: list[tuple[str, int, str, str | None, dict[str, Any]]] = [
        ("1 rank", 1, kind, None, {}),
        ("2 ranks on one device", 2, f"{kind}:0", shared, {}),
        ("4 ranks on one device", 4, f"{kind}:0", shared, {}),
        ("2 stages on one device", 2, f"{kind}:0", shared, stages),
    ]
    if devices > 1:
        found += [("2 ranks", 2, kind, None, {}), ("2 stages", 2, kind, None, stages)]
    if devices > 3:
        found += [("4 ranks", 4, kind, None, {}), ("2 replicas of 2 stages", 4, kind, None, stages)]
    return found


def print_digests(before: str | None, kind: str, devices: int) -> bool:
    """Print the first table; return whether the digests are equal."""
    print("| dtype | layout | digests of weights and optimizer | equal |")
    print("|---|---|---|---|")
    are_equal = True
    for dtype in (None, torch.bfloat16):
        expected = ""
        for name, ranks, device, backend, options in list_layouts(kind, devices):
            arguments = before, device, backend, {"autocast_dtype": dtype, **options}
            try:
                found = ls.launch(train_small, arguments, ranks, timeout=TIMEOUT)
            except LockstepError as error:
                print(f"| {format_dtype(dtype)} | {name} | {str(error).splitlines()[0]} | no |")
                are_equal = False
                continue
            expected = expected or found[0]
            is_equal = set(found) == {expected}
            are_equal &= is_equal
            row = format_dtype(dtype), name, found[0], "yes" if is_equal else "no"
            print(f"| {' | '.join(row)} |", flush=True)
    return are_equal


def format_dtype(dtype: torch.dtype | None) -> str:
    """Format the dtype of autocast; None is float32."""
    return str(dtype or torch.float32).removeprefix("torch.")


# --- overhead ------------------------------------------------------------------------------------

Step = Callable[[torch.Tensor, torch.Tensor], object]


def make_loop(wrap: Callable[[nn.Module], nn.Module], network: nn.Module, parts: int) -> Step:
    """Return a step of an ordinary loop, which accumulates the gradients of micro-batches."""
    device = ls.world().device
    model = wrap(network.to(device))
    optimizer, loss_function = SGD(network.parameters()), nn.CrossEntropyLoss()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for one, other in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                loss = loss_function(model(one), other) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total.item()

    return step


def make_trainer(network: nn.Module, parts: int) -> Step:
    """Return a step of the trainer."""
    trainer = ls.Trainer(
        network, nn.CrossEntropyLoss(), SGD, microbatches=parts, autocast_dtype=torch.bfloat16,
        loggers=(), progress=False,
    )  # fmt: skip
    return lambda inputs, targets: trainer.step((inputs, targets))


def measure(before: str | None, kind: str, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the rows of the second table; runs in a world of one."""
    prepare(before)
    device = ls.init(device=kind, timeout=TIMEOUT).device
    build = {"resnet50": resnet50, "resnet18": resnet18}[options.network]
    rows = []
    for parts in options.microbatches:
        contenders: dict[str, Step] = {
            "plain PyTorch": make_loop(lambda model: model, build(), parts),
            "ls.Trainer": make_trainer(build(), parts),
            "torch's DistributedDataParallel": make_loop(DistributedDataParallel, build(), parts),
        }
        seconds = alternate(contenders, device, options)
        plain = statistics.median(seconds["plain PyTorch"])
        for name, found in seconds.items():
            low, median, high = statistics.quantiles(found, n=4)
            rows.append(
                (
                    str(parts),
                    name,
                    f"{median * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})",
                    f"{100 * (median / plain - 1):+.1f}%",
                )
            )
    ls.shutdown()
    return rows


def alternate(
    contenders: dict[str, Step], device: torch.device, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps, which alternate."""
    generator = torch.Generator().manual_seed(4)
    shape = options.batch, 3, options.image, options.image
    inputs = torch.randn(shape, generator=generator).to(device)
    targets = torch.randint(0, 1000, (options.batch,), generator=generator).to(device)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(WARM + options.rounds):
        for name, step in contenders.items():
            synchronize(device)
            begun = time.perf_counter()
            step(inputs, targets)
            synchronize(device)
            if number >= WARM:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def print_overhead(before: str | None, kind: str, options: argparse.Namespace) -> None:
    """Print the second table."""
    print(
        f"\n{options.network}, bfloat16, {options.batch} images of {options.image} pixels per step"
    )
    print("\n| micro-batches | contender | step: median (quartiles) | relative to plain |")
    print("|---|---|---|---|")
    (rows,) = ls.launch(measure, (before, kind, options), 1, timeout=10 * TIMEOUT)
    for row in rows:
        print(f"| {' | '.join(row)} |")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", choices=["resnet50", "resnet18"], default="resnet50")
    parser.add_argument("--batch", type=int, default=256, help="images per step (256)")
    parser.add_argument("--image", type=int, default=224, help="height and width (224 pixels)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8], help="(1 and 8)")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each contender (30)")
    parser.add_argument("--before", help="MODULE:FUNCTION to call in every process first")
    return parser.parse_args(arguments)


def main() -> int:
    """Print both tables; return 1 if digests differ."""
    options = parse()
    prepare(options.before)
    kind = find_accelerator()
    if kind is None:
        print(
            f"torch {torch.__version__} finds no accelerator here: run this on a machine with one, "
            "with a torch build for it"
        )
        return 2
    names = device_names()
    print(f"{len(names)} of {kind}: {', '.join(names)}; torch {torch.__version__}\n")
    are_equal = print_digests(options.before, kind, count_devices(kind))
    print_overhead(options.before, kind, options)
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
