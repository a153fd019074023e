"""What is trained: the same weights and batches for everybody, cut where the tutorial cuts."""

import torch

from benchmarks.pipeline.case import MODELS, Case
from lockstep.recipes.resnet import resnet50


def test_weights_and_batches_depend_on_the_case_alone():
    case = Case("tiny", 2, 6, 32)
    assert all(map(torch.equal, case.build().parameters(), case.build().parameters()))
    assert all(map(torch.equal, case.batch(1), case.batch(1)))
    assert not torch.equal(case.batch(0)[0], case.batch(1)[0])
    assert case.build()(case.batch(0)[0]).shape == (6, MODELS["tiny"].classes)


def test_pictures_have_the_size_asked_for():
    inputs, targets = Case("resnet50", 2, 6, 40).batch(0)
    assert inputs.shape == (6, 3, 40, 40)
    assert targets.max() < 1000


def test_resnet50_is_cut_behind_its_second_layer():
    with torch.device("meta"):
        model = resnet50()
    blocks, cut = model.blocks(), MODELS["resnet50"].cut
    assert blocks[cut - 1] is model.layer2[-1]
    assert blocks[cut] is model.layer3[0]
