"""The statuses of ranks: what all ranks conclude from their summary."""

import math
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.buffers import BufferReport
from lockstep.kernel.rank_status import (
    DETAILED_RANKS,
    LISTED_WARNINGS,
    NonFiniteLoss,
    RankStatus,
    summarize,
)
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.step_context import MicrobatchResult, StepLabel, StepWarning
from lockstep.kernel.tree import total
from lockstep.model.group_exchange import GroupMessages, exchange_statuses, pack, unpack
from lockstep.model.state_mutation_check import StateMutationCheck
from lockstep.training.hyperparameter_check import HyperparameterCheck
from lockstep.training.resume.safe_points import SafePoints
from lockstep.training.step_usage import RankTimes, RankUsage, StepUsage

MANY = DETAILED_RANKS + 1  # as far as a status knows


# Merging a value needs nothing of a trainer.
HOOKS = {
    kind.name: kind.__new__(kind)
    for kind in (
        HyperparameterCheck,
        SafePoints,
        StateMutationCheck,
        StepUsage,
    )
}


def status(*results, **fields):
    return RankStatus(list(results), **fields)


def make_layout(rank, ranks, stages=1):
    """Return what a summary needs of the layout."""
    return SimpleNamespace(
        rank=rank,
        replicas=ranks // stages,
        stages=stages,
        replica=rank // stages,
        position=rank % stages,
    )


def merge(left, right):
    return left.merge(right, HOOKS)


def summaries(statuses, leaves, stages=1, ranks=None):
    count = len(statuses) if ranks is None else ranks
    return [
        summarize(each, make_layout(rank, count, stages), leaves)
        for rank, each in enumerate(statuses)
    ]


def merged(statuses, leaves, **options):
    return reduce(merge, summaries(statuses, leaves, **options))


def swap():
    """Exchange statuses whose floats need all their bits, and one that is longer than a page."""
    rank = dist.get_rank()
    values = [1 / 3, 5e-324, math.inf, -0.0]
    results = [MicrobatchResult(rank, 3, 0.1, values[rank], {"é": (1e300 / 7, 3.0)})]
    long = [StepWarning(f"rank {rank}", "x" * 5000, "time_first")] if rank == 1 else []
    mine = RankStatus(results if rank != 2 else [], batch="b", warnings=long)
    label = StepLabel(1, "in step 1", "", "")
    summary = summarize(mine, make_layout(rank, 4), 4)
    return exchange_statuses(GroupMessages(None), summary, {}, label)[0]


def test_statuses_arrive_with_every_bit(ranks):
    found = ranks(swap, 4)
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0].losses == [(0, 1 / 3), (1, 5e-324), (3, -0.0)]
    assert found[0].average_metrics() == {"é": math.fsum([1e300 / 7 * 3] * 3) / 9}
    assert found[0].warnings == [(1, StepWarning("rank 1", "x" * 5000, "time_first"))]
    assert type(found[0].warnings[0][1]) is StepWarning


def test_the_loss_is_added_along_the_tree():
    terms = [1e16, 1.0, 1.0, 1.0, -1e16]
    entries = [MicrobatchResult(leaf, 1, 1.0, loss) for leaf, loss in enumerate(terms)]
    expected = ((1e16 + 1.0) + (1.0 + 1.0)) - 1e16
    assert expected != sum(terms)
    assert merged([status(*entries[3:]), status(*entries[:3])], 5).sum_losses() == expected


def test_micro_batches_that_were_left_out_add_nothing():
    found = merged([status(MicrobatchResult(1, 4, 0.5, 3.0))], 3)
    assert found.sum_losses() == 1.5
    assert found.list_losses() == [None, 3.0, None]


def test_skipped_micro_batches_let_the_sums_of_a_rank_be_one_number():
    results = [MicrobatchResult(leaf, 1, 0.5, 1.0) for leaf in range(0, 64, 3)]
    skipped = sorted({*range(64)} - {each.leaf for each in results})
    found = merged([status(*results, skipped=skipped), status()], 128, ranks=MANY)
    assert found.nodes == [(0, 64, 11.0)]
    assert found.sum_losses() == 11.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_non_finite_loss_is_found_with_its_rank(value):
    good = MicrobatchResult(0, 1, 0.5, 1.0)
    bad = MicrobatchResult(3, 1, 0.5, value)
    later = MicrobatchResult(4, 1, 0.5, math.nan)
    ignoring = [StepWarning("rank 1", "the loss ignores some targets", "ignored_targets")]
    assert merged([status(good)], 5).non_finite is None
    for statuses in (
        [status(good), status(later, bad, warnings=ignoring)],
        [status(good), status(bad, warnings=ignoring), status(later)],
    ):
        found = merged(statuses, 5).non_finite
        assert found == NonFiniteLoss(3, 1, found.loss)
        assert found.loss == value or math.isnan(value)


