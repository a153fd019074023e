"""Settings that differ between ranks are errors that name rank, entry and both values."""

import inspect
import re
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import lockstep as ls
from lockstep.kernel.errors import DisagreementError, RankError
from lockstep.portable.arithmetic import measure_arithmetic
from lockstep.portable.arithmetic_difference import parse

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Numbered(nn.Module):
    """Knows its rank, and says that ranks may differ in that."""

    lockstep_ignore = ("rank",)

    def __init__(self):
        super().__init__()
        self.rank = ls.rank()
        self.calls = 0

    def forward(self, inputs):
        return inputs


def network(p=0.2):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(p), nn.Linear(8, 4))


def smoothed(amount):
    return lambda outputs, targets: nn.functional.cross_entropy(
        outputs, targets, label_smoothing=amount
    )


def quietly(*arguments):
    """Do nothing; ranks may have other callbacks."""


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs, torch.randint(0, 4, (16,), generator=generator)


def exponential(gamma):
    """Return an optimizer with a schedule."""
    return ls.OptimizerConfig(SGD, scheduler=partial(schedulers.ExponentialLR, gamma=gamma))


def is_bias(name, parameter):
    return name.endswith("bias")


def is_weight(name, parameter):
    return name.endswith("weight")


REST = ls.OptimizerConfig(SGD)

BASE = {"model": network, "loss": nn.CrossEntropyLoss, "optimizer": lambda: SGD}
"""What makes the arguments that every Trainer is given."""

CASES = {
    "model": (partial(network, 0.5), {}, r"model\.1 \(Dropout\)\.p is 0\.5, on rank 0 it is 0\.2"),
    "loss": (
        partial(nn.CrossEntropyLoss, label_smoothing=0.1), {},
        r"loss \(CrossEntropyLoss\)\.label_smoothing is 0\.1, on rank 0 it is 0\.0",
    ),
    "optimizer": (
        lambda: partial(SGD, weight_decay=0.5), {},
        r"optimizer\.param_groups\[0\]\.weight_decay is 0\.5, on rank 0 it is 0",
    ),
    "microbatches": (4, {}, "microbatches is 4, on rank 0 it is 8"),
    "seed": (7, {}, "seed is 7, on rank 0 it is 0"),
    "loss_weight": (len, {}, "loss_weight is len, on rank 0 it is None"),
    "metrics": (
        {"accuracy": ls.accuracy}, {"metrics": {"exact": ls.accuracy}},
        r"metrics\['exact'\], which is lockstep\.model\.forward\.accuracy on rank 0",
    ),
    "optimizer.parameter_groups": (
        lambda: ls.OptimizerConfig(SGD, lambda name, _: {"lr": 0.5 if name == "0.bias" else 0.1}),
        {}, r"optimizer\.param_groups\[0\]\.params\[1\] is 2\.weight, on rank 0 it is 0\.bias",
    ),
    "optimizer.scheduler": (
        lambda: exponential(0.5), {"optimizer": lambda: exponential(0.9)},
        r"scheduler\.gamma is 0\.5, on rank 0 it is 0\.9",
    ),
    "optimizer.scheduler_interval": (
        lambda: ls.OptimizerConfig(SGD, scheduler_interval="epoch"), {},
        "scheduler_interval is 'epoch', on rank 0 it is 'step'",
    ),
    "optimizer.parameters": (
        lambda: [ls.OptimizerConfig(SGD, parameters=is_bias), ls.OptimizerConfig(SGD)],
        {"optimizer": lambda: [ls.OptimizerConfig(SGD, parameters=is_weight), REST]},
        r"optimizer\[0\]\.param_groups\[0\]\.params\[0\] is 0\.bias, on rank 0 it is 0\.weight",
    ),
    "optimizer.restore_schedule": (
        lambda: ls.OptimizerConfig(SGD, restore_schedule=False), {},
        "restore_schedule is False, on rank 0 it is True",
    ),
    "max_grad_norm": (0.5, {}, r"max_grad_norm is 0\.5, on rank 0 it is None"),
    "autocast_dtype": (
        torch.bfloat16, {}, r"autocast_dtype is torch\.bfloat16, on rank 0 it is None"
    ),
    "ema_decay": (0.5, {"ema_decay": 0.9}, r"ema_decay is 0\.5, on rank 0 it is 0\.9"),
    "extra_modules": (
        lambda: [nn.Dropout(0.5)], {"extra_modules": lambda: [nn.Dropout(0.2)]},
        r"extra_modules\[0\] \(Dropout\)\.p is 0\.5, on rank 0 it is 0\.2",
    ),
    "pipeline": (ls.PipelineConfig(2), {}, r"pipeline\.stages is 2, on rank 0 it is 1"),
    "pipeline.schedule": (
        ls.PipelineConfig(2, "gpipe"), {"pipeline": ls.PipelineConfig(2, "1f1b")},
        r"pipeline\.schedule is 'gpipe', on rank 0 it is '1f1b'",
    ),
    "pipeline.blocks": (
        ls.PipelineConfig(blocks=["0"]), {},
        r"pipeline\.blocks is \['0'\], on rank 0 it is None",
    ),
    "pipeline.balance": (
        ls.PipelineConfig(2, balance=[2, 1]), {"pipeline": ls.PipelineConfig(2, balance=[1, 2])},
        r"pipeline\.balance is \[2, 1\], on rank 0 it is \[1, 2\]",
    ),
    "pipeline.stages_per_rank": (
        ls.PipelineConfig(2, "interleaved", stages_per_rank=1),
        {"pipeline": ls.PipelineConfig(2, "interleaved")},
        r"pipeline\.stages_per_rank is 1, on rank 0 it is None",
    ),
    "activation_checkpointing": (
        True, {}, "activation_checkpointing is True, on rank 0 it is False"
    ),
    "checkpoint": (
        ls.CheckpointConfig(stateful={"a": nn.ReLU()}), {},
        r"checkpoint is \['a'\], on rank 0 it is None"
    ),
    "storage": ("shared", {}, "storage is 'shared', on rank 0 it is 'replicated'"),
    "audit": (
        ls.AuditConfig(7), {},
        r"audit is 'AuditConfig\(every_steps=7, .*', on rank 0 it is 'Audit.*=100, max_.*'",
    ),
}  # fmt: skip
"""Of each argument: its value on rank 1, what else both ranks are given, and the message."""

