"""Operators on an accelerator, forward and backward: are their bits the same in every call?"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["OPERATORS", "try_operator"]


def try_operator(
    call: Callable[[torch.device], torch.Tensor], device: torch.device, is_strict: bool
) -> str:
    """Return whether five calls have the same bits, forward and backward."""
    torch.use_deterministic_algorithms(is_strict)
    try:
        results = []
        for _ in range(5):
            torch.manual_seed(0)
            results.append(call(device).cpu())
        return "same bits" if all(torch.equal(results[0], r) for r in results) else "different bits"
    except Exception as error:
        text = str(error).splitlines()[0]
        return "refused" if "deterministic" in text else f"{type(error).__name__}: {text[:80]}"
    finally:
        torch.use_deterministic_algorithms(False)


def _with_gradient(
    function: Callable[..., torch.Tensor],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Callable[[torch.device], torch.Tensor]:
    """Return a call of an operator on random tensors; its result has the gradients too."""

    def call(device: torch.device) -> torch.Tensor:
        tensors = [
            torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes
        ]
        output = function(*tensors)
        output.backward(torch.randn_like(output))
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        return torch.cat([part.detach().reshape(-1).double() for part in (output, *gradients)])

    return call


def _index(count: int, high: int) -> torch.Tensor:
    """Return indices, many of them equal."""
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(1))


def _on(index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the index on the device of a tensor."""
    return index.to(tensor.device)


