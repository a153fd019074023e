"""The result of `lockstep bisect`: a lead, facts, sentences and commands as text, and JSON."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from typing import Any

from lockstep.audit.operator_call import OperatorCall
from lockstep.formatting import format_quantity
from lockstep.tools.replay.bisection import Bisection
from lockstep.tools.replay.divergence import Divergence
from lockstep.tools.replay.recorded_run import RecordedRun, find_source_differences
from lockstep.tools.report.run_comparison import settings_sentences

__all__ = [
    "bisection_json",
    "describe_divergence",
    "list_facts",
    "list_sentences",
    "suggest_commands",
]

MAX_ULPS = 1000
"""The largest distance in units in the last place (ULPs); beyond it, a sentence gives the
difference of the values instead."""

MAX_SOURCES = 6
"""The largest number of files that a sentence names."""

CALL_ROWS = ("operator", "line", "code", "arguments", "inputs", "outputs")

DIRECTION_NAMES = {
    "data": "data",
    "state": "state before the step",
    "forward": "forward pass",
    "backward": "backward pass",
    "reduction": "sum of the gradients",
    "optimizer": "update",
}


def describe_divergence(result: Bisection) -> str:
    """Return the result in one sentence."""
    a = result.a.name
    b = result.b.name
    divergence = result.divergence
    if divergence is None:
        return f"{a} and {b} agree in everything that both recorded."
    where = describe_divergence_place(divergence, result.model)
    sentence = divergence.sentence
    if (
        divergence.what == "data"
        and result.recorded is not None
        and result.recorded.what == "batch"
    ):
        sentence = "the batches have different samples"
    return f"{a} and {b} differ first in {where}: {sentence}."


def describe_divergence_place(divergence: Divergence, model: str = "") -> str:
    """Return where a difference arises, in words.

    Args:
        divergence: The difference.
        model: The name of the model itself; "" if it is not known.
    """
    words = [f"step {divergence.step:,}"]
    if divergence.microbatch is not None:
        words.append(f"micro-batch {divergence.microbatch}")
    if divergence.direction is not None:
        words.append(DIRECTION_NAMES[divergence.direction])
    if divergence.unit and divergence.unit == model:
        words.append(f"the model itself (`{divergence.unit}`)")
    elif divergence.unit:
        words.append(f"module `{divergence.unit}`")
    if divergence.parameter and f"`{divergence.parameter}`" not in divergence.sentence:
        words.append(f"`{divergence.parameter}`")
    return ", ".join(words)


def list_facts(result: Bisection) -> list[tuple[str, ...]]:
    """Return a table of both sides at the difference: a name and two values per row."""
    divergence = result.divergence
    if divergence is None:
        return []
    calls = [(result.a, divergence.a), (result.b, divergence.b)]
    columns = [_describe_call(run, call, divergence.step) for run, call in calls]
    rows = [(name, *(column.get(name, "") for column in columns)) for name in CALL_ROWS]
    if divergence.element is not None:
        index = ", ".join(map(str, divergence.element.index))
        rows.append((f"element [{index}]", repr(divergence.element.a), repr(divergence.element.b)))
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


def list_sentences(result: Bisection) -> list[str]:
    """Return sentences about what was compared and how far the result can be trusted."""
    a = result.a
    b = result.b
    exact = "Replays of both runs compute what was recorded, bit for bit."
    return [
        *_element_sentence(result.divergence),
        _compared_sentence(result),
        *_end_sentence(a),
        *_end_sentence(b),
        *([exact] if all(result.is_exact) else []),
        *([] if result.equal else settings_sentences(a.run, b.run)),
        *_sources_sentence(result),
        *_advice(result),
        *(f"{remark}." for remark in result.remarks),
        *(f"{run.name}: {remark}" for run in (a, b) for remark in run.run.remarks),
    ]


def _element_sentence(divergence: Divergence | None) -> Iterator[str]:
    if divergence is None or divergence.element is None:
        return
    element = divergence.element
    count = f"{element.count:,} elements differ" if element.count > 1 else "One element differs"
    distance = ""
    if element.ulps is not None and element.ulps > MAX_ULPS:
        distance = f"; the first by {abs(element.a - element.b):.3g}"
    elif element.ulps is not None:
        distance = f"; the first by {format_quantity(element.ulps, 'unit')} in the last place"
    yield f"{count}{distance}."


def _compared_sentence(result: Bisection) -> str:
    """Return a sentence about what the records have in common, up to the difference."""
    steps, digests = _list_compared(result)
    what = f"{format_quantity(steps, 'step')} and {format_quantity(len(digests), 'digest')}"
    if result.divergence is None:
        return f"Compared, and bit-identical: {what} of the weights."
    recorded = result.recorded
    if recorded is None:
        return f"Of what both recorded ({what} of the weights), only digests differ."
    number = "" if recorded.microbatch is None else f" {recorded.microbatch}"
    which = "samples" if recorded.what == "batch" else f"{recorded.what}{number}"
    return f"The records differ first in step {recorded.step:,}, in the {which}."


def _list_compared(result: Bisection) -> tuple[int, list[int]]:
    """Return the number of common steps, and the numbers of steps with a digest in both records."""
    a = result.a
    b = result.b
    steps = {step.step for step in a.steps} & {step.step for step in b.steps}
    return len(steps), sorted(a.run.digests.keys() & b.run.digests.keys())


def _end_sentence(run: RecordedRun) -> Iterator[str]:
    """Yield a sentence about a run that failed, which no comparison of steps shows."""
    if run.run.state == "failed":
        message = str((run.run.end or {}).get("message") or "").partition("\n")[0]
        yield f"{run.name} failed after step {run.steps[-1].step:,}: {message}"


def _advice(result: Bisection) -> Iterator[str]:
    """Yield a sentence about how to learn more about a difference that only records show."""
    divergence = result.divergence
    if divergence is None or divergence.what == "microbatches":
        return
    if not result.is_replayed and divergence.direction is None:
        yield (
            "To learn where in the step it arises, bisect where replays of both runs compute what "
            "was recorded: on a machine like those of the runs."
        )


def _sources_sentence(result: Bisection) -> Iterator[str]:
    if result.divergence is None:
        return
    names = find_source_differences(result.a, result.b, result.divergence.step)
    if names:
        more = f" and {len(names) - MAX_SOURCES} more" if len(names) > MAX_SOURCES else ""
        yield f"Their sources differ in {', '.join(names[:MAX_SOURCES])}{more}."


def suggest_commands(result: Bisection) -> list[str]:
    """Return commands that investigate the difference further."""
    divergence = result.divergence
    if divergence is None:
        return []
    lines = []
    for run in (result.a, result.b):
        folder = os.path.relpath(run.folder)
        folder = str(run.folder) if folder.startswith("..") else folder
        words = ["lockstep", "replay", folder, "--step", str(divergence.step)]
        if divergence.microbatch is not None:
            words += ["--microbatch", str(divergence.microbatch)]
            words += ["--pdb"] if divergence.source is not None else []
        lines.append(shlex.join(words))
    return lines


def bisection_json(result: Bisection) -> dict[str, Any]:
    """Return the result as plain values for JSON."""
    divergence = result.divergence
    element = None if divergence is None else divergence.element
    steps, digests = _list_compared(result)
    return {
        "equal": result.equal,
        "step": divergence and divergence.step,
        "microbatch": divergence and divergence.microbatch,
        "unit": divergence and divergence.unit,
        "direction": divergence and divergence.direction,
        "operator": divergence and divergence.operator,
        "source": divergence and divergence.source,
        "first_element": element
        and {
            "index": list(element.index),
            "a": _plain(element.a),
            "b": _plain(element.b),
            "ulps": element.ulps,
        },
        "differing_elements": element and element.count,
        "parameter": divergence and divergence.parameter,
        "what": divergence and divergence.what,
        "sentence": describe_divergence(result),
        "runs": [result.a.name, result.b.name],
        "steps_compared": steps,
        "digests_compared": digests,
        "is_replayed": result.is_replayed,
        "reproduced": list(result.is_exact),
        "remarks": list(result.remarks),
        "seconds": round(result.seconds, 3),
    }


def _plain(value: complex | float | bool) -> Any:
    """Return a value for JSON, which has neither complex nor non-finite numbers."""
    if isinstance(value, complex) or not math.isfinite(value):
        return str(value)
    return value
