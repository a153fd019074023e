"""The shared optimizer: steps this rank's pieces of parameters that all ranks share.

    the user's optimizer     params = [w, b]            as the factory made it: its groups,
                             params = [w[0:131072], ...]   options and schedule stay
    a step                   .grad = this rank's slices
                             optimizer.step(), in place
    its state                once per host, in shared memory, visible to every rank
    the script changes it    each rank its pieces; published before the state is read

Since the state is in shared memory, every rank has the whole state dict without an exchange. It is
in the optimizer's own format, and can be loaded with any storage and number of ranks. What a script
changes between steps, such as `optimizer.state.clear()`, is an exception: the ranks then exchange
once which entries there are, and wait until all of them have written.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_bytes
from lockstep.comm.memory_format import in_format_of, in_layout_of
from lockstep.comm.native_all_reduce import DTYPES
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.data_parallel.shared_pieces import SharedPiece, SharedPieces
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.norm import in_memory_order
from lockstep.training.optimizer_checks import make_twin, without_hooks
from lockstep.training.storage.shared_parameters import SharedParameters, allocate

__all__ = ["SharedOptimizer"]


@dataclass(frozen=True)
class _Entry:
    """The kind and dtype of an optimizer's state under one key.

    The kind is "elements" (one value per element of the parameter) or "scalar" (a tensor of dim 0).
    """

    kind: str
    dtype: torch.dtype


EDITS = "publishing the script's changes of the optimizer's state"
"""The activity of a rank that shares such changes, for messages."""


def _require_own_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse a state of whole parameters, which the trainer loads into the places of the pieces."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if state["state"] or sizes != [len(group["params"]) for group in optimizer.param_groups]:
        raise LayoutError(
            'with storage="shared" trainer.optimizer has only this rank\'s pieces of the '
            "parameters: load a state with trainer.load_state_dict({**trainer.state_dict(), "
            '"optimizer": state}) on every rank'
        )


# It has many attributes: the pieces, their places in shared memory and the optimizer's groups are
# extended together whenever parameters become trainable.
class SharedOptimizer:
    """An optimizer that steps this rank's pieces of parameters that all ranks share.

    Construct it on every rank, before the scheduler. The parameters in the groups of `optimizer`
    are replaced by this rank's pieces. Raises LayoutError for an optimizer that cannot update
    slices of parameters.

    Attributes:
        shared: The parameters, in memory that all ranks share.
        was_loaded: Whether `loading` was entered since the last step.
        stepped: The numbers of the parameters for which the optimizer has state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        gradients: GradientReducer,
        pieces: SharedPieces,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._gradients = gradients
        self._planned = pieces
        self._group = group
        self._rank = dist.get_rank(group)
        number: dict[torch.Tensor, int] = {parameter: n for n, parameter in enumerate(parameters)}
        self._groups = [
            [number[parameter] for parameter in g["params"]] for g in optimizer.param_groups
        ]
        self._group_of = {n: g for g, numbers in enumerate(self._groups) for n in numbers}
        made = {number[parameter]: dict(state) for parameter, state in optimizer.state.items()}
        self._entries = [self._probe_state(g, made) for g in range(len(self._groups))]
        optimizer.state.clear()
        optimizer.register_load_state_dict_pre_hook(_require_own_state)
        for options in optimizer.param_groups:
            options["params"] = []
        self.shared = SharedParameters(self._parameters, group)
        self._homes: dict[tuple[int, str], torch.Tensor] = {}  # by parameter and key of its state
        self._pieces: dict[SharedPiece, nn.Parameter] = {}  # those of this rank
        self._places: dict[SharedPiece, dict[str, torch.Tensor]] = {}  # their parts of _homes
        self._witnesses: dict[int, nn.Parameter] = {}  # by group, where this rank has no piece
        self._missing: dict[
            int, set[str]
        ] = {}  # the keys that the script has deleted, by parameter
        self.was_loaded = False
        self._known = 0  # the number of pieces, of all ranks, that have a place
        self._kept = made  # the states of parameters without pieces
        self.stepped = {*made}
        self._seen: list[Any] = []  # what the state was after the last write of this class
        self._extend()

    # --- a step --------------------------------------------------------------------------------

    @property
    def is_committed(self) -> bool:
        """Whether the last step was committed."""
        return self.shared.is_committed

    @is_committed.setter
    def is_committed(self, value: bool) -> None:
        self.shared.is_committed = value

    def local_gradients(self) -> list[torch.Tensor]:
        """Return this rank's slices of the gradients: whole blocks, except at a tensor's end."""
        sums = self._gradients.sums
        return [
            sums[piece.index][piece.start : piece.stop]
            for piece in self._planned.pieces
            if piece.rank == self._rank and piece.index in sums
        ]

    def step(self, about: str) -> None:
        """Step every parameter that has a gradient sum, on all ranks or on none.

        A collective call. Raises WorkError on every rank if the optimizer raised on one.
        """
        if self._known < len(self._planned.pieces):
            self._extend()
        with self.shared.writing(about):
            self._step_pieces(self._gradients.sums)
        self.stepped |= {*self._gradients.sums}
        for index in self._gradients.sums:
            self._missing.pop(index, None)
        self._note_state()

    @torch.no_grad()
    def _step_pieces(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Step this rank's pieces of the parameters, in place."""
        stepping = {piece: own for piece, own in self._pieces.items() if piece.index in sums}
        for piece, parameter in stepping.items():
            parameter.grad = sums[piece.index][piece.start : piece.stop]
        try:
            self._optimizer.step()
        finally:
            for parameter in stepping.values():
                parameter.grad = None
        for piece, parameter in stepping.items():
            self._store_state(piece, self._optimizer.state[parameter])

    # --- the places of pieces and their state ----------------------------------------------------

    def _probe_state(
        self, group: int, made: Mapping[int, dict[str, Any]]
    ) -> dict[torch.dtype, dict[str, _Entry]]:
        """Return the state entries that the optimizer makes for a group's parameters, by dtype."""
        entries: dict[torch.dtype, dict[str, _Entry]] = {}
        for index in sorted(self._groups[group], key=lambda n: not self._parameters[n].numel()):
            parameter = self._parameters[index]
            if parameter.dtype in entries or parameter.dtype not in DTYPES:
                continue
            probe = nn.Parameter(in_memory_order(parameter.detach())[:3].clone())
            probe.grad = torch.zeros_like(probe)
            state: dict[Any, dict[str, Any]] = defaultdict(dict)
            for key, value in made.get(index, {}).items():
                # Cloned, so that the step on the probe does not change the real state.
                whole = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                part = in_memory_order(value)[:3].clone() if whole else copy.deepcopy(value)
                state[probe][key] = part
            options = {**self._optimizer.param_groups[group], "params": [probe]}
            with without_hooks():
                make_twin(self._optimizer, [options], state).step()
            entries[parameter.dtype] = {
                key: self._describe_entry(key, value, probe) for key, value in state[probe].items()
            }
        return entries

    def _describe_entry(self, key: str, value: Any, probe: torch.Tensor) -> _Entry:
        if isinstance(value, torch.Tensor) and value.shape == probe.shape:
            return _Entry("elements", value.dtype)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return _Entry("scalar", value.dtype)
        raise LayoutError(
            f"{type(self._optimizer).__name__} keeps {key!r} for each parameter, which is neither "
            "a tensor with one value per element nor one with a single value, so it cannot update "
            'slices of parameters: keep such tensors, or train with storage="replicated"'
        )

    def _extend(self) -> None:
        """Make parameters for the new pieces, and places in shared memory for their state.

        A collective call. State that was kept for them is dropped only after all ranks have written
        their pieces of it to the places, so that none is lost if a rank is killed before.
        """
        new = self._planned.pieces[self._known :]
        self._known = len(self._planned.pieces)
        of_parameter: dict[int, list[SharedPiece]] = {}
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
        for pieces in of_parameter.values():
            for number, piece in enumerate(pieces):
                if piece.rank == self._rank:
                    self._add_piece(piece, number)
        written = {n: kept for n, kept in self._kept.items() if n in self._planned.covered}
        self._write_state(written)
        self._add_witnesses()
        self._note_state()
        if written:
            dist.barrier(self._group)
        for index in written:
            del self._kept[index]

    def _get_entries(self, index: int) -> dict[str, _Entry]:
        if index not in self._group_of:  # not in the user's optimizer
            return {}
        return self._entries[self._group_of[index]][self._parameters[index].dtype]

    def _add_piece(self, piece: SharedPiece, number: int) -> None:
        """Give the optimizer a piece of this rank; `number` is its place among those of scalars."""
        self._places[piece] = {
            key: self._homes[piece.index, key][piece.start : piece.stop]
            if entry.kind == "elements"
            else self._homes[piece.index, key][number]
            for key, entry in self._get_entries(piece.index).items()
        }
        if piece.index in self._group_of:
            now = self.shared.vectors[piece.index][piece.start : piece.stop]
            self._pieces[piece] = nn.Parameter(now)
            group = self._optimizer.param_groups[self._group_of[piece.index]]
            group["params"].append(self._pieces[piece])

    def _add_witnesses(self) -> None:
        """Give this rank an empty piece of each group of which it has none.

        A script that changes the state of a group then changes it on every rank, so all of them
        know that they have to publish it.
        """
        own = {self._group_of[piece.index] for piece in self._pieces}
        for piece in self._planned.pieces:
            group = self._group_of.get(piece.index)
            if group is not None and group not in own and group not in self._witnesses:
                witness = nn.Parameter(self.shared.vectors[piece.index][:0])
                self._witnesses[group] = witness
                self._optimizer.param_groups[group]["params"].append(witness)

    def _note_state(self) -> None:
        """Give the empty pieces the entries of others in their group, and note what there is."""
        for group, witness in self._witnesses.items():
            index = next((n for n in self._groups[group] if n in self.stepped), None)
            if index is not None and witness not in self._optimizer.state:
                self._optimizer.state[witness] = {
                    key: torch.zeros(0 if entry.kind == "elements" else (), dtype=entry.dtype)
                    for key, entry in self._get_entries(index).items()
                }
        self._seen = self._describe_state()

    def _store_state(self, piece: SharedPiece, state: dict[str, Any]) -> None:
        """Move the optimizer's state for a piece to its memory, unless it is already there."""
        for key, value in state.items():
            stored = self._places[piece].get(key)
            if stored is None:
                raise LayoutError(
                    f"{type(self._optimizer).__name__} added {key!r} to its state after its "
                    'first step, which cannot be shared: train with storage="replicated"'
                )
            if value is stored:
                continue
            if isinstance(value, torch.Tensor):
                stored.copy_(value)
                state[key] = stored
            else:
                raise LayoutError(
                    f"{type(self._optimizer).__name__} keeps {key!r} as {value!r}, and kept a "
                    "tensor in its first step, which cannot be shared: always keep a tensor, or "
                    'train with storage="replicated"'
                )

    # --- what the script changes -----------------------------------------------------------------

    def _describe_state(self) -> list[Any]:
        """Return values that change if the script assigns, deletes or writes an entry."""
        state = self._optimizer.state
        return [
            [(key, id(value), getattr(value, "_version", 0)) for key, value in state[own].items()]
            if own in state
            else None
            for own in (*self._pieces.values(), *self._witnesses.values())
        ]

    @property
    def has_edits(self) -> bool:
        """Whether the script has changed the state since it was last written or published."""
        return self._describe_state() != self._seen

    def publish_edits(self) -> None:
        """Make the script's changes of the state visible to all ranks; a collective call if any.

        Raises:
            LayoutError: An entry cannot be shared; on every rank.
            UsageError: An entry differs between pieces; on every rank.
        """
        if not self.has_edits:
            return
        keys: dict[str, list[str]] = {}
        refusal = ""
        is_of_layout = False
        try:
            keys = self._store_edits()
        except UsageError as error:
            refusal = f"rank {self._rank}: {error}"
            is_of_layout = isinstance(error, LayoutError)
        message = json.dumps([keys, refusal, is_of_layout]).encode()
        # The topic is the same at every call: one rank may read the state alone, before the step in
        # which the others publish it. The exchange also waits for the writes of all ranks.
        messages = map(json.loads, all_gather_bytes(message, EDITS, self._group))
        by_parameter: dict[int, list[str]] = {}
        failure: UsageError | None = None
        for of_rank, refusal, is_of_layout in messages:
            if refusal and failure is None:
                failure = LayoutError(refusal) if is_of_layout else UsageError(refusal)
            for number, present in of_rank.items():
                if by_parameter.setdefault(int(number), present) != present:
                    failure = failure or self._refuse_part(int(number))
        if failure is not None:
            raise failure
        for index, present in by_parameter.items():
            self._missing[index] = {*self._get_entries(index)} - {*present}
        self.stepped = {index for index, present in by_parameter.items() if present}
        # A script that clears the whole state also means what no piece shows, of frozen parameters.
        self._kept = self._kept if self.stepped else {}
        self.stepped |= {*self._kept}
        self._note_state()

    def _store_edits(self) -> dict[str, list[str]]:
        """Move what the script has assigned to its memory; return the keys of each parameter."""
        keys: dict[str, list[str]] = {}
        for piece, parameter in self._pieces.items():
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                stored = self._places[piece].get(key)
                if stored is None or not isinstance(value, torch.Tensor):
                    continue  # refused below
                if (value.shape, value.dtype) != (stored.shape, stored.dtype):
                    raise LayoutError(
                        f"the state {key!r} has the shape {tuple(value.shape)} and the dtype "
                        f"{value.dtype}, and had {tuple(stored.shape)} and {stored.dtype}, which "
                        'cannot change with storage="shared"'
                    )
            with torch.no_grad():
                self._store_state(piece, state)
            present = sorted(state)
            if keys.setdefault(str(piece.index), present) != present:
                raise self._refuse_part(piece.index)
        return keys

    def _refuse_part(self, index: int) -> UsageError:
        return UsageError(
            "the script has changed the optimizer's state of a part of the parameter of shape "
            f"{tuple(self._parameters[index].shape)}, of which ranks have pieces: change the state "
            "of all parameters of a group alike, on every rank"
        )

    # --- the whole state -------------------------------------------------------------------------

    def _read_state(self, index: int) -> dict[str, Any]:
        """Return the state of a whole parameter, in the optimizer's format."""
        state: dict[str, Any] = dict(self._kept.get(index, {}))
        missing = self._missing.get(index, set())
        for key, entry in self._get_entries(index).items() if not state else ():
            if key in missing:
                continue
            home = self._homes[index, key]
            if entry.kind == "elements":
                state[key] = in_layout_of(home, self._parameters[index])
            else:
                state[key] = home[0]
        return state

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The whole parameters in the order in which the state dict numbers them."""
        return [self._parameters[index] for numbers in self._groups for index in numbers]

    def find_whole(self, own: torch.Tensor) -> nn.Parameter:
        """Return the parameter of which the optimizer steps a piece."""
        (index,) = {piece.index for piece, parameter in self._pieces.items() if parameter is own}
        return self._parameters[index]

    def states(self) -> dict[Any, dict[str, Any]]:
        """Return the whole state of each parameter, as the attribute `state` of an optimizer."""
        return {self._parameters[index]: self._read_state(index) for index in self.stepped}

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer, as if it had stepped the whole parameters."""
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

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Return the context in which a rank may write any of the parameters and the state."""
        with self.shared.loading():
            yield
            self.was_loaded = True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a whole state dict; raises the optimizer's own errors if it does not fit."""
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
        count = itertools.count()
        packed = [
            {**group, "params": [next(count) for _ in here["params"]]}
            for group, here in zip(state["param_groups"], self._optimizer.param_groups, strict=True)
        ]
        self._optimizer.load_state_dict({"state": {}, "param_groups": packed})
        self._optimizer.state.clear()
        self.stepped = set()
        self._kept = {}
        self._missing.clear()
        self._write_state(whole)
        self._note_state()

    @torch.no_grad()
    def _write_state(self, whole: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the whole state of some parameters to its places; each rank writes its pieces."""
        self.stepped |= {*whole}
        covered = {*self._planned.covered}
        self._kept |= {n: dict(state) for n, state in whole.items() if n not in covered}
        for piece, parameter in self._pieces.items():
            model = self._parameters[piece.index]
            for key, value in whole.get(piece.index, {}).items():
                stored = self._places[piece][key]
                entry = self._get_entries(piece.index)[key]
                if entry.kind == "elements":
                    vector = in_memory_order(in_format_of(value, model))
                    stored.copy_(vector[piece.start : piece.stop])
                else:
                    stored.fill_(value)
                self._optimizer.state[parameter][key] = stored
