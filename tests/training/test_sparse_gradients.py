"""Embeddings with sparse gradients in the Trainer: the specification's bits in every layout."""

from functools import partial

import pytest
import torch
from torch import nn

import digests
import lockstep as ls
import pytest_lockstep
from lockstep.kernel import spec
from lockstep.kernel.errors import GradientError, UsageError

SIZES = [19, 16, 3, 19, 1]
ROWS = 11


class Sometimes(nn.Module):
    """Two embeddings, of which a micro-batch may use only the first."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(ROWS, 6, sparse=True)
        self.second = nn.Embedding(ROWS, 6, sparse=True)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(6, 3)

    def forward(self, words):
        found = self.first(words).mean(1)
        if words[0, 0] % 3 == 0:
            found = found + self.second(words).sum(1)
        return self.last(self.dropout(found))


class Tied(nn.Module):
    """The weight of a sparse embedding that is also the one of a layer: its gradient is dense."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 6, sparse=True)
        self.last = nn.Linear(6, ROWS)
        self.last.weight = self.embedding.weight

    def forward(self, words):
        return self.last(self.embedding(words).mean(1))[:, :3]


class Mean(nn.Module):
    def forward(self, values):
        return values.mean(1)


def blocks():
    return nn.Sequential(
        nn.Embedding(ROWS, 6, sparse=True), Mean(), nn.Dropout(0.2), nn.Linear(6, 3)
    )


def bag():
    return nn.EmbeddingBag(ROWS, 3, sparse=True, mode="sum")


TRAININGS = {
    "blocks": (blocks, partial(torch.optim.SGD, lr=0.3, momentum=0.9), None),
    "clipped": (blocks, partial(torch.optim.SGD, lr=0.3), 0.2),
    "sometimes": (Sometimes, partial(torch.optim.SGD, lr=0.3), 0.5),
    "tied": (Tied, partial(torch.optim.AdamW, lr=0.01), 0.5),
    "bag": (bag, partial(torch.optim.SparseAdam, lr=0.05), 0.4),
}
PARTITIONED = ("blocks", "clipped")  # models that have blocks


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(ROWS - 1, (size, 4), generator=generator),  # the last row is not used
            torch.randint(3, (size,), generator=generator),
        )
        for size in SIZES
    ]


def plain():
    ls.init(threads=1)
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, (factory, optimizer, clip) in TRAININGS.items():
        torch.manual_seed(5)
        model = factory()
        made = []

        def make(parameters, optimizer=optimizer, made=made):
            made.append(optimizer(parameters))
            return made[-1]

        losses = spec.train(model, nn.CrossEntropyLoss(), make, batches(), seed=11, clip=clip)
        state = digests.optimizer_state(made[0], model)
        found[name] = losses, ls.digest(model.state_dict()), ls.digest(state)
    return found


def trained(names=tuple(TRAININGS), **layout):
    found = {}
    for name in names:
        factory, optimizer, clip = TRAININGS[name]
        torch.manual_seed(5)
        trainer = ls.Trainer(
            factory(), nn.CrossEntropyLoss(), optimizer, seed=11, max_grad_norm=clip, **layout
        )
        losses = [trainer.step(batch) for batch in batches()]
        found[name] = losses, trainer.digest(), trainer.optimizer_digest()
    return found


@pytest.fixture(scope="module")
def expected():
    (found,) = pytest_lockstep.run(plain, ranks=1, init=False)
    return found


@pytest.mark.parametrize(
    ("n", "backend"), [(1, None), (2, None), (3, None), (4, None), (3, "gloo")]
)
def test_sparse_gradients_are_added_along_the_tree(ranks, expected, n, backend):
    assert ranks(trained, n, backend=backend) == [expected] * n


@pytest.mark.parametrize(("n", "stages"), [(2, 2), (4, 2)])
def test_stages_give_the_same_bits(ranks, expected, n, stages):
    config = ls.PipelineConfig(stages=stages)
    wanted = {name: expected[name] for name in PARTITIONED}
    assert ranks(partial(trained, PARTITIONED, pipeline=config), n) == [wanted] * n


@pytest.mark.usefixtures("world_of_one")
def test_shared_parameters_are_refused():
    with pytest.raises(UsageError, match="whose gradient is sparse: make its Embedding"):
        ls.Trainer(blocks(), nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), storage="shared")


class Table(nn.Module):
    """A module of the user's own whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 3))

    def forward(self, words):
        return nn.functional.embedding(words, self.weight, sparse=True)


@pytest.mark.usefixtures("world_of_one")
def test_a_sparse_gradient_of_another_module_is_refused_by_name():
    model = nn.Sequential(Table(), nn.Flatten(), nn.Linear(6, 5))
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    words = torch.arange(16).view(8, 2) % 9
    with pytest.raises(GradientError, match=r"parameter 0\.weight has a sparse gradient"):
        trainer.step((words, torch.zeros(8, dtype=torch.int64)))
