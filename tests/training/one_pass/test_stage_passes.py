"""Several micro-batches of a pipeline stage in one pass: the bits of single passes, everywhere."""

import json
import random
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep as ls
import pytest_lockstep
from lockstep.kernel.errors import StoppedError
from lockstep.pipeline.grouping import GroupSizeTuner
from lockstep.training import model_setup
from lockstep.training.one_pass import pass_trial, stage_passes
from lockstep.training.one_pass.pass_trial import KnownPasses
from lockstep.training.one_pass.stage_passes import StagePasses

STEPS = 7  # of which 0 to 2 are observed, and 3 compares
SAMPLES = 32
FEATURES = 64
CLASSES = 16
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


class Once:
    """A schedule by which passes are compared in the first step only."""

    def is_audited(self, step):
        return step == 0


class Applies(nn.Module):
    """A block that is a function of itself and its input."""

    def __init__(self, function, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, x):
        return self._function(self, x)


def in_blocks(*blocks):
    return nn.Sequential(*blocks, nn.Linear(64, CLASSES))


def twice(make):
    """Return a model whose stages have the same kind of block."""
    return in_blocks(nn.Linear(64, 64), make(), nn.ReLU(), nn.Linear(64, 64), make())


def hand_on(block, x):
    """Return a tuple with a number, a mask without gradient, and the rows."""
    return block.layer(x), (x > 0), 2


def take(block, given):
    rows, mask, factor = given
    return block.layer(rows.relu() * mask * factor)


def dropping():
    """A model whose scopes draw, of which one is called in both stages."""
    drop = nn.Dropout(0.3)
    return in_blocks(nn.Linear(64, 64), drop, nn.ReLU(), nn.Linear(64, 64), drop)


def of_images():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )


def of_sequences():
    layer = partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.2, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (4, 16)), layer(), layer(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


JOINED = {
    "dropout": dropping,
    "functions of elements": lambda: twice(lambda: nn.Sequential(nn.GELU(), nn.LayerNorm(64))),
    "batch norm": lambda: twice(lambda: nn.BatchNorm1d(64)),
    "images": of_images,
    "images, channels last": lambda: of_images().to(memory_format=torch.channels_last),
    "an encoder": of_sequences,
    "a tuple": lambda: in_blocks(
        Applies(hand_on, layer=nn.Linear(64, 64)), Applies(take, layer=nn.Linear(64, 64))
    ),
    "a write into an input": lambda: in_blocks(
        nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64)
    ),
    "weights that are used twice": lambda: twice(
        lambda: Applies(
            lambda block, x: block.layer(block.layer(x).relu()), layer=nn.Linear(64, 64)
        )
    ),
}


def couple(block, x):
    return x - x.mean(0)


def count(block, x):
    block.seen += len(x)
    return x


def hooked():
    layer = nn.Linear(64, 64)
    layer.register_forward_hook(lambda *_: None)
    return layer


def tied():
    first = nn.Linear(64, 64)
    last = nn.Linear(64, 64)
    last.weight = first.weight
    return in_blocks(first, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), last)


