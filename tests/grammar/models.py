"""Models: blocks drawn one after another, each fitting the shape that the one before leaves.

family      input of a sample            becomes rows by
rows        (6,)                         itself
pair        (6,) and (4,)                a layer for each
pictures    (2, 6, 6)                    flattening or pooling
series      (7, 5)                       an average over time
words       (7,) of 13 words             an embedding, then as a series
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from grammar import blocks as own
from grammar.drawing import Draw, built, described
from lockstep.kernel import spec

FAMILIES = ("rows", "rows", "rows", "pair", "pictures", "pictures", "series", "words")
FORMS = ("sequential", "sequential", "sequential", "chain", "named", "carrying", "factories")
WORDS = 13


@dataclass(frozen=True)
class Again:
    """Stands for a block that comes a second time."""

    block: int


@dataclass(frozen=True)
class Model:
    """A model as it was drawn; `changes` are made to the list of its built blocks."""

    family: str
    form: str
    blocks: tuple[Any, ...]
    changes: tuple[Callable[..., None], ...]
    dtype: torch.dtype
    channels_last: bool
    classes: int

    def __str__(self) -> str:
        """Describe the model in a line."""
        parts = [f"{self.form} of {self.family}: {', '.join(map(described, self.blocks))}"]
        parts += [described(change) for change in self.changes]
        parts += [described(self.dtype)] if self.dtype != torch.float32 else []
        parts += ["channels_last"] if self.channels_last else []
        return "; ".join(parts)

    @property
    def is_chain(self) -> bool:
        """Whether it has blocks, so that it can be cut and recomputed."""
        return self.form not in ("whole", "with loss", "with loss in a dict")

    def factories(self) -> list[Callable[[], nn.Module]]:
        """Return a callable for each block."""
        return [partial(built, block) for block in self.blocks]

    def build(self, seed: int) -> nn.Module:
        """Return the model, with weights drawn under `seed`."""
        layers: list[nn.Module] = []
        torch.manual_seed(seed)
        for number, block in enumerate(self.blocks):
            if self.form == "factories":
                spec.seed_generators(spec.key(seed, number))
            layers.append(layers[block.block] if isinstance(block, Again) else built(block))
        for change in self.changes:
            change(layers)
        model = self._model(layers)
        if self.dtype != torch.float32:  # which some blocks have left on purpose
            model = model.to(self.dtype)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def _model(self, layers: list[nn.Module]) -> nn.Module:
        makers = {"chain": own.Chain, "chain with loss": own.Chain, "named": own.Named}
        if self.form in makers:
            return makers[self.form](*layers)
        if self.form.startswith("with loss"):
            *body, loss = layers
            return own.WithLoss(nn.Sequential(*body), loss, self.form.rpartition(" ")[2])
        return own.Whole(*layers) if self.form == "whole" else nn.Sequential(*layers)

    def units(self, model: Any) -> list[nn.Module]:
        """Return the blocks of a model that `build` made, or the model as its one unit."""
        if self.form.startswith("chain"):
            return list(model.layers)
        if self.form == "named":
            return [model.first, *model.rest]
        return list(model) if self.is_chain else [model]

    def shape(self) -> list[tuple[int, ...]]:
        """Return the shapes of a sample's inputs."""
        return {
            "rows": [(6,)],
            "pair": [(6,), (4,)],
            "pictures": [(2, 6, 6)],
            "series": [(7, 5)],
            "words": [(7,)],
        }[self.family]


# --- changes to the list of blocks ----------------------------------------------------------------


def frozen(block: int, layers: list[nn.Module]) -> None:
    """Freeze a block."""
    layers[block].requires_grad_(False)


def tied(first: int, second: int, layers: list[nn.Module]) -> None:
    """Let two layers have one weight."""
    layers[second].weight = layers[first].weight


