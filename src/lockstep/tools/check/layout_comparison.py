"""The comparison of all layouts of a script, each with the first one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.kernel.errors import UsageError
from lockstep.launcher.target import check_target
from lockstep.tools.check.difference import LayoutDifference, first_difference
from lockstep.tools.check.layout_runner import LayoutRun, run_layout
from lockstep.tools.check.layouts import Layout, layouts

__all__ = ["LayoutComparison", "LayoutVerdict", "compare_layouts"]

FRAMEWORKS = {
    "lightning": "pass strategy=ExactStrategy() to the Trainer; it is part",
    "transformers": "replace Trainer by ExactTrainer, which is part",
    "accelerate": "replace Accelerator by ExactAccelerator, which is part",
}
"""The change to a script that imports a framework."""


@dataclass(frozen=True)
class LayoutVerdict:
    """The comparison of one layout with the reference.

    Attributes:
        run: The run of the script in this layout.
        word: "reference", "equal", "different", "failed" or "not applicable".
        difference: The first difference from the reference in the steps that the run completed.
            None: there is none.
    """

    run: LayoutRun
    word: str
    difference: LayoutDifference | None = None

    def plain(self) -> dict[str, Any]:
        """Return the entry of this layout for `--json`."""
        layout = self.run.layout
        return {
            "ranks": layout.ranks,
            "replicas": layout.replicas,
            "stages": layout.stages,
            "schedule": layout.schedule,
            "shared": layout.shared,
            "backend": self.run.backend or layout.backend,
            "digest": self.run.digest,
            "losses": [float.fromhex(loss) for loss in self.run.losses],
            "loss_hex": self.run.losses,
            "equal": self.word in ("reference", "equal"),
            "verdict": self.word,
            "seconds": round(self.run.seconds, 3),
            "failure": self.run.failure or None,
            "first_difference": self.difference and asdict(self.difference),
        }


@dataclass(frozen=True)
class LayoutComparison:
    """The verdicts on all layouts of a script.

    Attributes:
        verdicts: One verdict per layout, in the order of the runs; the first is the reference.
        unstable: The difference between two runs of the reference. None: they agree, or there
            was no second run, because no layout differs.
    """

    verdicts: Sequence[LayoutVerdict]
    unstable: LayoutDifference | None = None

    @property
    def equal(self) -> bool:
        """Whether every applicable layout gave the same bits as the reference."""
        return all(verdict.word not in ("different", "failed") for verdict in self.verdicts)

    @property
    def first(self) -> LayoutVerdict | None:
        """The first layout that differs."""
        return next((verdict for verdict in self.verdicts if verdict.difference is not None), None)

    def plain(self) -> dict[str, Any]:
        """Return the object for `--json`; layouts that do not apply have a separate list."""
        first = self.first
        refused = [verdict for verdict in self.verdicts if verdict.word == "not applicable"]
        return {
            "equal": self.equal,
            "layouts": [verdict.plain() for verdict in self.verdicts if verdict not in refused],
            "first_difference": first
            and first.difference
            and {**asdict(first.difference), "layout": first.run.name},
            "not_applicable": [
                {**asdict(verdict.run.layout), "reason": verdict.run.failure} for verdict in refused
            ],
            "reproducible": None if first is None else self.unstable is None,
        }


def compare_layouts(
    script: str,
    arguments: Sequence[str],
    steps: int,
    ranks: Sequence[int],
    timeout: float,
    report: Callable[[LayoutVerdict], None] = lambda verdict: None,
) -> LayoutComparison:
    """Run a script in all layouts and compare each with the first one.

    Args:
        script: The file, or a folder with a `__main__.py`.
        arguments: The script's own arguments.
        steps: The number of steps per trainer after which a run ends.
        ranks: The numbers of ranks without pipeline stages; the first is the reference.
        timeout: The time limit of each layout, in seconds.
        report: Called with each verdict as soon as it is known.

    Returns:
        The verdicts. If the reference fails, no other layout runs.

    Raises:
        UsageError: The script does not exist, or takes no step with `ls.Trainer` or `ls.exact`.
    """
    check_target("script", script)
    verdicts: list[LayoutVerdict] = []

    def add(verdict: LayoutVerdict) -> None:
        verdicts.append(verdict)
        report(verdict)

    def run(layout: Layout) -> LayoutRun:
        return run_layout(script, arguments, layout, steps, timeout)

    reference = run(Layout(ranks[0]))
    if not reference.is_complete:
        add(LayoutVerdict(reference, "failed"))
        return LayoutComparison(verdicts)
    _require_training(script, reference)
    add(_verdict(reference, reference))
    # A backend that the script or the environment chooses is used in all layouts.
    own = reference.backend
    backends = ("lockstep", "gloo") if own == "lockstep" else (own,)
    is_whole = False  # the model cannot be divided into stages
    for layout in layouts(backends, ranks)[1:]:
        if layout.stages > 1 and is_whole:
            continue
        verdict = _verdict(run(layout), reference)
        is_whole |= verdict.word == "not applicable" and layout.schedule == "1f1b"
        add(verdict)
        # A sharded model, which 3 ranks cannot train, is compared on 4.
        power = 1 << (layout.ranks - 1).bit_length()
        is_plain = layout.stages == 1 and not layout.shared
        if verdict.word == "not applicable" and is_plain and power not in {*ranks, layout.ranks}:
            wider = _verdict(run(replace(layout, ranks=power)), reference)
            if wider.word != "not applicable":
                add(wider)
    unstable = None
    if any(one.difference for one in verdicts):
        again = run(reference.layout)
        unstable = first_difference(reference.ranks, again.ranks, again.is_complete)
    return LayoutComparison(verdicts, unstable)


def _require_training(script: str, reference: LayoutRun) -> None:
    """Raise UsageError if the script took no observed step."""
    first = reference.ranks[0]
    if not first.trainers:
        raise UsageError(
            f"{script} uses neither ls.exact nor ls.Trainer, so there is nothing to check: "
            f"{_find_advice(script)}, in the processes that lockstep check starts"
        )
    if not first.steps:
        raise UsageError(
            f"{script} calls ls.Trainer or ls.exact but ends without taking a step with it"
        )


def _find_advice(script: str) -> str:
    """Return what to change in a script, which depends on the framework that it imports."""
    path = Path(script)
    source = path.read_text(errors="replace") if path.is_file() else ""
    for framework, advice in FRAMEWORKS.items():
        if re.search(rf"^\s*(import|from) {framework}\b", source, re.MULTILINE):
            return f"{advice} of lockstep.integrations.{framework}"
    return (
        "add exact = ls.exact(model) after model = DistributedDataParallel(model), load data by "
        "batch_sampler=exact.sampler(dataset, batch_size=...), and call backward on "
        "exact.weigh(loss)"
    )


def _verdict(run: LayoutRun, reference: LayoutRun) -> LayoutVerdict:
    if run.is_refused:
        return LayoutVerdict(run, "not applicable")
    difference = first_difference(reference.ranks, run.ranks, run.is_complete)
    if not run.is_complete:
        return LayoutVerdict(run, "failed", difference)
    if difference is not None:
        return LayoutVerdict(run, "different", difference)
    return LayoutVerdict(run, "reference" if run is reference else "equal")
