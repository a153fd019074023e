"""Lightning, Accelerate and Hugging Face's Trainer: the same bits on 1, 2, 3 and 4 ranks.

All trainings run in one launch per number of ranks. On two ranks they save checkpoints in the
middle of an epoch, from which the other numbers of ranks resume.
"""

import random
import re
import tempfile
import warnings
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep as ls
from lockstep.kernel import spec

pytestmark = pytest.mark.timeout(600)  # one launch has all trainings of the module

BATCH = 16  # batches of 16, 16 and 11 samples
MICROBATCHES = 4
SAMPLES = 43
EPOCHS = 2
SAVED = 4  # the step from which trainings resume: the first one of the second epoch


def filter_warnings() -> None:
    """Turn warnings into errors, except those of the frameworks' own code and of short runs."""
    warnings.simplefilter("error")
    for message in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "The '.*dataloader' does not have many workers",
        "Be aware that when using `ckpt_path`, callbacks",
    ):
        warnings.filterwarnings("ignore", message)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (SAMPLES,), generator=generator))


def make_loader(data, **options) -> DataLoader:
    return DataLoader(data, BATCH // MICROBATCHES, **{"shuffle": True} | options)


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def make_optimizer(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


# --- Lightning -------------------------------------------------------------------------------


def make_lightning_module():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = make_network()

        def training_step(self, batch, index):
            inputs, targets = batch
            return nn.functional.cross_entropy(self.network(inputs), targets)

        def configure_optimizers(self):
            optimizer, scheduler = make_optimizer(self.parameters())
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


def train_with_lightning(
    folder=None, resume=None, step=SAVED, *, module=None, loader=None, **options
):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lockstep.integrations.lightning import ExactStrategy

    module = module or make_lightning_module()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ls.world_size(),
        strategy=ExactStrategy(microbatches=MICROBATCHES, seed=3),
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[*options.pop("callbacks", []), *([saving] if folder else [])],
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = loader or make_loader(make_data())
    trainer.fit(
        module, loader, ckpt_path=resume and f"{resume}/step={step}.ckpt", weights_only=False
    )
    assert trainer.global_step == EPOCHS * 3
    return ls.digest(module.network)


def train_with_another_weight():
    """Return the error of a training in which a weight of rank 1 changes after step 0."""
    import lightning.pytorch as pl

    class Spoil(pl.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            if trainer.global_step == 1 and ls.rank() == 1:
                next(module.parameters()).data.view(-1)[0] += 1

    with pytest.raises(ls.errors.DisagreementError) as caught:
        train_with_lightning(callbacks=[Spoil()])
    return str(caught.value)


def test_lightning_compares_weights_and_says_that_it_repeats_nothing(ranks, capfd):
    for said in ranks(train_with_another_weight, 2):
        assert "has other values on rank 1 than on rank 0 in step 1" in said
    said = capfd.readouterr().err
    assert said.count("Lightning calls training_step, which may count metrics") == 1


# --- Accelerate ------------------------------------------------------------------------------


def train_with_accelerate(
    folder=None, resume=None, step=SAVED, *, network=None, loader=None, max_norm=None, **options
):
    from accelerate.state import AcceleratorState, GradientState

    from lockstep.integrations.accelerate import ExactAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = ExactAccelerator(cpu=True, microbatches=MICROBATCHES, seed=3, **options)
    network = network or make_network()
    optimizer, scheduler = make_optimizer(network.parameters())
    loader = loader or make_loader(make_data())
    loader, model, optimizer, scheduler = accelerator.prepare(loader, network, optimizer, scheduler)
    if resume:
        accelerator.load_state(f"{resume}/{step}")
    exact = accelerator.exact
    for epoch in range(exact.steps // 3, EPOCHS):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                if max_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if folder and accelerator.sync_gradients:
                accelerator.save_state(f"{folder}/{exact.steps}")
    assert exact.steps == EPOCHS * 3
    return ls.digest(network)


# --- Hugging Face ----------------------------------------------------------------------------


def train_with_transformers(
    model,
    data,
    folder=None,
    resume=None,
    step=SAVED,
    *,
    compute_loss_func=None,
    **options,
):
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainingArguments

    from lockstep.integrations.transformers import ExactTrainer

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    arguments = TrainingArguments(
        folder or "unused",
        per_device_train_batch_size=BATCH // MICROBATCHES,
        num_train_epochs=EPOCHS,
        save_strategy="steps" if folder else "no",
        save_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **options,
    )
    trainer = ExactTrainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=[data[index] for index in range(5)],
        microbatches=MICROBATCHES,
        compute_loss_func=compute_loss_func,
    )
    trainer.log = lambda *_: None
    trainer.train(resume and f"{resume}/checkpoint-{step}")
    assert trainer.state.global_step == EPOCHS * 3
    return ls.digest(model)


def train_language_model(*folders, **options):
    """Train on rows with unequal numbers of tokens; the loss is a mean over tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    size = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
    data = []
    for index in range(SAMPLES):
        tokens = torch.randint(16, (8,))
        labels = tokens.clone()
        labels[3 + index % 5 :] = -100
        data.append({"input_ids": tokens, "labels": labels})
    return train_with_transformers(model, data, *folders, **options)


class Classifier(nn.Module):
    """A model that returns the mean of its loss over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, inputs, targets):
        outputs = self.network(inputs)
        return {"loss": nn.functional.cross_entropy(outputs, targets), "outputs": outputs}


class Counting(nn.Linear):
    """A model with a state that is hidden in Python."""

    calls = 0

    def forward(self, inputs, targets=None):
        self.calls += 1
        outputs = super().forward(inputs) * self.calls
        return outputs if targets is None else {"loss": outputs.square().mean()}


def train_classifier(*folders, data=None, model=None, **options):
    data = data or [{"inputs": inputs, "targets": target} for inputs, target in make_data()]
    options.setdefault("remove_unused_columns", False)
    return train_with_transformers(model or Classifier(), data, *folders, **options)


# --- The specification -----------------------------------------------------------------------

SCOPES = {"lightning": lambda network: [network], "accelerate": list}


def train_as_specified(name):
    network = make_network()
    batches = [b for epoch in range(EPOCHS) for b in spec.epoch(make_data(), BATCH, 3, epoch)]
    schedulers = []

    def make(parameters):
        optimizer, scheduler = make_optimizer(parameters)
        schedulers.append(scheduler)
        return optimizer

    spec.train(
        network,
        nn.CrossEntropyLoss(),
        make,
        batches,
        MICROBATCHES,
        3,
        scopes=SCOPES[name](network),
        after_step=lambda *_: schedulers[0].step(),
    )
    return ls.digest(network)


# --- More, in the long tests -----------------------------------------------------------------


class NoisyData(Dataset):
    """Samples that draw from every global generator when they are loaded."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.data = make_data()
        self.names = names

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        inputs, targets = self.data[index]
        inputs = inputs + torch.rand(6) * random.random() * numpy.random.rand()
        return (
            dict(zip(self.names, (inputs.float(), targets), strict=True))
            if self.names
            else (inputs, targets)
        )


def validate_and_draw_with_lightning():
    module = make_lightning_module()

    def validation_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss + torch.rand(()), sync_dist=True)

    def on_after_batch_transfer(self, batch, index):
        return [batch[0] + torch.rand_like(batch[0]), batch[1]]

    def val_dataloader(self):
        return make_loader(make_data(), shuffle=False)

    for function in (validation_step, on_after_batch_transfer, val_dataloader):
        setattr(type(module), function.__name__, function)
    return train_with_lightning(module=module, gradient_clip_val=0.1)


def compute_mean_of_tokens(outputs, labels, num_items_in_batch):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


LONG = {
    "lightning, noisy data": lambda: train_with_lightning(loader=make_loader(NoisyData())),
    "lightning, workers": lambda: train_with_lightning(
        loader=make_loader(NoisyData(), num_workers=2, persistent_workers=True)
    ),
    "lightning, in order": lambda: train_with_lightning(
        loader=make_loader(make_data(), shuffle=False), use_distributed_sampler=False
    ),
    "lightning, validation": validate_and_draw_with_lightning,
    "accelerate, workers": lambda: train_with_accelerate(
        loader=make_loader(NoisyData(), num_workers=2)
    ),
    "accelerate, noisy data": lambda: train_with_accelerate(loader=make_loader(NoisyData())),
    "classifier, noisy data": lambda: train_classifier(data=NoisyData(("inputs", "targets"))),
    "classifier, workers": lambda: train_classifier(
        data=NoisyData(("inputs", "targets")), dataloader_num_workers=2
    ),
    "classifier, in order": lambda: train_classifier(train_sampling_strategy="sequential"),
    "language model, checkpointing": lambda: train_language_model(activation_checkpointing=True),
    "language model, label smoothing": lambda: train_language_model(label_smoothing_factor=0.1),
    "language model, own loss": lambda: train_language_model(
        compute_loss_func=compute_mean_of_tokens
    ),
    "language model, noise": lambda: train_language_model(neftune_noise_alpha=5.0),
}


def resume_all(folder: str) -> dict[str, set[str]]:
    """Return the digests of the trainings that were resumed after each step."""
    filter_warnings()
    return {
        name: {train(None, f"{folder}/{name}", step) for step in range(1, EPOCHS * 3)}
        for name, train in RESUMED.items()
    }


def train_more(is_long: bool) -> dict[str, str]:
    """Return the digests of the long trainings, or of the others."""
    filter_warnings()
    trainings = LONG if is_long else OTHERS | RESUMED
    return {name: train() for name, train in trainings.items()}


# --- What is refused -------------------------------------------------------------------------


def fit_with_a_callback(name, *args):
    from lightning.pytorch import callbacks

    train_with_lightning(callbacks=[getattr(callbacks, name)(*args)])


def fit_a_changed_module(**changes):
    module = make_lightning_module()
    for name, value in changes.items():
        setattr(type(module), name, value)
    train_with_lightning(module=module)


def resume_from_another_strategy():
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
    trainer.fit(make_lightning_module(), make_loader(make_data()))
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(f"{folder}/step={SAVED}.ckpt")
        train_with_lightning(None, folder)


def average_gradients():
    from lockstep.integrations.lightning import ExactStrategy

    ExactStrategy(ddp_comm_hook=print)


REFUSED = {
    "GradientAccumulationScheduler": partial(
        fit_with_a_callback, "GradientAccumulationScheduler", {1: 2}
    ),
    "ExactStrategy cannot train with accumulate_grad_batches=3; leave it out": partial(
        train_with_lightning, accumulate_grad_batches=3
    ),
    "on_before_batch_transfer": partial(
        fit_a_changed_module, on_before_batch_transfer=lambda self, batch, index: batch
    ),
    "LBFGS computes the loss several times": partial(
        fit_a_changed_module,
        configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()),
    ),
    "saved with another strategy": resume_from_another_strategy,
    "leave out ddp_comm_hook": average_gradients,
    "trains on one DataLoader": lambda: train_with_lightning(loader=[make_loader(make_data())] * 2),
    "ExactAccelerator cannot train with gradient_accumulation_steps=3": partial(
        train_with_accelerate, gradient_accumulation_steps=3
    ),
    "ExactTrainer cannot train with gradient_accumulation_steps=3": partial(
        train_classifier, gradient_accumulation_steps=3
    ),
    "average_tokens_across_devices=False": partial(
        train_classifier, average_tokens_across_devices=False
    ),
    "batch_rebalance": partial(train_language_model, train_sampling_strategy="batch_rebalance"),
    "rank 0, step 0, micro-batch 1: computed again .* Counting.calls changed": lambda: (
        train_with_accelerate(network=Counting(6, 3))
    ),
    "micro-batch 1: computed again .* Counting.calls changed meanwhile": lambda: train_classifier(
        model=Counting(6, 3)
    ),
    "not saved by ExactTrainer": partial(train_language_model, None, "elsewhere"),
}


def refuse_all(trainings) -> dict[str, str]:
    """Return the message of each refused training."""
    messages = {}
    for name, train in trainings.items():
        try:
            train()
            messages[name] = "it was trained"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


# --- All -------------------------------------------------------------------------------------

RESUMED = {
    "lightning": train_with_lightning,
    "accelerate": train_with_accelerate,
    "language model": train_language_model,
    "classifier": train_classifier,
}
OTHERS = {
    "lightning, bf16, clipped": partial(
        train_with_lightning, precision="bf16-mixed", gradient_clip_val=0.1
    ),
    "accelerate, bf16, clipped": partial(
        train_with_accelerate, max_norm=0.1, mixed_precision="bf16"
    ),
    "language model, bf16, evaluated": partial(
        train_language_model, bf16=True, eval_strategy="steps", eval_steps=1
    ),
}


def train_all(folder: str) -> dict[str, str]:
    """Return the digests of all trainings; some are resumed, unless this is on two ranks."""
    filter_warnings()
    digests = {name: train() for name, train in OTHERS.items()}
    for name, train in RESUMED.items():
        place = f"{folder}/{name}"
        digests[name] = train(place if ls.world_size() == 2 else None)
        if ls.world_size() != 2:
            digests[f"{name}, resumed"] = train(None, place)
    if ls.world_size() == 1:
        digests |= {f"{name}, specified": train_as_specified(name) for name in SCOPES}
        digests |= refuse_all(REFUSED)
    return digests


@pytest.fixture(scope="module")
def outcomes(forks, tmp_path_factory):
    """The digests of all trainings, on every rank of every number of ranks."""
    folder = str(tmp_path_factory.getbasetemp() / "checkpoints")
    layouts = [(2, None), (1, None), (3, "gloo")]
    return {n: forks(train_all, n, folder, backend=backend) for n, backend in layouts}


@pytest.mark.parametrize("name", [*OTHERS, *RESUMED])
def test_every_number_of_ranks_computes_the_same_bits(outcomes, name):
    digests = {outcome[name] for results in outcomes.values() for outcome in results}
    assert len(digests) == 1, outcomes


@pytest.mark.parametrize("name", RESUMED)
def test_a_training_resumes_on_another_number_of_ranks(outcomes, name):
    resumed = {outcome[f"{name}, resumed"] for n in (1, 3) for outcome in outcomes[n]}
    assert resumed == {outcomes[2][0][name]}


@pytest.mark.parametrize("name", SCOPES)
def test_the_bits_are_those_of_the_specification(outcomes, name):
    (outcome,) = outcomes[1]
    assert outcome[name] == outcome[f"{name}, specified"]


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(outcomes, words):
    for outcome in outcomes[1]:
        assert re.match(f"(Usage|Layout|State)Error: .*({words})", outcome[words]), outcome[words]


@pytest.mark.stress
def test_other_layouts_compute_the_same_bits(outcomes, forks):
    for n, backend in [(4, None), (2, "gloo"), (1, "gloo")]:
        for outcome in forks(train_more, n, False, backend=backend):
            assert outcome == {name: outcomes[1][0][name] for name in outcome}


@pytest.mark.stress
def test_more_trainings_have_the_same_bits(forks):
    (expected,) = forks(train_more, 1, True)
    for n, backend in [(2, None), (4, "gloo"), (4, None)]:
        for outcome in forks(train_more, n, True, backend=backend):
            assert outcome == expected
    for framework in ("lightning", "accelerate", "classifier"):
        assert expected[f"{framework}, workers"] == expected[f"{framework}, noisy data"]


@pytest.mark.stress
@pytest.mark.parametrize("n", [1, 2, 4])
def test_trainings_resume_after_every_step(outcomes, forks, tmp_path_factory, n):
    folder = str(tmp_path_factory.getbasetemp() / "checkpoints")
    for outcome in forks(resume_all, n, folder):
        assert outcome == {name: {outcomes[1][0][name]} for name in RESUMED}
