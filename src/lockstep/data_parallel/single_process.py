"""DataParallel: one process computes micro-batches on several devices, with one thread each.

    DataParallel               one process, a thread per device, gradients added on the first device
    DistributedDataParallel    one process per device
    Trainer                    one process per device, and the optimizer, data and checkpoints

With the same micro-batches, all add the same gradients along the same tree
(`lockstep.data_parallel.replica_pass`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Never

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.data.microbatch import map_tensors
from lockstep.data_parallel.distributed import DistributedDataParallel
from lockstep.data_parallel.replica import make_leaves, move_tensors, replicate
from lockstep.data_parallel.replica_pass import ReplicaPass
from lockstep.data_parallel.replica_run import ReplicaRun
from lockstep.data_parallel.scatter import Part, count_samples, list_tensors, scatter
from lockstep.data_parallel.state_prefix import hide_prefix
from lockstep.data_parallel.unit_turns import DrawingUnits
from lockstep.devices import count_devices, find_accelerator, is_accelerator
from lockstep.formatting import format_quantity
from lockstep.kernel.errors import LayoutError, LossError, UsageError
from lockstep.kernel.loss_weights import (
    WeightFunction,
    compute_shares,
    infer_weight_function,
    is_sum,
    loss_name,
)
from lockstep.kernel.splitting import (
    assign_microbatches,
    count_microbatches,
    on_one_host,
    split_evenly,
)
from lockstep.model.blocks import find_block_names
from lockstep.model.buffers import Buffers
from lockstep.model.compilation import is_compiled

__all__ = ["DataParallel"]

UNUSED = {
    "device_ids": "it is called devices",
    "output_device": "outputs are joined on the first device",
}
"""The options of torch's class that do not exist here, with the reason."""

WRAPPERS = (
    DistributedDataParallel,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
)


