"""Regression tests of the pipeline: each one describes a fault that has been fixed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import LayoutError, LockstepError, RankError

BATCH = (torch.ones(8, 4), torch.zeros(8, dtype=torch.long))


def trainer(model, stages, balance, blocks=None, **options):
    """Return a trainer with SGD and 4 micro-batches."""
    if stages > 1:
        options["pipeline"] = ls.PipelineConfig(stages, "1f1b", blocks, balance)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return ls.Trainer(model, nn.CrossEntropyLoss(), optimizer, microbatches=4, **options)


class Fuse(nn.Module):
    """Raises until it is mended."""

    mended = False

    def forward(self, x):
        if not Fuse.mended:
            raise ValueError("the fuse has blown")
        return x


def chain(*blocks):
    torch.manual_seed(1)
    return nn.Sequential(*(block() for block in blocks))


def layer():
    return nn.Linear(4, 4)


def several_trainers(stages):
    """Train one that fails, then two others in turn, then the first again."""
    Fuse.mended = False
    first = trainer(chain(Fuse, layer, layer), stages, [2, 1])
    with pytest.raises(LockstepError if stages > 1 and ls.rank() else ValueError):
        first.step(BATCH)
    Fuse.mended = True
    others = [trainer(chain(layer, layer, layer), stages, [1, 2]) for _ in range(2)]
    losses = [each.step(BATCH) for _ in range(3) for each in others]
    return [*losses, first.step(BATCH)]


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_trainers_do_not_take_each_others_messages(ranks, backend):
    """The second one was told of the first one's failure: both had the same tags."""
    alone = ranks(several_trainers, 1, 1)
    assert ranks(several_trainers, 2, 2, backend=backend, timeout=20.0) == alone * 2


class Counted(nn.Module):
    """Returns a number beside its input, another one for each micro-batch."""

    NUMBERS = (1, 1.0, True, 0.0, -0.0)

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x, self.NUMBERS[(self.calls - 1) % 5]


class Noting(nn.Module):
    """Takes the number off again, and notes how it is written."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, value):
        x, number = value
        self.seen.append(repr(number))
        return x


def numbers(stages):
    model = chain(layer, Counted, Noting, layer)
    noting = model[2]
    made = trainer(model, stages, [2, 2], audit=False)  # which calls the blocks again
    made.step(BATCH)
    made.step(BATCH)
    return noting.seen


def test_equal_numbers_of_other_types_cross_as_they_are(ranks):
    """The description was not sent again, because 1 == 1.0 == True and 0.0 == -0.0."""
    (alone,) = ranks(numbers, 1, 1, portable=False)
    assert alone[:5] == ["1", "1.0", "True", "0.0", "-0.0"]
    assert ranks(numbers, 2, 2, portable=False) == [[], alone]


class Skipping(nn.Module):
    """Its forward is not its blocks one after another."""

    def __init__(self):
        super().__init__()
        self.a = layer()
        self.b = layer()
        self.c = layer()

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h)) + h


def skipping():
    made = trainer(Skipping(), 2, [2, 1], blocks=["a", "b", "c"])
    with pytest.raises(
        LayoutError,
        match=r"call its blocks one after another: it calls torch\.Tensor\.add",
    ):
        made.step(BATCH)
    return True


def test_a_balance_does_not_excuse_a_model_that_is_no_chain(ranks):
    """With `balance` the blocks were taken for the model, and another model was trained."""
    assert ranks(skipping, 2) == [True, True]


SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved")


def layouts(blocks):
    """Return options of a trainer that cut `blocks` blocks into stages of 2 ranks, every way."""
    cut = [blocks // 2, blocks - blocks // 2]
    chunked = [1, 1, 1, blocks - 3]
    return [
        {
            "pipeline": ls.PipelineConfig(
                stages=2, schedule=each, balance=chunked if each == "interleaved" else cut
            )
        }
        for each in SCHEDULES
    ]


def trained(make, loss=None, layout=None, batches=None, **options):
    """Return the digests after two steps with momentum, and the loss of an evaluation."""
    made = ls.Trainer(
        make(),
        nn.CrossEntropyLoss() if loss is None else loss,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        **options,
        **(layout or {}),
    )
    batches = random_batches() if batches is None else batches
    for batch in batches:
        made.step(batch)
    evaluation = made.evaluate(TensorDataset(*batches[0]), 10)
    return made.digest(), made.optimizer_digest(), evaluation.loss


@dataclass(frozen=True)
class Case:
    """A training that has the bits of one process in every schedule, or is refused.

    Attributes:
        make: Returns the model.
        loss: The loss; None for the cross-entropy.
        batches: The batches; None for those of `random_batches`.
        blocks: The number of blocks.
        options: More options of the trainer.
        refused: A part of the error.
        refused_by: The schedules that refuse it.
    """

    make: Callable[[], nn.Module]
    loss: Callable[..., Any] | None = None
    batches: list[Any] | None = None
    blocks: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    refused_by: tuple[str, ...] = SCHEDULES

    def train(self, layout=None):
        """Return the outcome of `trained`, or the error."""
        try:
            return trained(self.make, self.loss, layout, self.batches, **self.options)
        except LockstepError as error:
            return str(error)


def in_one_process(cases):
    return {name: case.train() for name, case in cases.items()}


def in_stages(cases, schedules):
    return {
        (name, layout["pipeline"].schedule): case.train(layout)
        for name, case in cases.items()
        for layout in layouts(case.blocks)
        if layout["pipeline"].schedule in schedules
    }


def random_batches(samples=18, steps=2):
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(samples, 4, generator=generator),
            torch.randint(0, 4, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


class Conjugate(nn.Module):
    """Returns a lazily conjugated tensor, and the lazily negated imaginary part of it."""

    def __init__(self):
        super().__init__()
        self.linear = layer()

    def forward(self, x):
        z = torch.fft.rfft(self.linear(x), dim=1).conj()
        return z, z.imag


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat))

    def forward(self, given):
        z, imaginary = given
        return (z @ self.weight).abs() + (imaginary @ self.weight.imag)


class Repeating(nn.Module):
    """Calls one of its blocks a second time; in its list that has a name for each call."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(1)
        again = layer()
        last = layer()
        self.layers = nn.ModuleList([again, nn.Tanh(), again, last][: 4 if names == 2 else 2])
        self.last = last

    def blocks(self):
        return [self.layers[0], self.layers[1], self.layers[0], self.last]

    def forward(self, x):
        for block in self.blocks():
            x = block(x)
        return x


