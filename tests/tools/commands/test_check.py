"""`lockstep check`: whole scripts, what it finds in them, and every way it can end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import warm
from lockstep.cli import cli
from lockstep.kernel.errors import UsageError
from lockstep.tools.check import layout_comparison
from lockstep.tools.check.layouts import Layout, layouts
from lockstep.tools.check.portability import OperatorNames

PLAIN = [Layout(1, "lockstep"), Layout(2, "lockstep"), Layout(3, "gloo")]
STAGES = [
    Layout(1, "lockstep"),
    Layout(2, "lockstep", stages=2, schedule="1f1b"),
    Layout(2, "lockstep", stages=2, schedule="interleaved"),
]

HEAD = """
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import lockstep as ls

ls.init(timeout=60)
torch.manual_seed(1)
sgd = partial(torch.optim.SGD, lr=0.1)
"""

TRAIN = """
trainer = ls.Trainer(model, nn.CrossEntropyLoss(), sgd)
while True:
    trainer.step((torch.randn(16, 6), torch.randint(0, 4, (16,))))
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check a script in an empty folder; return the command's result, and its JSON if it is."""
    monkeypatch.chdir(tmp_path)

    def run(source, *arguments, layouts=PLAIN[:2], as_json=True):
        chosen = layouts if callable(layouts) else lambda backends, ranks: layouts
        monkeypatch.setattr(layout_comparison, "layouts", chosen)
        Path("train.py").write_text(HEAD + source)
        words = ["check", "train.py", "--steps", "2", *(["--json"] if as_json else []), *arguments]
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
        return result, json.loads(result.stdout.splitlines()[-1]) if as_json else None

    return run


