"""The plan of the audit: pure functions of the step and of the assignment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.audit.audit_config import AuditConfig, read_audit
from lockstep.audit.audit_plan import plan_audit
from lockstep.data.assignment import assign_microbatches, on_one_host
from lockstep.kernel.errors import UsageError


def test_the_first_steps_are_audited_and_then_one_in_a_hundred():
    audited = [step for step in range(301) if AuditConfig(100).is_audited(step)]
    assert audited == [0, 1, 2, 5, 10, 20, 50, 100, 200, 300]


@given(st.integers(0, 500), st.integers(1, 120))
def test_the_turn_counts_the_audited_steps_before(step, every_steps):
    expected = sum(AuditConfig(every_steps).is_audited(number) for number in range(step))
    assert AuditConfig(every_steps).count_audited(step) == expected


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_a_micro_batch_of_its_owner_is_repeated_by_another_replica(turn, replicas, more, alone):
    spans = assign_microbatches(replicas + more, on_one_host(replicas))
    plan = plan_audit(turn, spans, alone=alone)
    assert plan.microbatch in spans[plan.owner]
    assert (plan.repeater == plan.owner) == (alone or replicas == 1)
    others = {plan.owner, plan.repeater, plan.witness}
    assert len(others) == (1 if alone else min(3, replicas))


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_micro_batch_and_every_pair_of_replicas_takes_its_turn(replicas, each):
    spans = assign_microbatches(replicas * each, on_one_host(replicas))
    plans = [plan_audit(turn, spans) for turn in range(replicas * each * max(1, replicas - 1))]
    assert {plan.microbatch for plan in plans} == set(range(replicas * each))
    pairs = {(plan.owner, plan.repeater) for plan in plans}
    assert len(pairs) == replicas * max(1, replicas - 1)


def test_the_first_micro_batch_of_a_run_is_not_the_first_to_be_repeated():
    assert plan_audit(0, [range(4)]).microbatch == 1
    assert plan_audit(0, [range(1)]).microbatch == 0


def test_replicas_without_micro_batches_repeat_those_of_others():
    plans = [plan_audit(turn, [range(1), range(0), range(0)]) for turn in range(4)]
    assert {plan.owner for plan in plans} == {0}
    assert {plan.repeater for plan in plans} == {1, 2}


def test_settings_are_checked():
    assert read_audit(True) == AuditConfig()
    assert read_audit(False) is None
    assert read_audit(AuditConfig(every_steps=7)) == AuditConfig(every_steps=7)
    with pytest.raises(UsageError, match=r"audit='often': expected True, False or a lockstep"):
        read_audit("often")
    with pytest.raises(UsageError, match=r"AuditConfig\(every_steps=0\): expected a positive"):
        AuditConfig(every_steps=0)
    with pytest.raises(UsageError, match=r"max_corrections=-1\): expected a whole number, at"):
        AuditConfig(max_corrections=-1)
