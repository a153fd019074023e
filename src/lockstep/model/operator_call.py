"""The calls of torch's operators in a step, as plain values.

`lockstep.model.operator_tracer` records them; `lockstep.replay.operator_difference` compares
those of two runs. This module needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lockstep.model.fingerprint import Checksums

if TYPE_CHECKING:
    import torch

__all__ = ["KeptTensors", "OperatorCall", "Phase"]

Phase = Literal["data", "forward", "backward", "reduction", "optimizer"]
"""What a step is doing: "reduction" is the summation of gradients and buffers, and clipping."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator.

    A view has no checksums: it computes nothing, and what reads it is recorded with its values.
    Neither has a collective call, whose results come later.

    Attributes:
        operator: The operator and its overload, such as "aten.addmm" or "aten.add.Tensor";
            "data" for the data of a micro-batch.
        phase: What the step was doing.
        microbatch: The micro-batch that was being computed; None between them.
        unit: The innermost module of the model that was being called, by its dotted name (of the
            model itself the name of its class). In backward, the module whose forward called
            the operator that is being differentiated. "" outside of modules.
        inputs: The checksums of the tensors that it read, in order; 0 for one whose values do not
            matter: the input of a view, and memory that nothing has been written to.
        outputs: The checksums of what it returned, then of what else it wrote; 0 for values
            that cannot be known at that time. A number that is returned has one, too.
        arguments: Those that are no tensors, such as "dim=1, keepdim=True".
        generator: Checksums of the random generator's state before and after; (0, 0) for an
            operator that draws no random numbers.
        input_types: The dtype and shape of each input: "float32[4, 8]", with its name in front
            if it is a parameter or buffer: "fc.weight: float32[4, 8]".
        output_types: The same of each output.
        producers: For each input the index of the call that wrote to its memory last; -1 for
            none. No part of equality.
        source: The line of the user's program, such as "train.py:31 in forward"; in
            backward that of the operator that is being differentiated. "" where unknown.
        earlier: For each tensor that it overwrote, and that is a part of its memory only, the
            index of the call that wrote to that memory before, if there is one. No part of
            equality.
    """

    operator: str
    phase: Phase
    microbatch: int | None
    unit: str
    inputs: Checksums
    outputs: Checksums
    arguments: str = ""
    generator: tuple[int, int] = (0, 0)
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    producers: tuple[int, ...] = field(default=(), compare=False)
    source: str = ""
    earlier: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class KeptTensors:
    """Copies of the tensors of one call.

    Attributes:
        inputs: What it read, as before the call.
        outputs: What it returned, and what else it wrote.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
