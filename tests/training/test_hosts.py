"""Training across hosts: the bits are those of one rank, for any placement of the ranks.

The hosts are simulated by the identities of hosts (`placed.join`): rank r is on host placement[r].
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls
import pytest_lockstep
from lockstep.comm import backend
from lockstep.comm.hosts.all_reduce import HostAllReduce
from lockstep.kernel.errors import DisagreementError, LayoutError
from lockstep.sharded_tensors import find_shard, local_part
from placed import join

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

ADAMW = partial(torch.optim.AdamW, lr=0.01)
PLACEMENTS = ["aaaa", "aabb", "abab", "aaab"]


class Pairs(Dataset):
    """Samples that draw noise when they are loaded; the last batch of an epoch is smaller."""

    def __init__(self, samples=40, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, 6, generator=generator)
        self.targets = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]


class Interrupted(BaseException):
    """Ends a script as if its process were killed."""


def run(function, placement, *arguments):
    """Return what a function returns on every rank; its first argument is the placement."""
    ranks = len(placement)
    return pytest_lockstep.run(function, placement, *arguments, ranks=ranks, timeout=60, init=False)


def network():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 3)
    )


def train(placement, options=None, folder=None, stop=0, is_resumed=False):
    """Return everything that a training with 7 micro-batches per batch shows."""
    group = join(placement)
    assert (group is None) == (len(set(placement)) == 1)
    made = []
    init = HostAllReduce.__init__
    HostAllReduce.__init__ = lambda self, *given: (made.append(self), init(self, *given))[1]

    def interrupt(result):
        if stop and result.step + 1 == stop:
            trainer._run._checkpoints.writer.wait()
            raise Interrupted

    checkpoint = None if folder is None else ls.CheckpointConfig(every_steps=1)
    trainer = ls.Trainer(
        network(), nn.CrossEntropyLoss(), ADAMW, microbatches=7, max_grad_norm=0.5,
        metrics={"accuracy": ls.accuracy}, callbacks=[interrupt],
        checkpoint=checkpoint, **({} if folder is None else {"loggers": folder}), **(options or {}),
    )  # fmt: skip
    if is_resumed:
        trainer.resume()
    seen = []
    try:
        for epoch in range(2):
            for batch in trainer.batches(Pairs(), 24, epoch=epoch):
                seen.append((trainer.step(batch), trainer.history.last.metrics))
            found = trainer.evaluate(Pairs(17, seed=5), 9)
            seen.append((found.loss, found.metrics))
    except Interrupted:
        return None
    assert bool(made) == (group is not None)  # the buckets were added across hosts
    return seen, trainer.digest(), trainer.optimizer_digest()


@pytest.fixture(scope="module")
def alone():
    (found,) = run(train, "a")
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_has_the_bits_of_one_rank(alone, placement):
    assert run(train, placement) == [alone] * 4


def test_stages_on_several_hosts_have_the_bits_of_one_rank(alone):
    options = {"pipeline": ls.PipelineConfig(stages=2)}
    assert [found[1] for found in run(train, "abba", options)] == [alone[1]] * 4


def test_a_training_resumes_in_another_placement(alone, tmp_path):
    assert run(train, "abab", None, str(tmp_path), 3) == [None] * 4
    for seen, *digests in run(train, "aab", None, str(tmp_path), 0, True):
        assert digests == [*alone[1:]]
        assert 0 < len(seen) < len(alone[0])
        assert seen == alone[0][-len(seen) :]


def train_shards(placement, storage):
    """Return what a short training shows, after a step, an evaluation and a saved state."""
    join(placement)
    options = {"max_grad_norm": 0.5, "ema_decay": 0.9, "storage": storage, "microbatches": 12}
    trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), ADAMW, **options)
    seen = [trainer.step(batch) for batch in trainer.batches(Pairs(48), 24)]
    seen.append(trainer.evaluate(Pairs(17, seed=5), 9, ema=True).loss)
    if storage == "hybrid":
        (_, shards) = find_shard(trainer.module[0].weight)
        copies = len(set(placement))
        assert shards * copies == dist.get_world_size() == len(placement)
    state = trainer.state_dict()["model"]
    seen = seen, trainer.digest(), trainer.optimizer_digest(), ls.digest(state)
    if placement == "abba":
        if ls.rank() == 3:
            local_part(trainer.module[0].weight)[5, 2].mul_(2)
        sentence = r"0.weight \(shard 1\) has other values on rank 3 than on rank 2"
        with pytest.raises(DisagreementError, match=sentence):
            trainer.step(next(iter(trainer.batches(Pairs(48), 24))))
    return seen


@pytest.mark.parametrize(
    ("placement", "storage"), [("abab", "sharded"), ("abba", "hybrid"), ("abcd", "hybrid")]
)
def test_shards_on_two_hosts_have_the_bits_of_one_rank(placement, storage):
    (whole,) = run(train_shards, "a", "replicated")
    assert run(train_shards, placement, storage) == [whole] * 4


def save_and_resume(placement, folder):
    """Return the digests of trainings that resume checkpoints of another storage."""
    join(placement, backend="gloo")

    def train(storage, resumed=None, saved=None):
        config = ls.CheckpointConfig(every_steps=1, folder=folder / (saved or "resumed"))
        options = {"ema_decay": 0.9, "storage": storage, "checkpoint": config, "loggers": []}
        with ls.Trainer(network(), nn.CrossEntropyLoss(), ADAMW, **options) as made:
            if resumed is not None:
                made.resume(folder / resumed / "checkpoints" / "step-1")
            for batch in made.batches(Pairs(48), 16):
                made.step(batch)
                if saved is not None and made.steps == 2:
                    return None
            return made.digest(), made.optimizer_digest(), ls.digest(made.ema_model)

    for storage in ("hybrid", "replicated"):
        train(storage, saved=storage)
    after = [("hybrid", "hybrid"), ("replicated", "hybrid"), ("sharded", "hybrid")]
    return [train(*pair) for pair in [*after, ("hybrid", "replicated"), ("replicated",)]]


def test_a_hybrid_training_resumes_in_any_storage(tmp_path):
    found = run(save_and_resume, "aabb", tmp_path)
    assert len({digests for each in found for digests in each}) == 1
    parts = sorted(path.name for path in (tmp_path / "hybrid/checkpoints/step-1").glob("model-*"))
    assert parts == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def microbatches_here(placement):
    join(placement)
    trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), ADAMW)
    (batch,) = trainer.batches(Pairs(16), 16)
    trainer.step(batch)
    return [each.index for each in batch.microbatches]


def test_a_host_computes_neighboring_microbatches():
    assert run(microbatches_here, "abab") == [[0, 1], [4, 5], [2, 3], [6, 7]]


class CountingGloo:
    """Gloo's connections, and the bytes that were sent in messages."""

    def __init__(self, gloo):
        self.gloo = gloo
        self.sent = 0

    def __getattr__(self, name):
        return getattr(self.gloo, name)

    def send(self, tensors, peer, tag):
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self.gloo.send(tensors, peer, tag)


