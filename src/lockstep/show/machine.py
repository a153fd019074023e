"""What a run ran on: the versions, the machine, and the variables that can change its result."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["environment", "processor", "variables"]

PREFIXES = (
    "LOCKSTEP_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "GLOO_", "NCCL_", "TORCH_", "PYTORCH_",
    "TORCHINDUCTOR_", "CUDA_", "CUBLAS_", "ATEN_", "DNNL_", "ONEDNN_", "PYTHONHASHSEED",
)  # fmt: skip
PLUMBING = ("LOCKSTEP_LAUNCHER", "LOCKSTEP_RUN", "LOCKSTEP_HOST", "LOCKSTEP_LOCAL_WORLD_SIZE")
SECRETS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY", "AUTH")


def environment() -> dict[str, Any]:
    """Return the `environment` of a record's first line. Imports torch."""
    import psutil
    import torch

    import lockstep

    return {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "hostname": os.uname().nodename,
        "gpus": gpus(),
        "variables": variables(os.environ),
    }


def processor() -> str:
    """Return the processor's model name, as its maker writes it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    if platform.system() == "Darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False)
        return answer.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[str]:
    """Return the names of the GPUs that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def variables(environ: Any) -> dict[str, str]:
    """Return the variables that can change a run's speed or bits; none that holds a secret."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES)
        and name not in PLUMBING  # the launcher's own: other for every run, and of no effect
        and not any(word in name for word in SECRETS)
    }
