"""Descriptions are equal where ranks train alike, and say where they do not."""

import enum
import os
import subprocess
import sys
from collections import OrderedDict
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

import warm
from lockstep.model.description import (
    UNKNOWN,
    describe,
    describe_module,
    describe_optimizer,
    describe_tensors,
    describe_value,
    find_difference,
)


class Colour(enum.Enum):
    RED = 1


def clause(*descriptions):
    found = find_difference(descriptions)
    return None if found is None else found.clause


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.2, "0.2"),
        (True, "True"),
        (1, "1"),
        ("relu", "'relu'"),
        ("cuda:3", "'cuda'"),
        ("layer:3", "'layer:3'"),
        ((0.9, 0.999), "(0.9, 0.999)"),
        ((3,), "(3,)"),
        (torch.Size([2, 3]), "(2, 3)"),
        ([1, None], "[1, None]"),
        ({"b": 1, "a": (2,)}, "{'a': (2,), 'b': 1}"),
        (OrderedDict(a=1), "{'a': 1}"),
        ({"y", "x"}, "{'x', 'y'}"),
        (torch.float32, "torch.float32"),
        (torch.device("cuda", 1), "cuda"),
        (torch.tensor(0.5), "0.5"),
        (torch.tensor([7]), "7"),
        ((torch.tensor(0.5), torch.ones(2)), "(0.5, a tensor)"),
        (torch.empty(3, device="meta"), UNKNOWN),
        (Colour.RED, "<Colour.RED: 1>"),
        (F.relu, "torch.nn.functional.relu"),
        (torch.relu, "torch._VariableFunctionsClass.relu"),
        (str.upper, "str.upper"),
        (nn.ReLU, "torch.nn.modules.activation.ReLU"),
        (nn.ReLU(), "an instance of torch.nn.modules.activation.ReLU"),
        (object(), "an instance of object"),
        (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_the_text_of_a_value(value, expected):
    assert describe_value(value) == expected


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert describe_value(numpy.float64(0.1)) == describe_value(0.1)
    assert describe_value(numpy.int32(3)) == "3"


def test_a_tensor_is_told_by_its_content():
    assert describe_value(torch.arange(4.0)) == describe_value(torch.arange(4.0))
    assert describe_value(torch.arange(4.0)) != describe_value(torch.arange(1.0, 5.0))
    assert "torch.float32 of shape (4,)" in describe_value(torch.arange(4.0))


def test_a_long_value_is_cut_and_told_by_its_hash():
    first = describe_value(list(range(500)))
    second = describe_value([*range(499), 0])
    assert len(first) < 220
    assert first.startswith("[0, 1, 2, ")
    assert first != second


def test_a_container_that_contains_itself_has_a_text():
    loop = []
    loop.append(loop)
    assert describe_value(loop).count("[") > 3


scalars = st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, -0.0, "", "1", "a, b", "'"])
plain = scalars | st.lists(scalars, max_size=2) | st.dictionaries(scalars, scalars, max_size=2)
plain |= st.tuples(plain) | st.tuples(plain, plain) | st.lists(plain, max_size=2)


