"""The first difference between two layouts, on plain values."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.model.fingerprint import StepFingerprint, TrainerFingerprint
from lockstep.tools.check.difference import LayoutDifference, RankFingerprint, first_difference

MICROBATCHES = 4
CALLS = [
    ("enter", "Net", (1,)),
    ("enter", "body", (1,)),
    ("enter", "body.0", (2,)),
    ("leave", "body.0", (3,)),
    ("leave", "body", (4,)),
    ("enter", "head", (4,)),
    ("leave", "head", (5,)),
    ("leave", "Net", (5,)),
]
PARAMETERS = ("body.0.weight", "body.0.bias", "head.weight")
STATE = {**dict.fromkeys(PARAMETERS, 6), "body.mean": 7}


def whole_step(number: int, leaves: range) -> StepFingerprint:
    """A step of the whole model on a rank that computes the micro-batches `leaves`."""
    return StepFingerprint(
        0,
        number,
        before=dict(STATE),
        data={leaf: (leaf,) for leaf in leaves},
        calls={(leaf, 0): list(CALLS) for leaf in leaves},
        losses=dict.fromkeys(leaves, (0.5).hex()),
        gradients=dict.fromkeys(PARAMETERS, 8),
        state=dict(STATE),
        optimizer={f"{name}/momentum_buffer": 9 for name in PARAMETERS},
        loss=(0.5).hex(),
        digest="abc",
    )


def trainer() -> TrainerFingerprint:
    return TrainerFingerprint("Net", "lockstep", PARAMETERS, dict(STATE))


def replicas(ranks: int, steps: int = 2) -> list[RankFingerprint]:
    width = MICROBATCHES // ranks
    return [
        RankFingerprint(
            [trainer()],
            [whole_step(n, range(rank * width, (rank + 1) * width)) for n in range(steps)],
        )
        for rank in range(ranks)
    ]


def stages() -> list[RankFingerprint]:
    """Rank 0 holds `body`, rank 1 `head`; the model itself is not called."""
    found = []
    for rank, (calls, names) in enumerate(
        [(CALLS[1:5], ("body.0.weight", "body.0.bias", "body.mean")), (CALLS[5:7], PARAMETERS[2:])]
    ):
        initial = {name: STATE[name] for name in names}
        steps = []
        for number in range(2):
            step = whole_step(number, range(MICROBATCHES))
            step.calls = {(leaf, rank): list(calls) for leaf in range(MICROBATCHES)}
            step.losses = step.losses if rank else {}
            step.gradients = {name: 8 for name in names if name in PARAMETERS}
            step.state = dict(initial)
            step.before = dict(initial)
            step.optimizer = {f"{name}/momentum_buffer": 9 for name in step.gradients}
            steps.append(step)
        found.append(
            RankFingerprint([TrainerFingerprint("Net", "lockstep", PARAMETERS, initial)], steps)
        )
    return found


def set_call(step: StepFingerprint, leaf: int, kind: str, module: str) -> None:
    """Let one call, of any stage, have other values."""
    for (microbatch, _), calls in step.calls.items():
        for number, (a, b, _) in enumerate(calls):
            if (microbatch, a, b) == (leaf, kind, module):
                calls[number] = (a, b, (99,))


@pytest.mark.parametrize("other", [replicas(1), replicas(2), replicas(4), stages()])
def test_the_same_work_in_other_places_is_equal(other):
    assert first_difference(replicas(1), other) is None
    assert first_difference(other, replicas(1)) is None


def test_an_output_names_its_module():
    other = replicas(2)
    set_call(other[1].steps[1], 3, "leave", "body.0")
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("body.0", None, "output", microbatch=3, step=1)


def test_an_input_that_a_module_made_itself_names_that_module():
    other = replicas(2)
    set_call(other[1].steps[0], 2, "enter", "body.0")
    set_call(other[1].steps[0], 2, "leave", "body.0")
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("body", None, "forward", microbatch=2)


def test_an_input_that_crossed_a_boundary_names_the_module_that_got_it():
    other = stages()
    set_call(other[1].steps[0], 0, "enter", "head")
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("head", None, "input", microbatch=0)


def test_a_later_call_of_a_module_is_compared_with_the_same_call():
    reference = replicas(1)
    other = replicas(1)
    for ranks in (reference, other):
        ranks[0].steps[0].calls[0, 0] += [("enter", "body", (4,)), ("leave", "body", (11,))]
    other[0].steps[0].calls[0, 0][-1] = ("leave", "body", (12,))
    found = first_difference(reference, other)
    assert found == LayoutDifference("body", None, "output", microbatch=0)


def test_modules_that_only_one_layout_calls_are_not_compared():
    other = replicas(1)
    del other[0].steps[0].calls[0, 0][2:4]
    assert first_difference(replicas(1), other) is None


def test_data_come_before_modules_and_the_lowest_microbatch_first():
    other = replicas(2)
    set_call(other[0].steps[0], 0, "leave", "body.0")
    other[1].steps[0].data[3] = (99,)
    other[1].steps[0].data[2] = (99,)
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("data", None, "data", microbatch=2, rank=1)


def test_parameters_that_changed_between_steps_come_before_what_modules_make_of_them():
    other = replicas(2)
    other[1].steps[1].before["head.weight"] = 99
    set_call(other[1].steps[1], 3, "leave", "head")
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("head", "head.weight", "between", rank=1, step=1)


def test_a_module_of_a_later_microbatch_comes_after_the_loss_of_an_earlier_one():
    other = replicas(1)
    set_call(other[0].steps[0], 2, "leave", "body.0")
    other[0].steps[0].losses[1] = (0.25).hex()
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("loss", None, "loss", microbatch=1)


def test_gradients_are_named_in_backward_order():
    other = replicas(2)
    other[1].steps[0].gradients.update({"body.0.weight": 1, "body.0.bias": 1})
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("body.0", "body.0.bias", "gradient", rank=1)


def test_a_gradient_that_only_one_layout_has_differs():
    other = replicas(1)
    other[0].steps[0].gradients["head.weight"] = 0
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("head", "head.weight", "gradient", rank=0)


def test_gradients_that_no_rank_has_whole_are_not_compared():
    other = replicas(2)
    for rank in other:
        for step in rank.steps:
            step.gradients = {}
    assert first_difference(replicas(1), other) is None


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        ("before", "body.mean", LayoutDifference("body", "body.mean", "between", rank=1)),
        ("state", "head.weight", LayoutDifference("optimizer", "head.weight", "update", rank=1)),
        ("state", "body.mean", LayoutDifference("body", "body.mean", "buffer", rank=1)),
        (
            "optimizer",
            "body.0.bias/momentum_buffer",
            LayoutDifference("optimizer", "body.0.bias", "state", rank=1),
        ),
    ],
)
def test_tensors_are_compared_on_every_rank(entry, name, expected):
    other = replicas(2)
    getattr(other[1].steps[0], entry)[name] = 99
    assert first_difference(replicas(1), other) == expected


def test_the_ranks_of_the_first_layout_are_compared_with_each_other():
    reference = replicas(2)
    reference[1].steps[0].state["head.weight"] = 99
    found = first_difference(reference, replicas(1))
    assert found == LayoutDifference("optimizer", "head.weight", "update", rank=None)


def test_the_initial_state_comes_first():
    other = replicas(1)
    other[0].trainers[0].initial["head.weight"] = 99
    other[0].steps[0].data[0] = (99,)
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference("head", "head.weight", "initial", rank=0)


def test_a_parameter_of_the_model_itself_is_of_its_class():
    reference = replicas(1)
    other = replicas(1)
    for value, ranks in enumerate((reference, other)):
        ranks[0].trainers[0].initial["scale"] = value
    found = first_difference(reference, other)
    assert found == LayoutDifference("Net", "scale", "initial", rank=0)


def test_steps_that_only_one_layout_took_are_a_difference():
    found = first_difference(replicas(1, steps=3), replicas(2, steps=2))
    assert found == LayoutDifference("script", None, "steps", step=2)


def test_other_trainers_are_a_difference():
    other = replicas(1)
    other[0].trainers.append(trainer())
    assert first_difference(replicas(1), other) == LayoutDifference("script", None, "steps")


def test_of_a_run_that_failed_what_is_there_is_compared():
    other = replicas(2, steps=2)
    other[0].steps.pop()
    assert first_difference(replicas(1), other, is_complete=False) is None
    other[1].steps[0].state["head.weight"] = 99
    found = first_difference(replicas(1), other, is_complete=False)
    assert found == LayoutDifference("optimizer", "head.weight", "update", rank=1)


def test_a_step_that_was_not_finished_has_no_outcome():
    other = replicas(2, steps=2)
    for rank in other:
        last = rank.steps[1]
        last.state = {}
        last.optimizer = {}
        last.gradients = {}
        last.loss = ""
        last.digest = ""
    assert first_difference(replicas(1), other, is_complete=False) is None
    other[1].steps[1].data[2] = (99,)
    found = first_difference(replicas(1), other, is_complete=False)
    assert found == LayoutDifference("data", None, "data", microbatch=2, rank=1, step=1)


def test_a_rank_that_never_began_is_not_compared():
    assert first_difference(replicas(1), [RankFingerprint()], is_complete=False) is None


@pytest.mark.parametrize(("what", "module"), [("loss", "loss"), ("digest", "Net")])
def test_what_is_left_is_the_loss_and_the_digest(what, module):
    other = replicas(2)
    setattr(other[1].steps[1], what, "other")
    found = first_difference(replicas(1), other)
    assert found == LayoutDifference(module, None, what, rank=1, step=1)


@given(
    ranks=st.sampled_from([1, 2, 4]),
    step=st.integers(0, 1),
    leaf=st.integers(0, MICROBATCHES - 1),
    first=st.integers(0, len(CALLS) - 1),
)
def test_all_that_follows_a_difference_may_differ_too(ranks, step, leaf, first):
    """A wrong value spoils everything after it; the first one is found all the same."""
    other = replicas(ranks)
    owner = other[leaf // (MICROBATCHES // ranks)]
    spoiled = [owner.steps[step], *(each for rank in other for each in rank.steps[step + 1 :])]
    for each in spoiled[1:]:
        each.data = dict.fromkeys(each.data, (99,))
    for kind, module, _ in CALLS[first:]:
        set_call(spoiled[0], leaf, kind, module)
    for rank in other:
        rank.steps[step].state = dict.fromkeys(STATE, 99)
    found = first_difference(replicas(1), copy.deepcopy(other))
    assert found is not None
    kind, module, _ = CALLS[first]
    around = {"body": "Net", "body.0": "body", "head": "Net", "Net": "Net"}
    assert (found.step, found.microbatch) == (step, leaf)
    assert found.module == (module if kind == "leave" else around[module])
