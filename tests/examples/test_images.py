"""Folders of images: one numbering for all ranks, upright pixels, one sentence for a mistake."""

import io

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from examples.images import (
    ImageDataset,
    choose_center_box,
    choose_random_box,
    crop_and_resize,
    read_image_folder,
)
from folders import write_pictures

SIDES = st.integers(1, 3000)


def named(files):
    return [(files.names[i].decode(), files.classes[files.labels[i]]) for i in range(len(files))]


def test_images_are_read_in_the_order_of_their_names(tmp_path):
    write_pictures(tmp_path / "train", ["dog", "cat/more", ".thumbnails"], 2)
    write_pictures(tmp_path / "val", ["dog"], 1, suffix=".PNG")
    (tmp_path / "train/dog/notes.txt").write_text("no picture")
    (tmp_path / "train/dog/.0.jpg").write_text("no picture")
    training, held_out = read_image_folder(tmp_path)
    assert training.classes == held_out.classes == ("cat", "dog")
    assert named(training) == [
        *((f"cat/more/{i}.jpg", "cat") for i in range(2)),
        *((f"dog/{i}.jpg", "dog") for i in range(2)),
    ]
    assert named(held_out) == [("dog/0.PNG", "dog")]


@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        ([], "train is not a folder with one folder of images per class"),
        (["train/a"], "val is not a folder"),
        (["train/a", "val/b"], "b is a class without training images"),
        (["train/a", "train/empty", "val/a"], "empty has no image"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path, folders, sentence):
    write_pictures(tmp_path, [name for name in folders if "empty" not in name], 1)
    for name in folders:
        (tmp_path / name).mkdir(exist_ok=True)
    with pytest.raises(SystemExit, match=sentence):
        read_image_folder(tmp_path)


def test_an_image_is_normalized_and_a_damaged_one_is_named(tmp_path):
    files, _ = read_image_folder(write_pictures(tmp_path, ["train/a", "val/a"], 2))
    before = torch.default_generator.get_state()
    pixels, label = ImageDataset(files, 32, augment=False)[0]
    assert torch.equal(torch.default_generator.get_state(), before)
    with Image.open(files.path(0)) as image:
        expected = crop_and_resize(image, choose_center_box(*image.size), 32).double() / 255
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)
    for channel in range(3):
        wanted = ((expected[channel] - mean[channel]) / std[channel]).float()
        torch.testing.assert_close(pixels[channel], wanted)
    assert (pixels.is_contiguous(), label) == (True, 0)
    files.path(1).write_bytes(files.path(1).read_bytes()[:-400])
    with pytest.raises(ValueError, match=rf"{files.path(1)} cannot be read as an image \(.*trunc"):
        ImageDataset(files, 32, augment=True)[1]


@given(SIDES, SIDES, st.integers(0, 2**32))
def test_a_random_box_lies_within_the_image(width, height, seed):
    torch.default_generator.manual_seed(seed)
    left, top, right, bottom = choose_random_box(width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_boxes_have_the_usual_areas_and_the_center_is_seven_eighths():
    torch.default_generator.manual_seed(0)
    boxes = [choose_random_box(1000, 1000) for _ in range(500)]
    areas = [(right - left) * (bottom - top) / 1e6 for left, top, right, bottom in boxes]
    assert 0.079 < min(areas) < 0.15
    assert 0.85 < max(areas) <= 1
    assert choose_random_box(1000, 3) == (498, 0, 502, 3)
    assert choose_center_box(1600, 800) == (450, 50, 1150, 750)


@pytest.mark.parametrize("suffix", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_decoded_small_and_turned_upright(orientation, suffix):
    x, y = numpy.meshgrid(numpy.linspace(0, 255, 800), numpy.linspace(0, 255, 600))
    pixels = numpy.stack([x, y, 255 - x], axis=-1).astype(numpy.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, suffix, exif=exif, quality=95)
    with Image.open(file) as image:
        crop = image.crop((100, 200, 500, 600))
    expected = numpy.asarray(ImageOps.exif_transpose(crop).resize((32, 32))).astype(int)
    with Image.open(file) as image:
        found = crop_and_resize(image, (100, 200, 500, 600), 32).permute(1, 2, 0).numpy()
        assert (image.width < 800) == (suffix == "JPEG")
    assert abs(found - expected).max() <= 4


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA", "I;16"])
def test_every_mode_becomes_three_colors(mode):
    image = Image.new("L", (8, 8), 255).convert("RGB").convert(mode) if mode != "I;16" else None
    image = image or Image.fromarray(numpy.full((8, 8), 65535, numpy.uint16))
    assert crop_and_resize(image, (0, 0, 8, 8), 4).tolist() == [[[255] * 4] * 4] * 3