class DataParallel(nn.Module):
    """Wraps a module so that one process computes each batch on several devices.

    Use it like torch's class. A call splits its tensors into micro-batches, as `lockstep.Trainer`
    does, computes them on replicas of the module with one thread per device, and joins the outputs
    on the first device in the order of the samples. Backward also uses one thread per device, and
    adds the gradients of the micro-batches along the tree, into `.grad` of the module's parameters.
    The CPU may be listed several times; devices with the same memory share the parameters. The
    state dict has the module's own names, without a prefix. `lockstep.init` is not needed.

    Prefer one process per device (`lockstep.DistributedDataParallel` or `lockstep.Trainer`) for
    training: threads wait for Python's global interpreter lock, and the first device holds and adds
    more than the others. See the guide "One process or several".

    **Bits.** For the same micro-batches, weights, seed, step and number of intra-op threads:

    - With `compute_loss`, or if the module returns its loss as a scalar, gradients, buffers and the
      loss (rounded to its dtype) have the bits of the trainer, for any list of CPU devices.
    - With a loss that you compute from the joined outputs, gradients have the same bits for any
      list of CPU devices. They have the trainer's bits if, in addition, the loss is an elementwise
      mean over the samples (such as `CrossEntropyLoss` and `MSELoss`), its kernels do not depend on
      the number of rows, and the sizes of the batch and of all micro-batches are powers of two.
      Otherwise they differ by rounding: the trainer divides by the samples of a micro-batch and
      multiplies by its share of the batch, such a loss divides by the samples of the batch.
    - `lockstep.DistributedDataParallel` on n ranks has the same gradients for `microbatches=n` and
      batches that n divides, if n is a power of two and the module draws no random numbers. For
      other n, its division of the sum by n rounds.

    **Outputs.** Tensors are joined in nested tuples, lists and mappings: along `dim`, or, for
    0-dimensional floating-point tensors, as the mean over the batch (torch's class returns one
    number per device). Other scalars become a vector with one entry per micro-batch. Values that
    are not tensors are those of the first micro-batch.

    **Random numbers.** Units (the blocks that the module names, or the module) are seeded as in the
    trainer. The generators belong to the process, so a unit that draws runs while no other unit
    runs. A module that draws outside of its blocks, in backward, or with `random` or numpy is
    computed one micro-batch after another. The first pass always is, to observe which units draw.

    **Buffers** are merged as in the trainer, after forward: every micro-batch starts from the same
    ones, and floating-point results that differ are replaced by their mean. Attributes that forward
    sets on the module are lost, because they are those of a replica. Hooks of the module run once
    per micro-batch; hooks of its parameters see the sum.

    Args:
        module: The model, with parameters and buffers on the first device.
        devices: The devices, as `torch.device`, names or numbers of accelerators (such as GPUs).
            None: all accelerators, or the CPU if there is none.
        microbatches: The number of micro-batches of a batch, at least the number of devices. It
            affects bits.
        dim: The dimension of the samples in arguments and outputs.
        seed: The seed of all random numbers that the module draws, an int64.
        others: Not used; an option of torch's class that does not apply here raises an error.

    Attributes:
        module: The module.
        steps: The number of calls in training mode so far. The next one draws the random numbers of
            the trainer's step of this number; set it when you resume from a checkpoint.

    Raises:
        UsageError: An option does not exist, or the module cannot be replicated.
        LayoutError: There are more devices than micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str | int] | None = None,
        *,
        microbatches: int = 8,
        dim: int = 0,
        seed: int = 0,
        **others: Never,
    ) -> None:
        for name in others:
            why = UNUSED.get(name)
            raise UsageError(f"DataParallel has no option {name}" + (f": {why}" if why else ""))
        super().__init__()
        self.devices = _find_devices(devices)
        if microbatches < len(self.devices):
            raise LayoutError(
                f"{len(self.devices)} devices cannot share {microbatches} micro-batches: pass "
                f"microbatches={len(self.devices)} or more, or fewer devices"
            )
        if dim < 0:
            raise UsageError(f"dim={dim}: count the dimensions from the front, such as dim=0")
        _reject_unsupported(module)
        self.module = module
        self.microbatches, self.dim, self.seed = microbatches, dim, seed
        self.steps = 0
        self._evaluations = 0  # calls in evaluation mode since the last step
        names = find_block_names(module, None)
        self._unit_names = list({module.get_submodule(name): name for name in names}.values())
        self._drawing: dict[tuple[bool, bool], DrawingUnits] = {}
        hide_prefix(self, "module.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on all micro-batches, and return the joined outputs.

        Raises:
            UsageError: The arguments cannot be split, or the outputs cannot be joined.
        """
        return self._call(args, kwargs, None, None)

    def compute_loss(
        self,
        loss: Callable[..., Any],
        *args: Any,
        loss_weight: WeightFunction | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the mean loss of a batch, whose backward has the trainer's bits.

        The loss is computed per micro-batch, on its device, so outputs are not moved to the first
        one.

        Args:
            loss: A function of (outputs, targets), a mean over the samples, or a sum if its
                `reduction` is "sum".
            args: The arguments of the module, then the targets.
            loss_weight: A function of the data of a micro-batch, a tuple of `args`, that returns
                its weight, as in `lockstep.Trainer`.
            kwargs: The keyword arguments of the module.

        Raises:
            LossError: The loss failed, is not a scalar, or all weights are 0.
        """
        if len(args) < 2:
            raise UsageError(
                "compute_loss takes the loss, the arguments of the module and the targets: call "
                "compute_loss(loss, inputs, targets)"
            )
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise UsageError(
                f"the loss {loss_name(loss)} has parameters, which would get no gradients: make it "
                "a part of the module"
            )
        value = self._call(args, kwargs, loss, loss_weight or infer_weight_function(loss))
        assert isinstance(value, torch.Tensor)
        return value

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[..., Any] | None,
        weight: WeightFunction | None,
    ) -> Any:
        self._check_placement()
        samples = count_samples(args, kwargs, self.dim)
        trained = [each for each in self.module.parameters() if each.requires_grad]
        sources: list[torch.Tensor] = []
        if torch.is_grad_enabled():
            tensors = {id(each): each for each in list_tensors((args, kwargs))}
            sources = [each for each in tensors.values() if each.requires_grad]
        has_gradient = torch.is_grad_enabled() and bool(trained or sources)
        leaves = count_microbatches(samples, self.microbatches)

        def make_runs() -> list[list[ReplicaRun]]:
            return self._make_runs((args, kwargs), samples, leaves, sources, loss, weight)

        kind = self.training, has_gradient
        if kind not in self._drawing:
            self._drawing[kind] = DrawingUnits(self._has_nested_units())
        computed = ReplicaPass(
            self.module, self._unit_names, make_runs, leaves, self.devices[0], self.dim,
            (self.seed, self.steps if self.training else -1 - self._evaluations),
            self._drawing[kind], has_gradient,
        )  # fmt: skip
        outputs, gathered = computed.forward()
        if self.training:
            self.steps, self._evaluations = self.steps + 1, 0
        else:
            self._evaluations += 1
        values = [each.take_value() for each in gathered]
        if has_gradient:
            flags = [each.is_differentiable for each in gathered]
            apply: Any = _Pass.apply  # torch does not annotate it
            values = list(apply(computed, values, flags, *trained, *sources))
        remaining = iter(values)
        return map_tensors(lambda _: next(remaining), outputs)

    def _make_runs(
        self,
        data: tuple[tuple[Any, ...], dict[str, Any]],
        samples: int,
        leaves: int,
        sources: Sequence[torch.Tensor],
        loss: Callable[..., Any] | None,
        weight: WeightFunction | None,
    ) -> list[list[ReplicaRun]]:
        """Return the micro-batches of each device, with new replicas."""
        spans = split_evenly(samples, leaves)
        assigned = assign_microbatches(leaves, on_one_host(len(self.devices)))
        owners = {index: n for n, owned in enumerate(assigned) for index in owned}
        parts = scatter(
            data, spans, self.dim, [self.devices[owners[index]] for index in range(leaves)], sources
        )
        shares = _compute_shares(loss, weight, spans, parts)
        parameters, buffers = list(self.module.parameters()), list(self.module.buffers())
        tensors = [*parameters, *buffers]
        first, *others = dict.fromkeys(self.devices)
        copies = {device: move_tensors(tensors, device) for device in others}
        copies[first] = {id(each): each for each in tensors}  # frozen ones are shared
        losses = {device: _loss_on(loss, device, first) for device in copies}
        trained = [each for each in parameters if each.requires_grad]
        queues: list[list[ReplicaRun]] = [[] for _ in self.devices]
        for index, share in shares.items():
            number, device = owners[index], self.devices[owners[index]]
            own = make_leaves(trained, copies[device], torch.is_grad_enabled())
            replica = replicate(self.module, copies[device] | own)
            held = Buffers({"": replica}) if buffers else None
            if held is not None:
                held.install_copies()
            queues[number].append(
                ReplicaRun(
                    index=index,
                    size=len(spans[index]),
                    place=f"micro-batch {index} on {device} (device {number} of "
                    f"{len(self.devices)})",
                    device=device,
                    part=parts[index],
                    share=share,
                    loss=losses[device],
                    replica=replica,
                    leaves=[own[id(each)] for each in trained],
                    buffers=held,
                )
            )
        return queues

    def _check_placement(self) -> None:
        first = self.devices[0]
        for kind, named in (
            ("parameter", self.module.named_parameters()),
            ("buffer", self.module.named_buffers()),
        ):
            for name, each in named:
                if each.device != first:
                    raise UsageError(
                        f"the {kind} {name} is on {each.device}, but the first device of "
                        f"ls.DataParallel is {first}: call module.to({str(first)!r})"
                    )

    def _has_nested_units(self) -> bool:
        units = [self.module.get_submodule(name) for name in self._unit_names]
        inner = {each for unit in units for each in list(unit.modules())[1:]}
        return any(unit in inner for unit in units)


class _Pass(torch.autograd.Function):
    """Connects a pass with the graph of the parameters and the arguments that need a gradient."""

    @staticmethod
    def forward(ctx: Any, computed: ReplicaPass, values: Any, flags: Any, *sources: Any) -> Any:
        """Return the joined outputs, which have been computed."""
        ctx.computed = computed
        ctx.set_materialize_grads(False)
        pairs = zip(values, flags, strict=True)
        ctx.mark_non_differentiable(*(value for value, flag in pairs if not flag))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Return the gradients of the sources."""
        return (None, None, None, *ctx.computed.backward(gradients))


def _find_devices(devices: Sequence[torch.device | str | int] | None) -> list[torch.device]:
    kind = find_accelerator()
    if devices is None:
        devices = ["cpu"] if kind is None else list(range(count_devices(kind)))
    if isinstance(devices, str):
        devices = [devices]
    found = []
    for each in devices:
        device = torch.device(kind or "cuda", each) if isinstance(each, int) else torch.device(each)
        if is_accelerator(device):
            count = count_devices(device.type)
            if device == torch.device(device.type):  # without a number
                device = torch.device(device.type, 0)
            if device.index >= count:
                raise UsageError(
                    f"ls.DataParallel cannot use {device}: this process sees "
                    f"{format_quantity(count, f'{device.type} device')}"
                )
        elif device.type != "cpu":
            raise UsageError(f"ls.DataParallel does not compute on the device {device}")
        found.append(device)
    if not found:
        raise UsageError('devices is empty: pass at least one device, such as ["cpu"]')
    return found


def _reject_unsupported(module: nn.Module) -> None:
    """Raise UsageError for modules that cannot be replicated."""
    for path, part in module.named_modules():
        name = path or type(part).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{name} is compiled by TorchScript, which cannot be replicated: pass the module "
                "without torch.jit.script or torch.jit.trace"
            )
        if is_compiled(part):
            raise UsageError(
                f"{name} is compiled by torch.compile, which does not support replicas on threads: "
                "pass the module without torch.compile, or use ls.DistributedDataParallel"
            )
        if isinstance(part, (*WRAPPERS, DataParallel)):
            raise UsageError(
                f"{name} is wrapped in {type(part).__name__}, which exchanges gradients by itself: "
                "pass its module"
            )
        for kind, each in [*part._parameters.items(), *part._buffers.items()]:
            if is_lazy(each):
                raise UsageError(
                    f"{name} has no shape for its {kind} yet: call the module with one batch "
                    "before you wrap it"
                )