def test_metrics_are_means_over_the_samples():
    statuses = [
        status(MicrobatchResult(0, 3, 0.0, 0.0, {"hit": (1.0, 3.0)})),
        status(MicrobatchResult(1, 1, 0.0, 0.0, {"hit": (0.0, 1.0), "rare": (5.0, 2.0)})),
    ]
    assert merged(statuses, 2).average_metrics() == {"hit": 0.75, "rare": 5.0}
    assert merged([status()], 1).average_metrics() == {}
    nothing = status(MicrobatchResult(0, 3, 0.0, 0.0, {"hit": (1.0, 0.0)}))
    assert math.isnan(merged([nothing], 1).average_metrics()["hit"])


def test_the_first_rank_that_stops_the_step_is_named():
    statuses = [
        status(), status(failure=("side_effect", "wrote")), status(failure=("stopped", "no memory"))
    ]  # fmt: skip
    assert merged(statuses, 1).failure == (1, "side_effect", "wrote")
    assert merged(statuses[2:], 1).failure == (0, "stopped", "no memory")


def test_values_that_differ_are_none():
    hooks = {"hyperparameters": "s", "state": {"0": "w"}}
    same = [status(batch="b", hooks=hooks)] * 3
    found = merged(same, 1)
    assert (found.batch, found.hooks) == ("b", hooks)
    assert merged([*same, status(batch="x", hooks=hooks), *same], 1).batch is None
    other = status(hooks=hooks | {"hyperparameters": "x"})
    assert merged([*same, other, *same], 1).hooks["hyperparameters"] is None
    first = {"0": "first"}
    second = {"1": "second"}
    stages = [status(hooks={"state": each}) for each in (first, second)] * 3
    assert merged(stages, 1, stages=2).hooks["state"] == first | second
    stages.append(status(hooks={"state": {"0": "x"}}))
    assert merged(stages, 1, stages=2).hooks["state"]["0"] is None


def test_warnings_are_listed_once_with_the_first_rank_that_has_them():
    def warn(rank, *sentences):
        return status(warnings=[StepWarning(f"rank {rank}", each) for each in sentences])

    statuses = [warn(0, "hot"), warn(1, "hot", "wet", "hot"), warn(2, "dry", "wet")]
    pairs = enumerate(["hot", "wet", "dry"])
    expected = [(rank, StepWarning(f"rank {rank}", each)) for rank, each in pairs]
    assert merged(statuses, 1).warnings == merged(statuses, 1, ranks=MANY).warnings == expected
    many = [warn(rank, f"number {rank}") for rank in range(MANY)]
    assert len(merged(many[:-1], 1).warnings) == DETAILED_RANKS
    assert len(merged(many, 1).warnings) == LISTED_WARNINGS


# --- any tree ------------------------------------------------------------------------------------

METRICS = st.dictionaries(st.sampled_from("pq"), st.tuples(st.floats(-1e9, 1e9), st.floats(0.5, 9)))
FLOATS = st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -0.0, 5e-324, 1e16])
TEXTS = st.sampled_from(["", "", "", "a", "b"])
HASHES = st.sampled_from(["", "differ", "x", "y"])


