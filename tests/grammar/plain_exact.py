"""A random loop in plain PyTorch on one process: what `ls.exact` must compute."""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

import digests
from grammar.accumulation import Accumulation, clip
from grammar.datasets import tensors
from grammar.exact import Loop
from grammar.loop_scripts import Critic, Script, described, losses_of_critic
from grammar.loops import loop_of
from grammar.optimization import Several
from grammar.outcome import Outcome
from grammar.plain import EVALUATED, batches_of
from lockstep.kernel import spec

__all__ = ["reference_of"]


def reference_of(drawn: Loop) -> Outcome:
    """Train on one process in plain PyTorch."""
    given = drawn.case
    model = given.model.build(given.seed)
    loss = given.loss.build(given.model.dtype)
    script = Script(drawn, model)
    main = Accumulation(model, drawn.scopes(model), given.microbatches, given.seed)
    critic = Critic()
    other = Accumulation(critic.model, [*critic.model], given.microbatches, given.seed)
    inputs, targets = tensors(given.data, given.model, given.loss, given.microbatches, given.seed)
    batches = batches_of(given, inputs, targets)
    count = len(given.data.sizes)
    weight = drawn.weight
    losses_of = loop_of(given.loop)

    def factor(part: Any, share: float) -> float:
        return 1.0 if drawn.is_sum else share if weight is None else float(weight(part))

    losses: list[str] = []
    last = 0.0

    def evaluate() -> float:
        dataset = TensorDataset(*inputs, targets)
        with script.autocast():
            return spec.evaluate(
                model,
                loss,
                spec.epoch(dataset, EVALUATED, 0, 0, shuffle=False),
                given.microbatches,
                given.seed,
                scopes=drawn.scopes(model),
                weight=given.loss.weight,
                precision=given.precision,
            )

    for epoch in range(max(1, given.data.epochs)):
        own = [number for at, number in drawn.trained if at == epoch]
        for number in own:
            batch = batches[epoch * count + number]
            with script.autocast():
                computed = main.compute(
                    batch,
                    lambda model, part: losses_of(model, loss, part),
                    factor,
                    weight is not None,
                    script.scale,
                )
            last = computed.loss
            found = [last]
            if drawn.form == "nested":
                found += [computed.norm, computed.logged]
            script.update(lambda largest: clip(model, largest))
            if drawn.has_critic:
                of_critic = other.compute(batch, losses_of_critic, lambda part, share: share)
                found.append(of_critic.loss)
                critic.update()
            if given.evaluates:
                found.append(evaluate())
            losses.append(described(found))
        if own:
            script.end_epoch(last)
    return Outcome(
        tuple(losses),
        digests.digest(model.state_dict()),
        digests.digest(digests.optimizer_state(Several(*script.optimizers), model)),
        None if script.average is None else digests.digest(script.average.state_dict()),
        None,
        script.rate,
    )
