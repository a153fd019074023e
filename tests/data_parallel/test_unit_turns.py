"""Turns of units: one that draws runs alone, with its own numbers; the others together."""

import threading

import torch
from torch import nn

from lockstep.data_parallel.unit_turns import GeneratorStates, RandomOperators, UnitTurns
from lockstep.randomness import key

CPU = torch.device("cpu")


class Unit(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.work = work

    def forward(self):
        self.work()


def run_together(*functions):
    threads = [threading.Thread(target=each) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_units_that_draw_run_alone_with_their_own_numbers():
    states = GeneratorStates([CPU])
    turns = UnitTurns({0}, states)
    active, most, drawn = [], [], {}

    def make(thread):
        def draw():
            active.append(thread)
            numbers = [torch.rand(()).item() for _ in range(20)]
            most.append(len(active))
            drawn.setdefault(thread, []).append(numbers)
            active.remove(thread)

        def rest():
            active.append(thread)
            active.remove(thread)

        units = [Unit(draw), Unit(rest)]
        turns.install(units, lambda *parts: key(thread, *parts), CPU)

        def run():
            for _ in range(30):
                units[0]()
                units[1]()

        return run

    run_together(*(make(thread) for thread in range(3)))
    assert {*most} == {1}
    for thread, calls in drawn.items():
        for call, numbers in enumerate(calls):
            generator = torch.Generator().manual_seed(key(thread, 0, *([call] if call else [])))
            assert numbers == [torch.rand((), generator=generator).item() for _ in range(20)]
    assert not states.has_changed()


def test_other_units_run_at_the_same_time():
    turns, both = UnitTurns({1}, GeneratorStates([CPU])), threading.Barrier(2, timeout=30)
    units = [Unit(both.wait), Unit(both.wait)]
    for unit in units:
        turns.install([unit], key, CPU)
    run_together(*units)


def test_a_unit_that_is_not_known_to_draw_is_noticed():
    states = GeneratorStates([CPU])
    turns = UnitTurns({0}, states)
    units = [Unit(lambda: None), Unit(lambda: torch.rand(()))]
    turns.install(units, key, CPU)
    before = torch.get_rng_state()
    units[1]()
    units[0]()  # restores the states, but has compared them
    assert states.has_changed()
    torch.set_rng_state(before)


def test_operators_that_draw_are_found_by_unit():
    drawn, plain = nn.Dropout(0.5), nn.Dropout(0.0)
    operators = RandomOperators(["drawn", "plain"], CPU)
    for number, unit in enumerate((drawn, plain)):
        operators.watch(number, unit)
    with operators:
        plain(drawn(torch.ones(8)))
    assert operators.found == {0}
    with operators:
        torch.rand(2)
    assert operators.found == {0, -1}