FREE = {
    "callbacks": quietly,
    "loggers": "run",
    "progress": False,
}
"""Arguments that decide no bit, in which ranks may differ."""


def test_every_argument_has_a_case():
    """A new argument of the Trainer needs one: it must not differ between ranks unnoticed."""
    cases = {case.partition(".")[0] for case in CASES}
    assert {*cases, *FREE} == {*inspect.signature(ls.Trainer).parameters}
    fields = {case for case in CASES if case.startswith("pipeline.")}
    assert fields | {"pipeline.stages"} == {
        f"pipeline.{name}" for name in vars(ls.PipelineConfig())
    }


def build(case, value):
    """Make a trainer, on rank 1 with another value of one argument."""
    given = BASE | CASES.get(case, (None, {}))[1]
    if ls.rank() == 1:
        given = given | {case.partition(".")[0]: value}
    made = {name: each() if callable(each) and each is not len else each
            for name, each in given.items()}  # fmt: skip
    return ls.Trainer(**made)


def test_an_argument_that_differs_is_named_with_both_values(ranks):
    def said():
        found = {}
        for case, (value, _, _) in CASES.items():
            with pytest.raises(DisagreementError) as raised:
                build(case, value)
            found[case] = str(raised.value)
        return found

    for messages in ranks(said, 2):
        for case, (_, _, words) in CASES.items():
            assert re.match(f"rank 1(:| has no) {words}; ", messages[case]), messages[case]


def test_arguments_that_decide_no_bit_may_differ(ranks, tmp_path):
    def digests():
        found = []
        for case, value in FREE.items():
            with build(case, (lambda: quietly) if value is quietly else value) as trainer:
                trainer.step(batch())
                found.append(trainer.digest())
        return found

    first, second = ranks(digests, 2)
    assert first == second
    assert len({*first}) == 1


def with_other_threads():
    torch.set_num_threads(2 if ls.rank() == 1 else 1)
    try:
        build("model", network)
    finally:
        torch.set_num_threads(1)


