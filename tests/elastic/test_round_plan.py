"""The plan of the next round, on worlds whose members are killed at any point."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.elastic.round_plan import (
    Continue,
    Report,
    Restart,
    RestartTransfer,
    choose_world_size,
    plan_round,
)

COLLECTIVES = 2  # of one operation while it is prepared; the barrier is one more
LAST = 3  # operations of a simulated run


@dataclass
class Member:
    """A simulated member: how far it is in its operation, and what it has committed."""

    number: int
    operation: int = 0
    entered: int = 0  # collectives of this operation that it has begun
    passed: int = 0  # ... and that it has passed
    committed: list[int] = field(default_factory=list)
    has_lost_peer: bool = False

    @property
    def is_done(self) -> bool:
        return self.has_lost_peer or self.operation == LAST

    @property
    def is_prepared(self) -> bool:
        return self.passed == COLLECTIVES

    def commit(self) -> None:
        self.committed.append(self.operation)
        self.operation = self.operation + 1
        self.entered = 0
        self.passed = 0

    def undo(self) -> None:
        self.entered = 0
        self.passed = 0


def advance(member: Member, world: list[Member], dead: list[Member], *, fails: bool) -> None:
    """Let a member begin its next collective, or pass it if everybody has begun it."""
    if member.entered == member.passed:
        member.entered += 1
        return
    here = (member.operation, member.entered)
    if all((each.operation, each.entered) >= here for each in world) and not (dead and fails):
        member.passed += 1
        if member.passed > COLLECTIVES:
            member.commit()
    elif dead or any(each.has_lost_peer for each in world):
        member.has_lost_peer = True


@given(st.integers(0, 2**32))
def test_every_operation_is_committed_once_by_every_survivor(seed):
    chance = random.Random(seed)
    alive = [Member(number) for number in range(chance.randint(2, 4))]
    committed_by_any: set[int] = set()
    while not all(member.operation == LAST for member in alive):
        world = list(alive)
        dead = []
        for member in world:
            member.has_lost_peer = False
        while not all(member.is_done for member in alive):
            member = chance.choice([member for member in alive if not member.is_done])
            if len(alive) > 1 and chance.random() < 0.08:
                dead.append(alive.pop(alive.index(member)))
            else:
                advance(member, world, dead, fails=chance.random() < 0.5)
            committed_by_any.update(*(each.committed for each in world))
        if any(member.operation == LAST for member in alive):
            behind = [member for member in alive if member.operation < LAST]
            # Those that have ended the script do not report, but all others have prepared.
            assert all(m.operation == LAST - 1 and m.is_prepared for m in behind)
            alive = behind
            if not alive:
                break
        reports = [Report(m.number, m.operation, is_prepared=m.is_prepared) for m in alive]
        assert max(r.operation for r in reports) - min(r.operation for r in reports) <= 1
        plan = plan_round(reports, wanted=4)
        assert isinstance(plan, Continue)
        assert plan.members == tuple(member.number for member in alive)
        assert not plan.joined
        assert not plan.left
        assert plan.commit or plan.operation not in committed_by_any
        for member in alive:
            if member.operation == plan.operation and plan.commit:
                assert member.is_prepared
                member.commit()
            else:
                member.undo()
        assert len({member.operation for member in alive}) == 1
    for member in alive:
        assert member.committed == list(range(LAST))


@st.composite
def worlds(draw):
    """Draw reports of survivors at most one operation apart, and what the launcher wants."""
    stages = draw(st.sampled_from([1, 1, 2, 3]))
    members = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=6)))
    operation = draw(st.integers(0, 5))
    reports = [
        Report(
            member,
            operation + draw(st.integers(0, 1)),
            is_prepared=draw(st.booleans()),
            is_admission=draw(st.booleans()),
            can_stay=stages == 1 and draw(st.integers(0, 5)) > 0,
            can_transfer_state=draw(st.booleans()),
            part=draw(st.integers(0, stages - 1)),
            parts=stages,
            has_state=draw(st.integers(0, 5)) > 0,
        )
        for member in members
    ]
    newcomers = list(range(10, 10 + draw(st.integers(0, 3))))
    return reports, newcomers, draw(st.integers(1, 7)), draw(st.integers(1, 4))


@given(worlds())
def test_members_of_the_next_round(world):
    reports, newcomers, wanted, at_least = world
    survivors = {report.member: report for report in reports if report.has_state}
    plan = plan_round(reports, newcomers, wanted=wanted, at_least=at_least)
    if plan is None:
        assert len(survivors) + len(newcomers) < at_least
    elif isinstance(plan, Continue):
        assert all(report.can_stay for report in survivors.values())
        assert 1 <= len(plan.members) <= wanted
        staying = [member for member in plan.members if member in survivors]
        assert staying == sorted(staying) == list(survivors)[:wanted]
        assert plan.members == (*staying, *plan.joined)
        assert list(plan.joined) == newcomers[: len(plan.joined)]
        assert set(plan.left) == {report.member for report in reports} - set(staying)
        if plan.joined:
            assert all(report.is_admission for report in survivors.values())
            assert len({report.operation for report in survivors.values()}) == 1
    else:
        stages = reports[0].parts
        if isinstance(plan, RestartTransfer):
            assert len(plan.writers) == stages
            for part, writers in enumerate(plan.writers):
                assert writers
                for writer in writers:
                    assert survivors[writer].part == part
                    assert survivors[writer].can_transfer_state
        else:
            can_write = {r.part for r in survivors.values() if r.can_transfer_state}
            is_apart = not survivors
            assert is_apart or len(can_write) < stages


def test_a_round_admits_newcomers_only_where_all_ranks_are_at_a_safe_point():
    admitting = [Report(member, 7, is_admission=True) for member in range(2)]
    assert plan_round(admitting, [4, 5, 6], wanted=4) == Continue(7, False, (0, 1, 4, 5), (4, 5))
    lost = replace(admitting[1], is_admission=False)
    assert plan_round([admitting[0], lost], [4], wanted=4) == Continue(7, False, (0, 1))
    # Rank 1 was in the barrier before the safe point when it lost a peer.
    late = Report(1, 6, is_prepared=True)
    assert plan_round([admitting[0], late], [4], wanted=4) == Continue(6, True, (0, 1))


def test_a_round_lets_the_last_members_leave():
    admitting = [Report(member, 7, is_admission=True) for member in range(4)]
    assert plan_round(admitting, wanted=2) == Continue(7, False, (0, 1), left=(2, 3))


def test_newcomers_without_the_state_leave():
    reports = [Report(0, 3), Report(4, 0, has_state=False)]
    assert plan_round(reports, wanted=2) == Continue(3, False, (0,), left=(4,))
    assert plan_round(reports[1:], wanted=2) == Restart()


@pytest.mark.parametrize(
    ("operations", "expected"),
    [((), Restart()), ((2, 4), Restart()), ((2, 3), Continue(2, True, (0, 1)))],
)
def test_reports_that_no_run_produces_restart_it(operations, expected):
    reports = [Report(member, operation) for member, operation in enumerate(operations)]
    assert plan_round(reports, wanted=4) == expected


def test_a_round_waits_until_there_are_enough_members():
    assert plan_round([Report(0, 1)], wanted=3, at_least=2) is None
    assert plan_round([Report(0, 1)], [4], wanted=3, at_least=2) == Continue(1, False, (0,))


def test_shards_are_handed_over_only_if_every_rank_is_left():
    reports = [
        Report(
            member, 5, can_stay=False, can_transfer_state=True, part=part, parts=4, microbatches=8
        )
        for part, member in enumerate((6, 7, 8, 9))
    ]
    assert plan_round(reports, wanted=3) == RestartTransfer(5, False, ((6,), (7,), (8,), (9,)))
    assert plan_round(reports[1:], wanted=4) == Restart()


@given(st.integers(1, 20), st.integers(1, 12))
def test_world_sizes_of_ranks_that_take_turns(wanted, microbatches):
    size = choose_world_size(wanted, [Report(0, 1, parts=4, microbatches=microbatches)])
    possible = [n for n in (1, 2, 4, 8, 16) if n <= wanted and not microbatches % n]
    assert size == max(possible)


@given(st.integers(1, 20), st.integers(1, 6))
def test_world_sizes_fill_complete_replicas(wanted, stages):
    size = choose_world_size(wanted, [Report(0, 1, parts=stages)])
    assert size % stages == 0
    assert size == stages or wanted - stages < size <= wanted
