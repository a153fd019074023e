"""A Trainer refuses modules, at any depth, that it cannot train alike in every layout."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import lockstep as ls
from lockstep.kernel.errors import UsageError

SGD = partial(torch.optim.SGD, lr=0.1)


class Measured(nn.Module):
    """A loss that contains another module."""

    def __init__(self, judge):
        super().__init__()
        self.judge = judge.requires_grad_(False)

    def forward(self, outputs, targets):
        return self.judge(outputs - targets).square().mean()


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


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    "wrapper",
    [ls.DataParallel, DistributedDataParallel, nn.DataParallel],
)
def test_a_wrapper_is_refused_wherever_it_is(wrapper):
    for path, arguments in wrapped(wrapper):
        with pytest.raises(UsageError) as raised:
            ls.Trainer(**arguments)
        assert str(raised.value).startswith(f"{path} is wrapped in {wrapper.__name__}, ")
        assert str(raised.value).endswith(f"pass {path}.module to the Trainer")


@pytest.mark.usefixtures("world_of_one")
def test_a_wrapper_inside_a_compiled_model_is_refused():
    model = DistributedDataParallel(nn.Linear(4, 4))
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


class Graph(nn.Module):
    """Multiplies by a sparse matrix: in one buffer, or built from its indices and values."""

    def __init__(self, matrix, is_whole=True):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        if is_whole:
            self.register_buffer("matrix", matrix)
        else:
            self.register_buffer("indices", matrix.indices())
            self.register_buffer("values", matrix.values())

    def forward(self, inputs):
        matrix = torch.sparse_coo_tensor(self.indices, self.values, (6, 6), check_invariants=True)
        return self.layer((matrix @ inputs.t()).t())


def with_buffer(tensor):
    module = nn.Linear(6, 4)
    module.register_buffer("table", tensor)
    return module


def with_parameter(tensor):
    module = nn.Linear(6, 4)
    module.scale = nn.Parameter(tensor)
    return module


def observed():
    """Return a model of quantization-aware training."""
    model = nn.Sequential(nn.Linear(6, 4))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings(action="ignore"):  # torch announces a successor
        return quantization.prepare_qat(model.train())


def train_quantized():
    """Return the digest of a training with ranges that were observed before."""
    torch.manual_seed(1)
    model = observed()
    inputs = torch.randn(12, 6)
    model(inputs)
    model.apply(quantization.disable_observer)
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=4, loggers=[])
    for _ in range(3):
        trainer.step((inputs, torch.arange(12) % 4))
    return trainer.digest()


def test_quantization_aware_training_with_fixed_ranges(ranks):
    assert len({digest for n in (1, 2, 3) for digest in ranks(train_quantized, n)}) == 1


BASE = torch.ones(1, 4)
SPARSE = torch.eye(6).to_sparse().coalesce()


def refused():
    """Return arguments of Trainers, each with the beginning of its refusal."""
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    return [
        (
            {"model": nn.Sequential(nn.LazyLinear(4))},
            "the parameter model.0.weight has no shape yet",
        ),
        ({"model": [lambda: nn.LazyLinear(4)]}, "the parameter model.0.weight has no shape yet"),
        ({"model": nn.LazyBatchNorm1d(affine=False)}, "the buffer model.running_mean has no shape"),
        ({"model": Graph(SPARSE)}, "the buffer model.matrix is a sparse tensor (torch.sparse_coo)"),
        (
            {"model": with_buffer(TwoTensor(torch.ones(2), torch.ones(2)))},
            "the buffer model.table is a TwoTensor, which consists of other tensors",
        ),
        ({"model": with_buffer(quantized)}, "the buffer model.table is a quantized tensor"),
        (
            {"model": nn.Sequential(nn.Embedding(6, 4, scale_grad_by_freq=True))},
            "model.0 has scale_grad_by_freq=True, which counts rows in each micro-batch",
        ),
        (
            {"model": observed()},
            "model.0.weight_fake_quant is a FusedMovingAvgObsFakeQuantize, which observes a range",
        ),
        ({"model": torch.jit.script(nn.Linear(6, 4))}, "model is compiled by TorchScript"),
        (
            {"model": nn.Sequential(torch.jit.trace(nn.Linear(6, 4), torch.ones(2, 6)))},
            "model.0 is compiled by TorchScript",
        ),
        ({"loss": torch.jit.script(nn.MSELoss())}, "loss is compiled by TorchScript"),
        ({"model": nn.Embedding(4, 2, max_norm=1)}, "model has max_norm=1, "),
        (
            {"extra_modules": [nn.Sequential(nn.EmbeddingBag(4, 2, max_norm=2.0))]},
            "extra_modules[0].0 has max_norm=2.0, ",
        ),
        ({"model": with_parameter(BASE.expand(8, 4))}, "the parameter scale is an expanded tensor"),
        (
            {"model": nn.Sequential(with_buffer(BASE), with_buffer(BASE.expand(8, 4)))},
            "1.table is an expanded tensor over the memory of 0.table",
        ),
    ]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_kinds_of_modules_and_tensors_that_are_refused():
    for arguments, beginning in refused():
        with pytest.raises(UsageError) as raised:
            ls.Trainer(
                **{"model": nn.Linear(6, 4), "loss": nn.MSELoss(), "optimizer": SGD} | arguments
            )
        assert str(raised.value).startswith(beginning)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_what_the_refusals_advise_works():
    lazy = nn.Sequential(nn.LazyLinear(4))
    lazy(torch.ones(2, 6))
    for model in (lazy, Graph(SPARSE, is_whole=False)):
        trainer = ls.Trainer(model, nn.MSELoss(), SGD)
        before = trainer.digest()
        trainer.step((torch.ones(8, 6), torch.ones(8, 4)))
        assert trainer.digest() != before
