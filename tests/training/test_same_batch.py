"""All ranks train on the same batch in the same attempt, or every rank says who does not."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep as ls
from lockstep.kernel.errors import DisagreementError

SGD = partial(torch.optim.SGD, lr=0.1)
BAD = 99.0


class Picky(nn.Module):
    """Refuses a batch with a bad sample, in forward or in backward."""

    def __init__(self, where="forward"):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)
        self.where = where

    def forward(self, inputs):
        bad = bool((inputs == BAD).any())
        if bad and self.where == "forward":
            raise ValueError("a bad sample")
        hidden = self.first(inputs)
        if bad and self.where == "backward":
            hidden.register_hook(refuse)
        return self.second(hidden)


def refuse(gradient):
    raise ValueError("a bad sample")


def rows(number, samples=16):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(samples, 6, generator=generator)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def losses(trainer, batches):
    """Train on each batch, skipping those that the model refuses; stop at another error."""
    said = []
    for batch in batches:
        try:
            said.append(trainer.step(batch))
        except ValueError as error:
            said.append(str(error))
        except DisagreementError as error:
            return [*said, str(error)]
    return said


def picky(where="forward", **options):
    """Return a trainer of a picky model."""
    torch.manual_seed(0)
    return ls.Trainer(Picky(where), nn.CrossEntropyLoss(), SGD, **options)


def batches(*bad):
    """Return five batches; in the third one, `bad` selects what is a bad sample."""
    made = [rows(number) for number in range(5)]
    if bad:
        made[2][0][bad] = BAD
    return made


REFUSALS = {
    None: [
        ("forward", {}),
        ("forward", {"loss_weight": lambda data: float(len(data[0]))}),
        ("backward", {"storage": "shared"}),
    ],
    "gloo": [("forward", {}), ("backward", {})],
}


@pytest.mark.parametrize("backend", REFUSALS)
def test_a_rank_that_skips_a_failed_batch_alone_is_named(ranks, backend):
    """It went on under the same step number, and halves of different batches were added."""

    def train(number, where, options):
        trainer = picky(where, **options)
        said = losses(trainer, batches(12))  # in rank 1's half
        assert trainer.steps == 2
        for attempt in (2, 3):
            assert f"in step 2 of trainer {number} (attempt {attempt})" in said[-1]
        return said

    def train_all():
        return [train(number, *case) for number, case in enumerate(REFUSALS[backend])]

    for first, second in zip(*ranks(train_all, 2, backend=backend), strict=True):
        assert len(first) == 3
        assert second == [*first[:2], "a bad sample", first[2]]
        assert "on rank 1, attempt 2, at step 2, raised ValueError: a bad sample" in first[2]


def test_a_batch_that_all_ranks_skip_changes_nothing(ranks):
    def train():
        trainer = picky()
        return losses(trainer, batches(slice(None), 0)), trainer.digest()

    (alone,) = ranks(train, 1)
    assert alone[0][2] == "a bad sample"
    assert len(alone[0]) == 5
    assert ranks(train, 2) == [alone] * 2


def test_a_stage_that_skips_a_batch_alone_is_named(ranks):
    """Activations of one batch met the targets of another."""

    def train(bad):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        trainer = ls.Trainer(
            model, nn.CrossEntropyLoss(), SGD, pipeline=ls.PipelineConfig(stages=2, balance=[2, 1])
        )
        given = batches()
        if dist.get_rank() == bad:
            given[2] = (given[2][0], given[2][1][:5])
        return losses(trainer, given)

    for bad, found in enumerate(zip(*ranks(lambda: [train(0), train(1)], 2), strict=True)):
        assert len(found[bad]) == 4
        assert "batch[1] has 5" in found[bad][2]
        assert found[1 - bad] == [*found[bad][:2], found[bad][3]]
        assert f"on rank {bad}, attempt 2, at step 2, raised DatasetError: batch[0]" in found[0][-1]


def test_steps_of_two_trainers_are_not_paired(ranks):
    """A rank that failed in one trainer's step went on with the other trainer's."""

    def train():
        trainers = [picky() for _ in range(2)]
        given = [rows(0), rows(0)]
        given[0][0][12] = BAD
        said = losses(trainers[0], given[:1])
        return said if "rank" in said[0] else said + losses(trainers[1], given[1:])

    first, second = ranks(train, 2)
    assert "rank 1 is in step 0 of trainer 1 (attempt 0)" in first[0]
    assert "rank 0 is in step 0 of trainer 0 (attempt 0)" in first[0]
    assert second == ["a bad sample", first[0]]


def test_a_manual_step_that_fails_on_one_rank_is_named(ranks):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        trainer = ls.Trainer(model, None, SGD)

        def take(number):
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(rows(number)):
                    step.backward(nn.functional.cross_entropy(model(inputs), targets))
                    if number == 0 and dist.get_rank() == 1:
                        raise KeyError("mine")

        with pytest.raises((KeyError, DisagreementError)) as raised:
            take(0)
        if raised.type is KeyError:
            with pytest.raises(DisagreementError) as raised:
                take(1)
        return str(raised.value)

    for message in ranks(train, 2):
        assert "on rank 1, attempt 0, at step 0, raised KeyError: 'mine'" in message


def test_a_rank_that_leaves_out_a_loaded_batch_is_named(ranks):
    def train():
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        loaded = enumerate(trainer.batches(TensorDataset(*rows(0, 64)), 16))
        kept = (batch for number, batch in loaded if number != 1 or dist.get_rank() == 0)
        return losses(trainer, kept)

    for *_, message in ranks(train, 2):
        assert message.startswith("in step 1, rank 1 trains on batch 2 of epoch 0 while")
        assert "while rank 0 trains on batch 1 of epoch 0" in message


def test_training_goes_on_from_a_state_after_ranks_have_parted(ranks):
    def train():
        trainer = picky()
        trainer.step(batches()[0])
        state = trainer.state_dict()
        losses(trainer, batches(12)[1:])
        trainer.load_state_dict(state)
        return losses(trainer, batches()[1:]), trainer.digest()

    def undisturbed():
        trainer = picky()
        return losses(trainer, batches())[1:], trainer.digest()

    assert ranks(train, 2) == ranks(undisturbed, 1) * 2


# --- whole batches that are given by the user's own loop ----------------------------------------


def shuffled(dataset):
    """A loader that shuffles by a generator that nobody seeds alike on all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return DataLoader(dataset, 16, shuffle=True, generator=generator)


