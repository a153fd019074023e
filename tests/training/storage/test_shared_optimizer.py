"""Shared parameters: the bits of replicas, one copy of the state, and steps that are never half."""

import copy
import os
import signal
import subprocess
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn, optim
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.checkpoint.folder import read_checkpoint
from lockstep.comm import backend as native
from lockstep.kernel.errors import LayoutError, RankError, UsageError, WorkError

pytestmark = pytest.mark.skipif(not native.available(), reason="not built")

SIZES = [1, 3, 15, 17, 65_535, 65_537, 131_075, 0]


class Awkward(nn.Module):
    """Sizes around every cut; frozen, tied, sometimes absent, channels-last and bfloat16 ones."""

    lockstep_buffer_rules = {"seen": "mean"}

    def __init__(self, half=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.vectors = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES
        )
        torch.manual_seed(2)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(6))
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(65_540, generator=generator), requires_grad=False)
        self.halved = nn.Parameter(torch.randn(70_000, generator=generator).to(half))
        self.sometimes = nn.Parameter(torch.randn(66_000, generator=generator))
        self.never = nn.Parameter(torch.ones(5))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))  # alone in its bucket

    def forward(self, inputs):
        self.seen = 0.9 * self.seen + inputs.detach().mean(dim=0)
        rows = self.second(self.first(inputs - self.seen).tanh()) + self.nothing.sum().float()
        level = inputs.mean()
        for vector in [*self.vectors, self.halved.float(), self.frozen]:
            rows = rows + (vector * level).sin().sum() / 300
        if inputs[0, 0] > 0:
            rows = rows + (self.sometimes * level).cos().mean()
        pictures = inputs[:, :3, None, None].expand(-1, 3, 4, 4)
        return rows + self.conv(pictures).mean(dim=(1, 2, 3))[:, None]


def rows(samples=19, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 6, generator=generator), torch.randn(
        samples, 6, generator=generator
    )


OPTIMIZERS = {
    "SGD": (partial(optim.SGD, lr=0.01), None),
    "SGD momentum": (partial(optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.01), 0.1),
    "SGD foreach": (partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True), None),
    "SGD fused": (partial(optim.SGD, lr=0.01, momentum=0.9, fused=True), None),
    "AdamW": (partial(optim.AdamW, lr=0.01), 0.1),
    "AdamW foreach": (partial(optim.AdamW, lr=0.01, foreach=True), None),
    "AdamW fused": (partial(optim.AdamW, lr=0.01, fused=True), 0.1),
    "Adam": (partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1), None),
    "Adagrad": (partial(optim.Adagrad, lr=0.01, initial_accumulator_value=0.1), None),
    "Adagrad fused": (partial(optim.Adagrad, lr=0.01, fused=True), None),
    "Adadelta": (optim.Adadelta, None),
    "Adamax": (optim.Adamax, None),
    "ASGD": (partial(optim.ASGD, lr=0.01, t0=1), None),
    "NAdam": (optim.NAdam, None),
    "RAdam": (partial(optim.RAdam, lr=0.01), None),
    "RMSprop": (partial(optim.RMSprop, lr=0.001, momentum=0.9, centered=True), None),
    "Rprop": (optim.Rprop, None),
}


def trained(name, shared, steps=3):
    optimizer, clip = OPTIMIZERS[name]
    trainer = ls.Trainer(
        Awkward(torch.float64 if name == "SGD fused" else torch.bfloat16),
        nn.MSELoss(),
        optimizer,
        microbatches=4,
        max_grad_norm=clip,
        storage="shared" if shared else "replicated",
        audit=False,  # the other tests of this file have audited steps
    )
    losses = [trainer.step(rows((19, 16, 3)[step % 3], step)) for step in range(steps)]
    return trainer, losses


