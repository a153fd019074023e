"""`ls.exact`: ordinary loops on torch's DistributedDataParallel have the bits of the specification.

The models meet every rule: dropout, checkpointing, batch norm, buffers of each rule, frozen, tied
and sometimes unused parameters, gradients of -0.0. All trainings of a width run in the same ranks,
each on a group of the backend "lockstep" and on one of Gloo.
"""

import copy
import math
import random
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
import models
import pytest_lockstep
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.kernel import spec
from lockstep.kernel.errors import LossError, RankError, StateError, UsageError
from lockstep.record.reader import read_run

SAMPLES = 43  # batches of 19, 19 and 5 samples
BATCH = 19
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
OPTIONS = {
    "pictures": {},
    "words": {"bucket_cap_mb": 0.001},
    "branches": {"find_unused_parameters": True},
    "checkpointed": {"static_graph": True},
    "blocks": {"gradient_as_bucket_view": True},
}


def prepared(case):
    """Return the model, the whole data and the loss of a case."""
    model, batches, loss = models.CASES[case]
    ((inputs, targets),) = batches([SAMPLES])
    torch.manual_seed(5)
    return model(), TensorDataset(inputs, targets), loss()


def specified():
    """Return the digest of each case after the specification has trained it."""
    ls.init(threads=1)
    torch.use_deterministic_algorithms(True)
    found = {}
    for case in models.CASES:
        model, data, loss = prepared(case)
        starts = range(0, SAMPLES, BATCH)
        batches = [tuple(t[at : at + BATCH] for t in data.tensors) for at in starts]
        spec.train(model, loss, SGD, batches, seed=11)
        found[case] = ls.digest(model.state_dict())
    return found


STRESS = pytest.mark.stress


def groups(sizes):
    """Return the groups of all ranks to train on, or None for a model that is not wrapped.

    With one of these numbers of ranks, there is also a group of Gloo.
    """
    yield "default", dist.group.WORLD
    if dist.get_world_size() == 1:
        yield "not wrapped", None
    elif dist.get_world_size() in sizes and dist.get_backend() != "gloo":
        yield "gloo", dist.new_group(backend="gloo")


def train(exact, called, loader, optimizer, loss):
    """Train in the loop that the documentation shows."""
    for inputs, targets in exact.microbatches(loader):
        exact.weigh(loss(called(inputs), targets)).backward()
        if exact.is_complete:
            optimizer.step()
            optimizer.zero_grad()


def trained_cases():
    """Return the digest of each case after a loop with `ls.exact`, by the name of the group."""
    found = {}
    for name, group in groups((2, 3)):
        for case in models.CASES:
            model, data, loss = prepared(case)
            options = OPTIONS.get(case, {})
            called = model
            if group is not None:
                called = DistributedDataParallel(model, process_group=group, **options)
            exact = ls.exact(called, seed=11)
            sampler = exact.sampler(data, BATCH, shuffle=False)
            loader = DataLoader(data, batch_sampler=sampler)
            train(exact, called, loader, SGD(model.parameters()), loss)
            found[name, case] = ls.digest(model.state_dict())
    return found


@pytest.fixture(scope="module")
def expected():
    (found,) = pytest_lockstep.run(specified, ranks=1, init=False)
    return found


@pytest.mark.parametrize(
    ("n", "backend"),
    [(1, None), (2, None), (3, None), (4, None), pytest.param(4, "gloo", marks=STRESS)],
)
def test_a_loop_has_the_bits_of_the_specification(ranks, expected, n, backend):
    for found in ranks(trained_cases, n, backend=backend):
        for (group, case), digest in found.items():
            assert digest == expected[case], (group, case)


# --- other loops: every width has the bits of one rank --------------------------------------------


def network(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 3)
    )


def rows(samples=56):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


class Augmented(torch.utils.data.Dataset):
    """Samples that draw from every global generator."""

    def __init__(self):
        self.rows = rows()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        inputs, target = self.rows[index]
        noise = torch.randn(6) + random.random() + float(numpy.random.rand())
        return inputs + 0.1 * noise, target


def mixed(samples):
    """Collate, and mix the samples of a micro-batch at random."""
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs + 0.1 * inputs[torch.randperm(len(inputs))] * random.random(), targets


def wrapped(group, **options):
    model = network(**options)
    called = model if group is None else DistributedDataParallel(model, process_group=group)
    return model, called, ls.exact(called, microbatches=7, seed=3)


