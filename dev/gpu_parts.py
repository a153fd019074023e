"""The parts of `dev/gpu_check.py`: each yields results as (what, result, whether it is good)."""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from dev.gpu_operators import OPERATORS, try_operator
from dev.gpu_training import call_before, words_network
from examples.resnet import resnet18
from lockstep.comm.bucket import plan
from lockstep.comm.device_ipc import shares_device
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.reproducible_all_reduce import reproducible_all_reduce
from lockstep.devices import device_names, find_accelerator, synchronize
from lockstep.kernel.errors import LockstepError
from lockstep.kernel.tree import total

__all__ = ["run"]

Rows = Iterator[tuple[str, str, bool | None]]

TOOLS = Path(__file__).parent
TIMEOUT = 90.0  # seconds for a command or for ranks of one part
CASES = (
    "digits,digits in bfloat16,digits in float16,resnet18,resnet18 in bfloat16,"
    "words,words in bfloat16"
)


class Check:
    """The state that the parts share.

    Args:
        before: "MODULE:FUNCTION" to call in every process first.
        wheels: The folder of wheels to install.

    Attributes:
        kind: The type of the accelerator.
        folder: A temporary folder for runs and files.
    """

    def __init__(self, before: str | None, wheels: str | None, folder: Path) -> None:
        self.before = before
        self.wheels = wheels
        self.folder = folder
        # Ranks import `examples`, from another folder than this.
        paths = [str(TOOLS.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        absolute = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        self.variables = {**os.environ, "PYTHONPATH": absolute}
        call_before(before)
        self.kind = find_accelerator() or "cpu"
        # Several ranks on one device: NCCL refuses them. The simulated backend does not.
        self.shared = ["--device", f"{self.kind}:0"]
        self.backend = "gloo" if self.kind == "cuda" else None
        if self.backend:
            self.shared += ["--backend", self.backend]

    def command(self, *arguments: str, limit: float = TIMEOUT) -> tuple[int, str]:
        """Run a command of Lockstep; return its status and its output."""
        try:
            result = subprocess.run(
                [sys.executable, "-m", "lockstep", *arguments],
                cwd=self.folder, env=self.variables, capture_output=True, text=True,
                timeout=limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, f"not finished after {limit:.0f} s"
        return result.returncode, result.stdout + result.stderr

    def training(self, *options: str) -> list[str]:
        """Return the arguments that run `gpu_training.py` with these options."""
        before = ["--before", self.before] if self.before else []
        return [str(TOOLS / "gpu_training.py"), *before, *self.shared, *options]

    def launch(self, function: Callable[..., Any], *arguments: Any, ranks: int = 1) -> list[Any]:
        """Return what a function returns on each rank."""
        return ls.launch(_call, (self.before, function, arguments), ranks, timeout=TIMEOUT)


def _call(before: str | None, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function on a rank."""
    call_before(before)
    return function(*arguments)


def _read_digests(output: str) -> dict[str, str]:
    """Return the digests of the cases in an output."""
    return dict(re.findall(r"digest ([^:]+): (\w+ \w+)", output))


def _last_line(output: str) -> str:
    """Return the line that says why a command failed."""
    lines = [line for line in output.splitlines() if line.strip()]
    reasons = [line for line in lines if "lockstep:" in line or "Error" in line]
    return (reasons or lines or ["no output"])[-1].strip()[:300]


def check_install(check: Check) -> Rows:
    """Install missing packages from wheels, and say what this machine is."""
    if check.wheels:
        files = sorted(str(path) for path in Path(check.wheels).glob("*.whl"))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *files]
        result = subprocess.run(pip, capture_output=True, text=True, check=False)
        yield "wheels", result.stderr.strip() or f"{len(files)} installed", not result.returncode
    needed = ("orjson", "cloudpickle", "psutil", "xxhash", "safetensors", "click", "rich", "jinja2")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    yield "packages", f"missing: {', '.join(missing)}" if missing else "all there", not missing
    yield "python, torch", f"{sys.version.split()[0]}, {torch.__version__}", None
    yield "devices", f"{check.kind}: {', '.join(device_names()) or 'none'}", check.kind != "cpu"
    yield "processors", f"{os.cpu_count()}, {torch.backends.cpu.get_cpu_capability()}", None


def check_extension(check: Check) -> Rows:
    """Compile the native module for this torch."""
    begun = time.monotonic()
    status, output = check.command("build", limit=180)
    yield f"lockstep build, {time.monotonic() - begun:.0f} s", _last_line(output), status == 0


def check_device(check: Check) -> Rows:
    """Say which device and backend `ls.init` chooses, and what the doctor says."""
    for device in (None, f"{check.kind}:0", "cpu"):
        chosen, backend, workspace = check.launch(describe_world, device)[0]
        yield f"init(device={device!r})", f"{chosen}, {backend}", chosen.startswith(device or "")
        is_set = bool(workspace) == (check.kind == "cuda" and device != "cpu")
        yield f"CUBLAS_WORKSPACE_CONFIG, device {device}", str(workspace), is_set
    status, output = check.command("doctor")
    for line in output.partition("To report a problem")[0].splitlines():
        if line.startswith("bad"):
            yield "doctor", line, False
    yield "doctor", f"exit status {status}", status == 0


def describe_world(device: str | None) -> tuple[str, str, str | None]:
    """Return the device, the backend and the workspaces of cuBLAS after `init`."""
    world = ls.init(device=device, timeout=TIMEOUT)
    described = str(world.device), world.backend, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    ls.shutdown()
    return described


def check_own_backend(check: Check) -> Rows:
    """Call collectives of the device's own backend on one rank, and train with DDP."""
    backend, total, digest = check.launch(use_own_backend)[0]
    yield f"all_reduce over {backend}", str(total), total == 4.0
    yield "torch's DDP, 3 steps", digest[:12], bool(digest)


def use_own_backend() -> tuple[str, float, str]:
    """Return the backend, a sum over one rank, and the digest of a model trained with DDP."""
    world = ls.init(timeout=TIMEOUT)
    value = torch.full((4,), 1.0, device=world.device)
    torch.distributed.all_reduce(value)
    torch.distributed.broadcast(value, 0)
    torch.manual_seed(1)
    network = nn.Linear(8, 4).to(world.device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(5, 8, device=world.device)).square().mean().backward()
        optimizer.step()
    results = world.backend, value.sum().item(), ls.digest(network)
    ls.shutdown()
    return results


def check_layouts(check: Check) -> Rows:
    """Train the cases on 1, 2 and 4 ranks and in stages on one device."""
    expected: dict[str, str] = {}
    layouts = {
        "1 rank": ("1", "1"), "2 ranks": ("2", "1"), "4 ranks": ("4", "1"),
        "2 stages": ("2", "2"), "2 replicas of 2 stages": ("4", "2"),
    }  # fmt: skip
    for layout, (ranks, stages) in layouts.items():
        arguments = check.training("--cases", CASES, "--stages", stages)
        begun = time.monotonic()
        status, output = check.command("run", "-n", ranks, *arguments)
        seconds = time.monotonic() - begun
        digests = _read_digests(output)
        expected = expected or digests
        if status:
            yield layout, _last_line(output), False
        for case, digest in digests.items():
            yield f"{layout}: {case}", digest, digest == expected.get(case)
        yield layout, f"{seconds:.0f} s", len(digests) == len(CASES.split(",")) or None
    _, output = check.command("run", "-n", "1", *check.training("--cases", CASES))
    again = _read_digests(output)
    yield "1 rank again", f"{len(again)} digests", bool(again) and again == expected


def check_resume(check: Check) -> Rows:
    """End a run in the middle, and continue it on another number of ranks."""
    options = ["--cases", "digits", "--steps", "6"]
    _, output = check.command("run", "-n", "1", *check.training(*options))
    expected = _read_digests(output)
    killed = str(check.folder / "killed")
    arguments = check.training(*options, "--checkpoint", "--kill", killed)
    status, output = check.command("run", "-n", "2", "--name", "killed", *arguments)
    yield "2 ranks, one is killed", _last_line(output), status != 0 and "SIGKILL" in output
    for ranks in ("1", "4"):
        status, output = check.command("run", "--resume", "killed", "-n", ranks, *arguments)
        digests = _read_digests(output)
        is_equal = bool(digests) and digests == expected
        yield f"resumed on {ranks}", digests.get("digits") or _last_line(output), is_equal


def check_commands(check: Check) -> Rows:
    """Call the commands that compute a program or a step again."""
    status, output = check.command("check", "--ranks", "1,2", *check.training(), limit=110)
    yield "lockstep check", _last_line(output), status == 0
    for name, *options in (("one",), ("other", "--activation", "Tanh")):
        arguments = check.training(*options)
        status, output = check.command("run", "-n", "1", "--name", name, *arguments)
        if status:
            yield "lockstep run", _last_line(output), False
    status, output = check.command("replay", "one", "--step", "2")
    yield "lockstep replay", _last_line(output), status == 0
    status, output = check.command("bisect", "one", "other")
    operators = ", ".join(sorted(set(re.findall(r"aten[.:]+\w+", output))))
    yield "lockstep bisect", operators or _last_line(output), status == 1


def check_elastic(check: Check) -> Rows:
    """Kill a rank of an elastic run, which continues with the bits of an undisturbed one."""
    options = ["--cases", "digits", "--steps", "6"]
    _, output = check.command("run", "-n", "1", *check.training(*options))
    expected = _read_digests(output)
    arguments = check.training(*options, "--kill", str(check.folder / "killed"))
    _, output = check.command("run", "--min", "1", "--max", "2", *arguments)
    digests = _read_digests(output)
    is_equal = bool(digests) and digests == expected
    yield "a rank is killed", digests.get("digits") or _last_line(output), is_equal
    yield "the rank was lost", "yes" if "SIGKILL" in output else "no", "SIGKILL" in output


def check_compiled(check: Check) -> Rows:
    """Train compiled blocks."""
    if check.before:
        yield "compiled blocks", "no compiler for the simulated accelerator", None
        return
    digests = []
    for ranks, stages in (("1", "1"), ("2", "1"), ("2", "2")):
        arguments = check.training("--cases", "compiled", "--stages", stages)
        _, output = check.command("run", "-n", ranks, *arguments)
        digests.append(_read_digests(output).get("compiled", _last_line(output)))
        what = f"{ranks} ranks, {stages} stages"
        yield what, digests[-1], digests[-1] == digests[0] and len(digests[-1]) == 25


def check_one_process(check: Check) -> Rows:
    """Train with `ls.DataParallel` on one device that is used twice."""
    digests = [train_in_one_process([f"{check.kind}:0"] * count) for count in (1, 2)]
    yield "one device, used once and twice", digests[1][:12], digests[0] == digests[1]


def train_in_one_process(devices: list[str]) -> str:
    """Return the digest of a network after three steps."""
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)).to(devices[0])
    parallel = ls.DataParallel(network, devices, microbatches=4)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(16, 8, generator=generator).to(devices[0])
        parallel(inputs).square().mean().backward()
        optimizer.step()
    return ls.digest(network)


def check_errors(check: Check) -> Rows:
    """Make mistakes that a GPU punishes; each must be one sentence that names the place."""
    if check.before:
        yield "errors of the device", "not simulated", None
        return
    for name, word in MISTAKES.items():
        try:
            check.launch(make_mistake, name)
            yield name, "no error", False
        except LockstepError as error:
            text = " ".join(str(error).split())
            yield name, text[:400], word in text


def check_own_loop(check: Check) -> Rows:
    """Train with torch's DDP and `ls.exact`, in a loop without a trainer."""
    digests = []
    for ranks in (1, 2, 4):
        arguments = f"{check.kind}:0", check.backend
        digests.append(check.launch(train_own_loop, *arguments, ranks=ranks)[0])
        yield f"{ranks} ranks", digests[-1][:12], digests[-1] == digests[0]


def train_own_loop(device: str, backend: str | None) -> str:
    """Return the digest of a network after an epoch in float16 with a gradient scaler."""
    place = ls.init(device=device, backend=backend, timeout=TIMEOUT).device
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
    ).to(place)
    model = DistributedDataParallel(network)
    exact = ls.exact(model, microbatches=8)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(place.type, init_scale=256.0)
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(208, 20, generator=generator), torch.randint(10, (208,), generator=generator)
    )
    loader = torch.utils.data.DataLoader(data, batch_sampler=exact.sampler(data, batch_size=64))
    for inputs, targets in exact.microbatches(loader):
        with torch.autocast(place.type, torch.float16):
            loss = F.cross_entropy(model(inputs.to(place)), targets.to(place))
        scaler.scale(exact.weigh(loss)).backward()
        if exact.is_complete:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    digest = ls.digest(network)
    ls.shutdown()
    return digest


