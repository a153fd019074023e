"""The price of portable bits: products of matrices and steps of training in three settings.

    python -m benchmarks.portable_products [CASE ...]    without cases, writes the page of all:
        portable_products.md, or portable_products_avx2.md on a processor without AVX-512

`default` is torch as it starts. `compatible` sets the variables of portable mode only, so MKL
computes the products. `portable` also replaces them by Lockstep's. The settings must be made before
torch is loaded, so each has a process, and they take turns: a ratio belongs to a round. The time is
that of the processor, of one thread, so that other programs disturb it little.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

ROUNDS = 15  # rounds; seconds of a measurement, which repeats shorter calls
LEAST = 0.02
SETTINGS = ("default", "compatible", "portable")
VARIABLES = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
HERE = Path(__file__).parent

PRODUCTS = {
    "64": "64x64 64x64",
    "128": "128x128 128x128",
    "256": "256x256 256x256",
    "512": "512x512 512x512",
    "1024": "1024x1024 1024x1024",
    "512 bfloat16": "512x512 512x512 bfloat16",
    "512 float64": "512x512 512x512 float64",
    "linear, 32 samples": "32x2048 2048x2048t",
    "its weight gradient": "2048x32t 32x2048",
    "its input gradient": "32x2048 2048x2048",
    "linear, 8 samples": "8x1024 1024x1024t",
    "classifier": "128x512 512x10t",
    "products of 64 heads": "64x64x32 64x32x64t",
    "matrix times vector": "2048x2048 2048x1",
    "tiny": "4x8 8x4",
}
ATTENTION = {
    "attention, 17 tokens": (32, 4, 17, 16),
    "attention, 128 tokens": (8, 8, 128, 64),
    "causal attention, 1024 tokens": (2, 8, 1024, 64),
}
LSTM = {
    "LSTM, 4 sequences": (4, 50, 32, 128),
    "LSTM, 32 sequences": (32, 50, 32, 128),
}
VECTORS = ["exp", "log", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_backward"]
STEPS = ["25m", "transformer", "resnet18"]
CASES = [*PRODUCTS, *ATTENTION, *LSTM, *VECTORS, *STEPS]


PAGE = """# The price of portable bits

Processor time of one thread by default, in milliseconds, and the medians of the ratios to it. In
*compatible* mode the variables of portable mode are set, and MKL and oneDNN compute products and
convolutions. *Portable* mode also replaces these kernels by Lockstep's. A ratio below 1 is faster
than the default.

| case | default, ms | compatible | portable |
|---|---|---|---|
{rows}

Products are named by their sizes, or by their place in a training: a linear layer of 2048 x 2048
and its gradients for 32 samples, a classifier of 512 features for 128 samples, 64 heads of
attention. Attention is a forward and backward pass of `scaled_dot_product_attention`, an LSTM one
of two layers of 128 features for sequences of 50 steps. `exp` to `gelu_backward` are functions of
2^20 numbers.
The last three rows are the forward and backward pass of 32 samples: linear layers with 25 million
parameters, a transformer with 2.7 million, and ResNet-18 with images of 64 x 64.

