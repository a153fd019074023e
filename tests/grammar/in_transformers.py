"""A random training in transformers' Trainer."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import nn

import lockstep as ls
from grammar import Case
from grammar.drawing import Draw
from grammar.frameworks import Habit, loss_of, make_columns, make_loader

TOKENS = 12
LENGTH = 7


def draw_options(draw: Draw) -> dict[str, Any]:
    """Draw what only transformers has."""
    arguments: dict[str, Any] = draw.some(
        max_steps=[3, 5],
        eval_on_start=True,
        activation_checkpointing=True,
        neftune_noise_alpha=5.0,
        label_smoothing_factor=0.1,
        train_sampling_strategy=["sequential", "group_by_length"],
    )
    return {
        "arguments": arguments,
        "reads_words": draw.chance(0.5),
        "evaluates_first": draw.chance(0.2),
        "has_metrics": draw.chance(0.4),
        "has_own_loss": draw.chance(0.2),
        "eval_size": draw.randint(1, 4),
    }


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, targets: Any, **inputs: Any) -> Any:
        """Return the loss of a micro-batch."""
        loss = loss_of(self.loss, self.model, [*inputs.values(), targets])
        return {"loss": loss, "logits": targets.reshape(len(targets), -1).float()}


class Rows(torch.utils.data.Dataset[Any]):
    """Samples by name, from those of another dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def make_words(of: Habit, samples: int, shift: int) -> list[Any]:
    """Return rows of several lengths, of which some labels do not count."""
    generator = torch.Generator().manual_seed(of.seed + shift)
    rows = []
    for index in range(samples):
        tokens = torch.randint(TOKENS, (2 + index % (LENGTH - 1),), generator=generator)
        labels = tokens.clone()
        labels[1 + int(torch.randint(1, LENGTH, (), generator=generator)) :] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Collate rows of several lengths, and mask some tokens."""
    batch = {}
    for name, value in (("input_ids", 0), ("labels", -100)):
        columns = [row[name] for row in rows]
        batch[name] = nn.utils.rnn.pad_sequence(columns, True, value)
    batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.1] = 1
    return batch


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A mean over labels that ignores the number of items."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def train(drawn: Case, of: Habit) -> dict[str, Any]:
    """Train, and return what must be equal on any number of ranks."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging

    from lockstep.integrations.transformers import ExactTrainer

    logging.set_verbosity_error()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(of.seed)
    options = of.options
    arguments = dict(options["arguments"])
    own: dict[str, Any] = {}
    if options["reads_words"]:
        size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
        model: Any = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
        data: Any = make_words(of, of.samples, 0)
        held_out: Any = make_words(of, of.held_out, 1)
        own["data_collator"] = pad
        if options["has_own_loss"]:
            own["compute_loss_func"] = own_loss
    else:
        model = WithLoss(drawn.model.build(of.seed), drawn.loss.build(drawn.model.dtype))
        loader = make_loader(of, of.source, make_columns(drawn, of, of.samples, 0))
        validated = of.validated or "in memory"
        others = make_loader(of, validated, make_columns(drawn, of, of.held_out, 1))
        data = loader.dataset
        held_out = others.dataset
        collate = loader.collate_fn

        def name_columns(samples: list[Any]) -> dict[str, Any]:
            *inputs, targets = collate(samples)
            named = {f"input{number}": column for number, column in enumerate(inputs)}
            return {**named, "targets": targets}

        own["data_collator"] = name_columns
        arguments["label_names"] = ["targets"]
        for name in ("activation_checkpointing", "neftune_noise_alpha", "label_smoothing_factor"):
            arguments.pop(name, None)
        if arguments.get("train_sampling_strategy") == "group_by_length":
            del arguments["train_sampling_strategy"]
        if of.source == "endless stream":
            arguments.setdefault("max_steps", 4)
    if options["has_metrics"]:
        own["compute_metrics"] = lambda prediction: {
            "norm": float(numpy.abs(prediction.predictions.astype(float)).sum()),
            "order": float((prediction.predictions.flatten() * 1e-3).cumsum()[-1]),
        }
    is_evaluated = bool(of.validated)
    schedules = {"none": "constant", "step": "cosine", "linear": "linear"}
    schedule = schedules.get(of.schedule, "reduce_lr_on_plateau" if is_evaluated else "linear")
    settings = TrainingArguments(
        "unused",
        per_device_train_batch_size=of.size,
        per_device_eval_batch_size=options["eval_size"],
        num_train_epochs=of.epochs,
        learning_rate=0.05,
        optim="sgd" if of.optimizer == "sgd" else "adamw_torch",
        lr_scheduler_type=schedule,
        max_grad_norm=of.clip or 0.0,
        bf16=of.has_half,
        logging_steps=1,
        eval_strategy="epoch" if is_evaluated else "no",
        metric_for_best_model="loss" if is_evaluated else None,
        save_strategy="no",
        dataloader_num_workers=of.workers,
        dataloader_drop_last=of.drop_last,
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=of.seed,
        **arguments,
    )
    callbacks = [EarlyStoppingCallback(1)] if of.follows and is_evaluated else []
    trainer = ExactTrainer(
        model,
        settings,
        train_dataset=data,
        eval_dataset=held_out,
        microbatches=of.microbatches,
        callbacks=callbacks,
        **own,
    )
    trainer.remove_callback(PrinterCallback)
    if options["evaluates_first"]:
        trainer.evaluate()
    trainer.train()
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss")
    history = [
        {
            name: value
            for name, value in line.items()
            if name in kept or (name.startswith("eval_") and not name.endswith(UNEQUAL))
        }
        for line in trainer.state.log_history
    ]
    return {
        "digest": ls.digest(model),
        "history": history,
        "steps": trainer.state.global_step,
        "drawn": torch.rand(()).item(),
    }


UNEQUAL = ("runtime", "per_second", "preparation_time")
"""The ends of the names of what measures time."""
