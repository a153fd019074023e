"""Errors that a loop catches on one rank are named by those that follow on all ranks."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import DisagreementError, LockstepError
from lockstep.kernel.step_context import Attempt

FIRST = "on rank 0, attempt 1, at step 1, raised UsageError: rank 0, step 1, micro-batch 0"


def test_the_first_of_several_failures_is_kept_until_a_step_succeeds():
    first = Attempt(0, 3, 7)
    first.fail(ValueError("bad sample"))
    assert first.failure == "attempt 7, at step 3, raised ValueError: bad sample"
    second = Attempt(0, 3, 8, first.failure)
    second.fail(TypeError("another"))
    assert second.failure == first.failure
    error = DisagreementError("different calls")
    error.cause = f"on rank 1, {first.failure}"
    third = Attempt(0, 3, 9)
    third.fail(error)
    assert third.failure == f"attempt 9 came after a failure {error.cause}"
    fourth = Attempt(0, 4, 10)
    fourth.fail(ValueError("new"))
    assert fourth.failure == "attempt 10, at step 4, raised ValueError: new"


def catch_errors():
    """Raise in a batch on rank 0, and go on with the next batches."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exact = ls.exact(model, optimizer, 4)
    said = []
    data = TensorDataset(torch.ones(40, 4), torch.zeros(40, dtype=torch.long))
    try:
        for batch in exact.batches(data, 8):
            try:
                for inputs, targets in batch:
                    if batch.number == 1 and ls.rank() == 0:
                        raise ValueError("bad sample")
                    batch.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
            except (LockstepError, ValueError) as error:
                said.append(str(error))
            optimizer.zero_grad()
    except LockstepError as error:  # of the loop over batches
        said.append(str(error))
    return said


def test_every_later_error_names_the_first_one(ranks):
    said = ranks(catch_errors, 2)
    assert said[0][0] == "bad sample"
    different = [text for of_rank in said for text in of_rank if "make the same calls" in text]
    assert len(different) > 2
    assert all(FIRST in text for text in different), different


def catch_an_error_of_one_stage():
    """Go on after an exception of the optimizer on the rank that has the sparse gradient."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 2))
    pipeline = ls.PipelineConfig(stages=2, balance=[1, 1])
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW, pipeline=pipeline)
    said = []
    for _ in range(2):
        try:
            trainer.step((torch.arange(8) % 4, torch.zeros(8, dtype=torch.long)))
        except (LockstepError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_a_failure_of_the_optimizer_on_one_stage_is_named_by_both(ranks):
    first, last = ranks(catch_an_error_of_one_stage, 2)
    assert first[0].startswith("Adam does not support sparse gradients")
    assert len(last) == 1
    for text in (first[1], last[0]):
        assert "on rank 0, attempt 0, at step 0, raised RuntimeError: Adam does not" in text