SEPARATE = {  # stages that compute one by one, and why
    "samples that are coupled": (
        lambda: in_blocks(nn.Linear(64, 64), Applies(couple), nn.Linear(64, 64), nn.ReLU()),
        {0},
        "stage 0: aten::mean combines samples",
    ),
    "an attribute": (
        lambda: in_blocks(nn.Linear(64, 64), Applies(count, seen=0), nn.Linear(64, 64), nn.ReLU()),
        {0},
        "stage 0: forward changes",
    ),
    "a view of an input": (
        lambda: in_blocks(
            Applies(lambda _, x: (x, x.view(-1, 8, 8))),
            nn.Identity(),
            Applies(lambda block, x: block.layer(x[0] + x[1].flatten(1)), layer=nn.Linear(64, 64)),
        ),
        {0, 1},
        "stage 0: outputs of the stage share memory",
    ),
    "a batch that is written": (
        lambda: in_blocks(
            Applies(write_batch, layer=nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        ),
        {0},
        "stage 0: the inputs of the batch are written",
    ),
    "tied weights": (tied, {0, 1}, "stage 0: it shares weights with other stages"),
    "a hook": (
        lambda: in_blocks(nn.Linear(64, 64), hooked(), nn.Linear(64, 64), nn.ReLU()),
        {0, 1},  # its activations are not known, so no group is formed
        "",
    ),
}


def write_batch(block, x):
    return block.layer(x.abs_().add_(0.1))


LAYOUTS = {  # world, stages, schedule, size of groups
    "gpipe": (2, 2, "gpipe", 4),
    "1f1b": (2, 2, "1f1b", 2),
    "interleaved": (2, 2, "interleaved", 2),
    "zero-bubble": (2, 2, "zero-bubble", 4),
}


def data(samples=SAMPLES, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def set_size(size):
    """Let groups have a size as soon as all stages have memory for it."""

    def choose(self, microbatches, samples):
        return min(size, self.limits.size)

    return mock.patch.object(GroupSizeTuner, "choose", choose)


def counting(counts):
    """Count micro-batches of joint passes, and forwards and backwards that were repeated."""
    forward = StagePasses.forward
    backward = StagePasses.backward

    def count_forward(self, given):
        joint = forward(self, given)
        counts["joint" if joint is not None else "repeated forward"] += len(given)
        return joint

    def count_backward(self, joint, gradients):
        made = backward(self, joint, gradients)
        counts["repeated backward"] += len(joint.given) * (made is None)
        return made

    return (
        mock.patch.object(StagePasses, "forward", count_forward),
        mock.patch.object(StagePasses, "backward", count_backward),
    )


def make_trainer(model, stages, schedule, loss=None, balance=None, optimizer=SGD, **options):
    pipeline = ls.PipelineConfig(stages, schedule, balance=balance) if stages > 1 else None
    return ls.Trainer(
        model,
        loss or nn.CrossEntropyLoss(),
        optimizer,
        pipeline=pipeline,
        **{"microbatches": 8, "audit": False, "loggers": []} | options,
    )


def train(make, stages, schedule=None, size=1, batches=None, **options):
    """Return what must be the same in every layout, the counts of passes, and the note."""
    counts = {"joint": 0, "repeated forward": 0, "repeated backward": 0}
    count_forward, count_backward = counting(counts)
    schedule_once = mock.patch.object(pass_trial, "SCHEDULE", Once())
    with set_size(size), count_forward, count_backward, schedule_once:
        torch.manual_seed(0)
        trainer = make_trainer(make(), stages, schedule, **options)
        executor = trainer.engine.setup.executor
        if stages == 1:
            executor.one_pass = None
        losses = [trainer.step(batch).hex() for batch in batches or [data()] * STEPS]
    note = executor.find_note() if stages > 1 else ""
    return (losses, trainer.digest(), trainer.optimizer_digest()), counts, note


def on_portable_ranks(function, ranks):
    def call():
        ls.init(portable=True, threads=1)
        warnings.simplefilter("ignore")
        return function()

    return pytest_lockstep.run(call, ranks=ranks, timeout=300, init=False)


def positive(outputs):
    """Return a layer whose results are positive in the first steps, where ELU returns its input."""
    layer = nn.Linear(64, outputs)
    nn.init.constant_(layer.bias, 2.5)
    return layer


def add_mask(block, x):
    """Return what the next block joins with a mask, whose gradient has gaps between its rows."""
    return F.elu(block.layer(x)), torch.ones(len(x), 12)


def take_part(block, x):
    """Return some columns of a tensor, which have gaps between their rows."""
    return block.layer(x).chunk(2, 1)[0]


APART = {
    "gradients": lambda: nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        Applies(add_mask, layer=positive(12)),
        Applies(lambda _, given: torch.cat(given, 1)),
        nn.Linear(24, CLASSES),
    ),
    "activations": lambda: nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        Applies(take_part, layer=positive(24)),
        nn.ELU(),
        nn.Linear(12, CLASSES),
    ),
}


