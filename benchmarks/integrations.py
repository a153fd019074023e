"""Digests of Lightning, Accelerate and transformers' Trainer on 1, 2 and 4 ranks.

    python benchmarks/integrations.py [--ranks 1 2 4] [--backends lockstep gloo]

Each framework trains twice on every number of ranks, with 8 micro-batches in all: as it is, on
torch's DistributedDataParallel with gradient accumulation, and with the class of
`lockstep.integrations`. Needs the extra `integrations`; downloads nothing. Prints the table of
`benchmarks/integrations.md`.
"""

import argparse
import logging
import tempfile
import warnings
from functools import partial
from importlib.metadata import version

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import lockstep as ls
from lockstep.data.datasets import digits

MICROBATCHES = 8  # a micro-batch has 16 samples, and a batch 128
SIZE = 16
EPOCHS = 2
BACKENDS = ["lockstep", "gloo"]
TRAININGS = {
    "lightning": "convolutions with batch norm and dropout, AdamW, OneCycleLR, clipping",
    "accelerate": "the same in bfloat16, SGD with momentum",
    "transformers": "GPT-2 of 2 blocks with dropout, rows of unequal length, AdamW, clipping",
}


def convolutions():
    """Return a network for the digits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * 12 * 12, 10),
    )


def with_lightning(is_exact):
    """Train with Lightning."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from lockstep.integrations.lightning import ExactStrategy

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = convolutions()

        def training_step(self, batch, index):
            images, labels = batch
            return nn.functional.cross_entropy(self.network(images), labels)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    model = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ls.world_size(),
        strategy=ExactStrategy(microbatches=MICROBATCHES) if is_exact else DDPStrategy(),
        accumulate_grad_batches=MICROBATCHES // ls.world_size(),
        gradient_clip_val=1.0,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The last of 1,797 digits would be a batch of 5 samples, which Lightning cannot divide by 2.
    trainer.fit(model, DataLoader(Subset(digits(), range(1700)), SIZE, shuffle=True))
    return model


def with_accelerate(is_exact):
    """Train with Accelerate."""
    from accelerate import Accelerator

    from lockstep.integrations.accelerate import ExactAccelerator

    reset_accelerate()
    kind = partial(ExactAccelerator, microbatches=MICROBATCHES) if is_exact else Accelerator
    accelerator = kind(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=MICROBATCHES // ls.world_size(),
    )
    model = convolutions()
    called, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        DataLoader(digits(), SIZE, shuffle=True),
    )
    for _ in range(EPOCHS):
        for images, labels in loader:
            with accelerator.accumulate(called):
                accelerator.backward(nn.functional.cross_entropy(called(images), labels))
                optimizer.step()
                optimizer.zero_grad()
    return model


def with_transformers(is_exact):
    """Train with transformers' Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from lockstep.integrations.transformers import ExactTrainer

    reset_accelerate()
    torch.manual_seed(0)
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
    data = []
    for index in range(600):
        tokens = torch.randint(64, (16,))
        labels = tokens.clone()
        labels[4 + index % 13 :] = -100
        data.append({"input_ids": tokens, "labels": labels})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=MICROBATCHES // ls.world_size(),
            num_train_epochs=EPOCHS,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        kind = partial(ExactTrainer, microbatches=MICROBATCHES) if is_exact else Trainer
        trainer = kind(model, arguments, train_dataset=data)
        trainer.log = lambda *_: None
        trainer.train()
    return model


def reset_accelerate():
    """Forget the settings of the last training in this process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def digest_all(backend):
    """Return the digests of all trainings on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    ls.init(backend=backend)
    trainings = {
        "lightning": with_lightning,
        "accelerate": with_accelerate,
        "transformers": with_transformers,
    }
    return {
        (name, is_exact): ls.digest(train(is_exact))[:12]
        for name, train in trainings.items()
        for is_exact in (False, True)
    }


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    options = parser.parse_args()
    layouts = [(n, backend) for n in options.ranks for backend in options.backends]
    found = {}
    for n, backend in layouts:
        digests = ls.launch(digest_all, (backend,), nprocs=n, pass_rank=False)
        for key in digests[0]:  # without Lockstep, each rank has batch statistics of its own
            assert not key[1] or len({each[key] for each in digests}) == 1, (key, digests)
        found[n, backend] = digests[0]
    print("| framework | " + " | ".join(f"{n}, {backend}" for n, backend in layouts) + " |")
    print("|---" * (len(layouts) + 1) + "|")
    for name in TRAININGS:
        for is_exact in (False, True):
            title = f"{name} {version(name)}" + (", with Lockstep" if is_exact else "")
            row = [found[layout][name, is_exact] for layout in layouts]
            print(f"| {title} | " + " | ".join(row) + " |")
    print()
    for name, description in TRAININGS.items():
        print(f"- {name}: {description}.")


if __name__ == "__main__":
    main()
