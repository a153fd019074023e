"""Train on handwritten digits with any number of processes.

    python training.py
    lockstep run -n 4 training.py
    torchrun --nproc-per-node 4 training.py

All three print the same digest.
"""

from functools import partial

import torch

import lockstep as ls
from lockstep.data.datasets import digits


def main() -> None:
    """Train for three epochs, evaluate, and print the digest on rank 0."""
    ls.init()  # reads rank and world size from the environment
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5, stride=2),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8 * 12 * 12, 10),
    )
    training, held_out = ls.partition(digits(), [0.8, 0.2])
    trainer = ls.Trainer(
        model,
        torch.nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        microbatches=8,
        metrics={"accuracy": ls.accuracy},
    )
    for epoch in range(3):
        for batch in trainer.batches(training, batch_size=64, seed=1234, epoch=epoch):
            trainer.step(batch)
    result = trainer.evaluate(held_out, batch_size=64)
    if ls.rank() == 0:
        loss = trainer.last_result.loss
        accuracy = result.metrics["accuracy"]
        print(f"last loss {loss:.6f}, held-out accuracy {accuracy:.2%}")
        print(f"digest {trainer.digest()}")


if __name__ == "__main__":
    main()
