"""The environment of a run: versions, machine, and variables that can change its result.

Only the environment variables that are listed here are recorded, because a list of the secret
ones could not be complete.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from lockstep.portable.arithmetic_difference import name_differences
from lockstep.processor_core import count_usable_cores, processor_name
from lockstep.redaction import redact

__all__ = [
    "describe_environment",
    "describe_other_arithmetic",
    "find_environment_differences",
    "recorded_variables",
]

# All variables of these libraries configure computation, memory or communication.
PREFIXES = (
    "DNNL_", "GLOO_", "GOMP_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "ONEDNN_", "OPENBLAS_",
    "TORCH_NCCL_",
)  # fmt: skip
NAMES = {
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES",
    "DDP_DISABLE_COMM_MEM",
    "GLIBC_TUNABLES", "LD_PRELOAD",
    "LOCKSTEP_BACKEND", "LOCKSTEP_PORTABLE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_STEP_ID",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_DETERMINISTIC", "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE",
    "TORCH_CPP_LOG_LEVEL", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES",
}  # fmt: skip

# The variables that `lockstep run`, `ls.launch` and torchrun set for every rank, and the one that
# `ls.init` sets until the process ends, unless the user has set them.
OWN_VALUES = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
OWN_VALUES |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def describe_environment() -> dict[str, Any]:
    """Return the field `environment` of a record's first line. Imports torch.

    It holds only variables that the user has set. Those that Lockstep and torchrun set are left
    out, so that runs do not differ merely by their launcher.
    """
    import psutil
    import torch

    from lockstep.devices import device_names
    from lockstep.launcher.world import variables_set
    from lockstep.portable.arithmetic import has_portable_bits, measure_arithmetic
    from lockstep.version import VERSION

    own = variables_set()
    variables = recorded_variables(os.environ)
    return {
        "lockstep": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": measure_arithmetic(),
        "portable": has_portable_bits(),
        "cores": count_usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "hostname": os.uname().nodename,
        "gpus": device_names(),
        "variables": {
            name: value
            for name, value in variables.items()
            if name not in own and OWN_VALUES.get(name) != value
        },
    }


def find_environment_differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences of two environments that bits may depend on, as sentences.

    Args:
        recorded: The environment of a record or checkpoint.
        here: That of this process.
    """
    names = ["lockstep", "torch", "python", "processor", "instructions", "gpus"]
    sentence = describe_other_arithmetic(recorded, here)
    if sentence or (recorded.get("portable") and here.get("portable")):
        names = [name for name in names if name not in ("processor", "instructions")]
    return [f"{sentence}: the bits differ"] * bool(sentence) + [
        f"{name} is {here.get(name)}, it was {recorded[name]}: the bits may differ"
        for name in names
        if None not in (recorded.get(name), here.get(name)) and recorded[name] != here[name]
    ]


def describe_other_arithmetic(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return how the arithmetic of two environments differs; "" if it does not, as far as known."""
    before = recorded.get("arithmetic")
    now = here.get("arithmetic")
    if not isinstance(before, str) or not isinstance(now, str) or before == now:
        return ""
    kinds = [
        f"{environment.get('processor')} ({environment.get('instructions')})"
        for environment in (here, recorded)
    ]
    return f"{kinds[0]} computes {name_differences(before, now)} with other bits than {kinds[1]}"


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change the speed or the bits of a run, without secrets."""
    return {
        name: redact(value, name)
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) or name in NAMES
    }
