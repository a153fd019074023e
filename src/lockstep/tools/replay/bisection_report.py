"""The result of `lockstep bisect`: a lead, facts, sentences and commands as text, and JSON."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from typing import Any

from lockstep.audit.operator_call import OperatorCall
from lockstep.formatting import format_quantity
from lockstep.record.columns import as_dict
from lockstep.tools.replay.bisection import Bisection, Reproduction
from lockstep.tools.replay.divergence import Divergence
from lockstep.tools.replay.recorded_run import RecordedRun, find_source_differences
from lockstep.tools.report.run_comparison import find_setting_differences, settings_sentences

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
    a, b = result.a.name, result.b.name
    divergence = result.divergence
    if divergence is None:
        return f"{a} and {b} agree in everything that both recorded."
    where = describe_location(divergence, result.model)
    sentence = divergence.sentence
    if (
        divergence.what == "data"
        and result.recorded is not None
        and result.recorded.what == "batch"
    ):
        sentence = "the batches have different samples"
    return f"{a} and {b} differ first in {where}: {sentence}."


def describe_location(divergence: Divergence, model: str = "") -> str:
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
    steps = [
        {step.step: step for step in run.steps}.get(divergence.step) for run in (result.a, result.b)
    ]
    for name in ("loss", "norm"):
        values = [None if step is None else getattr(step, name) for step in steps]
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


def list_sentences(result: Bisection) -> list[str]:
    """Return sentences about what was compared and how far the result can be trusted."""
    return [
        *_element_sentence(result.divergence),
        _compared_sentence(result),
        *_length_sentences(result),
        *_stop_sentence(result),
        *_reproduction_sentences(result),
        *settings_sentences(result.a.run, result.b.run, is_same=result.equal),
        *_arguments_sentence(result),
        *_sources_sentence(result),
        *_advice(result),
        *(f"{remark}." for remark in result.remarks),
        *(f"{run.name}: {remark}" for run in (result.a, result.b) for remark in run.run.remarks),
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
    compared = result.compared
    parts = format_quantity(compared.steps, "step")
    digests = ""
    if compared.digests:
        numbers = [f"{number:,}" for number in compared.digests]
        shown = ", ".join(numbers[:6]) + (
            f" and {len(numbers) - 6} more" if len(numbers) > 6 else ""
        )
        digests = f", and the digests of the weights after {shown} steps"
    what = f"{parts} (losses of the micro-batches, gradient norms, samples){digests}"
    if result.divergence is None:
        return f"Compared, and bit-identical: {what}."
    recorded = result.recorded
    if recorded is None:
        return f"Of what both recorded, only digests differ: {what}."
    number = "" if recorded.microbatch is None else f" {recorded.microbatch}"
    which = "samples" if recorded.what == "batch" else f"{recorded.what}{number}"
    if recorded.what == "stop":
        return f"The records agree up to step {recorded.step:,}; compared: {what}."
    return f"The records differ first in step {recorded.step:,}, in the {which}; compared: {what}."


def _length_sentences(result: Bisection) -> Iterator[str]:
    for run, count in (
        (result.a, result.compared.only_a),
        (result.b, result.compared.only_b),
    ):
        if count:
            yield f"{run.name} has {format_quantity(count, 'step')} more, which were not compared."


def _stop_sentence(result: Bisection) -> Iterator[str]:
    """Yield a sentence about where the runs failed."""
    runs = result.a, result.b
    parts = []
    for run, other in (runs, runs[::-1]):
        if run.stop is not None:
            at = f"step {run.stop.step:,}"
            if run.stop.microbatch is not None:
                at += f", micro-batch {run.stop.microbatch}"
            parts.append(f"{run.name} stopped in {at} ({run.stop.what})")
            if other.stop is None and any(step.step == run.stop.step for step in other.steps):
                parts.append(f"{other.name} continued")
    if parts:
        yield f"{'; '.join(parts)}."


def _arguments_sentence(result: Bisection) -> Iterator[str]:
    programs = [as_dict(run.run.latest("program")) for run in (result.a, result.b)]
    a, b = (shlex.join(map(str, program.get("arguments") or ())) for program in programs)
    if a != b and all(programs) and not result.equal:
        yield f"Their arguments differ: {a or '(none)'} and {b or '(none)'}."


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


def _reproduction_sentences(result: Bisection) -> Iterator[str]:
    """Yield sentences about whether the replays computed what the records say."""
    both = result.reproductions
    if all(reproduction.is_exact for reproduction in both):
        yield "Replays of both runs compute what was recorded, bit for bit."
        return
    for run, reproduction in zip((result.a, result.b), both, strict=True):
        if reproduction.is_exact:
            yield f"Replays of {run.name} compute what was recorded, bit for bit."
        elif reproduction.is_exact is not None:
            yield (
                f"The replay of {run.name} does not compute what was recorded: "
                f"{_deviation(reproduction)}"
            )


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
        "operators": divergence
        and {side: _call_json(call) for side, call in (("a", divergence.a), ("b", divergence.b))},
        "runs": [result.a.name, result.b.name],
        "steps_compared": result.compared.steps,
        "digests_compared": list(result.compared.digests),
        "is_replayed": result.is_replayed,
        "reproduced": [reproduction.is_exact for reproduction in result.reproductions],
        "repeatable": [reproduction.is_repeatable for reproduction in result.reproductions],
        "remarks": list(result.remarks),
        "settings": find_setting_differences([result.a.run, result.b.run]),
        "seconds": round(result.seconds, 3),
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
