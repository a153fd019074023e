"""Several optimizers of one model, probes of an optimizer, and schedules of a resumed training."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from torch.optim import optimizer as torch_optimizer

import lockstep as ls
from lockstep.kernel.errors import LayoutError, RankError, StateError, UsageError
from lockstep.training.optimizer_checks import (
    require_complete_state,
    require_elementwise,
    require_parameterwise,
)

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
CPU = torch.device("cpu")


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs, torch.randint(0, 3, (16,), generator=generator)


def trainer_of(optimizer, stages=1, **options):
    pipeline = ls.PipelineConfig(stages, balance=[2, 3] if stages == 2 else None)
    return ls.Trainer(small(), nn.CrossEntropyLoss(), optimizer, pipeline=pipeline, **options)


# --- several optimizers --------------------------------------------------------------------------


def is_matrix(name, parameter):
    return parameter.ndim == 2


def muon_and_trust_ratio():
    cosine = partial(schedulers.CosineAnnealingLR, T_max=9)
    step_lr = partial(schedulers.StepLR, step_size=2)
    return [
        ls.OptimizerConfig(partial(optim.Muon, lr=0.02), scheduler=cosine, parameters=is_matrix),
        ls.OptimizerConfig(partial(TrustRatio, lr=0.01), scheduler=step_lr),
    ]


def test_several_optimizers_continue_in_another_layout(ranks, tmp_path):
    def begin(stages):
        trainer = trainer_of(muon_and_trust_ratio(), stages)
        for step in range(3):
            trainer.step(batch(step))
        state = trainer.state_dict()
        if ls.rank() == 0:
            torch.save(state, tmp_path / "state")
        return trainer.digest(), trainer.optimizer_digest()

    def finish(stages):
        trainer = trainer_of(muon_and_trust_ratio(), stages)
        trainer.load_state_dict(torch.load(tmp_path / "state"))
        for step in range(3, 6):
            trainer.step(batch(step))
        return trainer.digest(), trainer.optimizer_digest(), rates(trainer)

    def rates(trainer):
        return [each.param_groups[0]["lr"] for each in trainer.optimizers]

    assert ranks(begin, 2, 1) == ranks(begin, 2, 2) == ranks(begin, 1, 1) * 2
    (alone,) = ranks(finish, 1, 1)
    assert [alone] * 2 == ranks(finish, 2, 2)
    assert alone[2][1] == pytest.approx(0.01 * 0.1**3)


def test_sparse_and_dense_gradients_are_those_of_plain_pytorch(ranks):
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.tags = nn.Embedding(30, 4, sparse=True)
            self.head = nn.Linear(4, 3)

        def forward(self, tags):
            return self.head(self.tags(tags).mean(dim=1))

    def data(step):
        generator = torch.Generator().manual_seed(step)
        return (
            torch.randint(0, 30, (8, 3), generator=generator),
            torch.randint(0, 3, (8,), generator=generator),
        )

    def train(folder):
        sparse = partial(optim.SparseAdam, lr=0.01)
        is_tag = lambda name, parameter: name.startswith("tags.")  # noqa: E731
        optimizers = [ls.OptimizerConfig(sparse, parameters=is_tag), ls.OptimizerConfig(SGD)]
        trainer = ls.Trainer(Tagged(), nn.CrossEntropyLoss(), optimizers, microbatches=1)
        for step in range(4):
            trainer.step(data(step))
        return trainer.digest(), trainer.optimizer_digest()

    model = Tagged()
    plain = [optim.SparseAdam([model.tags.weight], lr=0.01), SGD(model.head.parameters())]
    for step in range(4):
        inputs, targets = data(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        for each in plain:
            each.step()
            each.zero_grad()
    ((digest, of_state),) = ranks(train, 1, None)
    assert digest == ls.digest(model)
    names = dict(zip(model.parameters(), dict(model.named_parameters()), strict=True))
    state = {f"{names[p]}/{k}": v for o in plain for p, s in o.state.items() for k, v in s.items()}
    assert of_state == ls.digest(state)


@pytest.mark.usefixtures("world_of_one")
def test_refused_configurations():
    def refused(optimizer, **options):
        with pytest.raises((UsageError, LayoutError)) as raised:
            trainer_of(optimizer, **options)
        return str(raised.value)

    rest = ls.OptimizerConfig(SGD)
    biases = ls.OptimizerConfig(SGD, parameters=lambda name, _: name.endswith("bias"))
    first = ls.OptimizerConfig(SGD, parameters=lambda name, _: name.startswith("0."))
    none = ls.OptimizerConfig(SGD, parameters=lambda *_: False)
    assert "0.bias is updated by optimizer 0 and optimizer 1" in refused([biases, first])
    assert "0.weight is updated by no optimizer" in refused([biases])
    assert "optimizer 0 of 2 has no parameters=" in refused([rest, biases])
    assert "parameters= of optimizer 1 of 3 returns True for no" in refused([biases, none, rest])
    assert "optimizer[1] is of type partial" in refused([biases, SGD])
    assert "is empty" in refused([])
    assert "of type list" in refused(lambda parameters: [SGD(parameters)])
    assert "shape (8, 6) that is not a parameter" in refused(lambda _: SGD(small().parameters()))
    assert "LBFGS" in (text := refused(optim.LBFGS))
    assert "AdamW" in text
    assert "steps one optimizer, and this trainer has 2" in refused(
        [biases, rest], storage="shared"
    )
    trainer = trainer_of([biases, rest])
    with pytest.raises(UsageError, match=r"write trainer\.schedulers\[number\] instead"):
        print(trainer.scheduler)
    with pytest.raises(UsageError, match=r"would step it once more"):
        trainer.optimizers[1].step()


# --- probes --------------------------------------------------------------------------------------


class Own(optim.Optimizer):
    """Treats each element by itself, with float32 moments, and declares it."""

    lockstep_elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.present():
            state = self.state[parameter]
            state.setdefault("mean", torch.zeros_like(parameter, dtype=torch.float32))
            state["mean"].lerp_(parameter.grad.float(), 0.1)
            parameter.sub_((0.1 * state["mean"]).to(parameter.dtype))

    def present(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class Parts(Own):
    """Leaves the step to optimizers of its groups."""

    def __init__(self, params):
        super().__init__(params)
        self.parts = [optim.Adam(group["params"]) for group in self.param_groups]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Lookahead(optim.SGD):
    """Keeps slow weights in an attribute."""

    def __init__(self, params, every=5):
        super().__init__(params, lr=0.1)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.calls = 0
        self.every = every

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.calls += 1
        if self.calls % self.every == 0:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, parameters, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Averaging(optim.SGD):
    """Keeps averages in an attribute, which only an evaluation reads."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.averages = {}

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            average = self.averages.setdefault(parameter, torch.zeros_like(parameter))
            average.lerp_(parameter, 0.1)


