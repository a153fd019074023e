"""The record of a trainer's run: its folder, and the loggers that write to it.

    loggers=, CheckpointConfig(folder=)   folder
    "runs/mine"                           runs/mine; if it holds an earlier run, runs/mine-2, ...
                                          `lockstep run`: renames the folder of the launch to that
    none, under `lockstep run`            the folder of the launch
    none, with checkpoint=                a new one, runs/SCRIPT-DATE
    none                                  no folder: nothing is recorded

A trainer with checkpoints may still be resumed if its folder holds an earlier run. Its folder is
therefore decided by its first call: `resume` continues the newest run of the name, any other call
begins the next one. A trainer with neither a name nor checkpoints also gets its folder with its
first call, so that the launch's folder is left to a trainer that can be resumed, if there is one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch.distributed as dist

from lockstep.checkpoint.folder import find_checkpoints, locate_checkpoint
from lockstep.checkpoint.save_schedule import CheckpointConfig
from lockstep.comm.collectives import broadcast_bytes
from lockstep.elastic.restart_source import find_restart_source
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.run_folder import (
    CHECKPOINTS,
    DESCRIPTION_FILE,
    RECORD_FILE,
    RUNS,
    create_run_folder,
    find_launch_folder,
    is_resuming,
    link_launch_folder,
    name_run,
    rename_launch_folder,
)
from lockstep.messages import log
from lockstep.record.loggers import Logger
from lockstep.record.program import REPLAYABLE, describe_program
from lockstep.record.recorder import Recorder

__all__ = ["LoggerLike", "RunRecord"]

LoggerLike = str | Path | Logger
"""A folder to record a run in, or a logger object."""

REQUESTED = "requested_name"  # in the first line of a record: the name without its number
CANNOT_RESUME = "cannot_resume"  # in the first line of a record: its trainer has no checkpoints

_uses: Counter[Path] = Counter()  # trainers of this process by the folder of their run


class RunRecord:
    """The folder and the loggers of one trainer's run; rank 0 makes all decisions.

    Args:
        loggers: The trainer's `loggers=`; None: the default.
        config: The settings of checkpoints; None: none are saved.
        start: The function that is called with the loggers when they are open.

    Attributes:
        path: The folder; None if it is not decided yet, or if there is none.
        checkpoints: The name of the subfolder of checkpoints.
        agreed: `path` and `checkpoints` of rank 0, sent to all ranks of an elastic run; the path is
            "" if there is no folder.

    Raises:
        UsageError: A run would be resumed by a trainer without checkpoints.
    """

    def __init__(
        self,
        loggers: LoggerLike | Sequence[LoggerLike] | None,
        config: CheckpointConfig | None,
        start: Callable[[list[Logger]], None],
    ) -> None:
        self.path: Path | None = None
        self.checkpoints = CHECKPOINTS
        self.agreed = ("", CHECKPOINTS)
        self._start = start
        self._is_default = loggers is None
        self._given = _list_loggers(loggers)
        self._saves_checkpoints = config is not None
        self._fixed = next((logger for logger in self._given if isinstance(logger, Recorder)), None)
        folder = config.folder if config is not None else None
        self._folder = None if folder is None else Path(folder).absolute()
        paths = [logger for logger in self._given if isinstance(logger, (str, Path))]
        named = folder or (None if self._fixed else next(iter(paths), None))
        self._named = None if named is None else Path(named).absolute()
        if self._fixed is not None and self._named is None:
            self.path = self._fixed.folder.absolute()
        self.is_open = False
        self._has_begun = False
        self._recorded: Path | None = None  # the folder of the record
        if not self._saves_checkpoints:
            is_continued = self._fixed is not None and self._fixed.is_continued
            if self._fixed is not None and is_continued and find_restart_source() is None:
                self._fixed.close()
                raise _cannot_resume(self._fixed.folder)
            if self._named is not None and not is_resuming():
                self.begin()

    @property
    def has_name(self) -> bool:
        """Whether the same script, started again, would find the run."""
        return bool(self._named or self._fixed or find_launch_folder())

    @property
    def may_record(self) -> bool:
        """Whether loggers are open, or will be."""
        return bool(self._given) or (
            self._is_default and bool(self._saves_checkpoints or find_launch_folder())
        )

    @property
    def has_earlier_run(self) -> bool:
        """Whether the named folder holds a run that could be resumed."""
        return self._named is not None and bool(_find_family(self._named))

    # --- a run that begins ----------------------------------------------------------------

    def begin(self) -> None:
        """Decide the folder of a new run, and open its loggers.

        Raises:
            UsageError: The folder of a recorder holds the checkpoints of another run.
            FileError: The folder or the record cannot be created.
        """
        if self._has_begun:
            return
        recorder = None
        if self._named is not None:
            self._require_checkpoints(self._named)
            is_recorded = self._is_default or any(self._is_named(logger) for logger in self._given)
            self.path, recorder = _begin_named(self._named, is_recorded)
        elif self._fixed is not None:
            self._require_no_checkpoints()
        else:
            self.path = find_launch_folder()
            if self.path is None and self._saves_checkpoints:
                self.path = _make_run_folder()
            if self._is_default:
                recorder = self._record_unnamed()
        self._use_folder()
        self._has_begun = True
        self._open(recorder, resume=False)

    def _is_named(self, given: LoggerLike) -> bool:
        return isinstance(given, (str, Path)) and Path(given).absolute() == self._named

    def _record_unnamed(self) -> Recorder | None:
        """Return a recorder for an unnamed folder; None if it already has a record."""
        if self.path is None:
            return None
        if (self.path / RECORD_FILE).exists():
            if is_resuming() and not _uses:
                log(
                    f"{self.path} is resumed, but its trainer has no checkpoints: it starts from "
                    "the beginning, and is not recorded; pass checkpoint=ls.CheckpointConfig()"
                )
            return None
        metadata = {} if self._saves_checkpoints else {CANNOT_RESUME: True}
        try:
            return Recorder(self.path, metadata, resume=False)
        except UsageError:  # another process was faster
            return None
        except FileError as error:
            log(f"nothing is recorded: {error}")
            return None

    def _require_no_checkpoints(self) -> None:
        """Raise UsageError if the folder of the user's Recorder holds another run."""
        assert self._fixed is not None
        folder = self._fixed.folder
        if self._saves_checkpoints and (
            self._fixed.is_continued or find_checkpoints(folder / CHECKPOINTS)
        ):
            raise UsageError(
                f"{folder} already holds a run: resume it with resume() or `lockstep run "
                f"--resume {folder}`, or choose another name for the run"
            )

    def _require_checkpoints(self, named: Path) -> None:
        """Raise UsageError if the launch resumes the run of that name and no trainer can."""
        launch = find_launch_folder()
        if not is_resuming() or launch is None or self._saves_checkpoints or _uses:
            return
        if launch in map(Path.resolve, _find_family(named).values()):
            raise _cannot_resume(launch)

    # --- a run that continues ---------------------------------------------------------------

    def select_launch(self) -> None:
        """Use the folder of the run that the launch continues."""
        launch = find_launch_folder()
        if self._named is not None:
            self.path = _find_resumed(self._named, launch)
        elif self._fixed is None:
            self.path = launch or _make_run_folder()
        if self.path is None:
            self.begin()
        else:
            self._has_begun = True
            self._use_folder()

    def select_resumed(self, place: str | Path | None) -> None:
        """Use the folder of the run that `trainer.resume(place)` continues.

        Without `place`, that is the newest run of the name. If `place` belongs to a run of another
        name, this run begins in a new folder.

        Raises:
            UsageError: There is no run at `place`.
            FileError: The folder or the record cannot be created.
        """
        if self._has_begun or self._named is None:
            return
        family = list(_find_family(self._named).values())
        selected = max(family, key=_last_written) if place is None and family else None
        if place is not None:
            path = locate_checkpoint(place)[1].resolve()
            inside = path.parent if path.name.startswith(CHECKPOINTS) else path
            selected = next((path for path in family if path.resolve() == inside), None)
        if selected is None:
            self.begin()
        else:
            self._has_begun = True
            self.path = selected
            self._use_folder()

    def deselect(self) -> None:
        """Undo `select_resumed`, unless the loggers are open."""
        if self._has_begun and not self.is_open and self.path is not None:
            _uses[self.path.resolve()] -= 1
            self._has_begun = False
            self.path = None

    def open_resumed(self) -> None:
        """Open the loggers of a run that continues, after its state has been loaded."""
        if self.is_open:
            return
        if self.path is not None and not is_resuming():
            link_launch_folder(self.path)
        recorder = None
        if self._is_default and self.path is not None and self.checkpoints == CHECKPOINTS:
            is_of_another_trainer = _read_header(self.path).get(CANNOT_RESUME)
            recorder = None if is_of_another_trainer else Recorder(self.path, resume=True)
        self._open(recorder, resume=True)

    def open_replaced(self, trainer: int) -> None:
        """Open the loggers of a trainer without checkpoints that replaces one of the last round.

        Args:
            trainer: The trainer's number in the program, which is in the record's first line.

        Raises:
            FileError: The record cannot be continued.
        """
        if self._has_begun:
            return
        recorder = None
        if self._fixed is None:
            launch = find_launch_folder()
            self.path = launch if self._named is None else _find_resumed(self._named, launch)
            header = {} if self.path is None else _read_header(self.path)
            if not header:  # the last round had not begun to record
                self.begin()
                return
            if self.path is not None and header.get("trainer") == trainer:
                recorder = Recorder(self.path, resume=True)
        self._has_begun = True
        self._open(recorder, resume=True)

    def agree_on_folder(self, group: dist.ProcessGroup | None) -> None:
        """Send the folder of the run to all ranks, so that any of them can replace rank 0."""
        path = "" if self.path is None else str(self.path)
        said = json.dumps([path, self.checkpoints]).encode()
        path, name = json.loads(broadcast_bytes(said, "beginning the run", group))
        self.agreed = path, name

    def share_folder(self, group: dist.ProcessGroup | None, is_temporary: bool) -> Path:
        """Return the folder of the run, which rank 0 sends to the others in the first call.

        Args:
            group: The ranks.
            is_temporary: Whether to return a folder that is removed with this object instead.

        Raises:
            UsageError: The run has no folder.
        """
        if is_temporary and not self.agreed[0]:
            self.agreed = tempfile.mkdtemp(prefix="lockstep-"), CHECKPOINTS
            weakref.finalize(self, shutil.rmtree, self.agreed[0], ignore_errors=True)
        elif not self.agreed[0]:
            self.agree_on_folder(group)
        if not self.agreed[0]:
            raise UsageError(
                'the run has no folder: pass loggers="runs/mine" to the trainer, or start the '
                "script with `lockstep run`"
            )
        return Path(self.agreed[0])

    def take_over(self, given: LoggerLike | Sequence[LoggerLike] | None) -> None:
        """Continue the record of the lost rank 0, on the rank that replaces it.

        Args:
            given: The trainer's `loggers=`; None: the default.
        """
        path = Path(self.agreed[0]) if self.agreed[0] else None
        self._is_default = given is None
        self._given = _list_loggers(given)
        self.path = path
        self.checkpoints = self.agreed[1]
        self._has_begun = True
        names = [
            Path(logger).absolute() for logger in self._given if isinstance(logger, (str, Path))
        ]
        self._named = self._folder or next(iter(names), None)
        is_recorded = self._is_default or any(self._is_named(logger) for logger in self._given)
        recorder = None
        if path is not None and is_recorded and (path / RECORD_FILE).exists():
            recorder = Recorder(path, resume=True)
        self._open(recorder, resume=True)

    def describe_replay(self, step: int, microbatch: int | None) -> str:
        """Return the command that replays a step, as the end of a sentence; "" if there is none."""
        program = describe_program()
        is_stored = program["kind"] in REPLAYABLE and "ipykernel" not in program["target"]
        if self._recorded is None or not is_stored:
            return ""
        words = ["lockstep", "replay", os.fspath(_shorten(self._recorded)), "--step", str(step)]
        if microbatch is not None:
            words += ["--microbatch", str(microbatch)]
        return f"; compute it again with: {shlex.join(words)}"

    def _use_folder(self) -> None:
        if self.path is None or not self._saves_checkpoints:
            return
        folder = self.path.resolve()
        _uses[folder] += 1
        if self._named is None and _uses[folder] > 1:  # another trainer of the same launch
            self.checkpoints = f"{CHECKPOINTS}-{_uses[folder]}"

    # --- loggers ------------------------------------------------------------------------------

    def _open(self, recorder: Recorder | None, *, resume: bool) -> None:
        """Open the loggers; `recorder` is the run folder's recorder if it is already open."""
        self.is_open = True
        loggers: list[Logger] = [recorder] if self._is_default and recorder is not None else []
        for logger in self._given:
            if not isinstance(logger, (str, Path)):
                loggers.append(logger)
            elif not self._is_named(logger):
                loggers.append(_open_another(Path(logger).absolute(), resume))
            else:
                assert self.path is not None
                loggers.append(recorder or Recorder(self.path, resume=resume))
        folder = next((logger.folder for logger in loggers if isinstance(logger, Recorder)), None)
        self._recorded = None if folder is None else folder.absolute()
        self._start(loggers)


