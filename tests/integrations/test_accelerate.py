"""Habits of loops with Accelerate: the same on 1 and 3 ranks.

Each loop returns its weights and what it has gathered. All of them run in one launch per number of
ranks.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import lockstep as ls

pytestmark = pytest.mark.timeout(600)  # one launch has all loops of the module

MICROBATCHES = 4  # batches of 12, 12 and 5 samples
SIZE = 3
SAMPLES = 29
HELD_OUT = 14  # samples, in batches of 4
TRAINED = (1, 3)  # numbers of ranks; on 2, only what is refused is tried

Outcome = dict[str, Any]
loops: dict[str, Callable[[], Outcome]] = {}


def loop(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Register a loop by its name."""
    loops[function.__name__] = function
    return function


def make_data(samples: int = SAMPLES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def make_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(make_data(), SIZE, shuffle=True, **options)


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def make_accelerator(**options: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    from lockstep.integrations.accelerate import ExactAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return ExactAccelerator(cpu=True, microbatches=MICROBATCHES, seed=3, **options)


def train(loader: Any = None, epochs: int = 2) -> Outcome:
    """Train as in the course of Hugging Face, without accumulate()."""
    accelerator = make_accelerator()
    network = make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    loader = make_loader() if loader is None else loader
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    losses = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.exact.steps)
    return {"digest": ls.digest(network), "steps": losses}


# --- Schedules ---------------------------------------------------------------------------------


@loop
def schedules_from_the_length_of_the_loader() -> Outcome:
    rates = []
    for is_divided in (False, True):
        accelerator = make_accelerator()
        network = make_network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        model, optimizer, loader = accelerator.prepare(network, optimizer, make_loader())
        steps = len(loader)
        if is_divided:
            steps = -(-len(loader) // accelerator.gradient_accumulation_steps)
        total = 2 * steps
        scheduler = accelerator.prepare(
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, total=total: 1 - step / total)
        )
        for epoch in range(2):
            loader.set_epoch(epoch)
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        assert scheduler.get_last_lr() == [0.0]
        rates.append((total, ls.digest(network), scheduler.state_dict()["_step_count"]))
    return {"rates": rates}


# --- Data --------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """An iterable dataset that draws random numbers; its length is unknown."""

    def __init__(self, samples: int) -> None:
        self.data = make_data(samples)

    def __iter__(self) -> Iterator[Any]:
        for position in range(len(self.data)):
            inputs, target = self.data[position]
            yield inputs + torch.rand(6), target


def mix(samples: Any) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs + torch.rand_like(inputs), targets


class Buckets:
    """A batch sampler with lists of several sizes."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        begins = [0, 2, 9, 14, 20, 25, SAMPLES]
        yield from ([*range(*begins[n : n + 2])] for n in torch.randperm(6).tolist())


@loop
def kinds_of_data() -> Outcome:
    data = make_data()
    sampler = WeightedRandomSampler([1.0 + index for index in range(SAMPLES)], SAMPLES)
    loaders = {
        "shuffled": make_loader(),
        "collated": make_loader(collate_fn=mix, num_workers=2),
        "stream": DataLoader(Stream(SAMPLES), SIZE),
        "sampler": DataLoader(data, SIZE, sampler=sampler),
        "buckets": DataLoader(data, batch_sampler=Buckets()),
    }
    outcomes = {name: train(loader) for name, loader in loaders.items()}
    assert train(make_loader(collate_fn=mix)) == outcomes["collated"]
    return outcomes


# --- Evaluation --------------------------------------------------------------------------------


def evaluate(accelerator: Any, model: Any, loader: Any) -> Outcome:
    """Gather as the examples of Accelerate do."""
    losses = []
    guesses = []
    indices = []
    texts = []
    model.eval()
    for inputs, targets in loader:
        with torch.no_grad():
            outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
        both = accelerator.gather_for_metrics((outputs.argmax(1), {"targets": targets}))
        guesses.append(both[0])
        indices.append(both[1]["targets"])
        texts += accelerator.gather_for_metrics([f"{target}" for target in targets.tolist()])
    model.train()
    return {
        "loss": torch.cat(losses).mean().item(),
        "losses": torch.cat(losses).tolist(),
        "guesses": torch.cat(guesses).tolist(),
        "targets": torch.cat(indices).tolist(),
        "texts": texts,
    }


@loop
def gathering_for_metrics() -> Outcome:
    outcomes = []
    for samples, kind in [(HELD_OUT, make_data), (2, make_data), (HELD_OUT, Stream)]:
        accelerator = make_accelerator()
        network = make_network()
        data = kind(samples)
        held_out = DataLoader(data, 4)
        model, optimizer, loader, held_out = accelerator.prepare(
            network, torch.optim.SGD(network.parameters(), 0.1), make_loader(), held_out
        )
        found = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # in the middle of an epoch
                found.append(evaluate(accelerator, model, held_out))
        if kind is make_data:
            targets = data.tensors[1].tolist()
            assert found[0]["targets"] == targets
            assert found[0]["texts"] == [str(target) for target in targets]
        assert len(found[0]["losses"]) == len(found[0]["guesses"]) == samples
        outcomes.append({"digest": ls.digest(network), "found": found})
    return {"outcomes": outcomes}


@loop
def evaluation_disturbs_nothing() -> Outcome:
    digests = []
    for is_evaluated in (False, True):
        accelerator = make_accelerator()
        network = make_network()
        noise = DataLoader(make_data(HELD_OUT), 4, collate_fn=mix)
        model, optimizer, loader, held_out = accelerator.prepare(
            network, torch.optim.SGD(network.parameters(), 0.1), make_loader(), noise
        )
        drawn = []
        for inputs, targets in loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients and is_evaluated:
                for batch in held_out:
                    torch.rand(len(batch[0]))
            drawn.append(torch.rand(()).item() if accelerator.sync_gradients else 0)
        digests.append((ls.digest(network), [number for number in drawn if number]))
    assert digests[0] == digests[1]
    return {"digests": digests}


class Counting(nn.Module):
    """Adds up its inputs, also in evaluations."""

    lockstep_buffer_rules: ClassVar = {"total": "sum"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))
        self.total: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.total += inputs.detach().sum(0)
        return inputs - 0.01 * self.total


@loop
def evaluation_leaves_buffers_alone() -> Outcome:
    """They are written by each batch, of which a rank has some."""
    accelerator = make_accelerator()
    network = nn.Sequential(Counting(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    model, optimizer, loader, held_out = accelerator.prepare(
        network, optimizer, make_loader(), DataLoader(make_data(HELD_OUT), 4)
    )
    found = []
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    for inputs, _ in held_out:
        with torch.no_grad():
            found += accelerator.gather_for_metrics(model(inputs)).tolist()
    return {"digest": ls.digest(network), "found": found}


# --- Several models ----------------------------------------------------------------------------


def make_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    return generator, discriminator


def train_adversaries(is_accumulating: bool = True) -> Outcome:
    accelerator = make_accelerator()
    pair = make_pair()
    optimizers = [torch.optim.Adam(part.parameters(), 0.01) for part in pair]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)]
    generator, discriminator, *prepared, loader, scheduler = accelerator.prepare(
        *pair, *optimizers, make_loader(drop_last=True), *schedulers
    )
    of_generator, of_discriminator = prepared
    softplus = nn.functional.softplus
    for epoch in range(2):
        loader.set_epoch(epoch)
        for inputs, _ in loader:
            body = accelerator.accumulate(generator, discriminator)
            with body if is_accumulating else nullcontext():
                fake = generator(torch.randn(len(inputs), 4))
                judged = discriminator(torch.cat([inputs, fake.detach()]))
                real, made = judged.split(len(inputs))
                accelerator.backward(softplus(-real).mean() + softplus(made).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(discriminator.parameters(), 0.1)
                of_discriminator.step()
                of_discriminator.zero_grad()
                discriminator.requires_grad_(False)
                accelerator.backward(softplus(-discriminator(fake)).mean())
                discriminator.requires_grad_(True)
                of_generator.step()
                of_generator.zero_grad()
                scheduler.step()
    rates = [group["lr"] for group in of_generator.param_groups]
    return {"digests": [ls.digest(part) for part in pair], "rates": rates}


@loop
def adversaries() -> Outcome:
    return train_adversaries()


# --- Checkpoints -------------------------------------------------------------------------------


def draw_in_steps(folder: str, begin: int, end: int) -> tuple[str, list[float]]:
    """Train from a step to another; return the weights and what was drawn after each step."""
    torch.manual_seed(5)
    accelerator = make_accelerator()
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.5)
    model, optimizer, loader = accelerator.prepare(network, optimizer, make_loader())
    if begin:
        accelerator.load_state(f"{folder}/{begin}")
    drawn: list[float] = []
    for epoch in range(loader.batch_sampler.epoch, 2):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                noisy = inputs * (1 + sum(drawn[-1:]))
                accelerator.backward(nn.functional.cross_entropy(model(noisy), targets))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                drawn.append(torch.rand(()).item() * 1e-3)
                if not begin:
                    accelerator.save_state(f"{folder}/{accelerator.exact.steps}")
                if accelerator.exact.steps == end:
                    return ls.digest(network), drawn
    raise AssertionError("there are fewer steps")


@loop
def resumed_generators() -> Outcome:
    with TemporaryDirectory() as own:
        found = [own]
        torch.distributed.broadcast_object_list(found)
        whole = draw_in_steps(found[0], 0, 6)
        resumed = [draw_in_steps(found[0], begin, 6)[1] for begin in (1, 3, 5)]
        torch.distributed.barrier()
        assert resumed == [whole[1][begin:] for begin in (1, 3, 5)]
        return {"whole": whole}


def save_some(folder: str) -> Any:
    return draw_in_steps(folder, 0, 6)


def resume_all(folder: str) -> Any:
    return [draw_in_steps(folder, begin, 6)[1] for begin in (2, 3)]


# --- Habits ------------------------------------------------------------------------------------


@loop
def gradients_are_cleared_before_or_after_the_step() -> Outcome:
    """The order of Accelerate's README was refused: gradients were left from before the step."""
    digests = []
    for is_first in (False, True):
        accelerator = make_accelerator()
        network = make_network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
        model, optimizer, loader = accelerator.prepare(network, optimizer, make_loader())
        for _ in range(2):
            for inputs, targets in loader:
                if is_first:
                    optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                accelerator.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                if not is_first:
                    optimizer.zero_grad()
        digests.append(ls.digest(network))
    assert digests[0] == digests[1]
    return {"digest": digests[0]}


@loop
def several_trainings_with_one_accelerator() -> Outcome:
    """The second DataLoader of a training was taken for one to evaluate."""
    accelerator = make_accelerator()
    digests = []
    for _ in range(2):
        network = make_network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        teacher = make_network().requires_grad_(False)
        prepared = accelerator.prepare(network, teacher, optimizer, make_loader())
        model, teacher, optimizer, loader = prepared
        for inputs, targets in loader:
            outputs = model(inputs)
            distance = nn.functional.mse_loss(outputs, teacher(inputs))
            accelerator.backward(distance + nn.functional.cross_entropy(outputs, targets))
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.exact.last_result.step == len(loader) - 1  # also the last batch
        digests.append((ls.digest(network), accelerator.exact.last_result.loss))
        accelerator.free_memory()
    assert digests[0] == digests[1]
    return {"digests": digests}


@loop
def length_of_what_is_evaluated() -> Outcome:
    accelerator = make_accelerator()
    held_out = DataLoader(make_data(HELD_OUT, 2), 4)
    _, _, loader = accelerator.prepare(make_network(), make_loader(), held_out)
    assert len(loader) == sum(1 for _ in loader) == -(-4 // ls.world_size())
    return {}


# --- What is refused ---------------------------------------------------------------------------


def read_two_loaders() -> Outcome:
    accelerator = make_accelerator()
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    other = DataLoader(make_data(seed=5), SIZE)
    model, optimizer, loader, other = accelerator.prepare(network, optimizer, make_loader(), other)
    for (inputs, targets), (others, _) in zip(loader, other, strict=False):
        loss = nn.functional.cross_entropy(model(inputs), targets) + model(others).mean()
        accelerator.backward(loss)
    return {}


def accumulate_later() -> Outcome:
    accelerator = make_accelerator()
    network = make_network()
    model, loader = accelerator.prepare(network, make_loader())
    accelerator.gradient_accumulation_steps = 2
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    return {}


def step_a_scheduler_often() -> Outcome:
    accelerator = make_accelerator()
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(network, optimizer, make_loader())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {}


class OwnGenerator(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.data = make_data()
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        return inputs + torch.rand(6, generator=self.generator), target


def call_backward_outside() -> Outcome:
    accelerator = make_accelerator()
    accelerator.prepare(make_network())
    accelerator.backward(torch.ones(1, requires_grad=True).sum())
    return {}


REFUSED: dict[str, Callable[[], Outcome]] = {
    "a learning rate has changed between two micro-batches": step_a_scheduler_often,
    r"sample \d+ of OwnGenerator, loaded twice": lambda: train(DataLoader(OwnGenerator(), SIZE)),
    "trains 2 models: write the body of the loop": lambda: train_adversaries(False),
    "backward.. was called outside of a micro-batch": call_backward_outside,
    "a second DataLoader was read in the middle of a batch": read_two_loaders,
    "gradient_accumulation_steps was changed to 2": accumulate_later,
    "batch_size=None": lambda: train(DataLoader(make_data(), batch_size=None)),
}


def run_all() -> tuple[dict[str, Outcome], dict[str, str]]:
    """Return the outcomes of all loops on this rank, and the messages of those refused."""
    messages = {}
    for name, refused in REFUSED.items() if ls.world_size() < 3 else ():  # each rank notices them
        try:
            refused()
            messages[name] = "it was trained"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    chosen = loops.items() if ls.world_size() in TRAINED else ()
    return {name: run() for name, run in chosen}, messages


@pytest.fixture(scope="module")
def outcomes(forks: Any) -> dict[int, list[Any]]:
    return {n: forks(run_all, n) for n in (1, 2, 3)}


@pytest.mark.parametrize("name", loops)
def test_a_habit_has_the_same_outcome_on_any_number_of_ranks(outcomes: Any, name: str) -> None:
    ((first, _),) = outcomes[1]
    for n in TRAINED:
        for found, _ in outcomes[n]:
            assert found[name] == first[name]


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_exact_is_refused_on_every_rank(outcomes: Any, words: str) -> None:
    for n in (1, 2):
        for _, messages in outcomes[n]:
            assert re.match(rf"\w*Error: .*{words}", messages[words]), messages[words]


def test_generators_go_on_after_a_resume_on_another_number_of_ranks(
    forks: Any, tmp_path: Any
) -> None:
    """Ranks without a file of their own drew other numbers than the others."""
    (_digest, drawn), *_ = forks(save_some, 2, str(tmp_path))
    for n in (1, 3):
        for found in forks(resume_all, n, str(tmp_path)):
            assert found == [drawn[2:], drawn[3:]]
