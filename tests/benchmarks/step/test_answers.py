"""The right answers: those of the reference, and a distance from them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.step.answers import (
    CHECKED,
    Alone,
    Expected,
    file_digest,
    training_digest,
    write,
)
from benchmarks.step.contenders import Case, Fixed, loss
from lockstep.checksum import digest
from lockstep.kernel import spec


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_answers_are_those_of_the_reference(optimizer):
    case = Fixed("tiny", optimizer, 27, 5)
    training, model = Alone(case, 3), case.net.model()
    batches = [case.batch(3, turn) for turn in range(CHECKED)]
    for batch in batches:
        training.step(batch)
    spec.train(model, loss, case.optimize, batches, microbatches=5)
    assert training_digest(training) == digest(model.state_dict())


def expected(case, folder):
    """Return what is expected of a case, computed here."""
    training = Alone(case, 2)
    write(training, str(folder / "begun"))
    training.step(case.batch(2, 0))
    write(training, str(folder / "ended"))
    ended = folder / "ended"
    return Expected(case.net, folder / "begun", ended, file_digest(case.net, ended))


def test_parameters_are_compared_with_the_way_they_went(tmp_path):
    right = expected(Case("tiny", "sgd", 8), tmp_path)
    begun, ended = (np.fromfile(tmp_path / name, np.float32) for name in ("begun", "ended"))
    off = tmp_path / "off"
    for share in (0.0, 0.5, 1.0):
        (ended + np.float32(share) * (begun - ended)).tofile(off)
        answer = right.compare(str(off))
        assert answer.error == pytest.approx(share, abs=1e-3)
        assert answer.same is (share == 0)