def _list_loggers(given: LoggerLike | Sequence[LoggerLike] | None) -> list[LoggerLike]:
    chosen: Any = () if given is None else given
    return list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]


def _cannot_resume(folder: Path) -> UsageError:
    return UsageError(
        f"{folder} is resumed, but its trainer has no checkpoints and would start from the "
        "beginning: pass checkpoint=ls.CheckpointConfig(), or start a new run"
    )


def _begin_named(base: Path, is_recorded: bool) -> tuple[Path, Recorder | None]:
    """Return the folder of a new run of that name, and its recorder."""
    while True:
        numbers = _find_family(base, of_any=True)
        number = max(numbers) + 1 if 1 in numbers else 1
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        launch = find_launch_folder()
        is_renamed = not is_resuming() and rename_launch_folder(folder)
        if launch is not None and not is_renamed and _holds_run(folder):
            continue  # another launch was faster
        metadata = {} if number == 1 else {REQUESTED: base.name}
        if launch is not None and not is_renamed:
            metadata["launch_folder"] = str(launch)
        recorder = None
        if is_recorded:
            try:
                recorder = Recorder(folder, metadata, resume=False)
            except UsageError:
                if (folder / RECORD_FILE).exists():  # another process was faster
                    continue
                raise
        if number > 1:
            log(f"{_shorten(base)} holds an earlier run: this one is in {_shorten(folder)}")
        if launch is not None and not is_renamed:
            link_launch_folder(folder)
        return folder, recorder