def structure(value):
    """Return what two values have in common exactly if they are equal and of equal types."""
    if isinstance(value, dict):
        return "dict", sorted((structure(key), structure(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [structure(each) for each in value]
    return type(value).__name__, [repr(value)]


@given(plain, plain)
def test_texts_are_equal_exactly_for_equal_values(left, right):
    assert (describe_value(left) == describe_value(right)) == (structure(left) == structure(right))


def test_texts_are_the_same_in_another_process(tmp_path):
    """With another seed of hashes and other addresses."""
    program = (
        "from functools import partial; import torch; from torch import nn;"
        "from lockstep.model.description import *;"
        "model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, activation=lambda x: x in {1, 2}),"
        "                      nn.LSTM(4, 4), torch.compile(nn.Linear(4, 4), backend='eager'));"
        "model[0].tags = {'a', 'b', 'c', 'd'};"
        "loss = partial(lambda o, t, m={'x', 'y'}: o in {'p', 'q', 'r'}, t=model);"
        "optimizer = torch.optim.Adam(model.parameters());"
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9 ** e);"
        "names = {p: n for n, p in model.named_parameters()};"
        "print(describe('loss', loss) | describe('model', model)"
        "      | describe_optimizer('optimizer', optimizer, names)"
        "      | describe('scheduler', scheduler))"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    environ = {
        **os.environ,
        "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
    }
    other = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=environ, capture_output=True, check=True
    )
    here = "import runpy; runpy.run_path('script.py', run_name='__main__')"
    found = warm.run([sys.executable, "-c", here], cwd=tmp_path, timeout=100)
    assert found.stdout == other.stdout, found.stderr
    assert b"'model.1 (LSTM).hidden_size': '4'" in other.stdout


# --- modules -------------------------------------------------------------------------------------


def network(p=0.2):
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(p))


def tie(model):
    model[2].weight = model[0].weight


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model[1], "p", 0.5), "1 (Dropout).p is 0.5, on rank 0 it is 0.2"),
        (lambda model: model[1].eval(), "1 (Dropout).training is False, on rank 0 it is True"),
        (lambda model: model[0].weight.requires_grad_(False),
         "0.weight.requires_grad is False, on rank 0 it is True"),
        (lambda model: model.append(nn.ReLU()),
         "3 is torch.nn.modules.activation.ReLU, and rank 0 has none"),
        (lambda model: model.__setitem__(1, nn.ReLU()),
         "1 is torch.nn.modules.activation.ReLU, on rank 0 it is torch.nn.modules.dropout.Dropout"),
        (lambda model: model.append(model[1]),
         "3 is the same module as model.1, and rank 0 has none"),
        (lambda model: model[1].register_buffer("scale", torch.ones(3), persistent=False),
         "1.scale is buffer, and rank 0 has none"),
        (tie, "2.weight is the same tensor as model.0.weight, on rank 0 it is parameter"),
    ],
)  # fmt: skip
def test_what_differs_in_a_model_is_named(change, words):
    model, changed = (nn.Sequential(*network(), nn.Linear(3, 4)) for _ in range(2))
    change(changed)
    described = describe_module("model", model), describe_module("model", changed)
    assert clause(*described) == f"rank 1: model.{words}"


def test_a_tensor_in_an_attribute_is_compared_where_both_have_it():
    models = [network() for _ in range(3)]
    models[0][1].scale = torch.ones(3)
    models[1][1].scale = torch.ones(3, device="meta")
    models[2][1].scale = torch.zeros(3)
    first, unknown, other = (describe_module("model", each) for each in models)
    assert clause(first, unknown) is None
    assert clause(unknown, unknown) is None
    assert "rank 2: model.1 (Dropout).scale is torch.float32 of shape (3,)" in clause(
        unknown, first, other
    )


def test_activations_that_a_module_has_kept_are_not_described():
    model = network()
    model[0].last = model(torch.ones(2, 3))
    assert clause(describe_module("model", network()), describe_module("model", model)) is None


class Numbered(nn.Module):
    lockstep_ignore = ("rank",)

    def __init__(self, rank, width=3):
        super().__init__()
        self.rank = rank
        self.width = width


def test_attributes_that_a_module_names_may_differ():
    def described(module):
        return describe_module("model", module)

    assert clause(described(Numbered(0)), described(Numbered(1))) is None
    assert clause(described(Numbered(0)), described(Numbered(1, 4))) == (
        "rank 1: model (Numbered).width is 4, on rank 0 it is 3"
    )
    one = nn.ReLU()
    other = nn.ReLU()
    one.number = 1
    other.number = 2
    one.lockstep_ignore = "number"
    other.lockstep_ignore = "number"
    assert clause(described(one), described(other)) is None


def test_the_device_of_a_model_may_differ():
    with torch.device("meta"):
        elsewhere = network()
    assert describe_module("model", elsewhere) == describe_module("model", network())


