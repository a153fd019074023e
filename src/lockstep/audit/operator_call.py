"""The calls of torch's operators in a step, as plain values.

`lockstep.audit.operator_tracer` records them; `lockstep.audit.operator_difference`
compares those of two runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.kernel.step_context import Phase

if TYPE_CHECKING:
    import torch

__all__ = ["KeptTensors", "OperatorCall"]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator.

    A view has no checksums, since it computes nothing; operators that read it are recorded with
    its values. Collective calls have none either, since their results come later.

    Attributes:
        operator: The operator and its overload, such as "aten.addmm" or "aten.add.Tensor";
            "data" for the data of a micro-batch.
        phase: The phase of the step.
        microbatch: The micro-batch that was being computed; None between them.
        unit: The dotted name of the innermost module that was being called (for the model itself,
            the name of its class). In backward, the module whose forward called the operator that
            is being differentiated. "" outside of modules.
        inputs: The checksums of the tensors that it read, in order; 0 for a tensor whose values do
            not matter: the input of a view.
        outputs: The checksums of the values that it returned, then of the other tensors that it
            wrote; 0 for values that are not known at that time. Returned numbers are included.
        arguments: The arguments that are not tensors, such as "dim=1, keepdim=True".
        generator: The checksums of the random generator's state before and after; (0, 0) for an
            operator that draws no random numbers.
        input_types: The dtype and shape of each input, such as "float32[4, 8]"; preceded by the
            name of a parameter or buffer, as in "fc.weight: float32[4, 8]".
        output_types: The dtype and shape of each output, in the same form.
        producers: For each input the index of the last call that wrote to its memory; -1 for
            none. Not compared by `==`.
        source: The line of the user's program, such as "train.py:31 in forward"; in
            backward the line of the operator that is being differentiated. "" if unknown.
        earlier: For each tensor that the call overwrote and that covers only a part of its memory,
            the index of the call that last wrote to that memory, if any. Not compared by `==`.
        is_opaque: Whether it may depend on values that are not recorded, such as the constants of a
            compiled graph. Not compared by `==`.
    """

    operator: str
    phase: Phase
    microbatch: int | None
    unit: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: str = ""
    generator: tuple[int, int] = (0, 0)
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    producers: tuple[int, ...] = field(default=(), compare=False)
    source: str = ""
    earlier: tuple[int, ...] = field(default=(), compare=False)
    is_opaque: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class KeptTensors:
    """Copies of the tensors of one call.

    Attributes:
        inputs: The tensors that it read, with their values before the call.
        outputs: The tensors that it returned, then the other tensors that it wrote.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
