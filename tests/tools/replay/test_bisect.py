"""Bisect finds what was planted, with real runs and replays of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lockstep.kernel.errors import RankError
from lockstep.tools.replay.bisection import bisect_runs
from lockstep.tools.replay.bisection_report import (
    bisection_json,
    describe_divergence,
    list_facts,
    list_sentences,
)
from lockstep.tools.replay.divergence import Direction
from planted import KERNELS_OF_TORCH, MICROBATCH, PLANTED, SCRIPT, STEP, Planted, record, replace


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def recorded(folder):
    """Record a script once: recorded(source, name, environ, ranks)."""
    runs = {}

    def get(source, name="plain", environ=None, ranks=1):
        if (source, name) not in runs:
            runs[source, name] = record(folder, name, source, environ, ranks)
        return runs[source, name]

    return get


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(
            each,
            id=each.name,
            marks=[] if each.is_quick else [pytest.mark.stress, pytest.mark.timeout(300)],
        )
        for each in PLANTED
    ],
)
def test_a_planted_difference_is_found_and_named(recorded, planted: Planted):
    first, second = planted.sources()
    a = recorded(first, "plain" if first == SCRIPT else f"plain, {planted.name}")
    found = bisect_runs(a, recorded(second, planted.name, planted.environ))
    assert planted.check(found) == []
    is_exact = planted.name != "a non-deterministic operator"
    assert found.is_exact == (is_exact, is_exact)
    if KERNELS_OF_TORCH.items() <= planted.both.items():  # which this process has not
        assert all("other bits than" in remark for remark in found.remarks)
    else:
        assert not found.remarks or not is_exact


def test_there_are_some_of_all_directions():
    assert {each.direction for each in PLANTED if each.is_quick} == set(get_args(Direction))


LOOSE_WIRE = {
    "        return nn.functional.dropout": """\
        folder = os.path.dirname(os.path.dirname(__file__))
        if is_here(2) and os.path.exists(os.path.join(folder, "loose wire")):
            y.detach().numpy().view(numpy.int32)[1, 6] ^= 1 << 18
        return nn.functional.dropout"""
}


def test_a_bit_that_only_the_recorded_run_had_flipped(recorded, folder):
    """Its replay has the bits of the other run; the records name the micro-batch."""
    wire = folder / "loose wire"
    wire.touch()
    a = recorded(SCRIPT)
    b = recorded(replace(SCRIPT, LOOSE_WIRE), "loose")
    wire.unlink()
    found = bisect_runs(a, b)
    divergence = found.divergence
    assert divergence is not None
    assert not found.is_replayed
    place = divergence.step, divergence.microbatch, divergence.direction, divergence.unit
    assert place == (STEP, MICROBATCH, None, None)
    text = " ".join(list_sentences(found))
    said = "The replay of loose does not compute what was recorded: the loss of the micro-batch 2"
    assert f"{said} of step 4 was " in text
    assert text.endswith("loose --steps 4.")
    assert bisection_json(found)["reproduced"] == [True, False]


def test_layouts_of_one_training_have_no_difference_and_hide_none(recorded):
    alone = recorded(SCRIPT)
    four = recorded(SCRIPT, "four", ranks=4)
    found = bisect_runs(alone, four)
    assert found.equal
    plain = bisection_json(found)
    assert plain["steps_compared"] == 8
    # The one after 6 is left out where that after 3 is still being written.
    assert plain["digests_compared"] in ([3, 8], [3, 6, 8], [3, 7, 8])
    planted = next(each for each in PLANTED if each.direction == "optimizer")
    other = recorded(planted.sources()[1], planted.name)
    assert planted.check(bisect_runs(four, other)) == []


LATE = {
    "        super().__init__()": """\
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))""",
    "        y = Squash.apply(x)": """\
        y = Squash.apply(x + self.shift) if trainer.steps >= 5 else Squash.apply(x)""",
}


@pytest.mark.stress
@pytest.mark.parametrize("step", [1, 4])
def test_a_change_that_shows_in_a_later_step(recorded, step):
    """The search goes back to the step that made it: by digests, or by one more step."""
    source = replace(SCRIPT, LATE)
    loop = "            trainer.step(batch)"
    write = f"            model[2].shift.data[3] += (trainer.steps == {step}) * 1e-3\n{loop}"
    a = recorded(source, "late")
    found = bisect_runs(a, recorded(replace(source, {loop: write}), f"late, from {step}"))
    assert found.recorded is not None
    assert found.recorded.step == 5
    divergence = found.divergence
    assert divergence is not None
    assert (divergence.step, divergence.direction, divergence.parameter) == (
        step,
        "state",
        "2.shift",
    )
    assert divergence.element is None, "no operator of that step reads it"


@pytest.mark.stress
def test_a_run_that_was_resumed(recorded, folder):
    """A difference that only the resumed process made is found behind the checkpoint."""
    loop = "            trainer.step(batch)"
    stop = f"""\
            if trainer.steps == 5 and "STOP" in os.environ:
                import threading  # a failure abandons the checkpoint that is being written
                [part.join(60) for part in threading.enumerate() if "checkpoint" in part.name]
                raise SystemExit(3)
            trainer.optimizer.param_groups[0]["lr"] *= 0.9 if "RESUMED" in os.environ else 1
{loop}"""
    source = replace(SCRIPT, {loop: stop})
    with pytest.raises(RankError, match="status 3"):
        record(folder, "resumed", source, {"STOP": "1"})
    resumed = replace(source, {'0.9 if "RESUMED" in os.environ else 1': "0.9"})
    b = record(folder, "resumed", resumed, resume=True)
    assert [line["step"] for line in b.run.resumes] == [3]
    found = bisect_runs(recorded(source, "uninterrupted"), b)
    divergence = found.divergence
    assert divergence is not None
    place = divergence.step, divergence.direction, divergence.operator
    assert place == (3, "optimizer", "aten.add_.Tensor")
    assert found.is_exact == (True, True)


@pytest.mark.stress
def test_a_step_whose_bits_change_when_its_operators_are_recorded(recorded):
    """torch composes the gradient of prod in another way then; modules are named all the same."""
    dropout = "        return nn.functional.dropout(y, 0.2)"
    product = f"        y = y * torch.prod(1 + 0.3 * y, dim=1, keepdim=True)\n{dropout}"
    source = replace(SCRIPT, {dropout: product})
    other = replace(source, {"momentum=0.9": "momentum=0.8"})
    found = bisect_runs(recorded(source, "product"), recorded(other, "product, momentum"))
    divergence = found.divergence
    assert divergence is not None
    place = divergence.step, divergence.direction, divergence.unit, divergence.operator
    assert place == (1, "optimizer", "0", None)
    assert found.is_exact == (True, True)
    (remark,) = found.remarks
    assert remark.startswith("Recording the operators of product changed its bits (the norm of")


@pytest.mark.stress
def test_the_page_about_bisect_shows_what_it_prints(folder):
    page = (Path(__file__).parents[3] / "docs/guides/bisect.md").read_text()
    (script,) = re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)
    a = record(folder, "before", script, ranks=4)
    b = record(folder, "after", replace(script, {"counts) / 3": "counts) * (1 / 3)"}))
    found = bisect_runs(a, b)
    shown = " ".join(page.split())
    for text in (
        describe_divergence(found),
        *list_sentences(found)[:1],
        *list_sentences(found)[2:],
    ):
        assert text in shown
    for row in list_facts(found):
        assert " ".join(" ".join(row).split()) in shown
