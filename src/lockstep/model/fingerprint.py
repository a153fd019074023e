"""Fingerprints of training steps: checksums of everything a step computes, as plain values.

`lockstep.model.fingerprinter` computes them on each rank while a script runs under
`lockstep check` or `lockstep replay`. `lockstep.tools.check.difference` compares those of two
layouts.
This module does not import torch, so that commands can read fingerprints quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Checksums", "ModuleCall", "StepFingerprint", "TrainerFingerprint"]

Checksums = tuple[int, ...]
"""The checksums of all tensors of a nested value, in order."""

ModuleCall = tuple[str, str, Checksums]
"""("enter", module, inputs) or ("leave", module, outputs)."""


@dataclass
class StepFingerprint:
    """The checksums of one rank's computations in one step of one trainer.

    Attributes:
        trainer: The trainer's number in the order of construction, from 0.
        step: The number of the step, from 0.
        before: Each parameter and buffer before the step.
        data: The data of each micro-batch on this rank.
        calls: The module calls of each (micro-batch, stage), in the order of execution.
        backward: The gradients of module outputs of each micro-batch, by module, the number of its
            call and the number of the tensor in its output; empty if they are not recorded.
        leaf_gradients: The gradient of each parameter in each micro-batch; empty if they are not
            recorded.
        leaf_buffers: Each buffer after each micro-batch; empty if they are not recorded.
        losses: The loss of each micro-batch, in `float.hex` form.
        gradients: The reduced gradient of each parameter before clipping; 0 for none.
        state: Each parameter and buffer after the step.
        optimizer: Each entry of the optimizer's state after the step, by names such as
            "weight/exp_avg".
        loss: The loss of the whole batch, in `float.hex` form.
        digest: `trainer.digest()` after the step; "" if it is not recorded.
    """

    trainer: int
    step: int
    before: dict[str, int] = field(default_factory=dict)
    data: dict[int, Checksums] = field(default_factory=dict)
    calls: dict[tuple[int, int], list[ModuleCall]] = field(default_factory=dict)
    backward: dict[int, dict[tuple[str, int, int], int]] = field(default_factory=dict)
    leaf_gradients: dict[int, dict[str, int]] = field(default_factory=dict)
    leaf_buffers: dict[int, dict[str, int]] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    optimizer: dict[str, int] = field(default_factory=dict)
    loss: str = ""
    digest: str = ""


@dataclass(frozen=True)
class TrainerFingerprint:
    """A trainer on one rank before its first step.

    Attributes:
        model: The name of the model's class.
        backend: The backend of the ranks.
        parameters: The names of all parameters, in the model's order.
        initial: Each parameter and buffer that this rank holds.
    """

    model: str
    backend: str
    parameters: tuple[str, ...]
    initial: dict[str, int]
