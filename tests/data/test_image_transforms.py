"""Augmentation: boxes within the picture, fast decoding that shows the same, exact pixels."""

import io

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lockstep.data.images import (
    MEAN,
    STD,
    center_crop_box,
    crop_and_resize,
    random_crop_box,
    random_flip,
    to_normalized_tensor,
)

SIDES = st.integers(1, 3000)


@given(SIDES, SIDES, st.integers(0, 2**32))
def test_a_random_box_lies_within_the_picture(width, height, seed):
    torch.default_generator.manual_seed(seed)
    left, top, right, bottom = random_crop_box(width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_a_random_box_has_the_usual_areas_and_ratios():
    torch.default_generator.manual_seed(0)
    boxes = [random_crop_box(1000, 1000) for _ in range(500)]
    areas = [(right - left) * (bottom - top) / 1e6 for left, top, right, bottom in boxes]
    ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
    assert 0.079 < min(areas) < 0.15
    assert 0.85 < max(areas) <= 1
    assert 0.74 < min(ratios) < 0.78
    assert 1.28 < max(ratios) < 1.35


def test_a_picture_too_long_for_any_box_gives_its_middle():
    assert random_crop_box(1000, 3) == (498, 0, 502, 3)


def test_the_middle_is_a_square_of_seven_eighths():
    assert center_crop_box(1600, 800) == (450, 50, 1150, 750)


def jpeg(width, height):
    """A picture that changes slowly, so that any way of scaling it shows the same."""
    x, y = numpy.meshgrid(numpy.linspace(0, 255, width), numpy.linspace(0, 255, height))
    pixels = numpy.stack([x, y, 255 - x], axis=-1).astype(numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return Image.open(file)


@pytest.mark.parametrize("box", [(0, 0, 803, 605), (101, 202, 501, 602), (700, 500, 803, 605)])
def test_a_jpeg_is_decoded_small_and_shows_the_same(box):
    plain = jpeg(803, 605)
    plain.load()
    plain.format = None  # as if it were no JPEG
    drafted = jpeg(803, 605)
    fast, slow = crop_and_resize(drafted, box, 32), crop_and_resize(plain, box, 32)
    assert plain.size == (803, 605)
    if box[2] - box[0] > 200:
        assert drafted.size[0] < 803
    difference = numpy.asarray(fast).astype(int) - numpy.asarray(slow).astype(int)
    assert abs(difference).max() <= 3


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_mode_becomes_three_colours(mode):
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes(range(256))
    assert numpy.asarray(crop_and_resize(image, (0, 0, 8, 8), 4)).shape == (4, 4, 3)


def test_a_picture_is_mirrored_half_the_time():
    image = Image.fromarray(numpy.array([[[0, 0, 0], [255, 255, 255]]], dtype=numpy.uint8))
    torch.default_generator.manual_seed(0)
    firsts = [random_flip(image).getpixel((0, 0))[0] for _ in range(200)]
    assert set(firsts) == {0, 255}
    assert 70 < firsts.count(0) < 130


def test_pixels_are_normalised_row_by_row():
    pixels = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8)
    values = to_normalized_tensor(Image.fromarray(pixels.numpy()))
    assert values.is_contiguous()
    expected = (pixels.permute(2, 0, 1).double() / 255 - MEAN.double()) / STD.double()
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)
