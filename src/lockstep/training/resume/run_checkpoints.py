"""The checkpoints of a run: their folder, their content, and when the next one is due.

    every rank            the tensors that it owns        ──┐ one state: a dict of plain values
    rank 0 also           positions, logs, generators,    ──┘ and tensors, encoded without pickle
                          registered objects, settings

A state is saved only where a script can be continued: between two batches of its outermost loop,
or after a call outside of any loop over batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.folder import (
    find_checkpoints,
    find_newest_valid,
    locate_checkpoint,
    read_checkpoint,
    refusing_misfits,
    remove_incomplete,
    set_aside_newer,
    verify,
)
from lockstep.checkpoint.save_schedule import CheckpointConfig, CheckpointSchedule, Stateful
from lockstep.checkpoint.shards import Rows
from lockstep.checkpoint.stop_request import StopRequest
from lockstep.checkpoint.writer import CheckpointWriter, SavedCheckpoint
from lockstep.checksum import checksum
from lockstep.comm.collectives import broadcast_bytes
from lockstep.elastic.membership import Membership, exchange, run_transaction
from lockstep.files import make_folder
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.run_folder import hold_run, is_resuming, wait_until_free
from lockstep.messages import log
from lockstep.model.generator_states import global_states, set_global_states
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.history import History
from lockstep.training.run_record import RunRecord
from lockstep.training.services import Services

__all__ = ["RunCheckpoints", "collect_objects", "restore_objects"]

_latest: RunCheckpoints | None = None


# It has many methods: all ranks decide together which folder is used, when a checkpoint is saved
# and which one is loaded, and a rank that joins an elastic run adopts all of it at once.
class RunCheckpoints:
    """The checkpoints of one trainer.

    Args:
        config: The settings of the checkpoints.
        parallel: The layout.
        run: The record of the run, which on rank 0 decides the folder.
        member: This process as a member of an elastic run; None outside of one.

    Attributes:
        is_open: Whether the folder is decided. If the named folder has an earlier run, it is only
            decided when the trainer is resumed or begins.

    Raises:
        UsageError: Another process uses the folder, or a registered handle of `ls.exact` has no
            optimizers.
        FileError: The folder cannot be created.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        parallel: ParallelContext,
        run: RunRecord,
        member: Membership | None,
    ) -> None:
        for name, value in config.stateful.items():
            if isinstance(value, Services) and not value.engine.options.has_optimizers:
                raise UsageError(
                    f"stateful[{name!r}] is a handle of ls.exact without optimizers, whose states "
                    "would be missing in checkpoints: write ls.exact(model, optimizer)"
                )
        global _latest
        if _latest is not None:
            _latest.close()
        _latest = self
        self._parallel = parallel
        self._config = config
        self._run = run
        self._has_name = False
        self.is_open = False
        self._is_selected = False
        self._is_successor = False  # whether this rank replaced a rank 0 that was lost
        self.run_folder = Path()
        self.folder = self.run_folder
        self.writer = CheckpointWriter(self.folder, config.keep)
        self.stop = StopRequest()
        self.is_stopping = False
        """Whether a rank was asked to stop; true once all ranks know of it."""
        self._schedule = CheckpointSchedule(config, time.monotonic())
        self._due_since: int | None = None
        self._told = set[str]()  # names of objects that differ between ranks
        if member is not None and member.is_waiting:
            pass  # the folder is decided; this process receives it when it joins
        elif is_resuming():
            self._open(run.select_launch)
        else:
            self._open(lambda: None if run.has_earlier_run else run.begin())
        self.stop.listen()

    def begin(self) -> None:
        """Begin a new run, unless the folder is decided already; called on every rank."""
        if not self.is_open:
            self._open(self._run.begin)

    @property
    def plans(self) -> tuple[int | None, bool]:
        """The plans for the next checkpoint, which are equal on all ranks."""
        return self._due_since, self.is_stopping

    def adopt(self, folder: Path, name: str, plans: tuple[int | None, bool]) -> None:
        """Use the folder and the plans of the other ranks of an elastic run."""
        self._due_since, self.is_stopping = plans
        self.is_open = True
        self.run_folder = folder
        self.folder = folder / name
        self.writer.folder = self.folder
        hold_run(folder)

    def promote(self) -> None:
        """Save the checkpoints from now on, instead of the lost rank 0."""
        self._is_successor = True
        remove_incomplete(self.folder)

    def select(self, place: str | Path | None) -> None:
        """Use the folder of the run that `place` belongs to; called on every rank.

        Raises:
            UsageError: There is no run at `place`, or another process uses it.
        """
        if not self.is_open:
            self._open(lambda: self._run.select_resumed(place))
            self._is_selected = True

    def deselect(self) -> None:
        """Undo `select`, because the run cannot be continued; called on every rank."""
        if self._is_selected:
            self.is_open = False
            self._is_selected = False
            self._run.deselect()

    def open_loggers(self) -> None:
        """Open the loggers of a run that continues; called on every rank."""

        def open_resumed() -> str:
            self._run.open_resumed()
            return ""

        self._tell_all(open_resumed)
        self._is_selected = False

    def _open(self, decide: Callable[[], None]) -> None:
        """Decide the folder on rank 0, and use it on every rank."""

        def prepare() -> str:
            run = self._run
            decide()
            if run.path is None:
                return json.dumps([run.has_name, "", ""])
            try:
                make_folder(run.path)
            except OSError as error:
                raise FileError(f"{run.path} cannot be created ({error.strerror})") from None
            wait_until_free(run.path)
            return json.dumps([run.has_name, str(run.path), run.checkpoints])

        self._has_name, path, name = json.loads(self._tell_all(prepare))
        if not path:
            return
        self.is_open = True
        self.run_folder = Path(path)
        self.folder = self.run_folder / name
        self.writer.folder = self.folder
        if self._parallel.rank == 0:
            remove_incomplete(self.folder)
        hold_run(self.run_folder)

    @property
    def stateful(self) -> Mapping[str, Stateful]:
        """The registered objects by name."""
        return self._config.stateful

    # --- when -----------------------------------------------------------------------------

    def is_due_after(self, steps: int) -> bool:
        """Return whether this rank is rank 0 and wants a checkpoint after `steps` steps.

        Raises:
            UsageError: Another trainer with checkpoints was made later; no checkpoint would
                contain both.
        """
        if _latest is not self:
            raise UsageError(
                "two trainers with checkpoint= take turns, and no checkpoint would contain both: "
                "pass checkpoint= to one of them, and register the other there: "
                "CheckpointConfig(stateful={'other': trainer})"
            )
        if self._parallel.rank != 0 or self.writer.is_busy:
            return False
        latest = self.writer.latest
        cost = latest.seconds if latest is not None else 0.0
        return self._schedule.is_due(steps, time.monotonic(), cost)

    def note_step(self, is_due: bool, stop: str, steps: int) -> None:
        """Note the requests that the ranks exchanged in a step: to save a checkpoint, to stop."""
        self.is_stopping |= bool(stop)
        if is_due and self._due_since is None:
            self._due_since = steps
        if self._due_since is not None and steps - self._due_since == 200:
            log(
                f"no checkpoint could be saved since step {self._due_since}: a loop over "
                "batches(...) was begun and has not asked for its next batch; checkpoints "
                "are saved between its batches"
            )

    def agree_to_stop(self) -> None:
        """Exchange between the ranks, outside of steps, whether one of them was asked to stop."""
        self.is_stopping |= self._agree(self.stop.signal, "looking for a request to stop")

    def agree_to_log_end(self, is_wanted: bool) -> bool:
        """Return whether a rank has changed its state since the last call of the script."""
        return self._agree("changed" if is_wanted else "", "ending the run")

    def _agree(self, said: str, about: str) -> bool:
        return any(exchange(said.encode, about, self._parallel.group))

    @property
    def is_wanted(self) -> bool:
        """Whether to save a checkpoint at the next place where the script can be continued."""
        return self._due_since is not None or self.is_stopping

    def require_encodable(self, local: Mapping[str, Any]) -> None:
        """Raise UsageError if the state cannot be saved; called before any training.

        Args:
            local: This rank's state of the model and the optimizer.
        """
        stateful = collect_objects(self.stateful)
        for name, value in {**local, "stateful": stateful}.items():
            encode(value, {}, name)

    # --- saving -----------------------------------------------------------------------------

    def save(
        self,
        local: Mapping[str, Any],
        common: Mapping[str, Any],
        steps: int,
        attempt: int,
        is_sharded: bool,
        begun: float | None = None,
    ) -> None:
        """Copy the state and begin to write it; called on every rank.

        Args:
            local: This rank's state of the model and the optimizer.
            common: The state that is equal on all ranks, saved by rank 0.
            steps: The number of finished steps.
            attempt: A number that no other checkpoint of the trainer has.
            is_sharded: Whether the ranks of a replica have different parts of the state.
            begun: The time of `time.perf_counter` at which training began to wait.
        """
        generators = global_states(self._parallel.device)
        objects = collect_objects(self.stateful)
        # A trainer has measured times in its state, and compares the rest by itself.
        compared = generators | {
            f"stateful[{name!r}]": value
            for name, value in objects.items()
            if not _is_trainer(self.stateful[name])
        }
        hashes = {name: _hash(value) for name, value in compared.items()}
        about = f"saving a checkpoint after step {steps}"
        group = self._parallel.group
        messages = exchange(lambda: json.dumps(hashes).encode(), about, group)
        everyone = [json.loads(message) for message in messages]
        differing = {name for name in hashes if len({hashes[name] for hashes in everyone}) > 1}
        rank = self._parallel.rank  # may have changed during the exchange
        self._due_since = None
        self._schedule.saved(steps, time.monotonic())
        has_shards = self._parallel.is_sharded
        if has_shards and rank not in self._parallel.hosts[0]:  # other hosts have the same shards
            return
        if not has_shards and (self._parallel.replica != 0 or not (is_sharded or rank == 0)):
            return
        state = dict(local)
        if rank == 0:
            # A generator whose state differs between ranks has no state that all could restore.
            state["generators"] = {
                name: value for name, value in generators.items() if name not in differing
            }
            state |= {"stateful": objects, **common}
            for name in sorted(differing - generators.keys() - self._told):
                self._told.add(name)
                log(
                    f"{name} has a different state on another rank than on rank 0: a checkpoint "
                    "holds rank 0's, for every rank"
                )
        part = self._parallel.part if has_shards or is_sharded else (0, 1)
        self.writer.save(state, steps, attempt, part, begun)

    def wait(self, steps: int) -> tuple[bool, SavedCheckpoint | None]:
        """Wait until the latest checkpoint is complete on every rank.

        Returns:
            Whether the checkpoint exists, which it does not if the rank that wrote it was lost;
            and the checkpoint, on the ranks that wrote it.

        Raises:
            FileError: A rank could not write it. Raised on every rank.
        """
        self.writer.wait()

        def describe() -> bytes:
            saved = self._find_saved(steps)
            failed = saved is not None and saved.failure
            failure = f"{saved.path}: {saved.failure}" if saved is not None and failed else ""
            is_there = saved is not None or not self._is_successor
            return json.dumps([failure, is_there]).encode()

        about = f"waiting for the checkpoint of step {steps}"
        said = [json.loads(message) for message in exchange(describe, about, self._parallel.group)]
        for rank, (failure, _) in enumerate(said):
            if failure:
                raise FileError(
                    f"rank {rank}: the checkpoint after step {steps} could not be written to "
                    f"{failure}"
                )
        return bool(said[0][1]), self._find_saved(steps)

    def _find_saved(self, steps: int) -> SavedCheckpoint | None:
        saved = self.writer.latest
        return saved if saved is not None and saved.step == steps else None

    def close(self) -> None:
        """Wait for the writer, and restore the signal's handler."""
        self.writer.wait()
        self.stop.close()

    def report(self, history: History, is_last: bool = False) -> None:
        """Write the completed checkpoints to the record, and warn of those that failed.

        Args:
            history: Writes the record.
            is_last: Whether the training has ended.
        """
        for saved in self.writer.take_saved():
            message = ""
            if saved.failure:
                goes_on = "training continues"
                if is_last:
                    goes_on = "the script continues, and its process exits with status 1"
                message = (
                    f"no checkpoint after step {saved.step} ({saved.failure}); {goes_on}, and the "
                    f"previous one is kept in {saved.path.parent}"
                )
                if not find_checkpoints(saved.path.parent):
                    message = (
                        f"no checkpoint after step {saved.step} ({saved.failure}); {goes_on}, and "
                        "there is no other one"
                    )
            elif saved.rewritten:
                message = (
                    f"checkpoint after step {saved.step}: {saved.rewritten} had other bytes on the "
                    "disk than were written, and was written again: check the disk and the memory "
                    "of this host"
                )
            if message:
                log(f"rank {self._parallel.rank}: {message}")
                history.write("warning", rank=self._parallel.rank, message=message)
            if not saved.failure and self._parallel.rank == 0:
                history.write(
                    "checkpoint",
                    step=saved.step,
                    stall=saved.stall,
                    seconds=saved.seconds,
                    bytes=saved.size,
                    path=str(saved.path),
                    digest=saved.digest,
                )

    # --- loading ----------------------------------------------------------------------------

    def find(self, place: str | Path | None) -> Path | None:
        """Return the checkpoint to resume from, the same on every rank.

        Args:
            place: The path of a checkpoint or of a run; None: this run.

        Returns:
            The checkpoint's folder; None if the run has not saved one.

        Raises:
            UsageError: There is no run at `place`.
            FileError: Every checkpoint of the run is damaged.
        """
        path = self._tell_all(lambda: self._find(place))
        return Path(path) if path else None

    def find_newest(self) -> Path | None:
        """Return the newest checkpoint of this run, the same on every rank; None without one.

        Raises:
            FileError: Every checkpoint of the run is damaged.
        """
        path = self._tell_all(lambda: self._find(None) if self._has_name else "")
        return Path(path) if path else None

    def _find(self, place: str | Path | None) -> str:
        if place is None and not self._has_name:
            raise UsageError(
                "resume() needs to know which run: resume('runs/NAME'), or record the run in a "
                "folder that stays the same, loggers='runs/NAME'"
            )
        path, folder = (None, self.folder) if place is None else locate_checkpoint(place)
        if path is not None:
            if problem := verify(path):
                raise FileError(f"the checkpoint {path} is damaged: {problem}")
            return str(path.absolute())
        newest, problems = find_newest_valid(folder)
        for problem in problems:
            log(f"{problem}; the one before it is used")
        if newest is None and problems:
            raise FileError(
                f"every checkpoint in {folder} is damaged; the first one: {problems[0]}"
            )
        if newest is None and place is not None:
            raise UsageError(f"there is no checkpoint in {folder}")
        return str(newest.absolute()) if newest is not None else ""

    def read(self, path: Path, rows: Rows) -> dict[str, Any]:
        """Return the state of a checkpoint, with these rows of sharded parameters.

        Raises:
            FileError: This rank cannot read it.
        """
        if not path.exists():
            raise FileError(
                f"rank {self._parallel.rank} does not see the checkpoint {path}: ranks on several "
                "hosts need a folder that all of them share"
            )
        return read_checkpoint(path, rows)

    def set_aside_newer(self, used: Path, steps: int) -> None:
        """Rename the checkpoints of this run that are newer than the one it continues from."""
        if self._parallel.rank != 0:
            return
        renamed = set_aside_newer(self.folder, used, steps)
        if renamed:
            log(
                f"the run continues from before {len(renamed)} of its checkpoints: renamed to "
                f"{', '.join(path.name for path in renamed)}; remove them if you do not need them"
            )

    def note_restored(self, steps: int) -> None:
        """Note that the state of a checkpoint was restored, from which the next one is counted."""
        self._schedule.saved(steps, time.monotonic())

    def _tell_all(self, function: Callable[[], str]) -> str:
        """Call a function on rank 0, and return its result or raise its error on every rank."""
        failure: FileError | UsageError | None = None

        def decide() -> bytes:
            nonlocal failure
            failure = None
            if self._parallel.rank != 0:
                return b""
            try:
                said = {"failure": "", "text": function()}
            except (FileError, UsageError) as error:
                failure = error
                is_file = isinstance(error, FileError)
                said = {"failure": "file" if is_file else "usage", "text": str(error)}
            return json.dumps(said).encode()

        about = "looking for checkpoints"
        group = self._parallel.group
        message = run_transaction(
            lambda: broadcast_bytes(decide(), about, group), lambda said: said
        )
        if failure is not None:
            raise failure
        said = json.loads(message)
        text: str = said["text"]
        if said["failure"]:
            raise (FileError if said["failure"] == "file" else UsageError)(text)
        return text


