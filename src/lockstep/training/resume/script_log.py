"""The script log: a script's calls of its trainer and their results, which a rerun gets again.

    script                            log                       resumed after step 70
    for epoch in range(3):
        for batch in trainer.batches  epoch 0, complete         yields nothing
            trainer.step(batch)
        trainer.evaluate(...)         evaluation 0.31           returns 0.31
                                      epoch 1, at batch 25      yields batch 25, 26, ...
    scheduler.step()
    trainer.finish()                  end                       see below

A resumed script begins at its first line. Every call that the interrupted run had completed
returns its logged result, so the script takes the same branches. At the call where the run was
interrupted, the training's state is restored, and calls have their effects again.

A finished run has an entry for its end if code after the last call has changed the state, such as
`scheduler.step()`. This code runs again in a resumed script, since no call tells where it ends. The
state of the end is therefore restored once more, where the script trains on or ends.

Calls inside a loop over `trainer.batches(...)` are not logged: the loop body is not executed again
for batches that were trained. Of several simultaneous loops (`zip`) only the first one is logged.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import xxhash

from lockstep.kernel.errors import UsageError

__all__ = ["OpenEpoch", "ScriptLog"]

Entry = dict[str, Any]

KINDS = {
    "epoch": "iterates over batches of epoch {epoch}",
    "evaluation": "evaluates on {samples} samples",
    "steps": "calls trainer.step(batch) with its own batches",
    "save": "saves weights",
    "manual": "takes a manual step outside of a loop over batches",
}

ADVICE = {
    "epoch": "resume with at least as many epochs",
    "steps": "resume with at least as many steps",
    "manual": "resume with at least as many steps",
    "evaluation": "make this call here, too",
    "save": "make this call here, too",
}
"""The advice if the script does not make a call of this kind again."""

TRAINING = ("epoch", "steps", "manual")
"""The kinds of calls that train; the others leave the weights as they are."""

IDENTITY = ("samples", "batch_size", "seed", "shuffle", "drop_last")
"""The entries of a batches' state that must be the same when it is resumed."""


class OpenEpoch:
    """An iteration over the batches of an epoch that has begun and not ended.

    Attributes:
        batches: The batches; `state_dict()` has their position.
        resumed: The state to resume from; None: the beginning.
        begun_at: The number of finished steps when the latest batch was yielded; -1 before.
    """

    def __init__(self, batches: Any, resumed: dict[str, Any] | None) -> None:
        self.batches = batches
        self.resumed = resumed
        self.begun_at = -1

    def entry(self, steps: int) -> Entry:
        """Return the entry of the iteration; its latest batch is not done if no step was taken."""
        state = self.batches.state_dict()
        if self.begun_at == steps and state["position"] > 0:
            state["position"] -= 1
        return {"kind": "epoch", "epoch": state["epoch"], "complete": False, "state": state}


