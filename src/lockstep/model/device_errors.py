"""Better errors for two of an accelerator: no deterministic implementation, a failed assertion.

torch's error about an operator names no module. An error in forward has it in its traceback. In
backward there is only the graph, whose nodes do not know their module: the parameters that the
node's inputs were computed from, and those of what follows it, tell between which modules it is.
"""

from __future__ import annotations

import re
from collections import deque
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lockstep.kernel.errors import UsageError

__all__ = ["explain_device_error"]

MESSAGE = re.compile(r"(\S+)(?: with \S+.*?)? does not have a deterministic implementation")
ENDINGS = re.compile(r"_(backward|out|cuda|gpu|kernel|template|forward)(?=_|$)")


def explain_device_error(
    error: BaseException, root: torch.Tensor | None, module: nn.Module, where: str
) -> UsageError | None:
    """Return a better error for torch's error; None for other errors.

    Args:
        error: The error.
        root: The tensor whose backward pass has failed; None if another part has.
        module: The model.
        where: The rank, step and micro-batch.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "device-side assert" in text:
        return UsageError(
            f"{where}, or earlier: an index is out of range on the device, such as a label that is "
            "no class or a word that has no embedding; run again with CUDA_LAUNCH_BLOCKING=1, and "
            "the traceback shows the call"
        )
    match = MESSAGE.search(text)
    if match is None:
        return None
    if root is None:
        place = _find_in_traceback(error.__traceback__, module)
    else:
        place = _find_in_graph(match[1], root, module)
    return UsageError(
        f"{where}: the operator {match[1]} has no deterministic implementation on this device, so "
        f"its results differ from call to call{place}: replace it by one that has "
        "(torch.use_deterministic_algorithms lists them), or train on the CPU"
    )


def _find_in_traceback(traceback: TracebackType | None, module: nn.Module) -> str:
    """Return where the innermost module of a traceback is; "" if there is none."""
    names, place = {id(part): name for name, part in module.named_modules()}, ""
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (name := names.get(id(owner))):
            place = f"; {name} ({type(owner).__name__}) calls it"
        traceback = traceback.tb_next
    return place


def _find_in_graph(operator: str, root: torch.Tensor, module: nn.Module) -> str:
    """Return between which modules the operator's node is; "" if there is no such node."""
    wanted = ENDINGS.sub("", ENDINGS.sub("", operator)).replace("_", "").lower()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    after = ""  # the last parameter before the node, seen from the loss
    nodes, seen = deque([root.grad_fn]), set[Any]()
    while nodes:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().lower().startswith(wanted):
            before = _first_parameter(node, names)
            if before and after:
                return f"; a module between {before} and {after} calls it"
            if before or after:
                return f"; a module {'after' if before else 'before'} {before or after} calls it"
            return ""
        after = names.get(id(getattr(node, "variable", None)), after)
        nodes.extend(following for following, _ in node.next_functions)
    return ""


def _first_parameter(node: Any, names: dict[int, str]) -> str:
    """Return the name of the nearest parameter that a node's inputs were computed from."""
    nodes, seen = deque([node]), set[Any]()
    while nodes:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if name := names.get(id(getattr(node, "variable", None))):
            return name
        nodes.extend(following for following, _ in node.next_functions)
    return ""
