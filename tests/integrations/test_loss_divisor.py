"""Losses of ExactTrainer: those of a plain Trainer on one process with the whole batch.

Each family of models is trained by transformers' Trainer with batches of 8, on one process, and by
ExactTrainer with 4 micro-batches of 2, on 1, 2 and 3 ranks. Weights, logged losses and `eval_loss`
are those of the former up to rounding, and equal on any number of ranks.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls

pytestmark = pytest.mark.timeout(600)  # one launch has all trainings of the module

BATCH = 8
MICROBATCHES = 4
SAMPLES = 13
LENGTH = 8
TOKENS = 16
CLASSES = 3

Columns = dict[str, torch.Tensor]


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def make_tokens() -> torch.Tensor:
    return torch.randint(4, TOKENS, (SAMPLES, LENGTH), generator=draw())


def make_labels(classes: int = CLASSES) -> torch.Tensor:
    """Return a label per token, of which each sample has another number."""
    labels = make_tokens() % classes
    for sample in range(SAMPLES):
        labels[sample, 2 + sample % 7 :] = -100
    return labels


def text(**columns: torch.Tensor) -> Columns:
    return {"input_ids": make_tokens(), **columns}


def one_label() -> torch.Tensor:
    return torch.arange(SAMPLES) % CLASSES


def floats(*size: int) -> torch.Tensor:
    return torch.rand((SAMPLES, *size), generator=draw())


SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(head: str, **options: Any) -> Any:
    import transformers

    options.setdefault("num_labels", CLASSES)
    config = transformers.BertConfig(**SMALL, **NO_DROPOUT, **options)
    return getattr(transformers, f"BertFor{head}")(config)


def gpt2(head: str = "LMHeadModel") -> Any:
    import transformers

    size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    without = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.GPT2Config(**size, **without, **ends, num_labels=CLASSES)
    return getattr(transformers, f"GPT2{head}")(config)


def vit() -> Any:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    config = transformers.ViTConfig(
        **sizes, **NO_DROPOUT, intermediate_size=8, patch_size=4, num_labels=CLASSES
    )
    return transformers.ViTForImageClassification(config)


def t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=TOKENS,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


class Adding(nn.Module):
    """A model whose loss is a sum over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, inputs: Any, targets: Any) -> Any:
        logits = self.linear(inputs)
        return {"loss": nn.functional.cross_entropy(logits, targets, reduction="sum")}


