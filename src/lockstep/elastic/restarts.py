"""The restarts of an elastic run, in which new processes replace all others.

They continue from the state that members of the last round have written for them, or else from the
newest checkpoint.

    launcher ──"transfer_state"──> one member for each part ──"transferred"──> launcher
                                       └ killed: the next one that can write this part

`training/resume/last_safe_state.py` describes what a member writes, and when it can.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from lockstep.elastic.current_round import CurrentRound
from lockstep.elastic.restart_source import RestartSource
from lockstep.elastic.round_plan import RestartTransfer
from lockstep.files import lock_file
from lockstep.launcher.run_folder import CHECKPOINTS

__all__ = ["MAX_FRUITLESS", "Restarts", "StateFolder", "StateTransfer", "remove_leftovers"]

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "lockstep-"
NAME = re.compile(rf"{PREFIX}\d+-\w+")  # of the folder of a launcher
MAX_FRUITLESS = 5  # restarts in a row that saved nothing
WRITE_TIMEOUT = 120.0  # seconds that members have to write their state


class Restarts:
    """The restarts of one run.

    Args:
        states: The states from which new processes continue.

    Attributes:
        states: The states.
        next: From what the next processes continue, once the old ones have exited; None if no
            restart is planned.
    """

    def __init__(self, states: StateFolder) -> None:
        self.states = states
        self.next: RestartSource | None = None
        self._interrupted: float | None = None  # in Unix time; until new processes train again
        self._resumed: set[int] = set()

    def plan(self, ended: CurrentRound, joined: list[int]) -> bool:
        """Plan to replace the members of a round; return False if that has not helped so far."""
        if self.states.count_fruitless() > MAX_FRUITLESS:
            return False
        end = ended.describe_end()
        self._interrupted = self._interrupted or end["noticed"]
        self.next = RestartSource(
            **end,
            interrupted=self._interrupted,
            joined=joined,
            # Including members that exited by themselves after they had handed over their state.
            left=[member for member in ended.members if member not in ended.lost],
            writers=self.states.writers,
            state=self.states.transferred,
        )
        return True

    def begin(self) -> None:
        """Begin the planned restart."""
        self.next = None
        self._resumed.clear()

    def note_resumed(self, member: int, members: Collection[int], *, is_busy: bool) -> None:
        """Note that a new process has read its state, which is removed after the last one.

        Args:
            member: The process.
            members: The members of the round.
            is_busy: Whether a state for other processes is being written or planned.
        """
        self._resumed.add(member)
        self._interrupted = None
        if self._resumed.issuperset(members) and not is_busy:
            self.states.discard()


class StateFolder:
    """The folder in shared memory for the states of one launch, for its owner alone.

    Args:
        run: The run's folder, with its checkpoints; None if it has none.

    Attributes:
        path: Its path.
        transferred: The folder with the state that was handed over; None if there is none.
        writers: The members that wrote it.
    """

    def __init__(self, run: Path | None) -> None:
        is_usable = os.access(SHARED_MEMORY, os.W_OK)
        parent = SHARED_MEMORY if is_usable else Path(tempfile.gettempdir())
        remove_leftovers(parent)
        self.path, self._lock = _make_locked_folder(parent)
        self.transferred: Path | None = None
        self.writers: list[int] = []
        self._run = run
        self._number = 0
        self._written = self.path / "none"
        self._known = self._list_states()
        self._fruitless = 0

    def begin_transfer(self) -> Path:
        """Return a new folder into which survivors write their state."""
        self.discard()
        self._number += 1
        self._written = self.path / f"hand-over-{self._number}"
        self._written.mkdir(mode=0o700)
        return self._written

    def complete_transfer(self, writers: list[int]) -> None:
        """Take what these members have written as the state that was handed over."""
        self.transferred = self._written
        self.writers = writers

    def discard(self) -> None:
        """Remove the state that was handed over, once it was read or is given up."""
        shutil.rmtree(self._written, ignore_errors=True)
        self.transferred = None
        self.writers = []

    def count_fruitless(self) -> int:
        """Return how often in a row this was called and found no new state to continue from."""
        states = self._list_states()
        is_further = bool(states) and states != self._known
        self._fruitless = 1 if is_further else self._fruitless + 1
        self._known = states
        return self._fruitless

    def _list_states(self) -> set[str]:
        """Return the names of the states from which new processes could continue."""
        folders = [] if self._run is None else [self._run / CHECKPOINTS]
        folders += [] if self.transferred is None else [self.transferred]
        return {state.name for folder in folders for state in folder.glob("step-*")}

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _make_locked_folder(parent: Path) -> tuple[Path, int]:
    """Make a folder that is locked for as long as this process lives; return the descriptor, too.

    It gets its name when it is locked: without the lock, it would be a leftover.
    """
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{os.getpid()}-", dir=parent))
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    lock_file(descriptor)
    return made.rename(parent / made.name.removeprefix(".")), descriptor


def remove_leftovers(parent: Path) -> None:
    """Remove folders of this user whose launcher was killed, together with its fork server.

    The kernel releases the lock of a process that ends. Unlike its number, which is in the name, no
    later process and none of another container can be mistaken for it.

    Args:
        parent: The folder in which they are.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                is_own = os.fstat(descriptor).st_uid == os.geteuid()
                if NAME.fullmatch(folder.name) and is_own and lock_file(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


class StateTransfer:
    """A hand-over in progress.

    Args:
        plan: The members that can write each part.
        folder: The folder that is written to.
        send: Sends a message to a member.

    Attributes:
        folder: The folder that is written to.
    """

    def __init__(
        self, plan: RestartTransfer, folder: Path, send: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self.folder = folder
        self._plan = plan
        self._send = send
        self._deadline = time.monotonic() + WRITE_TIMEOUT
        self._writing: dict[int, int] = {}  # for each part, the member that writes it
        self._written: set[int] = set()
        for part, writers in enumerate(plan.writers):
            self._ask(part, writers[0])

    def _ask(self, part: int, member: int) -> None:
        self._writing[part] = member
        message = {
            "kind": "transfer_state",
            "folder": str(self.folder),
            "operation": self._plan.operation,
            "commit": self._plan.commit,
        }
        self._send(member, message)

    @property
    def writers(self) -> list[int]:
        """The members that are writing the state."""
        return sorted(self._writing.values())

    def note_written(self, member: int) -> None:
        """Record that a member has written its part."""
        self._written.add(member)

    def follow(self, alive: Sequence[int]) -> bool | None:
        """Ask another member for each part whose writer was killed.

        Args:
            alive: The running members.

        Returns:
            Whether the state is complete; None while it is being written.
        """
        for part, member in self._writing.items():
            if member not in alive and member not in self._written:
                others = [other for other in self._plan.writers[part] if other in alive]
                if not others:
                    return False
                self._ask(part, others[0])
        if self._written.issuperset(self._writing.values()):
            return True
        return False if time.monotonic() >= self._deadline else None
