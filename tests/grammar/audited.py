"""Cases in which every step is audited, for many steps: an audit that reports one is wrong."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lockstep as ls
from grammar import Case, Leg, case
from grammar.datasets import tensors
from grammar.layouts import Layout
from grammar.plain import tensor_batches
from grammar.refusals import possible_refusals, refusals
from grammar.training import make_trainer
from lockstep.audit.audit_hook import Audit
from lockstep.kernel.errors import GradientError, LossError

__all__ = ["find_seeds", "train_audited"]


def find_seeds(first: int, count: int, layout: Layout) -> list[int]:
    """Return seeds from `first` on, in cases of which a layout without stages audits every step."""
    seeds = list[int]()
    for seed in itertools.count(first | 1, 2):  # every step of odd seeds is audited
        if len(seeds) == count:
            return seeds
        drawn = case(seed)
        is_refused = refusals(drawn, layout)
        if layout.sharded:  # the cuts decide about most of the others
            is_refused += ["take turns"] * (drawn.microbatches % layout.world)
        else:
            is_refused += possible_refusals(drawn, layout)
        if drawn.loop == "plain" and drawn.microbatches >= layout.world and not is_refused:
            seeds.append(seed)
    raise AssertionError


def train_audited(seeds: Sequence[int], layout: Layout, steps: int) -> int:
    """Train each case, and return how many micro-batches of this rank's steps were compared.

    A case ends early if its loss or gradient is not finite, or if its schedule ends.

    Raises:
        LockstepError: A difference was found in one of them.
    """
    warnings.simplefilter("ignore")
    compared = 0
    check = Audit.check

    def count(audit: Audit, step: Any, summary: Any) -> None:
        nonlocal compared
        check(audit, step, summary)
        compared += len(summary.hooks.get(audit.name) or ()) > 1

    with patch.object(Audit, "check", count):
        for seed in seeds:
            _train(case(seed), layout, steps)
    return compared


def _train(drawn: Case, layout: Layout, steps: int) -> None:
    sizes = drawn.data.sizes or (drawn.data.batch_size,) * 3
    drawn = replace(drawn, data=replace(drawn.data, epochs=0, sizes=sizes))
    inputs, targets = tensors(drawn.data, drawn.model, drawn.loss, drawn.microbatches, drawn.seed)
    batches = itertools.cycle(tensor_batches(drawn, inputs, targets))
    try:
        trainer, _ = make_trainer(drawn, Leg(layout, 0, steps), [])
        for batch in itertools.islice(batches, steps):
            trainer.step(batch)
    except (LossError, GradientError):
        return
    except (ls.LockstepError, RuntimeError) as error:
        ends = "OneCycleLR cannot take another step", *possible_refusals(drawn, layout)
        if not any(end in str(error) for end in ends):
            error.add_note(f"in {drawn}")
            raise
