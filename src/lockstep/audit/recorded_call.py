"""A call of the model in the user's own loop, or of a stage, that can be computed again.

    model(inputs)        begin, end     inputs, states and the nodes of the outputs are kept
    loss.backward()                     the gradients that arrive at the outputs are kept
    its end              finish         the results: outputs, buffers, gradients
    later                repeat         the call and its backward pass once more

What the loop does with the outputs is not repeated. So nothing but the outputs may lead from its
loss to the model: a loss that also reads parameters or hidden activations adds to the gradients.
The graph of the backward pass shows whether it does.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.audit.microbatch_results import hash_results
from lockstep.audit.repetition_trace import StateWatch
from lockstep.checksum import checksum
from lockstep.kernel.rng_scopes import RngScopes, ScopeCalls, is_in_backward
from lockstep.kernel.seeds import isolated, remembered
from lockstep.model.gradient_hashes import (
    NO_HASHES,
    LateCallbackError,
    hash_gradients,
    hashing_gradients,
)
from lockstep.model.loss_root import read_gradients, run_backward
from lockstep.model.watched_calls import Arguments, ShardedModel, output_tensors

__all__ = ["CannotRepeatError", "RecordedCall"]

Edge = tuple[Any, int]
"""A node of an autograd graph, and the number of one of the gradients that it receives."""

PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""The types of inputs that a call cannot change, apart from the values of tensors."""

STARTS = {graph._engine_run_backward.__code__: "t_outputs", run_backward.__code__: "loss"}
"""The functions that run backward passes, and their variables that name where these begin."""


HIDDEN = (
    "the loss depends on parameters or on hidden activations of the model, not only on its outputs"
)


class CannotRepeatError(Exception):
    """The call cannot be repeated, for the reason in the message; that is nobody's mistake."""