def test_tensors_alone_leave_attributes_out():
    assert describe_tensors("model", network(0.5)) == describe_tensors("model", network())
    wider = nn.Sequential(nn.Linear(3, 5))
    assert clause(describe_tensors("model", network()), describe_tensors("model", wider)) == (
        "rank 1: model.0.weight.shape is (5, 3), on rank 0 it is (4, 3)"
    )


# --- functions -----------------------------------------------------------------------------------


def smoothed(amount, module=None):
    criterion = module or nn.CrossEntropyLoss(label_smoothing=amount)

    def loss(outputs, targets, factor=1.0):
        return criterion(outputs, targets) * factor * amount

    return loss


def later():
    def loss():
        return value

    description = describe("loss", loss)
    value = 1
    return description, describe("loss", loss), value


class Callable:
    def __init__(self, amount):
        self.amount = amount
        self.inner = nn.CrossEntropyLoss(label_smoothing=amount)

    def __call__(self, outputs, targets):
        return self.amount


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (smoothed(0.0), smoothed(0.1),
         "rank 1: loss (variable amount) is 0.1, on rank 0 it is 0.0"),
        (smoothed(0, nn.CrossEntropyLoss()), smoothed(0, nn.CrossEntropyLoss(label_smoothing=0.1)),
         "rank 1: loss (variable criterion) (CrossEntropyLoss).label_smoothing is 0.1, on rank 0 "
         "it is 0.0"),
        (partial(F.cross_entropy, label_smoothing=0.1), partial(F.cross_entropy),
         "rank 1 has no loss.label_smoothing, which is 0.1 on rank 0"),
        (partial(F.nll_loss, weight=torch.ones(1)), partial(F.nll_loss, weight=torch.zeros(1)),
         "rank 1: loss.weight is 0.0, on rank 0 it is 1.0"),
        (F.cross_entropy, F.nll_loss,
         "rank 1: loss is torch.nn.functional.nll_loss, on rank 0 it is "
         "torch.nn.functional.cross_entropy"),
        (Callable(1), Callable(2), "rank 1: loss.amount is 2, on rank 0 it is 1"),
        (None, F.mse_loss, "rank 1: loss is torch.nn.functional.mse_loss, on rank 0 it is None"),
        ({"a": F.mse_loss}, {"b": F.mse_loss},
         "rank 1 has no loss['a'], which is torch.nn.functional.mse_loss on rank 0"),
        ([nn.ReLU()], [nn.ReLU(), nn.ReLU()],
         "rank 1: loss is list of 2, on rank 0 it is list of 1"),
        ([nn.Dropout(0.1)], [nn.Dropout(0.2)],
         "rank 1: loss[0] (Dropout).p is 0.2, on rank 0 it is 0.1"),
    ],
)  # fmt: skip
def test_what_differs_in_a_function_is_named(ours, theirs, words):
    assert clause(describe("loss", ours), describe("loss", theirs)) == words
    assert describe("loss", ours) == describe("loss", ours)


def test_lambdas_are_told_by_their_code():
    functions = (lambda o: o + 1, lambda o: o + 1, lambda o: o + 2)
    ours, same, theirs = (describe("loss", function) for function in functions)
    assert ours == same
    assert "loss (hash of its code)" in clause(ours, theirs)


def test_a_variable_of_a_function_may_be_exempted():
    ours = smoothed(0.1, nn.ReLU())
    theirs = smoothed(0.2, nn.ReLU())
    ours.lockstep_ignore = ["amount"]
    theirs.lockstep_ignore = ["amount"]
    assert clause(describe("loss", ours), describe("loss", theirs)) is None


def test_functions_that_contain_themselves_end():
    def loop():
        return loop

    assert "loss (variable loop)" in describe("loss", loop)
    without, with_value, value = later()
    assert "loss (variable value)" not in without
    assert with_value["loss (variable value)"] == str(value)


# --- optimizers and schedulers -------------------------------------------------------------------


