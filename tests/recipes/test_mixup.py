"""Mixup: weighted means of neighbors, seeded by the micro-batch and not by the rank."""

import pytest
import torch
from torch.utils.data import default_collate

from lockstep.model.forward import accuracy
from lockstep.tools.recipes.mixup import Mixup

SAMPLES = [(torch.full((3, 2, 2), float(number)), number % 3) for number in range(4)]


def test_images_and_targets_are_means_with_the_same_share():
    torch.manual_seed(0)
    images, targets = Mixup(0.4, classes=3)(SAMPLES)
    whole, _ = default_collate(SAMPLES)
    assert targets.shape == (4, 3)
    share = float(targets[1, 1])
    assert 0 < share < 1
    torch.testing.assert_close(images, share * whole + (1 - share) * whole[[3, 0, 1, 2]])
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(4))
    assert float(targets[1, 0]) == pytest.approx(1 - share)
    assert float(targets[0, 0]) == pytest.approx(1), "its neighbor has the same class"


def test_the_share_follows_the_global_seed_and_is_symmetric():
    shares = []
    for seed in (0, 0, *range(400)):
        torch.manual_seed(seed)
        shares.append(float(Mixup(1.0, classes=3)(SAMPLES[:2])[1][1, 1]))
    assert shares[0] == shares[1]
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.05)


def test_an_image_alone_is_not_changed():
    images, targets = Mixup(0.4, classes=3)(SAMPLES[1:2])
    torch.testing.assert_close(images[0], SAMPLES[1][0])
    torch.testing.assert_close(targets, torch.tensor([[0.0, 1.0, 0.0]]))


def test_the_accuracy_of_mixed_targets_counts_the_larger_class():
    outputs = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.7]])
    targets = torch.tensor([[0.3, 0.7, 0.0], [0.4, 0.0, 0.6]])
    assert float(accuracy(outputs, targets)) == 0.5
    assert float(accuracy(outputs, targets, k=2)) == 1.0
    assert float(accuracy(outputs, torch.tensor([2, 1]), k=5)) == 1.0
    assert float(accuracy(outputs, torch.tensor([2, 1]), k=2)) == 0.0
