"""The audit of `ls.exact`: finds hidden state and faults, changes no bit, raises no false alarm."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.audit.recorded_call import RecordedCall
from lockstep.errors import StateError, UsageError, WorkError
from lockstep.training import step_environment
from tests.bit_flips import FaultyOperator

MICROBATCHES = 4
STEPS = 3
EXACT = ls.exact  # importing it draws from Python's generator, which `train` seeds


class Network(nn.Module):
    """Draws, writes buffers, and calls a block twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        for layer in (*self.layers, self.layers[0]):
            inputs = layer(inputs + 0.1 * torch.rand_like(inputs)).tanh()
        return self.head(inputs * random.uniform(0.9, 1.1))


class Checkpointed(Network):
    """Computes a block again in backward."""

    use_reentrant = False

    def forward(self, inputs):
        for layer in (*self.layers, self.layers[0]):
            inputs = checkpoint(layer, inputs, use_reentrant=self.use_reentrant).tanh()
        return self.head(inputs)


@dataclass
class Outputs:
    """What a model of transformers returns."""

    loss: torch.Tensor
    logits: torch.Tensor


class WithLoss(Network):
    """Computes the loss from another output."""

    def forward(self, inputs, targets):
        logits = super().forward(inputs)
        return Outputs(F.cross_entropy(logits, targets), logits)


class InPlace(Network):
    """Writes to what it returns, and returns it twice."""

    def forward(self, inputs):
        logits = super().forward(inputs).mul_(0.5)
        return {"logits": logits, "again": logits, "constant": torch.ones(1)}


class Hooked(Network):
    """Changes the gradient of its outputs."""

    def forward(self, inputs):
        logits = super().forward(inputs)
        logits.register_hook(lambda gradient: gradient * 0.5)
        return logits


def cross_entropy(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


def under_autocast(model, inputs, targets):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(inputs), targets)


def changed_outputs(model, inputs, targets):
    outputs = model(inputs)
    outputs["logits"].register_hook(lambda gradient: gradient * 0.5)
    return F.cross_entropy(outputs["logits"].mul_(2) + outputs["again"], targets)


def returned_loss(model, inputs, targets):
    return model(inputs, targets).loss


def from_inputs_with_gradients(model, inputs, targets):
    return F.cross_entropy(model(inputs.requires_grad_() * 2), targets)


def calls_without_gradients(model, inputs, targets):
    with torch.no_grad():
        teacher = model(inputs)
    return cross_entropy(model, inputs, targets) + teacher.mean()


AUDITED = {
    "plain": (Network, cross_entropy),
    "autocast": (Network, under_autocast),
    "checkpoint": (Checkpointed, cross_entropy),
    "compiled": (lambda: torch.compile(Network(), backend="eager"), cross_entropy),
    "loss in the model": (WithLoss, returned_loss),
    "outputs that change": (InPlace, changed_outputs),
    "a hook of the outputs": (Hooked, cross_entropy),
    "inputs with gradients": (Network, from_inputs_with_gradients),
    "a call without gradients": (Network, calls_without_gradients),
}


def reads_parameters(model, inputs, targets):
    return cross_entropy(model, inputs, targets) + model.head.weight.square().mean()


def reads_hidden(model, inputs, targets):
    hidden = []
    with model.layers[1].register_forward_hook(lambda *given: hidden.append(given[2])):
        return cross_entropy(model, inputs, targets) + hidden[0].square().mean()


def reads_both_outputs(model, inputs, targets):
    outputs = model(inputs, targets)
    return outputs.loss + outputs.logits.square().mean()


def calls_twice(model, inputs, targets):
    return cross_entropy(model, inputs, targets) + model(inputs).mean()


def writes_to_inputs(model, inputs, targets):
    loss = cross_entropy(model, inputs, targets)
    inputs.data.zero_()
    return loss


def calls_a_part(model, inputs, targets):
    outputs = model(inputs)
    with torch.no_grad():
        model.layers[0](inputs)
    return F.cross_entropy(outputs, targets)


def replaces_forward(model, inputs, targets):
    model.forward = lambda given: Network.forward(model, given * 2)
    loss = cross_entropy(model, inputs, targets)
    del model.forward
    return loss


def penalizes_gradients(model, inputs, targets):
    outputs = model(inputs.requires_grad_())
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, targets) + slopes.square().mean()


