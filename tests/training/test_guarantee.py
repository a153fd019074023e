"""The guarantee: the digests of every layout are those of the specification.

`lockstep/kernel/spec.py` uses nothing else of Lockstep. The models and batches meet every
rule: sizes that M does not divide, a batch of fewer samples than ranks, dropout,
checkpointing, batch norm, buffers, frozen, tied and sometimes unused parameters.
"""

from functools import partial

import pytest
import torch
from torch import nn

import digests
import lockstep as ls
import models
import pytest_lockstep
from lockstep.comm import backend as native
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.kernel import spec
from lockstep.processor_core import divide_cores

STRESS = pytest.mark.stress
SIZES = [19, 16, 3, 19, 1]
PICTURE_SIZES = [16, 24, 17, 3]  # a micro-batch of one picture still has 36 values a channel
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}
TRAININGS = [
    (case, optimizer, clip)
    for case in models.CASES
    for optimizer, clip in [("SGD", None), ("AdamW", 0.5)]
]


def prepared(case):
    """Return the model, its batches and its loss, made anew."""
    model, batches, loss = models.CASES[case]
    torch.manual_seed(5)
    sizes = PICTURE_SIZES if case == "pictures" else SIZES
    return model(), batches(sizes), loss()


def plain_digests():
    ls.init(threads=1)
    torch.use_deterministic_algorithms(True)
    found = {}
    for case, name, clip in TRAININGS:
        model, batches, loss = prepared(case)
        made = []

        def optimizer(parameters, name=name, made=made):
            made.append(OPTIMIZERS[name](parameters))
            return made[-1]

        losses = spec.train(model, loss, optimizer, batches, seed=11, clip=clip)
        state = digests.optimizer_state(made[0], model)
        found[case, name] = losses, ls.digest(model.state_dict()), ls.digest(state)
    return found


def lockstep_digests(cases=tuple(models.CASES), optimizers=tuple(OPTIMIZERS), **layout):
    found = {}
    for case, name, clip in TRAININGS:
        if case not in cases or name not in optimizers:
            continue
        model, batches, loss = prepared(case)
        trainer = ls.Trainer(model, loss, OPTIMIZERS[name], seed=11, max_grad_norm=clip, **layout)
        losses = [trainer.step(batch) for batch in batches]
        found[case, name] = losses, trainer.digest(), trainer.optimizer_digest()
    return found


@pytest.fixture(scope="module")
def plain():
    (found,) = pytest_lockstep.run(plain_digests, ranks=1, init=False)
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_layout_gives_the_bits_of_the_reference(ranks, plain, n):
    for found in ranks(lockstep_digests, n):
        for training, expected in plain.items():
            assert found[training] == expected, training


@pytest.mark.skipif(not native.available(), reason="not built")
@pytest.mark.parametrize("n", [pytest.param(2, marks=STRESS), 3, pytest.param(4, marks=STRESS)])
def test_gradients_that_are_sent_with_statuses_give_the_bits_of_the_reference(plain, n):
    """The models are small here, and not treated as large ones."""

    def digests():
        sent = []
        pack = GradientReducer.pack
        GradientReducer.pack = lambda self: sent.append(pack(self)) or sent[-1]
        ls.init(backend="lockstep")
        found = lockstep_digests()
        ls.shutdown()
        return found, sum(bool(each) for each in sent), len(sent)

    for found, with_gradients, steps in pytest_lockstep.run(digests, ranks=n, init=False):
        assert with_gradients > steps / 2
        for training, expected in plain.items():
            assert found[training] == expected, training


LAYOUTS = {
    1: [{"activation_checkpointing": True}],
    2: [
        *(
            {"pipeline": ls.PipelineConfig(stages=2, schedule=name)}
            for name in ("1f1b", "gpipe", "interleaved")
        ),
        {"pipeline": ls.PipelineConfig(stages=2, schedule="zero-bubble")},
        {
            "pipeline": ls.PipelineConfig(stages=2, schedule="gpipe"),
            "activation_checkpointing": True,
        },
        {"storage": "shared", "activation_checkpointing": True},
    ],
    3: [
        {"pipeline": ls.PipelineConfig(stages=3, schedule="zero-bubble")},
        {
            "pipeline": ls.PipelineConfig(stages=3, schedule="1f1b"),
            "activation_checkpointing": True,
        },
    ],
    4: [
        {"pipeline": ls.PipelineConfig(stages=4)},
        {"pipeline": ls.PipelineConfig(stages=2, schedule="1f1b")},
    ],
}


@pytest.mark.parametrize("n", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("SGD", marks=STRESS)])
def test_every_layout_of_blocks_gives_the_bits_of_the_reference(ranks, plain, n, optimizer):
    """The one in the suite clips, and its state has several tensors per parameter."""

    def digests():
        cases = "pictures", "blocks"
        return [lockstep_digests(cases, (optimizer,), **layout) for layout in LAYOUTS[n]]

    for everything in ranks(digests, n):
        for layout, found in zip(LAYOUTS[n], everything, strict=True):
            assert len(found) == 2
            for training, result in found.items():
                assert result == plain[training], (layout, training)


def test_the_cases_meet_what_they_claim(plain):
    """Guard the guards: a case that met nothing would prove nothing."""
    model, batches, _ = prepared("branches")
    taken = [[bool(x[lo, 0] > 0.5) for lo in range(0, len(x), 3)] for x, _ in batches]
    assert any(any(row) and not all(row) for row in taken)
    assert model.zero.signbit().all()
    digests = [digest for _, digest, _ in plain.values()]
    assert len(set(digests)) == len(TRAININGS)


def test_threads_are_set_by_init_and_kept_by_steps(ranks):
    def threads():
        before = torch.get_num_threads()
        model = nn.Linear(4, 1)
        trainer = ls.Trainer(model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1))
        torch.set_num_threads(before + 1)  # somebody changes it in the middle
        trainer.step((torch.ones(8, 4), torch.ones(8, 1)))
        return before, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    share = divide_cores(1)
    assert ranks(threads, 1) == [(share, share, True)]


@pytest.mark.parametrize("n", [1, 3])
def test_gradients_are_those_of_one_full_batch_backward(ranks, n):
    """Without batch norm and dropout the two differ by rounding only: 1e-5 of the largest."""

    def gradients():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 10))
        inputs, targets = models.picture_batches([19])[0]
        whole = torch.autograd.grad(_loss(model, inputs, targets), list(model.parameters()))
        kept = []
        trainer = ls.Trainer(
            model,
            nn.CrossEntropyLoss(),
            partial(torch.optim.SGD, lr=0.0),
            callbacks=[lambda _: kept.extend(p.grad.clone() for p in model.parameters())],
        )
        loss = trainer.step((inputs, targets))
        assert abs(loss - float(_loss(model, inputs, targets))) < 1e-6
        return [
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(whole, kept, strict=True)
        ]

    for errors in ranks(gradients, n):
        assert max(errors) < 1e-5


def _loss(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs), targets)
