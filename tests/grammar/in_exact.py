"""A leg of a random loop with `ls.exact`, on this rank."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import digests
import lockstep as ls
from grammar import Leg
from grammar.datasets import dataset_of, order_of, tensors
from grammar.exact import Loop
from grammar.loop_scripts import Critic, Script, described, losses_of_critic
from grammar.loops import loop_of
from grammar.optimization import Several
from grammar.outcome import Outcome
from grammar.plain import EVALUATED, change_model, hook_late
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.kernel import spec
from lockstep.kernel.errors import UsageError

__all__ = ["outcome_of"]


class Interrupted(Exception):
    """Ends a script as if its process were killed."""


def outcome_of(drawn: Loop, leg: Leg, folder: Path) -> Outcome:
    """Train a leg; one that is not the last leaves its state in `folder` for the next."""
    return Run(drawn, leg, folder).train()


class Endless(IterableDataset[Any]):
    """A stream whose length is unknown."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)


@cache
def make_mesh(hosts: int, world: int) -> Any:
    """Return the mesh of so many hosts, one in a process: torch takes equal ones for the same."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (hosts, world // hosts)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class Run:
    """A leg of a loop on this rank."""

    def __init__(self, drawn: Loop, leg: Leg, folder: Path) -> None:
        given = drawn.case
        self.drawn = drawn
        self.leg = leg
        self.saved = folder / f"{given.seed}.pt"
        self.model = given.model.build(given.seed)
        self.loss = given.loss.build(given.model.dtype)
        self.called = self._wrap()
        self.script = Script(drawn, self.model)
        options: dict[str, Any] = {}
        if drawn.is_managed:
            options["optimizer"] = self.script.optimizers
            options["scheduler"] = self.script.schedulers
        self.critic = Critic()
        self.of_critic: Any = None
        if drawn.has_critic:
            self.of_critic = ls.exact(
                self.critic.model,
                self.critic.optimizer,
                given.microbatches,
                given.seed,
                audit=False,
            )
        if drawn.has_checkpoints:
            if not leg.begin and dist.get_rank() == 0:  # a case that is run again
                shutil.rmtree(self.saved.with_suffix(""), ignore_errors=True)
            dist.barrier()
            stateful = dict(self.script.parts)
            if drawn.has_critic:
                stateful["critic"] = self.of_critic
            options["loggers"] = self.saved.with_suffix("")
            options["checkpoint"] = ls.CheckpointConfig(1, keep=2, stateful=stateful)
        self.exact = ls.exact(
            self.called,
            microbatches=given.microbatches,
            seed=given.seed,
            audit=ls.AuditConfig(every_steps=1 if given.seed % 2 else 100),
            **options,
        )
        data = given.data
        more: Any = (given.model, given.loss, given.microbatches, given.seed)
        self.inputs, self.targets = tensors(data, *more)
        self.losses: list[str] = []
        self.last = 0.0
        self.found: list[float] | None = None  # of a step of a flat loop that is not settled
        self.step = leg.begin
        self.has_left = False

    def _wrap(self) -> nn.Module:
        layout: Any = self.leg.layout
        if layout.sharded:
            from torch.distributed.fsdp import fully_shard

            options: dict[str, Any] = {}
            if layout.hosts > 1:
                options["mesh"] = make_mesh(layout.hosts, layout.world)
            units = dict.fromkeys(self.drawn.case.model.units(self.model))
            for unit in units if layout.shards_blocks else ():
                if unit is not self.model and next(unit.parameters(), None) is not None:
                    fully_shard(unit, **options)
            fully_shard(self.model, **options)
        return DistributedDataParallel(self.model) if layout.is_wrapped else self.model

    # --- the training -----------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Train the leg."""
        position = self._load() if self.leg.begin else None
        form = {"nested": self._nested, "flat": self._flat, "divided": self._divided}
        with contextlib.suppress(Interrupted):
            form[self.drawn.form](position)
        self._note_loss()
        # A resumed run may repeat the steps after its checkpoint.
        hexed = tuple(self.losses[len(self.losses) - (self.step - self.leg.begin) :])
        if self.leg.end < len(self.drawn.trained):
            return Outcome(hexed)
        script = self.script
        average = script.average
        digest = self.exact.optimizer_digest()
        if not self.leg.layout.sharded:
            found = Several(*script.optimizers)
            assert digest == digests.digest(digests.optimizer_state(found, self.model))
        return Outcome(
            hexed,
            self.exact.digest(),
            digest,
            None if average is None else digests.digest(average.state_dict()),
            None,
            script.rate,
        )

    def _note_loss(self) -> None:
        """Note the loss of the last step of a flat loop, which is known when it is settled."""
        if self.found is not None:
            self.last = self.exact.last_result.loss
            self.losses.append(described([self.last, *self.found]))
            self.found = None

    def _source(self, epoch: int) -> tuple[Any, dict[str, Any]]:
        """Return the dataset or the loader of an epoch, and the options of `exact.batches`."""
        data = self.drawn.case.data
        options: dict[str, Any] = {}
        if data.epochs:
            dataset = dataset_of(data, self.inputs, self.targets)
            options = {"batch_size": data.batch_size, "num_workers": data.workers}
            if isinstance(dataset, IterableDataset):
                dataset = Endless(dataset) if self.drawn.is_endless else dataset
            elif data.source == "sampler":
                options["sampler"] = order_of(data, epoch)
            else:
                options["shuffle"] = data.shuffle
        else:
            dataset = TensorDataset(*self.inputs, self.targets)
            starts = [sum(data.sizes[:number]) for number in range(len(data.sizes))]
            pairs = zip(starts, data.sizes, strict=True)
            options = {"batch_sampler": [[*range(at, at + size)] for at, size in pairs]}
            if data.named:
                options["collate_fn"] = name_columns
        if self.drawn.has_loader:
            return DataLoader(dataset, **options), {}
        return dataset, options

    def _nested(self, position: Any) -> None:
        drawn = self.drawn
        for epoch in range(max(1, drawn.case.data.epochs)):
            first, last = self._span(epoch)
            if self.step >= last and last <= self.leg.begin and not drawn.has_checkpoints:
                continue  # an epoch of an earlier leg
            source, options = self._source(epoch)
            batches = self.exact.batches(source, epoch=epoch, **options)
            if position is not None and self.leg.begin > first:
                batches.load_state_dict(position)
            position = None
            for batch in batches:
                if drawn.has_checkpoints and self.step == self.leg.end < len(drawn.trained):
                    raise Interrupted
                if batch.number == drawn.ends[epoch]:
                    break
                if (epoch, batch.number) not in drawn.trained:
                    continue
                self._take(batch)
                if drawn.has_checkpoints:  # so that the next one is not left out
                    self.exact._run._checkpoints.writer.wait()
                if self.step == self.leg.end < len(drawn.trained) and not drawn.has_checkpoints:
                    self._end_epoch_of(last)
                    self._save(batches.state_dict())
                    return
            if last > first:
                self.script.end_epoch(self.exact.last_result.loss)

    def _end_epoch_of(self, last: int) -> None:
        """End the epoch whose steps end before `last`, if they are done."""
        if self.step == last:
            self.script.end_epoch(self.last)

    def _span(self, epoch: int) -> tuple[int, int]:
        """Return the numbers of the first step of an epoch, and of the first after it."""
        trained = self.drawn.trained
        return sum(at < epoch for at, _ in trained), sum(at <= epoch for at, _ in trained)

    def _take(self, batch: Any) -> None:
        """Take a step in a nested loop."""
        drawn = self.drawn
        if drawn.leaves == self.step and not self.has_left:
            self.has_left = True
            for _ in batch:
                break
            with contextlib.suppress(UsageError):
                for _ in batch:
                    raise AssertionError("a step that was left is not reported")
        is_several = drawn.case.loop in ("model_twice", "two_losses")
        for part in batch:
            total = 0.0
            with self.script.autocast():
                for value in loop_of(drawn.case.loop)(self.called, self.loss, part):
                    options: dict[str, Any] = {"scaler": self.script.scaler}
                    if is_several:
                        options |= {"final": False, "retain_graph": True}
                    batch.backward(value, **options, **self._shares(part))
                    total += value.item()
            batch.log("loss again", total)
        self.last = batch.loss
        found = [self.last, batch.norm, batch.metrics["loss again"]]
        self._update()
        if self.of_critic is not None:
            same = self.of_critic.use(batch)
            for part in same:
                (value,) = losses_of_critic(self.critic.model, part)
                same.backward(value)
            found.append(same.loss)
            self.critic.update()
        self.losses.append(described([*found, *self._evaluate()]))

    def _shares(self, part: Any) -> dict[str, float]:
        """Return what the script says of the weight of a micro-batch."""
        weight = self.drawn.weight
        if self.drawn.is_sum:
            return {"share": 1.0}
        return {} if weight is None else {"weight": float(weight(part))}

    def _update(self) -> None:
        self.script.update(self.exact.clip_grad_norm_)
        self.step += 1

    def _evaluate(self) -> list[float]:
        """Return the loss over all samples, if the script evaluates."""
        given = self.drawn.case
        if not given.evaluates:
            return []
        dataset = TensorDataset(*self.inputs, self.targets)
        options: Any = {"loss": self.loss, "loss_weight": given.loss.weight}
        with self.script.autocast():
            return [self.exact.evaluate(dataset, EVALUATED, **options).loss]

    def _compute(self, part: Any, **shares: float) -> None:
        """Compute a micro-batch of a flat loop."""
        with self.script.autocast():
            values: Any = loop_of(self.drawn.case.loop)(self.called, self.loss, part)
            (value,) = values
        value = self.exact.weigh(value, **(self._shares(part) or shares))
        scaler = self.script.scaler
        (value if scaler is None else scaler.scale(value)).backward()

    def _end_step(self) -> None:
        """Do what a flat loop does after the last micro-batch of a batch."""
        self._note_loss()
        self._update()
        self.found = self._evaluate()

    def _flat(self, position: Any) -> None:
        drawn = self.drawn
        data = self.drawn.case.data
        dataset = dataset_of(data, self.inputs, self.targets)
        sampler = self.exact.sampler(dataset, data.batch_size, data.shuffle, drawn.case.seed)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=data.workers)
        if position is not None:
            self.exact.load_state_dict(position)
        for epoch in range(sampler.epoch, data.epochs):
            sampler.set_epoch(epoch)
            _, last = self._span(epoch)
            if self.step >= last:
                continue
            for part in self.exact.microbatches(loader):
                self._note_loss()
                self._compute(part)
                if not self.exact.is_complete:
                    continue
                self._end_step()
                if self.step == self.leg.end < len(drawn.trained):
                    self.exact.digest()  # settles the last step
                    self._note_loss()
                    self._end_epoch_of(last)
                    self._save(self.exact.state_dict())
                    return
                if self.step == last and drawn.ends[epoch] is not None:
                    break
            self.exact.digest()  # settles the last step
            self._note_loss()
            self.script.end_epoch(self.last)

    def _divided(self, position: Any) -> None:
        data = self.drawn.case.data
        ranks = dist.get_world_size()
        share = ReplicaShare(self.drawn.case.microbatches, on_one_host(ranks), dist.get_rank())
        if position is not None:
            self.exact.load_state_dict(position)
        trained = self.drawn.trained[self.leg.begin : self.leg.end]
        columns = [*self.inputs, self.targets]
        for _, number in trained:
            at = sum(data.sizes[:number])
            size = data.sizes[number]
            rows = [column[at : at + size] for column in columns]
            batch: Any = dict(zip(("inputs", "targets"), rows, strict=True)) if data.named else rows
            for _, span in share.pieces(size):
                self.exact.begin()
                self._note_loss()
                self._compute(spec.part_of(batch, span), share=len(span) / size)
            self._end_step()
        if self.step < len(self.drawn.trained):
            self._save(self.exact.state_dict())
            return
        self.exact.digest()
        self._note_loss()
        self.script.end_epoch(self.last)

    # --- a state ----------------------------------------------------------------------------------

    def _save(self, position: Any) -> None:
        script = self.script
        parts = {name: part.state_dict() for name, part in script.parts.items()}
        state: dict[str, Any] = {"position": position, "parts": parts}
        state["exact"] = self.exact.state_dict()
        if not self.drawn.is_managed:
            own = [self.model, *script.optimizers, *script.schedulers]
            state["own"] = [part.state_dict() for part in own]
            # Also those that no state dict of the model has.
            state["buffers"] = dict(self.model.named_buffers())
        if self.of_critic is not None:
            own = [self.critic.model, self.critic.optimizer, self.of_critic]
            state["critic"] = [part.state_dict() for part in own]
        if dist.get_rank() == 0:
            torch.save(state, self.saved)
        dist.barrier()

    def _load(self) -> Any:
        script = self.script
        script.steps = self.leg.begin
        if self.drawn.has_checkpoints:
            hook_late(self.drawn.case, self.model)
            self.exact.resume()
            self.step = self.exact.resumed_from or 0
            return None
        state = torch.load(self.saved, weights_only=False)
        hook_late(self.drawn.case, self.model)
        if self.drawn.is_managed:
            self.exact.load_state_dict(state["exact"])
        else:
            change_model(self.drawn.case, self.model)
            own = [self.model, *script.optimizers, *script.schedulers]
            for part, saved in zip(own, state["own"], strict=True):
                part.load_state_dict(saved)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
            if self.drawn.form == "nested":
                self.exact.load_state_dict(state["exact"])
        for name, part in script.parts.items():
            part.load_state_dict(state["parts"][name])
        if self.of_critic is not None:
            own = [self.critic.model, self.critic.optimizer, self.of_critic]
            for part, saved in zip(own, state["critic"], strict=True):
                part.load_state_dict(saved)
        return state["position"]


def name_columns(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Collate samples to a mapping of the model's arguments."""
    columns = [torch.stack(column) for column in zip(*samples, strict=True)]
    return dict(zip(("inputs", "targets"), columns, strict=True))
