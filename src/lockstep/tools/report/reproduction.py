"""The files for checking and repeating a run: sources, fingerprints."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.formatting import format_quantity
from lockstep.kernel.errors import FileError
from lockstep.model.fingerprint_file import FOLDER, list_fingerprints
from lockstep.record.reader import Run
from lockstep.tools.report.summary import as_text

__all__ = [
    "ReproductionSummary",
    "summarize_reproduction",
]


@dataclass(frozen=True)
class ReproductionSummary:
    """The summary of the files for checking and repeating a run.

    Attributes:
        sentences: Sentences about its sources and fingerprints.
        remarks: Sentences about unreadable or incomplete files.
    """

    sentences: list[str]
    remarks: list[str]


def summarize_reproduction(run: Run) -> ReproductionSummary:
    """Return the summary of the files for checking and repeating a run."""
    sentences: list[str] = []
    if sources := as_text(run.latest("sources")):
        sentences.append(f"Copies of the program's own files are in {sources}.")
    try:
        fingerprints = list_fingerprints(run.folder)
        remarks = list(fingerprints.remarks)
    except FileError as error:
        fingerprints, remarks = None, [f"{error}."]
    if fingerprints is not None and fingerprints.steps:
        steps, ranks = [*fingerprints.steps], max(map(len, fingerprints.steps.values()))
        sentences.append(
            f"Hashes of what each unit computed in {format_quantity(len(steps), 'step')} "
            f"({steps[0]:,} to {steps[-1]:,}, {format_quantity(ranks, 'rank')}) are in {FOLDER}."
        )
    return ReproductionSummary(sentences, remarks)