def repeating(stages, names):
    made = trainer(Repeating(names), stages, [2, 2])
    return [made.step(BATCH), made.step(BATCH), made.digest()]


def test_a_block_that_a_method_names_twice(ranks):
    """Stages forgot the second call, and the model was refused as no chain of its blocks."""
    for names in (1, 2):
        (alone,) = ranks(repeating, 1, 1, names)
        if names == 2:
            assert ranks(repeating, 2, 2, names) == [alone, alone]
    with pytest.raises(RankError, match=r"block layers.0 is called 2 times, and stages need a"):
        ranks(repeating, 2, 2, 1)


class Marking(nn.Module):
    def forward(self, x):
        x = x * 1
        x.factor = 2.0
        return x


class Marked(nn.Module):
    def forward(self, x):
        return x * getattr(x, "factor", 1.0)


class Noise(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.1 * torch.randn_like(gradient)


class Noised(nn.Module):
    def forward(self, x):
        return Noise.apply(x)


class NoisyLoss(nn.Module):
    def forward(self, outputs, targets):
        return F.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), targets)


def noisy_layer():
    made = layer()
    for parameter in made.parameters():
        parameter.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))
    return made


def dropped_layer():
    return nn.Sequential(noisy_layer(), nn.Dropout(0.3), nn.Tanh())


class Shared(nn.Module):
    """One of several blocks that use the same weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight))


def tied_with(register):
    """Return a model whose first, third and last block share a weight with a hook."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(4, 4))
    register(weight)
    return nn.Sequential(Shared(weight), layer(), Shared(weight), layer(), Shared(weight))


def doubled(gradient):
    return 2 * gradient + 0.1 * torch.randn_like(gradient)


def doubled_in_place(parameter):
    parameter.grad.mul_(2)


class Hooked(nn.Module):
    """Two layers, with a hook on what is between them."""

    def __init__(self, hook):
        super().__init__()
        self.first = layer()
        self.last = layer()
        self.hook = hook

    def forward(self, x):
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(self.hook)
        return self.last(h)


class Again(nn.Module):
    """Calls another block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


class Scaled(nn.Module):
    """Draws from Python's generator in forward, in backward, or not at all."""

    def __init__(self, forward, backward):
        super().__init__()
        self.linear = layer()
        self.forward_ = forward
        self.backward_ = backward

    def forward(self, x):
        y = self.linear(x) * (random.random() if self.forward_ else 1)
        if self.backward_ and y.requires_grad:
            y.register_hook(lambda gradient: gradient * random.random())
        return y


class ScaledLoss(nn.Module):
    def forward(self, outputs, targets):
        return F.cross_entropy(outputs * random.random(), targets)


