"""The operator that made two computations differ, in programs of drawn instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from lockstep.audit.operator_call import OperatorCall
from lockstep.audit.operator_difference import OperatorDifference, first_operator_difference

PARAMETERS = 3
"""The first variables of a program, which no instruction writes."""


@dataclass(frozen=True)
class Instruction:
    """One operator: it reads variables, and its result is a new one."""

    operator: str
    inputs: tuple[int, ...]
    argument: int = 0
    is_random: bool = False
    microbatch: int = 0


def number(*parts: object) -> int:
    """Return a number that stands for a value; never 0."""
    return hash(parts) or 1


def execute(
    program: Sequence[Instruction],
    parameters: Sequence[int] = range(1, PARAMETERS + 1),
    wrong: int | None = None,
    extra: Sequence[tuple[int, Instruction]] = (),
) -> list[OperatorCall]:
    """Return the calls of a program.

    Args:
        program: The instructions; their results are the variables after the parameters.
        parameters: The values of the first variables.
        wrong: The instruction that computes another result than it should.
        extra: Instructions that are executed before the one of that index, and whose results
            nothing reads.
    """
    values = list(parameters)
    producers = [-1] * len(parameters)
    generator = 1
    calls = []

    def call(instruction: Instruction, is_wrong: bool) -> int:
        nonlocal generator
        before = generator if instruction.is_random else 0
        if instruction.is_random:
            generator = number("after", generator)
        read = tuple(values[each] for each in instruction.inputs)
        result = number(instruction.operator, read, instruction.argument, before, is_wrong)
        calls.append(
            OperatorCall(
                operator=instruction.operator,
                phase="forward",
                microbatch=instruction.microbatch,
                unit="",
                inputs=read,
                outputs=(result,),
                arguments=f"value={instruction.argument}",
                generator=(before, generator if instruction.is_random else 0),
                producers=tuple(producers[each] for each in instruction.inputs),
            )
        )
        return result

    for index, instruction in enumerate(program):
        for _, each in (pair for pair in extra if pair[0] == index):
            call(each, False)
        result = call(instruction, index == wrong)
        values.append(result)
        producers.append(len(calls) - 1)
    return calls


@st.composite
def programs(draw, min_size: int = 1) -> list[Instruction]:
    """Draw a program in which every instruction has a result of its own."""
    program: list[Instruction] = []
    for index in range(draw(st.integers(min_size, 25))):
        variables = st.integers(0, PARAMETERS + index - 1)
        program.append(
            Instruction(
                operator=draw(st.sampled_from("abc")),
                inputs=tuple(draw(st.lists(variables, min_size=1, max_size=3))),
                argument=1000 + index,
                is_random=draw(st.integers(0, 4)) == 0,
            )
        )
    return program


@given(programs())
def test_equal_calls_have_no_difference(program):
    assert first_operator_difference(execute(program), execute(program)) is None
    assert first_operator_difference([], []) is None


def harmless(microbatch: int = 0) -> st.SearchStrategy[Instruction]:
    """Draw an instruction that changes no other one."""
    return st.builds(
        Instruction,
        operator=st.sampled_from("abcd"),
        inputs=st.tuples(st.integers(0, PARAMETERS - 1)),
        argument=st.integers(0, 3),
        microbatch=st.just(microbatch),
    )


@given(programs(), st.data())
def test_operators_without_effect_are_no_difference(program, data):
    place = st.integers(0, len(program) - 1)
    extra = data.draw(st.lists(st.tuples(place, harmless()), max_size=4))
    calls = execute(program, extra=extra)
    assert first_operator_difference(execute(program), calls) is None
    assert first_operator_difference(calls, execute(program)) is None
    wrong = data.draw(place)
    shift = sum(1 for index, _ in extra if index <= wrong)
    found = first_operator_difference(execute(program), execute(program, wrong=wrong, extra=extra))
    assert found == OperatorDifference("output", wrong, wrong + shift, 0)


def chain(*operators: str) -> list[Instruction]:
    """Return a program in which each operator reads the result of the one before."""
    return [
        Instruction(name, (PARAMETERS + index - 1 if index else 0,))
        for index, name in enumerate(operators)
    ]


def test_the_first_of_several_inserted_operators_is_named():
    a = execute(chain("mm", "relu", "mm", "sum"))
    b = execute(chain("mm", "relu", "rand", "mul", "mm", "sum"))
    assert first_operator_difference(a, b) == OperatorDifference("call", None, 2)
    assert first_operator_difference(b, a) == OperatorDifference("call", 2, None)


def test_an_update_that_only_one_side_makes_is_found_though_nothing_reads_it():
    calls = execute(chain("mm", "sum"))
    update = OperatorCall(
        "add_", "forward", 0, "", (1,), (9,), output_types=("weight: float32[3]",), producers=(-1,)
    )
    found = first_operator_difference(calls, [*calls, update])
    assert found == OperatorDifference("call", None, 2)
    step = replace(update, phase="optimizer", output_types=("float32[3]",))
    assert first_operator_difference([*calls, step], calls) == OperatorDifference("call", 2, None)
    message = replace(update, output_types=("float32[3]",))
    assert first_operator_difference(calls, [*calls, message]) is None


def test_values_that_one_side_does_not_know_are_no_difference():
    calls = execute(chain("mm", "copy", "sum"))
    unknown = [calls[0], replace(calls[1], outputs=(0,)), replace(calls[2], inputs=(0,))]
    assert first_operator_difference(calls, unknown) is None
    assert first_operator_difference(unknown, calls) is None
    other = [*unknown[:2], replace(unknown[2], outputs=(5,))]
    assert first_operator_difference(calls, other) == OperatorDifference("output", 2, 2, 0)