def _open_another(base: Path, resume: bool) -> Recorder:
    """Return the recorder of a folder other than the run's."""
    family = _find_family(base)
    if resume and family:
        return Recorder(max(family.values(), key=_last_written), resume=True)
    recorder = _begin_named(base, is_recorded=True)[1]
    assert recorder is not None
    return recorder


def _find_family(base: Path, of_any: bool = False) -> dict[int, Path]:
    """Return the folders NAME, NAME-2, ... that hold a run, by their number.

    Args:
        base: The folder NAME.
        of_any: Whether to include folders whose runs were given the name NAME-2 by the user.
    """
    pattern = re.compile(rf"{re.escape(base.name)}(?:-([1-9]\d*))?")
    family = {}
    for name in os.listdir(base.parent) if base.parent.is_dir() else ():
        folder = base.with_name(name)
        match = pattern.fullmatch(name)
        if match is None or not _holds_run(folder):
            continue
        if not match[1] or of_any or _is_run_of(base.name, folder):
            family[int(match[1] or 1)] = folder
    return family


def _holds_run(folder: Path) -> bool:
    if (folder / RECORD_FILE).exists() or find_checkpoints(folder / CHECKPOINTS):
        return True
    is_launch = (folder / DESCRIPTION_FILE).exists()
    return is_launch and folder.resolve() != find_launch_folder()


