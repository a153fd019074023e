"""The sharded optimizer: steps this rank's pieces of parameters that all ranks share.

    the user's optimizer     params = [w, b]            as the factory made it: its groups,
                             params = [w[0:131072], ...]   options and schedule stay
    a step, piece by piece   next version <- this version    in the cache,
                             .grad = this rank's slice       one piece after another
                             optimizer.step()
    its state                once per host, in shared memory, visible to every rank

An optimizer that treats each element by itself computes the same bits on pieces as on whole
tensors: torch's by a list, others by the class attribute `lockstep_elementwise`. Since the
state is in shared memory, state dicts are whole without an exchange, in the optimizer's own
format, and can be loaded with any storage and number of ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer

from lockstep.comm.memory_format import in_format_of, in_layout_of, in_memory_order, is_dense
from lockstep.comm.native_all_reduce import DTYPES, native_backend
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data_parallel.gradient_reducer import BUCKET_BYTES, GradientReducer
from lockstep.data_parallel.shards import PIECE, Piece, Shards
from lockstep.errors import LayoutError, UsageError
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.versioned_parameters import VersionedParameters, allocate, pass_point

__all__ = ["ELEMENTWISE", "ShardedOptimizer", "require_elementwise", "share_parameters"]

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD,
    optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
"""torch's optimizers whose new element depends only on the past of that element."""

NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise UsageError for an optimizer that may not be stepped piece by piece."""
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "lockstep_elementwise", False):
        return
    name = type(optimizer).__name__
    raise UsageError(
        f"{name} is not known to treat each element of a parameter by itself, so it cannot step "
        f"pieces of shared parameters: if it does, set {name}.lockstep_elementwise = True, and "
        'otherwise train with storage="replicated"'
    )


@dataclass(frozen=True)
class _Entry:
    """What an optimizer keeps under one key: a tensor of elements, a scalar, or a number."""

    kind: str
    dtype: torch.dtype


class ShardedOptimizer:
    """Steps `optimizer` on this rank's pieces of `parameters`; its params become the pieces.

    Made on every rank alike, before a schedule. Raises UsageError for an optimizer
    that cannot be followed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        gradients: GradientReducer,
        shards: Shards,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        self._gradients, self._shards, self._group = gradients, shards, group
        self._rank = dist.get_rank(group)
        number: dict[torch.Tensor, int] = {each: n for n, each in enumerate(parameters)}
        self._groups = [[number[each] for each in g["params"]] for g in optimizer.param_groups]
        self._group_of = {n: g for g, numbers in enumerate(self._groups) for n in numbers}
        made = {number[each]: dict(state) for each, state in optimizer.state.items()}
        self._entries = [self._probe_state(g, made) for g in range(len(self._groups))]
        optimizer.state.clear()
        for each in optimizer.param_groups:
            each["params"] = []
        self.versions = VersionedParameters(self._parameters, shards.covered, group)
        self._homes: dict[tuple[int, str], torch.Tensor] = {}  # of a parameter's state
        self._places: dict[Piece, dict[str, torch.Tensor]] = {}  # of a piece's, views of homes
        self._pieces: dict[Piece, nn.Parameter] = {}  # this rank's
        self._in_group: list[list[nn.Parameter]] = [[] for _ in self._groups]
        self._chunks: list[tuple[int, list[Piece]]] = []
        self._known = 0  # of all ranks' pieces, those that have a place
        self._kept: dict[int, dict[str, Any]] = {}  # of parameters without pieces
        self.stepped: set[int] = set()  # those that the optimizer keeps something for
        self._extend()
        self._write_state(made)

    # --- a step --------------------------------------------------------------------------------

    def local_gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients, whole blocks each but the last of a tensor."""
        pass_point("summed")
        sums = self._gradients.sums
        return [
            sums[piece.index][piece.start : piece.stop]
            for piece in self._shards.pieces
            if piece.rank == self._rank and piece.index in sums
        ]

    def step(self, about: str) -> None:
        """Step every parameter that has a sum, on all ranks or on none.

        A collective call. Raises what the optimizer raised, on every rank.
        """
        pass_point("clipped")
        if self._known < len(self._shards.pieces):
            covered = {piece.index for piece in self._places}
            self.versions.add_second([n for n in self._shards.covered if n not in covered])
            self._extend()
            self._write_state(
                {n: self._kept.pop(n) for n in [*self._kept] if n in self._shards.covered}
            )
        sums = self._gradients.sums
        self.versions.write_next(lambda: self._write(sums), about)
        self.stepped |= {*sums}

    def _write(self, sums: Mapping[int, torch.Tensor]) -> None:
        groups = self._optimizer.param_groups
        try:
            for group, pieces in self._chunks or [(0, [])]:
                self._optimizer.param_groups = groups[group : group + 1]
                self._write_chunk(groups[group], pieces, sums)
        finally:
            self._optimizer.param_groups = groups
            self._restore()

    @torch.no_grad()
    def _write_chunk(
        self, group: dict[str, Any], pieces: Sequence[Piece], sums: Mapping[int, torch.Tensor]
    ) -> None:
        """Step some pieces, from this version of the parameters into the next one."""
        stepping = []
        for piece in pieces:
            span = slice(piece.start, piece.stop)
            new = self.versions.next(piece.index)[span]
            new.copy_(self.versions.current(piece.index)[span])
            if piece.index in sums:
                parameter = self._pieces[piece]
                parameter.data, parameter.grad = new, sums[piece.index][span]
                stepping.append(parameter)
        group["params"] = stepping
        self._optimizer.step()
        for piece in pieces:
            if piece.index in sums:
                self._pieces[piece].grad = None
                self._store_state(piece)
                pass_point("piece")

    def _restore(self) -> None:
        """Give every group its pieces again: what a schedule or a state dict looks at."""
        for group, pieces in zip(self._optimizer.param_groups, self._in_group, strict=True):
            group["params"] = pieces

    # --- where things are ------------------------------------------------------------------------

    def _probe_state(
        self, group: int, made: Mapping[int, dict[str, Any]]
    ) -> dict[torch.dtype, dict[str, _Entry]]:
        """Return what the optimizer will keep for parameters of a group, by their dtype."""
        found: dict[torch.dtype, dict[str, _Entry]] = {}
        for index in sorted(self._groups[group], key=lambda n: not self._parameters[n].numel()):
            parameter = self._parameters[index]
            if parameter.dtype in found or parameter.dtype not in DTYPES:
                continue
            probe = nn.Parameter(in_memory_order(parameter.detach())[:3].clone())
            probe.grad = torch.zeros_like(probe)
            twin = object.__new__(type(self._optimizer))
            twin.__dict__.update(self._optimizer.__dict__)
            twin.state = defaultdict(dict)
            for key, value in made.get(index, {}).items():
                whole = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                part = in_memory_order(value)[:3].clone() if whole else copy.deepcopy(value)
                twin.state[probe][key] = part
            twin.param_groups = [{**self._optimizer.param_groups[group], "params": [probe]}]
            type(twin).step(twin)
            found[parameter.dtype] = {
                key: self._describe_entry(key, value, probe)
                for key, value in twin.state[probe].items()
            }
        return found

    def _describe_entry(self, key: str, value: Any, probe: torch.Tensor) -> _Entry:
        if isinstance(value, torch.Tensor) and value.shape == probe.shape:
            return _Entry("elements", value.dtype)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return _Entry("scalar", value.dtype)
        if type(value) in NUMBERS:
            return _Entry("number", NUMBERS[type(value)])
        raise UsageError(
            f"{type(self._optimizer).__name__} keeps {key!r} for each parameter, neither a value "
            "for each element nor a number, so it cannot step pieces: train with "
            'storage="replicated"'
        )

    def _extend(self) -> None:
        """Give the pieces that are new a parameter to step, and their state a place."""
        new = self._shards.pieces[self._known :]
        self._known = len(self._shards.pieces)
        of_parameter: dict[int, list[Piece]] = {}
        for piece in new:
            of_parameter.setdefault(piece.index, []).append(piece)
        wanted = [
            (index, key, entry, len(pieces))
            for index, pieces in of_parameter.items()
            for key, entry in self._get_entries(index).items()
        ]
        sizes = [
            (self._parameters[index].numel() if entry.kind == "elements" else count, entry.dtype)
            for index, _, entry, count in wanted
        ]
        for (index, key, _, _), home in zip(wanted, allocate(sizes, self._group), strict=True):
            self._homes[index, key] = home
        for index, pieces in of_parameter.items():
            entries = self._get_entries(index)
            for number, piece in enumerate(pieces):
                self._places[piece] = {
                    key: self._homes[index, key][piece.start : piece.stop]
                    if entry.kind == "elements"
                    else self._homes[index, key][number]
                    for key, entry in entries.items()
                }
        for piece in new:
            if piece.rank == self._rank and piece.index in self._group_of:
                self._add_piece(piece)
        self._restore()

    def _get_entries(self, index: int) -> dict[str, _Entry]:
        if index not in self._group_of:  # the user's optimizer leaves it alone
            return {}
        return self._entries[self._group_of[index]][self._parameters[index].dtype]

    def _add_piece(self, piece: Piece) -> None:
        """Make one of this rank's pieces a parameter of the optimizer, in a chunk of its size."""
        now = self.versions.current(piece.index)[piece.start : piece.stop]
        group = self._group_of[piece.index]
        self._pieces[piece] = nn.Parameter(now)
        self._in_group[group].append(self._pieces[piece])
        last = self._chunks[-1] if self._chunks else (-1, [])
        held = sum(each.stop - each.start for each in last[1])
        if last[0] == group and held + piece.stop - piece.start <= PIECE:
            last[1].append(piece)
        else:
            self._chunks.append((group, [piece]))

    def _store_state(self, piece: Piece) -> None:
        """Bring what the optimizer keeps for a piece to its place, unless it is there."""
        state, places = self._optimizer.state[self._pieces[piece]], self._places[piece]
        for key, value in state.items():
            place = places.get(key)
            if place is None:
                raise UsageError(
                    f"{type(self._optimizer).__name__} began to keep {key!r} in the middle of the "
                    'training, which cannot be shared: train with storage="replicated"'
                )
            if value is place:
                continue
            if isinstance(value, torch.Tensor):
                place.copy_(value)
                state[key] = place
            else:
                place.fill_(value)

    # --- the whole state -------------------------------------------------------------------------

    def _read_state(self, index: int) -> dict[str, Any]:
        """Return what is kept for a parameter, as the optimizer would keep it for all of it."""
        found: dict[str, Any] = dict(self._kept.get(index, {}))
        for key, entry in self._get_entries(index).items() if not found else ():
            home = self._homes[index, key]
            if entry.kind == "elements":
                found[key] = in_layout_of(home, self._parameters[index])
            else:
                found[key] = home[0] if entry.kind == "scalar" else home[0].item()
        return found

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The whole parameters in the order in which the state dict numbers them."""
        return [self._parameters[index] for numbers in self._groups for index in numbers]

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
        """Name the whole state after the parameters: "conv.weight/exp_avg" and so on."""
        return {
            f"{names[self._parameters[index]]}/{key}": value
            for index in self.stepped
            for key, value in self._read_state(index).items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict as if it had stepped whole parameters alone."""
        order = [index for numbers in self._groups for index in numbers]
        identity = {index: number for number, index in enumerate(order)}
        packed = [
            {**{k: v for k, v in group.items() if k != "params"}}
            | {"params": [identity[index] for index in numbers]}
            for group, numbers in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]
        stepped = [index for index in order if index in self.stepped]
        return {
            "state": {identity[index]: self._read_state(index) for index in stepped},
            "param_groups": packed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a whole state dict; raises what the optimizer does where it does not fit."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(numbers) for numbers in self._groups]:
            raise UsageError(
                f"the state has parameter groups of {sizes} parameters, the optimizer of "
                f"{[len(numbers) for numbers in self._groups]}"
            )
        saved = [i for group in state["param_groups"] for i in group["params"]]
        order = [index for numbers in self._groups for index in numbers]
        whole = {
            index: state["state"][i]
            for i, index in zip(saved, order, strict=True)
            if i in state["state"]
        }
        count = iter(range(len(self._pieces)))
        packed = [
            {**group, "params": [next(count) for _ in pieces]}
            for group, pieces in zip(state["param_groups"], self._in_group, strict=True)
        ]
        self._optimizer.load_state_dict({"state": {}, "param_groups": packed})
        self._optimizer.state.clear()
        self._in_group = [group["params"] for group in self._optimizer.param_groups]
        self.stepped, self._kept = set(), {}
        self._write_state(whole)

    @torch.no_grad()
    def _write_state(self, whole: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the whole state of some parameters to its places, each rank its own pieces."""
        self.stepped |= {*whole}
        covered = {*self._shards.covered}
        self._kept |= {n: dict(state) for n, state in whole.items() if n not in covered}
        for piece, parameter in self._pieces.items():
            model = self._parameters[piece.index]
            for key, value in whole.get(piece.index, {}).items():
                place, entry = self._places[piece][key], self._get_entries(piece.index)[key]
                if entry.kind == "elements":
                    vector = in_memory_order(in_format_of(value, model))
                    place.copy_(vector[piece.start : piece.stop])
                else:
                    place.fill_(value)
                kept = place.item() if entry.kind == "number" else place
                self._optimizer.state[parameter][key] = kept


# --- whether ranks can share ------------------------------------------------------------------

ALIGNMENT = 64
"""Bytes at which every tensor begins in shared memory, as in memory that torch allocates."""


def share_parameters(
    named: Sequence[tuple[str, nn.Parameter]],
    modules: Sequence[nn.Module],
    optimizer: Optimizer,
    parallel: ParallelContext,
) -> tuple[GradientReducer, ShardedOptimizer | None]:
    """Let all ranks share the parameters, and shard the optimizer.

    A rank that is alone shares with nobody.

    Args:
        named: The parameters with their names, the same on every rank.
        modules: What a step calls: their backward hooks may look at `.grad`.
        optimizer: Of these parameters.
        parallel: The layout.

    Returns:
        The gradients of the parameters, reduced to this rank's shards; and the sharded
        optimizer, None for a rank that is alone.

    Raises:
        LayoutError: The ranks have no memory in common, or a parameter lies in memory in a
            way that shared memory does not keep.
        UsageError: The optimizer cannot step pieces, or a parameter has sparse gradients.
    """
    require_elementwise(optimizer)
    sparse = sparse_weights(each for called in modules for each in called.modules())
    for name, parameter in named:
        if parameter in sparse:
            raise UsageError(
                f'storage="shared" cannot train {name}, whose gradient is sparse: make its '
                'Embedding with sparse=False, or train with storage="replicated"'
            )
    if parallel.replicas == 1:
        return GradientReducer(named, parallel.group, modules=modules), None
    for name, parameter in named:
        # Frozen parameters are held and not stepped, so they may have any dtype.
        dtype = parameter.dtype if parameter.requires_grad else torch.float32
        if native_backend(parameter.device, dtype, parallel.group) is None:
            raise LayoutError(
                f'storage="shared" needs the backend "lockstep", whose ranks are on one host, and '
                f"on the CPU parameters that are floating or frozen; {name} ({parameter.dtype} on "
                f'{parameter.device}) is not served by it here: train with storage="replicated"'
            )
        _require_plain_layout(name, parameter)
    parameters = [parameter for _, parameter in named]
    numels, dtypes = [each.numel() for each in parameters], [each.dtype for each in parameters]
    shards = Shards(numels, dtypes, parallel.replicas, BUCKET_BYTES)
    shards.cover([n for n, each in enumerate(parameters) if each.requires_grad])
    gradients = GradientReducer(named, parallel.group, shards, modules)
    with torch.no_grad():
        sharded = ShardedOptimizer(optimizer, parameters, gradients, shards, parallel.group)
    return gradients, sharded


def _require_plain_layout(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose strides or alignment would change in shared memory.

    Kernels choose their path by both, so its results could have other bits there.
    """
    dense = is_dense(parameter)
    if dense and parameter.data_ptr() % ALIGNMENT == 0:
        return
    how = "does not begin on a 64-byte boundary" if dense else "has gaps between its elements"
    raise LayoutError(
        f"{name} {how}, because it is a view of another tensor; in shared memory it would lie "
        f"otherwise, which may change the bits: make it a tensor of its own with "
        f'torch.nn.Parameter({name}.detach().clone()), or train with storage="replicated"'
    )
