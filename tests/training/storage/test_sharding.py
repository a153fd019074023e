"""Models that torch's `fully_shard` has divided over the ranks have the bits of one rank.

All trainings of a width run in the same ranks, each on a group of the backend "lockstep" and on
one of Gloo.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
import models
from lockstep.checkpoint.folder import read_checkpoint
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data_parallel.sharded_norm import find_spans
from lockstep.kernel.errors import LayoutError, LockstepError, RankError, UsageError
from lockstep.training.resume import run_checkpoints
from lockstep.training.storage.sharded_step import require_shardable

SAMPLES = 40  # batches of 16, 16 and 8 samples
BATCH = 16
ADAMW = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def wide():
    """A gradient of several blocks of the norm, which shards cut in the middle."""
    return nn.Sequential(nn.Linear(6, 400), nn.GELU(), nn.Linear(400, 500), nn.Linear(500, 10))


class Rare(nn.Module):
    """A parameter without a gradient in some micro-batches, and with one of -0.0 in others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.zero = nn.Parameter(torch.full((10,), -0.0))

    def forward(self, inputs):
        outputs = self.layer(inputs)
        return outputs + self.zero * -0.0 if inputs[0, 0] > 0 else outputs


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(6, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, inputs):
        return F.relu(inputs + self.second(F.relu(self.norm(self.first(inputs)))))


def residual():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))
    return nn.Sequential(nn.Conv2d(1, 6, 3), Residual(), Residual(), head)


CASES = models.CASES | {
    "rare": (Rare, models.row_batches, nn.CrossEntropyLoss),
    "wide": (wide, models.row_batches, nn.CrossEntropyLoss),
    "residual": (residual, models.picture_batches, nn.CrossEntropyLoss),
}

NAMES = ("replicate", "shard")

POLICIES = {"bf16": None, "mixed": torch.float32}
"""The dtypes in which gradients of bfloat16 weights are exchanged; None: that of the gradients."""


def prepared(case):
    """Return the model, the whole data and the loss of a case."""
    model, batches, loss = CASES[case]
    ((inputs, targets),) = batches([SAMPLES])
    torch.manual_seed(5)
    return model(), TensorDataset(inputs, targets), loss()


