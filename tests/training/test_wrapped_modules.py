"""A Trainer refuses modules that exchange gradients by themselves, wherever they are."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.errors import UsageError

SGD = partial(torch.optim.SGD, lr=0.1)


class Measured(nn.Module):
    """A loss that contains another module."""

    def __init__(self, judge):
        super().__init__()
        self.judge = judge.requires_grad_(False)

    def forward(self, outputs, targets):
        return self.judge(outputs - targets).square().mean()


@pytest.fixture
def alone():
    ls.init()
    yield
    ls.shutdown()


def wrapped(wrapper):
    """Return Trainers' arguments with a wrapper at the top, inside, in the loss, beside."""
    other = {"loss": nn.MSELoss(), "optimizer": SGD}
    head = nn.Linear(4, 4)
    yield "model", other | {"model": wrapper(head)}
    yield "model.1", other | {"model": nn.Sequential(nn.Tanh(), wrapper(nn.Linear(6, 4)))}
    yield "model.1", other | {"model": [nn.Tanh(), lambda: wrapper(nn.Linear(6, 4))]}
    yield "loss.judge", other | {"model": head, "loss": Measured(wrapper(nn.Linear(4, 4)))}
    yield (
        "extra_modules[1]",
        other | {"model": head, "extra_modules": [nn.Tanh(), wrapper(nn.Linear(4, 4))]},
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "wrapper", [ls.DistributedDataParallel, DistributedDataParallel, nn.DataParallel]
)
def test_a_wrapper_is_refused_wherever_it_is(wrapper):
    for path, arguments in wrapped(wrapper):
        with pytest.raises(UsageError) as raised:
            ls.Trainer(**arguments)
        assert str(raised.value).startswith(f"{path} is wrapped in {wrapper.__name__}, ")
        assert str(raised.value).endswith(f"pass {path}.module to the Trainer")


@pytest.mark.usefixtures("alone")
def test_a_wrapper_inside_a_compiled_model_is_refused():
    model = ls.DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"^model is wrapped in DistributedDataParallel, "):
        ls.Trainer(torch.compile(model, backend="eager"), nn.MSELoss(), SGD)


def test_fully_sharded_models_are_refused_by_both_names(ranks):
    def refused():
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(sharded[1])
        cpu = torch.device("cpu")
        whole = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=cpu))
        said = []
        for model in (sharded, whole):
            with pytest.raises(UsageError) as raised:
                ls.Trainer(model, nn.MSELoss(), SGD)
            said.append(str(raised.value))
        return said

    for first, second in ranks(refused, 2):
        assert first.startswith("model.1 is sharded by fully_shard, ")
        assert second.startswith("model.0 is wrapped in FullyShardedDataParallel, ")
