"""The runner: ranks of one way to train, which step when it is their turn and sleep otherwise."""

from __future__ import annotations

from typing import Any

from lockstep.bench.peers import TorchPeer
from lockstep.bench.times import Timed

__all__ = ["Runner"]


class Runner:
    """The ranks of `peer`, or with `alone` only the first of them; `outcome` is what they did."""

    peer: TorchPeer
    alone: bool
    outcome: Timed

    def ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask the ranks; note why they cannot."""
        answers = self.peer.ask(message)
        reasons = [str(answer["cannot"]) for answer in answers if "cannot" in answer]
        if reasons and not self.outcome.cannot:
            self.outcome.cannot = reasons[0]
        return answers

    def block(self, calls: int) -> list[float]:
        """Run a block of steps; return each one's seconds, those of the slowest rank."""
        answers = self.ask({"block": calls, "alone": self.alone})
        if self.outcome.cannot:
            return []
        told = [answer["times"] for answer in answers if answer["times"]]
        return [max(times) / 1e9 for times in zip(*told, strict=True)]