def shard(model, group, **options):
    """Call `fully_shard` with the blocks of a model, and with the model, on a group or a mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    is_mesh = isinstance(group, DeviceMesh)
    options["mesh"] = group if is_mesh else DeviceMesh.from_group(group, "cpu")
    blocks = model.children() if isinstance(model, nn.Sequential) else []
    for block in [*blocks, *([model.block] if hasattr(model, "block") else [])]:
        if any(True for _ in block.parameters()):
            fully_shard(block, **options)
    return fully_shard(model, **options)


def low_precision(reduce_dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)


def train(exact, model, loader, optimizer, loss, max_norm=0.5):
    """Return the norms of a training; the model has the final weights."""
    norms = []
    for inputs, targets in exact.microbatches(loader):
        exact.weigh(loss(model(inputs), targets)).backward()
        if exact.is_complete:
            norms.append(exact.clip_grad_norm_(max_norm).hex())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def train_case(case, group=None, make_optimizer=ADAMW, **options):
    """Return the norms and the digest of a case, sharded over a group; None: not sharded."""
    model, data, loss = prepared(case)
    if group is not None:
        shard(model, group, **options)
    exact = ls.exact(model, seed=11)
    loader = DataLoader(data, batch_sampler=exact.sampler(data, BATCH))
    norms = train(exact, model, loader, make_optimizer(model.parameters()), loss)
    return norms, ls.digest(model)


def whole_cases():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return {case: train_case(case) for case in CASES} | {"sgd": train_case("rare", None, SGD)}


def sharded_cases():
    """Train all cases on two ranks, and a few of them on 1 and on 4, there on Gloo, too."""
    found = {}
    few = ["rare", "wide", "residual"]
    cases = CASES if dist.get_world_size() == 2 else few
    groups = {dist.group.WORLD: [*cases, "sgd", *POLICIES]}
    if dist.get_backend() != "gloo" and dist.get_world_size() == 4:
        groups[dist.new_group(backend="gloo")] = few
    names = {group: dist.get_backend(group) for group in groups}
    if dist.get_world_size() == 4:
        for backend, cases in ((dist.get_backend(), [*few, *POLICIES]), ("gloo", ["rare"])):
            groups[mesh := copies(backend)] = cases
            names[mesh] = f"{backend}, two copies"
    for group, cases in groups.items():
        for case in cases:
            if case in POLICIES:
                result = train_case("wide", group, mp_policy=low_precision(POLICIES[case]))
            elif case == "sgd":
                result = train_case("rare", group, SGD)
            else:
                result = train_case(case, group)
            found[names[group], case] = result
    return found


def copies(backend):
    """Return a mesh of two copies on two ranks each."""
    from torch.distributed.device_mesh import init_device_mesh

    backends = dict.fromkeys(NAMES, backend)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override=backends)


@pytest.fixture(scope="module")
def alone(ranks):
    (found,) = ranks(sharded_cases, 1)
    return found


@pytest.fixture(scope="module")
def expected(ranks, alone):
    """The norms and digests of models that are not sharded, and of policies on one rank."""
    (whole,) = ranks(whole_cases, 1)
    return whole | {case: value for (_, case), value in alone.items() if case not in whole}


@pytest.mark.parametrize(
    ("n", "backend"),
    [(1, None), (2, None), (4, None), pytest.param(2, "gloo", marks=pytest.mark.stress)],
)
def test_a_sharded_model_has_the_bits_of_one_rank(ranks, alone, expected, n, backend):
    for found in [alone] if n == 1 else ranks(sharded_cases, n, backend=backend):
        for (backend, case), result in found.items():
            assert result == expected[case], (backend, case)


# --- refusals -------------------------------------------------------------------------------------


def test_ranks_take_turns():
    shares = [ReplicaShare(8, on_one_host(4), rank, is_sharded=True) for rank in range(4)]
    turns = [[index for index, _ in share.pieces(19)] for share in shares]
    assert turns == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shares[0].nodes(8)[1] == [(1, 2), (5, 6)]


def test_the_ranks_of_each_copy_take_turns():
    shares = [ReplicaShare(8, ((0, 2), (1, 3)), rank, is_sharded=True) for rank in range(4)]
    turns = [[index for index, _ in share.pieces(19)] for share in shares]
    assert turns == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert [[index for index, _ in share.pieces(5)] for share in shares] == [[0, 2], [3], [1], [4]]
    assert shares[0].nodes(4) == [[(0, 1)], [(2, 3)], [(1, 2)], [(3, 4)]]
    with pytest.raises(LayoutError, match="the hosts have 1 to 3 ranks, and each of them"):
        ReplicaShare(8, ((0, 1, 2), (3,)), 0, is_sharded=True)


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 9), (4, 6), (8, 4)])
def test_ranks_must_be_a_power_of_two_that_divides_the_microbatches(ranks, microbatches):
    with pytest.raises(LayoutError, match="micro-batches"):
        ReplicaShare(microbatches, on_one_host(ranks), 0, is_sharded=True)


def test_a_short_batch_must_be_divisible():
    share = ReplicaShare(8, on_one_host(2), 0, is_sharded=True)
    share.require_turns(6, 6)
    with pytest.raises(LayoutError, match="5 micro-batches, which the 2 ranks"):
        share.require_turns(5, 5)
    with pytest.raises(LayoutError, match="a batch has 8 micro-batches, 2 of them"):
        share.require_turns(8, 6)


class Normalized(torch.optim.Optimizer):
    """Steps along the gradient, divided by its norm."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.param_groups[0]["lr"] * F.normalize(parameter.grad, dim=0)


@pytest.mark.parametrize(
    ("make", "shape", "dtype", "reason"),
    [
        (torch.optim.AdamW, (96, 3), torch.float32, None),
        (partial(torch.optim.AdamW, fused=True), (128, 2), torch.float32, None),
        (partial(torch.optim.AdamW, fused=True), (96, 3), torch.float32, "cut after 144 elements"),
        (torch.optim.SGD, (96, 3), torch.bfloat16, "each rank gets a multiple of 64 elements"),
        (partial(torch.optim.SGD, fused=True), (128, 2), torch.float32, "leave fused out"),
        (torch.optim.Rprop, (128, 2), torch.float32, "use another optimizer"),
        (torch.optim.Adafactor, (128, 2), torch.float32, "torch's Adafactor does not treat each"),
        (Normalized, (128, 2), torch.float32, "Normalized is not known to treat each element"),
    ],
)
def test_the_optimizer_must_treat_each_element_by_itself(make, shape, dtype, reason):
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    refusals = []
    try:
        require_shardable(make([parameter], lr=0.1), {parameter: "w"}, ranks=2)
    except LayoutError as error:
        refusals.append(str(error))
    assert len(refusals) == (reason is not None)
    assert all(reason in refusal for refusal in refusals)


