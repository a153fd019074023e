"""Train a ResNet on folders of images, in the shape of PyTorch's ImageNet example.

    lockstep run -n 8 -m examples.imagenet imagenet --arch resnet50 --workers 4

The folder `imagenet` has `train/` and `val/`, each with one folder of images per class. Any number
of processes, stages and loader workers gives the same digest.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import lockstep as ls
from examples.images import ImageDataset, read_image_folder
from examples.resnet import resnet18, resnet34, resnet50, resnet101, start_as_shortcuts

NETWORKS = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
}
SEED = 0


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a ResNet on folders of images.")
    parser.add_argument("folder", help="folder with train/ and val/, each with a folder per class")
    parser.add_argument("-a", "--arch", choices=NETWORKS, default="resnet50", help="network")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("-b", "--batch-size", type=int, default=256, help="over all ranks")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--lr", type=float, help="learning rate; default: 0.1 per 256 samples")
    parser.add_argument("--microbatches", type=int, default=8, help="per batch; changes the bits")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages")
    parser.add_argument("-j", "--workers", type=int, default=0, help="loader processes per rank")
    parser.add_argument("--size", type=int, default=224, help="of images, in pixels")
    parser.add_argument("--weights", help="safetensors file to begin with")
    parser.add_argument("-e", "--evaluate", action="store_true", help="evaluate --weights only")
    return parser.parse_args()


def rate_factor(steps: int, warmup: int, step: int) -> float:
    """Return the factor of the learning rate: linear warmup, then cosine decay."""
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def main() -> None:
    """Train, evaluate after each epoch, and print the digest on rank 0."""
    options = parse_options()
    ls.init()
    torch.manual_seed(SEED)
    files, held_out_files = read_image_folder(options.folder)
    training = ImageDataset(files, options.size, augment=True)
    held_out = ImageDataset(held_out_files, options.size, augment=False)
    model = NETWORKS[options.arch](len(files.classes))
    start_as_shortcuts(model)
    if options.weights:
        ls.load_weights(model, options.weights)
    steps = options.epochs * -(-len(training) // options.batch_size)
    factor = partial(rate_factor, steps, -(-steps // 18))
    rate = 0.1 * options.batch_size / 256 if options.lr is None else options.lr
    make = (
        torch.optim.AdamW
        if options.optimizer == "adamw"
        else partial(torch.optim.SGD, momentum=0.9)
    )
    optimizer = partial(make, lr=rate, weight_decay=1e-4)
    with ls.Trainer(
        model,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        ls.OptimizerConfig(optimizer, scheduler=lambda own: LambdaLR(own, factor)),
        microbatches=options.microbatches,
        pipeline=ls.PipelineConfig(stages=options.stages),
        metrics={"top-1": ls.accuracy, "top-5": partial(ls.accuracy, k=5)},
        checkpoint=None if options.evaluate else ls.CheckpointConfig(),
    ) as trainer:
        loaded = {"batch_size": options.batch_size, "num_workers": options.workers}
        for epoch in range(0 if options.evaluate else options.epochs):
            for batch in trainer.batches(training, epoch=epoch, **loaded):
                trainer.step(batch)
            trainer.evaluate(held_out, **loaded)
        result = trainer.evaluate(held_out, **loaded)
        digest = trainer.digest()
        if not options.evaluate:
            trainer.save_weights(trainer.folder / "weights.safetensors")
    if ls.rank() == 0:
        quality = ", ".join(f"{name} {value:.2%}" for name, value in result.metrics.items())
        print(f"loss {result.loss:.4f}, {quality}")
        print(f"digest {digest}")


if __name__ == "__main__":
    main()