def state_digest(trainer):
    state = trainer.state_dict()["optimizer"]
    flat = {f"{n}/{key}": v for n, each in state["state"].items() for key, v in each.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return ls.digest(flat), str(groups), [group["params"] for group in state["param_groups"]]


def outcomes(shared):
    found = {}
    for name in OPTIMIZERS:
        trainer, losses = trained(name, shared)
        norm = trainer.history.last.norm
        digests = trainer.digest(), trainer.optimizer_digest(), state_digest(trainer)
        found[name] = losses, norm, *digests
    return found


@pytest.fixture(scope="module")
def plain(ranks):
    return ranks(outcomes, 1, False, timeout=110)[0]


STRESS = pytest.mark.stress


@pytest.mark.parametrize("n", [pytest.param(2, marks=STRESS), 3, pytest.param(4, marks=STRESS)])
def test_every_optimizer_gives_the_bits_of_one_rank(ranks, plain, n):
    for rank in ranks(outcomes, n, True, timeout=110):
        for name, found in rank.items():
            assert found == plain[name], name
    assert len({digest for _, _, digest, _, _ in plain.values()}) == len(OPTIMIZERS)
    assert plain["AdamW"][1] > 0.1  # it is clipped


# --- one copy, and what belongs to a trainer --------------------------------------------------

SGD = partial(optim.SGD, lr=0.05, momentum=0.9)


def small(width=300):
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Dropout(0.2),
        nn.Linear(width, 3),
    )


def labelled(samples=45):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


CONFIG = {"parameter_groups", "scheduler", "scheduler_interval"}


def trainer_of(shared, **options):
    config = {name: options.pop(name) for name in [*options] if name in CONFIG}
    factory = options.pop("optimizer", partial(optim.AdamW, lr=0.01))
    given = {"optimizer": ls.OptimizerConfig(factory, **config), "microbatches": 4} | options
    model = given.pop("model", None) or small()
    return ls.Trainer(
        model, nn.CrossEntropyLoss(), storage="shared" if shared else "replicated", **given
    )


def epochs(trainer, numbers):
    for epoch in numbers:
        for batch in trainer.batches(labelled(), 16, seed=3, epoch=epoch):
            trainer.step(batch)


FEATURES = {
    "parameter_groups": lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {"lr": 0.02},
    "scheduler": partial(optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    "scheduler_interval": "epoch",
    "ema_decay": 0.9,
    "max_grad_norm": 0.1,
}


def features(shared, folder):
    """Train two epochs, half of the ranks' state from `folder` if it is there; tell everything."""
    trainer = trainer_of(shared, **FEATURES, loggers=folder / "run" if folder else ())
    epochs(trainer, [0])
    middle = trainer.state_dict()
    if folder is not None and dist.get_rank() == 0:
        torch.save(middle, folder / "middle")
    epochs(trainer, [1])
    evaluation = trainer.evaluate(labelled(), 16, ema=True)
    if folder is not None:
        trainer.save_weights(folder / "weights.safetensors")
    trainer.finish()
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    average = ls.digest(trainer.ema_model.state_dict())
    told = trainer.digest(), trainer.optimizer_digest(), state_digest(trainer), average
    return *told, rates, evaluation.loss, trainer.history.last.loss


def resumed(shared, folder):
    trainer = trainer_of(shared, **FEATURES)
    trainer.load_state_dict(torch.load(folder / "middle", weights_only=False))
    epochs(trainer, [1])
    average = ls.digest(trainer.ema_model.state_dict())
    return trainer.digest(), trainer.optimizer_digest(), state_digest(trainer), average


def test_the_trainers_features_and_states_are_portable(ranks, tmp_path):
    (plain,) = ranks(features, 1, False, None)
    for n, shared in [(2, True), (2, False)]:
        folder = tmp_path / f"{n}{shared}"
        folder.mkdir()
        assert ranks(features, n, shared, folder) == [plain] * n
        assert f'"optimizer_digest":"{plain[1]}"' in (folder / "run/record.jsonl").read_text()
        assert ls.digest(load_file(folder / "weights.safetensors")) == plain[0]
    for n, shared, folder in [(1, False, "2True"), (3, True, "2True"), (2, True, "2False")]:
        assert ranks(resumed, n, shared, tmp_path / folder) == [plain[:4]] * n


def test_there_is_one_copy_and_what_thaws_joins_it(ranks):
    def train(shared):
        trainer = trainer_of(shared, optimizer=SGD)
        trainer.model[3].requires_grad_(False)
        seen = []
        for step in range(5):
            trainer.model[3].requires_grad_(step > 2)
            trainer.step(labelled().tensors)
            seen.append(trainer.digest())
        aligned = {each.data_ptr() % 64 for each in trainer.model.parameters()}
        frozen_start = ls.Trainer(
            nn.Linear(2, 2).requires_grad_(False),
            None,
            SGD,
            microbatches=4,
            storage="shared" if shared else "replicated",
        )
        return seen, trainer.optimizer_digest(), aligned == {0}, frozen_start.optimizer_digest()

    found = ranks(train, 2, True) + ranks(train, 3, True)
    seen, optimizer, aligned, nothing = found[0]
    assert all(each == found[0] for each in found)
    assert aligned
    assert len({*seen}) == 5
    plain = ranks(train, 2, False)[0]
    assert (seen, optimizer, nothing) == (plain[0], plain[1], plain[3])


class Signs(optim.Optimizer):
    """A third party's optimizer: element by element."""

    def __init__(self, params, lr=0.01, fails_at=-1):
        super().__init__(params, {"lr": lr, "fails_at": fails_at})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                state["count"] = state.get("count", torch.zeros(())) + 1
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(each)) + each.grad
                if state["count"] == group["fails_at"] and dist.get_rank() == 1:
                    raise ArithmeticError("mine")
                each -= group["lr"] * state["mean"].sign()