def on_another_processor():
    """Its kernels round otherwise, so bits would depend on where a micro-batch is computed."""
    hashes = parse(measure_arithmetic())
    if ls.rank() == 1:
        hashes |= {"softmax": "01234567", "numpy": "89abcdef"}
    found = ", ".join(f"{name}={value}" for name, value in hashes.items())
    with mock.patch("lockstep.model.description.measure_arithmetic", return_value=found):
        build("model", network)


def compiled_on_one_rank():
    model = torch.compile(network(), backend="eager") if ls.rank() == 1 else network()
    ls.Trainer(model, nn.CrossEntropyLoss(), SGD)


def invalid_on_one_rank():
    """Rank 1 would raise alone, and the others wait for it."""
    ls.Trainer(network(), nn.CrossEntropyLoss(), SGD, microbatches=8 - 8 * ls.rank())


class Scaled(nn.Linear):
    def __init__(self, *sizes, factor=1.0):
        super().__init__(*sizes)
        self.factor = factor
        self.mask = torch.arange(sizes[1])

    def forward(self, inputs):
        return super().forward(inputs) * self.factor + self.mask


def train_stages(factor=1.0):
    """Train blocks that are built on the meta device elsewhere, and hold tensors as attributes."""
    last = partial(Scaled, 8, 4, factor=factor if ls.rank() == 0 else 1.0)
    pipeline = ls.PipelineConfig(stages=2)
    blocks = [partial(Scaled, 6, 8), last]
    return ls.Trainer(blocks, nn.CrossEntropyLoss(), SGD, pipeline=pipeline).step(batch())


ENVIRONMENTS = [
    (with_other_threads, r"torch\.get_num_threads\(\) is 2, on rank 0 it is 1"),
    (
        on_another_processor,
        r"\(host .*, .*, AVX.*\) computes softmax and numpy with other bits than rank 0 "
        r"\(host .*\); start with --portable",
    ),
    (compiled_on_one_rank, r"torch\.compile\(model\) is .*eager.*, and rank 0 has none"),
    (invalid_on_one_rank, "microbatches is 0, on rank 0 it is 8"),
    (partial(train_stages, 2.0), r"model\.1 \(Scaled\)\.factor is 1\.0, on rank 0 it is 2"),
]


def test_environments_and_models_that_differ_are_named(ranks):
    def name_all():
        said = []
        for act, _ in ENVIRONMENTS:
            with pytest.raises(DisagreementError) as raised:
                act()
            said.append(str(raised.value))
        return said, train_stages()

    (said, loss), (_, same) = found = ranks(name_all, 2, portable=False)
    assert loss == same
    for said, _ in found:
        for (_, words), message in zip(ENVIRONMENTS, said, strict=True):
            assert re.match(f"rank 1:? {words}", message), message


def test_the_rank_that_differs_from_most_is_named(ranks):
    def clipped():
        ls.Trainer(network(), nn.CrossEntropyLoss(), SGD, max_grad_norm=1.0 + (ls.rank() == 0))

    with pytest.raises(RankError, match=r"rank 0: max_grad_norm is 2\.0, on rank 1 it is 1\.0"):
        ranks(clipped, 3)


# --- changes between steps -----------------------------------------------------------------------


def rate(trainer):
    trainer.optimizer.param_groups[0]["lr"] = 0.05


def rate_of_a_tensor(trainer):
    trainer.optimizer.param_groups[0]["lr"].fill_(0.05)


def betas(trainer):
    trainer.optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def dropout(trainer):
    trainer.model[1].p = 0.5


def mode(trainer):
    trainer.model[1].eval()


def freeze(trainer):
    trainer.model[0].weight.requires_grad_(False)


ADAM = partial(torch.optim.Adam, lr=0.01)
CHANGES = [
    (rate, ADAM, r"optimizer\.param_groups\[0\]\.lr is 0\.05, on rank 0 it is 0\.01"),
    (rate_of_a_tensor, partial(torch.optim.Adam, lr=torch.tensor(0.5)),
     r"optimizer\.param_groups\[0\]\.lr is 0\.05.*, on rank 0 it is 0\.5"),
    (betas, ADAM, r"optimizer\.param_groups\[0\]\.betas is \(0\.5, 0\.999\), on rank 0 it is \(0"),
    (mode, ADAM, r"model\.1 \(Dropout\)\.training is False, on rank 0 it is True"),
    (dropout, ADAM, r"model\.1 \(Dropout\)\.p is 0\.5, on rank 0 it is 0\.2"),
    (freeze, ADAM, r"model\.0\.weight\.requires_grad is False, on rank 0 it is True"),
]  # fmt: skip


