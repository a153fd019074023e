"""An attempt to compute several micro-batches together; their samples cut and joined."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lockstep.comm.native_module import load_native
from lockstep.data.microbatch import map_tensors
from lockstep.kernel.batch import Microbatch
from lockstep.kernel.buffers import Buffers, have_same_bits
from lockstep.kernel.norm import is_dense
from lockstep.kernel.step_context import StepContext
from lockstep.model.loss_root import run_backward
from lockstep.training.one_pass.call_comparison import CannotJoin, NotedCall
from lockstep.training.one_pass.grouped_passes import PassResults

__all__ = [
    "UNUSED",
    "Pass",
    "PassAttempt",
    "RecordedPass",
    "cut_parts",
    "cut_rows",
    "describe_shapes",
    "differentiate",
    "find_roots",
    "join_gradients",
    "join_rows",
    "list_calls",
    "list_names",
    "make_recorded",
    "require_elements",
    "run_from_roots",
    "take_calls",
]

ALIGNMENT = 64
"""The bytes of which the addresses of separate tensors are multiples."""

UNUSED = "the loss does not depend on the outputs"

UNCUT = "an output does not have one row per sample"

READS = ("numpy", "tolist")
"""Methods of a tensor that return values without an operator."""


class Pass(Protocol):
    """Sees the operators of a pass: records them, or calls some for each micro-batch."""

    def run(self, body: Callable[[], Any]) -> Any:
        """Return the result of the body, whose operators are seen."""

    def begin(self) -> None:
        """See the operators from now on."""

    def end(self) -> None:
        """See no more operators."""

    def seed(self, prefixes: list[bytes], scope: int, call: int) -> None:
        """Seed the generators of the micro-batches for a call of a scope."""

    def finish(self, parameters: Sequence[nn.Parameter]) -> None:
        """Complete the gradients of parameters after the backward pass."""

    @property
    def statistics(self) -> int:
        """The number of running means and variances that are those of micro-batches."""

    def find_statistics(self, running: torch.Tensor) -> list[torch.Tensor] | None:
        """Return a running mean or variance after each micro-batch; None for other tensors."""


class RecordedPass:
    """A pass whose operators are recorded, and which tensors are read without one.

    Args:
        recorded: The calls of the native module.

    Attributes:
        statistics: 0, since the buffers are not used.
        reads: The methods that have read values, and the shapes of the tensors.
    """

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded
        self.statistics = 0
        self.reads: list[tuple[str, torch.Size]] = []

    def run(self, body: Callable[[], Any]) -> Any:
        """Return the result of the body, whose operators and reads are recorded."""
        _watch_reads(self)
        try:
            return self.recorded.run(body)
        finally:
            _end_reads(self)

    def begin(self) -> None:
        """Record from now on."""
        self.recorded.begin()
        _watch_reads(self)

    def end(self) -> None:
        """Record nothing more."""
        _end_reads(self)
        self.recorded.end()

    def seed(self, prefixes: list[bytes], scope: int, call: int) -> None:
        """Leave the generators of the micro-batches: one generator draws for all."""

    def finish(self, parameters: Sequence[nn.Parameter]) -> None:
        """Leave the gradients of parameters, which are not used."""

    def find_statistics(self, running: torch.Tensor) -> None:
        """Return None for every tensor."""


_readers: dict[RecordedPass, int] = {}  # the passes that record reads, with their threads
_replaced: list[str] = []  # the methods that are replaced while there are any
_readers_lock = threading.Lock()


def _watch_reads(reader: RecordedPass) -> None:
    """Record reads of this thread. Methods are replaced only while a pass is recorded."""
    with _readers_lock:
        _readers[reader] = threading.get_ident()
        if len(_readers) > 1:
            return
        _replaced[:] = [name for name in READS if name not in vars(torch.Tensor)]
        for name in _replaced:
            setattr(torch.Tensor, name, _make_read(name))


def _end_reads(reader: RecordedPass) -> None:
    with _readers_lock:
        if _readers.pop(reader, None) is None or _readers:
            return
        for name in _replaced:
            delattr(torch.Tensor, name)  # its base class has the method


def _make_read(name: str) -> Callable[..., Any]:
    original = getattr(torch._C.TensorBase, name)

    @functools.wraps(original)
    def read(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        thread = threading.get_ident()
        for reader, own in [*_readers.items()]:
            if own == thread:
                reader.reads.append((name, tensor.shape))
        return original(tensor, *arguments, **named)

    return read


class PassAttempt:
    """A pass over several micro-batches, which may fail.

    Args:
        step: The context of the step.
        buffers: The buffers of the step.
        group: The micro-batches.
        forward: What sees the operators of the forward pass.
        backward: What sees those of the backward pass.
        joins_losses: Whether the losses are computed together, in the forward pass.

    Attributes:
        before_backward: Called between forward and backward; raises `CannotJoin` to end the pass.
            None: nothing is.
        outputs: What the part of each micro-batch in the outputs is, in a recorded pass.
        is_in_order: Whether the rows of micro-batches follow each other in these, as far as noted.
        buffers_after: The buffers after each micro-batch; empty before the end of forward.
        results: The results; None before the end.
        error: Why there are none.
    """

    def __init__(
        self,
        step: StepContext,
        buffers: Buffers,
        group: Sequence[Microbatch],
        forward: Pass,
        backward: Pass,
        *,
        joins_losses: bool = False,
    ) -> None:
        self.step = step
        self.buffers = buffers
        self.group = group
        self.forward = forward
        self.backward = backward
        self.joins_losses = joins_losses
        self.before_backward: Callable[[], None] | None = None
        self.outputs: list[str] = []
        self.is_in_order = True
        self.buffers_after: list[list[torch.Tensor]] = []
        self.results: PassResults | None = None
        self.error: Exception | None = None

    def note_samples(self, data: Any) -> None:
        """Note the samples, in whose order the results of a recorded pass have to be."""
        if isinstance(self.forward, RecordedPass):
            tensors: list[torch.Tensor] = []
            map_tensors(tensors.append, data)
            self.forward.recorded.note_samples(tensors)

    def note_order(self, tensors: Iterable[Any]) -> None:
        """Note whether the rows of micro-batches follow each other in outputs."""
        if isinstance(self.forward, RecordedPass):
            is_in_order = self.forward.recorded.is_in_order
            self.is_in_order &= all(
                is_in_order(one) for one in tensors if isinstance(one, torch.Tensor)
            )

    def note_outputs(self, outputs: Any) -> None:
        """Note what the part of each micro-batch in the outputs is, in a recorded pass."""
        if isinstance(self.forward, RecordedPass):
            segments = len(self.group)
            leaves = tree_leaves(outputs)
            self.note_order(leaves)
            self.outputs = [_describe_output(leaf, segments) for leaf in leaves]

    @contextmanager
    def use_buffers(self, number: int) -> Iterator[None]:
        """Let the modules have the buffers of a micro-batch in the body.

        Raises:
            CannotJoin: The body has replaced one.
        """
        pairs = [*zip(self.buffers.slots, self.buffers_after[number], strict=True)]
        for slot, tensor in pairs:
            slot.install(tensor)
        yield
        current = self.buffers.current()
        for slot, tensor in pairs:
            if current.get(slot.name) is not tensor:
                raise CannotJoin(f"the loss writes the buffer {slot.name}")

    def list_written(self) -> set[str]:
        """Return the names of the buffers that a micro-batch has changed."""
        slots = self.buffers.slots
        same = have_same_bits(
            [(slot.tensor, own) for slot, own in zip(slots, self.buffers_after[0], strict=True)]
        )
        return {slot.name for slot, is_same in zip(slots, same, strict=True) if not is_same}

    def take(self) -> PassResults:
        """Return the results, or raise the error."""
        if self.error is not None:
            error = self.error
            self.error = None  # which would refer to this attempt, and keep its tensors
            raise error
        assert self.results is not None
        return self.results


def describe_shapes(data: Any) -> Any:
    """Return the shapes of the tensors in a micro-batch; None if not every part is one."""
    tensors: Any = data
    if type(data) not in (tuple, list) or any(type(part) is not torch.Tensor for part in data):
        tensors = []
        map_tensors(tensors.append, data)
    if any(tensor.layout is not torch.strided or tensor.dim() == 0 for tensor in tensors):
        return None
    return tuple([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]) or None


class _UncutOutput:
    """An output that may hold the samples of all micro-batches, and that no loss may use.

    Args:
        output: The output.
    """

    def __init__(self, output: Any) -> None:
        self._type = type(output).__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise CannotJoin(f"the loss uses an output of the type {self._type}, which is not cut")

    __bool__ = __eq__ = __ne__ = __hash__ = _refuse


def cut_rows(leaf: Any, segments: int) -> Sequence[Any]:
    """Return the outputs of each micro-batch, detached."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf if _is_value(leaf) else _UncutOutput(leaf)] * segments
    if not leaf.is_contiguous():
        raise CannotJoin(UNCUT)
    return cut_parts(leaf, segments)


