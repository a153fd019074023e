"""The inputs of a stage, its forward and the gradients of its outputs, of several micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.data.microbatch import join_samples
from lockstep.pipeline.aliasing import SentTensors
from lockstep.pipeline.boundary import unflatten
from lockstep.pipeline.joint_passes import GivenInput, JointOutputs
from lockstep.pipeline.split_backward import GraphInput
from lockstep.training.one_pass.pass_attempt import join_rows

__all__ = ["StageForward", "join_inputs"]


@dataclass
class StageForward:
    """The forward of several micro-batches, whose backward is to come.

    Attributes:
        outputs: The outputs that have gradients.
        gradients: Those from the losses; None before the last stage.
        sent: The outputs, which nobody may write.
        made: The results for each micro-batch.
        structure: The structure of the outputs, as text.
        graph_input: The input of the graph; None in the first stage.
        buffers: The buffers of the pass, once it is paused.
        assigned: What the blocks have assigned.
    """

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor] | None
    sent: SentTensors
    made: JointOutputs
    structure: str = ""
    graph_input: GraphInput | None = None
    buffers: Any = None
    assigned: Any = None


def join_inputs(given: Sequence[GivenInput]) -> tuple[Any, GraphInput | None]:
    """Return the inputs of micro-batches as those of one, in new memory, and its graph input."""
    if given[0].message is None:
        inputs = [one.first.data for one in given if one.first is not None]
        if isinstance(inputs[0], list):
            return [join_samples(*column) for column in zip(*inputs, strict=True)], None
        return join_samples(*inputs), None
    messages = [one.message for one in given if one.message is not None]
    columns = zip(*(message.tensors for message in messages), strict=True)
    joined = [join_rows(column) for column in columns]
    graph_input = GraphInput(joined, [meta.requires_grad for meta in messages[0].metas])
    return unflatten(messages[0].structure, graph_input.tensors), graph_input
