"""Wrong arguments of public functions: each raises one sentence that names the argument."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.data.datasets import mnist
from lockstep.errors import UsageError

LOSS = nn.CrossEntropyLoss()
ROWS = TensorDataset(torch.randn(8, 6), torch.arange(8) % 3)
SGD = partial(torch.optim.SGD, lr=0.1)
LAYER = nn.Linear(6, 3)
OPTIMIZER = SGD(LAYER.parameters())

WHOLE = "expected a whole number (int64)"
STATE = "load_state_dict(state=<dict>): expected what state_dict() returned"
FLAG = "expected True or False"

pytestmark = pytest.mark.usefixtures("world_of_one")


def train(loss=LOSS, optimizer=SGD, **options):
    trainer = ls.Trainer(nn.Linear(6, 3), loss, optimizer, loggers=(), progress=False, **options)
    trainer.step(ROWS.tensors)
    return trainer


def make_exact(**options):
    model = nn.Linear(6, 3)
    optimizer = SGD(model.parameters())
    return ls.exact(model, optimizer, loggers=(), progress=False, **options)


def loop(compute=None, **options):
    handle = make_exact()
    for batch in handle.batches(ROWS, **{"batch_size": 8} | options):
        for inputs, targets in batch:
            loss = cross_entropy(handle.model(inputs), targets)
            (compute or type(batch).backward)(batch, loss)
    return handle


def log(value):
    return lambda: loop(lambda batch, loss: batch.log("a", value))


def weigh(weight):
    return lambda: loop(lambda batch, loss: batch.backward(loss, weight=weight))


def share(value):
    return lambda: loop(lambda batch, loss: batch.backward(loss, share=value))


def scale(scaler):
    return lambda: loop(lambda batch, loss: batch.backward(loss, scaler=scaler))


def flat(**options):
    def call():
        handle = make_exact()
        loader = DataLoader(ROWS, batch_sampler=handle.sampler(ROWS, 8))
        for inputs, targets in handle.microbatches(loader):
            handle.weigh(cross_entropy(handle.model(inputs), targets), **options).backward()

    return call


def manual(method, **options):
    def call():
        trainer = train()
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(ROWS.tensors):
                loss = cross_entropy(trainer.model(inputs), targets)
                step.backward(loss, **options if method == "backward" else {})
            getattr(step, method)(**options)

    return call


def schedule(scheduler):
    return lambda: train(optimizer=ls.OptimizerConfig(SGD, scheduler=scheduler))


def load_other():
    state = train().state_dict()
    ls.Trainer(nn.Linear(6, 4), LOSS, SGD, loggers=(), progress=False).load_state_dict(state)


def load_optimizer(change):
    """Return what loads a state whose entry of the optimizer is changed."""

    def load():
        state = train(optimizer=torch.optim.AdamW).state_dict()
        train().load_state_dict({**state, "optimizer": change(state["optimizer"])})

    return load


def group(function):
    return lambda: train(optimizer=ls.OptimizerConfig(SGD, parameter_groups=function))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ls.exact(OPTIMIZER, LAYER), "not SGD: the model comes first: write ls.exact(mo"),
        (lambda: ls.exact(nn.Linear, OPTIMIZER), "as model, not type: create the model fi"),
        (lambda: ls.exact(None), "ls.exact takes an instance of torch.nn.Module as model, not Non"),
        (lambda: ls.exact([LAYER, LAYER]), "as model, not list: "),
        (lambda: ls.exact(nn.ReLU()), "ls.exact got a model without trainable parameters"),
        (lambda: ls.exact(LAYER, True), "ls.exact got a bool as optimizer: pass the object"),
        (lambda: ls.exact(LAYER, micro_batches=8), "has no argument micro_batches: write microbat"),
        (lambda: ls.exact(LAYER, foo=8), "ls.exact has no argument foo; its arguments are model, "),
        (lambda: ls.exact(), "ls.exact: missing a required argument: 'model'"),
        (lambda: make_exact(microbatches="8"), f"ls.exact(microbatches='8'): {WHOLE}, or None"),
        (lambda: make_exact(microbatches=8.0), f"ls.exact(microbatches=8.0): {WHOLE}"),
        (lambda: make_exact(seed="a"), f"ls.exact(seed='a'): {WHOLE}"),
        (lambda: make_exact().use(5), "exact.use(source=5): expected a sampler of ls.exact, or a"),
        (lambda: make_exact().save_weights(None), "exact.save_weights(path=None): expected a str"),
        (lambda: make_exact().load_state_dict({}), f"exact.{STATE}"),
        (lambda: make_exact().batches(), "exact.batches: missing a required argument: 'dataset'"),
        (lambda: loop().clip_grad_norm_(None), "clip_grad_norm_(max_norm=None): expected a number"),
        (lambda: loop(epoch=1.5), f"exact.batches(epoch=1.5): {WHOLE}, or None"),
        (lambda: loop(epoch="1"), f"exact.batches(epoch='1'): {WHOLE}"),
        (lambda: loop(epoch=-1), "epoch=-1: epochs are counted from 0"),
        (lambda: loop(seed=2**70), "exact.batches(seed=1180591620717411303424): expected a whole"),
        (lambda: loop(shuffle="no"), f"exact.batches(shuffle='no'): {FLAG}"),
        (lambda: loop(drop_last="yes"), f"exact.batches(drop_last='yes'): {FLAG}"),
        (lambda: loop(sampler=5), "exact.batches(sampler=5): expected an iterable, or None"),
        (lambda: loop(sampler=[1], shuffle=True), "the sampler decides the order: omit shuffle="),
        (lambda: loop(batch_sampler=[1, 2], batch_size=None), "yielded 1, but a batch must be a l"),
        (weigh("a"), "micro-batch 0: weight= of batch.backward must be one number, not of type s"),
        (weigh(torch.ones(3)), "weight= of batch.backward must be one number, not (3,) float32"),
        (weigh(1j), "weight= of batch.backward must be one number, not of type complex"),
        (share("a"), "micro-batch 0: share= of batch.backward must be one number, not of type str"),
        (scale("a"), "scaler= of batch.backward must be a torch.amp.GradScaler, not of type str"),
        (
            flat(share="a"),
            "micro-batch 0: share= of exact.weigh must be one number, not of type st",
        ),
        (flat(divisor=None), "divisor= of exact.weigh must be one number, not of type NoneType"),
        (lambda: make_exact().microbatches(3), "microbatches(loader=3): expected an iterable"),
        (log("x"), "the value of batch.log('a', ...), or its weight, must be one number, not of"),
        (log(torch.ones(3)), "must be one number, not (3,) float32"),
        (lambda: train(SGD, LOSS), "not an object of type CrossEntropyLoss; the order is model, "),
        (lambda: train("ce"), "ls.Trainer(loss='ce'): expected a function, or None"),
        (lambda: ls.Trainer(LAYER, LOSS), "ls.Trainer: missing a required argument: 'optimizer'"),
        (lambda: train(microbatches="8"), f"ls.Trainer(microbatches='8'): {WHOLE}"),
        (lambda: train(microbatches=8.0), f"ls.Trainer(microbatches=8.0): {WHOLE}"),
        (lambda: train(microbatches=True), f"ls.Trainer(microbatches=True): {WHOLE}"),
        (lambda: train(seed=None), f"ls.Trainer(seed=None): {WHOLE}"),
        (lambda: train(seed=1.5), f"ls.Trainer(seed=1.5): {WHOLE}"),
        (lambda: train(max_grad_norm="1"), "(max_grad_norm='1'): expected a number, or None"),
        (lambda: train(max_grad_norm=True), "(max_grad_norm=True): expected a number"),
        (lambda: train(ema_decay="a"), "ls.Trainer(ema_decay='a'): expected a number, or None"),
        (lambda: train(metrics=[ls.accuracy]), "metrics=<list>): expected a dict of functions by"),
        (lambda: train(metrics={"a": lambda *_: "x"}), "the metric a must be one number, not of"),
        (lambda: train(metrics={"a": lambda *_: None}), "must be one number, not of type NoneTyp"),
        (lambda: train(metrics={"a": lambda o, _: o}), "metric a must be one number, not (1, 3)"),
        (lambda: train(extra_modules=LAYER), "(extra_modules=<Linear>): expected a list"),
        (lambda: train(extra_modules=[3]), "(extra_modules=<list>): expected a list of modules"),
        (lambda: train(metrics={"a": 3}), "(metrics=<dict>): expected a dict of functions by name"),
        (
            lambda: train(metrics={"a": lambda: 1}),
            "micro-batch 0: the metric a failed on outputs (1,",
        ),
        (lambda: ls.Trainer(LAYER, LOSS, SGD, loggers=["a", 3]), "or a list of these, or None"),
        (
            lambda: ls.Trainer("ce", LOSS, SGD),
            "block 0 is a str: pass modules, or callables without",
        ),
        (lambda: ls.Trainer(nn.ReLU(), LOSS, SGD), "the model has no parameters to train"),
        (lambda: train(pipeline=2), "(pipeline=2): expected an ls.PipelineConfig, or None"),
        (lambda: train(activation_checkpointing="x"), f"activation_checkpointing='x'): {FLAG}"),
        (lambda: ls.Trainer(LAYER, LOSS, SGD, progress="x"), f"(progress='x'): {FLAG}, or None"),
        (lambda: ls.Trainer(LAYER, LOSS, SGD, loggers=5), "(loggers=5): expected a folder or a "),
        (lambda: train().load_state_dict({}), f"trainer.{STATE}"),
        (
            load_other,
            "the state is not one of this model: Error(s) in loading state_dict for Linear",
        ),
        (
            load_optimizer(lambda state: state),
            "the state is one of another optimizer than SGD: its parameter groups have no 'dampen",
        ),
        (load_optimizer(lambda state: {}), 'of the optimizer lacks the entries "state" and "param'),
        (
            load_optimizer(lambda state: {**state, "param_groups": 2 * state["param_groups"]}),
            "of an optimizer with 2 parameter groups, and here it has 1: make the same groups",
        ),
        (lambda: train().batches(ROWS, 8).load_state_dict({}), f"batches.{STATE}"),
        (lambda: train().evaluate(ROWS, 8, num_workers="1"), f"num_workers='1'): {WHOLE}"),
        (
            manual("backward", share="a"),
            "0: share= of step.backward must be one number, not of type",
        ),
        (
            manual("backward", metrics={"a": "b"}),
            "metrics=a of step.backward must be one number, n",
        ),
        (manual("total", count=3), "step.total(count=3): expected a function"),
        (lambda: ls.PipelineConfig(stages="2"), f"ls.PipelineConfig(stages='2'): {WHOLE}"),
        (
            lambda: ls.OptimizerConfig(SGD, scheduler=StepLR(OPTIMIZER, 1)),
            "ls.OptimizerConfig(scheduler=<StepLR>): expected a function of the optimizer, such as",
        ),
        (group([{}]), "(parameter_groups=<list>): expected a function of a parameter's name"),
        (group(lambda name, parameter: None), "parameter_groups failed for weight: 'NoneType'"),
        (group(lambda name: {}), "parameter_groups failed for weight: "),
        (
            lambda: ls.PipelineConfig(blocks=3),
            "(blocks=3): expected a list of modules, or of their",
        ),
        (
            lambda: train(optimizer=partial(SGD, lr=-1)),
            "optimizer failed: Invalid learning rate: -1",
        ),
        (
            lambda: train(optimizer=lambda: 1),
            "it takes the parameters, such as partial(torch.optim",
        ),
        (schedule(lambda: 1), "the scheduler of the ls.OptimizerConfig failed: <lambda>() takes 0"),
        (lambda: ls.OptimizerConfig(SGD, scheduler_interval="week"), "manual\", not 'week'"),
        (
            lambda: train(optimizer=ls.OptimizerConfig(SGD, parameters=lambda: 1)),
            "failed for weight",
        ),
        (
            lambda: ls.CheckpointConfig(folder=3),
            "CheckpointConfig(folder=3): expected a string, or ",
        ),
        (lambda: ls.DatasetMetric(3), "ls.DatasetMetric(function=3): expected a function"),
        (
            lambda: ls.DatasetMetric(print)(0, 0),
            "value of an ls.DatasetMetric must be one number, n",
        ),
        (lambda: ls.loggers.TensorBoard(3), "TensorBoard(folder=3): expected a string, or a path"),
        (
            lambda: ls.target_weight(LOSS, shift=1)(ROWS.tensors),
            "got targets of shape (8,): they h",
        ),
        (
            lambda: ls.DataParallel(LAYER, microbatches="8"),
            f"DataParallel(microbatches='8'): {WHOLE}",
        ),
        (
            lambda: ls.DataParallel(3),
            "ls.DataParallel takes an instance of torch.nn.Module as modul",
        ),
        (
            lambda: ls.DataParallel(LAYER, 3),
            "ls.DataParallel(devices=3): expected a list of devices",
        ),
        (
            lambda: ls.DataParallel(LAYER, ["gpu"]),
            "devices=['gpu']): expected a list of devices of",
        ),
        (lambda: ls.Driver(nprocs="2"), f"ls.Driver(nprocs='2'): {WHOLE}"),
        (lambda: ls.init(threads="2"), f"init(threads='2'): {WHOLE}"),
        (lambda: ls.init(tiemout=2), "init has no argument tiemout: write timeout="),
        (lambda: ls.launch(print, nprocs="2"), f"launch(nprocs='2'): {WHOLE}"),
        (lambda: mnist(3), "mnist(folder=3): expected a string, or a path"),
        (lambda: ls.partition(ROWS, "a"), "ls.partition(fractions='a'): expected a list"),
        (lambda: ls.partition(ROWS, ["a"]), "cannot be partitioned by a; pass fractions between"),
        (lambda: ls.partition(ROWS, [1.0], seed="x"), f"ls.partition(seed='x'): {WHOLE}"),
        (lambda: ls.load_weights("a", LAYER), "(path=<Linear>): expected a string, or a path"),
    ],
)
def test_a_wrong_argument_is_named(call, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        call()


def test_what_acts_like_a_number_is_accepted():
    train(
        microbatches=np.int64(4),
        seed=torch.tensor(3),
        max_grad_norm=torch.tensor([1.0]),
        ema_decay=np.float32(0.5),
        activation_checkpointing=np.False_,
        metrics={"one": lambda *_: np.float64(1), "flag": lambda *_: True},
        extra_modules=nn.ModuleList(),
    )
    loop(shuffle=0, drop_last=None, sampler=range(8), seed=np.int32(3), epoch=np.int64(2))
    loop(batch_size=np.int64(8))
    weigh(torch.tensor([2.0]))()
    assert [len(part) for part in ls.partition(ROWS, np.array([0.5, 0.5]))] == [4, 4]