# It has many attributes: all that a call reads and writes is kept, so that it can be repeated.
class RecordedCall:
    """One call of some modules and its backward pass.

    Args:
        call: What is called, such as the model below DistributedDataParallel, perhaps compiled.
        modules: The modules, by the prefix of their tensors' names.
        scopes: Their RNG scopes.
        arguments: The arguments of the call.
        sharded: The gradients, if the model is sharded.

    Attributes:
        watch: What the modules referred to in Python when the call began.

    Raises:
        CannotRepeatError: An argument is an object that the call may change.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        modules: Mapping[str, nn.Module],
        scopes: RngScopes,
        arguments: Arguments,
        sharded: ShardedModel | None = None,
    ) -> None:
        self._call = call
        self._modules = modules
        self._scopes = scopes
        self._sharded = sharded
        self._hashing = ExitStack()
        if sharded is not None:
            self._hashing.enter_context(sharded.hashing())
        self._named = {
            name: parameter
            for prefix, module in modules.items()
            for name, parameter in module.named_parameters(prefix)
        }
        self._arguments = arguments
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CannotRepeatError("a transform of torch.func, such as vmap, calls the model")
        for value in tree_leaves(arguments):
            if not isinstance(value, PLAIN):
                raise CannotRepeatError(f"an input of the model is a {type(value).__name__}")
        tensors = [*self._named.values(), *tree_leaves(arguments)]  # a stage may have no parameters
        devices = (value.device for value in tensors if isinstance(value, torch.Tensor))
        # Whose generators are seeded; a model is on one device.
        self._device = next(devices, torch.device("cpu"))
        self._state = self._read_state()
        is_cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), is_cached)
            for kind in sorted({"cpu", self._device.type})
        ]
        self._seed = remembered(self._device, everything=True)
        self._before = _copy_calls(scopes)
        self.watch = StateWatch(modules)
        self.watch.begin()
        self._reason = ""
        self._pass = -1
        self._roots = set[int]()
        self._buffers_at_end: list[int] | None = None  # of backward
        self._gradients_at_end: list[tuple[int, int] | None] | None = None
        self._received: dict[int, tuple[torch.Tensor, int]] = {}  # by the number of the output
        self._inputs: list[torch.Tensor] = []  # of the last repetition, if they require gradients
        self._knows_inputs = False

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record the outputs of the call.

        Raises:
            CannotRepeatError: One of them is a parameter, or an input as it is.
        """
        self._after = _copy_calls(self._scopes)
        self._outputs = _hash_outputs(outputs)
        self._buffers_after = self._hash_buffers()
        if any(output.requires_grad and output.grad_fn is None for output in outputs):
            raise CannotRepeatError("the model returns a parameter or an input")
        self._edges: dict[Edge, int] = {}
        for index, output in enumerate(outputs):
            if output.grad_fn is not None:
                self._edges.setdefault((output.grad_fn, output.output_nr), index)
        self._gradients: dict[int, torch.Tensor | None] = {}
        receive = weakref.WeakMethod(self._receive)  # the graph would keep the call, and it keeps
        for (node, number), index in self._edges.items():  # the graph until `finish`
            # Not a hook of the tensor, after which the loop may register others.
            node.register_prehook(partial(_pass_on, receive, number, index))

    def _receive(self, index: int, gradient: torch.Tensor | None) -> None:
        """Keep the gradient that arrives at an output; the last backward pass counts."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            starts = list[Any]()
            reason = ""
            try:
                starts = _find_starts()
                if not any(isinstance(start, torch.Tensor) for start in starts):
                    return  # the second part of a stage's backward, which repeats hooks
                self._begin_backward(starts)
            except CannotRepeatError as error:
                reason = str(error)
            self._pass = current
            self._reason = reason
            self._gradients.clear()
        self._gradients[index] = gradient

    def _begin_backward(self, starts: Iterable[Any]) -> None:
        """Record how a backward pass reaches the outputs, when it reaches the first of them.

        Raises:
            CannotRepeatError: It reaches the model in another way, too.
        """
        if any(parameter.grad is not None for parameter in self._named.values()):
            raise CannotRepeatError("backward is called several times per micro-batch")
        if self._hash_buffers() != self._buffers_after:
            raise CannotRepeatError("buffers change between the call of the model and backward")
        gathered = (one for module in self._modules.values() for one in module.parameters())
        parameters = {*map(id, self._named.values()), *map(id, gathered)}
        self._roots = _find_roots(self._edges, parameters, map(_get_edge, starts))
        self._buffers_at_end = None
        self._gradients_at_end = None
        end = weakref.WeakMethod(self._end_backward)
        torch.autograd.Variable._execution_engine.queue_callback(partial(_call_weakly, end))
        self._seed_backward = remembered(self._device, everything=True)

    def _end_backward(self) -> None:
        # Activations that are computed again may have written to buffers.
        self._buffers_at_end = self._hash_buffers()
        self._gradients_at_end = self._read_gradients()

    def _read_gradients(self) -> list[tuple[int, int] | None]:
        """Return what changes if the loop writes to gradients; nothing if torch sets them later."""
        if self._sharded is not None:
            return []
        return read_gradients(self._named.values())

    def finish(
        self, inputs: Sequence[torch.Tensor | None] = (), is_of_script: bool = True
    ) -> dict[str, int]:
        """Return the hashes of the results, at the end of the backward pass.

        Args:
            inputs: The gradients of the inputs that require one; none if they are not known.
            is_of_script: Whether a script may have written to the gradients since then.

        Raises:
            CannotRepeatError: The backward pass reaches the model in another way, too.
        """
        has_gradients = any(parameter.grad is not None for parameter in self._named.values())
        if self._reason or (has_gradients and not self._roots):
            raise CannotRepeatError(self._reason or HIDDEN)
        if is_of_script and self._gradients_at_end not in (None, self._read_gradients()):
            raise CannotRepeatError(
                "gradients change between backward and the end of a micro-batch"
            )
        if self._buffers_at_end not in (None, self._hash_buffers()):
            raise CannotRepeatError("buffers change between backward and the end of a micro-batch")
        for index in sorted(self._roots):
            if (gradient := self._gradients.get(index)) is not None:
                self._received[index] = gradient, checksum(gradient)
        self._gradients.clear()
        self._edges.clear()  # which keep the graph
        self._knows_inputs = bool(inputs)
        hashes = self._outputs | self._hash_results(inputs)
        self._hashing.close()
        return hashes

    def require_unchanged(self) -> None:
        """Raise CannotRepeatError if the loop has changed what the call depends on."""
        is_same = all(checksum(one) == bits for one, bits in self._received.values())
        if not is_same or self._read_state() != self._state:
            raise CannotRepeatError(
                "inputs of the model are written to, or its settings or those of torch change "
                "between micro-batches"
            )

    def repeat(self, *, is_reversed: bool = False) -> dict[str, int]:
        """Return the hashes of the results of another computation, which has no other effect.

        Call it with fresh buffers; on all ranks if the model is sharded.

        Args:
            is_reversed: Whether all dimensions of the inputs are reversed, so that the modules
                keep other values than after this call.

        Raises:
            CannotRepeatError: The loop has changed what the call depends on, or it fails.
        """
        self.require_unchanged()
        calls = self._scopes.pause()
        gradients = [one.grad for one in self._named.values()]
        for parameter in self._named.values():
            parameter.grad = None
        hashing = nullcontext() if self._sharded is None else self._sharded.hashing()
        try:
            with hashing, isolated(self._device, everything=True), torch.enable_grad():
                return self._compute(_reverse if is_reversed else lambda value: value)
        except Exception as error:  # such as of a framework that expects no call now
            name = type(error).__name__
            raise CannotRepeatError(f"the model raises {name} if called again: {error}") from None
        finally:
            if self._sharded is not None:
                self._sharded.discard()
            self._scopes.resume(calls)
            for parameter, gradient in zip(self._named.values(), gradients, strict=True):
                parameter.grad = gradient

    def _compute(self, prepare: Callable[[Any], Any]) -> dict[str, int]:
        self._inputs = []
        entered: dict[int, Any] = {}  # an input that occurs twice is entered once

        def enter(value: Any) -> Any:
            if id(value) not in entered:
                entered[id(value)] = self._enter(prepare(value))
            return entered[id(value)]

        args, kwargs = tree_map(enter, self._arguments)
        # In a backward pass, a scope finds the number of its call among those of the first time.
        known = self._after if is_in_backward() else self._before
        self._scopes.resume(copy.deepcopy(known))
        self._seed()
        with ExitStack() as stack:
            for settings in self._autocast:
                stack.enter_context(torch.autocast(*settings))
            torch.clear_autocast_cache()
            outputs = list(output_tensors(self._call(*args, **kwargs)))
        hashes = _hash_outputs(outputs)
        hashed: Mapping[str, int] = {}
        if roots := [outputs[index] for index in self._received]:
            self._seed_backward()
            gradients = [gradient for gradient, _ in self._received.values()]
            for root, gradient in zip(roots, gradients, strict=True):
                if root.grad_fn is not None:  # hooks of the outputs have changed it already
                    root.grad_fn.register_prehook(partial(_replace, root.output_nr, gradient))
            # Those of a sharded model are hashed whole, by all ranks together.
            named = self._named.items() if self._sharded is None else ()
            modules = self._modules.values()
            try:
                with hashing_gradients(named, roots, modules) as hashed:
                    torch.autograd.backward(roots, gradients)
            except LateCallbackError:
                raise CannotRepeatError(
                    "a callback is queued for the end of backward, after the first gradient"
                ) from None
        return hashes | self._hash_results([leaf.grad for leaf in self._inputs], hashed)

    def _enter(self, value: Any) -> Any:
        """Return an input without the graph that computed it; one with a gradient is a copy."""
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        self._inputs.append(value.detach().requires_grad_())
        return self._inputs[-1].clone()  # may be written to

    def _hash_results(
        self, inputs: Sequence[torch.Tensor | None], hashed: Mapping[str, int] = NO_HASHES
    ) -> dict[str, int]:
        """Return the hashes of gradients and buffers.

        Args:
            inputs: The gradients of the inputs.
            hashed: The hashes of gradients that are freed already.
        """
        if self._sharded is not None:
            gradients = self._sharded.hash_current()
        else:
            gradients = hash_gradients(self._named.items(), hashed)
        buffers = {
            name: buffer
            for prefix, module in self._modules.items()
            for name, buffer in module.named_buffers(prefix)
        }
        known = {
            f"input gradient {number}": checksum(gradient)
            for number, gradient in enumerate(inputs if self._knows_inputs else ())
            if gradient is not None
        }
        return hash_results([], gradients, buffers) | known

    def _hash_buffers(self) -> list[int]:
        return [
            checksum(buffer) for module in self._modules.values() for buffer in module.buffers()
        ]

    def _read_state(self) -> tuple[Any, ...]:
        """Return the inputs, the buffers and the settings that select kernels and parameters."""
        tensors = [one for one in tree_leaves(self._arguments) if isinstance(one, torch.Tensor)]
        cuda = torch.backends.cuda
        return (
            [checksum(tensor) for tensor in tensors],
            self._hash_buffers(),
            [part.training for module in self._modules.values() for part in module.modules()],
            [parameter.requires_grad for parameter in self._named.values()],
            (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
            (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
            (torch.get_num_threads(), torch.get_default_dtype()),
            # Which frameworks replace for one call.
            [vars(module).get("forward") for module in self._modules.values()],
        )


def _pass_on(
    receive: Callable[[], Any], number: int, index: int, received: Sequence[torch.Tensor | None]
) -> None:
    if (keep := receive()) is not None:
        keep(index, received[number])


def _call_weakly(method: Callable[[], Any]) -> None:
    if (call := method()) is not None:
        call()


def _replace(number: int, gradient: torch.Tensor, received: Sequence[Any]) -> tuple[Any, ...]:
    return (*received[:number], gradient, *received[number + 1 :])


def _copy_calls(scopes: RngScopes) -> ScopeCalls | None:
    calls = scopes.pause()
    scopes.resume(calls)
    return copy.deepcopy(calls)


def _hash_outputs(outputs: Iterable[torch.Tensor]) -> dict[str, int]:
    return {f"output {number}": checksum(output) for number, output in enumerate(outputs)}


def _reverse(value: Any) -> Any:
    return value.flip(*range(value.ndim)) if isinstance(value, torch.Tensor) else value


def _find_roots(
    edges: Mapping[Edge, int], parameters: Collection[int], starts: Iterable[Edge]
) -> set[int]:
    """Return the outputs at which the running backward pass enters the graph of a model.

    Args:
        edges: The outputs' numbers.
        parameters: The ids of its parameters.
        starts: Where the backward pass begins.

    Raises:
        CannotRepeatError: It enters the graph elsewhere, or between two outputs.
    """
    inside = set[Any]()
    internal = set[Edge]()
    stack = [node for node, _ in edges]
    while stack:
        if (node := stack.pop()) not in inside:
            inside.add(node)
            following = [edge for edge in node.next_functions if edge[0] is not None]
            internal.update(following)
            stack += [target for target, _ in following]
    roots = set[int]()
    outside = set[Any]()
    entries = [*starts]
    while entries:
        edge = entries.pop()
        node = edge[0]
        if edge in edges and edge not in internal:
            roots.add(edges[edge])
        elif node in inside or id(getattr(node, "variable", None)) in parameters:
            raise CannotRepeatError(HIDDEN)
        elif node not in outside:
            outside.add(node)
            entries += [edge for edge in node.next_functions if edge[0] is not None]
    return roots


def _get_edge(start: Any) -> Edge:
    edge = graph.get_gradient_edge(start) if isinstance(start, torch.Tensor) else start
    return edge.node, edge.output_nr


def _find_start(frame: FrameType) -> Any:
    """Return where the backward pass of a thread begins; None if it runs none."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code not in STARTS:
        caller = caller.f_back
    return None if caller is None else caller.f_locals[STARTS[caller.f_code]]


def _find_starts() -> list[Any]:
    """Return the tensors and edges where the running backward pass begins.

    Raises:
        CannotRepeatError: It is unknown, since several threads run one, or none does.
    """
    # Hooks run in another thread on a GPU. No variable here may refer to a frame: that of this
    # function would refer to itself, and keep the callers' gradients until garbage is collected.
    starts = map(_find_start, sys._current_frames().values())
    passes = [start for start in starts if start is not None]
    if len(passes) != 1:
        raise CannotRepeatError("several threads run backward passes")
    (only,) = passes
    return [only] if isinstance(only, torch.Tensor) else [*only]