class DeclaredSigns(Signs):
    lockstep_elementwise = True


class Turning(DeclaredSigns):
    """Keeps a tensor in its first step, and a number from then on."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["rate"] = 0.5 if "rate" in state else torch.ones(())


def test_an_optimizer_of_ones_own_where_it_is_declared(ranks):
    def train(shared):
        trainer = trainer_of(shared, optimizer=DeclaredSigns)
        epochs(trainer, [0])
        return trainer.digest(), trainer.optimizer_digest(), state_digest(trainer)

    assert ranks(train, 2, True) == ranks(train, 1, False) * 2


def test_what_cannot_be_shared_is_refused_by_name(ranks):
    def refusals():
        told = []
        for options in (
            {"optimizer": optim.Adafactor},
            {"optimizer": Signs},
        ):
            with pytest.raises(UsageError) as raised:
                ls.Trainer(
                    small(), nn.CrossEntropyLoss(), microbatches=4, storage="shared", **options
                )
            told.append(str(raised.value))
        turning = trainer_of(True, optimizer=Turning)
        turning.step(labelled(16).tensors)
        with pytest.raises(WorkError, match=r"Turning keeps 'rate' as 0\.5, and kept a tensor"):
            turning.step(labelled(16).tensors)
        with pytest.raises(LayoutError, match='storage="shared" needs the whole model'):
            trainer_of(True, pipeline=ls.PipelineConfig(stages=2))
        return told

    for told in ranks(refusals, 2):
        assert "Adafactor does not treat each element" in told[0]
        assert "Signs is not known" in told[1]
    with pytest.raises(RankError, match='storage="shared" needs the backend "lockstep"'):
        ranks(trainer_of, 2, True, backend="gloo")


# --- a rank that is killed in a step ------------------------------------------------------------


def thawing():
    """A model with a layer that gets its first gradient in the second step."""
    model = small(700)
    model[3].requires_grad_(False)
    return model


ADAGRAD = OPTIMIZERS["Adagrad"][0]  # has state before the first step


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def take_step(trainer):
    trainer.step(labelled(16).tensors)
    trainer.model.requires_grad_(True)


class Dying(DeclaredSigns):
    """Once `rank` is set, that rank is killed after it has written its part."""

    rank = -1

    def step(self, closure=None):
        super().step(closure)
        if dist.get_rank() == self.rank:
            kill()


def killed_at(point, folder):
    """Let rank 1 die in or after the second step; note what the others have."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends us; first we note
    optimizer = Dying if point == "written" else ADAGRAD
    trainer = trainer_of(True, model=thawing(), optimizer=optimizer)
    saved = copy.deepcopy(trainer.state_dict())
    take_step(trainer)
    Dying.rank = 1
    if dist.get_rank() == 1 and point == "reduced":
        trainer.engine.setup.optimization.shared.local_gradients = kill
    if dist.get_rank() == 1 and point in ("thawed", "loading"):
        trainer.engine.setup.optimization.shared._write_state = lambda whole: kill()
    told = "no error"
    try:
        trainer.load_state_dict(saved) if point == "loading" else take_step(trainer)
    except Exception as error:
        told = str(error)
    has_state = trainer.engine.state.is_whole()
    state = f"{trainer.digest()} {trainer.optimizer_digest()}" if has_state else "torn torn"
    name = str(dist.get_rank())
    (folder / f"{name} in writing").write_text(f"{state} {told}")
    (folder / f"{name} in writing").rename(folder / name)
    dist.barrier()


