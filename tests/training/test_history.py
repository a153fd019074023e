"""The history: steps become epochs, and each listener is notified once."""

import math

from lockstep.model.evaluation import Evaluation
from lockstep.training.history import History, StepResult
from lockstep.training.step_usage import RankTimes, RankUsage


class Lines:
    def __init__(self):
        self.lines = []
        self.closed = 0

    def write(self, kind, /, **fields):
        self.lines.append((kind, fields))

    def close(self):
        self.closed += 1


class OnEpochs:
    def __init__(self, seen):
        self.on_epoch = seen.append


def result(step, loss=1.0, samples=2, **metrics):
    return StepResult(step, 0, loss, samples, metrics, lr=0.1, seconds=0.5, ranks=[[1, 2, 3, 4]])


def usage(*memory):
    return RankUsage([RankTimes(rank, 0, 0, 0, size) for rank, size in enumerate(memory)], 0)


def test_an_epoch_is_the_mean_over_its_samples():
    writer = Lines()
    steps = []
    epochs = []
    history = History([writer], [steps.append, OnEpochs(epochs)])
    history.step(result(0, loss=1.0, samples=3, hit=1.0), usage(10, 20))
    history.step(result(1, loss=5.0, samples=1, hit=0.0, rare=2.0), usage(11, 21))
    epoch = history.end_epoch(4)
    history.notify(epoch)
    assert (epoch.epoch, epoch.loss, epoch.samples, epoch.seconds) == (4, 2.0, 4, 1.0)
    assert epoch.metrics == {"hit": 0.75, "rare": 2.0}
    assert [each.step for each in steps] == [0, 1]
    assert epochs == [epoch]
    assert history.end_epoch(5) is None


def test_the_line_of_an_epoch_waits_for_its_evaluation():
    writer = Lines()
    history = History([writer])
    for epoch in range(3):
        history.step(result(epoch), usage(5))
        history.end_epoch(epoch)
        if epoch == 1:
            history.add_evaluation(Evaluation(0.5, {"hit": 1.0}, 9))
    history.add_evaluation(Evaluation(0.25, {}, 9))
    history.add_evaluation(Evaluation(0.125, {}, 9))  # belongs to no epoch
    history.close(state="done", message=None)
    kinds = [kind for kind, _ in writer.lines]
    assert kinds == ["step", "epoch", "step", "epoch", "step", "epoch", "end"]
    evaluations = [f.get("evaluation") for kind, f in writer.lines if kind == "epoch"]
    assert evaluations[0] is None
    assert evaluations[1] == {"loss": 0.5, "metrics": {"hit": 1.0}, "samples": 9, "ema": False}
    assert evaluations[2]["loss"] == 0.25
    assert writer.lines[1][1]["memory_bytes"] == [5]
    assert "message" not in writer.lines[-1][1]
    assert writer.closed == 1


def test_a_warning_is_written_once_wherever_it_comes_from():
    writer = Lines()
    history = History([writer])
    history.warn(1, "rank 1, step 0", "beware", show=False)
    history.warn(2, "rank 2, step 5", "beware", show=True)
    assert writer.lines == [("warning", {"rank": 1, "message": "rank 1, step 0: beware"})]


def test_the_loss_of_an_epoch_is_not_known_without_that_of_each_step():
    history = History()
    history.step(result(0, loss=1.0), usage(1))
    history.step(result(1, loss=math.nan), usage(1))
    other = History()
    other.load_state_dict(history.state_dict())
    for one in (history, other):
        one.step(result(2, loss=1.0), usage(1))
        assert math.isnan(one.end_epoch(0).loss)
        one.step(result(3, loss=2.0), usage(1))
        assert one.end_epoch(1).loss == 2.0
