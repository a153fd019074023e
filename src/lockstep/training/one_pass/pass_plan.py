"""Which operators of a pass over several micro-batches add up their samples.

    one micro-batch            x (8, 64)       x @ w (8, 10)       grad.t() @ x (10, 64)
    four of them together      x (32, 64)      x @ w (32, 10)      grad.t() @ x (10, 64)
                               rows            rows                shared: adds up rows

The operators of both passes are recorded, and the shapes of their tensors compared. What grows with
the number of micro-batches has rows. An operator that gets rows and returns none couples samples:
in the forward pass the micro-batches cannot be computed together; in the backward pass it forms the
gradient of a parameter, and is called for the rows of each micro-batch.

An operator that treats rows separately may still round the last elements of a tensor in another
way, where vector registers are not full. `POSITION_FREE` and `OF_FLOAT32` have those that do not;
the tensors of others must fill all registers.

An operator that draws random numbers is called for the rows of each micro-batch, too, and so is
batch norm, which normalizes within a micro-batch.

An operator that returns rows may couple them nevertheless, as a softmax or a sum over samples does.
So the rows of its result are compared with those of the passes over the first and the last
micro-batch, also where they do not count yet, and once more for random numbers, since the values of
a step may be all alike. What depends on values in other ways is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from lockstep.training.one_pass.pass_operators import (
    BATCH_NORMS,
    CONVOLUTIONS,
    DRAWS,
    FACTORIES,
    OF_FLOAT32,
    POSITION_FREE,
    SELECTIONS,
    SIZED_BY_VALUES,
    UNSET,
    VIEWS,
)

__all__ = ["CannotJoin", "NotedCall", "PassPlan", "count_bytes", "plan_passes"]

VECTORS = 64
"""Bytes of two vector registers, which elementwise kernels compute at once."""


class CannotJoin(Exception):
    """Why micro-batches cannot be computed together, in words."""


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

MOST_PARTS = 128 << 20
"""The bytes of gradients that are kept for all micro-batches."""


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


class PassPlan(NamedTuple):
    """Operators to call for the rows of each micro-batch, as arguments of `SegmentedCalls`.

    Attributes:
        forward: The operators of the forward pass.
        backward: Those of the backward pass.
    """

    forward: list[tuple[str, str, Any, Any]]
    backward: list[tuple[str, str, Any, Any]]


def plan_passes(
    alone: Sequence[Sequence[NotedCall]],
    joined: Sequence[Sequence[NotedCall]],
    segments: int,
    samples: int,
    make_rule: Callable[..., Any],
) -> PassPlan:
    """Return what a pass over several micro-batches has to call.

    Args:
        alone: The forward and the backward pass of one micro-batch.
        joined: Those of all micro-batches.
        segments: The number of micro-batches.
        samples: The number of samples of each of them.
        make_rule: Makes a rule of the native module from `Slices`.

    Raises:
        CannotJoin: An operator couples samples, or its results depend on their position.
    """
    plans = []
    for is_backward, (one, all_of_them) in enumerate(zip(alone, joined, strict=True)):
        for first, second in zip(one, all_of_them, strict=False):
            if first.values is None or second.values is None:
                raise CannotJoin(f"{first.name} gets a tensor subclass, as in a compiled function")
            if first[:2] != second[:2]:
                raise CannotJoin(f"other operators follow {first.name}")
        if len(one) != len(all_of_them):
            raise CannotJoin("other operators are called for several micro-batches")
        comparisons = [_Comparison(*pair, segments) for pair in zip(one, all_of_them, strict=True)]
        unset = range(len(one)) if is_backward else _list_unset(all_of_them)
        rules = [
            comparison.find_slices(is_backward=bool(is_backward), is_unset=number in unset)
            for number, comparison in enumerate(comparisons)
        ]
        if is_backward:
            shared = [comparison.list_shared() for comparison in comparisons]
            rules = _find_turns(all_of_them, rules, segments, samples)
            rules = _keep_parts(all_of_them, rules, shared, segments)
        plans.append(
            [
                (call.name, call.overload, rule and make_rule(*rule), call.values)
                for call, rule in zip(all_of_them, rules, strict=True)
            ]
        )
    return PassPlan(*plans)


def _list_unset(calls: Sequence[NotedCall]) -> set[int]:
    """Return the calls that return memory as it is, or positions, and those that copy these."""
    unset: set[int] = set()
    for number, call in enumerate(calls):
        is_copy = call.kind in VIEWS or call.kind in ("to", "_to_copy")
        is_of_unset = bool(call.sources) and unset.issuperset(call.sources)
        if call.kind in UNSET or (is_copy and is_of_unset):
            unset.add(number)
    return unset


def _find_turns(
    calls: Sequence[NotedCall], rules: Sequence[Slices | None], segments: int, samples: int
) -> list[Slices | None]:
    """Return the rules with the turns in which the rows of micro-batches alternate.

    Several numbers of turns fit where all elements are equal, such as zeros. They are then those of
    other tensors with as many rows.

    Raises:
        CannotJoin: The numbers are not known.
    """
    known: dict[int, set[int]] = {}
    candidates: list[tuple[int, set[int]] | None] = []
    for call, rule in zip(calls, rules, strict=True):
        if rule is None or not rule.tensors or rule.draws or not call.turns:
            candidates.append(None)
            continue
        tensors = _list_tensors(call.arguments)
        counts = {tensors[n].sizes[dimension] // segments for n, dimension in rule.tensors}
        fitting = set.intersection(*(set(call.turns[n]) for n, _ in rule.tensors))
        rows = max(counts)
        is_alike = len(counts) == 1 and rows != samples
        candidates.append((rows, fitting) if is_alike else None)
        if is_alike and len(fitting) == 1:
            known.setdefault(rows, set()).update(fitting)
    completed: list[Slices | None] = []
    for rule, entry in zip(rules, candidates, strict=True):
        if rule is None or entry is None:
            completed.append(rule)
            continue
        rows, fitting = entry
        if len(fitting) > 1:
            fitting = fitting & known.get(rows, set())
        if len(fitting) != 1:
            raise CannotJoin("the order of the rows in the backward pass is not known")
        completed.append(rule._replace(turns=min(fitting)))
    return completed


def _keep_parts(
    calls: Sequence[NotedCall],
    rules: Sequence[Slices | None],
    shared: Sequence[set[int] | None],
    segments: int,
) -> list[Slices | None]:
    """Return the rules by which gradients of parameters that are changed are kept in parts.

    A parameter that is used twice has the sum of two gradients. They are added for each
    micro-batch, as in separate passes.

    Args:
        calls: The calls of the backward pass.
        rules: How they are called for each micro-batch.
        shared: For each call with rows, also of one that is called once, the calls that have
            returned its tensors without rows; None for a call without rows.
        segments: The number of micro-batches.

    Raises:
        CannotJoin: It is not known which gradients are changed, or they take too much memory.
    """
    sources = [{n for n in call.sources if n >= 0} for call in calls]
    has_rows = [numbers is not None for numbers in shared]
    derived: set[int] = set()  # the calls that return gradients of parameters
    for number, rule in enumerate(rules):
        is_sum = rule is not None and -1 in rule.results
        if (shared[number] or set()) & derived:
            raise CannotJoin(f"{calls[number].name} uses the gradient of a parameter for samples")
        if not is_sum and (has_rows[number] or not sources[number] & derived):
            continue
        derived.add(number)
        if not any(map(_has_tensors, calls[number].results)):
            raise CannotJoin(f"{calls[number].name} reads the gradient of a parameter")
    kept: set[int] = set()
    for number, rule in enumerate(rules):
        if rule is CHANGES:
            if number not in derived:
                raise CannotJoin(f"{calls[number].name} changes the gradient of a parameter")
            kept.add(number)
    count = -1
    while count != len(kept):  # until both what they come from and what comes from them is kept
        count = len(kept)
        for number in [*kept]:
            kept |= sources[number] & derived
        kept |= {number for number in derived if sources[number] & kept and not has_rows[number]}
    completed = [*rules]
    size = 0
    for number, rule in enumerate(rules):
        if number not in kept:
            continue
        size += count_bytes([calls[number]])
        is_sum = rule is not None and has_rows[number]
        completed[number] = rule._replace(keeps_parts=True) if rule and is_sum else CHANGES
    if size * segments > MOST_PARTS:
        raise CannotJoin("the gradients of parameters that are used twice take too much memory")
    return completed


def count_bytes(calls: Sequence[NotedCall]) -> int:
    """Return about how many bytes a forward pass keeps for its backward pass."""
    return sum(
        torch.Size(tensor.sizes).numel() * tensor.element_size
        for call in calls
        if call.kind not in VIEWS
        for tensor in _list_tensors(call.results)
    )


class _Comparison:
    """A call in the pass of one micro-batch, and in that of several.

    Args:
        one: The former.
        several: The latter.
        segments: The number of micro-batches.
    """

    def __init__(self, one: NotedCall, several: NotedCall, segments: int) -> None:
        self._one = one
        self._several = several
        self._segments = segments
        self._name = one.name
        self._kind = one.kind
        self._given: list[int | None] = []  # the dimensions of the rows of the arguments
        self._has_rows = False  # among the arguments or the results
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
        self._has_rows = any(dimension is not None for dimension in [*given, *returned])
        self._refuse_kinds(given, is_backward=is_backward)
        if self._one.has_drawn or self._several.has_drawn:
            if is_backward:
                raise CannotJoin(f"{self._name} draws random numbers in the backward pass")
            return self._draw(given, returned)
        has_rows = any(dimension is not None for dimension in given)
        if not is_backward:
            self._refuse_writes(given)
        if not has_rows:
            if not self._has_rows and not self._several.has_same_rows:
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
        is_scalar = not all(_has_tensors(result) for result in self._one.results)
        is_coupled = is_scalar or any(
            dimension is None and tensor.element_size
            for dimension, tensor in zip(returned, _list_tensors(self._one.results), strict=True)
        )
        is_norm = self._kind in BATCH_NORMS and self._several.has_same_rows
        if is_norm and (is_backward or not is_coupled):
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

    def list_shared(self) -> set[int] | None:
        """Return the calls that have returned the tensors without rows; None: it has no rows."""
        if not self._has_rows:
            return None
        pairs = zip(self._several.sources, self._given, strict=True)
        return {source for source, dimension in pairs if dimension is None} - {-1}

    def _refuse_kinds(self, given: Sequence[int | None], *, is_backward: bool) -> None:
        """Raise CannotJoin if the operator treats rows in another way for other values or sizes."""
        tensors = _list_tensors(self._one.arguments)
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
        is_convolution = self._kind in CONVOLUTIONS and not is_backward and 0 in rows
        if is_convolution and tensors[0].sizes[rows[0]] == 1:
            raise CannotJoin(f"{self._name} rounds one sample in another way than several")

    def _refuse_writes(self, given: Sequence[int | None]) -> None:
        """Raise CannotJoin if samples decide what is written, or which part of a tensor is used."""
        if self._kind in SELECTIONS and self._has_rows and None in given:
            raise CannotJoin(f"{self._name} takes as many rows of a tensor as there are samples")
        if all(dimension is None for dimension in given):
            return
        schema = torch._C._get_schema(self._name, self._one.overload)
        positions = iter(given)
        for argument, value in zip(schema.arguments, self._one.arguments, strict=True):
            own = [next(positions) for _ in _list_tensors([value])]
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
        tensors = _list_tensors(self._one.results)
        return any(tensor.is_floating_point for tensor in tensors)

    def _find_rows(self, field: str) -> list[int | None]:
        """Return the dimension of the rows in each tensor; None for one without rows."""
        pairs = zip(
            _list_tensors(getattr(self._one, field)),
            _list_tensors(getattr(self._several, field)),
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
        tensors = [*_list_tensors(arguments), *_list_tensors(results)]
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
            for tensor, dimension in zip(_list_tensors(arguments), given, strict=True)
            if dimension is None and torch.Size(tensor.sizes).numel() > 1
        ]
        if shared:
            raise CannotJoin(f"{self._name} may round elements differently, by their position")


def _list_rows(dimensions: Sequence[int | None]) -> list[tuple[int, int]]:
    """Return the positions of the tensors with rows, and the dimensions of these."""
    return [(n, dimension) for n, dimension in enumerate(dimensions) if dimension is not None]


def _list_added(dimensions: Sequence[int | None]) -> list[int]:
    """Return the dimensions of the rows of results, with -1 for a result that is added."""
    return [-1 if dimension is None else dimension for dimension in dimensions]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "element_size")


def _has_tensors(value: Any) -> bool:
    return _is_tensor(value) or (isinstance(value, list) and any(map(_is_tensor, value)))


def _list_tensors(values: Sequence[Any]) -> list[Any]:
    """Return the tensors among arguments in the order in which the native module counts them."""
    tensors = []
    for value in values:
        if _is_tensor(value):
            tensors.append(value)
        elif _has_tensors(value):
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
