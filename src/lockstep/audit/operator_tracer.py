"""The operator tracer: records every operator that torch executes in a step, with checksums.

    with tracer.tracing("forward", position):        calls have the micro-batch of position()
        loss = model(inputs) ...                     aten.addmm   inputs, outputs, line, module
        loss.backward()                              phase "backward", line of the forward operator
    with tracer.tracing("optimizer"):
        optimizer.step()

It is a dispatch mode of torch, so it records the operators below autograd, each with the tensors
that it computes on. It computes nothing itself, changes no tensor, and keeps none alive, except
those of one call on request. New memory is filled while it traces, so that what an operator leaves
unwritten is the same every time: here, and within operators by torch, if its algorithms are
deterministic (`torch.utils.deterministic.fill_uninitialized_memory`).

Compiled functions stay compiled. Each graph is one operator if `record_graphs_as_operators` was
called before it was compiled; otherwise the torch kernels that it calls are recorded.

While any dispatch mode is active, some composite functions of torch call other operators
(`isTensorSubclassLike`). In torch 2.13 on the CPU, of all operators in torch's own tests, this
changes only the bits of the gradient of `torch.prod`. To verify that tracing changed no bit,
compare the norm of the gradient with that of the step without tracing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep.audit.operator_call import KeptTensors, OperatorCall
from lockstep.audit.operator_schema import describe_operator, format_value, tensors_in
from lockstep.checksum import checksum
from lockstep.data.microbatch import Batch
from lockstep.kernel.rng_scopes import is_in_backward
from lockstep.kernel.seeds import default_generator
from lockstep.kernel.step_context import Phase, Position, StepContext, StepObserver
from lockstep.model.call_site import CallSites, is_exchange_of_shards

__all__ = ["OperatorTracer", "record_graphs_as_operators"]

UNKNOWN = 0
"""The checksum of values that do not matter or cannot be read."""

_deterministic: Any = torch.utils.deterministic


def record_graphs_as_operators() -> None:
    """Make tracers record each graph that torch.compile compiles from now on as one operator.

    Does nothing if this process has not used torch.compile yet. The graphs compute the same bits.
    """
    # Not imported, which takes a second: if it is not imported yet, nothing is compiled.
    if "torch._dynamo.config" in sys.modules:
        import torch._inductor.config as config

        if hasattr(config, "wrap_inductor_compiled_regions"):
            config.wrap_inductor_compiled_regions = True


class OperatorTracer(TorchDispatchMode, StepObserver):
    """The recorder of one step's operators on this rank.

    Args:
        modules: The modules that the step calls, by name. The name of the model is "", so that its
            modules have no prefix.
        keep: The index of the call whose tensors are kept; None for none.
    """

    supports_higher_order_operators = True  # such as compiled graphs

    def __init__(self, modules: Mapping[str, nn.Module], keep: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []
        """The calls so far, in the order of execution."""
        self.kept: KeptTensors | None = None
        """The tensors of the call `keep`; None before that call."""
        self._keep = keep
        self._sites = CallSites(modules)
        self._memory = _Memory()
        self._phase: Phase | None = None
        self._position: Position | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile working as without the mode, instead of falling back to eager."""
        return True

    @contextmanager
    def recording(self, step: StepContext, position: Position) -> Iterator[None]:
        """Record the operators of micro-batches in the body, then of the step's other phases."""
        step.observers.append(self)
        with self.tracing("forward", position):
            yield

    def select(self, batch: Batch) -> Batch:
        """Record the data of this rank's micro-batches, before any module can write into it."""
        with _disable_current_modes():  # do not record the operators of checksums
            for microbatch in batch.microbatches:
                if microbatch.data is not None:
                    self.record_data(microbatch.index, microbatch.data)
        return batch

    def record_phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context in which the operators of a phase are recorded."""
        return self.tracing(phase)

    @contextmanager
    def tracing(self, phase: Phase, position: Position | None = None) -> Iterator[None]:
        """Record the operators that the body executes.

        Args:
            phase: The phase of the body. Within "forward", operators that autograd executes are
                recorded as "backward".
            position: A function that returns the micro-batch. None: that of the enclosing
                `tracing`.
        """
        before = (self._phase, self._position)
        is_filled = _deterministic.fill_uninitialized_memory
        self._phase = phase
        self._position = position or self._position
        _deterministic.fill_uninitialized_memory = True
        try:
            with nullcontext() if before[0] is not None else self:
                yield
        finally:
            _deterministic.fill_uninitialized_memory = is_filled
            self._phase, self._position = before

    def record_data(self, microbatch: int, data: Any) -> None:
        """Record the data of a micro-batch."""
        tensors = tensors_in(tree_leaves(data))
        index = len(self.calls)
        if index == self._keep:
            self.kept = KeptTensors(outputs=_copy(tensors))
        self._memory.note_writes(tensors, index)
        outputs = tuple(map(_checksum, tensors))
        types = tuple(map(_describe, tensors))
        call = OperatorCall("data", "data", microbatch, "", (), outputs, output_types=types)
        self.calls.append(call)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Execute an operator, and record it."""
        kwargs = kwargs or {}
        schema = describe_operator(func)
        is_internal = schema.is_ignored or is_exchange_of_shards(sys._getframe(1))
        if is_internal or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        index = len(self.calls)
        memory = self._memory
        is_kept = index == self._keep
        is_computing = not (schema.is_view or schema.is_asynchronous)
        phase = self._phase or "forward"
        if phase == "forward" and is_in_backward():
            phase = "backward"
        site = self._sites.find(sys._getframe(1))
        values = schema.bind(args, kwargs)
        read, written, overwritten = schema.tensors(values)
        inputs = tuple(_checksum(tensor) if is_computing else UNKNOWN for tensor in read)
        input_types = tuple(self._describe(tensor, site) for tensor in read)
        producers = memory.producers(read)
        earlier = memory.earlier_writers(overwritten)
        kept = _copy(read) if is_kept else []
        generator = _find_generator(values) if schema.is_random else None
        before = _checksum_state(generator)

        result = func(*args, **kwargs)

        if schema.makes_empty:
            result.zero_()
        after = _checksum_state(generator)
        if schema.is_opaque:
            known = zip(read, inputs, strict=True)
            written = [tensor for tensor, seen in known if _checksum(tensor) != seen]
        made = _distinct([*tree_leaves(result), *written, *overwritten])
        memory.note_writes(tensors_in(made), index)
        if is_kept:
            self.kept = KeptTensors(kept, _copy(tensors_in(made)))
        position = self._position() if self._position is not None else None
        call = OperatorCall(
            operator=schema.name,
            phase=phase,
            microbatch=None if position is None else position[0],
            unit=site.unit,
            inputs=inputs,
            outputs=tuple(map(_checksum, made)) if is_computing else (),
            arguments=schema.format_arguments(values),
            generator=(before, after),
            input_types=input_types,
            output_types=tuple(self._describe(value, site) for value in made),
            producers=producers,
            source=site.source,
            earlier=earlier,
            is_opaque=schema.is_opaque,
        )
        self.calls.append(call)
        return result

    def _describe(self, value: Any, site: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return type(value).__name__
        name = self._sites.name(value, site)
        return f"{name}: {_describe(value)}" if name else _describe(value)


class _Memory:
    """The calls that wrote to memory last, by the address of the memory."""

    def __init__(self) -> None:
        self._writers: dict[int, tuple[StorageWeakRef, int]] = {}

    def producers(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Return the index of the last call that wrote to each tensor's memory; -1 for none."""
        return tuple(map(self._find_writer, tensors))

    def earlier_writers(self, overwritten: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Return the last calls that wrote to memory that is about to be partly overwritten."""
        parts = (
            tensor
            for tensor in overwritten
            if _address(tensor)
            and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
        )
        return tuple(index for index in map(self._find_writer, parts) if index >= 0)

    def _find_writer(self, tensor: torch.Tensor) -> int:
        storage, index = self._writers.get(_address(tensor), (None, -1))
        # Freed memory may have been reused, unnoticed, by an allocation outside of operators.
        return -1 if storage is None or storage.expired() else index

    def note_writes(self, tensors: Iterable[torch.Tensor], index: int) -> None:
        """Note that a call returned or wrote these tensors."""
        for tensor in tensors:
            if address := _address(tensor):
                self._writers[address] = StorageWeakRef(tensor.untyped_storage()), index


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind a tensor; 0 if it is not a plain strided tensor."""
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN:
        return 0
    return tensor.untyped_storage().data_ptr()


PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def _checksum(value: Any) -> int:
    """Return the checksum of a tensor, number or setting; UNKNOWN for other objects."""
    if isinstance(value, torch.Tensor):
        return checksum(value)
    text = format_value(value)
    return xxhash.xxh3_64_intdigest(text.encode()) if text else UNKNOWN


def _describe(tensor: torch.Tensor) -> str:
    """Return the dtype and shape, such as "float32[4, 8]"."""
    shape = "[nested]" if tensor.is_nested else str(list(tensor.shape))
    return str(tensor.dtype).removeprefix("torch.") + shape


def _copy(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies on the CPU, because another process reads them."""
    return [tensor.detach().clone().cpu() for tensor in tensors]


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Return the values without duplicates and None."""
    return list({id(value): value for value in values if value is not None}.values())


def _find_generator(values: Mapping[str, Any]) -> torch.Generator:
    """Return the generator that an operator with these arguments draws from."""
    for value in values.values():
        if isinstance(value, torch.Generator):
            return value
    device = next((tensor.device for tensor in tensors_in(values.values())), values.get("device"))
    return default_generator(torch.device("cpu" if device is None else device))


def _checksum_state(generator: torch.Generator | None) -> int:
    if generator is None:
        return UNKNOWN
    return xxhash.xxh3_64_intdigest(generator.get_state().numpy().data)
