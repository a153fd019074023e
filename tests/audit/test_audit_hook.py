"""Audited steps: hidden state is named, faults are corrected, and nothing else happens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import LockstepError, LossError
from records import FindingLogger

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(scope="module")
def ranks(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Run on ranks that compute each micro-batch by itself: the calls of operators are counted."""
    return partial(ranks, portable=False)


def make_batches(steps: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator))
        for _ in range(steps)
    ]


def make_trainer(make: Callable[[], nn.Module] = lambda: nn.Linear(6, 6), **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"microbatches": 6, "loggers": (), "progress": False, **options}
    return ls.Trainer(make(), nn.MSELoss(), SGD, **options)


def train(make: Callable[[], nn.Module] = lambda: nn.Linear(6, 6), **options: Any) -> str:
    trainer = make_trainer(make, **options)
    for batch in make_batches():
        trainer.step(batch)
    return trainer.digest()


# --- hidden state ----------------------------------------------------------------------------

CALLS = [0]


class Hidden(nn.Module):
    """Depends on something else than its inputs."""

    def __init__(self, act: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = act
        self.calls = 0
        self.mean = torch.zeros(6)
        self.box = {"rows": [0.0]}
        self.generators = [np.random.RandomState(3), random.Random(3)]
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.act(self, self.linear(inputs))


def count(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return outputs * (1 + module.calls / 100)


def replace(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    before = module.mean
    module.mean = outputs.detach().mean(0)
    return outputs + before


def write(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    module.mean.add_(1)
    return outputs + module.mean


def nest(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    module.box["rows"].append(module.box["rows"][-1] + 1)
    return outputs + module.box["rows"][-1]


def use_global(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return outputs + CALLS[0]


def draw_numpy(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    return outputs + module.generators[0].random()


def draw_python(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    return outputs + module.generators[1].random()


def make_closure() -> Callable[[Any, torch.Tensor], torch.Tensor]:
    seen: list[float] = [0.0]

    def act(module: Any, outputs: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        return outputs + seen[0]

    return act


def draw_torch(module: Any, outputs: torch.Tensor) -> torch.Tensor:
    return outputs + torch.rand(1, generator=module.generator)


STATE = {
    "a counter": (count, "Hidden.calls changed"),
    "a tensor that is replaced": (replace, "Hidden.mean changed"),
    "a tensor that is written": (write, "Hidden.mean changed"),
    "a container": (nest, "Hidden.box['rows']["),
    "a global": (use_global, "CALLS[0] changed"),
    "a closure": (make_closure(), "seen[0] changed"),
    "a torch generator": (draw_torch, "Hidden.generator changed"),
    "a numpy generator in a list": (draw_numpy, "Hidden.generators[0] changed"),
    "a Python generator in a list": (draw_python, "Hidden.generators[1] changed"),
}


def list_refusals(storage: str) -> list[str]:
    said = []
    for act, _ in STATE.values():
        with pytest.raises(LockstepError) as raised:
            train(partial(Hidden, act), storage=storage)
        said.append(f"{type(raised.value).__name__}: {raised.value}")
    return said


@pytest.mark.parametrize(
    ("n", "storage", "microbatch"),
    [(1, "replicated", 1), (2, "replicated", 1), (1, "sharded", 1), (2, "sharded", 2)],
)
def test_hidden_state_is_named_in_the_first_step(ranks, n, storage, microbatch):
    found = ranks(partial(list_refusals, storage), n)
    assert all(said == found[0] for said in found)
    place = f"rank 0, step 0, micro-batch {microbatch}"
    for said, (_, names) in zip(found[0], STATE.values(), strict=True):
        assert said.startswith(f"StateError: {place}: computed again"), said
        assert names in said, said
        assert re.search(r", first in aten\.\w+\.\w+ of Hidden \(test_audit_hook\.py:\d+ in", said)


@pytest.mark.ranks(1)
def test_state_without_effect_on_the_results_is_no_state():
    ls.init()

    class Keeping(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            self.kept = super().forward(inputs)
            return self.kept

    assert train(partial(Keeping, 6, 6)) == train(audit=False)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("storage", ["replicated", "sharded"])
def test_an_error_that_only_the_repetition_raises_is_hidden_state(storage):
    ls.init()

    class Limited(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls % 7 == 0:
                raise RuntimeError("seven")
            return super().forward(inputs)

    with pytest.raises(RuntimeError, match="seven"):  # in the next attempt
        train(partial(Limited, 6, 6), storage=storage)


# --- faults ----------------------------------------------------------------------------------

ONCE = {
    "forward, owner": ("addmm", {"rank": 0, "call": 1}),
    "backward, owner": ("mm", {"rank": 0, "call": 1, "phase": "backward"}),
    "forward, repeater": ("addmm", {"rank": 1, "call": 3}),
}


def correct_once(
    operator: str, where: dict[str, Any], *, loads: bool, storage: str = "replicated"
) -> tuple[str, list[Any]]:
    from bit_flips import FaultyOperator

    lines = FindingLogger()
    trainer = make_trainer(loggers=[lines] if ls.rank() == 0 else (), storage=storage)
    with FaultyOperator(operator, **where):
        if loads:
            inputs, targets = zip(*make_batches(), strict=True)
            dataset = TensorDataset(torch.cat(inputs), torch.cat(targets))
            for batch in trainer.batches(dataset, 12, shuffle=False):
                trainer.step(batch)
        else:
            for batch in make_batches():
                trainer.step(batch)
    return trainer.digest(), lines.findings


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_fault_is_corrected_before_the_sum(ranks, n, capfd):
    for name, (operator, where) in ONCE.items():
        if where["rank"] >= n:
            continue
        # Rank 1 computes three micro-batches of its own, or two.
        where = {**where, "call": 6 // n} if name == "forward, repeater" else where
        found = ranks(partial(correct_once, loads=n == 2), n, operator, where)
        assert {digest for digest, _ in found} == {ranks(train, 1)[0]}
        (finding,) = found[0][1]
        assert finding["rank"] == where["rank"]
        assert (finding["step"], finding["microbatch"]) == (0, 1)
        assert finding["corrected"]
        assert finding["core"] >= 0
        assert f"rank {where['rank']} (host {finding['host']}, core" in capfd.readouterr().err


def test_a_fault_of_a_sharded_model_is_corrected_in_all_of_its_shards(ranks):
    """Loaded micro-batches are exchanged; the second of rank 1 is not that of the plan."""
    correct = partial(correct_once, loads=True, storage="sharded")
    found = ranks(correct, 2, "mm", {"rank": 1, "call": 1, "phase": "backward"})
    assert {digest for digest, _ in found} == {ranks(train, 1)[0]}
    (finding,) = found[0][1]
    assert (finding["step"], finding["rank"], finding["microbatch"]) == (0, 1, 3)
    assert finding["corrected"]


def fault(call: int | None = None, **options: Any) -> tuple[str, list[Any]]:
    """Train with a fault of rank 1 in one call of an operator, or always."""
    from bit_flips import FaultyOperator

    lines = FindingLogger()
    options = {"loggers": [lines] if ls.rank() == 0 else (), **options}
    with FaultyOperator("addmm", rank=1, phase="forward", call=call, element=0):
        try:
            return train(**options), lines.findings
        except LockstepError as error:
            return f"{type(error).__name__}: {error}", lines.findings


def test_a_rank_that_is_always_wrong_ends_the_run_before_the_step(ranks):
    """Its results that are not repeated are wrong, too, so the step must not be taken."""
    found = ranks(fault, 3)
    for said, _ in found:
        assert re.match(
            r"WorkError: step 0, micro-batch 1: rank 1 \(host .*, core \d+\) computed wrong "
            r"results, again and again, first in aten.addmm of Linear \(test_audit_hook.py:\d+ in "
            r"train\)\. Its other results of this step ",
            said,
        )
    (finding,) = found[0][1]
    assert (finding["rank"], finding["operator"]) == (1, "aten.addmm")
    assert (finding["corrected"], finding["count"]) == (False, 1)


class Drawing(nn.Module):
    """Calls an operator that may draw random numbers."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = act

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(inputs))


def attend(values: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    heads = values.reshape(1, 1, *values.shape)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)
    return attended[0, 0]


def attend_and_drop(values: torch.Tensor) -> torch.Tensor:
    return attend(values, dropout=0.5)


def drop(values: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(values, 0.5)


def rectify(values: torch.Tensor) -> torch.Tensor:
    return nn.functional.rrelu(values)


def rectify_at_random(values: torch.Tensor) -> torch.Tensor:
    return nn.functional.rrelu(values, training=True)


def choose(values: torch.Tensor) -> torch.Tensor:
    return nn.functional.gumbel_softmax(values)


def add_noise(values: torch.Tensor) -> torch.Tensor:
    return values + torch.randn_like(values)


DRAWING: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]] = [
    ("_scaled_dot_product_flash_attention_for_cpu", attend, {}),
    ("bernoulli_.float", attend_and_drop, {"above": 0.5}),
    ("bernoulli_.float", drop, {}),
    ("rrelu_with_noise", rectify, {}),
    ("rrelu_with_noise", rectify_at_random, {}),
    ("exponential_", choose, {}),
    ("randn_like", add_noise, {}),
]
"""Operators that may draw; attention without dropout and RReLU in evaluation mode do not."""


def fault_in_each_drawing_operator() -> list[tuple[str, list[Any]]]:
    from bit_flips import FaultyOperator

    found = []
    for operator, act, chosen in DRAWING:
        lines = FindingLogger()
        loggers = [lines] if ls.rank() == 0 else ()
        trainer = make_trainer(partial(Drawing, act), loggers=loggers)
        with (
            FaultyOperator(operator, rank=1, **chosen),
            pytest.raises(LockstepError) as caught,
        ):
            trainer.step(make_batches(1)[0])
        found.append((f"{caught.type.__name__}: {caught.value}", lines.findings))
    return found


def test_a_rank_that_computes_an_operator_wrong_that_may_draw_is_named(ranks):
    found = ranks(fault_in_each_drawing_operator, 3)
    assert all([said for said, _ in of_rank] == [said for said, _ in found[0]] for of_rank in found)
    for (operator, act, _), (said, findings) in zip(DRAWING, found[0], strict=True):
        place = r"WorkError: step 0, micro-batch 1: rank 1 \(host .*, core \d+\) computed wrong "
        where = rf"results, again and again, first in aten\.{operator} of Drawing"
        assert re.match(place + where, said), (act.__name__, said)
        (finding,) = findings
        named = finding["rank"], finding["operator"], finding["corrected"]
        assert named == (1, f"aten.{operator}", False)


class OfOneRank(nn.Linear):
    """Computes with a number that one rank makes otherwise."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * torch.tensor(2.0 if ls.rank() == 1 else 1.0)


def train_with_a_number_of_one_rank() -> str:
    with pytest.raises(LockstepError) as caught:
        train(partial(OfOneRank, 6, 6))
    return f"{caught.type.__name__}: {caught.value}"


def test_a_number_that_one_rank_makes_otherwise_is_no_fault_of_its_processor(ranks):
    for said in ranks(train_with_a_number_of_one_rank, 3):
        assert said.startswith("StateError: rank 0, step 0, micro-batch 1: "), said
        assert "The bits of the training would depend on which rank" in said


def test_too_many_faults_of_a_rank_end_the_run(ranks):
    found = ranks(partial(fault, 2, audit=ls.AuditConfig(max_corrections=0)), 3)
    for said, _ in found:
        assert re.match(
            r"WorkError: rank 1 \(host .*, core \d+\) computed 1 wrong result, more than "
            "max_corrections=0: continue on other cores",
            said,
        )


def test_two_ranks_of_which_one_is_always_wrong_cannot_decide_which(ranks):
    found = ranks(fault, 2)
    for said, findings in found:
        assert said.startswith("WorkError: step 0, micro-batch 1: rank 0 (host "), said
        assert "and rank 1 (host" in said
        assert "compute different results from the same inputs" in said
        assert not findings


def test_state_that_changes_seldom_is_named_as_another_possible_reason(ranks):
    class Refreshing(nn.Linear):
        """Refreshes what it adds after 7 calls: between a micro-batch and its repetition."""

        calls = 0
        kept = 0.0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 7:
                self.kept = 1.0
            return super().forward(inputs) + self.kept

    def find() -> list[Any]:
        lines = FindingLogger()
        trainer = make_trainer(partial(Refreshing, 6, 6), loggers=[lines])
        trainer.step(make_batches(1)[0])
        return lines.findings

    (finding,) = ranks(find, 1)[0]
    assert "computed a wrong result" in finding["message"]
    assert finding["message"].endswith(
        "(or the model depends on Refreshing.calls, which forward changes)"
    )


# --- no effect -------------------------------------------------------------------------------


@pytest.mark.ranks(1)
def test_a_step_that_is_not_audited_computes_every_micro_batch_once():
    ls.init(portable=False)

    class Counting(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            Counting.calls += 1
            return super().forward(inputs)

    calls = []
    trainer = make_trainer(partial(Counting, 6, 6))
    for batch in make_batches(4):
        Counting.calls = 0
        trainer.step(batch)
        calls.append(Counting.calls)
    assert calls == [7, 7, 7, 6]


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:.*gets a gradient, and no Trainer trains it")
def test_gradients_of_other_modules_and_generators_are_those_without_an_audit():
    ls.init()

    def observe(audit: bool) -> list[Any]:
        teacher = nn.Linear(6, 6)

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (teacher(outputs) - targets + torch.rand(1)).square().mean()

        torch.manual_seed(5)
        nn.init.ones_(teacher.weight)
        nn.init.ones_(teacher.bias)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout())
        trainer = ls.Trainer(
            model, loss, SGD, microbatches=6, loggers=(), extra_modules=[teacher], audit=audit
        )
        torch.manual_seed(7)
        for batch in make_batches(3):
            trainer.step(batch)
        assert teacher.weight.grad is not None
        return [trainer.digest(), teacher.weight.grad.tolist(), torch.rand(2).tolist()]

    assert observe(True) == observe(False)


@pytest.mark.ranks(1)
def test_a_step_that_failed_is_not_compared_with_the_next_attempt():
    ls.init()
    trainer = make_trainer()
    first, second, *_ = make_batches()
    with pytest.raises(LossError):
        trainer.step((first[0] * float("inf"), first[1]))
    trainer.step(second)


def test_data_that_cannot_be_sent_are_repeated_where_they_are(ranks):
    class Rows:
        """Data of a class that only this function knows."""

        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows
            self.unpicklable = lambda: None

    def collate(samples: list[Any]) -> Any:
        inputs, targets = zip(*samples, strict=True)
        return Rows(torch.stack(inputs)), torch.stack(targets)

    class Reading(nn.Linear):
        def forward(self, inputs: Any) -> torch.Tensor:
            return super().forward(inputs.rows)

    def load(storage: str = "replicated") -> str:
        trainer = make_trainer(partial(Reading, 6, 6), storage=storage)
        inputs, targets = make_batches(1)[0]
        for batch in trainer.batches(TensorDataset(inputs, targets), 12, collate_fn=collate):
            trainer.step(batch)
        return trainer.digest()

    assert {*ranks(load, 2), *ranks(load, 2, "sharded")} == {*ranks(load, 1)}


def test_a_run_with_checkpoints_saves_one_before_it_ends_for_too_many_faults(ranks, tmp_path):
    def stop() -> tuple[str, int]:
        from bit_flips import FaultyOperator

        trainer = make_trainer(
            checkpoint=ls.CheckpointConfig(folder=tmp_path / "run", every_steps=100),
            audit=ls.AuditConfig(max_corrections=0),
        )
        inputs, targets = zip(*make_batches(6), strict=True)
        dataset = TensorDataset(torch.cat(inputs), torch.cat(targets))
        said = ""
        with FaultyOperator("addmm", rank=0, call=1):
            try:
                for batch in trainer.batches(dataset, 12, shuffle=False):
                    trainer.step(batch)
            except SystemExit as stopped:
                said = str(stopped)
        return said, trainer.steps

    for said, steps in ranks(stop, 2):
        assert "stopped on request after step 2" in said
        assert steps == 2
    assert [*(tmp_path / "run" / "checkpoints").iterdir()]
