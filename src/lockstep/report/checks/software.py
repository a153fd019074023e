"""Software: Python, torch, the compiler that builds the extension, GPUs, MPI."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.formatting import format_bytes
from lockstep.report.check_result import Finding, Question, bad, good, note

__all__ = ["compiler", "gpus", "mpi", "python", "torch_build"]

PYTHON = (3, 11)
TORCH = (2, 11)
PATIENCE = 30.0  # seconds a program may take to answer

TELL_RANK = """
import os
print("rank", os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
"""

PROGRAM = """
#include <atomic>
#include <memory>
int main() {
    auto value = std::make_unique<std::atomic<long>>(40);
    value->fetch_add(2);
    return value->load() == 42 ? 0 : 1;
}
"""


def python(question: Question) -> Iterator[Finding]:
    """Check Python's version and the platform."""
    version = platform.python_version()
    if sys.version_info < PYTHON:
        yield bad("python", version, "Lockstep needs Python 3.11 or later")
    else:
        yield good("python", f"{version} at {sys.executable}")
    if sys.platform == "linux":
        yield good("platform", platform.platform())
    else:
        yield note(
            "platform",
            platform.platform(),
            "Linux is what Lockstep is made for; here it works on gloo, without the extension",
        )


def torch_build(question: Question) -> Iterator[Finding]:
    """Check that torch is there, new enough, and can communicate."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield bad("torch", f"cannot be imported: {error}", "install torch 2.11 or later")
        return
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if version < TORCH:
        yield bad("torch", torch.__version__, "Lockstep needs torch 2.11 or later: upgrade it")
    elif not torch.distributed.is_available():
        yield bad("torch", "built without torch.distributed", "install a build that has it")
    else:
        yield good("torch", f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")


def compiler(question: Question) -> Iterator[Finding]:
    """Compile and run a small C++17 program."""
    advice = "only an extension's build needs it: install g++ or clang++ (or set CXX)"
    found = os.environ.get("CXX", "").split() or [shutil.which("c++") or shutil.which("g++") or ""]
    if not found[0] or not shutil.which(found[0]):
        yield note("compiler", f"no C++ compiler ({found[0] or 'c++, g++'} not found)", advice)
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(PROGRAM)
        program = str(Path(folder) / "try")
        answer = ask([*found, "-std=c++17", "-o", program, str(source)])
        answer = answer if isinstance(answer, str) else ask([program])
    if isinstance(answer, str):
        yield note("compiler", f"{found[0]} does not build a C++17 program: {answer}", advice)
        return
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        yield note("compiler", "works, but Python's headers are missing", "install python3-dev")
        return
    yield good("compiler", f"{found[0]} builds and runs C++17; Python's headers are there")


def gpus(question: Question) -> Iterator[Finding]:
    """Multiply on each GPU and compare with the CPU."""
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            yield note(
                "gpu",
                f"there is an NVIDIA driver, and this torch ({torch.__version__}) does not use it",
                "install a torch build for CUDA if you want to train on the GPU",
            )
        else:
            yield good("gpu", "none; training runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        yield gpu(index)
    if torch.distributed.is_nccl_available():
        yield good("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield bad("nccl", "this torch has no NCCL", "install a torch build with NCCL")


def gpu(index: int) -> Finding:
    """Multiply on one GPU and compare with the CPU."""
    import torch

    name = f"gpu {index}"
    try:
        matrix = torch.arange(4096.0).reshape(64, 64) % 7
        product = (matrix.to(f"cuda:{index}") @ matrix.to(f"cuda:{index}")).cpu()
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return bad(name, f"fails: {str(error).splitlines()[0]}", "check the driver with nvidia-smi")
    what = (
        f"{torch.cuda.get_device_name(index)}, {format_bytes(free)} of {format_bytes(total)} free"
    )
    if not torch.equal(product, matrix @ matrix):
        return bad(name, f"{what}: multiplies wrongly", "do not use this GPU; have it checked")
    return good(name, what)


def mpi(question: Question) -> Iterator[Finding]:
    """Start two processes with mpiexec, where it is there."""
    program = shutil.which("mpiexec")
    if program is None:
        extra = " (mpi4py is installed)" if importlib.util.find_spec("mpi4py") else ""
        yield good("mpi", f"no mpiexec{extra}; only programs that are started by it need it")
        return
    answer = ask([program, "-n", "2", sys.executable, "-c", TELL_RANK])
    if isinstance(answer, str):
        yield note(
            "mpi", f"{program} fails: {answer}", "as root, Open MPI wants OMPI_ALLOW_RUN_AS_ROOT=1"
        )
    elif sorted(answer.stdout.split("\n"))[-2:] == ["rank 0", "rank 1"]:
        yield good("mpi", f"{program} starts 2 ranks")
    else:
        yield note("mpi", f"{program} starts 2 processes that do not know their rank")


def ask(command: list[str]) -> subprocess.CompletedProcess[str] | str:
    """Run a program; return how it ended, or a phrase on why it failed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {PATIENCE:.0f} s"
    except OSError as error:
        return str(error.strerror)
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip(" -=")]
        return f"exit status {done.returncode}" + (f", {said[0].strip()}" if said else "")
    return done
