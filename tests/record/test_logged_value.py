"""Values that a script logs: each kind as fields of a line, or one sentence."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.kernel.errors import UsageError
from lockstep.record.logged_value import convert_value


def test_numbers_of_any_type():
    weight = torch.nn.Parameter(torch.tensor(2.5))
    for value in (2.5, weight, np.float32(2.5), [2.5], weight.bfloat16()):
        assert convert_value("x", value, "scalar") == {"value": 2.5}
    assert convert_value("x", True, "scalar") == {"value": 1.0}


def test_a_histogram_counts_every_value():
    values = torch.tensor([[0.0, 1.0], [3.0, float("nan")]])
    found = convert_value("x", values, "histogram")["histogram"]
    assert (found["low"], found["high"], found["nonfinite"]) == (0.0, 3.0, 1)
    assert [at for at, count in enumerate(found["counts"]) if count] == [0, 10, 29]
    assert sum(convert_value("x", torch.empty(0), "histogram")["histogram"]["counts"]) == 0


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7)])
def test_an_image_has_the_given_pixels(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for value in (pixels, torch.from_numpy(pixels / 255)):
        png = base64.b64decode(convert_value("x", value, "image")["image"])
        shown = np.asarray(Image.open(io.BytesIO(png)))
        expected = pixels.transpose(1, 2, 0) if len(shape) == 3 else pixels
        assert (shown == expected.reshape(shown.shape)).all()


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        (1.0, "audio", "kind is one of scalar, histogram, image, not 'audio'"),
        (object(), "scalar", "an? object is neither a number nor a tensor or an array"),
        (torch.ones(2), "scalar", r"has shape \(2,\); pass one number, or kind="),
        (torch.ones(2, 4, 4), "image", r"1 or 3 channels, not \(2, 4, 4\)"),
        (torch.rand(3, 700, 700), "image", "bytes as a PNG file, and at most 1,048,576 are"),
    ],
)
def test_other_values_get_one_sentence(value, kind, sentence):
    with pytest.raises(UsageError, match=sentence):
        convert_value("x", value, kind)
