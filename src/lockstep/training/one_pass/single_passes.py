"""What single passes of a stage got and returned, in copies, to compare joint ones with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lockstep.data.microbatch import clone_tensors
from lockstep.pipeline.boundary import TensorMeta, describe_tensor
from lockstep.pipeline.joint_passes import GivenInput, OutputGradients
from lockstep.pipeline.stage import StageOutput

__all__ = ["SinglePass", "SinglePasses", "describe_gradient", "name_values"]


@dataclass
class SinglePass:
    """What is noted of a single pass, in copies.

    Attributes:
        given: What the stage got.
        outputs: Its outputs; empty in the last stage.
        metas: The layouts of the outputs.
        structure: Their structure, as text.
        gradients: The gradients of the outputs.
        made: Those of its inputs.
        made_metas: The layouts of these; None for one without a gradient.
    """

    given: GivenInput
    outputs: list[torch.Tensor] = field(default_factory=list)
    metas: list[TensorMeta] = field(default_factory=list)
    structure: str = ""
    gradients: OutputGradients = field(default_factory=OutputGradients)
    made: list[torch.Tensor | None] = field(default_factory=list)
    made_metas: list[TensorMeta | None] = field(default_factory=list)

    def has_layouts(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Return whether outputs have the layouts of those that are noted."""
        return [describe_tensor(tensor) for tensor in outputs] == self.metas


class SinglePasses:
    """The single passes of a step that are noted, by their micro-batches."""

    def __init__(self) -> None:
        self._passes: dict[int, SinglePass] = {}

    def open(self, given: GivenInput) -> None:
        """Note the input of a single pass."""
        self._passes[given.microbatch.index] = SinglePass(_copy_given(given))

    def find(self, index: int) -> SinglePass | None:
        """Return what is noted of a micro-batch; None: nothing is."""
        return self._passes.get(index)

    def __getitem__(self, index: int) -> SinglePass:
        """Return what is noted of a micro-batch."""
        return self._passes[index]

    def clear(self) -> None:
        """Forget all of them."""
        self._passes = {}

    def note_output(self, index: int, made: StageOutput) -> None:
        """Note the output of a single pass, unless it is a loss."""
        if (noted := self._passes.get(index)) is None:
            return
        noted.structure = repr(made.structure)
        noted.metas = [describe_tensor(tensor) for tensor in made.tensors]
        noted.outputs = [tensor.detach().clone() for tensor in made.tensors]

    def note_gradients(self, index: int, gradients: OutputGradients) -> None:
        """Note the gradients of the output of a single pass."""
        if (noted := self._passes.get(index)) is not None and gradients.tensors is not None:
            noted.gradients = replace(gradients, tensors=_copy_present(gradients.tensors))

    def note_input_gradients(self, index: int, made: Sequence[torch.Tensor | None]) -> None:
        """Note the gradients of the input of a single pass."""
        if (noted := self._passes.get(index)) is not None:
            noted.made = _copy_present(made)
            noted.made_metas = [*map(describe_gradient, made)]


def _copy_present(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return copies of the tensors that are not None."""
    return [None if tensor is None else _copy(tensor) for tensor in tensors]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, also of an expanded tensor and of one with gaps."""
    once = tensor.detach()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            once = once.narrow(dimension, 0, 1)
    copy = once.new_empty_strided(once.shape, once.stride()).copy_(once)
    return copy.expand(tensor.shape)


def _copy_given(given: GivenInput) -> GivenInput:
    """Return a copy of what a stage got, which blocks may write."""
    if given.message is not None:
        tensors = [_copy(tensor) for tensor in given.message.tensors]
        return replace(given, message=replace(given.message, tensors=tensors))
    assert given.first is not None
    return replace(given, first=replace(given.first, data=clone_tensors(given.first.data)))


def describe_gradient(gradient: torch.Tensor | None) -> TensorMeta | None:
    """Return the layout of a gradient; None: there is none."""
    return None if gradient is None else describe_tensor(gradient)


def name_values(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the results of a micro-batch by their names in messages."""
    return {
        **{f"output {number} of the stage": one for number, one in enumerate(outputs)},
        **{f"the gradient of input {number}": one for number, one in enumerate(gradients)},
        **{f"the metric {name!r}": value for name, value in metrics.items()},
    }
