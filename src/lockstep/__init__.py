"""Lockstep trains PyTorch models on many processes, with the same bits however many there are.

The public names, in reading order. They are imported when they are first used,
so that a command that needs no torch does not wait for it.
"""

from __future__ import annotations

import importlib

from lockstep.version import VERSION

TYPE_CHECKING = False  # without importing typing, which a command would wait for
if TYPE_CHECKING:
    from typing import Any

    from lockstep.audit.audit_config import AuditConfig as AuditConfig
    from lockstep.checkpoint.save_schedule import CheckpointConfig as CheckpointConfig
    from lockstep.checksum import digest as digest
    from lockstep.data.dataset_partition import partition as partition
    from lockstep.data_parallel.single_process import DataParallel as DataParallel
    from lockstep.kernel.errors import LockstepError as LockstepError
    from lockstep.launcher.launch import launch as launch
    from lockstep.launcher.world import init as init
    from lockstep.launcher.world import rank as rank
    from lockstep.launcher.world import shutdown as shutdown
    from lockstep.launcher.world import world_size as world_size
    from lockstep.model.forward import DatasetMetric as DatasetMetric
    from lockstep.model.forward import accuracy as accuracy
    from lockstep.model.target_weights import target_weight as target_weight
    from lockstep.pipeline.partitioner import PipelineConfig as PipelineConfig
    from lockstep.record import loggers as loggers
    from lockstep.tools.remote.driver import Driver as Driver
    from lockstep.training.optimizer_config import OptimizerConfig as OptimizerConfig
    from lockstep.training.script_loop.exact_setup import exact as exact
    from lockstep.training.trainer import Trainer as Trainer
    from lockstep.training.weights_file import load_weights as load_weights

# name -> the module that defines it; loggers is a module itself
PUBLIC = {
    "launch": "launcher.launch",
    "init": "launcher.world",
    "rank": "launcher.world",
    "world_size": "launcher.world",
    "shutdown": "launcher.world",
    "partition": "data.dataset_partition",
    "exact": "training.script_loop.exact_setup",
    "Trainer": "training.trainer",
    "OptimizerConfig": "training.optimizer_config",
    "PipelineConfig": "pipeline.partitioner",
    "CheckpointConfig": "checkpoint.save_schedule",
    "AuditConfig": "audit.audit_config",
    "loggers": "record.loggers",
    "DatasetMetric": "model.forward",
    "accuracy": "model.forward",
    "target_weight": "model.target_weights",
    "digest": "checksum",
    "DataParallel": "data_parallel.single_process",
    "Driver": "tools.remote.driver",
    "load_weights": "training.weights_file",
    "LockstepError": "kernel.errors",
}

__version__ = VERSION
__all__ = [*PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "errors":  # the module
        return importlib.import_module("lockstep.errors")
    if name == "DistributedDataParallel":
        raise AttributeError(
            "lockstep has no DistributedDataParallel: use torch.nn.parallel.DistributedDataParallel"
            ', which runs on the backend "lockstep", and lockstep.exact for the same bits on any '
            "number of ranks"
        )
    if name not in PUBLIC:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import random  # here, so that a command does not wait for it

    # Importing rich draws from Python's generator, which the script may have seeded.
    state = random.getstate()
    importlib.import_module("lockstep.launcher.tracebacks").install()
    module = importlib.import_module(f"lockstep.{PUBLIC[name]}")
    random.setstate(state)
    value = module if name == "loggers" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
