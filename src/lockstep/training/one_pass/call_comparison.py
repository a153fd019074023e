"""One operator of a pass over several micro-batches, compared with that of the pass over one.

What grows with the number of micro-batches has rows. An operator that gets rows and returns none
couples samples: in the forward pass the micro-batches cannot be computed together; in the backward
pass it forms the gradient of a parameter, and is called for the rows of each micro-batch.

An operator that treats rows separately may still round the last elements of a tensor in another
way, where vector registers are not full. `POSITION_FREE` and `OF_FLOAT32` have those that do not;
the tensors of others must fill all registers.

An operator that draws random numbers is called for the rows of each micro-batch, too, and so are
batch norm, which normalizes within a micro-batch, and losses, of which a micro-batch has one.

An operator that returns rows may couple them nevertheless, as a softmax or a sum over samples does.
So the rows of its result are compared with those of the passes over the first and the last
micro-batch, also where they do not count yet, and once more for random numbers, since the values of
a step may be all alike. What depends on values in other ways is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from lockstep.training.one_pass.pass_operators import (
    BATCH_NORMS,
    CONVOLUTIONS,
    DRAWS,
    FACTORIES,
    LOSSES,
    OF_FLOAT32,
    POSITION_FREE,
    SELECTIONS,
    SIZED_BY_VALUES,
    VIEWS,
)

__all__ = [
    "CHANGES",
    "CallComparison",
    "CannotJoin",
    "NotedCall",
    "Slices",
    "UnknownOrder",
    "has_tensors",
    "list_tensors",
]

VECTORS = 64
"""Bytes of two vector registers, which elementwise kernels compute at once."""


class CannotJoin(Exception):
    """Why micro-batches cannot be computed together, in words."""


class UnknownOrder(CannotJoin):
    """The values of a step do not say how rows alternate, which those of the next one may do."""


class Slices(NamedTuple):
    """How an operator is called for the rows of each micro-batch.

    Attributes:
        tensors: The tensors to cut, each with the dimension of its rows.
        results: The dimension of the rows in every result, or -1 for one that is added.
        sizes: The arguments that are sizes, with their values for one micro-batch.
        draws: Whether each micro-batch has a generator.
        turns: The number of turns in which the rows of micro-batches alternate: with time first,
            one per time.
        keeps_parts: Whether results that would be added are kept for each micro-batch, since
            others change them. An operator without tensors to cut is called for each of these.
    """

    tensors: list[tuple[int, int]]
    results: list[int]
    sizes: list[tuple[int, int]]
    draws: bool = False
    turns: int = 1
    keeps_parts: bool = False


CHANGES = Slices([], [], [], keeps_parts=True)
"""The rule of an operator that changes gradients of parameters, which have no rows."""


class NotedCall(NamedTuple):
    """A call of an operator, as the native module records it.

    Attributes:
        name: The name of the operator, with its namespace.
        overload: The name of its overload.
        arguments: The arguments; tensors are described by their shapes.
        results: The results, in the same way.
        has_drawn: Whether it has drawn from the default generator.
        turns: For each tensor among the arguments, the numbers of turns by which its first rows are
            those of the pass over one micro-batch; empty if they were not compared.
        sources: For each tensor among the arguments, the number of the call that has returned it;
            -1 for others.
        has_same_rows: Whether the rows of the results have the bits of those of the passes over the
            first and the last micro-batch, if they were compared, also for other values, and
            numbers that Python has made tensors are the same.
        values: The arguments, as the native module describes them; None for a call with a tensor of
            a subclass, of which nothing else is recorded.
    """

    name: str
    overload: str
    arguments: list[Any]
    results: list[Any]
    has_drawn: bool
    turns: list[list[int]]
    sources: list[int]
    has_same_rows: bool
    values: Any

    @property
    def kind(self) -> str:
        """The name without its namespace and the mark of operators that write in place."""
        return self.name.removeprefix("aten::").rstrip("_")

    @property
    def is_pointwise(self) -> bool:
        """Whether this operator of torch computes each element by itself."""
        operators = getattr(torch.ops.aten, self.name.removeprefix("aten::"))
        return torch.Tag.pointwise in getattr(operators, self.overload or "default").tags


class CallComparison:
    """A call in the pass of one micro-batch, and in that of several.

    Args:
        one: The former.
        several: The latter.
        segments: The number of micro-batches.

    Attributes:
        has_rows: Whether an argument or a result has rows, if slices were found.
    """

    def __init__(self, one: NotedCall, several: NotedCall, segments: int) -> None:
        self._one = one
        self._several = several
        self._segments = segments
        self._name = one.name
        self._kind = one.kind
        self._given: list[int | None] = []  # the dimensions of the rows of the arguments
        self.has_rows = False
        self._sizes: list[tuple[int, Any]] = []  # arguments that grow, with their smaller values

    def find_slices(self, *, is_backward: bool, is_unset: bool) -> Slices | None:
        """Return how the operator is called for each micro-batch; None if it is called once.

        Args:
            is_backward: Whether this is the backward pass.
            is_unset: Whether the rows of the results are not compared.
        """
        self._compare_values()
        given = self._find_rows("arguments")
        returned = self._find_rows("results")
        self._given = given
        self.has_rows = any(dimension is not None for dimension in [*given, *returned])
        self._refuse_kinds(given, is_backward=is_backward)
        self._refuse_broadcast(given)
        self._require_layouts(given)
        if self._one.has_drawn or self._several.has_drawn:
            if is_backward:
                raise CannotJoin(f"{self._name} draws random numbers in the backward pass")
            return self._draw(given, returned)
        has_rows = any(dimension is not None for dimension in given)
        if not is_backward:
            self._refuse_writes(given)
        if not has_rows:
            if not is_unset and not self._several.has_same_rows:
                raise CannotJoin(f"{self._name} gets other numbers for several micro-batches")
            if (
                is_backward
                and given
                and self._returns_numbers
                and self._kind not in VIEWS | FACTORIES
            ):
                return CHANGES
            return None
        if self._kind in FACTORIES:
            return None
        is_scalar = not all(has_tensors(result) for result in self._one.results)
        is_coupled = is_scalar or any(
            dimension is None and tensor.element_size
            for dimension, tensor in zip(returned, list_tensors(self._one.results), strict=True)
        )
        is_norm = self._kind in BATCH_NORMS
        is_divided = (is_norm or self._is_loss) and self._several.has_same_rows
        if self._is_loss and self._sizes:
            raise CannotJoin(f"{self._name} gets a size that grows with the samples")
        if is_divided and (is_backward or not is_coupled):
            return Slices(_list_rows(given), _list_added(returned), self._sizes)
        if not is_coupled:
            self._require_full_vectors(given, returned)
            if not is_unset and not self._several.has_same_rows:
                raise CannotJoin(f"{self._name} has other bits for several micro-batches")
            return None
        if is_scalar or not is_backward:
            raise CannotJoin(f"{self._name} combines samples")
        has_lists = any(isinstance(result, list) for result in self._one.results)
        if has_lists or any(type(size) is not int for _, size in self._sizes):
            raise CannotJoin(f"{self._name} combines samples in the backward pass")
        return Slices(_list_rows(given), _list_added(returned), self._sizes)

    @property
    def _is_loss(self) -> bool:
        """Whether the operator computes the loss of a micro-batch, or its gradient."""
        if self._kind in ("mean", "sum"):
            return self._one.overload == ""
        if self._kind not in LOSSES:
            return False
        names = [one.name for one in torch._C._get_schema(self._name, self._one.overload).arguments]
        return bool(self._one.arguments[names.index("reduction")])

    def list_shared(self) -> set[int] | None:
        """Return the calls that have returned the tensors without rows; None: it has no rows."""
        if not self.has_rows:
            return None
        pairs = zip(self._several.sources, self._given, strict=True)
        return {source for source, dimension in pairs if dimension is None} - {-1}

    def _refuse_kinds(self, given: Sequence[int | None], *, is_backward: bool) -> None:
        """Raise CannotJoin if the operator treats rows in another way for other values or sizes."""
        tensors = list_tensors(self._one.arguments)
        rows = dict(_list_rows(given))
        if not rows:
            return
        if not self._name.startswith("aten::"):
            raise CannotJoin(f"{self._name} is no operator of torch, and may combine samples")
        is_sized = self._kind in SIZED_BY_VALUES
        if self._kind == "where":
            is_sized = self._one.overload == ""
        if self._kind == "repeat_interleave":
            is_sized = self._one.overload in ("Tensor", "self_Tensor") and len(tensors) - 1 in rows
        if self._kind in ("index", "index_put", "_index_put_impl"):
            masks = tensors[1:] if self._kind == "index" else tensors[1:-1]
            is_mask = any(
                n in rows and tensor.element_size == 1 for n, tensor in enumerate(masks, start=1)
            )
            # One value that is written to where a mask says is a matter of each element.
            is_filled = self._kind != "index" and torch.Size(tensors[-1].sizes).numel() == 1
            is_sized = is_mask and not (is_filled and len(tensors) - 1 not in rows)
        if is_sized:
            raise CannotJoin(f"{self._name} depends on how many values of all samples fit")
        # What random numbers do not show: a value is among those of another sample, or too large.
        if (self._kind == "isin" and 1 in rows) or self._kind == "renorm":
            raise CannotJoin(f"{self._name} may combine samples")
        is_convolution = self._kind in CONVOLUTIONS and not is_backward and 0 in rows
        if is_convolution and tensors[0].sizes[rows[0]] == 1:
            raise CannotJoin(f"{self._name} rounds one sample in another way than several")

    def _refuse_broadcast(self, given: Sequence[int | None]) -> None:
        """Raise CannotJoin if losses, one per micro-batch, meet what has more dimensions.

        Their rows would be matched with the last dimension, where its size is by chance their
        number.
        """
        tensors = list_tensors(self._one.arguments)
        has_losses = any(
            tensors[n].is_floating_point and [*tensors[n].sizes] == [1]
            for n, _ in _list_rows(given)
        )
        if not has_losses or self._kind in LOSSES | BATCH_NORMS:
            return
        if any(len(tensor.sizes) > 1 for tensor in tensors):
            raise CannotJoin(f"{self._name} gets one number for all samples of a micro-batch")

    def _require_layouts(self, given: Sequence[int | None]) -> None:
        """Raise CannotJoin if the memory of a tensor is laid out in another way than of its rows.

        Operators add in the order of the memory.
        """
        pairs = zip(
            list_tensors(self._one.arguments), list_tensors(self._several.arguments), strict=True
        )
        for (one, several), row in zip(pairs, given, strict=True):
            if not _have_one_layout(one, several, row):
                raise CannotJoin(
                    f"{self._name} gets another memory layout of several micro-batches"
                )

    def _refuse_writes(self, given: Sequence[int | None]) -> None:
        """Raise CannotJoin if samples decide what is written, or which part of a tensor is used."""
        if self._kind in SELECTIONS and self.has_rows and None in given:
            raise CannotJoin(f"{self._name} takes as many rows of a tensor as there are samples")
        if all(dimension is None for dimension in given):
            return
        schema = torch._C._get_schema(self._name, self._one.overload)
        positions = iter(given)
        for argument, value in zip(schema.arguments, self._one.arguments, strict=True):
            own = [next(positions) for _ in list_tensors([value])]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and None in own:
                raise CannotJoin(f"{self._name} writes a tensor that all samples share")

    def _draw(self, given: Sequence[int | None], returned: Sequence[int | None]) -> Slices:
        """Return how an operator that draws random numbers is called for each micro-batch."""
        results = [dimension for dimension in returned if dimension is not None]
        if self._kind not in DRAWS:
            raise CannotJoin(f"{self._name} draws random numbers")
        has_lists = any(type(size) is not int for _, size in self._sizes)
        is_out = self._one.overload.endswith("out")
        if len(returned) > 1 or not results or has_lists or is_out:
            raise CannotJoin(f"{self._name} draws the same numbers for several samples")
        return Slices(_list_rows(given), results, self._sizes, draws=True)

    @property
    def _returns_numbers(self) -> bool:
        tensors = list_tensors(self._one.results)
        return any(tensor.is_floating_point for tensor in tensors)

    def _find_rows(self, field: str) -> list[int | None]:
        """Return the dimension of the rows in each tensor; None for one without rows."""
        pairs = zip(
            list_tensors(getattr(self._one, field)),
            list_tensors(getattr(self._several, field)),
            strict=True,
        )
        return [self._find_dimension(one.sizes, several.sizes) for one, several in pairs]

    def _find_dimension(self, one: Sequence[int], several: Sequence[int]) -> int | None:
        if one == several:
            return None
        grown = [
            n for n, sizes in enumerate(zip(one, several, strict=False)) if sizes[0] != sizes[1]
        ]
        is_usual = len(one) == len(several) and len(grown) == 1
        if not is_usual or several[grown[0]] != self._segments * one[grown[0]]:
            raise CannotJoin(
                f"a tensor of {self._name} does not have one part per sample: it has the shape "
                f"{tuple(one)} for one micro-batch and {tuple(several)} for {self._segments}"
            )
        return grown[0]

    def _compare_values(self) -> None:
        """Compare what is no tensor among the arguments; a size may grow with the micro-batches."""
        pairs = zip(self._one.arguments, self._several.arguments, strict=True)
        for argument, (one, several) in enumerate(pairs):
            for first, second in zip(_list_values([one]), _list_values([several]), strict=True):
                if self._is_larger(first, second):
                    # Such as the number of samples, with which values are compared.
                    if self._kind != "arange" and self._is_number(argument):
                        self._refuse_value(first, second)
                    self._sizes.append((argument, one))

    def _is_number(self, argument: int) -> bool:
        """Return whether an argument may be any number, so that it is no size."""
        schema = torch._C._get_schema(self._name, self._one.overload)
        kind = str(schema.arguments[argument].type)
        return kind in ("number", "Optional[number]")

    def _refuse_value(self, one: Any, several: Any) -> NoReturn:
        raise CannotJoin(
            f"{self._name} gets {one} for one micro-batch and {several} for {self._segments}"
        )

    def _is_larger(self, one: Any, several: Any) -> bool:
        """Return whether a value is a size that grows with the micro-batches.

        Raises:
            CannotJoin: It is another value that is not the same for several micro-batches.
        """
        if isinstance(one, torch.Generator):
            raise CannotJoin(f"{self._name} draws from a generator of its own")
        is_nan = one != one and several != several
        if one == several or is_nan:
            return False
        is_size = type(one) is int and type(several) is int
        if not is_size or several != one * self._segments:
            self._refuse_value(one, several)
        return True

    def _require_full_vectors(
        self, given: Sequence[int | None], returned: Sequence[int | None]
    ) -> None:
        """Require that an operator computes every element of all micro-batches in full vectors."""
        arguments = self._one.arguments
        results = self._one.results
        # A factor is multiplied and added in one step in vectors only.
        is_scaled = self._kind in ("add", "sub", "rsub") and arguments[-1] != 1
        # These powers are products, also in the elements that are left over.
        is_product = self._kind == "pow" and arguments[-1] in (-2, 2, 3)
        if is_product or (self._kind in POSITION_FREE and not is_scaled):
            return
        tensors = [*list_tensors(arguments), *list_tensors(results)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point]
        if self._kind in OF_FLOAT32 and all(tensor.element_size == 4 for tensor in floats):
            return
        for tensor, dimension in zip(tensors, [*given, *returned], strict=True):
            count = torch.Size(tensor.sizes).numel()
            if dimension is None and count == 1:
                continue  # the same number for all elements
            is_full = tensor.is_dense and count * tensor.element_size % VECTORS == 0
            if tensor.is_floating_point and not is_full:
                raise CannotJoin(
                    f"{self._name} may round the last elements of the shape {tuple(tensor.sizes)} "
                    "differently"
                )
        shared = [
            tensor
            for tensor, dimension in zip(list_tensors(arguments), given, strict=True)
            if dimension is None and torch.Size(tensor.sizes).numel() > 1
        ]
        if shared:
            raise CannotJoin(f"{self._name} may round elements differently, by their position")


def _have_one_layout(one: Any, several: Any, row: int | None) -> bool:
    """Return whether the dimensions of two tensors follow each other in memory in one order."""
    if not one.strides or not several.strides:
        return True
    # Those of one element may lie anywhere, as may rows that are one number, which is expanded.
    kept = [
        n for n, sizes in enumerate(zip(one.sizes, several.sizes, strict=True)) if min(sizes) > 1
    ]
    if row is not None and 0 in (one.strides[row], several.strides[row]):
        kept = [n for n in kept if n != row]

    def describe(tensor: Any) -> Any:
        order = sorted(kept, key=lambda n: -tensor.strides[n])
        return order, [tensor.strides[n] == 0 for n in kept]

    return bool(describe(one) == describe(several))


def _list_rows(dimensions: Sequence[int | None]) -> list[tuple[int, int]]:
    """Return the positions of the tensors with rows, and the dimensions of these."""
    return [(n, dimension) for n, dimension in enumerate(dimensions) if dimension is not None]


def _list_added(dimensions: Sequence[int | None]) -> list[int]:
    """Return the dimensions of the rows of results, with -1 for a result that is added."""
    return [-1 if dimension is None else dimension for dimension in dimensions]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "element_size")


def has_tensors(value: Any) -> bool:
    """Return whether an argument or result is a tensor, or a list with some."""
    return _is_tensor(value) or (isinstance(value, list) and any(map(_is_tensor, value)))


def list_tensors(values: Sequence[Any]) -> list[Any]:
    """Return the tensors among arguments in the order in which the native module counts them."""
    tensors = []
    for value in values:
        if _is_tensor(value):
            tensors.append(value)
        elif has_tensors(value):
            tensors += value
    return tensors


def _list_values(values: Sequence[Any]) -> Iterator[Any]:
    """Yield what is no tensor among arguments, also in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield len(value)
            yield from _list_values(value)
        elif not _is_tensor(value):
            yield value