def check_sums(check: Check) -> Rows:
    """Add along the tree on one device: in its memory that the ranks share, and over the CPU."""
    for ranks in (2, 4):
        for dtype in (torch.float32, torch.bfloat16):
            for row in check.launch(
                add_on_device, f"{check.kind}:0", check.backend, dtype, ranks=ranks
            )[0]:
                yield f"{ranks} ranks, {dtype}: {row[0]}", row[1], row[2]


def add_on_device(
    device: str, backend: str | None, dtype: torch.dtype
) -> list[tuple[str, str, bool]]:
    """Return the rows for one number of ranks: is the sum right, how long does it take."""
    world = ls.init(device=device, backend=backend, timeout=TIMEOUT)
    is_shared = shares_device(world.device, None)
    ranks = ls.world_size()
    leaves = 2 * ranks
    rows = [("memory is shared", str(is_shared), is_shared)]
    for numel in (3, 100_001, 8 << 20):
        generator = torch.Generator().manual_seed(numel)
        values = [torch.randn(numel, generator=generator).to(dtype) for _ in range(leaves)]
        on_device = [value.to(world.device) for value in values]
        expected = total(
            {(leaf, leaf + 1): on_device[leaf] for leaf in range(leaves)}, leaves, torch.add
        )
        (bucket,) = plan([numel], [dtype], 1 << 30)
        nodes = [[(2 * rank, 2 * rank + 2)] for rank in range(ranks)]
        for name, in_memory in (("shared", True), ("over the CPU", False)):
            if in_memory and not is_shared:
                continue
            reduction = make_all_reduce(
                bucket, nodes, leaves, world.device, is_device_shared=in_memory
            )
            seconds = []
            is_right = True
            for _ in range(6):
                mine = on_device[2 * world.rank] + on_device[2 * world.rank + 1]
                synchronize(world.device)
                torch.distributed.barrier()
                begun = time.perf_counter()
                ((_, result),) = reproducible_all_reduce(
                    [reduction], {(2 * world.rank, 2 * world.rank + 2): [mine]}
                )
                synchronize(world.device)
                seconds.append(time.perf_counter() - begun)
                is_right &= result is not None and torch.equal(result, expected)
            text = f"{statistics.median(seconds) * 1e3:.2f} ms"
            rows.append((f"{numel:,} elements, {name}", text, is_right))
    ls.shutdown()
    return rows