def distributed(dataset):
    return DataLoader(dataset, 16, sampler=DistributedSampler(dataset))


LAYOUTS = [{}, {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])}]


def test_ranks_that_are_given_different_batches_say_so_before_the_weights_change(ranks):
    """Half of each rank's samples were never used."""

    def train(loader, options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, **options)
        before = trainer.digest()
        (said,) = losses(trainer, loader(TensorDataset(*rows(0, 64))))
        assert trainer.digest() == before
        return said

    def other_strides():
        """Kernels choose their path by strides: the bits were those of neither layout."""
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        inputs, targets = rows(0)
        if dist.get_rank():
            inputs = inputs.t().contiguous().t()
        return losses(trainer, [(inputs, targets)])[0]

    def train_all():
        cases = product((shuffled, distributed), LAYOUTS)
        return [*(train(loader, options) for loader, options in cases), other_strides()]

    for messages in ranks(train_all, 2):
        for said in messages:
            assert "in step 0, rank 1 got a different batch than rank 0 (checksums" in said
            assert "DistributedSampler" in said
            assert "use batches(dataset, batch_size) instead" in said


def test_different_batches_are_noticed_while_buckets_travel_early(ranks):
    """From the second step on the backend lockstep adds gradients while backward runs."""

    def train():
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        given = batches()[:3]
        given[2][1][3] = (given[2][1][3] + dist.get_rank()) % 3  # one target
        return losses(trainer, given), trainer.steps

    for said, steps in ranks(train, 2, backend="lockstep"):
        assert steps == 2
        assert "in step 2, rank 1 got a different batch" in said[2]


def test_the_same_whole_batches_pass_wherever_they_lie_in_memory(ranks):
    def train():
        torch.manual_seed(0)
        trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), SGD)
        given = batches()[:3]
        if dist.get_rank():
            given = [(torch.cat([x[:3], x])[3:], y) for x, y in given]
        return losses(trainer, given), trainer.digest()

    assert ranks(train, 2) == ranks(train, 1) * 2
