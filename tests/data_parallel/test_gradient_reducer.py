"""Gradients of the trainer in buckets: their memory, when they are launched, and failures."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
import models
import pytest_lockstep
from lockstep.comm import backend as native
from lockstep.comm.native_all_reduce import NativeAllReduce
from lockstep.comm.shared_memory import is_shared
from lockstep.data.assignment import on_one_host
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.data_parallel.local_sums import LocalSums
from lockstep.kernel.errors import GradientError, LockstepError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
needs_native = pytest.mark.skipif(not native.available(), reason="not built")


def rows(samples=16):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def note_events():
    """Note, in order, when buckets are launched and when backward ends."""
    events = []
    launch = NativeAllReduce.launch
    accumulate = LocalSums.accumulate

    def note(*arguments, **options):
        events.append("launch")
        launch(*arguments, **options)

    NativeAllReduce.launch = note

    def note_accumulation(sums, leaf):
        events.append(f"accumulate {leaf}")
        accumulate(sums, leaf)

    LocalSums.accumulate = note_accumulation
    return events


def test_parameters_on_several_devices_are_refused(world_of_one):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"0\.weight is on cpu, and 1\.weight on meta: move"):
        ls.exact(model, microbatches=2)


@needs_native
def test_buckets_travel_while_backward_runs_and_grads_lie_in_them(ranks, monkeypatch):
    def train():
        import lockstep.data_parallel.planned_buckets as module

        module.BUCKET_BYTES = 64  # a bucket for each parameter
        trainer = ls.Trainer(deep(), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False)
        trainer.step(rows())  # looks on
        events = note_events()
        trainer.step(rows())
        grads = [each.grad for each in trainer.model.parameters()]
        where = [(is_shared(each), each.data_ptr() % 64) for each in grads]
        before = [each.data_ptr() for each in grads]
        del grads
        trainer.step(rows())
        kept = [each.grad for each in trainer.model.parameters()]
        again = [each.data_ptr() for each in kept] == before
        values = [each.clone() for each in kept]
        trainer.step(rows())  # somebody holds on to the gradients of the step before
        same = all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
        moved = trainer.model[0].weight.grad.data_ptr() != kept[0].data_ptr()
        return events[:8], where, again, same, moved

    found = ranks(train, 2, backend="lockstep", portable=False)
    for rank, (events, where, again, same, moved) in enumerate(found):
        first = 2 * rank
        last = 2 * rank + 1
        assert events == [f"accumulate {first}", *["launch"] * 6, f"accumulate {last}"]
        assert where == [(True, 0)] * 6
        assert again
        assert same
        assert moved


class Late(nn.Module):
    """Uses its second layer from the second call on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return self.first(inputs) + (self.second(inputs) if self.calls > 4 else 0)


def on_ranks(train, n, slot_bytes=""):
    """Return the values of ranks in which small models are not treated as large ones."""

    def call():
        os.environ["LOCKSTEP_SLOT_BYTES"] = slot_bytes
        ls.init(backend="lockstep", portable=False)  # micro-batches one by one
        try:
            return train()
        finally:
            ls.shutdown()

    return pytest_lockstep.run(call, ranks=n, init=False)


def count_launches():
    """Return a list that grows by one with each exchange of gradients of this process."""
    launches = []
    launch = NativeAllReduce.launch

    def noted(self, *arguments, **options):
        launches.append(1)
        launch(self, *arguments, **options)

    NativeAllReduce.launch = noted
    return launches


@needs_native
@pytest.mark.parametrize("slot_bytes", ["", "1024"])
def test_gradients_of_a_small_model_are_sent_with_the_statuses(slot_bytes):
    def train():
        launches = count_launches()
        losses = []
        digests = []
        trainer = ls.Trainer(deep(), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False)
        for step in range(4):
            inputs, targets = rows(samples=16 - step)
            if step == 2:  # one rank has no finite loss, and its gradients are sent as well
                with pytest.raises(ls.errors.LossError):
                    trainer.step((inputs * torch.inf, targets))
            losses.append(trainer.step((inputs, targets)))
            digests.append(trainer.digest())
        return losses, digests, len(launches)

    ((*expected, _),) = on_ranks(train, 1)
    for n in (2, 3):
        for *found, launches in on_ranks(train, n, slot_bytes):
            assert found == expected
            assert launches == (4 if slot_bytes else 0)


@needs_native
def test_a_parameter_that_is_used_later_than_others_is_exchanged_apart():
    def train():
        launches = count_launches()
        model = Late()
        model.calls = 4 - 4 // ls.world_size()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False)
        return [(trainer.step(rows()), trainer.digest(), len(launches)) for _ in range(4)]

    expected = [step[:2] for step in on_ranks(train, 1)[0]]
    for found in on_ranks(train, 2):
        assert [step[:2] for step in found] == expected
        # All are expected in the first step, and the second layer only from the third one on.
        assert [step[2] for step in found] == [0, 1, 1, 1]


