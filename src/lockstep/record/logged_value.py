"""Values that a script logs: numbers, histograms and images, as fields of a record's line.

kind        the line has
scalar      value       a number
histogram   histogram   low, high, counts of bins of equal width, count of non-finite values
image       image       a PNG file in base64
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch

from lockstep.kernel.errors import UsageError

__all__ = ["KINDS", "convert_value"]

KINDS = ("scalar", "histogram", "image")
BINS = 30
MAX_IMAGE = 1 << 20  # bytes of a PNG file


def convert_value(name: str, value: Any, kind: str) -> dict[str, Any]:
    """Return a value as fields of a line; UsageError if it is not of this kind."""
    if kind not in KINDS:
        raise UsageError(f"log({name!r}): kind is one of {', '.join(KINDS)}, not {kind!r}")
    try:
        tensor = torch.as_tensor(value).detach().cpu()
        array = tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype).numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"log({name!r}): a {type(value).__name__} is neither a number nor a tensor or an array"
        ) from error
    if kind == "histogram":
        return {"histogram": _count(array.astype(np.float64).ravel())}
    if kind == "image":
        return {"image": _draw(name, array)}
    if array.size != 1:
        raise UsageError(
            f"log({name!r}): the value has shape {array.shape}; pass one number, or "
            'kind="histogram" or kind="image"'
        )
    return {"value": float(array.reshape(()))}


def _count(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the histogram of some values."""
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, BINS)
    low = float(edges[0])
    high = float(edges[-1])
    missing = len(values) - len(finite)
    return {"low": low, "high": high, "counts": counts.tolist(), "nonfinite": missing}


def _draw(name: str, array: np.ndarray[Any, Any]) -> str:
    """Return an image of shape (height, width), (1, height, width) or (3, height, width)."""
    from PIL import Image  # late: most scripts log no images

    planes = array[None] if array.ndim == 2 else array
    if planes.ndim != 3 or planes.shape[0] not in (1, 3) or not planes.size:
        raise UsageError(
            f"log({name!r}): an image has the shape (height, width), or (channels, height, "
            f"width) with 1 or 3 channels, not {array.shape}"
        )
    if planes.dtype != np.uint8:
        planes = (np.nan_to_num(planes.astype(np.float64)).clip(0, 1) * 255).round()
    pixels = planes.astype(np.uint8).transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(pixels if len(planes) == 3 else pixels[:, :, 0]).save(file, "PNG")
    png = file.getvalue()
    if len(png) > MAX_IMAGE:
        raise UsageError(
            f"log({name!r}): the image has {len(png):,} bytes as a PNG file, and at most "
            f"{MAX_IMAGE:,} are recorded; scale it down"
        )
    return base64.b64encode(png).decode()