def test_a_change_on_one_rank_is_named_before_the_weights_change(ranks):
    def train(change, optimizer):
        trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), optimizer)
        for step in range(2):
            trainer.step(batch(step))
        before = trainer.digest()
        if ls.rank() == 1:
            change(trainer)
        with pytest.raises(DisagreementError) as raised:
            trainer.step(batch(2))
        after = trainer.digest()
        if ls.rank() == 0:
            change(trainer)
        return str(raised.value), before == after, trainer.step(batch(2)), trainer.digest()

    def every():
        return [train(change, optimizer) for change, optimizer, _ in CHANGES]

    first, second = ranks(every, 2)
    assert first == second
    for (message, unchanged, *_), (_, _, words) in zip(first, CHANGES, strict=True):
        assert re.match(f"rank 1: {words}.* in step 2; make every change", message), message
        assert unchanged


LAYOUTS = [
    {"pipeline": ls.PipelineConfig(2)},
    {"storage": "shared"},
    {"activation_checkpointing": True},
]


def test_a_change_on_one_rank_is_named_in_every_layout(ranks):
    def train(layout):
        trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), ADAM, **layout)
        trainer.step(batch(0))
        for change in (rate, mode):
            if ls.rank() == 1:
                change(trainer)
            with pytest.raises(DisagreementError, match=r" is (0\.05|False), on rank 0 it is "):
                trainer.step(batch(1))
            if ls.rank() == 0:
                change(trainer)
        return trainer.step(batch(1)), trainer.digest()

    def change_all():
        """Change the model on all ranks: what follows is equal."""
        trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), ADAM)
        for step, (change, _, _) in enumerate(CHANGES):
            trainer.step(batch(step))
            if change is not rate_of_a_tensor:
                change(trainer)
        return trainer.digest()

    first, second = ranks(lambda: [*map(train, LAYOUTS), change_all()], 2)
    assert first == second


def test_a_change_in_a_manual_step_is_named(ranks):
    def train():
        model = network()
        loss = nn.CrossEntropyLoss()
        trainer = ls.Trainer(model, None, ADAM)
        for step in range(2):
            with trainer.manual_step() as turn:
                for inputs, targets in turn.microbatches(batch(step)):
                    turn.backward(loss(model(inputs), targets))
                if step == 1 and ls.rank() == 1:
                    rate(trainer)

    with pytest.raises(RankError, match=r"lr is 0\.05, on rank 0 it is 0\.01 in step 1"):
        ranks(train, 2)


def test_the_mode_of_an_extra_module_is_compared_and_its_attributes_are_not(ranks):
    """They may change in the steps of the trainer whose model it is."""

    def train():
        model = network()
        other = nn.Sequential(nn.Dropout(0.5), Numbered())
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), ADAM, extra_modules=[other])
        other[1].calls = ls.rank()
        trainer.step(batch(0))
        other.train(ls.rank() == 0)
        trainer.step(batch(1))

    with pytest.raises(
        RankError, match=r"rank 1: extra_modules\[0\] \(Sequential\)\.training is False"
    ):
        ranks(train, 2)


class OwnDropout(nn.Module):
    """Dropout with a rate in an attribute that no class of torch declares."""

    def __init__(self):
        super().__init__()
        self.rate = 0.2

    def forward(self, inputs):
        return nn.functional.dropout(inputs, self.rate, self.training)


def test_an_attribute_on_one_rank_is_found_by_the_audit(ranks):
    def train():
        audit = ls.AuditConfig(every_steps=1)
        model = nn.Sequential(nn.Linear(6, 8), OwnDropout(), nn.Linear(8, 4))
        trainer = ls.Trainer(model, nn.CrossEntropyLoss(), ADAM, audit=audit)
        trainer.step(batch(0))
        if ls.rank() == 1:
            model[1].rate = 0.5
        for step in range(1, 5):
            trainer.step(batch(step))

    with pytest.raises(RankError, match=r"it differs, first in aten\.bernoulli_"):
        ranks(train, 2)
