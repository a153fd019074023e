"""The rows above a crop: the same pixels as in the whole picture, for any kind of JPEG."""

import io

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lockstep.data.image_transforms import crop_and_resize
from lockstep.data.jpeg import upper_rows


def encoded(width=75, height=120, mode="RGB", **options):
    pixels = numpy.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


FILES = {
    "4:2:0": encoded(),
    "4:2:2": encoded(subsampling="4:2:2"),
    "4:4:4": encoded(subsampling="4:4:4"),
    "gray": encoded(mode="L"),
    "cmyk": encoded(mode="CMYK"),
    "restarts": encoded(restart_marker_blocks=2),
    "comment": encoded(comment=b"\xff\xc0" * 20, icc_profile=bytes(70000)),
    "progressive": encoded(progressive=True),
}


@pytest.mark.parametrize("kind", FILES)
@given(bottom=st.floats(0.5, 120), reduction=st.sampled_from([1, 2, 4, 8]))
def test_the_rows_are_those_of_the_whole(kind, bottom, reduction):
    shown = []
    for cut in (lambda image: image, lambda image: upper_rows(image, bottom)):
        image = cut(Image.open(io.BytesIO(FILES[kind])))
        image.draft(None, (image.width // reduction, image.height // reduction))
        shown.append(numpy.asarray(image)[: int(bottom / reduction)])
    assert numpy.array_equal(*shown)


@pytest.mark.parametrize("kind", FILES)
def test_other_rows_are_left_out(kind):
    image = upper_rows(Image.open(io.BytesIO(FILES[kind])), 30)
    assert image.height == (120 if kind == "progressive" else 32)


@pytest.mark.parametrize("bottom", [112, 120])
def test_a_crop_near_the_end_needs_the_whole(bottom):
    image = Image.open(io.BytesIO(FILES["4:2:0"]))
    assert upper_rows(image, bottom) is image


def test_a_crop_is_that_of_the_whole_picture(monkeypatch):
    boxes = [(0, 0, 75, 20), (5, 31, 60, 64), (0, 0, 40, 100)]
    found = [crop_and_resize(Image.open(io.BytesIO(FILES["4:2:0"])), box, 16) for box in boxes]
    monkeypatch.setattr("lockstep.data.image_transforms.upper_rows", lambda image, bottom: image)
    for box, pixels in zip(boxes, found, strict=True):
        whole = crop_and_resize(Image.open(io.BytesIO(FILES["4:2:0"])), box, 16)
        assert pixels.equal(whole)


@pytest.mark.parametrize("kind", ["4:2:0", "comment"])
def test_a_truncated_file_is_left_to_the_decoder(kind):
    whole = FILES[kind]
    for end in [*range(2, 700, 7), len(whole) - 2]:
        try:
            image = Image.open(io.BytesIO(whole[:end]))
        except (OSError, SyntaxError):
            continue
        assert upper_rows(image, 30) is image
        with pytest.raises(OSError, match=r"truncated|cannot load"):
            image.load()