@pytest.mark.parametrize(
    ("point", "is_whole"),
    [("reduced", True), ("thawed", True), ("written", False), ("loading", False)],
)
def test_the_state_is_of_one_step_or_torn_if_a_rank_is_killed(
    ranks, tmp_path, digests, point, is_whole
):
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        ranks(killed_at, 3, point, tmp_path)
    for name in "02":
        parameters, state, told = (tmp_path / name).read_text().split(" ", 2)
        assert "rank 1 died" in told
        assert (parameters, state) == (digests if is_whole else ("torn", "torn")), told


def stopped_in(point, folder):
    """Stop rank 1 until the others have given it up and noted what they have."""
    trainer = trainer_of(True, model=thawing(), optimizer=ADAGRAD)
    take_step(trainer)
    shared = trainer.engine.setup.optimization.shared
    rank = dist.get_rank()
    method = "local_gradients" if point == "reduced" else "_step_pieces"
    original = getattr(shared, method)

    def stop(*arguments):
        result = original(*arguments)
        script = 'until [ -e 0 ] && [ -e 2 ]; do sleep 0.05; done; kill -CONT "$0"'
        with subprocess.Popen(["sh", "-c", script, str(os.getpid())], cwd=folder):
            os.kill(os.getpid(), signal.SIGSTOP)
        return result

    if rank == 1:
        setattr(shared, method, stop)
    with pytest.raises(Exception, match=r"."):
        take_step(trainer)
    (folder / str(rank)).touch()
    is_whole = trainer.engine.state.is_whole()
    return is_whole and (trainer.digest(), trainer.optimizer_digest())


@pytest.mark.parametrize(("point", "is_whole"), [("reduced", True), ("written", False)])
def test_a_rank_that_stops_and_goes_on_writes_with_the_others_or_not_at_all(
    ranks, tmp_path, digests, point, is_whole
):
    found = ranks(stopped_in, 3, point, tmp_path, timeout=3.0, deadline=90.0)
    assert found == [digests if is_whole else False] * 3


@pytest.fixture(scope="module")
def digests(ranks):
    """Return the digests of parameters and state after one step, of a rank that is alone."""

    def alone():
        trainer = trainer_of(False, model=thawing(), optimizer=ADAGRAD)
        take_step(trainer)
        return trainer.digest(), trainer.optimizer_digest()

    return ranks(alone, 1)[0]


