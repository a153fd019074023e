"""Portable trainings have equal bits on any number of threads: ranks choose it by their cores."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
import pytest_lockstep
from lockstep.comm import backend
from lockstep.launcher import world
from lockstep.model.description import THREADS, describe_torch_settings
from lockstep.training.resume.compatibility import list_changes

pytestmark = pytest.mark.skipif(not backend.available(), reason="it needs the extension")

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Network(nn.Module):
    """Has layers whose kernels divide work among threads, above the grain of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 9, 3, padding=1)
        self.transposed = nn.ConvTranspose2d(9, 5, 3)
        self.norm = nn.LayerNorm([5, 34, 36])
        self.recurrent = nn.LSTM(36, 19, batch_first=True)
        self.head = nn.Linear(19, 70)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.silu(self.convolution(images))
        features = self.norm(self.transposed(features)).sigmoid()
        outputs, _ = self.recurrent(features.flatten(1, 2))
        return nn.functional.softplus(self.head(outputs))


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 32, 34, generator=draw), torch.randn(8, 170, 70, generator=draw)


def train(threads: int) -> str:
    """Return the digest of a training."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    trainer = ls.Trainer(Network(), nn.MSELoss(), SGD, microbatches=2, seed=3)
    for step in range(2):
        loss = trainer.step(make_batch(step))
    return f"{trainer.digest()} {loss.hex()}"


def train_all(*numbers: int) -> list[str]:
    ls.init(portable=True)
    return [train(threads + ls.rank()) for threads in numbers]


def test_digests_do_not_depend_on_threads():
    """Also if ranks have other numbers."""
    alone = pytest_lockstep.run(train_all, 1, 2, 3, 8, ranks=1, init=False)
    pair = pytest_lockstep.run(train_all, 1, 3, ranks=2, init=False)
    assert len({digest for found in [*alone, *pair] for digest in found}) == 1


def join(portable: bool, threads: int | None) -> int:
    with mock.patch.object(world, "divide_cores", side_effect=(8).__floordiv__):
        ls.init(portable=portable, threads=threads)
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("portable", "threads", "expected"), [(True, None, 4), (True, 3, 3), (False, None, 1)]
)
def test_ranks_share_the_cores_of_their_host(portable, threads, expected):
    found = pytest_lockstep.run(join, portable, threads, init=False)
    assert found == [expected, expected]


def wrap(portable: bool) -> tuple[str, str]:
    ls.init(threads=2, portable=portable)
    if portable:
        torch.set_num_threads(2 + ls.rank())
    said = io.StringIO()
    with redirect_stderr(said):
        model = DistributedDataParallel(nn.Linear(3, 2))
        ls.exact(model, SGD(model.parameters()), microbatches=2)
    return said.getvalue(), describe_torch_settings().get(THREADS, "")


def test_ls_exact_does_not_compare_or_mention_threads():
    assert pytest_lockstep.run(wrap, True, init=False) == [("", "")] * 2
    (warning, threads), _ = pytest_lockstep.run(wrap, False, init=False)
    assert "bits depend on the number of intra-op threads, here 2" in warning
    assert threads == "2"


def test_a_portable_checkpoint_of_an_earlier_version_has_no_other_threads():
    saved = {"environment": {"portable": True}, "settings": {THREADS: "1"}, "sources": {}}
    here = saved | {"settings": {}}
    assert not list_changes(saved, here, {})
    plain = here | {"environment": {}}
    assert list_changes(saved, plain, {}) == [f"{THREADS} is None, it was 1"]
