"""Habits of the users of transformers' Trainer: the same on 1 and 3 ranks.

Each training returns its weights and all that it has logged. All of them run in one launch per
number of ranks.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep as ls

pytestmark = pytest.mark.timeout(600)  # one launch has all trainings of the module

MICROBATCHES = 4  # batches of 12, 12 and 5 samples
SIZE = 3
SAMPLES = 29
HELD_OUT = 11  # samples, in batches of 4
LENGTH = 8
TOKENS = 16
RANKS = (1, 3)

Outcome = dict[str, Any]
trainings: dict[str, Callable[[], Outcome]] = {}


def training(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Register a training by its name."""
    trainings[function.__name__] = function
    return function


def make_rows(samples: int = SAMPLES, seed: int = 1, has_lengths: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(samples):
        length = 2 + index % 7 if has_lengths else LENGTH
        tokens = torch.randint(TOKENS, (length,), generator=generator)
        labels = tokens.clone()
        labels[2 + index % 5 :] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Collate rows of several lengths."""
    batch = {}
    for name, value in (("input_ids", 0), ("labels", -100)):
        columns = [row[name] for row in rows]
        batch[name] = nn.utils.rnn.pad_sequence(columns, True, value)
    return batch


def make_model(dropout: float = 0.1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "Length of IterableDataset")
    torch.manual_seed(0)
    size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drops = {name: dropout for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    return GPT2LMHeadModel(GPT2Config(**size, **drops, bos_token_id=None, eos_token_id=None))


def make_trainer(
    folder: str = "unused", kind: Any = None, model: Any = None, data: Any = None, **options: Any
) -> Any:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import PrinterCallback, TrainingArguments

    from lockstep.integrations.transformers import ExactTrainer

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    own = ("compute_metrics", "callbacks", "data_collator", "audit", "eval_dataset")
    given = {name: options.pop(name) for name in own if name in options}
    defaults = {
        "per_device_train_batch_size": SIZE,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 3,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "seed": 3,
    }
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, **{**defaults, **options}
    )
    given = {"audit": False, "eval_dataset": make_rows(HELD_OUT, 2)} | given
    trainer = (kind or ExactTrainer)(
        model or make_model(),
        arguments,
        train_dataset=make_rows() if data is None else data,
        microbatches=MICROBATCHES,
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def describe(trainer: Any) -> Outcome:
    """Return what must be equal on any number of ranks."""
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss")
    history = [
        {
            name: value
            for name, value in line.items()
            if name in kept or (name.startswith("eval_") and "_per_" not in name)
        }
        for line in trainer.state.log_history
    ]
    for line in history:
        line.pop("eval_runtime", None)
    return {"digest": ls.digest(trainer.model), "history": history}


def train(*args: Any, resume: Any = None, **options: Any) -> Outcome:
    trainer = make_trainer(*args, **options)
    trainer.train(resume)
    return describe(trainer)


def count_hits(prediction: Any) -> dict[str, float]:
    """A metric of all predictions, in the order of the dataset."""
    guesses = prediction.predictions.argmax(-1)[:, :-1]
    labels = prediction.label_ids[:, 1:]
    hits = guesses == labels
    position = float((hits * numpy.arange(hits.size).reshape(hits.shape)).sum())
    return {"accuracy": float(hits[labels != -100].mean()), "position": position}


# --- Evaluation --------------------------------------------------------------------------------


@training
def following_a_metric() -> Outcome:
    """EarlyStopping, the best model and a scheduler follow the evaluation."""
    from transformers import EarlyStoppingCallback

    with TemporaryDirectory() as folder:
        trainer = make_trainer(
            share_folder(folder),
            compute_metrics=count_hits,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
            num_train_epochs=8,
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            learning_rate=0.4,
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0},
        )
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint).name
        after = trainer.evaluate()["eval_loss"]
        outcome = describe(trainer) | {"best": best, "after": after}
        outcome["metric"] = trainer.state.best_metric
        torch.distributed.barrier()
        return outcome


def share_folder(folder: str) -> str:
    """Return the folder of rank 0."""
    found = [folder]
    torch.distributed.broadcast_object_list(found)
    return found[0]


@training
def evaluation_before_and_after_the_training() -> Outcome:
    trainer = make_trainer(compute_metrics=count_hits)
    before = trainer.evaluate()
    trainer.train()
    predicted = trainer.predict(make_rows(HELD_OUT, 2))
    assert before["eval_loss"] == pytest.approx(compute_loss_plainly(make_model()), rel=1e-6)
    last = predicted.metrics["test_loss"]
    assert last == pytest.approx(compute_loss_plainly(trainer.model), rel=1e-6)
    assert len(predicted.predictions) == HELD_OUT
    return describe(trainer) | {
        "before": [before["eval_loss"], before["eval_accuracy"], before["eval_position"]],
        "predictions": predicted.predictions.tolist(),
    }


def compute_loss_plainly(model: Any) -> float:
    """Return the mean over samples of the losses of batches, as the Trainer computes it."""
    rows = make_rows(HELD_OUT, 2)
    total = 0.0
    model.eval()
    for begin in range(0, HELD_OUT, 4):
        part = rows[begin : begin + 4]
        batch = pad(part)
        items = batch["labels"].ne(-100).sum()  # the Trainer's number for this model
        with torch.no_grad():
            total += float(model(**batch, num_items_in_batch=items).loss) * len(part)
    return total / HELD_OUT


@training
def metrics_of_single_batches() -> Outcome:
    """With batch_eval_metrics the function gets one batch after another."""
    totals = []

    def add(prediction: Any, compute_result: bool) -> dict[str, float]:
        totals.append(float(prediction.predictions.sum()))
        if not compute_result:
            return {}
        result = sum(totals)
        count = len(totals)
        totals.clear()
        return {"total": result, "batches": count}

    return train(compute_metrics=add, batch_eval_metrics=True)


@training
def padded_predictions() -> Outcome:
    outcome = train(
        data=make_rows(has_lengths=True),
        eval_dataset=make_rows(HELD_OUT, 2, True),
        data_collator=pad,
        compute_metrics=lambda prediction: {"norm": float(numpy.abs(prediction.predictions).sum())},
        include_for_metrics=["inputs", "loss"],
    )
    return outcome


# --- Data --------------------------------------------------------------------------------------


@training
def samples_grouped_by_length() -> Outcome:
    return train(
        data=make_rows(has_lengths=True),
        eval_dataset=make_rows(HELD_OUT, 2, True),
        data_collator=pad,
        train_sampling_strategy="group_by_length",
    )


class Stream(IterableDataset[Any]):
    """An iterable dataset that draws random numbers."""

    def __init__(self, samples: int, seed: int) -> None:
        self.rows = make_rows(samples, seed)

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            tokens = row["input_ids"].clone()
            tokens[0] = torch.randint(TOKENS, ())
            yield {**row, "input_ids": tokens}


@training
def iterable_datasets() -> Outcome:
    return train(
        data=Stream(SAMPLES, 1),
        eval_dataset=Stream(HELD_OUT, 2),
        max_steps=7,
        eval_strategy="steps",
        eval_steps=3,
    )


@training
def masks_that_a_collator_draws() -> Outcome:
    def mask(rows: list[Any]) -> Any:
        batch = pad(rows)
        batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.2] = 0
        return batch

    outcomes = [train(data_collator=mask, dataloader_num_workers=workers) for workers in (0, 2)]
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@training
def a_loader_of_a_subclass() -> Outcome:
    from lockstep.integrations.transformers import ExactTrainer

    class Mine(ExactTrainer):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, SIZE, shuffle=True, collate_fn=pad)
            return self.accelerator.prepare(loader)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    return train(kind=Mine)


# --- Runs --------------------------------------------------------------------------------------


@training
def a_resumed_training() -> Outcome:
    """What is drawn between steps goes on, too; ignore_data_skip begins the epoch again."""
    from transformers import TrainerCallback

    drawn = []

    class Draw(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            drawn.append(torch.rand(()).item())

    with TemporaryDirectory() as own:
        folder = share_folder(own)
        options = {"callbacks": [Draw()], "save_strategy": "steps", "save_steps": 1}
        whole = train(folder, **options)
        numbers = [*drawn]
        drawn[:] = []
        checkpoint = f"{folder}/checkpoint-4"
        resumed = train(f"{folder}/again", resume=checkpoint, **options)
        assert resumed["digest"] == whole["digest"]
        assert drawn == numbers[4:]
        skipped = train(f"{folder}/skip", resume=checkpoint, ignore_data_skip=True, **options)
        assert skipped["digest"] != whole["digest"]
        torch.distributed.barrier()
        return {"whole": whole, "skipped": skipped}


@training
def two_calls_of_train() -> Outcome:
    trainer = make_trainer(num_train_epochs=1)
    trainer.train()
    first = describe(trainer)
    trainer.train()
    return {"first": first, "second": describe(trainer)}


@training
def tokens_that_are_counted() -> Outcome:
    trainer = make_trainer(include_num_input_tokens_seen="all", max_steps=2)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 24 * LENGTH
    return describe(trainer)


# --- What is refused ---------------------------------------------------------------------------


@training
def random_numbers_in_a_metric() -> Outcome:
    """They belonged to the last batch of a rank: each rank had another metric."""

    def bootstrap(prediction: Any) -> dict[str, float]:
        chosen = numpy.random.choice(HELD_OUT, HELD_OUT)
        return {"chosen": float(chosen.sum()), "mean": float(prediction.predictions[chosen].mean())}

    outcome = train(compute_metrics=bootstrap)
    chosen = [line["eval_chosen"] for line in outcome["history"] if "eval_chosen" in line]
    assert len({*chosen}) > 1
    return outcome


def log_in_the_loss() -> Outcome:
    from lockstep.integrations.transformers import ExactTrainer

    class Logging(ExactTrainer):
        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            self.log({"length": float(inputs["input_ids"].shape[1])})
            return super().compute_loss(model, inputs, **options)

    return train(kind=Logging)


def count_in_the_prediction() -> Outcome:
    from lockstep.integrations.transformers import ExactTrainer

    class Counting(ExactTrainer):
        counted = 0.0

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            self.counted += float(inputs["labels"].float().mean())
            return super().prediction_step(model, inputs, *args, **options)

        def log(self, logs: Any, *args: Any, **options: Any) -> None:
            super().log({**logs, "counted": self.counted}, *args, **options)

    return train(kind=Counting)


class OwnGenerator(list[Any]):
    def __init__(self) -> None:
        super().__init__(make_rows())
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: Any) -> Any:
        tokens = torch.randint(TOKENS, (LENGTH,), generator=self.generator)
        return {**super().__getitem__(index), "input_ids": tokens}


REFUSED: dict[str, Callable[[], Outcome]] = {
    r"sample \d+ of OwnGenerator, loaded twice": lambda: train(data=OwnGenerator()),
    r"sample 0 of OwnGenerator, loaded twice": lambda: train(eval_dataset=OwnGenerator()),
    "length was logged while a micro-batch was computed": log_in_the_loss,
    "counted was logged as .* on rank 0 and as .* on rank 1": count_in_the_prediction,
}


def run_all() -> tuple[dict[str, Outcome], dict[str, str]]:
    """Return the outcomes of all trainings on this rank, and the messages of those refused."""
    messages = {}
    for name, refused in REFUSED.items():
        try:
            refused()
            messages[name] = "it was trained"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return {name: run() for name, run in trainings.items()}, messages


@pytest.fixture(scope="module")
def outcomes(forks: Any) -> dict[int, list[Any]]:
    return {n: forks(run_all, n) for n in RANKS}


@pytest.mark.parametrize("name", trainings)
def test_a_habit_has_the_same_outcome_on_any_number_of_ranks(outcomes: Any, name: str) -> None:
    ((first, _),) = outcomes[1]
    for results in outcomes.values():
        for found, _ in results:
            assert found[name] == first[name]


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_exact_is_refused_on_every_rank(outcomes: Any, words: str) -> None:
    for results in outcomes.values():
        for _, messages in results:
            if len(results) == 1 and "on rank 1" in words:
                continue  # there is none
            assert re.match(rf"\w*Error: .*{words}", messages[words]), messages[words]
