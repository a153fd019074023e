"""The result of `lockstep bisect` as text, as JSON and as an HTML page.

Bisection ──┬─> lead, facts, sentences, commands ──┬─> text
            ├─> charts, outline of the model ──────┴─> bisection_html
            └─> bisection_json
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.formatting import format_quantity
from lockstep.model.operator_call import OperatorCall
from lockstep.record.columns import as_dict
from lockstep.replay.bisection import Bisection, Reproduction
from lockstep.replay.finding import Finding
from lockstep.replay.recorded_run import RecordedRun, find_source_differences
from lockstep.report.chart import difference_charts
from lockstep.report.comparison import find_setting_differences, settings_sentences
from lockstep.report.page import draw_panel, render_template
from lockstep.version import VERSION

__all__ = [
    "Module",
    "bisection_html",
    "bisection_json",
    "describe_finding",
    "list_facts",
    "list_sentences",
    "suggest_commands",
]

MAX_ULPS = 1000
"""The largest distance in units in the last place (ULPs); beyond it, a sentence gives the
difference of the values instead."""

MAX_SOURCES = 6
"""The largest number of files that a sentence names."""

MAX_MODULES = 200
"""The largest number of modules in the outline; a longer outline is cut to those around the
finding."""

CALL_ROWS = ("operator", "line", "code", "arguments", "inputs", "outputs")

PLACES = {
    "data": "data",
    "state": "state before the step",
    "forward": "forward pass",
    "backward": "backward pass",
    "reduction": "sum of the gradients",
    "optimizer": "update",
}


def describe_finding(found: Bisection) -> str:
    """Return the result in one sentence."""
    a, b = found.a.name, found.b.name
    finding = found.finding
    if finding is None:
        return f"{a} and {b} agree in everything that both recorded."
    where = describe_place(finding, found.modules[:1])
    sentence = finding.sentence
    if finding.what == "data" and found.recorded is not None and found.recorded.what == "batch":
        sentence = "the batches have different samples"
    return f"{a} and {b} differ first in {where}: {sentence}."


def describe_place(finding: Finding, root: Sequence[str] = ()) -> str:
    """Return where a difference arises, in words.

    Args:
        finding: The difference.
        root: The name of the model itself; empty if it is not known.
    """
    words = [f"step {finding.step:,}"]
    if finding.microbatch is not None:
        words.append(f"micro-batch {finding.microbatch}")
    if finding.direction is not None:
        words.append(PLACES[finding.direction])
    if finding.unit in root:
        words.append(f"the model itself (`{finding.unit}`)")
    elif finding.unit:
        words.append(f"module `{finding.unit}`")
    if finding.parameter and f"`{finding.parameter}`" not in finding.sentence:
        words.append(f"`{finding.parameter}`")
    return ", ".join(words)


def list_facts(found: Bisection) -> list[tuple[str, ...]]:
    """Return a table of both sides at the difference: a name and two values per row."""
    finding = found.finding
    if finding is None:
        return []
    calls = [(found.a, finding.a), (found.b, finding.b)]
    columns = [_describe_call(run, call, finding.step) for run, call in calls]
    rows = [(name, *(column.get(name, "") for column in columns)) for name in CALL_ROWS]
    if finding.element is not None:
        index = ", ".join(map(str, finding.element.index))
        rows.append((f"element [{index}]", repr(finding.element.a), repr(finding.element.b)))
    steps = [
        {each.step: each for each in run.steps}.get(finding.step) for run in (found.a, found.b)
    ]
    for name in ("loss", "norm"):
        values = [None if each is None else getattr(each, name) for each in steps]
        texts = ["" if value is None else repr(value) for value in values]
        rows.append((f"recorded {name} of the step", texts[0], texts[1]))
    return [row for row in rows if row[1] or row[2]]


def _describe_call(run: RecordedRun, call: OperatorCall | None, step: int) -> dict[str, str]:
    if call is None:
        return {}
    values = (
        call.operator,
        call.source,
        run.read_line(call.source, step),
        call.arguments,
        ", ".join(call.input_types),
        ", ".join(call.output_types),
    )
    return dict(zip(CALL_ROWS, values, strict=True))


def list_sentences(found: Bisection) -> list[str]:
    """Return sentences about what was compared and how far the finding can be trusted."""
    return [
        *_element_sentence(found.finding),
        _compared_sentence(found),
        *_length_sentences(found),
        *_stop_sentence(found),
        *_reproduction_sentences(found),
        *settings_sentences(found.a.run, found.b.run, is_same=found.equal),
        *_arguments_sentence(found),
        *_sources_sentence(found),
        *_advice(found),
        *(f"{remark}." for remark in found.remarks),
        *(f"{run.name}: {remark}" for run in (found.a, found.b) for remark in run.run.remarks),
    ]


def _element_sentence(finding: Finding | None) -> Iterator[str]:
    if finding is None or finding.element is None:
        return
    element = finding.element
    count = f"{element.count:,} elements differ" if element.count > 1 else "One element differs"
    distance = ""
    if element.ulps is not None and element.ulps > MAX_ULPS:
        distance = f"; the first by {abs(element.a - element.b):.3g}"
    elif element.ulps is not None:
        distance = f"; the first by {format_quantity(element.ulps, 'unit')} in the last place"
    yield f"{count}{distance}."


def _compared_sentence(found: Bisection) -> str:
    """Return a sentence about what the records have in common, up to the difference."""
    compared = found.compared
    parts = format_quantity(compared.steps, "step")
    digests = ""
    if compared.digests:
        numbers = [f"{number:,}" for number in compared.digests]
        shown = ", ".join(numbers[:6]) + (
            f" and {len(numbers) - 6} more" if len(numbers) > 6 else ""
        )
        digests = f", and the digests of the weights after {shown} steps"
    what = f"{parts} (losses of the micro-batches, gradient norms, samples){digests}"
    if found.finding is None:
        return f"Compared, and bit-identical: {what}."
    recorded = found.recorded
    if recorded is None:
        return f"Of what both recorded, only digests differ: {what}."
    number = "" if recorded.microbatch is None else f" {recorded.microbatch}"
    which = "samples" if recorded.what == "batch" else f"{recorded.what}{number}"
    if recorded.what == "stop":
        return f"The records agree up to step {recorded.step:,}; compared: {what}."
    return f"The records differ first in step {recorded.step:,}, in the {which}; compared: {what}."


def _length_sentences(found: Bisection) -> Iterator[str]:
    for run, count in ((found.a, found.compared.only_a), (found.b, found.compared.only_b)):
        if count:
            yield f"{run.name} has {format_quantity(count, 'step')} more, which were not compared."


def _stop_sentence(found: Bisection) -> Iterator[str]:
    """Yield a sentence about where the runs failed."""
    runs = found.a, found.b
    parts = []
    for run, other in (runs, runs[::-1]):
        if run.stop is not None:
            at = f"step {run.stop.step:,}"
            if run.stop.microbatch is not None:
                at += f", micro-batch {run.stop.microbatch}"
            parts.append(f"{run.name} stopped in {at} ({run.stop.what})")
            if other.stop is None and any(each.step == run.stop.step for each in other.steps):
                parts.append(f"{other.name} continued")
    if parts:
        yield f"{'; '.join(parts)}."


def _arguments_sentence(found: Bisection) -> Iterator[str]:
    programs = [as_dict(run.run.latest("program")) for run in (found.a, found.b)]
    a, b = (shlex.join(map(str, each.get("arguments") or ())) for each in programs)
    if a != b and all(programs) and not found.equal:
        yield f"Their arguments differ: {a or '(none)'} and {b or '(none)'}."


def _advice(found: Bisection) -> Iterator[str]:
    """Yield a sentence about how to learn more about a difference that only records show."""
    finding = found.finding
    if finding is None or finding.what == "microbatches":
        return
    if not found.is_replayed and finding.direction is None:
        yield (
            'To learn where in the step it arises, record both runs with fingerprints="unit", or '
            f"with the variable LOCKSTEP_FINGERPRINTS=unit:{finding.step}."
        )


def _sources_sentence(found: Bisection) -> Iterator[str]:
    if found.finding is None:
        return
    names = find_source_differences(found.a, found.b, found.finding.step)
    if names:
        more = f" and {len(names) - MAX_SOURCES} more" if len(names) > MAX_SOURCES else ""
        yield f"Their sources differ in {', '.join(names[:MAX_SOURCES])}{more}."


def _reproduction_sentences(found: Bisection) -> Iterator[str]:
    """Yield sentences about whether the replays computed what the records say."""
    both = found.reproductions
    if all(each.is_exact for each in both):
        yield "Replays of both runs compute what was recorded, bit for bit."
        return
    for run, each in zip((found.a, found.b), both, strict=True):
        if each.is_exact is None:
            continue
        if each.is_exact:
            yield f"Replays of {run.name} compute what was recorded, bit for bit."
        else:
            yield f"The replay of {run.name} does not compute what was recorded: {_deviation(each)}"


def _deviation(reproduction: Reproduction) -> str:
    """Return how a replay differs from its record, and the conclusion from it."""
    different = reproduction.difference
    assert different is not None, "a replay that is not exact differs in something"
    where = f"step {different.step}"
    if different.microbatch is not None:
        where += f", micro-batch {different.microbatch}"
    what = f"{where}: the {different.what} was {different.a} and is {different.b} now. "
    if reproduction.is_repeatable is None:
        return what.rstrip()
    if reproduction.is_repeatable is False:
        return (
            f"{what}Two replays differ from each other as well, so the program itself is not "
            "deterministic."
        )
    return (
        f"{what}Two replays agree with each other, so the program is deterministic here, and the "
        "recorded run differed in something else: another processor or version of torch, data "
        "files that have changed since, or a hardware fault."
    )


def suggest_commands(found: Bisection) -> list[str]:
    """Return commands that investigate the difference further."""
    finding = found.finding
    if finding is None:
        return []
    lines = []
    suffixes = [Path(run.name).name for run in (found.a, found.b)]
    if suffixes[0] == suffixes[1]:
        suffixes = ["a", "b"]
    for run, suffix in zip((found.a, found.b), suffixes, strict=True):
        if run.folder is None:
            continue
        folder = os.path.relpath(run.folder)
        folder = str(run.folder) if folder.startswith("..") else folder
        words = ["lockstep", "replay", folder, "--step", str(finding.step)]
        if finding.microbatch is not None:
            words += ["--microbatch", str(finding.microbatch), "--dump", f"dump-{suffix}"]
        lines.append(shlex.join(words))
        if finding.source is not None and finding.microbatch is not None:
            lines.append(shlex.join([*words[:-2], "--pdb"]))
    return lines


def bisection_json(found: Bisection) -> dict[str, Any]:
    """Return the result as plain values for JSON."""
    finding = found.finding
    element = None if finding is None else finding.element
    return {
        "equal": found.equal,
        "step": finding and finding.step,
        "microbatch": finding and finding.microbatch,
        "unit": finding and finding.unit,
        "direction": finding and finding.direction,
        "operator": finding and finding.operator,
        "source": finding and finding.source,
        "first_element": element
        and {
            "index": list(element.index),
            "a": _plain(element.a),
            "b": _plain(element.b),
            "ulps": element.ulps,
        },
        "differing_elements": element and element.count,
        "parameter": finding and finding.parameter,
        "what": finding and finding.what,
        "sentence": describe_finding(found),
        "operators": finding
        and {side: _call_json(call) for side, call in (("a", finding.a), ("b", finding.b))},
        "runs": [found.a.name, found.b.name],
        "steps_compared": found.compared.steps,
        "digests_compared": list(found.compared.digests),
        "is_replayed": found.is_replayed,
        "reproduced": [each.is_exact for each in found.reproductions],
        "repeatable": [each.is_repeatable for each in found.reproductions],
        "remarks": list(found.remarks),
        "settings": find_setting_differences([found.a.run, found.b.run]),
        "seconds": round(found.seconds, 3),
    }


def _plain(value: complex | float | bool) -> Any:
    """Return a value for JSON, which has neither complex nor non-finite numbers."""
    if isinstance(value, complex) or not math.isfinite(value):
        return str(value)
    return value


def _call_json(call: OperatorCall | None) -> dict[str, Any] | None:
    if call is None:
        return None
    return {
        "operator": call.operator,
        "phase": call.phase,
        "source": call.source,
        "arguments": call.arguments,
        "inputs": list(call.input_types),
        "outputs": list(call.output_types),
    }


# --- page ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A line of the model's outline.

    Attributes:
        name: The last part of its name.
        depth: The number of modules that contain it.
        is_found: Whether the difference is in it, or in a module inside it.
        is_first: Whether it is the module that was found.
    """

    name: str
    depth: int
    is_found: bool
    is_first: bool


