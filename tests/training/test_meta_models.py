"""Models on the meta device get the weights of those built with memory, block by block."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import LossError, UsageError
from lockstep.tools.plan.live_tensors import LiveTensors

WIDTH = 64
NORM = partial(nn.BatchNorm1d, WIDTH)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class Block(nn.Module):
    """Attention initializes a bias of its child, as only a parent can that comes after it."""

    def __init__(self, mask=None):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True)
        self.scale = Scale()
        self.register_buffer("mask", torch.ones(6, device="cpu") if mask is None else mask)

    def forward(self, inputs):
        return self.scale(self.layer(inputs)) * self.mask[0]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.factor)

    def forward(self, inputs):
        return inputs * self.factor


class Bare(Scale):
    """Has no method that initializes its parameter."""

    reset_parameters = None

    def __init__(self):
        nn.Module.__init__(self)
        self.factor = nn.Parameter(torch.ones(WIDTH))


class Net(nn.Module):
    def __init__(self, norm=NORM):
        super().__init__()
        self.words = nn.Embedding(5, WIDTH)
        self.norm = norm()
        mask = torch.ones(6, device="cpu")
        self.layers = nn.ModuleList(Block(mask) for _ in range(8))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs):
        hidden = self.words(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden.mean(1)))


class Resetting(Net):
    """Initializes the parameters of its blocks by itself."""

    def reset_parameters(self):
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)


WORDS = torch.arange(96).view(16, 6) % 5
LAYERS = ls.PipelineConfig(blocks="layers")


def make(model, storage, **options):
    options = {"pipeline": LAYERS, "microbatches": 2, "loggers": []} | options
    return ls.Trainer(model, nn.CrossEntropyLoss(), ADAMW, storage=storage, **options)


def on_meta(build):
    with torch.device("meta"):
        return build()


def train(build, storage, **options):
    """Return digests, the next random number, and the most bytes held while it was set up."""
    torch.manual_seed(5)
    model = build()
    with LiveTensors() as live:
        trainer = make(model, storage, **options)
    found = [trainer.digest(), torch.rand(1).item()]
    trainer.step((WORDS, WORDS[:, 0]))
    found.append(trainer.digest())
    if trainer.ema_model is not None:
        found.append(ls.digest(trainer.ema_model))
    return found, live.peak


def list_blocks():
    return [
        partial(nn.Embedding, 5, WIDTH),
        *[Block] * 8,
        nn.Flatten,
        partial(nn.Linear, 6 * WIDTH, 5),
    ]


AVERAGED = {"ema_decay": 0.9}
LISTED = {"pipeline": None}


def train_whole():
    whole, _ = train(Net, "replicated", **AVERAGED)
    built, _ = train(list_blocks, "replicated", **LISTED)
    size = sum(parameter.nbytes for parameter in Net().parameters())
    return whole, built, size


def train_on_meta():
    meta = partial(on_meta, Net)
    replicated, _ = train(meta, "replicated", **AVERAGED)
    sharded, _ = train(meta, "sharded", **AVERAGED)
    given, _ = train(Net, "sharded", **AVERAGED)
    plain, peak = train(meta, "sharded")
    listed, peak_of_list = train(list_blocks, "sharded", **LISTED)
    return [replicated, sharded, given], plain, listed, max(peak, peak_of_list)


def test_the_weights_are_those_of_a_model_built_whole_and_no_rank_holds_it(ranks):
    ((whole, built, size),) = ranks(train_whole, 1)
    for equal, plain, listed, peak in ranks(train_on_meta, 2):
        assert equal == [whole] * 3
        assert plain == whole[:3]
        assert listed[0] == built[0]
        assert listed[2] == built[2]
        # Half of the model, a block, and the block again while it is sent.
        assert peak < 0.85 * size


def load(folder):
    norm = Bare
    found = []
    for storage in ("replicated", "shared", "sharded"):
        trainer = make(on_meta(partial(Net, norm)), storage, **AVERAGED)
        with pytest.raises(LossError, match="the loss is nan"):
            trainer.step((WORDS, WORDS[:, 0]))
        ls.load_weights(trainer.module, folder)
        trainer.step((WORDS, WORDS[:, 0]))
        found += [trainer.digest(), ls.digest(trainer.ema_model)]
    with pytest.raises(UsageError, match=r"of the model, a Resetting, initializes"):
        make(on_meta(Resetting), "sharded")
    return found


def test_what_no_module_initializes_is_loaded(ranks, tmp_path):
    torch.manual_seed(7)
    model = Net(Bare)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    for found in ranks(load, 2, tmp_path):
        assert len({*found}) == 1


def test_integers_need_a_method(ranks):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def build():
        with pytest.raises(UsageError, match=r"^1, a Counted, has integers on the meta device"):
            make(
                on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Counted())),
                "replicated",
                pipeline=None,
            )

    ranks(build, 1)


class Gapped(nn.Module):
    """Its weight is a view of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH)[:, ::2])

    def forward(self, inputs):
        return inputs @ self.weight


def test_a_block_that_cannot_be_divided_is_named(world_of_one):
    blocks = [partial(nn.Linear, WIDTH, WIDTH), Gapped]
    with pytest.raises(UsageError, match=r"cannot divide the parameter 1\.weight with strides"):
        ls.Trainer(blocks, nn.CrossEntropyLoss(), ADAMW, storage="sharded")
