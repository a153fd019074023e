"""Which layouts are compared."""

from lockstep.tools.check.layouts import Layout, layouts


def test_two_backends():
    names = [str(each) for each in layouts(("lockstep", "gloo"), (1, 2, 3))]
    assert names == [
        "1 rank, lockstep",
        "2 ranks, lockstep",
        "3 ranks, lockstep",
        "2 ranks, gloo",
        "3 ranks, gloo",
        "2 ranks, lockstep, 2 stages (1f1b)",
        "2 ranks, lockstep, 2 stages (interleaved)",
        "4 ranks, lockstep, 2 stages (zero-bubble)",
        "2 ranks, lockstep, shared",
    ]


def test_one_backend_and_other_ranks():
    plain = [each for each in layouts(("gloo",), (2, 4)) if each.stages == 1 and not each.shared]
    assert plain == [Layout(2, "gloo"), Layout(4, "gloo")]


def test_replicas_and_chunks():
    assert Layout(4, stages=2, schedule="interleaved").replicas == 2
    assert Layout(4, stages=2, schedule="interleaved").stages_per_rank == 2
    assert Layout(2, stages=2, schedule="1f1b").stages_per_rank is None