class Aliased(nn.Module):
    """Returns its result and another tensor with the same memory."""

    def __init__(self, alias):
        super().__init__()
        self.linear = layer()
        self.alias = alias

    def forward(self, x):
        h = self.linear(x) * 1
        return h, self.alias(h)


class Both(nn.Module):
    """Maps the first tensor of a tuple, and hands the second one on."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, given):
        return self.function(given[0]), given[1]


class Sum(nn.Module):
    def forward(self, given):
        return given[0] + given[1].reshape(len(given[0]), -1).sum(dim=1, keepdim=True)


class Halves(nn.Module):
    """Returns two views that lie beside each other."""

    def forward(self, x):
        h = x * 1
        return h[:, :2], h[:, 2:]


class Joined(nn.Module):
    def forward(self, given):
        return torch.cat(given, dim=1)


class Add(nn.Module):
    def forward(self, given):
        return given[0] + given[1]


class Remembering(nn.Module):
    """Hands on a buffer beside its input."""

    lockstep_buffer_rules: ClassVar = {"seen": "mean"}

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x):
        return self.seen, x


def passed(x):
    return x


def passed_on():
    return nn.Identity()


def raised(x):
    return x.add_(1)


def flat(h):
    return h.view(-1)


WRITTEN = (
    "shares its memory with another one; a stage has copies of both, of which only one would change"
)


def test_an_evaluation_refuses_what_is_written_behind_a_boundary(ranks):
    def rank():
        model = chain(partial(Aliased, flat), partial(Both, torch.relu_), Sum, layer)
        made = trainer(model, 2, [1, 3])
        with pytest.raises(LockstepError) as raised:
            made.evaluate(TensorDataset(*BATCH), 8)
        return str(raised.value)

    assert all(WRITTEN in said for said in ranks(rank, 2))


def test_inputs_that_are_the_targets_too_are_not_written(ranks):
    """The last stage has targets of its own, which the first one does not write."""

    def rank(stages):
        layout = {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])} if stages else {}
        optimizer = partial(torch.optim.SGD, lr=0.1)
        made = ls.Trainer(chain(partial(nn.ReLU, True), layer), nn.MSELoss(), optimizer, **layout)
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

        def twice(samples):
            inputs = torch.stack(samples)
            return inputs, inputs

        try:
            return [made.step(batch) for batch in made.batches(rows, 8, collate_fn=twice)]
        except LockstepError as error:
            return str(error)

    (alone,) = ranks(rank, 1, False)
    assert isinstance(alone[0], float)
    for said in ranks(rank, 2, True):
        assert "shares its memory with a buffer, or the targets" in said


class Recurrent(nn.Module):
    """Has a layer that also keeps its weights in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0].squeeze(1)


class Reminded(nn.Module):
    """Refers to a block of another stage, and does not call it."""

    def __init__(self, known):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.known = [known]

    def forward(self, x):
        return self.layer(x)


def seeded_reminded():
    torch.manual_seed(1)
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Tanh(), Reminded(first), nn.Linear(4, 4))