class Decaying(Own):
    """Counts its steps in an attribute, on which the rate depends."""

    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for parameter in self.present():
            parameter.sub_(parameter.grad / self.count)


class Alternating(Decaying):
    """Steps every other time."""

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for parameter in self.present() if self.count % 2 else ():
            parameter.sub_(parameter.grad)


class TrustRatio(Own):
    """Scales the step of each parameter by its norm, as LAMB does; keeps norms in a list."""

    lockstep_elementwise = False
    lockstep_parameterwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.present():
            norms = [parameter.norm(), parameter.grad.norm()]
            self.state[parameter]["norms"] = norms
            parameter.sub_(parameter.grad * (norms[0] / norms[1]))


class Langevin(optim.SGD):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in [p for g in self.param_groups for p in g["params"]]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def probe(factory, dtype=torch.float32):
    """Return the words with which the state of an optimizer is refused, or ""."""
    model = small().to(dtype)
    names = {parameter: name for name, parameter in model.named_parameters()}
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer = factory(list(model.parameters()))
    try:
        require_complete_state(optimizer, names, (), CPU)
    except UsageError as error:
        return str(error)
    finally:
        assert torch.equal(before[1], torch.get_rng_state())
        assert ls.digest(model) == ls.digest(before[0])
        assert not optimizer.state
    return ""


@pytest.mark.parametrize(
    ("factory", "hidden"),
    [
        (Parts, "parts"),
        (Lookahead, "slow"),
        (partial(Lookahead, every=50), "slow"),
        (Averaging, "averages"),
        (Decaying, "a value"),
        (Alternating, "a value"),
    ],
)
def test_a_state_dict_that_is_not_complete(factory, hidden):
    assert f" changes {hidden}, which its state_dict() does not contain" in probe(factory)