def test_an_honest_script_that_would_go_on_for_ever(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        HEAD
        + """
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
trainer = ls.Trainer(model, nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=0.1),
                     max_grad_norm=1.0, ema_decay=0.9, loggers="runs/mine")
while True:
    trainer.step((torch.randn(16, 6), torch.randint(0, 4, (16,))))
    print("a step", trainer.digest())
"""
    )
    result = CliRunner().invoke(cli, ["check", "train.py", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    *_, last = result.stdout.splitlines()
    found = json.loads(last)
    assert found["equal"] is True
    assert found["first_difference"] is None
    assert found["reproducible"] is None
    assert found["not_applicable"] == []
    asked = [
        tuple(each[name] for name in ("replicas", "stages", "shared", "backend"))
        for each in found["layouts"]
    ]
    assert asked == [
        (1, 1, False, "lockstep"),
        (2, 1, False, "lockstep"),
        (3, 1, False, "lockstep"),
        (2, 1, False, "gloo"),
        (3, 1, False, "gloo"),
        (1, 2, False, "lockstep"),
        (1, 2, False, "lockstep"),
        (2, 2, False, "lockstep"),
        (2, 1, True, "lockstep"),
    ]
    assert [each["schedule"] for each in found["layouts"][5:8]] == [
        "1f1b",
        "interleaved",
        "zero-bubble",
    ]
    for each in found["layouts"]:
        assert each["equal"] is True
        assert each["digest"] == found["layouts"][0]["digest"]
        assert len(each["digest"]) == 64
        assert len(each["losses"]) == 5
        assert [float.fromhex(loss) for loss in each["loss_hex"]] == each["losses"]
        assert each["losses"] == found["layouts"][0]["losses"]
    assert "4 ranks, lockstep, 2 stages (zero-bubble): equal" in result.stderr
    assert "train.py computes the same bits in all 9 layouts, for 5 steps." in result.stderr
    assert "a step" not in result.output
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_the_digest_is_the_trainers_own(check):
    _, found = check(
        "model = nn.Sequential(nn.Linear(6, 4))"
        + TRAIN.replace("while True", "for _ in range(2)")
        + "open('digest', 'w').write(trainer.digest())",
        "--steps=9",
        layouts=PLAIN[:1],
    )
    assert found["layouts"][0]["digest"] == Path("digest").read_text()
    assert len(found["layouts"][0]["losses"]) == 2


OWN_GENERATOR = """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.inner(x * (torch.rand(x.shape, generator=self.generator) > 0.3))

model = nn.Sequential(nn.Linear(6, 6), Masked())
"""

HIDDEN_GENERATOR = OWN_GENERATOR.replace("self.generator", "self.hidden['generator']").replace(
    "self.inner = ", "self.hidden = {'fixed': object()}\n        self.inner = "
)

HIDDEN_COUNT = """
seen = {"calls": 0}

class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x):
        seen["calls"] += 1
        return self.inner(x) * (1 + 0.01 * seen["calls"])

model = nn.Sequential(nn.Linear(6, 6), Warm())
"""


@pytest.mark.parametrize("source", [HIDDEN_GENERATOR, HIDDEN_COUNT])
def test_state_in_python_names_its_module(check, source):
    result, found = check(source + TRAIN, layouts=PLAIN)
    assert result.exit_code == 1
    assert found["equal"] is False
    assert found["reproducible"] is True
    first = found["first_difference"]
    assert (first["step"], first["module"], first["parameter"]) == (0, "1", None)
    assert first["microbatch"] == 4  # the first one of the second rank
    assert [each["equal"] for each in found["layouts"]] == [True, False, False]
    assert len({each["digest"] for each in found["layouts"]}) == 3
    assert "step 0, micro-batch 4: module `1` computes different outputs" in result.stderr
    assert "state that it keeps in Python" in result.stderr


def test_what_training_refuses_is_a_failure(check):
    draw = "return self.inner(x * (torch.rand(x.shape, generator=self.generator) > 0.3))"
    write = "self.inner.weight.data.mul_(0.9)\n        return self.inner(x)"
    result, found = check(OWN_GENERATOR.replace(draw, write) + TRAIN)
    assert result.exit_code == 1
    assert [each["verdict"] for each in found["layouts"]] == ["failed"]
    assert "parameter 1.inner.weight was written" in found["layouts"][0]["failure"]
    assert result.stderr.count("parameter 1.inner.weight was written") == 1
    assert found["first_difference"] is None


LOOP = """
for number in range(3):
    batch = torch.randn(16, 6), torch.randint(0, 4, (16,))
"""

# what is wrong with a script -> its source, and what the first difference says of it
FAULTS = {
    "a layout that fails after a difference": (
        """
trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), sgd)"""
        + LOOP
        + """    batch[0][8:] += number * ls.rank()
    trainer.step(batch)
    if ls.rank() == 1 and number:
        raise ValueError("too late")
""",
        {"step": 1, "module": "data", "microbatch": 4},
    ),
    "a step that fails half way": (
        """
class Careful(nn.Linear):
    def forward(self, x):
        if x.max() > 1e6:
            raise ValueError("too large")
        return super().forward(x)

trainer = ls.Trainer(Careful(6, 4), nn.CrossEntropyLoss(), sgd)"""
        + LOOP
        + """    batch[0][8:] += 1e9 * ls.rank()
    trainer.step(batch)
""",
        {"step": 0, "module": "data", "microbatch": 4},
    ),
    "a collate function that depends on the rank": (
        """
def collate(samples):
    inputs, targets = default_collate(samples)
    return inputs + ls.rank(), targets

trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), sgd)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,)))
for batch in trainer.batches(data, 16, collate_fn=collate):
    trainer.step(batch)
""",
        {"step": 0, "module": "data", "parameter": None, "microbatch": 4, "rank": 1},
    ),
    "a batch that depends on the rank": (
        "model = nn.Linear(6, 4)\ntorch.manual_seed(ls.rank())" + TRAIN,
        {"step": 0, "module": "data", "rank": 1},
    ),
    "an optimizer that differs by rank": (
        """
class Drifting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if ls.rank() == 1:
            with torch.no_grad():
                self.param_groups[0]["params"][2].mul_(1.5)

model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
sgd = partial(Drifting, lr=0.1)
"""
        + TRAIN,
        {"step": 0, "module": "optimizer", "parameter": "1.weight", "rank": 1},
    ),
    "a parameter that the script writes between steps": (
        """
model = nn.Sequential(nn.Linear(6, 4))
trainer = ls.Trainer(model, nn.CrossEntropyLoss(), sgd)"""
        + LOOP
        + """    trainer.step(batch)
    with torch.no_grad():
        model[0].bias.add_(ls.rank())
""",
        {"step": 1, "module": "0", "parameter": "0.bias", "what": "between"},
    ),
    "one trainer of several": (
        """
generator = torch.Generator().manual_seed(3)

class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, generator=generator))

first = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), sgd)
second = ls.Trainer(Noisy(6, 4), nn.CrossEntropyLoss(), sgd)"""
        + LOOP
        + """    first.step(batch), second.step(batch)
""",
        {"step": 0, "module": "Noisy", "trainer": 1, "microbatch": 4},
    ),
    "a number of steps that depends on the ranks": (
        "model = nn.Linear(6, 4)"
        + TRAIN.replace("while True", "for _ in range(2 // ls.world_size())"),
        {"step": 1, "module": "script", "what": "steps"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_script_is_named(check, fault):
    source, expected = FAULTS[fault]
    result, found = check(source)
    assert result.exit_code == 1
    assert not found["layouts"][1]["equal"]
    assert found["first_difference"].items() >= expected.items()


def test_a_model_without_a_seed_is_not_reproducible(check):
    result, found = check("torch.seed()\nmodel = nn.Sequential(nn.Linear(6, 4))" + TRAIN)
    assert result.exit_code == 1
    expected = {"step": 0, "module": "0", "parameter": "0.weight", "what": "initial"}
    assert found["first_difference"].items() >= expected.items()
    assert found["reproducible"] is False
    assert "So the script itself is not reproducible. Call torch.manual_seed" in result.stderr


def test_an_attribute_between_blocks(check):
    """Such a model has no stages; interleaved, a block would read another micro-batch's value."""
    result, found = check(
        """
class Box:
    pass

class Put(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.inner, self.box = nn.Linear(6, 6), box

    def forward(self, x):
        self.box.mask = (x[:, :1] > 0).float()
        return self.inner(x)

class Use(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.inner, self.box = nn.Linear(6, 6), box

    def forward(self, x):
        return self.inner(x) * self.box.mask

box = Box()
model = nn.Sequential(Put(box), nn.Tanh(), Use(box), nn.Linear(6, 4))
"""
        + TRAIN,
        layouts=STAGES,
    )
    assert result.exit_code == 0
    assert [each["stages"] for each in found["layouts"]] == [1]
    refused = found["not_applicable"][0]
    assert refused["stages"] == 2
    assert "block 2 (Use)" in refused["reason"]
    assert "box.mask" in refused["reason"]


def test_a_layout_that_the_model_refuses_is_not_applicable(check):
    result, found = check("model = nn.Linear(6, 4)" + TRAIN, layouts=STAGES)
    assert result.exit_code == 0
    assert found["equal"] is True
    assert len(found["layouts"]) == 1
    (refused,) = found["not_applicable"]  # the other layouts with stages are not tried
    assert refused["stages"] == 2
    assert refused["reason"].startswith("Linear does not define how to split it into 2 stages")
    assert "1f1b): not applicable" in result.stderr


NUMPY_DRAW = """
import numpy

class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + float(numpy.random.rand())

model = nn.Sequential(Noisy(6, 6), nn.Linear(6, 4))
"""

SPARSE = """
model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(12, 4))
trainer = ls.Trainer(model, nn.CrossEntropyLoss(), sgd)
while True:
    trainer.step((torch.randint(0, 9, (16, 2)), torch.randint(0, 4, (16,))))
"""

# The script, a layout that it does not allow, and a part of the reason, by what it does.
REFUSALS = {
    "a draw from numpy": (NUMPY_DRAW + TRAIN, STAGES[1], "draws from Python's or numpy's random"),
    "sparse gradients": (SPARSE, Layout(2, "lockstep", shared=True), "whose gradient is sparse"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_of_a_layout_is_not_applicable(check, name):
    source, layout, said = REFUSALS[name]
    result, found = check(source, layouts=[PLAIN[0], layout])
    assert result.exit_code == 0, result.output
    (refused,) = found["not_applicable"]
    assert said in refused["reason"]
    assert not refused["reason"].startswith("rank 0 failed")


@pytest.mark.parametrize(
    "error", ["ls.errors.UsageError", "type('LayoutError', (ValueError,), {})"]
)
def test_words_and_names_of_an_error_make_no_layout_inapplicable(check, error):
    source = f"""
if ls.world_size() == 2:
    raise {error}("the curriculum has no shared stage for a second GPU")
model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
"""
    result, found = check(source + TRAIN, layouts=STAGES[:2])
    assert result.exit_code == 1
    assert [each["verdict"] for each in found["layouts"]] == ["reference", "failed"]
    assert found["not_applicable"] == []


def test_more_replicas_than_microbatches_are_not_applicable(check):
    result, found = check(
        "model = nn.Linear(6, 4)" + TRAIN.replace("sgd)", "sgd, microbatches=2)"), layouts=PLAIN
    )
    assert result.exit_code == 0
    assert [each["ranks"] for each in found["not_applicable"]] == [3]


def test_several_trainers_in_a_loop_of_the_scripts_own(check):
    result, found = check(
        """
maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
judge = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
adam = partial(torch.optim.Adam, lr=1e-3)
of_judge = ls.Trainer(judge, None, adam, extra_modules=[maker])
of_maker = ls.Trainer(maker, None, adam, extra_modules=[judge])
bce = nn.functional.binary_cross_entropy_with_logits
while True:
    batch = torch.randn(16, 6)
    with of_judge.manual_step() as step:
        for real in step.microbatches(batch):
            with torch.no_grad():
                fake = maker(torch.randn(len(real), 4))
            yes, no = judge(real), judge(fake)
            step.backward(bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no)))
    with of_maker.manual_step() as step:
        for real in step.microbatches(batch):
            said = judge(maker(torch.randn(len(real), 4)))
            step.backward(bce(said, torch.ones_like(said)))
""",
        layouts=[*PLAIN, STAGES[1], Layout(2, "lockstep", shared=True)],
    )
    assert result.exit_code == 0
    assert [len(each["losses"]) for each in found["layouts"]] == [4, 4, 4, 4]
    assert len({each["digest"] for each in found["layouts"]}) == 1
    assert [each["stages"] for each in found["not_applicable"]] == [2]


def test_the_script_gets_its_own_arguments_and_looks_like_the_program(check):
    source = """
import os
assert sys.argv == ["train.py", "--width", "4", "-q", "more", "--steps"], sys.argv
assert __name__ == "__main__"
assert sys.path[0] == os.getcwd()
assert os.path.isdir(os.environ["LOCKSTEP_RUN"])
model = nn.Linear(6, int(sys.argv[2]))
"""
    result, _ = check(source + TRAIN, "--width", "4", "-q", "more", "--", "--steps")
    assert result.exit_code == 0, result.output


def test_the_command_itself_and_a_script_that_would_read_its_input(tmp_path):
    """The input belongs to whoever runs the command; each run of the script finds it empty."""
    (tmp_path / "train.py").write_text(
        HEAD + "assert sys.stdin.read() == ''\nmodel = nn.Linear(6, 4)" + TRAIN
    )
    result = warm.run(
        [*warm.LOCKSTEP, "check", "train.py", "--steps=1", "--ranks=1", "--json"],
        cwd=tmp_path,
        input="a line\n",
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["equal"] is True


def test_a_script_that_ends_earlier_and_exits_by_itself(check):
    result, found = check(
        "model = nn.Linear(6, 4)" + TRAIN.replace("while True", "for _ in range(1)") + "sys.exit()",
    )
    assert result.exit_code == 0
    assert [len(each["losses"]) for each in found["layouts"]] == [1, 1]
    assert "train.py ended after 1 of 2 steps." in result.stderr


LAUNCHES = """
def train(lr):
    ls.init(timeout=60)
    torch.manual_seed(1)
    trainer = ls.Trainer(nn.Sequential(nn.Linear(6, 4)), nn.CrossEntropyLoss(),
                         partial(torch.optim.SGD, lr=lr))
    while True:
        trainer.step((torch.randn(16, 6), torch.randint(0, 4, (16,))))

if __name__ == "__main__":
    print(ls.launch(train, (0.1,), nprocs=7))
"""


def test_a_script_that_launches_its_own_ranks(check):
    result, found = check(LAUNCHES)
    assert result.exit_code == 0
    assert [each["ranks"] for each in found["layouts"]] == [1, 2]


def test_ranks_that_cannot_be_checked_are_refused_at_once(check):
    result, found = check("ls.Driver(nprocs=2)")
    assert result.exit_code == 1
    assert (
        "lockstep check and lockstep replay cannot run a script that"
        in found["layouts"][0]["failure"]
    )


def test_a_script_that_catches_everything_does_not_go_on(check):
    result, _ = check(
        """
trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), sgd)
with trainer:
    while True:
        try:
            trainer.step((torch.randn(16, 6), torch.randint(0, 4, (16,))))
        except Exception:
            pass
""",
    )
    assert result.exit_code == 0


def test_a_script_that_fails_is_run_once(check):
    result, found = check("print('before\\x1b[2J it')\nraise KeyError('lr')")
    assert result.exit_code == 1
    assert found["equal"] is False
    assert found["first_difference"] is None
    (only,) = found["layouts"]
    assert only["equal"] is False
    assert only["failure"].startswith("rank 0 raised KeyError: 'lr' (train.py:")
    assert "    before\\x1b[2J it" in result.stderr
    assert "Traceback (most recent call last)" in result.stderr


def test_a_layout_that_fails_is_a_failure(check):
    result, found = check(
        "if ls.rank() == 1:\n    sys.exit('no second rank, please')\nmodel = nn.Linear(6, 4)"
        + TRAIN,
    )
    assert result.exit_code == 1
    assert found["first_difference"] is None
    assert [each["verdict"] for each in found["layouts"]] == ["reference", "failed"]
    assert found["layouts"][1]["failure"] == "rank 1 exited with status 1"
    assert "no second rank, please" in result.stderr


EXACT = """
from torch.nn.parallel import DistributedDataParallel

net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4))
model = DistributedDataParallel(net)
exact, optimizer = ls.exact(model), sgd(model.parameters(), momentum=0.9)
inputs = torch.randn(2, 6)
while True:
    exact.begin()
    exact.weigh(model(inputs).square().mean()).backward()
    if exact.is_complete:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_loop_of_the_users(check):
    result, found = check(EXACT, layouts=[*PLAIN, STAGES[1]])
    assert result.exit_code == 0
    assert found["equal"] is True
    assert [len(each["losses"]) for each in found["layouts"]] == [2, 2, 2]
    assert len({each["digest"] for each in found["layouts"]}) == 1
    assert "without stages" in found["not_applicable"][0]["reason"]


SHARDED = EXACT.replace(
    "model = DistributedDataParallel(net)",
    "for part in (net[0], net[2], net):\n    fully_shard(part)\nmodel = net",
).replace(
    "torch.nn.parallel import DistributedDataParallel", "torch.distributed.fsdp import fully_shard"
)


def test_a_loop_with_a_sharded_model(check):
    result, found = check(SHARDED, layouts=PLAIN)
    _, replicated = check(EXACT, layouts=PLAIN[:1])
    assert result.exit_code == 0
    assert {each["digest"] for each in found["layouts"]} == {replicated["layouts"][0]["digest"]}
    assert [each["losses"] for each in found["layouts"]] == [replicated["layouts"][0]["losses"]] * 3
    # Three ranks cannot train it, and four are compared in their place.
    assert [each["replicas"] for each in found["layouts"]] == [1, 2, 4]
    assert "a power of two" in found["not_applicable"][0]["reason"]  # three ranks


@pytest.mark.parametrize("exact", [EXACT, SHARDED], ids=["replicated", "sharded"])
def test_a_loop_of_the_users_that_depends_on_the_rank(check, exact):
    source = exact.replace("while", "net[2].register_forward_hook(skew)\nwhile")
    skew = "def skew(module, inputs, output):\n    return output * (1 + ls.rank())\n"
    result, found = check(skew + source)
    assert result.exit_code == 1
    assert found["first_difference"]["module"] == "2"
    assert found["first_difference"]["step"] == 0


def test_a_layout_has_a_deadline(check):
    result, found = check(
        "import threading\nmodel = nn.Linear(6, 4)\nthreading.Event().wait()", "--timeout", "1"
    )
    assert result.exit_code == 1
    assert "rank 0 had not returned after 1 s" in found["layouts"][0]["failure"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('nothing')", "uses neither ls.exact nor ls.Trainer, .*: add exact = ls.exact"),
        (
            "if not nn:\n    from transformers import Trainer",
            "check: replace Trainer by ExactTrainer, .* lockstep.integrations.transformers",
        ),
        (
            "ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), sgd)",
            "train.py calls ls.Trainer or ls.exact but ends without taking a step with it",
        ),
    ],
)
def test_a_script_that_trains_nothing(check, source, said):
    with pytest.raises(UsageError, match=said):
        check(source)


def test_a_script_that_chooses_its_backend_keeps_it(check):
    _, found = check(
        "ls.shutdown()\nls.init(backend='gloo')\nmodel = nn.Linear(6, 4)" + TRAIN,
        "--ranks=2",
        layouts=layouts,
    )
    ran = [(each["ranks"], each["backend"], each["shared"]) for each in found["layouts"]]
    assert ran == [(2, "gloo", False)]
    assert [each["shared"] for each in found["not_applicable"]] == [False, True]


def test_text_is_a_table_and_sentences(check):
    result, _ = check(HIDDEN_COUNT + TRAIN, as_json=False)
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["layout", "digest", "last", "loss", "seconds", "verdict"]
    assert lines[3].startswith("1 rank, lockstep ")
    assert lines[3].endswith("reference")
    assert lines[4].startswith("2 ranks, lockstep ")
    assert lines[4].endswith("different")
    assert "2 ranks, lockstep: step 0, micro-batch 4: module `1` computes" in result.stdout
    assert result.stderr.startswith("1 rank, lockstep: reference, ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["broken.py"], "broken.py, line 1 is not valid Python"),
    ],
)
def test_a_script_that_cannot_run_is_a_usage_error(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def")
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(cli, ["check", *words], catch_exceptions=False)


def test_a_wrong_number_of_steps():
    assert CliRunner().invoke(cli, ["check", "train.py", "--steps", "0"]).exit_code == 2


@pytest.mark.parametrize("ranks", ["0", "a"])
def test_wrong_numbers_of_ranks(ranks):
    with pytest.raises(UsageError, match=f"--ranks {ranks}: expected numbers of ranks"):
        CliRunner().invoke(cli, ["check", "train.py", "--ranks", ranks], catch_exceptions=False)


FOURIER = """
class Fourier(nn.Linear):
    def forward(self, x):
        return super().forward(torch.fft.rfft(x, n=10).abs())
model = Fourier(6, 4)
"""


def test_operators_that_are_not_portable_are_named(check):
    result, found = check(FOURIER + TRAIN, "--portable", layouts=PLAIN[:1])
    assert result.exit_code == 1
    assert found["equal"]
    reasons = {each["operator"]: each["reason"] for each in found["unportable"]}
    assert reasons["aten._fft_r2c.default"].startswith("FFT: MKL chooses")
    assert reasons["aten.abs.default"] == "complex numbers"
    assert "aten._fft_c2c.default" not in reasons
    assert not [name for name in reasons if "mm" in name]


RECURRENT = """
class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x[:, None])[0][:, 0]
model = nn.Sequential(Recurrent(6, 8, batch_first=True), nn.GELU(), nn.Dropout(), nn.Linear(8, 4))
"""


def test_a_script_with_portable_operators(check):
    result, _ = check(RECURRENT + TRAIN, "--portable", layouts=PLAIN[:1], as_json=False)
    assert result.exit_code == 0
    assert "All operators of train.py are of families whose bits are portable" in result.output


def test_what_is_not_portable():
    with OperatorNames() as names:
        x = torch.eye(3) + torch.ones(3, 3)
        torch.linalg.inv(x)
        torch.linalg.vector_norm(x)
        x.exponential_()
        x.half() @ x.half()
        x.to_sparse() @ x
        x @ x
    assert {*names.reasons.values()} == {
        "LAPACK: MKL chooses its code by the processor",
        "random numbers that the C library computes",
        "matrix products in float16",
        "sparse tensors",
    }
    assert "aten.linalg_vector_norm.default" not in names.reasons