def test_rows_with_gaps_between_stages_have_the_same_bits():
    batches = [data(32, seed) for seed in range(32)]
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

    def train_all(stages, size):
        options = {"balance": [3, 2], "optimizer": optimizer}
        return {
            name: train(make, stages, "gpipe", size, batches, **options)
            for name, make in APART.items()
        }

    (alone,) = on_portable_ranks(lambda: train_all(1, 1), 1)
    first, last = on_portable_ranks(lambda: train_all(2, 4), 2)
    for name, (bits, _, _) in alone.items():
        assert first[name][0] == last[name][0] == bits, name
    for counts in (first["activations"][1], last["gradients"][1]):
        assert counts["joint"] > 0


def add_turns(block, x):
    """Return samples, and four rows of each in turn, which are zero in the first steps."""
    features = block.layer(x)
    return features, (features - 5).relu().view(-1, 4, 16).transpose(0, 1).reshape(-1, 16)


def join_turns(block, given):
    features, rows = given
    return features + rows.view(4, -1, 16).transpose(0, 1).reshape(-1, 64)


def test_rows_in_turn_between_stages_have_the_same_bits_later():
    batches = [data(32, seed) for seed in range(12)]
    batches = [(inputs * (20 if n > 8 else 1), y) for n, (inputs, y) in enumerate(batches)]

    def make():
        return nn.Sequential(
            nn.Linear(64, 64),
            Applies(add_turns, layer=nn.Linear(64, 64)),
            Applies(join_turns),
            nn.Linear(64, CLASSES),
        )

    def train_all(stages):
        return train(make, stages, "gpipe", 2, batches, balance=[2, 2] if stages > 1 else None)

    ((alone, _, _),) = on_portable_ranks(lambda: train_all(1), 1)
    (first, _, note), (last, counts, _) = on_portable_ranks(lambda: train_all(2), 2)
    assert first == last == alone
    assert counts["joint"] == 0
    assert "an output does not have one row per sample" in note


def fill_table(block, x):
    """Scale by a table that both stages refer to, and that each size of a micro-batch fills."""
    return block.layer(x) * block.table.setdefault(len(x), torch.full((len(x), 1), 0.5))


def of_shared_table():
    table = {}
    return in_blocks(
        Applies(fill_table, layer=nn.Linear(64, 64), table=table),
        nn.ReLU(),
        Applies(fill_table, layer=nn.Linear(64, 64), table=table),
        nn.ReLU(),
    )


def test_what_a_trial_fills_for_other_sizes_is_no_change():
    (alone,) = on_portable_ranks(lambda: train(of_shared_table, 1), 1)
    for bits, _, _ in on_portable_ranks(lambda: train(of_shared_table, 2, "1f1b", 2), 2):
        assert bits == alone[0]


def test_a_size_without_memory_is_tried_once():
    def count_passes():
        tried = []
        original = stage_passes.StagePasses.begin_trial

        def begin_trial(self, *arguments):
            trial = original(self, *arguments)
            tried.append(trial is not None)
            return trial

        with (
            mock.patch.object(stage_passes.StagePasses, "begin_trial", begin_trial),
            mock.patch.object(pass_trial, "MOST_BYTES", 1 << 10),
        ):
            train(JOINED["dropout"], 2, "gpipe", 4)
        return sum(tried)

    assert max(on_portable_ranks(count_passes, 2)) <= 3  # one for each size


