"""The checkpoints of a run: their folder, their content, and when the next one is due.

    every rank            the tensors that it owns        ──┐ one state: a dict of plain values
    rank 0 also           positions, logs, generators,    ──┘ and tensors, encoded without pickle
                          registered objects, settings

A state is saved only where a script can be continued: between two batches of its outermost loop,
or after a call outside of any loop over batches.

A mirror is a checkpoint in shared memory, for the processes that replace those of an elastic run.
Only the newest mirror is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.folder import (
    MANIFEST,
    count_steps,
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
from lockstep.elastic.restart_source import find_mirror
from lockstep.files import make_folder
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.run_folder import hold_run, is_resuming, wait_until_free
from lockstep.messages import log
from lockstep.model.generator_states import global_states, set_global_states
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.history import History
from lockstep.training.run_record import RunRecord

__all__ = ["RunCheckpoints", "collect_objects", "restore_objects"]

_latest: RunCheckpoints | None = None


class RunCheckpoints:
    """The checkpoints of one trainer.

    It has 33 methods, because all ranks decide together which folder is used, when a checkpoint is
    saved and which one is loaded, and a rank that joins an elastic run adopts all of it at once.

    Args:
        config: The settings of the checkpoints.
        parallel: The layout.
        run: The record of the run, which on rank 0 decides the folder.
        member: This process as a member of an elastic run; None outside of one.

    Attributes:
        is_open: Whether the folder is decided. If the named folder has an earlier run, it is only
            decided when the trainer is resumed or begins.

    Raises:
        UsageError: Another process uses the folder.
        FileError: The folder cannot be created.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        parallel: ParallelContext,
        run: RunRecord,
        member: Membership | None,
    ) -> None:
        global _latest
        if _latest is not None:
            _latest.close()
        _latest = self
        self._parallel, self._config, self._run = parallel, config, run
        self._has_name = False
        self.is_open = self._is_selected = False
        self._is_successor = False  # whether this rank replaced a rank 0 that was lost
        self.run_folder = self.folder = Path()
        self.writer = CheckpointWriter(self.folder, config.keep)
        self.mirrors: CheckpointWriter | None = None
        if config.mirror_every_steps is not None and (folder := find_mirror()) is not None:
            self.mirrors = CheckpointWriter(folder, keep=1, has_digests=False)
        self._mirrored = 0  # steps in the latest mirror
        self.is_mirror_wanted = False
        self.stop = StopRequest()
        self.is_stopping = False
        """Whether a rank was asked to stop; true once all ranks know of it."""
        self._schedule = CheckpointSchedule(config, time.monotonic())
        self._due_since: int | None = None
        self._told: set[str] = set()
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

    def collect_plans(self) -> tuple[int | None, bool, int, bool]:
        """Return the plans for the next checkpoints, which are equal on all ranks."""
        return self._due_since, self.is_stopping, self._mirrored, self.is_mirror_wanted

    def adopt(self, folder: Path, name: str, plans: tuple[int | None, bool, int, bool]) -> None:
        """Use the folder and the plans of the other ranks of an elastic run."""
        self._due_since, self.is_stopping, self._mirrored, self.is_mirror_wanted = plans
        self.is_open, self.run_folder = True, folder
        self.folder = self.writer.folder = folder / name
        if self.mirrors is not None:
            self.mirrors.folder /= name
        hold_run(folder)

    def promote(self) -> None:
        """Save the checkpoints from now on, instead of the lost rank 0."""
        self._is_successor = True
        for writer in self._writers:
            remove_incomplete(writer.folder)

    def collect_objects(self) -> dict[str, Any]:
        """Return the states of the registered objects."""
        return collect_objects(self._config.stateful)

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
            self.is_open = self._is_selected = False
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
        self.is_open, self.run_folder = True, Path(path)
        self.folder = self.writer.folder = self.run_folder / name
        if self.mirrors is not None:
            self.mirrors.folder /= name
        if self._parallel.rank == 0:
            for writer in self._writers:
                remove_incomplete(writer.folder)
        hold_run(self.run_folder)

    def require_free(self, path: Path) -> None:
        """Raise an error, on every rank, if no checkpoint can be saved at `path`.

        Raises:
            UsageError: Something other than a checkpoint is there.
            FileError: The parent folder does not exist.
        """

        def check() -> str:
            if not path.parent.is_dir():
                raise FileError(
                    f"save_checkpoint({str(path)!r}): the folder {path.parent} does not exist: "
                    "create it first"
                )
            if path.exists() and not (path / MANIFEST).is_file():
                raise UsageError(
                    f"save_checkpoint({str(path)!r}): this exists and is not a checkpoint; give "
                    "the name of a new folder"
                )
            remove_incomplete(path.parent, path.name)
            return ""

        self._tell_all(check)

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
        every = self._config.mirror_every_steps
        if self.mirrors is not None and every is not None:  # equal on all ranks
            self.is_mirror_wanted = steps // every > self._mirrored // every
        if is_due and self._due_since is None:
            self._due_since = steps
        if self._due_since is not None and steps - self._due_since == 200:
            log(
                f"no checkpoint could be saved since step {self._due_since}: a loop over "
                "trainer.batches(...) was begun and has not asked for its next batch; checkpoints "
                "are saved between its batches"
            )

    def agree_to_stop(self) -> None:
        """Exchange between the ranks, outside of steps, whether one of them was asked to stop."""
        said = exchange(
            lambda: self.stop.signal.encode(), "looking for a request to stop", self._parallel.group
        )
        self.is_stopping |= any(said)

    @property
    def is_wanted(self) -> bool:
        """Whether to save a checkpoint at the next place where the script can be continued."""
        return self._due_since is not None or self.is_stopping

    def require_encodable(self, local: Mapping[str, Any]) -> None:
        """Raise UsageError if the state cannot be saved; called before any training.

        Args:
            local: This rank's state of the model and the optimizer.
        """
        stateful = self.collect_objects()
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
        path: Path | None = None,
        begun: float | None = None,
        *,
        is_mirror: bool = False,
    ) -> None:
        """Copy the state and begin to write it; called on every rank.

        Args:
            local: This rank's state of the model and the optimizer.
            common: The state that is equal on all ranks, saved by rank 0.
            steps: The number of finished steps.
            attempt: A number that no other checkpoint of the trainer has.
            is_sharded: Whether the ranks of a replica have different parts of the state.
            path: The folder that `save_checkpoint` names; None: a new one in the run's folder.
            begun: The time of `time.perf_counter` at which training began to wait.
            is_mirror: Whether to write a mirror, to shared memory.
        """
        group, stateful = self._parallel.group, self.collect_objects()
        writer = self.mirrors if is_mirror and self.mirrors is not None else self.writer
        generators = global_states(self._parallel.device)
        about = f"saving a checkpoint after step {steps}"
        hashes = {
            "generators": {name: _hash(value) for name, value in generators.items()},
            "stateful": {
                name: _hash(self._without_times(name, value), f"stateful/{name}")
                for name, value in stateful.items()
            },
            "is_busy": is_mirror and writer.is_busy,
        }
        said = [json.loads(message) for message in exchange(lambda: _pack(hashes), about, group)]
        rank = self._parallel.rank  # may have changed during the exchange
        if is_mirror and any(status["is_busy"] for status in said):
            return  # still writing the last mirror; tried again at the next safe point
        if is_mirror:
            self.is_mirror_wanted, self._mirrored = False, steps
        elif path is None:
            self._due_since = None
            self._schedule.saved(steps, time.monotonic())
        self._warn_of_different_objects([status["stateful"] for status in said])
        has_shards = self._parallel.is_interleaved
        if has_shards and rank not in self._parallel.hosts[0]:  # other hosts have the same shards
            return
        if not has_shards and (self._parallel.replica != 0 or not (is_sharded or rank == 0)):
            return
        state = dict(local)
        if rank == 0:
            # A generator whose state differs between ranks has no state that all could restore.
            state["generators"] = {
                name: value
                for name, value in generators.items()
                if len({status["generators"][name] for status in said}) == 1
            }
            state |= {"stateful": stateful, **common}
        part = self._parallel.part if has_shards or is_sharded else (0, 1)
        writer.save(state, steps, attempt, part, path, begun)

    @property
    def _writers(self) -> list[CheckpointWriter]:
        return [self.writer] if self.mirrors is None else [self.writer, self.mirrors]

    def abandon(self) -> None:
        """Abandon the checkpoint and the mirror that are being written."""
        for writer in self._writers:
            writer.abandon()

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
        """Wait for the writers, and restore the signal's handler."""
        for writer in self._writers:
            writer.wait()
        self.stop.close()

    def _without_times(self, name: str, state: Any) -> Any:
        """Return the part of a registered object's state that should be equal on all ranks.

        The history of a trainer contains measured times, and attributes may count the calls of a
        rank.
        """
        if not is_trainer(self._config.stateful[name]):
            return state
        private = ("history", "module_settings")
        return {key: value for key, value in state.items() if key not in private}

    def _warn_of_different_objects(self, said: Sequence[Mapping[str, str]]) -> None:
        for name, value in said[0].items():
            rank = next((r for r, hashes in enumerate(said) if hashes[name] != value), None)
            if rank is not None and name not in self._told and self._parallel.rank == 0:
                self._told.add(name)
                log(
                    f"stateful[{name!r}] has a different state on rank {rank} than on rank 0: a "
                    "checkpoint holds rank 0's, for every rank"
                )

    def report(self, history: History) -> None:
        """Write the completed checkpoints to the record, and warn of those that failed."""
        for saved in self.writer.take_saved():
            message = ""
            if saved.failure:
                message = (
                    f"no checkpoint after step {saved.step} ({saved.failure}); training continues, "
                    f"and the previous one is kept in {saved.path.parent}"
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
        return Path(path) if (path := self._tell_all(lambda: self._find(place))) else None

    def find_newest(self) -> Path | None:
        """Return the newest mirror or checkpoint of this run, the same on every rank.

        Returns:
            The folder of the mirror or checkpoint; None if there is none.

        Raises:
            FileError: Every checkpoint of the run is damaged, and there is no mirror.
        """

        def find() -> str:
            mirror = None if self.mirrors is None else find_newest_valid(self.mirrors.folder)[0]
            saved = next(iter(find_checkpoints(self.folder)), None) if self._has_name else None
            if mirror is not None and (saved is None or count_steps(saved) <= count_steps(mirror)):
                return str(mirror)
            return "" if saved is None else self._find(None)

        return Path(path) if (path := self._tell_all(find)) else None

    def _find(self, place: str | Path | None) -> str:
        if place is None and not self._has_name:
            raise UsageError(
                "trainer.resume() needs to know which run: trainer.resume('runs/NAME'), or give "
                "the trainer a folder that stays the same, loggers='runs/NAME'"
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

    def restore(self, state: Mapping[str, Any], steps: int) -> None:
        """Restore the registered objects and the generators."""
        restore_objects(self._config.stateful, state, self._parallel.device)
        self._schedule.saved(steps, time.monotonic())
        self._mirrored = steps

    def _tell_all(self, function: Callable[[], str]) -> str:
        """Call a function on rank 0, and return its result or raise its error on every rank."""
        failure: FileError | UsageError | None = None

        def decide() -> bytes:
            nonlocal failure
            failure = None
            if self._parallel.rank != 0:
                return b""
            try:
                return b"+" + function().encode()
            except (FileError, UsageError) as error:
                failure = error
                return type(error).__name__[0].encode() + str(error).encode()

        about, group = "looking for checkpoints", self._parallel.group
        message = run_transaction(
            lambda: broadcast_bytes(decide(), about, group), lambda said: said
        )
        if failure is not None:
            raise failure
        kind, text = message[:1], message[1:].decode()
        if kind != b"+":
            raise (FileError if kind == b"F" else UsageError)(text)
        return text


def is_trainer(value: object) -> bool:
    """Return whether a registered object is a trainer."""
    return hasattr(value, "_run")


def collect_objects(stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the states of the registered objects; that of a trainer is not copied."""
    sources = {
        name: vars(value)["_state"] if is_trainer(value) else value
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


def _hash(value: Any, path: str = "") -> str:
    tensors: dict[str, Any] = {}
    hasher = xxhash.xxh3_64(_pack(encode(value, tensors, path)))
    for tensor in tensors.values():
        hasher.update(checksum(tensor).to_bytes(8, "little"))
    return hasher.hexdigest()


def _pack(value: Any) -> bytes:
    return json.dumps(value).encode()
