"""The example that writes real images: its parts, its files, and what it needs."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

import warm
from examples.images import read_image_folder

SCRIPT = Path(__file__).parents[2] / "examples" / "textures.py"
SIZES = [(240, 100), (100, 240), (512, 512)]


@pytest.fixture(scope="module")
def textures():
    spec = importlib.util.spec_from_file_location("textures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", SIZES)
def test_held_out_pieces_have_no_pixel_of_those_for_training(textures, size):
    seen = {"train": set(), "val": set()}
    for kind, part in textures.split(*size).items():
        for left, top, right, bottom in textures.draw_pieces(part, 40, textures.random.Random(0)):
            assert right - left == bottom - top == textures.SIDE
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            seen[kind] |= {(x, y) for x in range(left, right) for y in range(top, bottom)}
    assert not seen["train"] & seen["val"]


def test_the_folder_is_that_of_an_image_recipe(textures, tmp_path, monkeypatch, capsys):
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    for number, file in enumerate(textures.PHOTOGRAPHS.values()):
        Image.effect_noise(SIZES[number % 3], 64).save(photographs / file)
    monkeypatch.setattr(textures, "COUNTS", {"train": 3, "val": 2})
    written = []
    for name in ("one", "two"):
        folder = tmp_path / name
        monkeypatch.setattr(
            sys, "argv", ["textures.py", str(folder), "--photographs", str(photographs)]
        )
        textures.main()
        written.append(
            {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.jpg")}
        )
    assert written[0] == written[1]
    assert "wrote 45 images of 9 classes" in capsys.readouterr().out
    training, held_out = read_image_folder(tmp_path / "one")
    assert (len(training), len(held_out)) == (27, 18)
    assert training.classes == tuple(sorted(textures.PHOTOGRAPHS))


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="no scikit-image here")
def test_a_few_epochs_tell_most_held_out_pieces_apart(textures, tmp_path):
    textures.write_pieces(textures.find_photographs(), tmp_path / "textures")
    options = "--arch resnet18 --size 64 --epochs 4 --batch-size 32 --microbatches 4"
    command = [*warm.LOCKSTEP, "run", "-n", "2", "-m", "examples.imagenet", "textures"]
    command += [*options.split(), "--optimizer", "adamw", "--lr", "0.001"]
    environ = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    ended = warm.run(command, timeout=600, text=True, cwd=tmp_path, env=environ)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.partition("top-1 ")[2].partition("%")[0]) > 50


def test_without_scikit_image_one_sentence_says_how_to_get_it(textures, monkeypatch):
    monkeypatch.setattr(textures, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="install it with: pip install scikit-image"):
        textures.find_photographs()