def cut_parts(tensor: torch.Tensor, segments: int) -> list[torch.Tensor]:
    """Return the rows of each micro-batch, detached, aligned and with the strides of the tensor."""
    if tensor.dim() == 0 or tensor.shape[0] % segments:
        raise CannotJoin(UNCUT)
    rows = tensor.shape[0] // segments
    is_aligned = rows * tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    parts = tensor.detach().split(rows) if rows else [tensor.detach()] * segments
    return [
        (part if is_aligned else part.clone()).requires_grad_(tensor.requires_grad)
        for part in parts
    ]


def find_roots(
    leaves: Sequence[Any], cuts: Sequence[Sequence[Any]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs whose parts have gradients, with these."""
    roots = [(leaf, _join_cuts(cut)) for leaf, cut in zip(leaves, cuts, strict=True)]
    return [(leaf, gradient) for leaf, gradient in roots if gradient is not None]


def _join_cuts(cuts: Sequence[Any]) -> torch.Tensor | None:
    """Return the gradients of an output; None if it has none."""
    return join_gradients([cut.grad if isinstance(cut, torch.Tensor) else None for cut in cuts])


def join_gradients(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the gradients of the parts of an output as one; None if they have none."""
    present = [gradient for gradient in gradients if gradient is not None]
    if present and len(present) < len(gradients):
        raise CannotJoin("the losses of some micro-batches do not depend on an output")
    return join_rows(present) if present else None


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of several tensors as one, in new memory with the same strides.

    Some kernels round elements by their place in memory.

    Raises:
        CannotJoin: The rows of one tensor cannot have the strides of the parts.
    """
    one = parts[0]
    if len(parts) == 1:
        return one.detach().clone()
    if one.dim() == 0:
        raise CannotJoin(UNCUT)
    if all(part.is_contiguous() for part in parts):
        return torch.cat([*parts])
    has_gaps = one.stride(0) * one.shape[0] != one.numel() or not is_dense(one)
    if has_gaps or any(part.stride() != one.stride() for part in parts):
        raise CannotJoin("a tensor has strides that those of all samples cannot have")
    joined = one.new_empty_strided((len(parts) * one.shape[0], *one.shape[1:]), one.stride())
    return torch.cat([part.detach() for part in parts], out=joined)


def differentiate(
    roots: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    cuts: Iterable[Any],
    parameters: Sequence[nn.Parameter],
) -> None:
    """Set the gradients of parts of outputs, as the losses compute them: with their own strides.

    Raises:
        CannotJoin: Parameters have gradients, too.
    """
    inputs = [cut for cut in cuts if isinstance(cut, torch.Tensor) and cut.requires_grad]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not inputs:
        raise CannotJoin(UNUSED)
    losses, gradients = zip(*roots, strict=True)
    found = torch.autograd.grad(losses, [*inputs, *trainable], gradients, allow_unused=True)
    if any(gradient is not None for gradient in found[len(inputs) :]):
        raise CannotJoin("the loss uses parameters of the model")
    for cut, gradient in zip(inputs, found, strict=False):
        cut.grad = gradient


def require_elements(losses: torch.Tensor) -> None:
    """Raise CannotJoin if what has computed losses may round a gradient by its place in memory."""
    if not load_native().takes_elements(losses):
        raise CannotJoin("the losses are results of an operator that may round their gradient")


def _describe_output(leaf: Any, segments: int) -> str:
    """Return what the part of a micro-batch is: its dtype and shape, or a value as text."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if _is_value(leaf) else type(leaf).__name__
    # The number of rows may be a fraction, which that of one micro-batch is not.
    shape = [leaf.shape[0] / segments, *leaf.shape[1:]] if leaf.dim() else []
    return f"{leaf.dtype} {shape}"


def _is_value(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (bool, int, float, str))


def run_from_roots(roots: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Run backward from losses or outputs with their gradients; None for 1."""
    if len(roots) == 1:
        run_backward(*roots[0], retain_graph=False)
    else:
        torch.autograd.backward([one for one, _ in roots], [gradient for _, gradient in roots])


def make_recorded(
    restores: bool, *, keeps: bool, joins_losses: bool, first: RecordedPass | None
) -> RecordedPass:
    """Return a pass whose operators are recorded, as `RecordedCalls` describes."""
    calls = None if first is None else first.recorded
    make = load_native().RecordedCalls
    return RecordedPass(
        make(restores=restores, keeps=keeps, joins_losses=joins_losses, first=calls)
    )


def take_calls(recorded: PassAttempt) -> list[list[NotedCall]]:
    """Return the operators of the forward and the backward pass."""
    recorded.take()
    return [list_calls(one) for one in (recorded.forward, recorded.backward)]


def list_calls(recorded: Any) -> list[NotedCall]:
    """Return the operators of a `RecordedPass`."""
    return [NotedCall(*call) for call in recorded.recorded.calls]


def list_names(passes: Sequence[Sequence[NotedCall]]) -> list[list[tuple[str, str]]]:
    """Return the names of operators, with their overloads."""
    return [[(call.name, call.overload) for call in calls] for calls in passes]