class Resize(nn.Module):
    """Resizes images with an operator whose backward is not deterministic on CUDA."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [n, 1, 28, 28] to [n, 784]."""
        wide = F.interpolate(images, size=(40, 40), mode="bicubic", align_corners=False)
        return F.adaptive_avg_pool2d(wide, (28, 28)).flatten(1)


class Hungry(nn.Module):
    """Allocates more memory than any device has."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Raise an out-of-memory error."""
        return inputs + torch.empty(1 << 48, dtype=torch.uint8, device=inputs.device).sum()


MISTAKES = {
    "an operator that is not deterministic": "deterministic",
    "a label outside of the classes": "CUDA_LAUNCH_BLOCKING",
    "out of memory": "out of memory",
    "cudnn.benchmark": "benchmark",
    "inputs on the CPU": "FloatTensor",
}
"""The mistakes, and a word of the error."""


def make_mistake(name: str) -> None:
    """Train one step with a mistake."""
    device = ls.init(timeout=TIMEOUT).device
    layers: list[nn.Module] = [nn.Conv2d(1, 1, 3, padding=1), nn.Flatten(), nn.Linear(784, 10)]
    if name == "an operator that is not deterministic":
        layers[1] = Resize()
    elif name == "out of memory":
        layers.insert(1, Hungry())
    trainer = ls.Trainer(
        nn.Sequential(*layers), nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, 0.1),
        progress=False, loggers=(),
    )  # fmt: skip
    targets = torch.zeros(16, dtype=torch.long)
    if name == "a label outside of the classes":
        targets[5] = 11
    if name == "cudnn.benchmark":
        torch.backends.cudnn.benchmark = True
    if name == "inputs on the CPU":
        with trainer.manual_step() as step:
            for inputs, labels in step.microbatches((torch.zeros(16, 1, 28, 28), targets)):
                step.backward(F.cross_entropy(trainer.module(inputs.cpu()), labels))
        return
    trainer.step((torch.zeros(16, 1, 28, 28), targets))
    synchronize(device)