def described(make=torch.optim.Adam, schedule=None, names=("a", "b"), **options):
    parameters = [nn.Parameter(torch.ones(2)) for _ in names]
    optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:]}], **options)
    found = describe_optimizer("optimizer", optimizer, dict(zip(parameters, names, strict=True)))
    schedule = schedule or (lambda optimizer: None)
    return found | describe("scheduler", schedule(optimizer))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({}, {"betas": (0.6, 0.999)},
         "optimizer.param_groups[0].betas is (0.6, 0.999), on rank 0 it is (0.9, 0.999)"),
        ({"lr": torch.tensor(0.5)}, {"lr": torch.tensor(0.25)},
         "optimizer.param_groups[0].lr is 0.25, on rank 0 it is 0.5"),
        ({}, {"make": torch.optim.AdamW},
         "optimizer is torch.optim.adamw.AdamW, on rank 0 it is torch.optim.adam.Adam"),
        ({}, {"names": ("b", "a")},
         "optimizer.param_groups[0].params[0] is b, on rank 0 it is a"),
        ({}, {"schedule": partial(schedulers.StepLR, step_size=1)},
         "scheduler is torch.optim.lr_scheduler.StepLR, on rank 0 it is None"),
    ],
)  # fmt: skip
def test_what_differs_in_an_optimizer_is_named(ours, theirs, words):
    assert clause(described(**ours), described(**theirs)) == f"rank 1: {words}"
    assert described(**ours) == described(**ours)


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "entry"),
    [
        ("StepLR", {"step_size": 1, "gamma": 0.5}, {"step_size": 1, "gamma": 0.9}, "gamma"),
        ("LambdaLR", {"lr_lambda": lambda e: 0.9**e}, {"lr_lambda": lambda e: 0.8**e},
         "lr_lambdas[0] (hash of its code)"),
        ("OneCycleLR", {"max_lr": 1, "total_steps": 9, "cycle_momentum": False},
         {"max_lr": 1, "total_steps": 9, "cycle_momentum": False, "pct_start": 0.7},
         "_schedule_phases"),
    ],
)  # fmt: skip
def test_what_differs_in_a_scheduler_is_named(name, ours, theirs, entry):
    make = getattr(schedulers, name)
    left, right = (described(schedule=partial(make, **each)) for each in (ours, theirs))
    assert f"rank 1: scheduler.{entry} is " in clause(left, right)
    assert left == described(schedule=partial(make, **ours))


def test_schedulers_within_a_scheduler_are_described():
    def schedule(optimizer, factor):
        first = schedulers.ConstantLR(optimizer, factor)
        return schedulers.SequentialLR(optimizer, [first, schedulers.LinearLR(optimizer)], [3])

    found = [described(schedule=partial(schedule, factor=each)) for each in (0.5, 0.5)]
    assert found[0] == found[1]
    other = described(schedule=partial(schedule, factor=0.25)) | {
        entry: value for entry, value in found[0].items() if entry.endswith("lr")
    }
    assert clause(found[0], other) == (
        "rank 1: scheduler._schedulers[0].factor is 0.25, on rank 0 it is 0.5"
    )


# --- who differs ---------------------------------------------------------------------------------


@given(st.integers(2, 6), st.data())
def test_the_rank_that_differs_from_most_is_named(ranks, data):
    odd = data.draw(st.integers(0, ranks - 1))
    descriptions = [{"a": "1", "b": "2"} for _ in range(ranks)]
    descriptions[odd]["b"] = "3"
    named, other = (1, 0) if ranks == 2 else (odd, int(odd == 0))
    values = (descriptions[named]["b"], descriptions[other]["b"])
    assert clause(*descriptions) == (
        f"rank {named}: b is {values[0]}, on rank {other} it is {values[1]}"
    )


def test_the_hint_about_exemptions_is_for_attributes():
    attribute = find_difference([{"model.1 (Dropout).p": "1"}, {"model.1 (Dropout).p": "2"}])
    other = find_difference([{"loss (variable a)": "1"}, {"loss (variable a)": "2"}])
    assert "lockstep_ignore" in attribute.format_message("do")
    assert other.format_message("do") == ("rank 1: loss (variable a) is 2, on rank 0 it is 1; do")