class Reusing(nn.Module):
    """Returns a mask that it writes anew for each micro-batch, in the same memory."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        mask = (x.detach() > 0).float().mean(1, keepdim=True).expand(-1, 4000)
        if self.mask is None or self.mask.shape != mask.shape:
            self.mask = torch.empty(mask.shape)
        self.mask.copy_(mask)
        return x, self.mask


class Masked(nn.Module):
    def forward(self, given):
        return given[0] * given[1][:, -1:]


class Box:
    """Holds a mask that one block leaves for another one."""


class Put(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.linear = layer()
        self.box = box

    def forward(self, x):
        self.box.mask = (x[:, :1] > 0).float()
        return self.linear(x)


class Use(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.linear = layer()
        self.box = box

    def forward(self, x):
        return self.linear(x) * self.box.mask


def boxed(box):
    """Return a model whose first block leaves a mask for the third one."""
    torch.manual_seed(1)
    return nn.Sequential(Put(box), nn.Tanh(), Use(box), layer())


class Collecting(nn.Module):
    """Adds a term of the loss to a list, as a mixture of experts does."""

    def __init__(self, terms):
        super().__init__()
        self.linear = layer()
        self.terms = terms

    def forward(self, x):
        y = self.linear(x)
        self.terms.append(y.pow(2).mean())
        return y


def collected():
    """Return a model and a loss that reads what its blocks have collected."""
    terms = []

    def loss(outputs, targets):
        value = F.cross_entropy(outputs, targets) + sum(terms)
        terms.clear()
        return value

    def make():
        torch.manual_seed(1)
        terms.clear()  # of a step that was refused
        return nn.Sequential(Collecting(terms), layer(), layer(), Collecting(terms))

    return make, loss


class Filling(nn.Module):
    """Fills a table, which all blocks share, in its first call."""

    def __init__(self, tables):
        super().__init__()
        self.linear = layer()
        self.tables = tables

    def forward(self, x):
        if "scale" not in self.tables:
            self.tables["scale"] = torch.full((4,), 0.5)
        return self.linear(x) * self.tables["scale"]


def filling():
    torch.manual_seed(1)
    tables = {}
    return nn.Sequential(*(Filling(tables) for _ in range(4)))


class Keeping(nn.Module):
    """Keeps its input in an attribute, where a hook in backward reads it."""

    def __init__(self):
        super().__init__()
        self.linear = layer()
        self.kept = {}

    def forward(self, x):
        self.kept["input"] = x.detach()
        self.scale = float(x.detach().mean())
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(self.changed)
        return y

    def changed(self, gradient):
        return gradient * (1 + self.scale) + 0.1 * self.kept["input"]


class Table(nn.Module):
    """A module of the user's own whose gradient is sparse, which is refused."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 4))

    def forward(self, words):
        return F.embedding(words, self.weight, sparse=True)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_a_gradient_that_one_stage_refuses_ends_the_step_on_every_rank(ranks, backend):
    """That rank saved the last good weights together with the others, which had gone on."""

    def said():
        torch.manual_seed(1)
        model = nn.Sequential(Table(), nn.Flatten(), nn.Linear(8, 3))
        trainer = ls.Trainer(
            model,
            F.cross_entropy,
            partial(torch.optim.SGD, lr=0.1),
            pipeline=ls.PipelineConfig(stages=2, balance=[1, 2]),
        )
        try:
            trainer.step((torch.randint(0, 9, (16, 2)), torch.randint(0, 3, (16,))))
        except LockstepError as error:
            dist.barrier()  # the group is as usable as before
            return str(error)

    first, second = ranks(said, 2, backend=backend, timeout=20.0)
    assert "parameter 0.weight has a sparse gradient" in first
    assert "rank 1 stopped because rank 0, stage 0, step 0" in second


def drawing(forward, backward=False):
    return partial(Scaled, forward, backward)


def both(*functions):
    return [partial(Both, function) for function in functions]


def aliased(alias, *functions):
    return partial(chain, partial(Aliased, alias), *both(*functions), Sum, layer)


def ignored_batches():
    """Return batches whose micro-batch 1 has only targets that the loss ignores."""
    batches = random_batches(16, 4)
    for _, targets in batches:
        targets[targets == 3] = 0
        targets[2:4] = 3
    return batches


def called_twice():
    torch.manual_seed(1)
    block = nn.Sequential(layer(), nn.Dropout(0.3))
    return nn.Sequential(block, Again(block), layer(), layer())


def first_value():
    box = Box()
    box.mask = torch.ones(1)
    return boxed(box)


