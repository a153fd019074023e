"""What is said of a difference: from fingerprints of modules, from operators, from records."""

from dataclasses import replace

import pytest

from lockstep.audit.operator_call import OperatorCall
from lockstep.audit.operator_difference import OperatorDifference
from lockstep.model.fingerprint import StepFingerprint
from lockstep.tools.replay.divergence import (
    Divergence,
    OperandLocation,
    add_operator,
    find_in_modules,
    find_in_records,
    locate_tensor,
)
from lockstep.tools.replay.record_difference import RecordDifference

NAMES = ("0.weight", "0.mean", "1.weight")


def fingerprint(step=0, trainer=1, **changes):
    """Return a step of two modules and two micro-batches, with some values replaced by -1."""
    calls = {
        (leaf, 0): [
            ("enter", "Net", (1,)),
            ("enter", "0", (2,)),
            ("leave", "0", (-1 if changes.get("output") == leaf else 3,)),
            ("enter", "1", (-1 if changes.get("output") == leaf else 3,)),
            ("leave", "1", (4,)),
            ("leave", "Net", (4,)),
        ]
        for leaf in range(2)
    }

    def values(what):
        return {name: -1 if changes.get(what) == name else 5 + step for name in NAMES}

    losses = {0: "0x1p-1", 1: "0x1p-2"}
    losses.pop(changes.get("missing"), None)
    return StepFingerprint(
        trainer=trainer,
        step=step,
        before=values("before"),
        data={0: (1,), 1: (-1 if changes.get("data") else 2,)},
        calls=calls,
        losses=losses,
        gradients={"0.weight": 7, "1.weight": -1 if changes.get("gradient") else 8},
        state=values("after"),
        optimizer={"1.weight/momentum_buffer": -1 if changes.get("momentum") else 9},
        loss="0x1p-1",
        digest="d",
        backward={1: {("1", 0, 0): 1, ("0", 0, 0): -1 if changes.get("backward") else 2}},
        leaf_gradients={1: {"0.weight": -1 if changes.get("leaf") else 3, "1.weight": 4}},
    )


def find(**changes):
    found = find_in_modules(fingerprint(1), fingerprint(1, **changes))
    return found and (found.direction, found.microbatch, found.unit, found.parameter)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"before": "0.mean"}, ("state", None, "0", "0.mean")),
        ({"data": True}, ("data", 1, None, None)),
        ({"output": 1}, ("forward", 1, "0", None)),
        ({"missing": 1}, ("forward", 1, None, None)),
        ({"missing": 1, "gradient": True}, ("forward", 1, None, None)),
        ({"missing": 1, "data": True}, ("data", 1, None, None)),
        ({"gradient": True}, ("reduction", None, "1", "1.weight")),
        ({"gradient": True, "leaf": True}, ("backward", 1, "0", "0.weight")),
        ({"gradient": True, "leaf": True, "backward": True}, ("backward", 1, "1", None)),
        ({"after": "0.weight"}, ("optimizer", None, "0", "0.weight")),
        ({"after": "0.mean"}, ("forward", None, "0", "0.mean")),
        ({"momentum": True}, ("optimizer", None, "1", "1.weight")),
    ],
)
def test_modules_name_the_place(changes, expected):
    assert find(**changes) == expected


def test_the_initial_state_is_step_0_of_a_program_from_its_beginning():
    found = find_in_modules(fingerprint(0), fingerprint(0, before="1.weight"))
    assert found is not None
    assert (found.step, found.what, found.unit) == (0, "initial", "1")
    found = find_in_modules(fingerprint(3), fingerprint(3, before="1.weight"))
    assert found is not None
    assert (found.step, found.what, found.unit) == (3, "between", "1")


CALL = OperatorCall(
    "aten.mm", "forward", 1, "0", (1, 2), (3,), "", (0, 0),
    ("0.weight: float32[4, 8]", "float32[2, 8]"), ("float32[2, 4]",), (-1, -1), "a.py:3 in forward",
)  # fmt: skip
FOUND = Divergence(4, "forward", "output", "module `0` computes ...", 1, "0")


def add(kind, a=CALL, b=CALL, found=FOUND, position=0):
    places = (None if a is None else 0, None if b is None else 0)
    difference = OperatorDifference(kind, *places, position)
    return add_operator(found, difference, [a], [b])


@pytest.mark.parametrize("what", ["initial", "between", "data", "missing"])
def test_what_comes_before_all_operators_is_left_as_it_is(what):
    found = replace(FOUND, what=what)
    assert add("input", found=found) == found


def test_where_the_first_element_is_found():
    difference = OperatorDifference("output", 1, 0, 0)
    assert locate_tensor(FOUND, difference, [CALL, CALL], [CALL]) == OperandLocation(1, 0, False, 0)
    difference = OperatorDifference("input", 0, 0, 1)
    assert locate_tensor(FOUND, difference, [CALL], [CALL]) == OperandLocation(0, 0, True, 1)
    larger = replace(CALL, output_types=("float32[3, 4]",))
    difference = OperatorDifference("output", 0, 0, 0)
    assert locate_tensor(FOUND, difference, [CALL], [larger]) is None
    assert locate_tensor(FOUND, OperatorDifference("call", None, 0), [CALL], [CALL]) is None
    assert locate_tensor(FOUND, None, [CALL], [CALL]) is None
    state = Divergence(0, "state", "initial", "", None, "0", "0.weight")
    other = replace(CALL, input_types=())
    assert locate_tensor(state, None, [other, CALL], [CALL]) == OperandLocation(1, 0, True, 0)
    assert locate_tensor(state, None, [other], [CALL]) is None


@pytest.mark.parametrize(
    ("recorded", "direction", "microbatch", "words"),
    [
        (RecordDifference(4, "batch", None, "x", "y"), "data", None, "other samples"),
        (RecordDifference(4, "loss of the micro-batch", 1, "0.5", "0.25"), None, 1,
         "the loss of the micro-batch 1 is 0.5 in the first run and 0.25 in the second"),
        (RecordDifference(4, "loss of the micro-batch", 0, "0.5", "0.25"), None, 0, "0.5"),
        (RecordDifference(4, "loss of the micro-batch", 1, "0.5", "none"), None, 1, "none"),
        (RecordDifference(4, "norm", None, "2.0", "3.0"), None, None, "the losses agree"),
        (None, None, None, "in one of the steps 3 to 4"),
    ],
)  # fmt: skip
def test_records_alone(recorded, direction, microbatch, words):
    found = find_in_records(recorded, 3, 4)
    assert (found.step, found.direction, found.microbatch) == (4, direction, microbatch)
    assert words in found.sentence
