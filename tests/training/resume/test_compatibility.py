"""What must be equal for a training to continue, and what is only said."""

import sys

import pytest

from lockstep.kernel.errors import UsageError
from lockstep.training.resume.compatibility import (
    describe_sources,
    list_changes,
    log_resumed,
    require_same_training,
)

SETTINGS = {
    "model": "torch.nn.modules.container.Sequential",
    "model.0": "torch.nn.modules.linear.Linear",
    "model.0.weight": "float32 [8, 6]",
    "model.0.weight.requires_grad": "True",
    "optimizer": "torch.optim.sgd.SGD",
    "optimizer.param_groups[0].params[0]": "0.weight",
    "optimizer.param_groups[0].lr": "0.1",
    "optimizer.param_groups[0].nesterov": "False",
    "scheduler": "CosineAnnealingLR",
    "scheduler.T_max": "8",
    "restore_schedule": "True",
    "loss": "CrossEntropyLoss",
    "ema_decay": "None",
    "max_grad_norm": "None",
    "pipeline.stages": "1",
    "storage": "replicated",
    "checkpoint": "[]",
}


def training(**changes):
    """Return what a checkpoint says; a change names an entry or a part, such as torch."""
    found = {
        "settings": dict(SETTINGS),
        "environment": {"torch": "2.13.0", "python": "3.11", "processor": "A", "hostname": "one"},
        "sources": {"train.py": "1", "net.py": "2"},
    }
    for name, value in changes.items():
        parts = [part for part in found.values() if isinstance(part, dict) and name in part]
        (parts[0] if parts else found)[name] = value
    return found


def test_the_same_training_has_no_differences():
    require_same_training(training(), training())
    assert list_changes(training(), training(), SETTINGS) == []


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        (
            "model",
            "Other",
            "model is Other, in the checkpoint it is torch.nn.modules.container.Seq",
        ),
        ("model.0.weight", "float32 [9, 6]", "model.0.weight is float32 [9, 6], in the checkpoint"),
        ("optimizer", "Adam", "optimizer is Adam, in the checkpoint it is torch.optim.sgd.SGD"),
        ("optimizer.param_groups[0].params[0]", "1.weight", "params[0] is 1.weight, in the"),
        ("ema_decay", "0.9", "ema_decay is 0.9, in the checkpoint it is None: resume with"),
        ("scheduler", "StepLR", "scheduler is StepLR, in the checkpoint it is CosineAnnealingLR"),
    ],
)
def test_what_is_refused(entry, value, words):
    with pytest.raises(UsageError) as caught:
        require_same_training(training(), training(**{entry: value}))
    assert words in str(caught.value)


def test_a_missing_part_is_refused_from_either_side():
    smaller = training()
    del smaller["settings"]["model.0.weight"]
    with pytest.raises(UsageError, match=r"model\.0\.weight is missing, in the checkpoint it is f"):
        require_same_training(training(), smaller)
    with pytest.raises(UsageError, match=r"is float32 \[8, 6\], in the checkpoint it is missing"):
        require_same_training(smaller, training())


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("torch", "2.14", "torch is 2.14, it was 2.13.0: the bits may differ from now on"),
        ("processor", "B", "processor is B, it was A: the bits may differ from now on"),
        (
            "optimizer.param_groups[0].lr", "0.2",
            "optimizer.param_groups[0].lr is 0.2, it was 0.1 (the checkpoint's is used; "
            "restore_schedule=False in ls.OptimizerConfig uses the new one)",
        ),
        (
            "optimizer.param_groups[0].nesterov", "True",
            "optimizer.param_groups[0].nesterov is True, it was False (the checkpoint's is used)",
        ),
        (
            "scheduler.T_max", "16",
            "scheduler.T_max is 16, it was 8 (the checkpoint's is used; restore_schedule=False in "
            "ls.OptimizerConfig uses the new one)",
        ),
        ("loss", "MSELoss", "loss is MSELoss, it was CrossEntropyLoss"),
        ("train.py", "3", "the source file train.py has changed"),
    ],
)  # fmt: skip
def test_what_is_said(entry, value, said):
    require_same_training(training(), training(**{entry: value}))
    used = {name: text for name, text in SETTINGS.items() if name != "loss"}
    assert list_changes(training(), training(**{entry: value}), used) == [said]


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("restore_schedule", "False"),
        ("pipeline.stages", "2"),
        ("storage", "shared"),
        ("checkpoint", "['m']"),
        ("hostname", "b"),
    ],
)
def test_what_may_differ(entry, value):
    require_same_training(training(), training(**{entry: value}))
    assert list_changes(training(), training(**{entry: value}), SETTINGS) == []


def test_another_decay_of_the_average_is_said_and_not_refused():
    one = training(ema_decay="0.9")
    other = training(ema_decay="0.99")
    require_same_training(one, other)
    assert list_changes(one, other, {}) == ["ema_decay is 0.99, it was 0.9"]


def test_sources_are_those_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("own_module")
    try:
        before = describe_sources()
        assert not [name for name in before if "site-packages" in name or "src/lockstep/" in name]
        (tmp_path / "own_module.py").write_text("x = 2\n")
        after = describe_sources()
        assert {name for name in before if before[name] != after[name]} == {"own_module.py"}
    finally:
        del sys.modules["own_module"]


def test_the_first_differences_are_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log_resumed(tmp_path / "runs" / "x", 7, [f"difference {number}" for number in range(7)])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "lockstep: resumed after step 7 from runs/x"
    assert lines[1:6] == [f"lockstep: difference {number}" for number in range(5)]
    assert lines[6:] == ["lockstep: and 2 more differences; the record has all"]
