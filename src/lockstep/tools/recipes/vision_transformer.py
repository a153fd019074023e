"""Vision transformers (Dosovitskiy et al., 2021), as a sequence of blocks.

    images ─ patches ─ class token, positions ─ encoder layers ─ norm ─ class token ─ head

    encoder layer   x ─┬─ norm ─ attention ─ (+) ─┬─ norm ─ mlp ─ (+)
                       └────────────────────┘     └─────────────┘

Parameters have the names of published weights ("encoder.layers.encoder_layer_0.ln_1.weight").
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["VisionTransformer", "vit_b_16"]

EPSILON = 1e-6  # of the layer norms
POSITION_STD = 0.02  # of the initial position embedding

LayerNorm = partial(nn.LayerNorm, eps=EPSILON)


class VisionTransformer(nn.Module):
    """A vision transformer that maps images [n, 3, size, size] to scores [n, classes].

    Args:
        size: The width and height of the images, a multiple of `patch`, in pixels.
        patch: The width and height of a patch, in pixels.
        layers: The number of encoder layers.
        heads: The number of attention heads.
        width: The number of features per token, a multiple of `heads`.
        inner: The number of inner features of the MLPs.
        classes: The number of classes.
    """

    def __init__(
        self,
        size: int,
        patch: int,
        layers: int,
        heads: int,
        width: int,
        inner: int,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.conv_proj = nn.Conv2d(3, width, patch, stride=patch)
        self.encoder = Encoder((size // patch) ** 2 + 1, layers, heads, width, inner)
        head = nn.Linear(width, classes)
        self.heads = nn.Sequential(OrderedDict(head=head))
        self.embedding = Embedding(self)
        self.class_output = ClassOutput()
        std = math.sqrt(1 / (3 * patch * patch))
        nn.init.trunc_normal_(self.conv_proj.weight, std=std)
        for parameter in (self.conv_proj.bias, head.weight, head.bias):
            assert parameter is not None
            nn.init.zeros_(parameter)

    def blocks(self) -> list[nn.Module]:
        """Return the modules that `forward` calls in sequence, for pipeline stages."""
        encoder = self.encoder
        return [self.embedding, *encoder.layers, encoder.ln, self.class_output, *self.heads]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        outputs = images
        for block in self.blocks():
            outputs = block(outputs)
        return outputs


class Embedding(nn.Module):
    """The first block: images [n, 3, size, size] to tokens [n, 1 + patches, width].

    Its parameters belong to the network, whose state dict thus has the published names. They are on
    the stage of this block, because tensors that belong to no block are on the first stage.
    """

    def __init__(self, network: VisionTransformer) -> None:
        super().__init__()
        self._network = (network,)  # in a tuple, so that it is not registered as a child

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the class token and the patches, with their positions added."""
        network = self._network[0]
        patches = network.conv_proj(images).flatten(2).transpose(1, 2)
        first = network.class_token.expand(len(images), -1, -1)
        tokens = torch.cat([first, patches], dim=1)
        return tokens + network.encoder.pos_embedding


class Encoder(nn.Module):
    """The position embedding, the encoder layers and the last norm, which the network calls."""

    def __init__(self, tokens: int, layers: int, heads: int, width: int, inner: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width))
        nn.init.normal_(self.pos_embedding, std=POSITION_STD)
        self.layers = nn.Sequential(
            OrderedDict(
                (f"encoder_layer_{number}", EncoderLayer(heads, width, inner))
                for number in range(layers)
            )
        )
        self.ln = LayerNorm(width)


class EncoderLayer(nn.Module):
    """Attention and an MLP, each after a norm and added to its input."""

    def __init__(self, heads: int, width: int, inner: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width)
        self.self_attention = SelfAttention(heads, width)
        self.ln_2 = LayerNorm(width)
        # The published names "mlp.0" and "mlp.3" count two dropouts.
        first, last = nn.Linear(width, inner), nn.Linear(inner, width)
        self.mlp = nn.Sequential(OrderedDict({"0": first, "1": nn.GELU(), "3": last}))
        for linear in (first, last):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens after this layer; the shape is kept."""
        tokens = tokens + self.self_attention(self.ln_1(tokens))
        tokens = tokens + self.mlp(self.ln_2(tokens))
        return tokens


class SelfAttention(nn.Module):
    """Self-attention with several heads, and the parameters of `nn.MultiheadAttention`."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the attention outputs of tokens [n, tokens, width], in the same shape."""
        projected = F.linear(tokens, self.in_proj_weight, self.in_proj_bias)
        heads = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind())
        outputs: torch.Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return outputs


class ClassOutput(nn.Module):
    """The features of the class token, [n, width], of tokens [n, tokens, width]."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the first token."""
        return tokens[:, 0]


def vit_b_16(size: int = 224, classes: int = 1000) -> VisionTransformer:
    """Return ViT-B/16: 86,567,656 parameters with 1,000 classes and images of 224 pixels."""
    return VisionTransformer(
        size, patch=16, layers=12, heads=12, width=768, inner=3072, classes=classes
    )
