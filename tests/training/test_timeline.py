"""The trace of steps: what a run with stages records, and how spans become rows."""

import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.kernel.step import find_active
from lockstep.pipeline.schedule_executor import ScheduleExecutor
from lockstep.pipeline.schedules import Action, one_f_one_b
from lockstep.record.reader import read_run
from lockstep.record.timeline import read_timelines
from lockstep.training.history import History
from lockstep.training.step_trace import StepTrace


def test_the_first_ten_steps_and_every_hundredth_are_traced():
    trace = StepTrace(0.0, History())
    traced = [step for step in range(350) if find_active([trace], step)]
    assert traced == [*range(10), 100, 200, 300]


def recorded(folder):
    """Train 12 steps on two stages, and record them; no rank gets a core just before it waits."""
    receive = ScheduleExecutor._receive

    def receive_late(*arguments):
        begun = time.perf_counter()
        while time.perf_counter() < begun + 0.003:
            pass
        return receive(*arguments)

    ScheduleExecutor._receive = receive_late
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options = {
        "microbatches": 3,
        "pipeline": ls.PipelineConfig(stages=2, balance=[2, 2], schedule="1f1b"),
    }
    with ls.Trainer(model, nn.MSELoss(), optimizer, loggers=folder, **options) as trainer:
        for _ in range(12):
            trainer.step((torch.ones(6, 8), torch.ones(6, 8)))


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """Return the record of a run on two ranks."""
    folder = tmp_path_factory.mktemp("trace") / "run"
    ranks(recorded, 2, folder)
    return read_run(folder)


def test_every_rank_records_what_the_schedule_says(run):
    seen = read_timelines(run.timelines)
    assert [one.title for one in seen] == [f"step {number}" for number in range(10)]
    for one in seen:
        for rank, actions in enumerate(one_f_one_b(2, 3)):
            own = [work for work in one.spans if work.rank == rank]
            assert [Action(w.kind, w.stage, w.microbatch) for w in own[:-2]] == list(actions)
            assert [work.kind for work in own[-2:]] == ["reduce", "update"]
            assert all(before.end <= after.begin + 3e-6 for before, after in pairwise(own))


def test_what_a_rank_gets_was_made_before_on_one_clock(run):
    for one in read_timelines(run.timelines):
        works = {(work.kind, work.stage, work.microbatch): work for work in one.spans}
        transfers = [
            (works[kind, sender, number], works[kind, 1 - sender, number])
            for number in range(3)
            for kind, sender in (("forward", 0), ("backward", 1))
        ]
        for source, target in transfers:
            assert target.source == source.rank
            assert target.num_bytes >= 2 * 8 * 4
            assert source.begin <= target.begin + 1e-5
