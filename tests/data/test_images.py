"""Pictures through the loader: the same for every layout and number of workers."""

import pytest
import torch
from PIL import Image

from folders import write_pictures
from lockstep.data.image_folder import read_image_folder
from lockstep.data.image_transforms import center_crop_box, crop_and_resize, normalize
from lockstep.data.images import ImageDataset
from lockstep.data.loader import Batches
from lockstep.kernel.errors import FileError, SampleError
from lockstep.kernel.seeds import key


def epoch_of(dataset, number, replicas=1, replica=0, workers=0):
    """Return the samples of an epoch that this replica loads, by batch and micro-batch."""
    batches = Batches(
        dataset, 6, microbatches=3, replicas=replicas, replica=replica, seed=5, epoch=number,
        num_workers=workers,
    )  # fmt: skip
    return {
        (place, microbatch.index): microbatch.data
        for place, batch in enumerate(batches)
        for microbatch in batch.microbatches
    }


def assert_same(one, other):
    for place, (pictures, labels) in other.items():
        assert torch.equal(one[place][0], pictures)
        assert one[place][0].stride() == pictures.stride()
        assert torch.equal(one[place][1], labels)


@pytest.fixture
def pictures(tmp_path):
    files, _ = read_image_folder(write_pictures(tmp_path, ["a", "b", "c"], 5), 0.2, 0)
    return ImageDataset(files, 32, augment=True)


def test_augmentation_is_the_same_for_every_layout_and_number_of_workers(pictures):
    whole = epoch_of(pictures, 0)
    assert len(whole) == 6
    assert_same(whole, epoch_of(pictures, 0, workers=2))
    parts = epoch_of(pictures, 0, 2, 0) | epoch_of(pictures, 0, 2, 1, workers=1)
    assert parts.keys() == whole.keys()
    assert_same(whole, parts)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_seed_epoch_and_index(pictures, workers):
    for batch in Batches(pictures, 6, microbatches=3, seed=5, epoch=2, num_workers=workers):
        for microbatch in batch.microbatches:
            for shown, index in zip(
                microbatch.data[0], batch.sample_indices(microbatch.index), strict=True
            ):
                torch.default_generator.manual_seed(key(5, 2, index))
                assert torch.equal(shown, pictures[index][0])


def test_evaluation_shows_the_middle_and_draws_nothing(tmp_path):
    files, _ = read_image_folder(write_pictures(tmp_path, ["a"], 2), 0.5, 0)
    before = torch.default_generator.get_state()
    picture, label = ImageDataset(files, 32, augment=False)[0]
    assert torch.equal(torch.default_generator.get_state(), before)
    with Image.open(files.name(0)) as image:
        pixels = crop_and_resize(image, center_crop_box(*image.size), 32)
    assert torch.equal(picture, normalize(pixels))
    assert label == 0


def missing(path):
    path.unlink()
    return "the file does not exist"


def text(path):
    path.write_text("no picture")
    return "unknown format, or damaged"


def truncated(path):
    path.write_bytes(path.read_bytes()[:-400])
    return "truncated"


def damaged_png(path):
    Image.new("RGB", (64, 64)).save(path, "PNG")
    path.write_bytes(path.read_bytes()[:60])
    return "cannot be read as an image"


def empty(path):
    path.write_bytes(b"")
    return "the file is empty"


def a_folder(path):
    path.unlink()
    path.mkdir()
    return r"\(Is a directory\)"


def float_pixels(path):
    Image.new("F", (64, 64)).save(path, "TIFF")
    return "it has float pixels; save it with 8 or 16 bits per channel"


@pytest.mark.parametrize(
    "spoil", [missing, text, truncated, damaged_png, empty, a_folder, float_pixels]
)
def test_a_picture_that_cannot_be_read_is_named_in_one_sentence(tmp_path, spoil):
    files, _ = read_image_folder(write_pictures(tmp_path, ["a"], 2), 0.5, 0)
    reason = spoil(tmp_path / files.name(0))
    dataset = ImageDataset(files, 32, augment=True)
    with pytest.raises(FileError, match=reason):
        dataset[0]
    with pytest.raises(SampleError) as caught:
        list(Batches(dataset, 1))
    assert files.name(0) in str(caught.value)
    assert "\n" not in str(caught.value)
