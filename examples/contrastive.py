"""Learn representations of handwritten digits by a supervised contrastive loss (SupCon).

    python contrastive.py
    lockstep run -n 4 contrastive.py

The loss compares each image with all others of the batch, those of other ranks included, and any
number of processes prints the same digest. A held-out image gets the label of the nearest mean.
"""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.data.datasets import digits


def contrastive_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of finding the images of the same label among all others."""
    outputs = normalize(outputs, dim=1)
    others = ~torch.eye(len(labels), dtype=torch.bool)
    similarity = outputs @ outputs.T / 0.1
    same = (labels[:, None] == labels) & others
    normalizer = similarity.masked_fill(~others, -torch.inf).logsumexp(dim=1, keepdim=True)
    return (normalizer - similarity)[same].mean()


def classify(model: nn.Module, held_out: TensorDataset, known: TensorDataset) -> float:
    """Return the fraction of held-out images whose nearest mean is that of their label."""
    images, labels = known.tensors
    with torch.no_grad():
        outputs = normalize(model(images), dim=1)
        means = torch.stack([outputs[labels == label].mean(dim=0) for label in range(10)])
        nearest = (normalize(model(held_out.tensors[0]), dim=1) @ means.T).argmax(dim=1)
    return (nearest == held_out.tensors[1]).double().mean().item()


def main() -> None:
    """Train for four epochs, and print the accuracy and the digest on rank 0."""
    ls.init()
    torch.manual_seed(0)
    images, labels = digits().tensors
    training = TensorDataset(images[:1400], labels[:1400])
    held_out = TensorDataset(images[1400:], labels[1400:])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
    )
    trainer = ls.Trainer(model, None, partial(torch.optim.Adam, lr=2e-3), microbatches=8)
    before = classify(model, held_out, training)
    for _ in range(4):
        for batch in trainer.batches(training, batch_size=200):
            with trainer.manual_step() as step:
                loss = step.backward_whole_batch(
                    lambda data: (model(data[0]), data[1]), contrastive_loss, batch
                )
    if ls.rank() == 0:
        after = classify(model, held_out, training)
        print(f"last loss {loss.item():.4f}, accuracy {before:.1%} before, {after:.1%} after")
        print(f"digest {trainer.digest()}")


if __name__ == "__main__":
    main()