def train_at_random(seeds):
    """Return the seeds whose trainings differ with and without joint passes, and the passes."""
    from grammar import Leg, case, training
    from grammar.layouts import SCHEDULES, Layout

    def choose(self, microbatches, samples):
        most = max(1, min(self.limits.size, microbatches // 2))
        return drawn.choice([size for size in (1, 2, 4, 8) if size <= most])

    def repeat(*arguments):
        every = [*batches(*arguments)]
        for _ in range(-(-9 // len(every))):  # most cases have few steps
            yield from every

    def describe(given, folder):
        try:
            return training.outcome_of(given, Leg(layout, 0, given.data.steps), Path(folder))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    batches = training._batches
    counts = {"joint": 0, "repeated forward": 0, "repeated backward": 0}
    different = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for patch in (
            mock.patch.object(ls, "AuditConfig", return_value=False),
            mock.patch.object(training, "_batches", repeat),
            mock.patch.object(pass_trial, "SCHEDULE", Once()),
            mock.patch.object(GroupSizeTuner, "choose", choose),
            *counting(counts),
        ):
            stack.enter_context(patch)
        for seed in seeds:
            drawn = random.Random(seed)
            given = case(seed)
            given = replace(given, microbatches=drawn.choice([4, 6, 8, 13]))
            blocks = len(given.model.blocks) if given.model.is_chain else 0
            if blocks < 2 or given.loop != "plain" or given.precision is not None:
                continue
            schedule = drawn.choice(SCHEDULES if blocks >= 4 else SCHEDULES[:2])
            chunks = 2 if schedule == "interleaved" else None
            stops = sorted(drawn.sample(range(1, blocks), 2 * (chunks or 1) - 1))
            balance = tuple(hi - lo for lo, hi in pairwise([0, *stops, blocks]))
            layout = Layout(2, "lockstep", 2, schedule, chunks, balance)
            joint = describe(given, folder)
            with mock.patch.object(model_setup, "can_join", return_value=False):
                single = describe(given, folder)
            if joint != single:
                different.append((seed, joint, single))
    return different, counts["joint"]


@pytest.mark.parametrize(
    ("first", "last"),
    [(268, 276), pytest.param(0, 60, marks=[pytest.mark.stress, pytest.mark.timeout(600)])],
)
def test_random_trainings_have_the_bits_of_single_passes(first, last):
    for different, passes in on_portable_ranks(lambda: train_at_random(range(first, last)), 2):
        assert different == []
        assert passes > 0


@pytest.fixture(scope="module")
def alone():
    """What every model gives on one rank, one micro-batch at a time."""

    def train_all():
        makes = JOINED | {name: make for name, (make, *_) in SEPARATE.items()}
        return {name: train(make, 1)[0] for name, make in makes.items()}

    return on_portable_ranks(train_all, 1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joint_passes_have_the_bits_of_single_ones(layout, alone):
    world, stages, schedule, size = LAYOUTS[layout]

    def train_all():
        few = {"an encoder", "a tuple"}  # blocks, and a first stage without parameters
        names = JOINED.keys() - (few if schedule == "interleaved" else set())
        return {name: train(JOINED[name], stages, schedule, size) for name in names}

    for found in on_portable_ranks(train_all, world):
        for name, (results, counts, note) in found.items():
            assert results == alone[name], name
            chunks = 2 if schedule == "interleaved" else 1
            assert counts["joint"] == 8 * chunks * (STEPS - 4), (name, counts, note)
            assert counts["repeated forward"] + counts["repeated backward"] == 0, name


@pytest.mark.parametrize("stages", [2, 4])
def test_replicas_and_more_stages_have_the_same_bits(stages, alone):
    def train_some():
        names = ("dropout", "images")
        return {name: train(JOINED[name], stages, "1f1b", 2) for name in names}

    for found in on_portable_ranks(train_some, 4):
        for name, (results, counts, _) in found.items():
            assert results == alone[name], name
            assert counts["joint"] > 0, name


def test_a_stage_that_cannot_be_joined_is_computed_separately(alone):
    def train_all():
        return {
            name: train(make, 2, "1f1b", 2, balance=[2, len(make()) - 2])
            for name, (make, *_) in SEPARATE.items()
        }

    found = on_portable_ranks(train_all, 2)
    for rank in (0, 1):
        for name, (_, separate, reason) in SEPARATE.items():
            results, counts, note = found[rank][name]
            assert results == alone[name], name
            assert (counts["joint"] == 0) == (rank in separate), (name, rank, note)
            if rank == 0:
                assert note.startswith(reason), name


class Doubles(torch.autograd.Function):
    """Its backward calls another operator once `is_late` is set."""

    is_late = False

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient if Doubles.is_late else gradient * 2


def double(block, x):
    return x + x if Doubles.is_late else x * 2


def change_late():
    """Yield the batches of some steps, before the last of which operators change."""
    for step in range(STEPS):
        Doubles.is_late = step == STEPS - 1
        yield data()


@pytest.mark.parametrize(
    ("function", "kind"),
    [(lambda block, x: Doubles.apply(x), "repeated backward"), (double, "repeated forward")],
)
@pytest.mark.parametrize("place", [1, 3])
def test_a_pass_that_changes_is_repeated_one_by_one(function, kind, place):
    """Other operators are called in the last step, with the same results."""

    def make():
        blocks = [nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64)]
        return in_blocks(*blocks[:place], Applies(function), *blocks[place:])

    def train_both():
        options = {"stages": 2, "schedule": "1f1b", "balance": [2, 3]}
        return [train(make, size=size, batches=change_late(), **options) for size in (2, 1)]

    found = on_portable_ranks(train_both, 2)
    for rank, ((joint, counts, note), (single, *_)) in enumerate(found):
        assert joint == single
        assert counts["joint"] > 0
        repeated = {name: number for name, number in counts.items() if name != "joint" and number}
        assert (repeated.keys() == {kind}) == (rank == place // 2)
        if rank == 0 == place // 2:
            assert note.endswith("was not called as in the first step")


def test_losses_that_draw_metrics_and_uneven_micro_batches_have_the_same_bits():
    def noisy(outputs, targets):
        return F.cross_entropy(F.dropout(outputs, 0.3), targets)

    def train_all():
        batches = [data(), data(29, 2), data(5, 3)] * STEPS
        options = {"metrics": {"accuracy": ls.accuracy}, "batches": batches}
        weigh = {"loss_weight": lambda batch: float((batch[1] > 3).sum())}
        return [
            train(dropping, stages, "1f1b" if stages > 1 else None, 2, loss=loss, **more, **options)
            for stages in (2, 1)[2 - ls.world_size() :]
            for loss, more in ((noisy, {}), (None, weigh))
        ]

    alone = on_portable_ranks(train_all, 1)[0]
    for found in on_portable_ranks(train_all, 2):
        for (results, counts, _), (expected, *_) in zip(found, alone, strict=False):
            assert results == expected
            assert counts["joint"] > 0


def test_micro_batches_without_weight_are_left_out_of_groups():
    inputs, targets = data()
    targets[4:8] = -100  # micro-batch 1 of 8

    def train_all():
        loss = nn.CrossEntropyLoss(ignore_index=-100)
        weigh = {"loss_weight": lambda batch: float((batch[1] != -100).sum())}
        batches = [(inputs, targets)] * STEPS
        stages = ls.world_size()
        schedule = "1f1b" if stages > 1 else None
        return train(dropping, stages, schedule, 2, batches=batches, loss=loss, **weigh)

    (alone,) = on_portable_ranks(train_all, 1)
    for results, counts, _ in on_portable_ranks(train_all, 2):
        assert results == alone[0]
        assert counts["joint"] == 6 * (STEPS - 4)


def look_up(block, x):
    return x + block.table((x.abs().amax(1) > 1e6).long())


def test_a_failure_in_a_joint_pass_names_its_micro_batch():
    """A large sample has no row in the table."""

    def train_until_failure():
        torch.manual_seed(0)
        table = Applies(look_up, table=nn.Embedding(1, 64))
        model = in_blocks(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), table)
        counts = {"joint": 0, "repeated forward": 0, "repeated backward": 0}
        patches = (set_size(4), mock.patch.object(pass_trial, "SCHEDULE", Once()))
        with ExitStack() as stack:
            for patch in (*patches, *counting(counts)):
                stack.enter_context(patch)
            trainer = make_trainer(model, 2, "1f1b", balance=[2, 3])
            for _ in range(STEPS):
                trainer.step(data())
            before = trainer.digest()
            inputs, targets = data()
            inputs[21] = 1e9  # in micro-batch 5
            with pytest.raises((IndexError, StoppedError)) as caught:
                trainer.step((inputs, targets))
            said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            after = trainer.digest()
            trainer.step(data())
        return before == after, said, trainer.digest(), counts

    found = on_portable_ranks(train_until_failure, 2)
    assert all(same for same, *_ in found)
    assert found[0][2] == found[1][2]
    assert found[1][3]["repeated forward"] == 4 + 2  # of the group, and of its first half
    for _, said, *_ in found:
        assert f"stage 1, step {STEPS}, micro-batch 5" in said


def test_groups_take_no_more_memory_than_they_may():
    """Of 8 micro-batches that take 100 bytes, the first stage holds 2 groups."""

    def train_with_little():
        found = []
        for most in (800, 799, 599, 199):
            with (
                mock.patch.object(stage_passes, "MOST_BYTES", most),
                mock.patch.object(KnownPasses, "find_bytes", return_value=100),
            ):
                torch.manual_seed(0)
                trainer = make_trainer(dropping(), 2, "1f1b")
                for _ in range(5):
                    trainer.step(data())
                executor = trainer.engine.setup.executor
                found.append(executor.group_sizes.limits.size)
        return found

    assert on_portable_ranks(train_with_little, 2)[0] == [8, 4, 2, 1]


def test_audited_steps_are_computed_one_by_one(alone):
    def train_audited():
        return train(dropping, 2, "1f1b", 2, audit=ls.AuditConfig(every_steps=1))

    for results, counts, _ in on_portable_ranks(train_audited, 2):
        assert results == alone["dropout"]
        assert counts["joint"] == 0


def test_passes_are_compared_again():
    """After a difference, which a patched comparison finds, micro-batches are computed singly."""

    def train_spoiled():
        compared = 0
        original = stage_passes.Trial.finish

        def finish(self):
            nonlocal compared
            compared += 1
            if not self.is_new:
                for values in self._metrics:
                    values.update((name, one + 1) for name, one in [*values.items()][:1])
            original(self)

        with set_size(2), mock.patch.object(stage_passes.Trial, "finish", finish):
            torch.manual_seed(0)
            trainer = make_trainer(dropping(), 2, "1f1b")
            for _ in range(STEPS):
                trainer.step(data())
        return compared, trainer.engine.setup.executor.find_note()

    for rank, (compared, note) in enumerate(on_portable_ranks(train_spoiled, 2)):
        assert compared >= 4
        assert note.startswith(f"stage {rank}: ")
        assert "has other bits for several micro-batches, so unless the model was changed" in note


def test_why_a_stage_is_computed_separately_is_recorded_once(tmp_path):
    def record():
        torch.manual_seed(0)
        trainer = make_trainer(
            SEPARATE["samples that are coupled"][0](),
            2,
            "1f1b",
            balance=[2, 3],
            loggers=[tmp_path / "run"],
        )
        for _ in range(STEPS):
            trainer.step(data())
        trainer.finish()

    on_portable_ranks(record, 2)
    lines = map(json.loads, (tmp_path / "run" / "record.jsonl").read_text().splitlines())
    (note,) = [line for line in lines if line["kind"] == "one_pass"]
    assert (note["step"], note["message"]) == (3, "stage 0: aten::mean combines samples")
