"""ViT-B/16 without torchvision: its size, its names, its arithmetic, its blocks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.tools.recipes.vision_transformer import VisionTransformer, vit_b_16

LAYER = {
    "ln_1.weight": (768,),
    "ln_1.bias": (768,),
    "self_attention.in_proj_weight": (2304, 768),
    "self_attention.in_proj_bias": (2304,),
    "self_attention.out_proj.weight": (768, 768),
    "self_attention.out_proj.bias": (768,),
    "ln_2.weight": (768,),
    "ln_2.bias": (768,),
    "mlp.0.weight": (3072, 768),
    "mlp.0.bias": (3072,),
    "mlp.3.weight": (768, 3072),
    "mlp.3.bias": (768,),
}


def small():
    torch.manual_seed(0)
    model = VisionTransformer(32, 16, 2, 2, width=8, inner=16, classes=5)
    nn.init.normal_(model.heads[0].weight)  # it begins with zeros
    nn.init.normal_(model.class_token)
    return model


def test_names_and_shapes_are_the_published_ones():
    with torch.device("meta"):
        state = vit_b_16().state_dict()
    expected = {
        "class_token": (1, 1, 768),
        "conv_proj.weight": (768, 3, 16, 16),
        "conv_proj.bias": (768,),
        "encoder.pos_embedding": (1, 197, 768),
        "encoder.ln.weight": (768,),
        "encoder.ln.bias": (768,),
        "heads.head.weight": (1000, 768),
        "heads.head.bias": (1000,),
    }
    for number in range(12):
        prefix = f"encoder.layers.encoder_layer_{number}."
        expected |= {prefix + name: shape for name, shape in LAYER.items()}
    assert {name: tuple(each.shape) for name, each in state.items()} == expected
    assert sum(each.numel() for each in state.values()) == 86_567_656


def written_out(model, images):
    """Compute the network from its state dict alone, with torch's own attention."""
    state = model.state_dict()
    x = F.conv2d(images, state["conv_proj.weight"], state["conv_proj.bias"], 16)
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([state["class_token"].expand(len(images), 1, -1), x], dim=1)
    x = x + state["encoder.pos_embedding"]
    for number in range(2):
        prefix = f"encoder.layers.encoder_layer_{number}."
        own = {name.removeprefix(prefix): each for name, each in state.items() if prefix in name}
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        attention.load_state_dict(
            {
                name.removeprefix("self_attention."): each
                for name, each in own.items()
                if "self_attention" in name
            }
        )
        y = F.layer_norm(x, (8,), own["ln_1.weight"], own["ln_1.bias"], 1e-6)
        x = x + attention(y, y, y, need_weights=False)[0]
        y = F.layer_norm(x, (8,), own["ln_2.weight"], own["ln_2.bias"], 1e-6)
        y = F.gelu(F.linear(y, own["mlp.0.weight"], own["mlp.0.bias"]))
        x = x + F.linear(y, own["mlp.3.weight"], own["mlp.3.bias"])
    x = F.layer_norm(x, (8,), state["encoder.ln.weight"], state["encoder.ln.bias"], 1e-6)
    return F.linear(x[:, 0], state["heads.head.weight"], state["heads.head.bias"])


def test_outputs_are_those_of_the_published_arithmetic():
    model, images = small(), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images), written_out(model, images))


def test_a_copy_embeds_with_its_own_parameters():
    model = small()
    other = copy.deepcopy(model)
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    nn.init.zeros_(other.encoder.pos_embedding)
    assert torch.equal(model(images), before)
    assert not torch.equal(other(images), before)


@pytest.mark.parametrize("name", ["class_token", "conv_proj.bias", "encoder.pos_embedding"])
def test_parameters_of_the_embedding_are_trained(name):
    model = small()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert model.get_parameter(name).grad.abs().sum() > 0