def test_spans_are_those_of_torch():
    assert find_spans(torch.Size([5, 3]), 4) == [(0, 6), (6, 12), (12, 15), (15, 15)]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, inputs):
        return self.head(self.block(self.block(inputs)))


def refused(action):
    """Return the message of the error that an action raises."""
    handles = []
    made = ls.exact

    def attach(*args, **kwargs):
        handles.append(made(*args, **kwargs))
        return handles[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ls, "exact", attach)
        try:
            action()
        except LockstepError as error:
            return str(error)
        finally:
            for exact in handles:
                exact._script_steps.leave()
    return "no error"


def train_twice():
    model = shard(Twice(), dist.group.WORLD)
    exact = ls.exact(model, microbatches=2)
    exact.begin()
    exact.weigh(model(torch.ones(2, 6)).sum()).backward()


def leave_before_the_first_call():
    model = shard(nn.Linear(6, 10), dist.group.WORLD)
    exact = ls.exact(model, microbatches=2, loggers=())
    data = TensorDataset(torch.ones(2, 6))
    for _ in range(2):
        for batch in exact.batches(data, batch_size=2):
            for _ in batch:
                break


def train_clipped_by_torch():
    model = shard(nn.Sequential(nn.Linear(6, 10)), dist.group.WORLD)
    exact = ls.exact(model, microbatches=2)
    optimizer = SGD(model.parameters())
    while not exact.is_complete:
        exact.begin()
        exact.weigh(model(torch.ones(2, 6)).sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def train_other_modules():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(6, 10)
            self.right = nn.Linear(6, 10)

        def forward(self, inputs):
            return self.left(inputs) if dist.get_rank() == 0 else self.right(inputs)

    model = Chosen()
    for part in (model.left, model.right):
        shard(part, dist.group.WORLD)
    shard(model, dist.group.WORLD)
    exact = ls.exact(model, microbatches=2)
    exact.begin()
    exact.weigh(model(torch.ones(2, 6)).sum()).backward()


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 10)

    def forward(self, inputs):
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return self.head(inputs)


def train_writing():
    loss = nn.CrossEntropyLoss()
    trainer = ls.Trainer(Writing(), loss, SGD, microbatches=2, storage="sharded")
    trainer.step((torch.ones(2, 6), torch.zeros(2, dtype=torch.int64)))


