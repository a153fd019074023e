"""The rejection of modules that cannot be trained, or not with the same bits in every layout.

wrapped        DistributedDataParallel and similar wrappers average gradients a second time, over
               ranks that may compute different numbers of micro-batches
TorchScript    modules take no other buffers during a step, unlike functions that forward calls
max_norm       a lookup writes to its weight, which only the optimizer may change
observers      the range of a fake quantization depends on the order of the micro-batches
lazy           parameters have no shape until the first batch
sparse,        tensors are not plain elements in memory that ranks could compare, average and save
quantized,
wrappers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep.compiled_wrapper import unwrap
from lockstep.data_parallel.single_process import DataParallel
from lockstep.kernel.buffer_rules import ATTRIBUTE, RULES, describe_buffer_rules
from lockstep.kernel.errors import UsageError
from lockstep.sharded_tensors import is_sharded

__all__ = ["reject_unsupported_modules"]


def reject_unsupported_modules(values: Mapping[str, Any], *, allows_shards: bool = False) -> None:
    """Raise UsageError if a module or one of its submodules cannot be trained.

    Args:
        values: Modules and lists of modules, by the names that messages use; other values are
            ignored.
        allows_shards: Whether `fully_shard` may have been called with them.
    """
    for root, module in _iterate_modules(values):
        module = unwrap(module)
        for path, part in module.named_modules(prefix=root):
            if isinstance(part, torch.jit.ScriptModule):
                raise UsageError(
                    f"{path} is compiled by TorchScript, and Lockstep cannot give such a module "
                    "the buffers and random numbers of each micro-batch: pass the original module, "
                    "or use torch.compile (functions that torch.jit.script compiled may be called)"
                )
            if isinstance(part, _get_wrappers()):
                raise UsageError(
                    f"{path} is wrapped in {type(part).__name__}, which exchanges gradients by "
                    f"itself, as the Trainer does: pass {path}.module to the Trainer"
                )
            if not allows_shards and isinstance(part, _get_sharded()):
                raise UsageError(
                    f"{path} is sharded by fully_shard, which exchanges gradients by itself, as "
                    "the Trainer does: pass the model to the Trainer without it (storage='shared' "
                    "keeps parameters and optimizer state once per host)"
                )
            _check_buffer_rules(path, part)
            if _observes(part):
                raise UsageError(
                    f"{path} is a {type(part).__name__}, which observes a range that depends on "
                    "the order of the micro-batches: call the model with some batches, then "
                    "model.apply(torch.ao.quantization.disable_observer), and train with these "
                    "ranges"
                )
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.scale_grad_by_freq:
                raise UsageError(
                    f"{path} has scale_grad_by_freq=True, which counts rows in each micro-batch "
                    "instead of in the whole batch: leave it out"
                )
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
                raise UsageError(
                    f"{path} has max_norm={part.max_norm}, with which each lookup writes to the "
                    "weight, and each rank looks up other rows: leave max_norm out, and scale the "
                    "rows of the output in forward (torch.renorm), or the weight between steps"
                )
            for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is not None and not (allows_shards and is_sharded(tensor)):
                    _reject_tensor(f"{path}.{name}", tensor, part)


def _observes(part: Any) -> bool:
    """Return whether a module of quantization-aware training observes ranges."""
    quantization = sys.modules.get("torch.ao.quantization.fake_quantize")
    if quantization is None or not isinstance(part, quantization.FakeQuantizeBase):
        return False
    return not part.observer_enabled.is_meta and bool(part.observer_enabled[0])


def _reject_tensor(path: str, tensor: Any, part: nn.Module) -> None:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    if is_lazy(tensor):
        raise UsageError(
            f"the {kind} {path} has no shape yet, because {type(part).__name__} takes it from its "
            "first input: call the model with one batch before ls.Trainer or ls.exact gets it, or "
            "use a module with explicit sizes"
        )
    what = ""
    if is_traceable_wrapper_subclass(tensor):
        what = f"a {type(tensor).__name__}, which consists of other tensors"
    elif tensor.layout is not torch.strided:
        what = f"a sparse tensor ({tensor.layout})"
    elif tensor.is_quantized:
        what = f"a quantized tensor ({tensor.dtype})"
    if what:
        raise UsageError(
            f"the {kind} {path} is {what}, which Lockstep does not keep equal on all ranks: "
            "register the plain tensors that it is made of, such as indices and values, and build "
            "it from them in forward"
        )


def _iterate_modules(values: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in values.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _iterate_modules(
                {f"{name}[{number}]": member for number, member in enumerate(value)}
            )


def _get_wrappers() -> tuple[type, ...]:
    """Return the classes that keep the wrapped model in the attribute `module`."""
    known = (DataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)
    return (*known, *_get_fsdp_class("FullyShardedDataParallel"))


def _get_sharded() -> tuple[type, ...]:
    """Return the base classes that `fully_shard` adds to the classes of its modules."""
    return _get_fsdp_class("FSDPModule")


def _get_fsdp_class(name: str) -> tuple[type, ...]:
    """Return a class of FSDP, or () if FSDP is not imported yet: importing it takes seconds."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, name, None)
    return (kind,) if isinstance(kind, type) else ()


def _check_buffer_rules(path: str, module: nn.Module) -> None:
    """Raise UsageError for a rule that does not exist, or that its buffer cannot follow.

    Args:
        path: The name of the module, for the message.
        module: The module that may declare rules.
    """
    rules = describe_buffer_rules(module)
    said = f"{path} ({type(module).__name__}).{ATTRIBUTE}"
    if not isinstance(rules, Mapping):
        raise UsageError(f"{said} is a {type(rules).__name__}: expected a dict of rules by buffer")
    for name, rule in rules.items():
        if name not in module._buffers:
            buffers = ", ".join(module._buffers) or "none"
            raise UsageError(f"{said} names {name!r}, and the module's buffers are: {buffers}")
        if rule not in RULES:
            raise UsageError(
                f"{said}[{name!r}] is {rule!r}: expected one of {', '.join(map(repr, RULES))}"
            )
        tensor = module._buffers[name]
        dtype = torch.float32 if tensor is None else tensor.dtype
        is_sum = rule == "sum" and dtype is not torch.bool and not dtype.is_complex
        if rule in ("mean", "sum") and not (is_sum or dtype.is_floating_point):
            raise UsageError(f"{said}[{name!r}] is {rule!r}, which a {dtype} buffer cannot follow")
