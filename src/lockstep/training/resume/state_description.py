"""Descriptions of a state, by which a change is found without a copy of it.

Torch counts the writes to each tensor, so that no tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch

from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.save_schedule import Stateful
from lockstep.kernel.errors import UsageError
from lockstep.model.generator_states import global_states
from lockstep.sharded_tensors import read_version
from lockstep.training.services import Services
from lockstep.training.state import TrainingState

__all__ = ["describe_all", "describe_objects"]


def describe_objects(state: TrainingState, objects: Iterable[Stateful]) -> str:
    """Return a text that changes if the script changes an object or the model.

    Args:
        state: The state of the training.
        objects: The registered objects.

    Returns:
        The text; "" if the state of an object has none.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        plain = [encode(watched.state_dict(), tensors, "") for watched in objects]
    except UsageError:
        return ""
    versions = [(tensor.data_ptr(), tensor._version) for tensor in tensors.values()]
    return json.dumps([plain, versions, state.describe_changes()])


def describe_all(state: TrainingState, stateful: Mapping[str, Stateful]) -> str:
    """Return a text that changes if the script changes what a checkpoint contains; "" without one.

    Args:
        state: The state of the training.
        stateful: The registered objects, by name.
    """
    engines = [one.engine for one in stateful.values() if isinstance(one, Services)]
    for engine in engines:
        engine.settle()  # a step of a loop is counted at its next call
    states = [state, *(engine.state for engine in engines)]
    objects = [one for one in stateful.values() if not isinstance(one, Services)]
    described = [describe_objects(training, objects) for training in states]
    buffers = [read_version(buffer) for training in states for buffer in training.module.buffers()]
    others = [
        [training.position.steps, training.optimization.scheduler_state()] for training in states
    ]
    generators = {
        name: value.tolist() if isinstance(value, torch.Tensor) else repr(value)
        for name, value in global_states(state.parallel.device).items()
    }
    return repr([described, buffers, others, generators]) if all(described) else ""