def outline_model(found: Bisection) -> list[Module]:
    """Return the modules of the model as lines, with the one that was found."""
    unit = found.finding.unit if found.finding else None
    lines = [
        Module(
            name,
            number and name.count(".") + 1,  # the first module is the model
            unit is not None and (not number or f"{unit}.".startswith(f"{name}.")),
            name == unit,
        )
        for number, name in enumerate(found.modules)
    ]
    at = next((number for number, line in enumerate(lines) if line.is_first), 0)
    first = max(0, min(at - MAX_MODULES // 2, len(lines) - MAX_MODULES))
    return lines[first : first + MAX_MODULES]


def bisection_html(found: Bisection) -> str:
    """Return the result as one self-contained HTML page."""
    finding = found.finding
    runs, names = [found.a.run, found.b.run], [found.a.name, found.b.name]
    charts = difference_charts(runs, names, None if finding is None else finding.step)
    return render_template(
        "bisect.html",
        found=found,
        finding=finding,
        names=names,
        operators=list(
            dict.fromkeys(call.operator for call in (finding.a, finding.b) if call is not None)
        )
        if finding is not None and finding.operator
        else [],
        lead=describe_finding(found),
        place=None if finding is None else PLACES.get(finding.direction or ""),
        facts=list_facts(found),
        sentences=list_sentences(found),
        panels=[draw_panel(chart) for chart in charts],
        modules=outline_model(found),
        settings=find_setting_differences(runs),
        commands=suggest_commands(found),
        version=VERSION,
    )