def test_an_error_of_the_optimizer_is_told_until_a_state_is_loaded(ranks, tmp_path):
    def train():
        trainer = trainer_of(True, optimizer=partial(DeclaredSigns, fails_at=3))
        for _ in range(2):
            trainer.step(labelled(16).tensors)
        saved = copy.deepcopy(trainer.state_dict())
        told = []
        for act in [
            lambda: trainer.step(labelled(16).tensors),
            lambda: trainer.step(labelled(16).tensors),
            trainer.state_dict,
            trainer.digest,
            trainer.optimizer_digest,
            lambda: trainer.save_weights(tmp_path / "weights.safetensors"),
        ]:
            with pytest.raises(WorkError, match="only partly updated by a step") as raised:
                act()
            told.append(str(raised.value))
        assert not trainer.engine.state.is_whole()
        assert not (tmp_path / "weights.safetensors").exists()
        trainer.load_state_dict(saved)
        assert trainer.engine.state.is_whole()
        for group in trainer.optimizer.param_groups:
            group["fails_at"] = -1
        trainer.step(labelled(16).tensors)
        return told, trainer.digest(), trainer.optimizer_digest()

    def undisturbed():
        trainer = trainer_of(False, optimizer=DeclaredSigns)
        for _ in range(3):
            trainer.step(labelled(16).tensors)
        return trainer.digest(), trainer.optimizer_digest()

    found = ranks(train, 2)
    assert found[0] == found[1]
    told, *bits = found[0]
    assert told[0].startswith("rank 1: ArithmeticError: mine, in step 2 of trainer 0")
    assert bits == [*ranks(undisturbed, 1)[0]]


def private_bytes():
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


def share_large_model():
    layers = [nn.Linear(1000, 1000, bias=False) for _ in range(16)]
    model = nn.Sequential(*layers)
    size = 16 * 4_000_000
    before = private_bytes()
    ls.Trainer(model, nn.MSELoss(), torch.optim.SGD, storage="shared", loggers=[])
    return (before - private_bytes()) / size


def test_the_memory_of_the_whole_parameters_is_returned(ranks):
    for returned in ranks(share_large_model, 2, backend="lockstep"):
        assert returned > 0.5


# --- what a script changes in the state ------------------------------------------------------


def clear(optimizer):
    optimizer.state.clear()


def replace(optimizer):
    optimizer.state = defaultdict(dict)


def load_nothing(optimizer):
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def forget_each(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)


def forget_the_last_group(optimizer):
    """Has one parameter, so other ranks have no piece of it."""
    for parameter in optimizer.param_groups[-1]["params"]:
        del optimizer.state[parameter]


def forget_momenta(optimizer):
    for state in optimizer.state.values():
        del state["exp_avg"], state["exp_avg_sq"], state["step"]