class Skipping(nn.Module):
    """Uses the input of a block again after it, as a UNet does."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.block = Squaring()

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.block(hidden) + hidden.tanh()


class Squaring(nn.Linear):
    def __init__(self):
        super().__init__(10, 10)

    def forward(self, inputs):
        return super().forward(inputs) * inputs


def train_skipping():
    model = shard(Skipping(), dist.group.WORLD)
    exact = ls.exact(model, microbatches=2)
    while not exact.is_complete:
        exact.begin()
        exact.weigh(model(torch.ones(2, 6)).sum()).backward()


def train_without_weights():
    def weigh(data):
        return float(data[1].sum())

    loss = nn.CrossEntropyLoss()
    trainer = ls.Trainer(
        nn.Linear(6, 10), loss, SGD, microbatches=2, storage="sharded", loss_weight=weigh
    )
    trainer.step((torch.ones(2, 6), torch.tensor([0, 1])))


def make_hook():
    model = nn.Linear(6, 10)
    model.weight.register_hook(lambda gradient: gradient * 2)
    ls.Trainer(model, nn.CrossEntropyLoss(), SGD, storage="sharded")


def hook_late():
    model = nn.Linear(6, 10)
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD, microbatches=2, storage="sharded")
    batch = torch.ones(2, 6), torch.zeros(2, dtype=torch.int64)
    trainer.step(batch)
    model.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.clamp_(-1, 1))
    trainer.step(batch)


def shard_descending():
    from torch.distributed.device_mesh import DeviceMesh

    ranks = reversed(range(dist.get_world_size()))
    mesh = DeviceMesh("cpu", [list(ranks)], mesh_dim_names=NAMES)
    ls.exact(shard(nn.Linear(6, 10), mesh))


def make_scalar():
    model = nn.Linear(6, 10)
    model.scale = nn.Parameter(torch.ones(()))
    ls.Trainer(model, nn.CrossEntropyLoss(), SGD, storage="sharded")


def wrap_a_part():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    shard(model[0], dist.group.WORLD)
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    ls.exact(shard_root(model))


def shard_root(model):

    return fully_shard(model, ignored_params={model.scale})


def refusals():
    actions = [train_twice, train_clipped_by_torch, wrap_a_part, train_writing, train_skipping]
    actions += [
        leave_before_the_first_call,
        train_without_weights,
        make_scalar,
        make_hook,
        hook_late,
    ]
    if dist.get_world_size() > 1:
        actions.append(shard_descending)
        actions.append(train_other_modules)  # the last one: torch's module is left in its backward
    return {action.__name__: refused(action) for action in actions}


@pytest.mark.parametrize("n", [1, 2])
def test_what_cannot_be_exact_is_refused_on_every_rank(ranks, n):
    for found in ranks(refusals, n):
        assert "block was called several times in a micro-batch" in found["train_twice"]
        assert "exact.clip_grad_norm_(max_norm)" in found["train_clipped_by_torch"]
        assert "the parameter scale is not sharded" in found["wrap_a_part"]
        assert "the parameter head.weight was written" in found["train_writing"]
        assert "the gradients of an input of block, which" in found["train_skipping"]
        assert "the loop was left before the last" in found["leave_before_the_first_call"]
        assert "2 micro-batches, 1 of them with a weight of 0" in found["train_without_weights"]
        assert "the parameter scale, which has no dimension" in found["make_scalar"]
        assert "the parameter weight has a hook" in found["make_hook"]
        assert "the parameter weight has a hook" in found["hook_late"]
        if n > 1:
            assert "with all ranks in ascending order" in found["shard_descending"]
            assert "make the same calls on every rank" in found["train_other_modules"]


# --- Trainer(storage="sharded") -------------------------------------------------------------------

TRAININGS = {
    "pictures": {"ema_decay": 0.9, "autocast_dtype": torch.float16},
    "words": {"max_grad_norm": 0.5, "ema_decay": 0.9},
    "rare": {},
    "residual": {"activation_checkpointing": True},
}


def run_trainer(case, storage, **options):
    """Return what the guarantee covers, of a training with an evaluation of each kind."""
    model, batches, loss = CASES[case]
    torch.manual_seed(5)
    trainer = ls.Trainer(model(), loss(), ADAMW, seed=11, storage=storage, **options)
    found = [trainer.step(batch).hex() for batch in batches([16, 19])]
    evaluated = TensorDataset(*batches([21])[0])  # batches of 8, 8 and 5 samples
    for ema in {False, "ema_decay" in options}:
        found.append(trainer.evaluate(evaluated, 8, ema=ema).loss.hex())
    found.append(trainer.step(batches([8])[0]).hex())
    found += [trainer.digest(), trainer.optimizer_digest()]
    state = trainer.state_dict()
    if "ema_decay" in options:
        found.append(ls.digest(trainer.ema_model))
    return found, state


def replicated_trainings():
    return {case: run_trainer(case, "replicated", **options) for case, options in TRAININGS.items()}


def sharded_trainings(whole):
    """Return the outcomes; each state continues one of the other storage."""
    found = {}
    for case, options in TRAININGS.items():
        found[case], state = run_trainer(case, "sharded", **options)
        found[case, "state"] = ls.digest(state["model"])
        _, batches, loss = CASES[case]
        digests = []
        for storage, given in {"replicated": state, "sharded": whole[case][1]}.items():
            trainer = ls.Trainer(
                CASES[case][0](), loss(), ADAMW, seed=11, storage=storage, **options
            )
            trainer.load_state_dict(given)
            trainer.step(batches([16])[0])
            digests.append((trainer.digest(), trainer.optimizer_digest()))
        assert digests[0] == digests[1], case
    return found


def test_a_sharded_training_has_the_bits_of_a_replicated_one(ranks, replicated):
    for found in ranks(sharded_trainings, 2, replicated, backend="gloo"):
        for case, (outcome, state) in replicated.items():
            assert found[case] == outcome, case
            assert found[case, "state"] == ls.digest(state["model"])


@pytest.fixture(scope="module")
def replicated(ranks):
    (found,) = ranks(replicated_trainings, 1)
    return found


class Augmented(torch.utils.data.Dataset):
    """Samples that draw random numbers, loaded one by one."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, target = self.data[index]
        return inputs + 0.1 * torch.randn(inputs.shape), target


