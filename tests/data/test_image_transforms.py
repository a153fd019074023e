"""Augmentation: boxes within the picture, fast decoding that shows the same, exact pixels."""

import io

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from lockstep.data.image_transforms import (
    MEAN,
    ORIENTATION,
    STD,
    center_crop_box,
    crop_and_resize,
    normalize,
    random_crop_box,
    random_flip,
    upright_size,
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
    assert (fast.int() - slow.int()).abs().max() <= 4


def test_resizing_gives_the_pixels_of_pillow():
    plain = jpeg(803, 605)
    box = (101, 202, 501, 602)
    expected = plain.crop(box).resize((224, 224), Image.Resampling.BILINEAR)
    found = crop_and_resize(jpeg(803, 605), box, 224).permute(1, 2, 0).numpy()
    assert abs(found.astype(int) - numpy.asarray(expected)).max() <= 1


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_mode_becomes_three_colours(mode):
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes(range(256))
    assert crop_and_resize(image, (0, 0, 8, 8), 4).shape == (3, 4, 4)


def test_gray_of_16_bits_keeps_its_upper_ones():
    gray = numpy.linspace(0, 65535, 64, dtype=numpy.uint16).reshape(8, 8)
    file = io.BytesIO()
    Image.fromarray(gray).save(file, "PNG")
    pixels = crop_and_resize(Image.open(file), (0, 0, 8, 8), 8)
    assert torch.equal(pixels, torch.from_numpy((gray >> 8).astype(numpy.uint8)).expand(3, 8, 8))


@pytest.mark.parametrize(("mode", "kind"), [("I", "32-bit"), ("F", "float")])
def test_pixels_without_a_range_are_refused(mode, kind):
    with pytest.raises(ValueError, match=f"it has {kind} pixels; save it with 8 or 16 bits"):
        crop_and_resize(Image.new(mode, (8, 8)), (0, 0, 8, 8), 4)


@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_camera_notes(orientation, suffix):
    x, y = numpy.meshgrid(numpy.arange(48), numpy.arange(32))
    pixels = numpy.stack([5 * x, 7 * y, 0 * x], axis=-1).astype(numpy.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, suffix, exif=exif)
    with Image.open(file) as image:
        upright = ImageOps.exif_transpose(image)
    box = (3, 5, 27, 29) if upright.width > upright.height else (5, 3, 29, 27)
    expected = numpy.asarray(upright.convert("RGB").crop(box).resize((24, 24))).astype(int)
    with Image.open(file) as image:
        assert upright_size(image) == upright.size
        found = crop_and_resize(image, box, 24).permute(1, 2, 0).numpy()
    assert abs(found - expected).max() <= 1


def test_a_picture_is_mirrored_half_the_time():
    pixels = torch.tensor([0, 255], dtype=torch.uint8).expand(3, 1, 2)
    torch.default_generator.manual_seed(0)
    firsts = [int(random_flip(pixels)[0, 0, 0]) for _ in range(200)]
    assert set(firsts) == {0, 255}
    assert 70 < firsts.count(0) < 130


def test_pixels_are_normalised_row_by_row():
    pixels = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8).permute(2, 0, 1)
    values = normalize(pixels)
    assert values.is_contiguous()
    expected = (pixels.double() / 255 - MEAN.double()) / STD.double()
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)
