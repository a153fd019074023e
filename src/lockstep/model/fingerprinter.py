"""Fingerprinting: checksums of a trainer's tensors, taken during its steps.

    batch is split          data of each micro-batch
    forward                 inputs and outputs of each module call, by hooks
    backward                gradients of module outputs, on request
    backward is done        the micro-batch's gradients of parameters, and its buffers, on request
    gradients are reduced   gradients before clipping, losses
    step is committed       parameters, buffers, optimizer state

A trainer has a `Fingerprinter` only under a command such as `lockstep check`. The hooks exist only
during a step, so that the model can be copied or pickled between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lockstep.checksum import checksum
from lockstep.compiled_wrapper import WRAPPER, remove_wrappers
from lockstep.data.microbatch import Batch
from lockstep.kernel.rng_scopes import is_in_backward
from lockstep.kernel.step_context import Position, StepContext, StepObserver
from lockstep.model.call_site import class_name
from lockstep.model.compilation import is_compiled_in_place
from lockstep.model.fingerprint import Checksums, StepFingerprint, TrainerFingerprint
from lockstep.model.parallel_context import ParallelContext
from lockstep.sharded_tensors import gather

__all__ = ["Fingerprinter", "checksums", "hookable_modules"]


class Fingerprinter(StepObserver):
    """The observer that takes the fingerprints of one trainer's steps on this rank.

    Args:
        number: The trainer's number.
        parallel: The trainer's layout, loss and other modules.
        called: The module that the trainer calls: the model, or its compiled wrapper.
        module: The model.
        has_whole_gradients: Whether `.grad` holds whole gradients after the reduction.
        with_backward: Whether to record the gradients of module outputs, and the gradients and
            buffers of each micro-batch.
    """

    def __init__(
        self,
        number: int,
        parallel: ParallelContext,
        called: nn.Module,
        module: nn.Module,
        has_whole_gradients: bool,
        *,
        with_backward: bool = False,
    ) -> None:
        self.number = number
        self._with_backward = with_backward
        self.observes_microbatches = with_backward
        self._model = module
        self._has_whole_gradients = has_whole_gradients
        others = parallel.named_extra_modules()
        self._hooked = dict(hookable_modules(class_name(module), called, is_root=True))
        for name, extra in others.items():
            self._hooked |= dict(hookable_modules(name, extra))
        # With stages, only the last stage merges the buffers of the loss.
        has_loss = parallel.position == parallel.stages - 1
        self._buffers_of = others | (parallel.loss_module() if has_loss else {})
        self.current = StepFingerprint(number, 0)
        """The fingerprint of the current step, or of the last one."""
        self.is_unfinished = False
        """Whether a step was begun and not committed."""
        self._position: Position | None = None
        self._numbers: Counter[tuple[int, str]] = Counter()  # of calls, by micro-batch and module
        self._tensor_hooks: list[RemovableHandle] = []

    def trainer(self, backend: str) -> TrainerFingerprint:
        """Return the fingerprint of the trainer's current state; `backend` is that of the ranks."""
        parameters = tuple(remove_wrappers(name) for name, _ in self._model.named_parameters())
        return TrainerFingerprint(class_name(self._model), backend, parameters, self._state())

    @contextmanager
    def recording(self, step: StepContext, position: Position) -> Iterator[None]:
        """Record the module calls of a step while the body runs."""
        self.current = StepFingerprint(self.number, step.number, self._state())
        self._position = position
        self._numbers.clear()
        self.is_unfinished = True
        step.observers.append(self)
        handles = [
            handle for name, module in self._hooked.items() for handle in self._hooks(name, module)
        ]
        try:
            yield
        finally:
            self._position = None
            for handle in (*handles, *self._tensor_hooks):
                handle.remove()
            self._tensor_hooks.clear()

    def select(self, batch: Batch) -> Batch:
        """Record the data of this rank's micro-batches, before any module can write into it."""
        for part in batch.microbatches:
            if part.data is not None:
                self.current.data[part.index] = checksums(part.data)
        return batch

    def record_reduction(self, losses: Mapping[int, float]) -> None:
        """Record this rank's losses by micro-batch, and the sums in `.grad`."""
        self.current.losses = {index: loss.hex() for index, loss in losses.items()}
        if self._has_whole_gradients:
            self.current.gradients = {
                remove_wrappers(name): 0 if parameter.grad is None else _checksum(parameter.grad)
                for name, parameter in self._model.named_parameters()
                if not parameter.is_meta
            }

    def commit(self, loss: float, digest: str, optimizer: Mapping[str, Any]) -> StepFingerprint:
        """Record the state after the step, and return the step's fingerprint.

        Args:
            loss: The loss of the batch.
            digest: The digest of the model.
            optimizer: The optimizer's state on this rank, by names such as "weight/exp_avg".
        """
        done = self.current
        done.state = self._state()
        done.optimizer = {
            remove_wrappers(name): _checksum(value)
            if isinstance(value, torch.Tensor)
            else xxhash.xxh3_64_intdigest(repr(value).encode())
            for name, value in optimizer.items()
            if value is not None
        }
        done.loss = loss.hex()
        done.digest = digest
        self.is_unfinished = False
        return done

    def _state(self) -> dict[str, int]:
        """Return the checksums of the parameters and buffers that are on this rank."""
        tensors = chain(self._model.named_parameters(), self._model.named_buffers())
        hashes = {remove_wrappers(name): _checksum(one) for name, one in tensors if not one.is_meta}
        for root, module in self._buffers_of.items():
            hashes |= {
                remove_wrappers(name): checksum(buffer)
                for name, buffer in module.named_buffers(root)
            }
        return hashes

    def _hooks(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._record("enter", name, (args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._record("leave", name, output)
            if self._with_backward:
                self._hook_gradients(name, output)

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]

    def _record(self, kind: str, name: str, value: Any) -> None:
        position = self._find_position()
        if position is not None:
            calls = self.current.calls.setdefault(position, [])
            calls.append((kind, name, checksums(value)))

    def _find_position(self) -> tuple[int, int] | None:
        """Return the (micro-batch, stage) of a module call; None: the call is not recorded."""
        if torch.compiler.is_compiling() or is_in_backward() or self._position is None:
            return None
        return self._position()

    def _hook_gradients(self, name: str, output: Any) -> None:
        """Register hooks that record the gradients of a module call's output in backward."""
        position = self._find_position()
        if position is None:
            return
        microbatch = position[0]
        call = self._numbers[microbatch, name]
        self._numbers[microbatch, name] += 1
        gradients = self.current.backward.setdefault(microbatch, {})

        def make_hook(number: int) -> Callable[[torch.Tensor], None]:
            def record(gradient: torch.Tensor) -> None:
                # A split backward calls the hook again, with the same gradient.
                gradients.setdefault((name, call, number), checksum(gradient))

            return record

        for number, tensor in enumerate(tree_leaves(output)):
            is_tensor = isinstance(tensor, torch.Tensor) and not _is_wrapped(tensor)
            if is_tensor and tensor.grad_fn is not None:
                self._tensor_hooks.append(tensor.register_hook(make_hook(number)))

    def record_microbatch(
        self,
        microbatch: int,
        gradients: Mapping[str, int],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Record a micro-batch's gradients and buffers; called once per stage of this rank."""
        current = {name: checksum(tensor) for name, tensor in buffers.items()}
        for recorded, hashes in (
            (self.current.leaf_gradients, gradients),
            (self.current.leaf_buffers, current),
        ):
            named = {remove_wrappers(name): value for name, value in hashes.items()}
            recorded.setdefault(microbatch, {}).update(named)


def checksums(value: Any) -> Checksums:
    """Return the checksums of all tensors and arrays in a nested value, in order."""
    hashes = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, np.ndarray):
            hashes.append(xxhash.xxh3_64_intdigest(np.ascontiguousarray(leaf).tobytes()))
        elif isinstance(leaf, torch.Tensor) and not _is_wrapped(leaf):
            hashes.append(checksum(leaf))
    return tuple(hashes)


def _checksum(tensor: torch.Tensor) -> int:
    """Return the checksum of a whole tensor; a collective call if it is sharded."""
    return checksum(gather(tensor.detach()))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps others, as inside `torch.func.vmap`, and has no memory."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def hookable_modules(
    name: str, module: nn.Module, is_root: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its submodules, each once, with their names in the original model.

    A hook inside a compiled module would become a part of its graph, so the submodules of a
    compiled module are left out. The root's name is not a prefix of the names inside it.
    """
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or is_compiled_in_place(module):
            return
        seen.add(module)
        yield name, module
        if WRAPPER not in module._modules:
            for child_name, child in module.named_children():
                child_name = f"{prefix}{child_name}"
                yield from visit(child_name, child, f"{child_name}.")

    yield from visit(name, module, "" if is_root else f"{name}.")