class ScriptLog:
    """The calls of a script; after resuming, also the results of those to be made again.

    Attributes:
        has_end: Whether the interrupted run had ended, with another state than after its last call.
    """

    def __init__(self) -> None:
        self.has_end = False
        self._entries: list[Entry] = []
        self._digests: dict[str, str] = {}
        self._open: list[OpenEpoch] = []
        self._answers: list[Entry] = []
        self._answered = 0
        self._steps_answered = 0  # losses returned of the first answer, of kind "steps"
        self._batches = ""  # the chained identity of their batches

    # --- recording ------------------------------------------------------------------------

    @property
    def is_inside_epoch(self) -> bool:
        """Whether the script is in the body of a loop over batches."""
        return bool(self._open)

    @property
    def size(self) -> int:
        """The number of entries."""
        return len(self._entries)

    def is_outermost(self, epoch: OpenEpoch) -> bool:
        """Return whether an iteration is the outermost one."""
        return bool(self._open) and self._open[0] is epoch

    def is_open(self, epoch: OpenEpoch) -> bool:
        """Return whether an iteration has begun, and no loop around its beginning has ended."""
        return epoch in self._open

    def record(self, kind: str, steps: int, **fields: Any) -> None:
        """Log a call that was completed after `steps` steps."""
        if not self._open:
            self._entries.append({"kind": kind, "steps": steps, **fields})

    def record_step(self, steps: int, loss: float, batch: str) -> None:
        """Log a step outside of loops over batches; `batch` identifies the content of its batch."""
        if self._open:
            return
        last = self._entries[-1] if self._entries else {}
        if last.get("kind") != "steps":
            last = {"kind": "steps", "steps": steps, "losses": bytearray(), "batches": ""}
            self._entries.append(last)
        last["steps"] = steps
        last["losses"] += array("d", [loss]).tobytes()
        last["batches"] = _chain(last["batches"], batch)

    def record_manual_step(self, steps: int) -> None:
        """Log a step whose micro-batches the script computed itself."""
        if self._entries and self._entries[-1]["kind"] == "manual" and not self._open:
            self._entries[-1]["steps"] = steps
        else:
            self.record("manual", steps)

    def record_digest(self, name: str, value: str, steps: int) -> None:
        """Log a digest after `steps` steps, which may be computed on some ranks only."""
        if not self._open:
            self._digests[self._place(name, steps)] = value

    def record_end(self, steps: int) -> None:
        """Log the end of the script, which has changed the state since its last call."""
        self.record("end", steps)

    def complete_batches(self) -> None:
        """Note that the script is done with every batch that was yielded to it."""
        for epoch in self._open:
            epoch.begun_at = -1

    def describe_open(self) -> str:
        """Return a sentence about the outermost iteration, which has not ended; "" if all have.

        The body of its loop may end the run. An iterator that the script holds after `break` looks
        the same.
        """
        if not self._open:
            return ""
        epoch = self._open[0].batches.epoch
        return (
            f"the loop over batches of epoch {epoch} has not ended at finish(), so that a resumed "
            "run trains on in the middle of this epoch: if you have left the loop by break, keep "
            "no reference to its iterator"
        )

    def end_epoch(self, epoch: OpenEpoch, steps: int, last: Entry | None = None) -> None:
        """Log the end of an iteration, complete or left by the script.

        Args:
            epoch: The iteration.
            steps: The number of finished steps.
            last: The result of the last of them; None if there was none.
        """
        if epoch not in self._open:
            return  # it was inside an iteration that has ended
        if self.is_outermost(epoch):
            self._open = []
            self._answers = []  # inner iterations that the script did not begin again
            state = epoch.batches.state_dict()
            kept = {name: state[name] for name in (*IDENTITY, "content")}
            entry = {"kind": "epoch", "epoch": state["epoch"], "complete": True, "state": kept}
            self._entries.append(entry | {"steps": steps, "last": last})
        else:
            self._open.remove(epoch)

    def state_dict(self, steps: int) -> dict[str, Any]:
        """Return the current log: the completed calls, then the open iterations."""
        going = [opened.entry(steps) | {"steps": steps} for opened in self._open]
        entries = [dict(entry) for entry in self._entries]
        return {"entries": entries + going, "digests": dict(self._digests)}

    # --- answering ------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a log, whose results the calls of the script return from now on.

        Raises:
            UsageError: The script has made calls already.
        """
        if self._entries or self._open:
            raise UsageError(
                "resume before the first call of batches(), step(), evaluate() or save_weights(): "
                "the calls of the interrupted run are answered from the beginning"
            )
        self._answers = [dict(answer) for answer in state["entries"]]
        self.has_end = bool(self._answers) and self._answers[-1]["kind"] == "end"
        if self.has_end:
            self._answers.pop()
        for answer in self._answers:
            if answer["kind"] == "steps":
                answer["losses"] = bytearray(answer["losses"])  # new steps are added to it
        self._digests = dict(state["digests"])
        self._answered = 0

    @property
    def is_replaying(self) -> bool:
        """Whether the script has yet to repeat calls of the interrupted run."""
        return bool(self._answers)

    def answer(self, kind: str, **asked: Any) -> Entry | None:
        """Return the entry of a call that was completed before; None for a new call.

        Raises:
            UsageError: The interrupted run made another call here.
        """
        if self._open or not self._answers:
            return None
        entry = self._take(kind, asked)
        self._entries.append(entry)
        return entry

    def answer_step(self, batch: str) -> tuple[float, int] | None:
        """Return the loss of a step that was completed before, and the number of steps after it.

        Args:
            batch: The identity of the batch's content.

        Returns:
            The loss, and the number of finished steps including it; None for a new step.

        Raises:
            UsageError: The batches are not those of the interrupted run.
        """
        if self._open or not self._answers:
            return None
        entry = self._answers[0]
        self._require("steps", {}, entry)
        losses = memoryview(entry["losses"]).cast("d")
        loss = losses[self._steps_answered]
        self._steps_answered += 1
        self._batches = _chain(self._batches, batch)
        steps = entry["steps"] - len(losses) + self._steps_answered
        if self._steps_answered < len(losses):
            return loss, steps
        if self._batches != entry["batches"]:
            raise UsageError(
                f"the batches of the first {steps} steps are not those of the interrupted run: "
                "make the order of the data repeatable (a seeded generator), or use "
                "batches(dataset, ...)"
            )
        self._entries.append(self._take("steps", {}))
        self._steps_answered = 0
        self._batches = ""
        return loss, steps

    def answer_digest(self, name: str, steps: int) -> str | None:
        """Return the digest that the interrupted run computed at this place; None if it is passed.

        Raises:
            UsageError: The interrupted run did not compute it here.
        """
        if self._open or not self._answers:
            return None
        value = self._digests.get(self._place(name, steps))
        if value is None:
            raise UsageError(
                f"{name}() was not called here by rank 0 of the interrupted run, which "
                f"{_describe(self._answers[0])} next, and the weights of that time are not kept: "
                f"{ADVICE[self._answers[0]['kind']]}, or write `if not trainer.is_replaying:` "
                "before the call"
            )
        return value

    def _place(self, name: str, steps: int) -> str:
        """Return a name for the current place between two calls, after `steps` steps."""
        return f"{len(self._entries) + (self._steps_answered > 0)}/{steps}/{name}"

    def begin_epoch(self, batches: Any) -> tuple[OpenEpoch | None, Entry | None]:
        """Begin an iteration over batches.

        Returns:
            The iteration, or None if it was completed before and yields nothing; and its entry in
            the log of the interrupted run, or None for a new iteration.

        Raises:
            UsageError: The interrupted run made another call here.
        """
        entry = None
        if self._answers:
            entry = self._take("epoch", {"epoch": batches.epoch})
            _require_same_batches(batches, entry["state"])
            if entry["complete"]:
                self._entries.append(entry)
                return None, entry
        epoch = OpenEpoch(batches, None if entry is None else entry["state"])
        self._open.append(epoch)
        return epoch, entry

    def skip_end(self) -> str:
        """Forget the calls that are still to be repeated, if none of them has trained.

        Returns:
            What the first of them does; "" if none is forgotten.
        """
        has_trained = any(answer["kind"] in TRAINING for answer in self._answers)
        if self._open or has_trained or not self._answers:
            return ""
        skipped = _describe(self._answers[0])
        self._answers = []
        return skipped

    def require_finished(self) -> None:
        """Raise UsageError if the script ends before the position of the interrupted run."""
        if self._answers:
            raise UsageError(
                "the script ended before the point of the interruption; the interrupted run "
                f"{_describe(self._answers[0])} next: {ADVICE[self._answers[0]['kind']]}"
            )

    def _take(self, kind: str, asked: Mapping[str, Any]) -> Entry:
        self._require(kind, asked, self._answers[0])
        self._answered += 1
        return self._answers.pop(0)

    def _require(self, kind: str, asked: Mapping[str, Any], entry: Entry) -> None:
        same = entry["kind"] == kind and all(entry.get(k) == value for k, value in asked.items())
        if not same:
            raise UsageError(
                f"the script {_describe({'kind': kind, **asked})} where the interrupted run "
                f"{_describe(entry)} (call {self._answered + 1}): a resumed script makes the same "
                "calls from its beginning"
            )


def _describe(entry: Mapping[str, Any]) -> str:
    known: dict[str, Any] = {"epoch": "?", "samples": "?"}
    said = KINDS[entry["kind"]].format(**known | dict(entry))
    return f"{said} with the averaged weights" if entry.get("ema") else said


def _chain(before: str, batch: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{before} {batch}".encode())


def _require_same_batches(batches: Any, state: Mapping[str, Any]) -> None:
    here = batches.state_dict()
    for name in IDENTITY:
        then = state.get(name, False)  # older logs have no drop_last
        if then != here[name]:
            raise UsageError(
                f"epoch {here['epoch']}: the interrupted run had {name.replace('_', ' ')} "
                f"{then}, these batches have {here[name]}"
            )
