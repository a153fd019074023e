"""Participant: the ranks of one contender, which run steps in turn and sleep otherwise."""

from __future__ import annotations

from typing import Any

from benchmarks.rank_processes import TimingResult, TorchRunner

__all__ = ["Participant"]


class Participant:
    """The ranks of `runner`, or with `alone` only the first of them; `outcome` is what they did."""

    runner: TorchRunner
    alone: bool
    outcome: TimingResult

    def ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask the ranks; note why they cannot."""
        answers = self.runner.ask(message)
        reasons = [str(answer["error"]) for answer in answers if "error" in answer]
        if reasons and not self.outcome.error:
            self.outcome.error = reasons[0]
        return answers

    def block(self, calls: int) -> list[float]:
        """Run a block of steps; return each one's seconds, those of the slowest rank."""
        answers = self.ask({"block": calls, "alone": self.alone})
        if self.outcome.error:
            return []
        told = [answer["times"] for answer in answers if answer["times"]]
        return [max(times) / 1e9 for times in zip(*told, strict=True)]
