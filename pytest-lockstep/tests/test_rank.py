"""What a test on ranks sees: its group, its arguments, its fixtures, pytest's own features."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lockstep.comm import backend

ARGUMENTS = """
import sys
import warnings

import pytest_lockstep

VALUES = {"two": lambda: 2}

class Point:
    def __init__(self, x):
        self.x = x

@pytest.fixture(scope="module")
def shared():
    return {"point": Point(3), "pid": os.getpid()}

@pytest.fixture
def nothing():
    return None

ran = []

def setup_module():
    ran.append("module")

def setup_function():
    ran.append("function")

@pytest_lockstep.rank_fixture(autouse=True)
def automatic(rank):
    ran.append(rank)

@pytest.fixture
def variable(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_FIXTURE", "set")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "packages")

@pytest_lockstep.rank_fixture
def model(rank, shared):
    made = torch.nn.Linear(1, 1)
    made.hook = lambda: rank  # no other process could receive it
    made.pid = os.getpid()
    yield made
    print("torn down on", dist.get_rank(), "of", dist.get_world_size())

@pytest.mark.ranks(1, 2, 3)
def test_group(rank, world_size, group):
    assert (dist.get_rank(group), dist.get_world_size()) == (rank, world_size)
    assert group is dist.group.WORLD
    assert dist.get_backend() == "lockstep"
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size + 1))

@pytest.mark.ranks(2)
def test_fixtures(rank, shared, nothing, variable, model, tmp_path, request):
    assert shared["point"].x == 3
    assert shared["pid"] != os.getpid() == model.pid
    assert nothing is None
    assert model.hook() == rank
    assert os.environ["FROM_FIXTURE"] == "set"
    assert os.getcwd() == str(tmp_path)
    assert sys.path[0] == str(tmp_path / "packages")
    assert sorted(ran, key=str) == [rank, "function", "module"]
    (tmp_path / str(rank)).write_text("")
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    assert request.node.name == "test_fixtures[2ranks]"

@pytest.mark.parametrize("value", [lambda: 2, 3], ids=["function", "number"])
@pytest.mark.parametrize("shared", [1], indirect=True)
@pytest.mark.ranks(2)
def test_parameters(value, shared, rank):
    assert callable(value) or value == 3

@pytest.mark.ranks(2)
def test_acts_in_the_rank(rank, monkeypatch, capsys, capfd_text, caplog, recwarn):
    import logging
    monkeypatch.setattr(os, "getcwd", lambda: "patched")
    assert os.getcwd() == "patched"
    print("said by", rank)
    assert capsys.readouterr().out == f"said by {rank}\\n"
    logging.getLogger("mine").warning("logged by %d", rank)
    assert caplog.messages == [f"logged by {rank}"]
    with pytest.raises(ValueError, match="wrong"):
        raise ValueError("wrong")
    with pytest.warns(UserWarning):
        warnings.warn("seen")
    warnings.warn("kept")
    assert str(recwarn.pop().message) == "kept"

@pytest.fixture
def capfd_text():
    return "text"

@pytest.mark.ranks(2)
def test_fd(rank, capfd):
    os.write(1, b"raw")
    assert capfd.readouterr().out == "raw"

counter = []

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(2))
def test_state_does_not_leak(number):
    counter.append(number)
    os.environ["LEAKED"] = "1"
    assert counter == [number]

def test_state_did_not_leak_here():
    assert "LEAKED" not in os.environ and not counter

class TestMethods:
    kept = []

    @classmethod
    def setup_class(cls):
        cls.kept.append("class")

    def setup_method(self):
        self.made = lambda: "by setup_method"

    @pytest.fixture(autouse=True)
    def attribute(self):
        self.value = 5

    @pytest.mark.ranks(2)
    def test_method(self, rank):
        assert self.value == 5
        assert self.made() == "by setup_method"
        assert self.kept == ["class"]  # not twice: the rank was not forked from pytest's process

    def test_plain(self):
        assert self.value == 5 and self.made() and self.kept == ["class"]
"""


def test_a_test_sees_its_group_its_arguments_and_its_fixtures(run):
    result = run(ARGUMENTS, "-v", "-rP", "-W", "error")
    result.assert_outcomes(passed=13)
    result.stdout.fnmatch_lines(
        [
            "*Captured stdout (rank 0)*",
            "torn down on 0 of 2",
            "*Captured stdout (rank 1)*",
            "torn down on 1 of 2",
        ]
    )


@pytest.mark.ranks(1, 2, backend=("gloo", "lockstep"))
def test_the_marker_chooses_the_backends(request, world_size):
    chosen = request.node.callspec.id.rpartition("-")[2]
    assert chosen in ("gloo", "lockstep")
    assert dist.get_backend() == (chosen if backend.available() else "gloo")