def scheduled(group):
    """Clip, follow a schedule, draw between steps, and keep an average of a copied model."""
    model, called, exact = wrapped(group)
    data = rows()
    loader = DataLoader(data, batch_sampler=exact.sampler(data, 20, seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    average = copy.deepcopy(model)
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        for inputs, targets in exact.microbatches(loader):
            exact.weigh(F.cross_entropy(called(inputs), targets)).backward()
            if not exact.is_complete:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            with torch.no_grad():
                called.eval()(torch.randn(4, 6) * random.random() * numpy.random.rand())
                model[0].weight += 0.01 * torch.randn(12, 6)
                called.train()
            average.load_state_dict(model.state_dict())
    assert exact.steps == 6
    return model, average


def augmented(group, workers=0, begins=True):
    """Load samples and collate them with random numbers, here or in a worker."""
    model, called, exact = wrapped(group)
    data = Augmented()
    sampler = exact.sampler(data, 20, seed=4, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=mixed)
    optimizer = SGD(model.parameters())
    items = exact.microbatches(loader) if begins else loader
    train_on = partial(train, called=called, optimizer=optimizer, loss=F.cross_entropy)
    if begins:
        train_on(exact, loader=loader)
        return (model,)
    for inputs, targets in items:
        inputs = inputs + 0.1 * torch.randn_like(inputs)
        exact.weigh(F.cross_entropy(called(inputs), targets)).backward()
        if exact.is_complete:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return (model,)


def halved(group, dtype):
    """Train in autocast; a loss scale that is too large at first skips steps."""
    model, called, exact = wrapped(group)
    data = rows()
    loader = DataLoader(data, batch_sampler=exact.sampler(data, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, enabled=dtype == torch.float16)
    for epoch in range(5):
        loader.batch_sampler.set_epoch(epoch)
        for inputs, targets in exact.microbatches(loader):
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(called(inputs), targets)
            scaler.scale(exact.weigh(loss)).backward()
            if exact.is_complete:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert dtype != torch.float16 or 1 < scaler.get_scale() < 2.0**30
    return (model,)


def counted(group):
    """Weigh losses by targets, of which a micro-batch may have none; freeze a layer later on."""
    model, called, exact = wrapped(group)
    data = rows()
    data.tensors[1][:14] = -100
    loader = DataLoader(data, batch_sampler=exact.sampler(data, 56, shuffle=False))
    optimizer = SGD(model.parameters())
    for _ in range(3):
        for inputs, targets in exact.microbatches(loader):
            loss = F.cross_entropy(called(inputs), targets)
            exact.weigh(loss, weight=int((targets >= 0).sum())).backward()
            if exact.is_complete:
                optimizer.step()
                optimizer.zero_grad()
                model[0].requires_grad_(False)
    assert model[-1].weight.isfinite().all()
    return (model,)


def adversarial(group):
    """Two models and two optimizers, a penalty by `torch.autograd.grad`, noise in the loop."""
    critic, call_critic, judging = wrapped(group)
    torch.manual_seed(2)
    maker = nn.Sequential(nn.Linear(4, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 6))
    call_maker = maker if group is None else DistributedDataParallel(maker, process_group=group)
    making = ls.exact(call_maker, microbatches=7, seed=4)
    data = rows()
    sampler = judging.sampler(data, 20)
    making.use(sampler)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (critic, maker)]
    for real, _ in judging.microbatches(DataLoader(data, batch_sampler=sampler)):
        making.begin()
        fake = call_maker(torch.randn(len(real), 4))
        middle = (real + fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(call_critic(middle).sum(), middle, create_graph=True)
        loss = call_critic(fake.detach()).mean() - call_critic(real).mean() + slope.square().mean()
        judging.weigh(loss).backward()
        critic.requires_grad_(False)
        fake = call_maker(torch.randn(len(real), 4))
        making.weigh(-call_critic(fake).mean()).backward()
        critic.requires_grad_(True)
        if making.is_complete:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return critic, maker


def plain(group):
    """A loop without a sampler, that divides the samples and the loss itself."""
    model, called, exact = wrapped(group)
    optimizer = SGD(model.parameters())
    inputs, targets = (tensor[:42].chunk(7) for tensor in rows().tensors)
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    sizes = [7 // ranks + (r < 7 % ranks) for r in range(ranks)]
    own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for _ in range(3):
        for m in own:
            exact.begin()
            (F.cross_entropy(called(inputs[m]), targets[m]) / 7).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (model,)


LOOPS = {
    "scheduled": scheduled,
    "augmented": augmented,
    "augmented in a worker": partial(augmented, workers=1),
    "begun by the forward": partial(augmented, begins=False),
    "bfloat16": partial(halved, dtype=torch.bfloat16),
    "float16": partial(halved, dtype=torch.float16),
    "counted": counted,
    "adversarial": adversarial,
    "plain": plain,
}


def trained_loops():
    """Return the digests of the models of each loop, and what is drawn after it."""
    found = {}
    for name, group in groups((3,)):
        for loop, train_loop in LOOPS.items():
            torch.manual_seed(0)
            random.seed(0)
            numpy.random.seed(0)
            trained = train_loop(group)
            drawn = torch.rand(()).item(), random.random(), float(numpy.random.rand())
            found[name, loop] = [ls.digest(model) for model in trained], drawn
    return found


@pytest.fixture(scope="module")
def alone(ranks):
    """The results on one rank: of models that are not wrapped, and of others."""
    (found,) = ranks(trained_loops, 1)
    return found


@pytest.mark.parametrize(
    ("n", "backend"),
    [
        (1, None),
        (2, None),
        (3, None),
        (4, None),
        pytest.param(2, "gloo", marks=STRESS),
        pytest.param(4, "gloo", marks=STRESS),
    ],
)
def test_every_width_has_the_bits_of_one_process(ranks, alone, n, backend):
    for found in [alone] if n == 1 else ranks(trained_loops, n, backend=backend):
        for (group, loop), value in found.items():
            assert value == alone["not wrapped", loop], (group, loop)


def compiled(group, outside):
    """Compile the wrapper, or the model in it; eager code runs in the graphs."""
    model = network()
    compile_model = partial(torch.compile, backend="eager")
    called = model if outside else compile_model(model)
    if group is not None:
        called = DistributedDataParallel(called, process_group=group)
    called = compile_model(called) if outside else called
    exact = ls.exact(called, microbatches=7, seed=3)
    data = rows()
    loader = DataLoader(data, batch_sampler=exact.sampler(data, 28))
    train(exact, called, loader, SGD(model.parameters()), F.cross_entropy)
    return ls.digest(model)


@pytest.mark.usefixtures("world_of_one")
def test_a_compiled_model_has_the_same_bits_on_two_ranks(ranks):
    def train_both():
        return [compiled(dist.group.WORLD, outside) for outside in (False, True)]

    assert ranks(train_both, 2) == [[compiled(None, outside=False)] * 2] * 2


def misaligned(group):
    """Slice the inputs of a micro-batch out of memory that begins elsewhere on each rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(37, 61), nn.ReLU(), nn.Linear(61, 3))
    called = DistributedDataParallel(model, process_group=group)
    exact = ls.exact(called, microbatches=7)
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(7, 3, 37, generator=generator)
    shift = dist.get_rank() + dist.get_world_size()
    memory = torch.empty(whole.numel() + shift)[shift:].view(whole.shape).copy_(whole)
    share = ReplicaShare(7, on_one_host(dist.get_world_size()), dist.get_rank())
    for part in exact.microbatches(index for index, _ in share.pieces(7)):
        exact.weigh(called(memory[part]).square().mean()).backward()
    return ls.digest({str(n): p.grad for n, p in enumerate(model.parameters())})


def test_bits_do_not_depend_on_the_alignment_of_a_view(ranks):
    def digest():
        return misaligned(dist.group.WORLD)

    assert {*ranks(digest, 1), *ranks(digest, 2), *ranks(digest, 3)} == {*ranks(digest, 1)}


# --- checkpoints ----------------------------------------------------------------------------------


def resumable(path, save_at):
    """Train two epochs of three steps; save at a step, or continue at the one that was saved."""
    model, called, exact = wrapped(dist.group.WORLD)
    data = Augmented()
    loader = DataLoader(data, batch_sampler=exact.sampler(data, 20, seed=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if save_at is None:
        state = torch.load(path)
        for part, loaded in zip((model, optimizer, exact), state, strict=True):
            part.load_state_dict(loaded)
    for epoch in range(loader.batch_sampler.epoch, 2):
        loader.batch_sampler.set_epoch(epoch)
        for inputs, targets in exact.microbatches(loader):
            exact.weigh(F.cross_entropy(called(inputs), targets)).backward()
            if exact.is_complete:
                optimizer.step()
                optimizer.zero_grad()
                if exact.steps == save_at and dist.get_rank() == 0:
                    torch.save([part.state_dict() for part in (model, optimizer, exact)], path)
    return exact.steps, ls.digest(model)


@pytest.mark.parametrize("step", [3, 4])
def test_a_training_resumes_on_another_number_of_ranks(ranks, tmp_path, step):
    """After an epoch, and in the middle of one."""
    ((_, saved), *_) = ranks(resumable, 2, tmp_path / "state.pt", step)
    assert ranks(resumable, 3, tmp_path / "state.pt", None) == [(6, saved)] * 3


@pytest.mark.usefixtures("world_of_one")
def test_a_state_of_other_settings_is_refused():
    state = ls.exact(network(), microbatches=4).state_dict()
    with pytest.raises(UsageError, match=r"saved with microbatches=4, and ls.exact has 8"):
        ls.exact(network()).load_state_dict(state)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("loads_first", [True, False])
def test_a_state_is_loaded_before_or_after_the_loop_is_made(loads_first):
    """The calls of the model are watched otherwise afterwards, which is no setting of it."""
    first = network()
    model = network()
    exact = ls.exact(first, torch.optim.SGD(first.parameters(), lr=0.1), 4)
    exact.sampler(rows(16), 8)
    state = exact.state_dict()
    other = ls.exact(model, torch.optim.SGD(model.parameters(), lr=0.1), 4)
    if not loads_first:
        other.sampler(rows(16), 8)
    other.load_state_dict(state)
    assert other.digest() == exact.digest()


# --- mistakes -------------------------------------------------------------------------------------


class Mistakes:
    """A loop that goes on until a mistake, in one process."""

    def __init__(self):
        self.model = network()
        self.exact = ls.exact(self.model, microbatches=4)
        self.optimizer = SGD(self.model.parameters())

    def forward(self, share=0.25):
        return self.exact.weigh(self.model(torch.randn(5, 6)).square().mean(), share=share)

    def microbatch(self):
        self.exact.begin()
        self.forward().backward()

    def step(self):
        for _ in range(4):
            self.microbatch()


def no_backward(loop):
    loop.exact.begin()
    loop.forward()
    loop.exact.begin()


def continues_at_the_end(loop):
    data = rows(16)
    sampler = loop.exact.sampler(data, 8)
    for number, (inputs, _) in enumerate(
        loop.exact.microbatches(DataLoader(data, batch_sampler=sampler))
    ):
        if number == 7:
            continue
        loop.exact.weigh(loop.model(inputs).mean()).backward()
        if loop.exact.is_complete:
            loop.optimizer.zero_grad()


def second_backward(loop):
    loop.exact.begin()
    loss = loop.forward()
    loss.backward(retain_graph=True)
    loss.backward()


def early_optimizer(loop):
    loop.microbatch()
    loop.optimizer.step()


def early_write(loop):
    loop.microbatch()
    with torch.no_grad():
        loop.model[0].weight.add_(1)
    for _ in range(3):
        loop.microbatch()


def no_zero_grad(loop):
    loop.step()
    loop.optimizer.step()
    loop.step()


def draws(loop, draw=torch.rand):
    """Draw between micro-batches that workers load; loading in this process seeds generators."""
    data = rows(16)
    sampler = loop.exact.sampler(data, 8, shuffle=False)
    for inputs, _ in DataLoader(data, batch_sampler=sampler, num_workers=1):
        if draw(1) < 2:
            loop.exact.weigh(loop.model(inputs).mean()).backward()


def draws_from_numpy(loop):
    draws(loop, numpy.random.rand)


def draws_from_python(loop):
    draws(loop, lambda _: random.random())


def divides(loop):
    loop.exact.begin()
    loss = loop.model(torch.randn(5, 6)).square().mean()
    loop.exact.weigh(loss, divisor=41).backward()


def weighs_early(loop):
    loop.exact.weigh(torch.ones(()))


def weighs_some(loop):
    loop.exact.begin()
    loop.exact.weigh(loop.model(torch.randn(5, 6)).mean(), weight=3).backward()
    for _ in range(3):
        loop.microbatch()


def returns_nothing(loop):
    loop.model.append(nn.Module())
    loop.model[-1].forward = lambda inputs: object()
    loop.exact.begin()
    loop.model(torch.randn(5, 6))


def left_batch(loop):
    data = rows(16)
    sampler = loop.exact.sampler(data, 8)
    iterations = []
    for _ in range(2):
        iterations.append(loop.exact.microbatches(DataLoader(data, batch_sampler=sampler)))
        inputs, _ = next(iterations[-1])
        sampler.set_epoch(1)
        loop.exact.weigh(loop.model(inputs).mean()).backward()


def leaves_batch(loop):
    data = rows(16)
    sampler = loop.exact.sampler(data, 8)
    for _ in range(2):
        for inputs, _ in loop.exact.microbatches(DataLoader(data, batch_sampler=sampler)):
            loop.exact.weigh(loop.model(inputs).mean()).backward()
            break
        sampler.set_epoch(1)


def leaves_nested_batch(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
            break


def steps_after_leaving(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
            break
        loop.optimizer.step()


def has_no_nested_backward(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            loop.model(inputs).mean().backward()


def has_two_final_backwards(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            loss = loop.model(inputs).mean()
            batch.backward(loss, retain_graph=True)
            batch.backward(loss)


def has_two_factors(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean(), share=0.5, weight=3.0)


def reads_early(loop):
    for batch in loop.exact.batches(rows(16), 8):
        assert batch.loss


def evaluates_inside(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
            loop.exact.evaluate(rows(16), 8, loss=F.cross_entropy)


def forgets_zero_grad(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
        loop.optimizer.step()


def has_one_sample(loop):
    for batch in loop.exact.batches(rows(9), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def diverges(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean() * float("nan"))


def exhausted(loop):
    loop.exact.sampler(rows(16), 8)
    loop.exact.begin()


def saves_early(loop):
    loop.microbatch()
    loop.exact.state_dict()


def has_closure(loop):
    loop.optimizer.step(loop.step)


def is_lbfgs(loop):
    optimizer = torch.optim.LBFGS(loop.model.parameters())
    loop.step()
    optimizer.step(lambda: torch.zeros(()))


def loader_of_its_own(loop):
    for inputs, _ in loop.exact.microbatches(DataLoader(rows(16), batch_size=2, shuffle=True)):
        loop.exact.weigh(loop.model(inputs).mean()).backward()


def plain_loop(loop):
    for inputs, _ in DataLoader(rows(16), batch_size=2, shuffle=True):
        loop.model(inputs).mean().backward()
        loop.optimizer.step()


def steps_scheduler_too_often(loop):
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    data = rows(16)
    loader = DataLoader(data, batch_sampler=loop.exact.sampler(data, 8))
    for inputs, _ in loop.exact.microbatches(loader):
        loop.exact.weigh(loop.model(inputs).mean()).backward()
        if loop.exact.is_complete:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        if loop.exact.steps:  # torch warns of earlier ones
            schedule.step()


def changes_in_nested_batch(loop, change):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
            change(loop.model[0])


def forgets_train(loop):
    changes_in_nested_batch(loop, nn.Module.eval)


def freezes_in_batch(loop):
    changes_in_nested_batch(loop, lambda module: module.requires_grad_(False))


def trains_another_parameter(loop):
    scale = nn.Parameter(torch.ones(()))
    optimizer = SGD([*loop.model.parameters(), scale])
    for _ in range(4):
        loop.exact.begin()
        (loop.model(torch.randn(5, 6)).mean() * scale).backward()
    optimizer.step()


MISTAKES = {
    no_backward: "micro-batch 0 had no backward",
    continues_at_the_end: "step 1, micro-batch 3 had no backward",
    second_backward: "a second backward began",
    early_optimizer: r"rank 0, step 0.*: optimizer.step\(\) was called before the last micro-batch",
    early_write: "parameter 0.weight was written during forward or backward",
    no_zero_grad: r"gradients are left from before the step: call optimizer.zero_grad\(\)",
    draws: "random numbers were drawn between two micro-batches",
    draws_from_numpy: "random numbers were drawn between two micro-batches",
    draws_from_python: "random numbers were drawn between two micro-batches",
    divides: "divided by 41 on this number of ranks, which cannot be undone exactly",
    weighs_early: "between the model's forward and backward",
    weighs_some: "1 of 4 micro-batches have a weight",
    returns_nothing: "no tensor with a gradient in the object",
    left_batch: "batch 0 of epoch 0 was left before its last micro-batch",
    leaves_batch: "the loop was left before the last micro-batch of the batch",
    leaves_nested_batch: "the loop was left before the last micro-batch of the batch",
    steps_after_leaving: "the loop was left before the last micro-batch of the batch",
    has_no_nested_backward: r"batch.backward\(loss\).* not called: write it instead of loss.backw",
    has_two_final_backwards: "a second backward of the micro-batch: add its losses and call",
    has_two_factors: r"got share= and weight=.*: pass one of them",
    reads_early: "batch.loss is known after the loop over the batch",
    evaluates_inside: r"exact.evaluate\(\) was called in the middle of a batch",
    forgets_zero_grad: r"call optimizer.zero_grad\(\) once per batch",
    has_one_sample: r"micro-batch \d holds one sample, and batch norm .* drop_last=True",
    diverges: "the loss is nan",
    exhausted: "the sampler of ls.exact has yielded no other one",
    saves_early: "between two steps",
    has_closure: r"call optimizer.step\(\) without a closure",
    is_lbfgs: r"call optimizer.step\(\) without a closure",
    loader_of_its_own: r"a DataLoader that ls.exact does not divide.*batch_sampler=exact.sampler\(",
    steps_scheduler_too_often: r"step 1: .*lr is 0.08\d+ in micro-batch 1, and was 0.09",
    forgets_train: r"0 \(Linear\).training is False in micro-batch 1, and was True in",
    freezes_in_batch: "0.weight.requires_grad is False in micro-batch 1, and was True in",
    trains_another_parameter: r"a parameter of shape \(\) that is not in the model takes part",
    plain_loop: "the gradients are those of this rank alone: iterate over exact.batches",
}


@pytest.mark.usefixtures("world_of_one")
def test_two_schedulers_of_an_optimizer_are_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = torch.optim.lr_scheduler
    both = [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    with pytest.raises(UsageError, match="ExponentialLR as a second scheduler of the same opt"):
        ls.exact(model, optimizer, microbatches=2, scheduler=both)


@pytest.mark.usefixtures("world_of_one")
def test_an_optimizer_of_another_model_is_refused():
    model = nn.Linear(2, 2)
    own = SGD(model.parameters())
    other = torch.optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(UsageError, match="got a AdamW without any parameter of the model"):
        ls.exact(model, [own, other])


class Counting(torch.optim.SGD):
    """Divides its rate by a number that no state has."""

    count = 0

    def step(self, closure=None):
        Counting.count += 1
        self.param_groups[0]["lr"] = 0.1 / Counting.count
        super().step(closure)


@pytest.mark.usefixtures("world_of_one")
def test_an_optimizer_with_a_hidden_counter_cannot_be_resumed(tmp_path):
    model = nn.Linear(2, 2)
    saving = ls.CheckpointConfig(folder=tmp_path)
    with pytest.raises(UsageError, match="Counting changes a value, which its state_dict"):
        ls.exact(model, Counting(model.parameters()), checkpoint=saving)
    ls.exact(model, Counting(model.parameters()))


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a learning-rate scheduler of the SGD that no checkpoint contains", "scheduler"),
        ("a GradScaler that ls.exact does not know", "stateful"),
    ],
)
def test_what_a_resumed_run_would_begin_again_is_refused(tmp_path, monkeypatch, name, known):
    monkeypatch.chdir(tmp_path)

    def train(is_known):
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler("cpu")
        both = {"scheduler": scheduler, "stateful": {"scaler": scaler}}
        saving = ls.CheckpointConfig(folder=tmp_path / f"run-{is_known}")
        if not is_known:
            del both[known]
        exact = ls.exact(model, optimizer, 2, checkpoint=saving, loggers=[], **both)
        try:
            for batch in exact.batches(rows(8), 4):
                for inputs, _ in batch:
                    batch.backward(model(inputs).mean(), scaler=scaler)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
        finally:
            exact.finish("done" if is_known else "failed")

    train(is_known=True)
    with pytest.raises(UsageError, match=f"{name}.* would begin again"):
        train(is_known=False)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_one_sentence(mistake):
    loop = Mistakes()
    with pytest.raises((UsageError, StateError, LossError), match=MISTAKES[mistake]) as caught:
        mistake(loop)
    loop.exact.finish("failed")
    assert "\n" not in str(caught.value)


def fail_in_loop_over_microbatches(loop):
    data = rows(16)
    loader = DataLoader(data, batch_sampler=loop.exact.sampler(data, 8))
    for inputs, _ in loop.exact.microbatches(loader):
        loop.exact.weigh(loop.model(inputs).mean()).backward()
        raise KeyError


def fail_after_begin(loop):
    loop.exact.begin()
    try:
        raise KeyError
    except KeyError:
        loop.exact.leave()
        raise


def fail_in_nested_loop(loop):
    for batch in loop.exact.batches(rows(16), 8):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
            raise KeyError


FAILING = [fail_in_loop_over_microbatches, fail_after_begin, fail_in_nested_loop]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("fail", FAILING, ids=lambda fail: fail.__name__)
def test_an_exception_that_is_caught_leaves_no_open_step(fail):
    """Collective calls were refused from then on, as if they were made inside of the step."""
    loop = Mistakes()
    state = loop.exact.state_dict()
    before = ls.digest(loop.model)
    with pytest.raises(KeyError):
        fail(loop)
    dist.barrier()
    assert ls.digest(loop.model) == before
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    loop.exact.load_state_dict(state)
    for batch in loop.exact.batches(rows(16), 8, epoch=0):
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).mean())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.exact.steps == 2


@pytest.mark.usefixtures("world_of_one")
def test_a_trainer_takes_the_model_of_a_loop_that_has_ended():
    """The last step of a loop with `exact.begin()` counted as one that is being computed."""
    loop = Mistakes()
    loop.step()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    trainer = ls.Trainer(loop.model, nn.CrossEntropyLoss(), SGD, microbatches=4)
    assert trainer.step(rows(8).tensors) > 0


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.SyncBatchNorm(4), "SyncBatchNorm, whose statistics depend"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "without trainable parameters"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
    ],
)
def test_a_model_that_cannot_be_exact_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        ls.exact(make())


@pytest.mark.usefixtures("world_of_one")
def test_a_model_gets_one_handle():
    model = network()
    handle = ls.exact(model)
    with pytest.raises(UsageError, match="was called before with this model"):
        ls.exact(model)
    assert handle.steps == 0


@pytest.mark.usefixtures("world_of_one")
def test_a_copy_of_a_model_takes_no_part():
    loop = Mistakes()
    loop.microbatch()
    copied = copy.deepcopy(loop.model)
    copied(torch.randn(5, 6)).sum().backward()  # would be a micro-batch, after a draw
    assert copied[0].weight.grad is not None
    assert ls.exact(copied).steps == 0
    loop.exact.finish("failed")


def disagree(kind):
    """Train with one thing that differs between the ranks."""
    rank = dist.get_rank()
    model = network()
    if kind == "setting" and rank:
        model[3].p = 0.5
    if kind == "module" and rank:
        model[2] = nn.ReLU()
    called = DistributedDataParallel(model)
    if kind == "hook":
        called.register_comm_hook(None, lambda state, bucket: None)
    exact = ls.exact(called, microbatches=4 + 4 * (kind == "microbatches" and rank))
    data = rows(16)
    sampler = exact.sampler(data, 8 + 8 * (kind == "batch_size" and rank))
    sampler.set_epoch(rank if kind == "epoch" else 0)
    train(
        exact,
        called,
        DataLoader(data, batch_sampler=sampler),
        SGD(model.parameters()),
        F.cross_entropy,
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("microbatches", "microbatches"),
        ("setting", r"rank 1: model\.3 \(Dropout\)\.p is 0\.5, on rank 0 it is 0\.3; "),
        ("module", r"rank 1: model\.2 is torch.*\.ReLU, on rank 0 it is torch.*\.GELU; "),
        ("batch_size", "the training data is dataset of 16, batch_size=16"),
        ("epoch", "rank 1: the epoch is 1, on rank 0 it is 0"),
        ("hook", "a communication hook: leave it out"),
    ],
)
def test_ranks_that_differ_are_told_apart(ranks, kind, said):
    with pytest.raises(RankError, match=said):
        ranks(disagree, 2, kind)


@pytest.mark.usefixtures("world_of_one")
def test_a_forgotten_set_epoch_is_named_once(capsys):
    exact = ls.exact(nn.Linear(6, 3), microbatches=4)
    ordered = DataLoader(rows(16), batch_sampler=exact.sampler(rows(16), 8, shuffle=False))
    sampler = exact.sampler(rows(16), 8)
    loader = DataLoader(rows(16), batch_sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == len(list(ordered)) == 8
    assert "trained again" not in capsys.readouterr().err
    for _ in range(2):
        list(loader)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "trained again" in line]
    assert "test_exact.py:" in said
    assert "epoch 1 is trained again" in said
    assert said.endswith("call set_epoch(epoch) of exact.sampler(...) before each epoch")


# --- losses ---------------------------------------------------------------------------------------


def train_unweighed(folder):
    """Train a loop that divides its losses by itself; return the losses that are known."""
    model = network()
    exact = ls.exact(model, microbatches=4, loggers=str(folder), progress=False)
    optimizer = SGD(model.parameters())
    data = rows(16)
    loader = DataLoader(data, batch_sampler=exact.sampler(data, 8))
    for inputs, targets in exact.microbatches(loader):
        (F.cross_entropy(model(inputs), targets) / 4).backward()
        if exact.is_complete:
            optimizer.step()
            optimizer.zero_grad()
    exact.finish()
    return exact.last_result.loss, exact.last_result.losses


@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_that_was_not_weighed_is_not_known(ranks, tmp_path, n):
    for loss, losses in ranks(partial(train_unweighed, tmp_path / "run"), n):
        assert math.isnan(loss)
        assert losses == [None] * 4
    run = read_run(tmp_path / "run")
    assert numpy.isnan(run.steps.loss).tolist() == [True, True]
    assert run.steps.norm.min() > 0


def divide_nested(loop, divide):
    for batch in loop.exact.batches(rows(8), 8):
        for inputs, _ in batch:
            batch.backward(divide(loop.model(inputs).mean()))


def divide_weighed(loop, divide):
    data = rows(8)
    loader = DataLoader(data, batch_sampler=loop.exact.sampler(data, 8))
    for inputs, _ in loop.exact.microbatches(loader):
        loop.exact.weigh(divide(loop.model(inputs).mean())).backward()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("divide", [lambda loss: loss / 4, lambda loss: loss * 0.25])
@pytest.mark.parametrize("train", [divide_nested, divide_weighed], ids=["nested", "weighed"])
def test_a_division_by_the_number_of_microbatches_is_named(train, divide):
    with pytest.warns(UserWarning, match="divided by 4, the number of micro-batches of the batch"):
        train(Mistakes(), divide)


def weigh_nested(loop, lose, weights):
    inputs, targets = rows(8).tensors
    targets[1::3] = -100
    for batch in loop.exact.batches(TensorDataset(inputs, targets), 8, shuffle=False):
        for given, wanted in batch:
            weight = (wanted != -100).sum().item() if weights else None
            batch.backward(lose(loop.model(given), wanted), weight=weight)


def weigh_flat(loop, lose, weights):
    inputs, targets = rows(8).tensors
    targets[1::3] = -100
    data = TensorDataset(inputs, targets)
    sampler = loop.exact.sampler(data, 8, shuffle=False)
    loader = DataLoader(data, batch_sampler=sampler)
    for given, wanted in loop.exact.microbatches(loader):
        weight = (wanted != -100).sum().item() if weights else None
        loop.exact.weigh(lose(loop.model(given), wanted), weight=weight).backward()
    loop.exact.finish()


IGNORING = {
    "function": F.cross_entropy,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "with another term": lambda outputs, targets: (
        F.cross_entropy(outputs, targets) + 0.1 * outputs.square().mean()
    ),
    "weighted classes": lambda outputs, targets: F.cross_entropy(
        outputs, targets.clamp(min=0), weight=torch.tensor([1.0, 2.0, 1.0])
    ),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("lose", IGNORING.values(), ids=IGNORING)
@pytest.mark.parametrize("train", [weigh_nested, weigh_flat], ids=["nested", "flat"])
def test_a_mean_that_ignores_targets_is_named(train, lose):
    loop = Mistakes()
    said = "mean that ignores some targets or weights classes, .* such as weight="
    with pytest.warns(UserWarning, match=said):
        train(loop, lose, weights=False)


@pytest.mark.usefixtures("world_of_one")
def test_means_that_count_all_samples_are_not_named():
    weigh_nested(Mistakes(), F.cross_entropy, weights=True)
    weigh_nested(Mistakes(), partial(F.cross_entropy, reduction="sum"), weights=False)
    weigh_nested(
        Mistakes(),
        lambda outputs, targets: F.cross_entropy(outputs, targets.abs() % 3),
        weights=False,
    )


@pytest.mark.usefixtures("world_of_one")
def test_other_divisions_are_not_named():
    loop = Mistakes()
    for batch in loop.exact.batches(rows(16), 16):  # micro-batches of 4 samples
        for inputs, _ in batch:
            outputs = loop.model(inputs)
            of_sum = outputs.sum() / len(inputs)
            batch.backward(of_sum / outputs.detach().norm())
        loop.optimizer.zero_grad()
        for inputs, _ in batch:
            batch.backward(loop.model(inputs).sum() / len(inputs))
