"""Calls of autograd's engine without the checks of `torch.autograd.backward`.

These take as long as the backward pass of a tiny model. The trainer's loss is one scalar with a
gradient of the same shape and dtype, so they cannot fail.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

__all__ = ["run_backward"]

GRAPH_LOG = logging.getLogger("torch.autograd.graph")

_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
    """Do the same as `loss.backward(gradient, retain_graph=retain_graph)`.

    Args:
        loss: The tensor at which backward begins, on the CPU or another device.
        gradient: Its gradient, of the same shape and dtype; None for 1.
        retain_graph: Whether the graph can be used again.
    """
    is_usual = (
        gradient is not None
        and type(loss) is torch.Tensor
        and loss.is_cpu  # threads of other devices need the context variables of this one
        and not torch._C._is_torch_function_mode_enabled()
        and not GRAPH_LOG.isEnabledFor(logging.DEBUG)  # torch logs the nodes of the graph
    )
    if not is_usual:
        loss.backward(gradient, retain_graph=retain_graph)
        return
    _engine.run_backward(
        (loss,), (gradient,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )
