"""Hardware that computes wrong: bits flipped in results, in memory and in files.

    with FaultyOperator("addmm", rank=1, call=3) as fault:     the result of one call, on one rank
        trainer.step(batch)
    assert fault.flips == 1

    FaultyOperator("mm", phase="backward", cores={0})          every result in backward on one core
    FaultyOperator("mul.Tensor", probability=0.01, seed=7)     one result in a hundred
    FaultyOperator("addmm", above=4.0)                         every element above a value
    FaultyReduction(model.weight, rank=1, call=0)              a gradient after the sum
    flip_bit(model.weight, element=5)                          memory at rest
    flip_bit_in_file(path, offset=100)                         a file

`FaultyOperator` replaces the kernel of an operator in torch's dispatcher, below autograd and below
modes. This covers the calls of every thread, and those of autograd, optimizers and C++ code. Bits
are flipped in memory, so no version counter changes.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import warnings
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from lockstep.data_parallel.gradient_reducer import GradientReducer

__all__ = [
    "FaultyOperator",
    "FaultyReduction",
    "find_core",
    "find_phase",
    "flip_bit",
    "flip_bit_in_file",
]

Phase = Literal["forward", "backward", "optimizer"]

LIBC = ctypes.CDLL(None)


def find_core() -> int:
    """Return the core on which this thread runs."""
    return int(LIBC.sched_getcpu())


def find_phase() -> Phase:
    """Return what this thread computes: backward, an update, or else forward."""
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_globals.get("__name__", "").startswith(
            "torch.optim"
        ):
            return "optimizer"
        frame = frame.f_back
    return "forward"


def flip_bit(tensor: torch.Tensor, element: int = 0, bit: int = 22) -> None:
    """Flip a bit of an element of a tensor in memory; its version counter does not change.

    Args:
        tensor: The tensor.
        element: The number of the element, in the order of the tensor's dimensions.
        bit: The number of the bit; 22 is the highest of a float32's mantissa.
    """
    assert 0 <= bit < 8 * tensor.itemsize, (bit, tensor.dtype)
    offset = 0
    rest = element
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        rest, place = divmod(rest, size)
        offset += place * stride
    assert rest == 0, f"element {element} of a tensor of shape {tuple(tensor.shape)}"
    byte = ctypes.c_uint8.from_address(tensor.data_ptr() + offset * tensor.itemsize + bit // 8)
    byte.value ^= 1 << bit % 8


def flip_bit_in_file(path: Path, offset: int, bit: int = 0) -> None:
    """Flip a bit of the byte at an offset of a file; a negative one counts from the end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


class _Fault:
    """What decides whether a result is wrong; counts the calls and the flipped bits.

    Attributes:
        calls: The number of calls that matched so far.
        flips: The number of bits flipped so far.
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        cores: Collection[int] | None = None,
        phase: Phase | None = None,
        call: int | None = None,
        probability: float = 1.0,
        above: float | None = None,
        element: int | None = None,
        bit: int = 22,
        seed: int = 0,
    ) -> None:
        """Choose the results that are wrong; by default all, permanently.

        Args:
            rank: The rank, by the variable RANK; None for every rank.
            cores: The cores; None for every core.
            phase: The phase; None for every phase.
            call: The number of the only wrong call among those that match, from 0; None for all.
            probability: The probability of a wrong result.
            above: Every element of a larger magnitude is wrong, and no other one.
            element: The number of the wrong element; None for a random one. Not with `above`.
            bit: The number of the flipped bit.
            seed: The seed of what is random.
        """
        self._is_here = rank is None or rank == int(os.environ.get("RANK", "0"))
        self._cores = cores
        self._phase = phase
        self._call = call
        self._probability = probability
        self._above = above
        self._element = element
        self._bit = bit
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.calls = 0
        self.flips = 0

    def _spoil(self, result: torch.Tensor) -> None:
        """Flip bits in the result of a call, if it is one of those that are wrong."""
        if (
            not self._is_here
            or not result.numel()
            or (self._cores is not None and find_core() not in self._cores)
            or (self._phase is not None and find_phase() != self._phase)
        ):
            return
        with self._lock:
            number = self.calls
            self.calls = self.calls + 1
            if self._call not in (None, number) or self._random.random() >= self._probability:
                return
            elements = [self._element]
            if self._above is not None:
                values = enumerate(result.detach().flatten().tolist())
                elements = [element for element, value in values if abs(value) > self._above]
            for element in elements:
                flip_bit(
                    result,
                    self._random.randrange(result.numel()) if element is None else element,
                    self._bit,
                )
            self.flips += len(elements)


class FaultyOperator(_Fault):
    """An operator of torch whose results on the CPU are wrong while the context is open."""

    def __init__(self, operator: str, *, output: int = 0, **chosen: Any) -> None:
        """Choose the operator.

        Args:
            operator: Its name in `torch.ops.aten`, with the overload: "addmm", "add_.Tensor".
            output: The number of the wrong result, of an operator with several results.
            chosen: What decides whether a result is wrong; see `_Fault`.
        """
        super().__init__(**chosen)
        self._operator = operator
        self._output = output

    def __enter__(self) -> Self:
        """Replace the kernel."""
        name, _, overload = self._operator.partition(".")
        operator = getattr(getattr(torch.ops.aten, name), overload or "default")
        kernel = torch.library.get_kernel(operator, "CPU")
        again = threading.local()

        def compute(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(again, "is_entered", False):
                again.is_entered = False
                return kernel.call_boxed(keys, *args, **kwargs)
            # `call_boxed` takes a number for a tensor, as in `x * 2`, only below a call of the
            # operator from Python.
            again.is_entered = True
            try:
                results = operator(*args, **kwargs)
            finally:
                again.is_entered = False
            self._spoil(results[self._output] if isinstance(results, tuple | list) else results)
            return results

        self._library = torch.library.Library("aten", "IMPL", "CPU")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            self._library.impl(self._operator, compute, with_keyset=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the kernel."""
        self._library._destroy()


class FaultyReduction(_Fault):
    """A gradient that is wrong after it was summed over the ranks, while the context is open."""

    def __init__(self, parameter: torch.Tensor, **chosen: Any) -> None:
        """Choose the parameter, and what decides whether its gradient is wrong; see `_Fault`."""
        super().__init__(**chosen)
        self._parameter = parameter

    def __enter__(self) -> Self:
        """Replace the sum."""
        reduce = GradientReducer.reduce
        self._reduce = reduce

        def reduce_wrongly(reducer: GradientReducer, *args: Any) -> None:
            reduce(reducer, *args)
            assert self._parameter.grad is not None
            self._spoil(self._parameter.grad)

        GradientReducer.reduce = reduce_wrongly  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the sum."""
        GradientReducer.reduce = self._reduce  # type: ignore[method-assign]