def train_until(folder, storage, stop=None, resume=None):
    """Train two epochs, or save a checkpoint after `stop` steps; return the digests."""
    model, data, loss = prepared("pictures")
    config = ls.CheckpointConfig(folder=folder, every_steps=stop)
    options = {"storage": storage, "checkpoint": config, "progress": False}
    with ls.Trainer(model, loss, ADAMW, seed=11, ema_decay=0.9, **options) as trainer:
        if resume is not None:
            trainer.resume(resume)
        for _ in range(2):
            for batch in trainer.batches(Augmented(data), BATCH):
                trainer.step(batch)
                if trainer.steps - 1 == stop:
                    return None
        if resume is not None:
            for name, load in WEIGHTS.items():
                trainer.save_weights(folder / name, ema=True)
                assert ls.digest(load(folder / name)) == ls.digest(trainer.ema_model)
        return trainer.digest(), trainer.optimizer_digest(), ls.digest(trainer.ema_model)


WEIGHTS = {"weights.safetensors": load_file, "weights.pt": partial(torch.load, weights_only=True)}


were_rows = []
"""Whether rows were read, of each checkpoint."""


def read_rows(path, rows):
    """Read a checkpoint, of whose parameters of several rows no rank needs the whole."""
    state = read_checkpoint(path, rows)
    were_rows.append(bool(rows))
    for name, (shape, _) in rows.items():
        for value in (
            state["model"][name],
            state["ema"][name],
            state["optimizer"][name]["exp_avg"],
        ):
            assert len(value) < shape[0] or shape[0] == 1
    return state


def save_and_resume(folder):
    train_until(folder / "sharded", "sharded", stop=4)
    train_until(folder / "whole", "replicated", stop=4)
    run_checkpoints.read_checkpoint = read_rows
    third = "shared" if dist.get_backend() == "lockstep" else "replicated"
    found = [
        train_until(folder / "through", "replicated"),
        train_until(folder / "a", "replicated", resume=folder / "sharded/checkpoints/step-4"),
        train_until(folder / "b", "sharded", resume=folder / "whole/checkpoints/step-4"),
        train_until(folder / "c", third, resume=folder / "sharded/checkpoints/step-4"),
    ]
    assert were_rows == [False, True, False]
    return found


def test_a_checkpoint_resumes_in_any_storage_and_width(ranks, tmp_path):
    found = ranks(save_and_resume, 2, tmp_path)
    saved = tmp_path / "sharded/checkpoints/step-4"
    found += ranks(train_until, 1, tmp_path / "d", "sharded", None, saved)
    digests = {digest for each in found for digest in (each if isinstance(each, list) else [each])}
    assert len(digests) == 1
    assert len([*saved.glob("model-*.safetensors")]) == 2  # each rank wrote its rows
    assert not [*saved.glob("*.index.json")]  # which names whole weights


def read_on_one_rank():
    trainer = ls.Trainer(nn.Linear(4, 2), nn.CrossEntropyLoss(), SGD, storage="sharded", loggers=[])
    trainer.step((torch.ones(8, 4), torch.zeros(8, dtype=torch.long)))
    if ls.rank() == 0:
        trainer.digest()


def test_a_digest_on_one_rank_is_told_to_be_on_every_rank(ranks):
    with pytest.raises(RankError, match=r"^rank 1 returned while .*: make this call on every rank"):
        ranks(read_on_one_rank, 2)


# --- calls outside of steps ----------------------------------------------------------------------


def blocks_of_two():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def train_blocks(model, calls=()):
    """Train some steps; call a module before the optimizer and the handle, between, and after."""
    optimizer = None
    exact = None
    for number, call in enumerate(calls or (None, None, None)):
        if call is not None:
            with torch.no_grad():
                call(torch.ones(2, 6))
        if number == 0:
            optimizer = ADAMW(model.parameters())
        if number == 1:
            exact = ls.exact(model, optimizer, microbatches=2, loggers=())
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(8, 6, generator=generator), torch.arange(8) % 3)
    for batch in exact.batches(data, 4):
        for samples, targets in batch:
            hidden = model[0](samples)
            batch.backward(F.cross_entropy(model(samples), targets) + hidden.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return exact.digest()


@pytest.mark.filterwarnings("ignore:.*cannot audit")
@pytest.mark.usefixtures("world_of_one")
def test_blocks_may_be_called_before_the_model():
    expected = train_blocks(blocks_of_two())
    model = blocks_of_two()
    fully_shard(model[0])
    fully_shard(model)
    assert train_blocks(model, (None, model, model[0])) == expected


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("is_whole", "said"),
    [(True, "parameters that are not sharded"), (False, "0 was called before the model")],
)
def test_a_call_that_comes_too_early_is_named(is_whole, said):
    model = blocks_of_two()
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(UsageError, match=said):
        train_blocks(model, (model if is_whole else model[0], None, None))