def _is_trainer(registered: Stateful) -> bool:
    return isinstance(registered, Services)


def collect_objects(stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the states of the registered objects; that of a trainer is not copied."""
    for value in stateful.values():
        if isinstance(value, Services):
            value.engine.settle()  # the step of a loop, which is counted at its next call
    sources = {
        name: value.engine.state if isinstance(value, Services) else value
        for name, value in stateful.items()
    }
    return {name: source.state_dict() for name, source in sources.items()}


def restore_objects(
    stateful: Mapping[str, Stateful], state: Mapping[str, Any], device: torch.device
) -> None:
    """Restore the registered objects and the generators from a checkpoint."""
    for name, registered in stateful.items():
        if name in state["stateful"]:
            with refusing_misfits(f"the state of stateful[{name!r}] in the checkpoint"):
                registered.load_state_dict(state["stateful"][name])
        elif dist.get_rank() == 0:
            log(
                f"the checkpoint has no state of stateful[{name!r}]; it starts from its initial "
                "state"
            )
    with refusing_misfits("the state of the generators in the checkpoint"):
        set_global_states(state["generators"], device)


def _hash(value: Any) -> str:
    tensors: dict[str, Any] = {}
    hasher = xxhash.xxh3_64(json.dumps(encode(value, tensors, "")).encode())
    for tensor in tensors.values():
        hasher.update(checksum(tensor).to_bytes(8, "little"))
    return hasher.hexdigest()
