"""Folders of pictures: one numbering for all ranks, a fixed split, one sentence for a mistake."""

import numpy
import pytest

from folders import write_pictures
from lockstep.data.image_folder import read_image_folder
from lockstep.kernel.errors import DatasetError


def named(files):
    return [(files.names[i].decode(), files.classes[files.labels[i]]) for i in range(len(files))]


def test_train_and_val_are_read_in_the_order_of_their_names(tmp_path):
    write_pictures(tmp_path / "train", ["dog", "cat"], 3)
    write_pictures(tmp_path / "val", ["dog", "cat"], 1, suffix=".png")
    training, held_out = read_image_folder(tmp_path, 0.5, 0)
    assert training.classes == held_out.classes == ("cat", "dog")
    assert named(training) == [(f"{c}/{i}.jpg", c) for c in ("cat", "dog") for i in range(3)]
    assert named(held_out) == [("cat/0.png", "cat"), ("dog/0.png", "dog")]
    with held_out.open(1) as picture:
        assert picture.size == (48, 48)


def test_a_class_that_is_not_evaluated_keeps_the_numbers_of_the_others(tmp_path):
    write_pictures(tmp_path / "train", ["a", "b", "c"], 1)
    write_pictures(tmp_path / "val", ["c"], 2)
    assert named(read_image_folder(tmp_path, 0.5, 0)[1]) == [("c/0.jpg", "c"), ("c/1.jpg", "c")]


def test_pictures_below_a_class_are_found_and_hidden_or_other_files_left(tmp_path):
    write_pictures(tmp_path, ["a/images/more", ".thumbnails", "b"], 2)
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    (tmp_path / "b" / ".0.jpg").write_text("no picture")
    (tmp_path / "b" / "0.jpg").rename(tmp_path / "b" / "0.JPG")
    training, held_out = read_image_folder(tmp_path, 0.5, 0)
    assert sorted(named(training) + named(held_out)) == [
        ("a/images/more/0.jpg", "a"),
        ("a/images/more/1.jpg", "a"),
        ("b/0.JPG", "b"),
        ("b/1.jpg", "b"),
    ]


def test_one_folder_is_split_alike_every_time_and_in_each_class(tmp_path):
    write_pictures(tmp_path, ["a", "b"], 10)
    training, held_out = read_image_folder(tmp_path, 0.2, 0)
    assert numpy.bincount(training.labels).tolist() == [8, 8]
    assert numpy.bincount(held_out.labels).tolist() == [2, 2]
    assert not set(named(training)) & set(named(held_out))
    assert named(read_image_folder(str(tmp_path), 0.2, 0)[1]) == named(held_out)
    assert named(read_image_folder(tmp_path, 0.2, 1)[1]) != named(held_out)


def nothing(folder):
    return folder / "missing"


def no_class(folder):
    return folder


def an_empty_class(folder):
    write_pictures(folder, ["a", "b"], 3)
    (folder / "c").mkdir()
    return folder


def only_val_has_it(folder):
    write_pictures(folder / "train", ["a"], 1)
    write_pictures(folder / "val", ["a", "b"], 1)
    return folder


def too_few(folder):
    return write_pictures(folder, ["a", "b"], 1)


def sets_of_other_names(folder):
    return write_pictures(folder, ["train/a", "validation/a"], 2)


def only_train(folder):
    return write_pictures(folder, ["train/a", "train/b"], 2)


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (nothing, "missing is not a folder; pass one that has one folder of images per class"),
        (no_class, "has no folders; put the images of each class into a folder"),
        (an_empty_class, "c has no image"),
        (only_val_has_it, "b is a class without training images: .*train"),
        (sets_of_other_names, "has the folders train and validation, which are no class: rename"),
        (only_train, "has the folder train, which is no class: .* or pass .*train"),
        (too_few, "too few images per class to hold out 20% of them"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path, prepare, sentence):
    with pytest.raises(DatasetError, match=sentence):
        read_image_folder(prepare(tmp_path), 0.2, 0)


def test_a_class_may_have_the_name_of_a_set(tmp_path):
    write_pictures(tmp_path, ["car", "train"], 5)
    assert read_image_folder(tmp_path, 0.2, 0)[0].classes == ("car", "train")