def _compute_shares(
    loss: Callable[..., Any] | None,
    weight: WeightFunction | None,
    spans: Sequence[range],
    parts: Sequence[Part],
) -> dict[int, float]:
    """Return the share of each micro-batch that is computed, by index."""
    if loss is not None and is_sum(loss):
        return dict.fromkeys(range(len(spans)), 1.0)
    if weight is None:
        return {index: len(span) / spans[-1].stop for index, span in enumerate(spans)}
    weights = {}
    for index, part in enumerate(parts):
        try:
            weights[index] = float(weight(part.data[0]))
        except Exception as error:
            raise LossError(
                f"the weight of micro-batch {index} could not be computed: "
                f"{type(error).__name__}: {error}"
            ) from error
    if not sum(weights.values()) > 0:
        raise LossError(
            f"the weights of the batch's {len(spans)} micro-batches sum to "
            f"{sum(weights.values())}; check whether the targets of all samples are ignored"
        )
    return compute_shares(weights)


def _loss_on(
    loss: Callable[..., Any] | None, device: torch.device, first: torch.device
) -> Callable[..., Any] | None:
    """Return a loss for a device: a copy on it, if the loss is a module on another device."""
    if not isinstance(loss, nn.Module) or device == first:
        return loss
    return copy.deepcopy(loss).to(device)