{rounds} rounds, in which the settings take turns. Machine: {machine}, torch {torch}.
Command: `python -m benchmarks.portable_products`.
"""


def build_product(text: str) -> Callable[[], object]:
    """Return a call that computes a product, such as "32x64 10x64t" with a transposed operand."""
    import torch

    left, right, *dtype = text.split()
    operands = []
    for operand in (left, right):
        sizes = [int(size) for size in operand.rstrip("t").split("x")]
        if operand.endswith("t"):
            sizes[-2:] = sizes[:-3:-1]
        values = torch.randn(sizes).to(getattr(torch, dtype[0] if dtype else "float32"))
        operands.append(values.mT if operand.endswith("t") else values)
    return partial(torch.matmul, *operands)


def build_attention(
    samples: int, heads: int, tokens: int, size: int, *, is_causal: bool
) -> Callable[[], object]:
    """Return a call that computes the forward and backward pass of an attention."""
    import torch

    inputs = torch.randn(samples, tokens, 3, heads, size, requires_grad=True)
    gradient = torch.randn(samples, heads, tokens, size)

    def attend() -> None:
        inputs.grad = None
        query, key, value = inputs.permute(2, 0, 3, 1, 4)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal
        )
        output.backward(gradient)

    return attend


def build_lstm(samples: int, steps: int, size: int, hidden: int) -> Callable[[], object]:
    """Return a call that computes the forward and backward pass of an LSTM with two layers."""
    import torch

    model = torch.nn.LSTM(size, hidden, 2, batch_first=True)
    inputs = torch.randn(samples, steps, size, requires_grad=True)
    gradient = torch.randn(samples, steps, hidden)

    def step() -> None:
        model.zero_grad()
        inputs.grad = None
        model(inputs)[0].backward(gradient)

    return step


def build_step(name: str) -> Callable[[], object]:
    """Return a call that computes the forward and backward pass of a model."""
    import torch

    from benchmarks.step.networks import NETWORKS, Network, pictures
    from examples.resnet import resnet18

    networks = {
        **NETWORKS,
        "resnet18": Network("resnet18", "", partial(resnet18, classes=1000), pictures, 1000, 0.5),
    }
    network = networks[name]
    model = network.model()
    inputs, classes = network.batch(32, seed=0)

    def step() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), classes).backward()

    return step


def build(case: str) -> Callable[[], object]:
    """Return the call of a case."""
    import torch

    if case in PRODUCTS:
        return build_product(PRODUCTS[case])
    if case in ATTENTION:
        return build_attention(*ATTENTION[case], is_causal="causal" in case)
    if case in LSTM:
        return build_lstm(*LSTM[case])
    if case in STEPS:
        return build_step(case)
    numbers = torch.rand(1 << 20) + 0.5
    count = 2 if case.endswith("_backward") else 1
    return partial(getattr(torch.ops.aten, case), *[numbers] * count)


def measure(call: Callable[[], object]) -> float:
    """Return the processor time of a call, in seconds."""
    calls = 1
    while True:
        begun = time.process_time()
        for _ in range(calls):
            call()
        taken = time.process_time() - begun
        if taken >= LEAST:
            return taken / calls
        calls = calls * 2 if taken < LEAST / 4 else int(calls * LEAST / taken * 1.2) + 1


def work(setting: str) -> None:
    """Measure the cases whose names arrive, in this process."""
    import torch

    from lockstep.portable.products import use_portable_products

    torch.set_num_threads(1)
    if setting == "portable":
        use_portable_products()
    calls: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        case = line.rstrip("\n")
        if case not in calls:
            torch.manual_seed(0)
            calls = {case: build(case)}
            for _ in range(2):
                calls[case]()
        print(measure(calls[case]), flush=True)


def start(setting: str) -> subprocess.Popen[str]:
    """Start the process of a setting."""
    variables = {} if setting == "default" else VARIABLES
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "benchmarks.portable_products", "--work", setting]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def compare(cases: list[str]) -> list[str]:
    """Return the rows of the table."""
    rows = []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(start(name)) for name in SETTINGS}
        for case in cases:
            times: dict[str, list[float]] = {name: [] for name in SETTINGS}
            for _ in range(ROUNDS):
                for name, worker in workers.items():
                    assert worker.stdin is not None
                    assert worker.stdout is not None
                    print(case, file=worker.stdin, flush=True)
                    times[name].append(float(worker.stdout.readline()))
            ratios = []
            for name in SETTINGS[1:]:
                pairs = sorted(b / a for a, b in zip(times["default"], times[name], strict=True))
                ratios.append(statistics.median(pairs))
            default = statistics.median(times["default"]) * 1e3
            rows.append(f"| {case} | {default:.4g} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
            print(rows[-1], flush=True)
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
    return rows


def main() -> None:
    """Measure the cases of the command line, or write the page with all."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
        return
    cases = sys.argv[1:] or CASES
    if unknown := [case for case in cases if case not in CASES]:
        sys.exit(f"there is no case {unknown[0]!r}; the cases are: {', '.join(CASES)}")
    rows = compare(cases)
    if len(sys.argv) > 1:
        return
    import torch

    from lockstep.processor_core import processor_name

    capability = torch.backends.cpu.get_cpu_capability()
    page = PAGE.format(
        rows="\n".join(rows),
        rounds=ROUNDS,
        machine=f"{processor_name()} ({capability})",
        torch=torch.__version__,
    )
    name = "portable_products_avx2" if capability == "AVX2" else "portable_products"
    (HERE / f"{name}.md").write_text(page)


if __name__ == "__main__":
    main()