def check_operators(check: Check) -> Rows:
    """Find the operators whose bits differ between calls, and those that torch refuses."""
    device = torch.device(check.kind, 0)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, call in OPERATORS.items():
        outcomes = [try_operator(call, device, is_strict) for is_strict in (True, False)]
        yield (
            f"{name}",
            f"deterministic mode: {outcomes[0]}; otherwise: {outcomes[1]}",
            (None if outcomes[0] != "different bits" else False),
        )


def check_speed(check: Check) -> Rows:
    """Measure the trainer beside plain PyTorch and DDP, in time and memory of the device."""
    sizes = {"resnet18": (16, 32), "words": (8, 16)} if check.before else SIZES
    for network, (batch, size) in sizes.items():
        for row in check.launch(measure, network, batch, size, 2 if check.before else 12)[0]:
            yield row[0], row[1], None


SIZES = {"resnet18": (128, 224), "words": (64, 256)}
"""Networks, with the samples of a batch, and pixels or words of a sample."""

Step = Callable[[torch.Tensor, torch.Tensor], object]


def measure(network: str, batch: int, size: int, rounds: int) -> list[tuple[str, str]]:
    """Return the rows for a network: times of the contenders, which alternate."""
    device = ls.init(timeout=TIMEOUT).device

    def build() -> nn.Module:
        torch.manual_seed(1)
        if network == "resnet18":
            return resnet18(classes=10)
        return words_network(width=256, layers=4, length=size)

    generator = torch.Generator().manual_seed(4)
    inputs = (
        torch.randn(batch, 3, size, size, generator=generator)
        if network == "resnet18"
        else torch.randint(100, (batch, size), generator=generator)
    ).to(device)
    targets = torch.randint(10, (batch,), generator=generator).to(device)
    rows = []
    for parts in (1, 8):
        contenders: dict[str, Step] = {
            "plain PyTorch": make_loop(build(), parts, device),
            "torch's DDP": make_loop(build(), parts, device, is_wrapped=True),
            "ls.Trainer": make_trainer(build(), parts),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        peaks = dict.fromkeys(contenders, 0)
        for number in range(2 + rounds):
            for name, step in contenders.items():
                synchronize(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                begun = time.perf_counter()
                step(inputs, targets)
                synchronize(device)
                if number >= 2:
                    seconds[name].append(time.perf_counter() - begun)
                    if device.type == "cuda":
                        peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
        plain = statistics.median(seconds["plain PyTorch"])
        for name, times in seconds.items():
            low, middle, high = statistics.quantiles(times, n=4)
            what = f"{network}, bfloat16, {batch} x {size}, {parts} micro-batches: {name}"
            kernels = _count_kernels(contenders[name], inputs, targets, device)
            rows.append(
                (
                    what,
                    f"{middle * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}), "
                    f"{middle / plain:.2f} of plain, peak {peaks[name] / 1e6:,.0f} MB{kernels}",
                )
            )
    ls.shutdown()
    return rows


def _count_kernels(
    step: Step, inputs: torch.Tensor, targets: torch.Tensor, device: torch.device
) -> str:
    """Return the number of kernels of a step, their time, and the waits of the process."""
    if device.type != "cuda":
        return ""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step(inputs, targets)
        synchronize(device)
    events = profile.events() or []
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    waits = sum(event.name in WAITS for event in events)
    busy = sum(event.device_time for event in kernels) / 1e3
    return f", {len(kernels):,} kernels take {busy:.1f} ms, {waits} waits"


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def make_loop(
    network: nn.Module, parts: int, device: torch.device, *, is_wrapped: bool = False
) -> Step:
    """Return a step of an ordinary loop, which accumulates the gradients of micro-batches."""
    network.to(device)
    model = DistributedDataParallel(network) if is_wrapped else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for one, other in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(model(one), other) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total.item()

    return step


def make_trainer(network: nn.Module, parts: int) -> Step:
    """Return a step of the trainer."""
    trainer = ls.Trainer(
        network, nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        microbatches=parts, autocast_dtype=torch.bfloat16, loggers=(), progress=False,
    )  # fmt: skip
    return lambda inputs, targets: trainer.step((inputs, targets))


PARTS: dict[str, Callable[[Check], Rows]] = {
    "install": check_install,
    "extension": check_extension,
    "device": check_device,
    "own backend": check_own_backend,
    "layouts": check_layouts,
    "resume": check_resume,
    "commands": check_commands,
    "elastic": check_elastic,
    "compiled": check_compiled,
    "one process": check_one_process,
    "errors": check_errors,
    "own loop": check_own_loop,
    "sums": check_sums,
    "operators": check_operators,
    "speed": check_speed,
}


def run(part: str, before: str | None, wheels: str | None) -> Rows:
    """Yield the results of a part."""
    with tempfile.TemporaryDirectory() as folder:
        yield from PARTS[part](Check(before, wheels, Path(folder)))