def mean_over_labels(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """An own loss that ignores the number of items."""
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def sum_over_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / num_items_in_batch


class OwnLoss:
    """The part of a subclass of Trainer that computes a loss of its own."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = mean_over_labels(outputs, labels)
        return (loss, outputs) if return_outputs else loss


TOKENS_WITH_LABELS = lambda: text(labels=make_labels())  # noqa: E731
FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], Columns], dict[str, Any]]] = {
    "sequence": (
        lambda: bert("SequenceClassification"),
        lambda: text(labels=one_label()),
        {},
    ),
    "regression": (
        lambda: bert("SequenceClassification", num_labels=1),
        lambda: text(labels=floats()),
        {},
    ),
    "several labels": (
        lambda: bert("SequenceClassification", problem_type="multi_label_classification"),
        lambda: text(labels=floats(CLASSES).round()),
        {},
    ),
    "sequence, decoder": (
        lambda: gpt2("ForSequenceClassification"),
        lambda: text(labels=one_label()),
        {},
    ),
    "tokens": (lambda: bert("TokenClassification"), TOKENS_WITH_LABELS, {}),
    "masked language model": (
        lambda: bert("MaskedLM"),
        lambda: text(labels=make_labels(TOKENS)),
        {},
    ),
    "causal language model": (gpt2, lambda: text(labels=make_labels(TOKENS)), {}),
    "answers": (
        lambda: bert("QuestionAnswering", num_labels=2),
        lambda: text(
            start_positions=torch.arange(SAMPLES) % 4, end_positions=torch.arange(SAMPLES) % 5 + 3
        ),
        {"label_names": ["start_positions", "end_positions"]},
    ),
    "images": (vit, lambda: {"pixel_values": floats(3, 8, 8), "labels": one_label()}, {}),
    "translation": (t5, lambda: text(labels=make_labels(TOKENS)), {}),
    "label smoothing": (gpt2, lambda: text(labels=make_labels(TOKENS)), {"smoothing": 0.1}),
    "label smoothing, tokens": (
        lambda: bert("TokenClassification"),
        TOKENS_WITH_LABELS,
        {"smoothing": 0.1},
    ),
    "a sum": (
        Adding,
        lambda: {"inputs": floats(4), "targets": one_label()},
        {"label_names": ["targets"]},
    ),
    "own compute_loss": (
        lambda: bert("TokenClassification"),
        TOKENS_WITH_LABELS,
        {"own": OwnLoss},
    ),
    "own mean": (
        lambda: bert("TokenClassification"),
        TOKENS_WITH_LABELS,
        {"compute_loss_func": mean_over_labels},
    ),
    "own sum over items": (
        lambda: bert("TokenClassification"),
        TOKENS_WITH_LABELS,
        {"compute_loss_func": sum_over_items},
    ),
}


def train(
    is_exact: bool,
    make_model: Callable[[], Any],
    make_columns: Callable[[], Columns],
    *,
    own: type = object,
    smoothing: float = 0.0,
    label_names: list[str] | None = None,
    size: int = BATCH // MICROBATCHES,
    **options: Any,
) -> dict[str, Any]:
    """Return weights and losses of a training, and its digest."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging

    from lockstep.integrations.transformers import ExactTrainer

    logging.set_verbosity_error()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    model = make_model()
    columns = make_columns()
    data = [{name: column[i] for name, column in columns.items()} for i in range(SAMPLES)]
    arguments = TrainingArguments(
        "unused",
        per_device_train_batch_size=size if is_exact else BATCH,
        per_device_eval_batch_size=4,
        num_train_epochs=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        train_sampling_strategy="sequential",
        label_smoothing_factor=smoothing,
        label_names=label_names,
        remove_unused_columns=False,
        dataloader_drop_last=size == 1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    base: Any = ExactTrainer if is_exact else Trainer
    kind = base if own is object else type("Mine", (own, base), {})
    if is_exact:
        options |= {"microbatches": MICROBATCHES, "audit": False}
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data, **options)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    history = trainer.state.log_history
    return {
        "weights": nn.utils.parameters_to_vector(model.parameters()).tolist(),
        "losses": [line["loss"] for line in history if "loss" in line],
        "eval": [line["eval_loss"] for line in history if "eval_loss" in line],
        "train_loss": history[-1]["train_loss"],
        "digest": ls.digest(model),
    }


def train_exactly() -> dict[str, Any]:
    return {name: train(True, *family[:2], **family[2]) for name, family in FAMILIES.items()}


def train_plainly() -> dict[str, Any]:
    return {name: train(False, *family[:2], **family[2]) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def outcomes(forks: Any) -> dict[int, list[dict[str, Any]]]:
    return {n: forks(train_exactly, n) for n in (1, 3)}


@pytest.fixture(scope="module")
def plain(forks: Any) -> dict[str, Any]:
    (outcome,) = forks(train_plainly, 1)
    return outcome


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_are_those_of_one_process(
    outcomes: Any, plain: Any, family: str
) -> None:
    (exact,) = outcomes[1]
    assert len(plain[family]["losses"]) == 2
    for name in ("losses", "eval", "weights"):
        torch.testing.assert_close(
            torch.tensor(exact[family][name]),
            torch.tensor(plain[family][name]),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_are_equal_on_any_number_of_ranks(outcomes: Any, family: str) -> None:
    found = {repr(outcome[family]) for results in outcomes.values() for outcome in results}
    assert len(found) == 1


# --- What cannot be known ----------------------------------------------------------------------


def weighted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A mean that divides by the weights of classes."""
    logits = outputs["logits"].flatten(0, 1)
    weight = torch.tensor([1.0, 5.0, 9.0])
    return nn.functional.cross_entropy(logits, labels.flatten(), weight)


def partly(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum over items with a term that is not divided."""
    whole = sum_over_items(outputs, labels, num_items_in_batch)
    return whole + outputs["logits"].square().mean()


class DeclaredMean(OwnLoss):
    loss_is_scaled_for_ga = False


def refuse(own: type = object, **options: Any) -> str:
    try:
        train(True, *FAMILIES["tokens"][:2], own=own, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def refuse_all() -> list[str]:
    one = {"size": 1}
    return [
        refuse(compute_loss_func=weighted),
        refuse(compute_loss_func=partly),
        refuse(compute_loss_func=mean_over_labels, **one),
        refuse(own=DeclaredMean, **one),
    ]


def test_a_loss_of_an_unknown_kind_is_refused_on_every_rank(forks: Any) -> None:
    for n in (1, 2):
        for weights, part, single, declared in forks(refuse_all, n):
            said = "UsageError: ExactTrainer: the loss of a micro-batch is neither a mean over"
            assert weights.startswith(said), weights
            assert part.startswith(said), part
            assert re.match("UsageError: ExactTrainer cannot find out what the loss", single)
            assert declared == "trained"


def test_a_batch_without_labels_has_no_loss() -> None:
    from lockstep.integrations.loss_divisor import LossDivisor

    divisor = LossDivisor(
        "ExactTrainer",
        lambda inputs, items: torch.tensor(math.nan),
        nn.Linear(1, 1),
        shifts_labels=False,
        is_known=True,
        declared=None,
        tolerance=1e-3,
    )
    labels = torch.full((2, 3), -100)
    shares = divisor.find_shares([{"labels": labels}, {"labels": labels}], None, None)
    assert all(share is not None and math.isnan(share) for share in shares)