@st.composite
def trainings(draw):
    """Draw (statuses, number of micro-batches, stages)."""
    replicas = draw(st.integers(1, 9))
    stages = draw(st.integers(1, 2))
    leaves = draw(st.integers(1, 20))
    spans = split_evenly(leaves, replicas)
    found = []
    for rank in range(replicas * stages):
        owned = spans[rank // stages] if rank % stages == stages - 1 else ()
        results = [
            MicrobatchResult(
                leaf, draw(st.integers(1, 5)), draw(st.sampled_from([0.5, 0.3])), draw(FLOATS),
                draw(METRICS),
            )
            for leaf in owned if draw(st.integers(0, 5))
        ]  # fmt: skip
        hashes = draw(st.lists(HASHES, min_size=2, max_size=2)) if spans[rank // stages] else []
        kinds = [None, None, None, "failure", "side_effect", "stopped"]
        kind = draw(st.sampled_from(kinds))
        times = RankTimes(rank, draw(st.integers(0, 999)) / 1000, 0.25, 0, draw(st.integers(0, 99)))
        hooks = {
            "hyperparameters": draw(TEXTS),
            "state": {str(rank % stages): draw(TEXTS)},
            "safe_points": (draw(st.booleans()), draw(TEXTS), draw(st.integers(-1, 2))),
            "usage": RankUsage.of(times),
        }
        found.append(
            RankStatus(
                results,
                buffers=[BufferReport(hashes)],
                gradients=[f"{draw(st.integers(0, 9)):x}"],
                warnings=[
                    StepWarning(f"rank {rank}", each) for each in draw(st.lists(TEXTS, max_size=2))
                ],
                failure=None if kind is None else (kind, kind),
                batch=draw(TEXTS),
                hooks=hooks,
            )
        )
    return found, leaves, stages


def merge_in_tree(draw, parts):
    """Merge parts in the shape of a drawn tree, with the messages of a real exchange."""
    if len(parts) == 1:
        return parts[0]
    cut = draw(st.integers(1, len(parts) - 1))
    left = merge_in_tree(draw, parts[:cut])
    right = merge_in_tree(draw, parts[cut:])
    return merge(left, unpack(pack(right), HOOKS))


class Expected(NamedTuple):
    """What the ranks concluded when each of them had all statuses."""

    loss: float
    metrics: dict
    differing: list
    changed: list
    used: int

    @classmethod
    def of(cls, statuses, leaves, stages):
        results = sorted((r for s in statuses for r in s.microbatches), key=lambda r: r.leaf)
        terms = dict.fromkeys(((leaf, leaf + 1) for leaf in range(leaves)), 0.0)
        terms |= {(each.leaf, each.leaf + 1): each.loss * each.share for each in results}
        metrics = {}
        for name in {name for each in results for name in each.metrics}:
            known = [each for each in results if name in each.metrics]
            pairs = [each.metrics[name] for each in known]
            weights = math.fsum(weight for _, weight in pairs)
            metrics[name] = math.fsum(value * weight for value, weight in pairs) / weights
        reports = [each.buffers[0].hashes for each in statuses[::stages] if each.buffers[0].hashes]
        columns = [set(column) for column in zip(*reports, strict=True)]
        differing = [n for n, seen in enumerate(columns) if "differ" in seen or len(seen) > 1]
        changed = [n for n, seen in enumerate(columns) if seen != {""} and n not in differing]
        used = 0
        for each in statuses[::stages]:
            used |= int(each.gradients[0], 16)
        return cls(total(terms, leaves, add), metrics, differing, changed, used)


@given(st.data(), trainings(), st.booleans())
def test_any_tree_gives_the_summary_of_all_at_once(data, training, is_large):
    statuses, leaves, stages = training
    parts = summaries(statuses, leaves, stages, MANY if is_large else None)
    found = merge_in_tree(data.draw, parts)
    assert pack(found) == pack(reduce(merge, parts))
    expected = Expected.of(statuses, leaves, stages)
    assert found.sum_losses().hex() == expected.loss.hex()
    assert found.average_metrics() == expected.metrics
    (report,) = found.buffers["0"]
    assert [n for n, each in enumerate(report.hashes) if each == "differ"] == expected.differing
    changed = [n for n, each in enumerate(report.hashes) if each not in ("differ", "")]
    assert changed == expected.changed
    assert int(found.gradients["0"][0], 16) == expected.used
    is_due, signal, ending_round = found.hooks["safe_points"]
    wanted = [each.hooks["safe_points"] for each in statuses]
    assert (is_due, ending_round) == (wanted[0][0], wanted[0][2])
    assert signal == next((each[1] for each in wanted if each[1]), "")
    same = {each.batch for each in statuses}
    assert found.batch == (same.pop() if len(same) == 1 else None)


def test_the_size_of_a_summary_does_not_grow_with_the_number_of_ranks():
    sizes = []
    for ranks in (128, 1024, 8192):
        statuses = [
            status(
                MicrobatchResult(rank, 1, 1 / ranks, 1 / (rank + 1), {"hit": (rank / 7, 1.0)}),
                buffers=[BufferReport(["x"])], gradients=["ff"], batch="b",
                hooks={"usage": RankUsage.of(RankTimes(rank, 0.5, 0.25, 0, 7))},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        sizes.append(len(pack(merged(statuses, ranks))))
    assert sizes[-1] <= sizes[0] + 60, sizes