def gradient_scaled(block: int, layers: list[nn.Module]) -> None:
    """Scale the gradients of a block by hooks on its parameters."""
    for parameter in layers[block].parameters():
        if parameter.requires_grad:
            parameter.register_hook(_halved)


def outputs_hooked(block: int, layers: list[nn.Module]) -> None:
    """Change the outputs of a block by a forward hook."""
    layers[block].register_forward_hook(_doubled)


def gradient_noise(block: int, layers: list[nn.Module]) -> None:
    """Draw random numbers in backward, in hooks on the parameters of a block."""
    for parameter in layers[block].parameters():
        if parameter.requires_grad:
            parameter.register_hook(_with_noise)


def module_hooked(block: int, layers: list[nn.Module]) -> None:
    """Change `.grad` in a backward hook of the module."""
    layers[block].register_full_backward_hook(_halved_in_place)


def accumulation_hooked(block: int, layers: list[nn.Module]) -> None:
    """Change `.grad` in hooks that run when it has been accumulated."""
    for parameter in layers[block].parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_grad_halved)


def tied_by_memory(first: int, second: int, layers: list[nn.Module]) -> None:
    """Let the weights of two layers be two parameters over one memory."""
    layers[second].weight.data = layers[first].weight.data


def _with_noise(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 0.01 * torch.randn_like(gradient)


def _halved_in_place(module: nn.Module, inputs: Any, outputs: Any) -> None:
    for parameter in module.parameters():
        _grad_halved(parameter)


def _grad_halved(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def _doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


# --- the grammar ----------------------------------------------------------------------------------


def draw_model(draw: Draw, smallest: int, classes: int, tail: list[Any], loss: Any) -> Model:
    """Draw a model whose micro-batches hold at least `smallest` samples.

    `tail` are blocks that the loss wants at the end; with a `loss` the model returns it.
    """
    family = draw.choice(FAMILIES)
    form = draw.choice(FORMS) if draw.chance(0.85) else "whole"
    if family == "pair":
        form = draw.pick("chain", "named")
    if loss is not None:
        form = draw.pick("chain with loss", "with loss", "with loss in a dict")
        family = "rows" if family == "pair" else family
    dtype = draw.choices([torch.float32, torch.float64, torch.bfloat16], [88, 7, 5])[0]
    drawn = _Blocks(draw, smallest, dtype)
    drawn.body(family, draw.randint(1, 6))
    drawn.head(classes)
    blocks = [*_without_crash(drawn.blocks), *tail]
    changes = []
    channels_last = family == "pictures" and form != "factories" and draw.chance(0.3)
    if loss is not None:
        blocks = _with_loss(blocks, loss, form)
    elif form == "carrying" and len(blocks) > 1:
        blocks = _carrying(blocks, draw.pick(*["itself"] * 6, "view", "detached"))
    elif form == "factories":
        dtype = torch.float32
    else:
        changes = drawn.changes(blocks)
    return Model(family, form, tuple(blocks), tuple(changes), dtype, channels_last, classes)


def _carrying(blocks: list[Any], alias: str) -> list[Any]:
    """Wrap blocks so that a dict travels beside their tensor."""
    first, *middle, last = blocks
    return [
        partial(own.Opening, first, alias),
        *(partial(own.Passing, block) for block in middle),
        partial(own.Closing, last),
    ]


def _without_crash(blocks: list[Any]) -> list[Any]:
    """Leave out ChannelsLast before a GroupNorm whose input may need no gradient: torch crashes."""
    kinds = [getattr(block, "func", block) for block in blocks]
    before = kinds[: kinds.index(nn.GroupNorm)] if nn.GroupNorm in kinds else []
    crashes = nn.Conv2d not in before
    return [
        block
        for number, block in enumerate(blocks)
        if not (crashes and own.ChannelsLast in before[number : number + 1])
    ]


def _with_loss(blocks: list[Any], loss: Any, form: str) -> list[Any]:
    """Append the loss to the blocks, as the form has it."""
    if form != "chain with loss":
        return [*blocks, loss]
    if len(blocks) < 2:
        blocks = [*blocks, partial(nn.Identity)]
    first, *middle, last = blocks
    return [
        partial(own.LossOpening, first),
        *(partial(own.Passing, block) for block in middle),
        partial(own.LossClosing, last, loss),
    ]


class _Blocks:
    """The blocks drawn so far, and what the last one leaves.

    `width` is that of a row, of a time step, or the number of channels; `writable` says
    whether the next block may write into its input, which plain PyTorch allows only where
    backward does not need it.
    """

    def __init__(self, draw: Draw, smallest: int, dtype: torch.dtype) -> None:
        self.draw = draw
        self.smallest = smallest
        self.dtype = dtype
        self.blocks: list[Any] = []
        self.width = 6
        self.writable = False

    def body(self, family: str, count: int) -> None:
        """Draw `count` blocks or a few more, and leave rows."""
        draw = self.draw
        full = self.dtype == torch.float32
        if family == "pair":
            self.width = draw.pick(4, 6, 8)
            first, second = (partial(nn.Linear, width, self.width) for width in (6, 4))
            self.add(partial(own.Both, first, second), writable=True)
        elif family == "rows":
            self.writable = full
            if draw.chance(0.1):
                self.add(partial(own.Scaled))
        elif family == "pictures":
            self.width = 2
            for _ in range(count):
                self.picture_block()
            self.add(draw.pick(partial(nn.Flatten), partial(own.Mean, 2, 3)))
            self.width = self.width * 36 if self.blocks[-1].func is nn.Flatten else self.width
            count = draw.pick(0, 1)
        else:
            self.width = 5
            if family == "words":
                self.width = draw.pick(4, 6)
                options = draw.some(padding_idx=0)
                if draw.chance(0.06):  # the first is refused: every replica has a micro-batch
                    options = {"max_norm": 0.5} if self.smallest == 1 else {"sparse": True}
                elif draw.chance(0.03):  # refused
                    options = {"scale_grad_by_freq": True}
                self.add(partial(nn.Embedding, WORDS, self.width, **options), writable=True)
            for _ in range(min(count, 4)):
                self.series_block()
            self.add(partial(own.Mean, 1), writable=True)
            count = draw.pick(0, 1)
        for _ in range(count):
            self.row_block()

    def head(self, classes: int) -> None:
        """Add the last layer."""
        self.add(partial(nn.Linear, self.width, classes))

    def add(self, *blocks: Any, width: int | None = None, writable: bool = False) -> None:
        """Append blocks and say what they leave."""
        self.blocks += blocks
        self.width = self.width if width is None else width
        self.writable = writable

    # --- one block for each kind of shape -----------------------------------------------------

    def activation(self) -> None:
        """Add an activation, in place where that is allowed."""
        kinds = (nn.ReLU, nn.LeakyReLU, nn.ELU)
        if self.writable and self.draw.chance(0.5):
            self.add(partial(self.draw.choice(kinds), inplace=True))
        else:
            self.add(partial(self.draw.choice((*kinds, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid))))

    def row_block(self) -> None:
        """Add a block of rows."""
        draw = self.draw
        width = self.width
        wide = draw.pick(4, 6, 8)
        linear = partial(nn.Linear, width, wide, **draw.some(bias=False))
        square = partial(nn.Linear, width, width)
        choices: list[Callable[[], None]] = [
            *[lambda: self.add(linear, width=wide, writable=True)] * 4,
            *[self.activation] * 3,
            lambda: self.add(partial(nn.Dropout, 0.3, **self.in_place()), writable=True),
            lambda: self.add(partial(nn.LayerNorm, width), writable=True),
            lambda: self.add(partial(nn.RMSNorm, width)),
            lambda: self.add(partial(own.Residual, square, partial(nn.Tanh)), writable=True),
            lambda: self.add(
                partial(own.Residual, partial(nn.ReLU, **self.in_place()), square), writable=True
            ),
            lambda: self.add(
                partial(own.Checkpointed, square, partial(nn.Dropout, 0.3), partial(nn.Tanh))
            ),
            lambda: self.add(partial(own.Statistics, width, draw.chance(0.7)), writable=True),
            lambda: self.add(partial(own.Sometimes, width)),
            lambda: self.add(partial(own.Noise), writable=True),
            lambda: self.add(partial(own.Rounded), writable=True),
            lambda: self.add(partial(nn.PReLU)),
            lambda: self.add(partial(own.weight_norm, linear), width=wide, writable=True),
            lambda: self.add(
                partial(own.Residual, partial(own.Checkpointed, square, partial(nn.Tanh)))
            ),
            lambda: self.add(partial(nn.AlphaDropout, 0.2)),
        ]
        if width in (4, 6, 8):
            choices.append(lambda: self.add(partial(nn.GroupNorm, 2, width), writable=True))
        if self.smallest > 1:
            options = draw.some(momentum=[0.3, None], affine=False)
            norm = partial(nn.BatchNorm1d, width, **options)
            choices += [lambda: self.add(norm, writable=True)] * 3
        if self.dtype == torch.float32:
            double = partial(own.Cast, torch.float64, square, partial(nn.Tanh))
            half = partial(own.Cast, torch.bfloat16, square)
            to = partial(own.ToComplex, width, 4)
            back = partial(own.FromComplex)
            choices += [
                lambda: self.add(double, writable=True),
                lambda: self.add(half, writable=True),
                lambda: self.add(to, back, width=8, writable=True),
                lambda: self.add(partial(own.spectral_norm, linear), width=wide, writable=True),
            ]
        if draw.chance(0.02):  # a tensor of several blocks of the norm, and of several pieces
            many = draw.pick(9_000, 40_000)
            pair = [partial(nn.Linear, width, many), partial(nn.Linear, many, 4)]
            choices = [lambda: self.add(*pair, width=4, writable=True)]
        if draw.chance(0.01):
            choices = [
                lambda: self.add(partial(own.PythonNoise), writable=True),
                lambda: self.add(partial(own.Teacher, width), writable=True),
            ]
        if draw.chance(0.02):
            gapped = partial(own.Gapped, width, 4, draw.chance(0.5))
            choices = [lambda: self.add(gapped, width=4, writable=True)]
        draw.choice(choices)()

    def picture_block(self) -> None:
        """Add a block of pictures, which stay 6 by 6."""
        draw = self.draw
        width = self.width
        wide = draw.pick(2, 4, 6)
        convolution = partial(nn.Conv2d, width, wide, 3, padding=1, **draw.some(bias=False))
        square = partial(nn.Conv2d, width, width, 3, padding=1, bias=False)
        norm = partial(nn.BatchNorm2d, width, **draw.some(momentum=[0.3, None]))
        grouped = partial(nn.Conv2d, width, 2 * width, 3, padding=1, groups=width)
        one = partial(nn.Conv2d, width, wide, 1)
        back = partial(nn.ConvTranspose2d, width, wide, 3, padding=1)
        rectifier = partial(nn.ReLU, **self.in_place())
        draw.choice(
            [
                *[lambda: self.add(convolution, width=wide, writable=True)] * 4,
                *[lambda: self.add(norm, writable=True)] * 3,
                *[self.activation] * 3,
                lambda: (
                    self.add(grouped, width=2 * width, writable=True)
                    if width < 6
                    else self.add(one, width=wide, writable=True)
                ),
                lambda: self.add(back, width=wide, writable=True),
                lambda: self.add(partial(nn.GroupNorm, 2, width), writable=True),
                lambda: self.add(partial(nn.InstanceNorm2d, width, affine=True), writable=True),
                lambda: self.add(partial(nn.Dropout2d, 0.3, **self.in_place()), writable=True),
                lambda: self.add(partial(nn.MaxPool2d, 3, 1, 1)),
                lambda: self.add(partial(nn.AvgPool2d, 3, 1, 1), writable=True),
                lambda: self.add(partial(own.Residual, square, norm), writable=True),
                lambda: self.add(partial(own.Residual, rectifier, square, norm), writable=True),
                lambda: self.add(partial(own.Checkpointed, square, partial(nn.Tanh))),
                lambda: self.add(partial(own.ChannelsLast)),
            ]
        )()

    def series_block(self) -> None:
        """Add a block of series, which stay 7 long."""
        draw = self.draw
        width = self.width
        wide = draw.pick(4, 6)
        options: dict[str, Any] = draw.some(bidirectional=True)
        if draw.chance(0.3):
            options |= {"num_layers": 2, "dropout": 0.3}
        factor = 2 if "bidirectional" in options else 1
        kind = draw.pick(nn.GRU, nn.LSTM, nn.RNN)
        recurrent = partial(own.Recurrent, kind, width, wide, **options)
        choices: list[Callable[[], None]] = [
            *[lambda: self.add(recurrent, width=factor * wide)] * 2,
            lambda: self.add(partial(nn.LayerNorm, width), writable=True),
            lambda: self.add(partial(own.OverTime, width, wide), width=wide, writable=True),
            lambda: self.add(partial(nn.Linear, width, wide), width=wide, writable=True),
            lambda: self.add(partial(nn.Dropout, 0.3, **self.in_place()), writable=True),
            self.activation,
        ]
        if width % 2 == 0:
            layer = partial(
                nn.TransformerEncoderLayer, width, 2, 9, dropout=0.2, batch_first=True,
                norm_first=draw.chance(0.5), activation=draw.pick("relu", "gelu"),
            )  # fmt: skip
            attention = partial(own.Attention, width, 2, draw.pick(0.0, 0.2))
            choices += [
                lambda: self.add(layer, writable=True),
                lambda: self.add(partial(own.Checkpointed, layer), writable=True),
                *[lambda: self.add(attention, writable=True)] * 2,
            ]
        draw.choice(choices)()

    def in_place(self) -> dict[str, bool]:
        """Return the option of a layer that writes into its input, where it may."""
        return {"inplace": True} if self.writable and self.draw.chance(0.5) else {}

    # --- what is done to several blocks ---------------------------------------------------------

    def changes(self, blocks: list[Any]) -> list[Callable[..., None]]:
        """Draw ties, frozen blocks, hooks, and blocks that come again (which adds to `blocks`)."""
        draw = self.draw
        found = []
        linear = [
            number
            for number, block in enumerate(blocks)
            if isinstance(block, partial) and block.func is nn.Linear
        ]
        pairs = [
            (a, b) for a in linear for b in linear if a < b and blocks[a].args == blocks[b].args
        ]
        if pairs and draw.chance(0.5):
            tie = tied_by_memory if draw.chance(0.1) else tied
            found.append(partial(tie, *draw.choice(pairs)))
        if len(linear) > 1 and draw.chance(0.15):
            found.append(partial(frozen, draw.choice(linear)))
        hooks = [gradient_scaled, gradient_noise, outputs_hooked, accumulation_hooked]
        if linear and draw.chance(0.2):
            found.append(partial(draw.choice(hooks), draw.choice(linear)))
        # A module with a backward hook returns a view, which may not be written into.
        calm = [n for n in linear if "inplace" not in described(blocks[n + 1 : n + 2])]
        if calm and draw.chance(0.06):
            found.append(partial(module_hooked, draw.choice(calm)))
        squares = [n for n in linear if n and blocks[n].args[0] == blocks[n].args[1]]
        if squares and draw.chance(0.4):
            chosen = draw.choice(squares)
            blocks[chosen + 1 : chosen + 1] = [partial(nn.Tanh), Again(chosen)]
            found = []
        return found
