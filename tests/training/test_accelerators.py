"""Trainings on a simulated accelerator, whose operators have the CPU's bits.

Operators that draw random numbers differ: torch has another dropout for accelerators.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
import models
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data_parallel.gradient_reducer import BucketExchange
from lockstep.kernel.norm import BLOCK
from lockstep.launcher import world as joined
from simulated import ranks as simulated

ADAMW = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIZES = {"pictures": [16, 17, 3], "words": [19, 1], "branches": [19, 3, 19], "blocks": [19, 1]}


def train(case, **options):
    """Return what the guarantee covers, of a training on the device of the world."""
    model, batches, loss = models.CASES[case]
    torch.manual_seed(5)
    trainer = ls.Trainer(model(), loss(), ADAMW, seed=11, max_grad_norm=0.5, **options)
    losses = [trainer.step(batch) for batch in batches(SIZES[case])]
    kinds = {each.device.type for each in trainer.model.state_dict().values()}
    return losses, trainer.digest(), trainer.optimizer_digest(), kinds


def train_with_bits_of_the_cpu():
    found = {case: train(case) for case in ("pictures", "branches", "blocks")}
    found |= {"callables": train_callables(), "loaded": train_loaded()}
    found |= {"compiled": train_compiled(), "parallel": train_in_one_process()}
    return found | {"sparse": [train_sparse(*each) for each in SPARSE]}


def train_all():
    found = train_with_bits_of_the_cpu() | {"words": train("words")}
    found["bf16"] = train("pictures", autocast_dtype=torch.bfloat16)
    found["fp16"] = train("pictures", autocast_dtype=torch.float16)
    return found


def train_callables(**layout):
    """Train blocks that are built on the device, whose weights the seed and the block decide."""
    blocks = [partial(nn.Linear, 6, 7), partial(nn.Dropout, 0.3), partial(nn.Linear, 7, 10)]
    trainer = ls.Trainer(blocks, nn.CrossEntropyLoss(), SGD, seed=3, **layout)
    initial = trainer.digest()
    for batch in models.row_batches([19, 16]):
        trainer.step(batch)
    return initial, trainer.digest()


def train_loaded():
    """Train on loaded batches, which are copied from pinned memory late."""
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(0, 10, (40,)))
    trainer = ls.Trainer(nn.Linear(6, 10), nn.CrossEntropyLoss(), SGD, seed=3)
    for batch in trainer.batches(data, batch_size=16, pin_memory=True):
        trainer.step(batch)
    return trainer.digest(), trainer.evaluate(data, batch_size=16).loss


def train_compiled():
    torch.manual_seed(2)
    model = torch.compile(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 10)), backend="eager")
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    for batch in models.row_batches([16, 16]):
        trainer.step(batch)
    return trainer.digest()


class Words(nn.Module):
    """An embedding with sparse gradients, whose weight may also be the one of a layer."""

    def __init__(self, is_tied):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, sparse=True)
        self.last = nn.Linear(6, 11)
        if is_tied:
            self.last.weight = self.embedding.weight

    def forward(self, words):
        return self.last(self.embedding(words).mean(1))


def bag():
    return nn.EmbeddingBag(11, 10, sparse=True, mode="sum")


SPARSE = [
    (partial(Words, is_tied=False), SGD, None),
    (partial(Words, is_tied=False), partial(torch.optim.SGD, lr=0.3), 0.2),
    (partial(Words, is_tied=True), ADAMW, 0.5),
    (bag, partial(torch.optim.SparseAdam, lr=0.05), 0.4),
]


def train_sparse(build, optimizer, max_grad_norm):
    torch.manual_seed(5)
    trainer = ls.Trainer(
        build(), nn.CrossEntropyLoss(), optimizer, seed=11, max_grad_norm=max_grad_norm
    )
    generator = torch.Generator().manual_seed(3)
    losses = []
    for size in (19, 16, 3, 19, 1):
        words = torch.randint(10, (size, 4), generator=generator)  # the last row is not used
        losses.append(trainer.step((words, torch.randint(10, (size,), generator=generator))))
    return losses, trainer.digest(), trainer.optimizer_digest()


def train_in_one_process():
    """Train on two devices of this rank."""
    kind = joined.world().device.type
    devices = ["cpu", "cpu"] if kind == "cpu" else [f"{kind}:0", f"{kind}:1"]
    torch.manual_seed(2)
    model = nn.Linear(6, 10).to(devices[0])
    parallel = ls.DataParallel(model, devices)
    optimizer = SGD(model.parameters())
    for inputs, targets in models.row_batches([16, 16]):
        optimizer.zero_grad()
        outputs = parallel(inputs.to(devices[0]))
        nn.functional.cross_entropy(outputs, targets.to(devices[0])).backward()
        optimizer.step()
    return ls.digest(model)


@pytest.fixture(scope="module")
def on_cpu():
    (found,) = simulated.run(train_with_bits_of_the_cpu, 1, device="cpu")
    return found


@pytest.fixture(scope="module")
def on_one_rank():
    (found,) = simulated.run(train_all, 1)
    return found


def test_the_bits_are_those_of_the_cpu(on_cpu, on_one_rank):
    for case in ("pictures", "branches", "blocks"):
        *expected, kinds = on_cpu[case]
        assert kinds == {"cpu"}
        assert on_one_rank[case] == (*expected, {"simulated"}), case
    assert on_one_rank["callables"][0] == on_cpu["callables"][0]
    for case in ("loaded", "compiled", "parallel", "sparse"):
        assert on_one_rank[case] == on_cpu[case], case


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.stress)])
def test_every_number_of_ranks_gives_the_same_bits(on_one_rank, n):
    for found in simulated.run(train_all, n):
        assert found == on_one_rank


def test_ranks_that_share_a_device_give_the_same_bits_in_its_memory(on_one_rank):
    def train_shared():
        from lockstep.comm.ipc_all_reduce import IpcAllReduce
        from lockstep.comm.portable_all_reduce import PortableAllReduce

        counts = dict.fromkeys((IpcAllReduce, PortableAllReduce), 0)

        def count(kind, original):
            def combine(reduction):
                counts[kind] += 1
                original(reduction)

            return combine

        for kind in counts:
            kind.combine = count(kind, kind.combine)
        found = train("blocks"), train_forked()
        return found, counts[IpcAllReduce] > 4, counts[PortableAllReduce]

    (first, is_shared, others), second = simulated.run(train_shared, 2, device="simulated:0")
    assert (first, is_shared, others) == second
    assert (is_shared, others) == (True, 0)
    assert first[0] == on_one_rank["blocks"]
    assert first[1] == simulated.run(train_forked, 2, device="cpu")[0]


def mirrored_messages():
    """Return the messages of each pair of ranks of each group, as both ranks should see them."""
    from simulated import process_group

    other = {"send": "recv", "recv": "send"}
    sent = [each.messages for each in process_group.groups]
    peer = 1 - ls.rank()
    seen = [each.get(peer, []) for each in sent]
    return seen if ls.rank() == 0 else [[other[way] for way in ways] for ways in seen]


STAGES = [
    ("pictures", {"schedule": "interleaved"}, False),
    ("pictures", {"schedule": "1f1b"}, True),
    ("blocks", {"schedule": "zero-bubble"}, False),  # the generators go back with the gradients
]


def test_stages_give_the_same_bits(on_one_rank):
    def train_stages():
        found = [
            train(
                case,
                pipeline=ls.PipelineConfig(stages=2, **schedule),
                activation_checkpointing=is_repeated,
            )
            for case, schedule, is_repeated in STAGES
        ]
        return found, train_callables(pipeline=ls.PipelineConfig(stages=2)), mirrored_messages()

    (found, weights, first), (also, _, second) = simulated.run(train_stages, 2)
    for results in (found, also):
        for (case, *_), result in zip(STAGES, results, strict=True):
            assert result[:3] == on_one_rank[case][:3]
    assert weights == on_one_rank["callables"]
    # NCCL would run the messages of two ranks in this order, and wait forever otherwise.
    assert first == second
    assert sum(map(len, first)) > 100


class Forked(nn.Module):
    """Computes a layer in a stream of its own, as models with several branches do."""

    def __init__(self):
        super().__init__()
        self.here = nn.Linear(6, 10)
        self.there = nn.Linear(6, 10)

    def forward(self, inputs):
        if inputs.device.type == "cpu":
            return self.here(inputs) + self.there(inputs)
        current = torch.accelerator.current_stream()
        stream = torch.Stream(inputs.device)
        stream.wait_stream(current)
        with stream:
            outputs = self.there(inputs)
        current.wait_stream(stream)
        return self.here(inputs) + outputs


def train_forked():
    torch.manual_seed(1)
    trainer = ls.Trainer(Forked(), nn.CrossEntropyLoss(), SGD)
    model = DistributedDataParallel(Forked().to(joined.world().device))
    exact = ls.exact(model)
    optimizer = SGD(model.parameters())
    share = ReplicaShare(8, on_one_host(ls.world_size()), ls.rank())
    for inputs, targets in models.row_batches([16, 19, 16]):
        trainer.step((inputs, targets))
        pieces = [span for _, span in share.pieces(len(inputs))]
        parts = [(inputs[p.start : p.stop], targets[p.start : p.stop]) for p in pieces]
        for part, classes in exact.microbatches(parts):
            outputs = model(part.to(joined.world().device))
            loss = nn.functional.cross_entropy(outputs, classes.to(outputs.device))
            exact.weigh(loss, share=len(part) / len(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainer.digest(), ls.digest(model.module)


def test_gradients_of_several_streams_are_complete_before_they_are_sent():
    assert simulated.run(train_forked, 2) == simulated.run(train_forked, 2, device="cpu")


def test_buckets_are_exchanged_while_backward_runs():
    def train_watched():
        # In an audited step, gradients are read before they are exchanged.
        trainer = ls.Trainer(Forked(), nn.CrossEntropyLoss(), SGD, audit=False)
        launched = []
        original = BucketExchange.launch_next

        def launch_next(exchange):
            launched.append(torch._C._current_graph_task_id() >= 0)
            original(exchange)

        BucketExchange.launch_next = launch_next
        for batch in models.row_batches([16, 16, 16]):
            trainer.step(batch)
        return launched

    assert simulated.run(train_watched, 2) == [[False, True, True]] * 2


def test_the_waits_of_a_step_do_not_depend_on_the_number_of_parameters_and_buffers():
    """A GPU is idle while the host waits for it and then launches again."""

    def count_waits(layers):
        from simulated import kernels

        model = nn.Sequential(*layers)
        assert model[1].weight.numel() > BLOCK
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), ADAMW, microbatches=4)
        found = []
        for batch in models.row_batches([16] * 4):
            before = kernels.waits
            trainer.step(batch)
            found.append(kernels.waits - before)
        return found[-1]

    def count_both():
        layers = [nn.Linear(6, 300), nn.Linear(300, 300), nn.Linear(300, 10)]
        norms = [nn.BatchNorm1d(10), nn.BatchNorm1d(10)]
        return count_waits(layers), count_waits(layers + norms)

    # For each loss and the norm; with buffers for those of each micro-batch, and to compare them:
    # once for the means, which differ at once, and for counts after each further micro-batch.
    assert simulated.run(count_both, 1) == [(4 + 1, 4 + 1 + 4 + 3)]


def test_a_resumed_training_has_the_bits_of_the_whole_one(tmp_path):
    """Also numbers that the script draws on the device; the model changes after the copy."""

    def script(folder: Path, is_resumed: bool):
        device = joined.world().device
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 10))
        config = ls.CheckpointConfig(every_steps=2, folder=folder)
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), ADAMW, seed=2, checkpoint=config)
        if is_resumed:
            trainer.resume(folder / "checkpoints" / "step-2")
        for batch in models.row_batches([32, 32, 32, 32]):
            trainer.step(batch)
        drawn = torch.rand(3, device=device).tolist()
        trainer.finish()
        return trainer.digest(), trainer.optimizer_digest(), drawn, trainer.resumed_from

    (*expected, nothing), (*also, _) = simulated.run(script, 2, tmp_path, False)
    assert (also, nothing) == (expected, None)
    ((*found, position),) = simulated.run(script, 1, tmp_path, True)
    assert (found, position) == (expected, 2)