def _is_run_of(name: str, folder: Path) -> bool:
    """Return whether a numbered folder holds a run for which this name was requested."""
    if not (folder / RECORD_FILE).exists():
        return True
    return bool(_read_header(folder).get(REQUESTED) == name)


def _read_header(folder: Path) -> dict[str, Any]:
    """Return the first line of a record; empty if there is none."""
    try:
        with (folder / RECORD_FILE).open("rb") as file:
            header = orjson.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def _last_written(folder: Path) -> float:
    """Return the Unix time at which a run was last written to; 0 if it was not."""
    times = [0.0]
    for path in (folder / RECORD_FILE, folder / CHECKPOINTS):
        if path.exists():
            times.append(path.stat().st_mtime)
    return max(times)


def _find_resumed(base: Path, launch: Path | None) -> Path | None:
    """Return the run of that name which a launch continues; None if there is none.

    If a script gives its run a new name at every start, such as the time, the launch's run is
    returned, provided that it has checkpoints.
    """
    family = {number: folder.resolve() for number, folder in _find_family(base).items()}
    if launch is not None and launch in family.values():
        own = next(number for number, path in family.items() if path == launch)
        later = (number for number in sorted(family) if number >= own)
        return next((family[number] for number in later if not _uses[family[number]]), None)
    if family:
        return max(family.values(), key=_last_written)
    if launch is not None and not _uses[launch] and find_checkpoints(launch / CHECKPOINTS):
        return launch
    return None


def _shorten(path: Path) -> Path:
    """Return a path relative to the working directory if it is inside it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _make_run_folder() -> Path:
    return create_run_folder(Path(RUNS), name_run(Path(sys.argv[0]).stem or "run")).absolute()