class Complex(nn.Module):
    """Uses a complex parameter, which is not added in shared memory, in every second step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.is_used = True
        self.factor = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, inputs):
        outputs = self.layer(inputs)
        return outputs * self.factor.abs() if self.is_used else outputs


@needs_native
def test_gradients_that_travel_in_some_steps_only():
    def train():
        trainer = ls.Trainer(Complex(), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False)
        steps = []
        kept = []
        for step in range(8):
            trainer.model.is_used = step % 4 > 1
            steps.append((trainer.step(rows()), trainer.digest()))
            if ls.rank() == 0 and step == 4:  # one rank needs new memory for its buckets
                kept.append(trainer.model.layer.weight.grad)
        return steps

    (expected,) = on_ranks(train, 1)
    assert on_ranks(train, 2) == [expected] * 2


@needs_native
def test_messages_with_the_gradients_of_another_plan_are_refused():
    def train():
        trainer = ls.Trainer(deep(), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False)
        trainer.step(rows())
        before = trainer.digest()
        (bucket_sum,) = trainer.engine.setup.executor._gradients._buckets.sums
        if ls.rank() == 1:
            bucket_sum._digest = b"another."
        with pytest.raises(native.ArgumentError, match="message of rank 1 does not end with its"):
            trainer.step(rows())
        return trainer.digest() == before

    assert on_ranks(train, 2) == [True, True]


class Slow(nn.Module):
    """Calls `wait` in backward, when the gradients of the last layer have arrived."""

    def __init__(self):
        super().__init__()
        self.layers = deep()
        self.wait = lambda: None

    def forward(self, inputs):
        return self.layers[3:](
            models.CallInBackward.apply(self.layers[:3](inputs), lambda: self.wait())
        )


@needs_native
def test_a_rank_does_not_wait_for_the_others_in_backward(ranks, tmp_path):
    def train():
        import lockstep.data_parallel.planned_buckets as module

        module.BUCKET_BYTES = 64  # several buckets
        store = dist.FileStore(str(tmp_path / "store"), 2)
        rank = dist.get_rank()
        trainer = ls.Trainer(Slow(), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False)
        for step in range(4):
            events = note_events()
            gradients = trainer.engine.setup.executor._gradients
            accumulate = LocalSums.accumulate

            def accumulate_and_signal(sums, leaf, accumulate=accumulate, step=step):
                accumulate(sums, leaf)
                if leaf == 1:  # the last one of rank 0
                    store.set(f"rank 0 has ended step {step}", "")

            LocalSums.accumulate = accumulate_and_signal

            def wait(gradients=gradients, step=step):
                if rank == 1 and gradients._exchange.launched:  # in the last micro-batch
                    store.wait([f"rank 0 has ended step {step}"])

            trainer.model.wait = wait
            trainer.step(rows())
            LocalSums.accumulate = accumulate
        return events, trainer.digest()

    (first, digest), (_, other) = ranks(train, 2, backend="lockstep", portable=False)
    assert first[0] == "accumulate 0"
    assert first.count("launch") > 2
    assert digest == other


class Reentrant(nn.Module):
    """`layer` gets its gradient in two parts, the second from a backward inside of backward."""

    def __init__(self, always):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.recompute = always

    def forward(self, inputs):
        inputs.requires_grad_()
        if not self.recompute:
            return self.head(self.layer(inputs))
        inside = checkpoint(self.layer, inputs, use_reentrant=True)
        return self.head(self.layer(inside.tanh()))


def test_a_gradient_in_two_parts_is_whole_before_it_travels(ranks):
    def train():
        torch.manual_seed(0)
        trainer = ls.Trainer(
            Reentrant(True), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False
        )
        for _ in range(3):
            trainer.step(rows())
        return trainer.digest()

    assert len({digest for n in (1, 2) for digest in ranks(train, n)}) == 1


@needs_native
def test_a_part_that_comes_too_late_stops_every_rank(ranks):
    def train():
        torch.manual_seed(0)
        trainer = ls.Trainer(
            Reentrant(False), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False
        )
        trainer.step(rows())
        before = trainer.digest()
        trainer.model.recompute = dist.get_rank() == 1
        with pytest.raises(GradientError, match="use_reentrant=False") as raised:
            trainer.step(rows())
        return str(raised.value), trainer.digest() == before

    for message, same in ranks(train, 2, backend="lockstep", portable=False):
        assert "rank 1, step 1: the gradient of layer." in message
        assert same


def test_parameters_that_begin_and_cease_to_be_trained(ranks):
    def train():
        model = deep()
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=5)
        for frozen in ({}, {0}, {0, 2}, {4}, {}, {0, 2, 4}, {}):
            for number in (0, 2, 4):
                model[number].requires_grad_(number not in frozen)
            if len(frozen) < 3:
                trainer.step(rows())
                seen = [each.grad is not None for each in model.parameters()]
                assert seen == [number not in frozen for number in (0, 0, 2, 2, 4, 4)]
        return trainer.digest()

    assert len({digest for n in (1, 3) for digest in ranks(train, n)}) == 1


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.wrong = False

    def forward(self, inputs):
        if self.wrong:
            raise KeyError("mine")
        return self.layer(inputs)


@pytest.mark.parametrize("goes_on", ["saves", "skips"])
def test_a_rank_that_catches_its_exception_is_not_paired_with_the_others(ranks, tmp_path, goes_on):
    """The others have launched their buckets, or wait to; they and it get one sentence."""

    def train():
        trainer = ls.Trainer(Failing(), nn.CrossEntropyLoss(), SGD, microbatches=4, audit=False)
        trainer.step(rows())
        trainer.step(rows())
        before = trainer.digest()
        caught = False
        trainer.model.wrong = dist.get_rank() == 1
        try:
            try:
                trainer.step(rows())
            except KeyError:
                caught = True
                trainer.model.wrong = False
                if goes_on == "saves":
                    trainer.save_weights(tmp_path / "model.safetensors")
                trainer.engine.state.position.steps += 1
                trainer.step(rows())
        except LockstepError as error:
            return caught, str(error), trainer.digest() == before

    for rank, (caught, message, same) in enumerate(ranks(train, 2)):
        assert caught == (rank == 1)
        assert "is saving weights" in message or "is in step 3" in message
        assert "while rank 0 is in step 2" in message
        assert same


def test_a_skipped_micro_batch_is_absent_whatever_grad_holds():
    ls.init()
    try:
        parameter = nn.Parameter(torch.ones(2))
        gradients = GradientReducer([("a", parameter)])
        gradients.begin(2, on_one_host(1))
        parameter.grad = torch.ones(2)  # of micro-batch 1
        gradients.skip(0)
        assert parameter.grad is not None
        gradients.accumulate(1)
        assert parameter.grad is None
        gradients.reduce(gradients.used_parameter_mask())
        assert parameter.grad.tolist() == [1.0, 1.0]
    finally:
        ls.shutdown()


def watch(reducer, parameter, microbatch):
    loss = parameter.sum()
    with reducer.watch_backward(loss, microbatch):
        loss.backward()


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_second_backward_after_the_only_one_is_a_failure_of_that_step(is_watched):
    ls.init()
    try:
        parameter = nn.Parameter(torch.ones(2))
        reducer = GradientReducer([("a", parameter)])
        reducer.begin(2, on_one_host(1))
        watch(reducer, parameter, 0)  # learns how gradients arrive
        reducer.accumulate(0)
        watch(reducer, parameter, 1)
        assert parameter.grad is None
        assert not reducer.failure
        if is_watched:
            watch(reducer, parameter, 1)
        else:
            parameter.sum().backward()
        reducer.accumulate(1)
        assert "the gradient of a arrived in two parts" in reducer.failure
        reducer.begin(2, on_one_host(1))
        assert not reducer.failure
    finally:
        ls.shutdown()


class Branches(nn.Module):
    """Some layers get no gradient from some micro-batches, one is frozen, one is transposed."""

    def __init__(self, has_gaps):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[0].bias.requires_grad_(False)
        self.layers[1].weight = nn.Parameter(self.layers[1].weight.detach().t())
        self.head = nn.Linear(6, 3)
        self.has_gaps = has_gaps

    def forward(self, inputs):
        value = self.layers[1](self.layers[0](inputs))
        if not self.has_gaps or inputs[0, 0] > 0:
            value = self.layers[2](value)
        return self.head(value)


@pytest.mark.parametrize("has_gaps", [False, True])
def test_gradients_added_together_have_the_bits_of_those_added_one_by_one(ranks, has_gaps):
    def train(is_together):
        taken = []
        together = LocalSums._accumulate_together

        def choose(self, microbatch):
            taken.append(is_together and together(self, microbatch))
            return taken[-1]

        LocalSums._accumulate_together = choose
        try:
            torch.manual_seed(0)
            trainer = ls.Trainer(Branches(has_gaps), nn.CrossEntropyLoss(), SGD, microbatches=8)
            for _ in range(3):
                trainer.step(rows(19))
            return trainer.digest(), taken
        finally:
            LocalSums._accumulate_together = together

    found = [pair for n in (1, 3) for wanted in (True, False) for pair in ranks(train, n, wanted)]
    assert len({digest for digest, _ in found}) == 1
    assert any(any(taken) for _, taken in found)
    assert any(not all(taken) for _, taken in found)