N = 20000
HALF = torch.bfloat16
OPERATORS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "linear": _with_gradient(F.linear, (512, 300), (200, 300)),
    "linear, bfloat16": _with_gradient(F.linear, (512, 304), (208, 304), dtype=HALF),
    "baddbmm": _with_gradient(torch.baddbmm, (8, 64, 64), (8, 64, 96), (8, 96, 64)),
    "conv2d": _with_gradient(F.conv2d, (16, 8, 32, 32), (16, 8, 3, 3)),
    "conv2d, bfloat16": _with_gradient(F.conv2d, (16, 8, 32, 32), (16, 8, 3, 3), dtype=HALF),
    "conv_transpose2d": _with_gradient(F.conv_transpose2d, (16, 8, 16, 16), (8, 16, 3, 3)),
    "conv3d": _with_gradient(F.conv3d, (4, 4, 8, 16, 16), (8, 4, 3, 3, 3)),
    "batch_norm": _with_gradient(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (64, 32, 16, 16),
        (32,),
        (32,),
    ),
    "layer_norm": _with_gradient(
        lambda x, w, b: F.layer_norm(x, (256,), w, b), (4096, 256), (256,), (256,)
    ),
    "group_norm": _with_gradient(
        lambda x, w, b: F.group_norm(x, 4, w, b), (64, 32, 16, 16), (32,), (32,)
    ),
    "attention, float32": _with_gradient(F.scaled_dot_product_attention, *[(4, 8, 256, 64)] * 3),
    "attention, bfloat16": _with_gradient(
        F.scaled_dot_product_attention, *[(4, 8, 256, 64)] * 3, dtype=HALF
    ),
    "softmax": _with_gradient(lambda x: x.softmax(-1), (256, 1000)),
    "cross_entropy": _with_gradient(
        lambda x: F.cross_entropy(x, _on(_index(4096, 100), x)), (4096, 100)
    ),
    "nll_loss of images": _with_gradient(
        lambda x: F.nll_loss(x, _on(_index(8 * 32 * 32, 5), x).view(8, 32, 32)), (8, 5, 32, 32)
    ),
    "ctc_loss": _with_gradient(
        lambda x: F.ctc_loss(
            x.log_softmax(-1),
            _on(_index(160, 19), x).view(16, 10) + 1,
            torch.tensor([50] * 16),
            torch.tensor([10] * 16),
        ),
        (50, 16, 20),
    ),
    "embedding": _with_gradient(lambda w: F.embedding(_on(_index(N, 50), w), w), (50, 64)),
    "embedding_bag": _with_gradient(
        lambda w: F.embedding_bag(_on(_index(N, 50), w).view(-1, 10), w, mode="mean"), (50, 64)
    ),
    "gather": _with_gradient(lambda x: x.gather(0, _on(_index(N, 64), x)), (64,)),
    "index_select": _with_gradient(lambda x: x.index_select(0, _on(_index(N, 64), x)), (64, 4)),
    "index (advanced indexing)": _with_gradient(lambda x: x[_on(_index(N, 64), x)], (64, 4)),
    "index_add": _with_gradient(
        lambda x: torch.zeros(64, device=x.device).index_add(0, _on(_index(N, 64), x), x), (N,)
    ),
    "index_put, accumulate": _with_gradient(
        lambda x: torch.zeros(64, device=x.device).index_put(
            (_on(_index(N, 64), x),), x, accumulate=True
        ),
        (N,),
    ),
    "scatter_add": _with_gradient(
        lambda x: torch.zeros(64, device=x.device).scatter_add(0, _on(_index(N, 64), x), x), (N,)
    ),
    "scatter_reduce, mean": _with_gradient(
        lambda x: torch.zeros(64, device=x.device).scatter_reduce(
            0, _on(_index(N, 64), x), x, "mean"
        ),
        (N,),
    ),
    "repeat_interleave": _with_gradient(lambda x: x.repeat_interleave(300), (64,)),
    "cumsum": _with_gradient(lambda x: x.cumsum(0), (N,)),
    "sum": _with_gradient(lambda x: x.sum(0), (N, 8)),
    "max_pool2d": _with_gradient(lambda x: F.max_pool2d(x, 3, 2), (16, 8, 32, 32)),
    "max_pool3d": _with_gradient(lambda x: F.max_pool3d(x, 3, 2), (4, 4, 16, 16, 16)),
    "adaptive_avg_pool2d": _with_gradient(lambda x: F.adaptive_avg_pool2d(x, 3), (16, 8, 32, 32)),
    "adaptive_max_pool2d": _with_gradient(lambda x: F.adaptive_max_pool2d(x, 3), (16, 8, 32, 32)),
    "interpolate, nearest": _with_gradient(
        lambda x: F.interpolate(x, scale_factor=2), (8, 4, 16, 16)
    ),
    "interpolate, bilinear": _with_gradient(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (8, 4, 16, 16)
    ),
    "interpolate, bicubic": _with_gradient(
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (8, 4, 16, 16)
    ),
    "grid_sample": _with_gradient(
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (8, 4, 16, 16), (8, 20, 20, 2)
    ),
    "pad, reflect": _with_gradient(
        lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), (8, 4, 16, 16)
    ),
    "pad, replicate": _with_gradient(
        lambda x: F.pad(x, (3, 3, 3, 3), mode="replicate"), (8, 4, 16, 16)
    ),
    "fold": _with_gradient(lambda x: F.fold(x, (16, 16), 3), (8, 36, 196)),
    "unfold": _with_gradient(lambda x: F.unfold(x, 3), (8, 4, 16, 16)),
    "lstm": _with_gradient(lambda x: nn.LSTM(32, 64, 2, device=x.device)(x)[0], (50, 16, 32)),
    "cdist": _with_gradient(torch.cdist, (300, 20), (200, 20)),
    "dropout": _with_gradient(lambda x: F.dropout(x, 0.3), (N,)),
    "matrix inverse": _with_gradient(torch.linalg.inv, (8, 32, 32)),
    "fft": _with_gradient(lambda x: torch.fft.rfft(x).abs(), (64, 1000)),
    "histc": lambda device: torch.randn(N, device=device).histc(50),
    "bincount with weights": lambda device: torch.bincount(
        _index(N, 64).to(device), torch.randn(N, device=device)
    ),
}
"""Operators as calls on a device."""