class Flat(optim.SGD):
    """Keeps an average of all parameters in one vector."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.average = self.join()

    def join(self):
        return nn.utils.parameters_to_vector(self.param_groups[0]["params"]).detach()

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.average.lerp_(self.join(), 0.1)


@pytest.mark.parametrize(("factory", "count"), [(Lookahead, 0), (Flat, 33)])
def test_whole_parameters_are_stepped_few_times(factory, count):
    """Their gradients may have hundreds of megabytes."""
    sizes = []

    class Recording(factory):
        def step(self, closure=None):
            sizes.append(self.param_groups[0]["params"][0].numel())
            super().step()

    model = nn.Linear(64, 64)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with pytest.raises(UsageError, match=r"Recording changes .*, which its state_dict"):
        require_complete_state(Recording(list(model.parameters())), names, (), CPU)
    assert sizes.count(64 * 64) == count


@pytest.mark.parametrize("factory", [Own, TrustRatio, partial(Langevin, lr=0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_complete_state_dict(factory, dtype):
    assert probe(factory, dtype) == ""


@pytest.mark.parametrize(
    ("factory", "by_parameter", "by_element"),
    [
        (optim.AdamW, True, True),
        (optim.Adafactor, True, False),
        (Own, True, True),
        (TrustRatio, True, False),
        (Lookahead, False, False),
    ],
)
def test_what_an_optimizer_treats_by_itself_is_declared(factory, by_parameter, by_element):
    optimizer = factory(list(small().parameters()))
    checks = {require_parameterwise: by_parameter, require_elementwise: by_element}
    for check, is_accepted in checks.items():
        refusal = pytest.raises(LayoutError, match=f"{factory.__name__} .* treat each ")
        with nullcontext() if is_accepted else refusal as caught:
            check(optimizer)
        if caught is not None:  # only an optimizer of the user may declare it
            has_advice = "lockstep_" in str(caught.value)
            assert has_advice == (factory is not optim.Adafactor)


def test_a_probe_calls_no_hooks_and_writes_to_no_model():
    calls = []

    def hooked(parameters):
        optimizer = Own(parameters)
        optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
        return optimizer

    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    try:
        assert probe(hooked) == ""
    finally:
        handle.remove()
    assert calls == []
    model = small()

    class Outside(optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                model[0].weight.mul_(0.9)

    names = {parameter: name for name, parameter in model.named_parameters()}
    with pytest.raises(UsageError, match=r"writes to 0\.weight through another reference"):
        require_complete_state(Outside(model.parameters(), lr=0.1), names, (), CPU)


def clip(optimizer, arguments, options):
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    nn.utils.clip_grad_norm_([each for each in parameters if each.grad is not None], 0.1)


def count(optimizer, arguments, options):
    COUNTED.append(1)


count.lockstep_elementwise = True
COUNTED = []


def clipping(parameters):
    optimizer = SGD(parameters)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def replacing(parameters):
    optimizer = SGD(parameters)
    step = optimizer.step
    optimizer.step = lambda closure=None: step()
    return optimizer


@pytest.mark.parametrize("options", [{"stages": 2}, {"storage": "shared"}])
def test_hooks_where_a_rank_steps_a_part(ranks, options):
    def train(factory):
        trainer = trainer_of(factory, **options)
        trainer.step(batch(0))
        return trainer

    def refused_from_the_start(factory):
        with pytest.raises(LayoutError) as raised:
            train(factory)
        return str(raised.value)

    def refused_later():
        trainer = train(ls.OptimizerConfig(SGD, scheduler=partial(schedulers.StepLR, step_size=1)))
        trainer.optimizer.register_step_post_hook(count)
        trainer.step(batch(1))
        if ls.rank() == 1:
            trainer.optimizer.register_step_post_hook(clip)
        before = trainer.digest()
        with pytest.raises(StateError) as raised:
            trainer.step(batch(2))
        return str(raised.value), before == trainer.digest()

    def refuse_all():
        return [*map(refused_from_the_start, (clipping, replacing)), *refused_later()]

    for hook, method, said, is_unchanged in ranks(refuse_all, 2):
        assert hook.startswith("the hook clip of SGD")
        assert method.startswith("the method step")
        assert "max_grad_norm=" in hook
        assert "max_grad_norm=" in method
        assert said.startswith("rank 1, step 2: the hook clip of SGD (register_step_post_hook)")
        assert is_unchanged


def test_hooks_where_every_rank_has_all_parameters(ranks):
    def train():
        trainer = trainer_of(clipping)
        for step in range(3):
            trainer.step(batch(step))
        return trainer.digest()

    assert len({*ranks(train, 1), *ranks(train, 2)}) == 1


def test_a_state_of_whole_parameters_is_not_loaded_into_pieces(ranks):
    def load():
        trainer = trainer_of(partial(optim.Adam, lr=0.1), storage="shared")
        trainer.step(batch(0))
        trainer.optimizer.load_state_dict(trainer.state_dict()["optimizer"])

    with pytest.raises(RankError, match=r"only this rank's pieces .* trainer\.load_state_dict"):
        ranks(load, 2)


# --- schedules -----------------------------------------------------------------------------------

LONGER = {
    "cosine": lambda total: partial(schedulers.CosineAnnealingLR, T_max=total),
    "one cycle": lambda total: partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=total),
    "lambda": lambda total: partial(schedulers.LambdaLR, lr_lambda=lambda step: 1 - step / total),
    "sequential": lambda total: (
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [
                schedulers.LinearLR(optimizer, total_iters=total // 4),
                schedulers.CosineAnnealingLR(optimizer, total - total // 4),
            ],
            [total // 4],
        )
    ),
    "chained": lambda total: (
        lambda optimizer: schedulers.ChainedScheduler(
            [schedulers.ExponentialLR(optimizer, 0.9), schedulers.StepLR(optimizer, total // 2)]
        )
    ),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("kind", LONGER)
def test_a_longer_schedule_after_a_resume(kind):
    def train(total, steps, state=None, restore=True):
        scheduler = LONGER[kind](total)
        config = ls.OptimizerConfig(SGD, scheduler=scheduler, restore_schedule=restore)
        trainer = trainer_of(config)
        if state is not None:
            trainer.load_state_dict(state)
        rates = []
        for step in range(trainer.steps, steps):
            trainer.step(batch(step))
            rates.append(trainer.optimizer.param_groups[0]["lr"])
        return rates, copy.deepcopy(trainer.state_dict())

    _, state = train(8, 6)
    longer, _ = train(16, 14)
    assert train(16, 14, state, restore=False)[0] == longer[6:]
    if kind != "lambda":  # whose function is not a part of the state
        assert train(16, 7, state)[0] == train(8, 7)[0][6:]


@pytest.mark.parametrize(("before", "after"), [("cosine", "one cycle"), (None, "lambda")])
def test_another_scheduler_after_a_resume(ranks, tmp_path, before, after):
    def train(kind, steps, **options):
        scheduler = LONGER[kind](12) if kind else None
        config = ls.OptimizerConfig(SGD, scheduler=scheduler, **options)
        checkpoint = ls.CheckpointConfig(every_steps=100)
        trainer = trainer_of(config, loggers=tmp_path / "run", checkpoint=checkpoint)
        trainer.resume()
        while trainer.steps < steps:
            trainer.step(batch(trainer.steps))
        trainer.finish()
        return trainer.optimizer.param_groups[0]["lr"]

    def alone(steps):
        trainer = trainer_of(ls.OptimizerConfig(SGD, scheduler=LONGER[after](12)))
        for step in range(steps):
            trainer.step(batch(step))
        return trainer.optimizer.param_groups[0]["lr"]

    ranks(train, 1, before, 3)
    if before is not None:
        with pytest.raises(
            RankError, match=r"scheduler is .*OneCycleLR, in the .*restore_schedule"
        ):
            ranks(train, 1, after, 5)
        assert ranks(partial(train, restore_schedule=False), 1, after, 5) == ranks(alone, 1, 5)
    else:
        assert ranks(train, 1, after, 5) == ranks(alone, 1, 2)


@pytest.mark.usefixtures("world_of_one")
def test_a_schedule_that_has_ended():
    trainer = trainer_of(ls.OptimizerConfig(SGD, scheduler=LONGER["one cycle"](3)))
    for step in range(3):
        trainer.step(batch(step))
    with pytest.raises(UsageError, match=r"OneCycleLR cannot take another .*restore_schedule"):
        trainer.step(batch(3))


@pytest.mark.usefixtures("world_of_one")
def test_a_scheduler_that_no_checkpoint_contains(tmp_path):
    """It began again when the run was resumed."""
    trainer = trainer_of(SGD, checkpoint=ls.CheckpointConfig(folder=tmp_path), loggers=[])
    schedulers.ExponentialLR(trainer.optimizer, 0.9)
    with pytest.raises(UsageError, match=r"scheduler of the SGD .* would begin again when"):
        trainer.step(batch(0))
    trainer.finish("failed")
    trainer = trainer_of(SGD)
    schedulers.ExponentialLR(trainer.optimizer, 0.9)
    trainer.step(batch(0))


@pytest.mark.usefixtures("world_of_one")
def test_a_rate_of_the_script_instead_of_the_saved_one():
    trainer = trainer_of(ls.OptimizerConfig(SGD))
    trainer.step(batch(0))
    state = copy.deepcopy(trainer.state_dict())
    other = ls.OptimizerConfig(partial(SGD, lr=0.01, momentum=0.5), restore_schedule=False)
    trainer = trainer_of(other)
    trainer.load_state_dict(state)
    group = trainer.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.01, 0.9)
    plateau = ls.OptimizerConfig(
        SGD, scheduler=schedulers.ReduceLROnPlateau, restore_schedule=False
    )
    with pytest.raises(UsageError, match="ReduceLROnPlateau depend on losses"):
        trainer_of(plateau)