def sent_in_a_step(placement, storage):
    """Return the bytes sent to other hosts in a step, relative to the gradients."""
    groups = [join(placement)]
    model = nn.Linear(1000, 1000, bias=False)
    size = model.weight.nbytes
    trainer = ls.Trainer(model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), storage=storage)
    if storage == "hybrid":
        groups.append(backend.host_group_of(model.weight.device_mesh.get_group("replicate")))
    for group in groups:
        group.gloo = CountingGloo(group.gloo)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 1000, generator=generator), torch.randn(8, 1000, generator=generator)
    sent = [0]
    for _ in range(4):  # the last step is not audited
        trainer.step(batch)
        sent.append(sum(group.gloo.sent for group in groups))
    return (sent[-1] - sent[-2]) / size


@pytest.mark.parametrize(
    ("placement", "storage"), [("aabb", "replicated"), ("abab", "replicated"), ("aabb", "hybrid")]
)
def test_a_host_sends_the_gradients_once(placement, storage):
    found = run(sent_in_a_step, placement, storage)
    for host in "ab":
        of_host = [sent for where, sent in zip(placement, found, strict=True) if where == host]
        assert 1.0 <= sum(of_host) < 1.02


def refuse_shared_storage(placement):
    join(placement)
    with pytest.raises(LayoutError) as caught:
        ls.Trainer(network(), nn.CrossEntropyLoss(), ADAMW, storage="shared")
    return str(caught.value)


def test_shared_storage_across_hosts_is_refused_by_name():
    for text in run(refuse_shared_storage, "ab"):
        assert 'storage="shared"' in text
        assert "several hosts" in text