def zero_momenta(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def halve_momenta_of_the_last_group(optimizer):
    for parameter in optimizer.param_groups[-1]["params"]:
        optimizer.state[parameter]["exp_avg"].mul_(0.5)


def assign_momenta(optimizer):
    for parameter, state in optimizer.state.items():
        state["exp_avg"] = torch.full_like(parameter, 0.25).detach()
        state["step"] = state["step"] + 3


EDITS = [
    clear, replace, load_nothing, forget_each, forget_the_last_group, forget_momenta, zero_momenta,
    halve_momenta_of_the_last_group, assign_momenta,
]  # fmt: skip


def in_storage(storage):
    """Make a trainer with a group of one small parameter."""
    torch.manual_seed(3)
    config = ls.OptimizerConfig(
        partial(optim.AdamW, lr=0.01),
        parameter_groups=lambda name, p: {"lr": 0.05 if name == "3.bias" else 0.01},
    )
    options = {"microbatches": 4, "loggers": [], "storage": storage, "audit": False}
    return ls.Trainer(small(), nn.CrossEntropyLoss(), config, **options)


def edited(storage):
    """Return, for each edit, digests after it, after loading its state, and after a step."""
    found = []
    for edit in EDITS:
        trainer = in_storage(storage)
        other = in_storage(storage)
        for _ in range(2):
            trainer.step(labelled().tensors)
        edit(trainer.optimizer)
        seen = [trainer.optimizer_digest()]
        other.load_state_dict(trainer.state_dict())
        for each in (trainer, other):
            each.step(labelled().tensors)
            seen += [each.digest(), each.optimizer_digest()]
        found.append((edit.__name__, seen))
    return found


@pytest.fixture(scope="module")
def edited_alone(ranks):
    (found,) = ranks(edited, 1, "replicated")
    return found


@pytest.mark.parametrize(
    ("n", "storage"), [pytest.param(2, "shared", marks=STRESS), (3, "shared"), (2, "sharded")]
)
def test_what_a_script_changes_in_the_state_is_seen_as_in_replicated_storage(
    ranks, edited_alone, n, storage
):
    assert [seen[1:3] for _, seen in edited_alone] == [seen[3:] for _, seen in edited_alone]
    for found in ranks(edited, n, storage):
        assert found == edited_alone


def edited_and_read_on_rank_0():
    trainer = in_storage("shared")
    trainer.step(labelled().tensors)
    zero_momenta(trainer.optimizer)
    if dist.get_rank() == 0:  # the other ranks publish their pieces when they begin the step
        trainer.optimizer_digest()
    trainer.step(labelled().tensors)
    return trainer.digest(), trainer.optimizer_digest()


def edited_and_saved(storage, folder):
    """Return the optimizer's state in the checkpoint of a step after which it was changed."""
    torch.manual_seed(3)
    checkpoint = ls.CheckpointConfig(folder=folder, every_steps=2, keep=5)
    options = {"microbatches": 4, "storage": storage, "checkpoint": checkpoint, "loggers": []}
    trainer = ls.Trainer(small(), nn.CrossEntropyLoss(), partial(optim.AdamW, lr=0.01), **options)
    for epoch in range(2):
        for batch in trainer.batches(labelled(), 16, seed=3, epoch=epoch):
            trainer.step(batch)
            if trainer.steps == 2:
                assign_momenta(trainer.optimizer)
    trainer.finish()
    (path,) = folder.glob("**/step-2")
    state = read_checkpoint(path)["optimizer"]
    entries = {f"{name}/{key}": one for name, own in state.items() for key, one in own.items()}
    return ls.digest(entries)


def changed_alone(change):
    trainer = in_storage("shared")
    trainer.step(labelled().tensors)
    change(trainer.optimizer)
    with pytest.raises(ls.LockstepError) as caught:
        trainer.step(labelled().tensors)
    return f"{type(caught.value).__name__}: {caught.value}"


def on_rank_1(optimizer):
    if dist.get_rank() == 1:
        zero_momenta(optimizer)


def keep_something_new(optimizer):
    for state in optimizer.state.values():
        state["new"] = torch.zeros(())


def change_a_dtype(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()


def change_one_piece(optimizer):
    if dist.get_rank() == 0:
        clear(optimizer)
    else:
        zero_momenta(optimizer)


def test_one_rank_may_read_a_state_that_all_have_changed(ranks):
    found = ranks(edited_and_read_on_rank_0, 2)
    assert found[0] == found[1]


def test_a_checkpoint_has_what_a_script_has_changed_in_the_state(ranks, tmp_path):
    (plain,) = ranks(edited_and_saved, 1, "replicated", tmp_path / "plain")
    assert ranks(edited_and_saved, 3, "shared", tmp_path / "shared") == [plain] * 3


REFUSED_CHANGES = {
    on_rank_1: "rank 1 is publishing the script's changes of the optimizer's state while",
    keep_something_new: "LayoutError: rank 0: AdamW added 'new' to its state after its first",
    change_a_dtype: "LayoutError: rank 0: the state 'exp_avg' has the shape (3,) and the dtype",
    change_one_piece: "UsageError: the script has changed the optimizer's state of a part of",
}


def test_a_change_of_the_state_that_cannot_be_shared_is_refused_on_every_rank(ranks):
    for errors in ranks(lambda: [*map(changed_alone, REFUSED_CHANGES)], 2):
        for error, said in zip(errors, REFUSED_CHANGES.values(), strict=True):
            assert said in error, error
