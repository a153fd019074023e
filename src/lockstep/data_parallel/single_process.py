"""DataParallel: one process computes micro-batches on several devices.

    DataParallel               one process for all devices, gradients added on the first device
    lockstep.exact             one process per device, in torch's DistributedDataParallel
    Trainer                    one process per device, and the optimizer, data and checkpoints

With the same micro-batches, all add the same gradients along the same tree
(`lockstep.data_parallel.replica_pass`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.call_checks import check_call
from lockstep.data_parallel.replica_pass import Call, ReplicaPass
from lockstep.devices import count_devices, find_accelerator, is_accelerator
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.loss_weights import WeightFunction
from lockstep.model.blocks import find_block_names
from lockstep.model.compilation import is_compiled
from lockstep.model.target_weights import infer_weight_function, loss_name

__all__ = ["DataParallel"]

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class DataParallel(nn.Module):
    """Wraps a module so that one process computes each batch on several devices.

    Use it like torch's class. A call splits its tensors into micro-batches, as `lockstep.Trainer`
    does, computes them on replicas of the module, and joins the outputs on the first device in the
    order of the samples. Backward adds the gradients of the micro-batches along the tree, into
    `.grad` of the module's parameters. The state dict has the module's own names, without a prefix.
    `lockstep.init` is not needed.

    The calling thread starts the work of all devices. Accelerators compute at the same time,
    because it does not wait for them. The CPU may be listed several times; its micro-batches are
    computed one after another.

    Prefer one process per device (`lockstep.exact` or `lockstep.Trainer`) for training: one thread
    has to keep all devices busy, and the first device holds and adds more than the others. See the
    guide "One process or several".

    **Bits.** For the same micro-batches, weights, seed, step and number of intra-op threads:

    - With `compute_loss`, or if the module returns its loss as a scalar, gradients, buffers and the
      loss (rounded to its dtype) have the bits of the trainer, for any list of CPU devices.
    - With a loss that you compute from the joined outputs, gradients have the same bits for any
      list of CPU devices. They have the trainer's bits if, in addition, the loss is an elementwise
      mean over the samples (such as `CrossEntropyLoss` and `MSELoss`), its kernels do not depend on
      the number of rows, and the sizes of the batch and of all micro-batches are powers of two.
      Otherwise they differ by rounding: the trainer divides by the samples of a micro-batch and
      multiplies by its share of the batch, such a loss divides by the samples of the batch.
    - `lockstep.exact` has the gradients of the trainer, too.

    **Arguments** get no gradients: one that requires a gradient is refused.

    **Outputs.** Tensors are joined in nested tuples, lists and mappings: along `dim`, or, for
    0-dimensional floating-point tensors, as the mean over the batch (torch's class returns one
    number per device). Other scalars become a vector with one entry per micro-batch. Values that
    are not tensors are those of the first micro-batch.

    **Random numbers.** The global generators are seeded for each micro-batch and block (those
    that the module names, or the whole module) as in the trainer, and restored after the call.

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

    Attributes:
        module: The module.
        steps: The number of calls in training mode so far. The next one draws the random numbers of
            the trainer's step of this number; set it when you resume from a checkpoint.

    Raises:
        UsageError: The module cannot be replicated, or there is no device.
        LayoutError: There are more devices than micro-batches.
    """

    @check_call("ls.DataParallel")
    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str | int] | None = None,
        *,
        microbatches: int = 8,
        dim: int = 0,
        seed: int = 0,
    ) -> None:
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
        self.microbatches = microbatches
        self.dim = dim
        self.seed = seed
        self.steps = 0
        self._evaluations = 0  # calls in evaluation mode since the last step
        names = find_block_names(module, None)
        self._scope_names = list({module.get_submodule(name): name for name in names}.values())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on all micro-batches, and return the joined outputs.

        Raises:
            UsageError: The arguments cannot be split, or the outputs cannot be joined.
        """
        return self._call(args, kwargs, None, None)

    @check_call("compute_loss")
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
        step = self.steps if self.training else -1 - self._evaluations
        call = Call(
            module=self.module,
            scope_names=self._scope_names,
            devices=self.devices,
            microbatches=self.microbatches,
            dim=self.dim,
            seed=self.seed,
            step=step,
            args=args,
            kwargs=kwargs,
            loss=loss,
            weight=weight,
        )
        outputs = ReplicaPass(call).forward()
        if self.training:
            self.steps = self.steps + 1
            self._evaluations = 0
        else:
            self._evaluations += 1
        return outputs

    def _check_placement(self) -> None:
        first = self.devices[0]
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != first:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise UsageError(
                    f"the {kind} {name} is on {tensor.device}, but the first device of "
                    f"ls.DataParallel is {first}: call module.to({str(first)!r})"
                )


def _find_devices(devices: Sequence[torch.device | str | int] | None) -> list[torch.device]:
    kind = find_accelerator()
    if devices is None:
        devices = ["cpu"] if kind is None else list(range(count_devices(kind)))
    if isinstance(devices, str):
        devices = [devices]
    try:
        chosen = [
            torch.device(kind or "cuda", item) if isinstance(item, int) else torch.device(item)
            for item in devices
        ]
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(
            f"ls.DataParallel(devices={devices!r}): expected a list of devices of torch, such as "
            '["cuda:0", "cuda:1"]'
        ) from None
    if not chosen:
        raise UsageError('devices is empty: pass at least one device, such as ["cpu"]')
    return [
        torch.device(device.type, 0) if is_accelerator(device) and device.index is None else device
        for device in chosen
    ]


def _reject_unsupported(module: nn.Module) -> None:
    """Raise UsageError for modules that cannot be replicated."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            "ls.DataParallel takes an instance of torch.nn.Module as module, not "
            f"{type(module).__name__}"
        )
    for path, part in module.named_modules():
        name = path or type(part).__name__
        is_script = isinstance(part, torch.jit.ScriptModule)
        if is_script or is_compiled(part):
            compiler = "TorchScript" if is_script else "torch.compile"
            raise UsageError(
                f"{name} is compiled by {compiler}, which does not support replicas: pass the "
                "module before it is compiled, or use ls.exact with one process per device"
            )
        if isinstance(part, (*WRAPPERS, DataParallel)):
            raise UsageError(
                f"{name} is wrapped in {type(part).__name__}, which exchanges gradients by itself: "
                "pass its module"
            )