COLLECTED, COLLECTED_LOSS = collected()
PLAIN = drawing(False)
CASES = {
    # Its leaf took the gradient of the next one, so that the tree added otherwise.
    "a micro-batch of weight 0": Case(
        partial(chain, layer, nn.Tanh, layer, layer),
        nn.CrossEntropyLoss(ignore_index=3),
        ignored_batches(),
    ),
    # They ended the run with an error of torch's.
    "conjugate tensors": Case(partial(chain, layer, Conjugate, Product, layer)),
    # Random numbers of backward came from the state in which the schedule left the generator.
    "random hooks": Case(partial(chain, noisy_layer, nn.Tanh, noisy_layer, noisy_layer)),
    "random functions": Case(partial(chain, layer, Noised, layer, Noised), NoisyLoss()),
    "random recomputation": Case(
        partial(chain, dropped_layer, dropped_layer, Noised, dropped_layer),
        options={"activation_checkpointing": True},
    ),
    "some random hooks": Case(partial(chain, layer, noisy_layer, nn.Dropout, layer)),
    # Every stage called hooks of a shared parameter with its part, and the owner with the sum.
    "hooks of a shared weight": Case(
        partial(tied_with, lambda weight: weight.register_hook(doubled)), blocks=5
    ),
    "accumulation hooks of a shared weight": Case(
        partial(
            tied_with, lambda weight: weight.register_post_accumulate_grad_hook(doubled_in_place)
        ),
        blocks=5,
    ),
    # Under zero-bubble its gradient was doubled twice for the weights of the layer before.
    "a hook of an activation": Case(
        partial(chain, layer, layer, partial(Hooked, torch.sin), layer)
    ),
    "a random hook of an activation": Case(
        partial(chain, layer, layer, partial(Hooked, doubled), layer),
        refused="a hook of a tensor in the blocks 2, 3 draws random numbers in backward",
        refused_by=("zero-bubble",),
    ),
    # The last stage did not know how often other blocks had called the first one.
    "a random loss": Case(
        called_twice,
        NoisyLoss(),
        refused="block 0 of stage 0 is also called inside a block of stage 1",
        refused_by=("interleaved",),
    ),
    # The loss of a last stage, and backward, drew other numbers of Python than in one process.
    "Python in the loss": Case(partial(chain, PLAIN, PLAIN, PLAIN, PLAIN), ScaledLoss()),
    "Python in block 0": Case(
        partial(chain, drawing(True), PLAIN, PLAIN, PLAIN),
        refused="a block draws from Python's or numpy's random numbers",
    ),
    "Python in backward": Case(
        partial(chain, PLAIN, PLAIN, drawing(False, True), PLAIN),
        refused="backward (a hook or an autograd function) draws from Python's",
    ),
    # In one process a view sees what a block writes behind it; in another stage it did not.
    "a view": Case(aliased(flat, torch.tanh, torch.tanh), blocks=5),
    "other elements": Case(aliased(lambda h: h[:, 2:].detach(), passed, torch.tanh), blocks=5),
    "halves": Case(
        partial(chain, Halves, passed_on, partial(Both, raised), Joined, layer), blocks=5
    ),
    # The first stage of two has the block that writes; of four it has not.
    "a view, written within the stage": Case(
        aliased(flat, raised, torch.tanh),
        blocks=5,
        refused=WRITTEN,
        refused_by=("interleaved",),
    ),
    "a view, written": Case(aliased(flat, passed, raised), blocks=5, refused=WRITTEN),
    "a detached tensor, written": Case(
        aliased(torch.detach, passed, torch.relu_), blocks=5, refused=WRITTEN
    ),
    "a buffer, written": Case(
        partial(chain, layer, Remembering, partial(Both, raised), Add),
        refused="shares its memory with a buffer, or the targets",
    ),
    # It was overwritten while it was being sent, or before the backward that needs it.
    "memory that is written again": Case(
        partial(chain, layer, Reusing, Masked, layer),
        refused="a block wrote into a tensor that it had returned for this micro-batch",
    ),
    # An attribute of a tensor did not cross, and the next stage took its default.
    "an attribute within a stage": Case(
        partial(chain, layer, layer, Marking, Marked, layer),
        blocks=5,
        refused="returned a tensor with the attribute factor",
        refused_by=("interleaved",),
    ),
    "an attribute": Case(
        partial(chain, layer, Marking, Marked, layer, layer),
        blocks=5,
        refused="returned a tensor with the attribute factor",
    ),
    # Ranks of other stages were told that their lists of weights hold other things.
    "lists of weights": Case(partial(chain, Recurrent, layer, Recurrent, layer)),
    # The hook with which a scope is called counted as a change of the block.
    "a block that another one refers to": Case(seeded_reminded, batches=random_batches(steps=5)),
    # What a block left for another stage was missing, or that of another micro-batch.
    "a value in a box": Case(
        first_value,
        refused="block 0 (Put) changes 0.box.mask, which block 2 (Use) in another stage",
    ),
    "a missing value in a box": Case(lambda: boxed(Box()), refused="block 2 (Use)"),
    "terms of the loss": Case(
        COLLECTED, COLLECTED_LOSS, refused="block 0 (Collecting) changes 0.terms["
    ),
    "a table that is filled once": Case(filling),
    # Backward read what the forward of a later micro-batch had left.
    "values for backward": Case(
        partial(chain, layer, Keeping, Keeping, layer), batches=random_batches(16)
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "schedules",
    [SCHEDULES[2:], pytest.param(SCHEDULES[:2], marks=pytest.mark.stress)],  # those refuse less
    ids=str,
)
def test_every_schedule_has_the_bits_of_one_process_or_refuses_by_name(ranks, schedules):
    (alone,) = ranks(in_one_process, 1, CASES, timeout=120.0)
    staged, _ = ranks(in_stages, 2, CASES, schedules, timeout=240.0)
    for (name, schedule), outcome in staged.items():
        case = CASES[name]
        if case.refused and schedule in case.refused_by:
            assert case.refused in outcome, (name, schedule)
        else:
            assert outcome == alone[name], (name, schedule)
