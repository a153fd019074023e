"""Which gradients and buckets are complete during backward, on graphs of one process."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from lockstep.data_parallel.bucket_ready_tracker import BucketReadyTracker


class Layers(nn.Module):
    """Three layers without bias, parameters 0, 1 and 2, whose gradients arrive as 2, 1, 0."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.recomputed = ()
        """Layers that run in a reentrant checkpoint between `first` and `last`."""

    def forward(self, inputs):
        hidden = self.first(inputs)
        if not self.recomputed:
            return self.last(self.middle(hidden))
        segment = nn.Sequential(*self.recomputed)
        return self.last(checkpoint(segment, hidden, use_reentrant=True))

    def loss(self):
        return self(torch.ones(2, 3, requires_grad=True)).square().sum()


class Recorder:
    """A policy that launches nothing."""

    def __init__(self, model, buckets=((2,), (1,), (0,)), **options):
        self.states = []
        self.counts = []
        self.readiness = BucketReadyTracker(model.parameters(), self.on_gradient, **options)
        self.readiness.set_buckets(buckets)

    def on_gradient(self, index):
        is_late = self.readiness.is_late(index)
        self.states.append((index, "late" if is_late else self.readiness.mark(index)))
        self.counts.append(self.readiness.complete_buckets)

    def watch(self, model):
        """Return the states in one backward pass."""
        self.states = []
        self.counts = []
        loss = model.loss()
        with self.readiness.watch(loss):
            loss.backward()
        return self.states


def watched(model, *passes, **options):
    """Return the states in each of several passes; a pass is a tuple of recomputed layers."""
    recorder = Recorder(model, **options)
    found = []
    for recomputed in passes:
        model.recomputed = recomputed
        found.append(recorder.watch(model))
    return found


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Layers()


# --- complete gradients -----------------------------------------------------------------------


def test_nothing_is_complete_after_a_pass_with_inner_passes(model):
    shared = (model.last, model.middle)
    first, second, third = watched(model, shared, shared, ())
    assert [index for index, _ in first] == [2, 1, 2, 0]
    assert {state for _, state in second + third} == {False}


def test_a_part_that_follows_a_complete_gradient_is_late(model):
    _, second, third = watched(model, (), (model.last,), (model.last,))
    assert second[:2] == [(2, True), (2, "late")]
    assert {state for _, state in third} == {False}


# --- buckets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buckets", "counts"),
    [
        ([[2], [1], [0]], [1, 2, 3]),
        ([[1, 2], [0]], [0, 1, 2]),
        ([[0], [1], [2]], [0, 0, 3]),
        ([[1], [0, 2]], [0, 1, 2]),
        ([[1]], [0, 1, 1]),  # the others are in no bucket
        ([], [0, 0, 0]),
    ],
)
def test_buckets_are_complete_in_their_fixed_order(model, buckets, counts):
    recorder = Recorder(model, buckets)
    for _ in range(3):
        recorder.watch(model)
    assert recorder.counts == counts


# --- hooks ------------------------------------------------------------------------------------


def test_neither_parameters_nor_losses_keep_readiness_and_policy_alive(model):
    recorder = Recorder(model)
    loss = model.loss()
    with recorder.readiness.watch(loss):
        loss.backward(retain_graph=True)
    dropped = [weakref.ref(recorder), weakref.ref(recorder.readiness)]
    gc.disable()  # there is no cycle that would need it
    try:
        del recorder
        assert [each() for each in dropped] == [None, None]
    finally:
        gc.enable()
    loss.backward()


# --- user code that looks at `.grad` ----------------------------------------------------------


def nothing(*_):
    return None


OBSERVERS = {
    "backward hook": lambda model: model.middle.register_full_backward_hook(nothing),
    "backward pre-hook": lambda model: model.middle.register_full_backward_pre_hook(nothing),
    "hook of all modules": lambda _: nn.modules.module.register_module_full_backward_hook(nothing),
    "pre-hook of all modules": (
        lambda _: nn.modules.module.register_module_full_backward_pre_hook(nothing)
    ),
    "post-accumulate hook": lambda model: model.first.weight.register_post_accumulate_grad_hook(
        nothing
    ),
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_nothing_is_complete_while_a_hook_may_look_at_gradients(model, observer):
    recorder = Recorder(model, modules=[model])
    recorder.watch(model)
    assert not recorder.readiness.is_observed()
    handle = OBSERVERS[observer](model)
    try:
        assert {state for _, state in recorder.watch(model)} == {False}
    finally:
        handle.remove()
    assert {state for _, state in recorder.watch(model)} == {True}


def queue_from(layer, callback=nothing):
    """Queue a callback for the end of backward when the gradient of a layer's output is there."""

    def queue(gradient):
        Variable._execution_engine.queue_callback(callback)

    def hook(module, inputs, output):
        output.register_hook(queue)

    return layer.register_forward_hook(hook)


def test_a_callback_for_the_end_of_backward_ends_early_completion_for_good(model):
    recorder = Recorder(model)
    called = []
    handle = queue_from(model.last, lambda: called.append(1))
    recorder.watch(model)
    handle.remove()
    assert called == [1]
    assert not recorder.readiness.has_late_callback  # nothing had been complete
    for _ in range(2):
        assert {state for _, state in recorder.watch(model)} == {False}


def test_the_first_callback_after_complete_gradients_is_late_in_that_pass_only(model):
    recorder = Recorder(model)
    recorder.watch(model)
    queue_from(model.first)
    assert recorder.watch(model)[:2] == [(2, True), (1, True)]
    assert recorder.readiness.has_late_callback
    recorder.watch(model)
    assert not recorder.readiness.has_late_callback


def test_the_engine_of_torch_is_put_back_also_after_an_exception(model):
    engine = Variable._execution_engine
    recorder = Recorder(model)

    def fail():
        with recorder.readiness.watch(model.loss()):
            assert Variable._execution_engine is not engine
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert Variable._execution_engine is engine