NOT_AUDITED = {
    "parameters": (Network, reads_parameters, "depends on parameters or on hidden"),
    "hidden": (Network, reads_hidden, "depends on parameters or on hidden"),
    "both outputs": (WithLoss, reads_both_outputs, "depends on parameters or on hidden"),
    "penalty": (Network, penalizes_gradients, "depends on parameters or on hidden"),
    "two calls": (Network, calls_twice, "called several times"),
    "inputs": (Network, writes_to_inputs, "inputs of the model are written to"),
    "forward": (Network, replaces_forward, "its settings or those of torch change"),
    "a part": (Network, calls_a_part, "buffers change between"),
}


pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def repetitions(monkeypatch):
    """Return a list of the hashes of all repetitions."""
    hashes = []
    repeat = RecordedCall.repeat

    def counted(call, **how):
        hashes.append(repeat(call, **how))
        return hashes[-1]

    monkeypatch.setattr(RecordedCall, "repeat", counted)
    return hashes


def train(make, compute_loss, *, audit=True, steps=STEPS, set_to_none=True, wrapper=None):
    """Return the digest of the model after a training, and the numbers drawn then."""
    torch.manual_seed(1)
    random.seed(2)
    model = make()
    model = model if wrapper is None else wrapper(model)
    exact = ls.exact(model, MICROBATCHES, audit=audit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(3)
    draws = []
    for _ in range(steps):
        for _ in range(MICROBATCHES // ls.world_size()):
            inputs = torch.randn(5, 6, generator=data)
            targets = torch.randint(0, 3, (5,), generator=data)
            exact.begin()
            exact.weigh(compute_loss(model, inputs, targets)).backward()
        assert exact.is_complete
        draws += torch.rand(1).item(), random.random()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    draws += torch.rand(1).item(), random.random()
    return ls.digest(model), draws


@pytest.mark.parametrize("case", AUDITED)
def test_an_audited_training_has_the_same_bits(case, repetitions, capsys, monkeypatch):
    # Another test may have compiled a model in this process, which would be named.
    monkeypatch.delitem(sys.modules, "torch._inductor.graph", raising=False)
    # And a processor with instructions for bfloat16.
    monkeypatch.setattr(step_environment, "find_bfloat16_instructions", lambda: "")
    make, compute_loss = AUDITED[case]
    expected = train(make, compute_loss, audit=False)
    assert repetitions == []
    assert train(make, compute_loss) == expected
    assert len(repetitions) == STEPS  # so none differed
    assert any(not name.startswith("output") for name in repetitions[0])
    assert capsys.readouterr().err == ""


class WithUnused(Network):
    """Has a parameter whose gradient stays zero."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


def test_zeroed_gradients_are_audited(repetitions):
    steps = MICROBATCHES + 1  # in one of which the first micro-batch is audited
    options = {"set_to_none": False, "steps": steps}
    expected = train(WithUnused, cross_entropy, audit=False, **options)
    config = ls.AuditConfig(every_steps=1)
    assert train(WithUnused, cross_entropy, audit=config, **options) == expected
    assert len(repetitions) == steps


@pytest.mark.parametrize("case", NOT_AUDITED)
def test_a_loop_that_cannot_be_audited_is_named_once(case, repetitions):
    make, compute_loss, reason = NOT_AUDITED[case]
    expected = train(make, compute_loss, audit=False)
    with pytest.warns(UserWarning, match=f"ls.exact cannot audit step 0.*{reason}") as warned:
        assert train(make, compute_loss) == expected
    assert repetitions == []
    assert len(warned) == 1


def test_a_part_that_is_called_after_backward_is_no_fault(repetitions):
    torch.manual_seed(1)
    model = Network()
    exact = ls.exact(model, microbatches=MICROBATCHES, loggers=())
    data = TensorDataset(torch.randn(20, 6), torch.arange(20) % 3)

    def train_once():
        for batch in exact.batches(data, batch_size=20):
            for inputs, targets in batch:
                batch.backward(F.cross_entropy(model(inputs), targets))
                with torch.no_grad():
                    model.layers[0](inputs)

    with pytest.warns(UserWarning, match="buffers change between backward and the end"):
        train_once()
    assert repetitions == []


def test_a_model_that_vmap_calls_is_not_audited(repetitions):
    model = nn.Sequential(nn.Linear(6, 3))
    exact = ls.exact(model, microbatches=MICROBATCHES, loggers=())
    tensors = dict(model.named_parameters())

    def compute(one, target):
        return F.cross_entropy(functional_call(model, tensors, (one[None],)), target[None])

    def train_once():
        for batch in exact.batches(
            TensorDataset(torch.randn(20, 6), torch.arange(20) % 3), batch_size=20
        ):
            for inputs, targets in batch:
                batch.backward(vmap(compute)(inputs, targets).mean())

    with pytest.warns(UserWarning, match="a transform of torch.func, such as vmap, calls"):
        train_once()
    assert repetitions == []


def test_steps_are_audited_as_in_the_trainer(repetitions):
    train(Network, cross_entropy, audit=ls.AuditConfig(every_steps=4), steps=9)
    assert len(repetitions) == len({0, 1, 2, 4, 5, 8})
    with pytest.raises(UsageError, match="audit='often': expected True, False or a"):
        ls.exact(Network(), audit="often")


# --- what is found --------------------------------------------------------------------------------


class Recurrent(Network):
    """Keeps a number in an attribute."""

    scale = 1.0
    growth = 1.01

    def forward(self, inputs):
        self.scale *= self.growth
        return super().forward(inputs * self.scale)


class OwnGenerator(Network):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(0)

    def forward(self, inputs):
        return super().forward(inputs * torch.rand(6, generator=self.own))


class InBackward(Network):
    """Hides a counter in backward."""

    def __init__(self):
        super().__init__()
        self.counts = [0]
        self.head.weight.register_hook(self.scale)

    def scale(self, gradient):
        self.counts[0] += 1
        return gradient * self.counts[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Recurrent, "first in aten.mul.* of Recurrent .*Recurrent.scale changed meanwhile"),
        (OwnGenerator, "first in aten.rand.* of OwnGenerator .*OwnGenerator.own changed"),
        (InBackward, "first in aten.mul.*InBackward.counts.* changed"),
    ],
)
def test_hidden_state_is_an_error_that_names_it(make, said):
    place = "rank 0, step 0, micro-batch 1: computed again with the same inputs"
    with pytest.raises(StateError, match=f"^{place}.*{said}"):
        train(make, cross_entropy)


def hide_on_one_rank():
    """Return the error of a model that has hidden state on rank 1 only."""
    Recurrent.growth = 1.01 if os.environ["RANK"] == "1" else 1.0
    with pytest.raises(StateError) as caught:
        train(Recurrent, cross_entropy, wrapper=DistributedDataParallel)
    return str(caught.value)


def test_hidden_state_of_one_rank_ends_all(ranks):
    first, second = ranks(hide_on_one_rank, 2)
    assert first == second
    assert "rank 1, step 0, micro-batch 3" in first


@pytest.mark.parametrize("call", [4, 12])  # of micro-batch 1, and of its repetition
@pytest.mark.parametrize("most", [0, 3])
def test_a_transient_fault_is_reported(call, most, capsys):
    config = ls.AuditConfig(max_corrections=most)
    with FaultyOperator("tanh", call=call, element=0, bit=20) as fault:
        if most:
            train(Network, cross_entropy, audit=config)
        else:
            with pytest.raises(WorkError, match=r"core .* computed 1 wrong result, more than"):
                train(Network, cross_entropy, audit=config)
    assert fault.flips == 1
    if not most:
        return
    said = capsys.readouterr().err
    assert "step 0, micro-batch 1: rank 0" in said
    assert "computed a wrong result" in said
    assert ("which the gradients contain" in said) == (call == 4)


def test_a_processor_that_is_wrong_again_and_again_ends_the_training():
    said = r"rank 0 \(host .*\) computed different results .*, again and again, first in aten\.tanh"
    error = pytest.raises(WorkError, match=said)
    with FaultyOperator("tanh", probability=0.5, seed=1) as fault, error:
        train(Network, cross_entropy)
    assert fault.flips


def clip_every_microbatch(exact, model, data):
    for batch in exact.batches(data, batch_size=16):
        for inputs, targets in batch:
            batch.backward(cross_entropy(model, inputs, targets))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def test_gradients_that_the_loop_changes_are_no_fault_of_a_processor():
    model = Network()
    exact = ls.exact(model, microbatches=4, loggers=[])
    data = TensorDataset(torch.randn(16, 6), torch.arange(16) % 3)
    with pytest.warns(UserWarning, match="cannot audit step 0.*gradients change between backward"):
        clip_every_microbatch(exact, model, data)
    assert exact.last_result.step == 0
