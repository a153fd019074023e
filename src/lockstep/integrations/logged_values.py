"""Values that a LightningModule logs, combined exactly over the micro-batches of all ranks.

    within a batch        `self.log` records (value, batch_size); nothing is sent
    its end               the values of all ranks are added exactly, and logged once on every rank:
                          the value of a step is that of the whole batch
    an evaluation         the same, once at the end of each DataLoader
    in other hooks        every rank must log the same value, which is compared

What follows a logged value (EarlyStopping, ReduceLROnPlateau, checkpoints) gets the same float on
any number of ranks. Objects of torchmetrics are merged in the order of the ranks, if that is exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, cast
from warnings import catch_warnings

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors

from lockstep.data.consistency import GatherFn
from lockstep.integrations.microbatch_loader import exchange_values, find_gather
from lockstep.kernel.errors import UsageError
from lockstep.kernel.exact_sum import PartialSums, compute_partial_sums, round_sum

__all__ = ["LoggedValues", "refusing_inexact_syncs"]


@dataclass
class _Recorded:
    """The values of a key, and how they are logged.

    Attributes:
        options: The arguments of `log`.
        sums: Partial sums of the values, times their batch sizes if their mean is taken.
        weight: The sum of the batch sizes.
        largest: The largest value.
        smallest: The smallest value.
        metric: The attribute of the object of torchmetrics that is logged; "" for a number.
    """

    options: dict[str, Any]
    sums: PartialSums = field(default_factory=list)
    weight: int = 0
    largest: float = -math.inf
    smallest: float = math.inf
    metric: str = ""

    def add(self, value: float, weight: int) -> None:
        """Add the value of a micro-batch."""
        factor = weight if self.options["reduce_fx"] == "mean" else 1
        self.sums = compute_partial_sums([*self.sums, value * factor])
        self.weight += weight
        self.largest = max(self.largest, value)
        self.smallest = min(self.smallest, value)

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the values of another rank."""
        self.sums = self.sums + other["sums"]
        self.weight += other["weight"]
        self.largest = max(self.largest, other["largest"])
        self.smallest = min(self.smallest, other["smallest"])

    def compute(self) -> float:
        """Return the value of all micro-batches, rounded once."""
        kind = self.options["reduce_fx"]
        if kind == "max":
            return self.largest
        if kind == "min":
            return self.smallest
        total = round_sum(self.sums)
        if kind == "sum":
            return total
        return total / self.weight if self.weight else 0.0  # of no sample, which nothing counts


class LoggedValues(_ResultCollection):
    """Lightning's collection of logged values, of which those of a batch are added exactly.

    Args:
        training: Whether it belongs to the training.
        is_divided: Whether the ranks compute different batches.
    """

    batch_size: Any

    def __init__(self, training: bool, is_divided: bool = True) -> None:
        super().__init__(training)
        self._is_divided = is_divided
        self.dataloader_idx: int | None = None
        self._recorded: dict[str, _Recorded] | None = None  # None between two batches

    @contextmanager
    def recording(self, batch: Any) -> Iterator[None]:
        """Record what is logged in the body, which computes a micro-batch."""
        self.batch = batch
        self.batch_size = None
        if self._is_divided and self._recorded is None:
            self._recorded = {}
        yield

    @contextmanager
    def outside(self, samples: int) -> Iterator[None]:
        """Log in the body as after a batch of that many samples: the same value on every rank."""
        recorded = self._recorded
        self._recorded = None
        own_size = self.batch_size
        self.batch_size = samples
        try:
            yield
        finally:
            self._recorded = recorded
            self.batch_size = own_size

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Record a value within a batch; compare it with all ranks elsewhere."""
        if options.pop("rank_zero_only", False):
            super().log(fx, name, value, **{**options, "sync_dist": False, "rank_zero_only": True})
            return
        given = _make_options(options)
        batch_size = options.get("batch_size")
        if self._recorded is None:
            if self._is_divided and isinstance(value, torch.Tensor):
                _require_equal(fx, name, float(value))
            super().log(fx, name, value, **given, batch_size=batch_size)
            return
        key = f"{fx}.{name}.{self.dataloader_idx}"
        own = {**given, "fx": fx, "name": name, "dataloader_idx": self.dataloader_idx}
        entry = self._recorded.setdefault(key, _Recorded(own))
        if isinstance(value, Metric):
            entry.metric = given["metric_attribute"]
            _require_exact(value, entry.metric, self.training)
            super().log(fx, name, value, **given, batch_size=batch_size)
        else:
            is_mean = given["reduce_fx"] == "mean"
            entry.add(float(value), self._find_batch_size(batch_size, is_mean, given["on_epoch"]))

    def _find_batch_size(self, given: Any, is_mean: bool, is_of_epoch: bool) -> int:
        """Return what the value of a micro-batch counts in the mean of the batch, or of the epoch.

        Args:
            given: What `log` got: a number, or a tensor with one.
            is_mean: Whether a mean is taken.
            is_of_epoch: Whether it is a mean over the epoch, for which Lightning asks for the size.
        """
        if given is not None:
            return int(given)
        if not is_mean or self.batch is None:
            return 1
        size = cast("int | None", self.batch_size)
        if size is None:
            with nullcontext() if is_of_epoch else catch_warnings(action="ignore"):
                try:
                    size = extract_batch_size(self.batch)
                except MisconfigurationException:
                    if is_of_epoch:
                        raise
                    size = 1
            self.batch_size = size
        return size

    def combine(
        self,
        module: LightningModule,
        parts: Sequence[float] = (),
        steps: Sequence[str] = (),
    ) -> float:
        """Log what was recorded, with that of all ranks; every rank calls this.

        Args:
            module: The module, for its metrics.
            parts: The parts of the loss of this rank's micro-batches.
            steps: What manual optimization does after the batch.

        Returns:
            The exact sum of all parts of the loss.

        Raises:
            UsageError: Manual optimization makes other steps on another rank.
        """
        recorded = self._recorded or {}
        self._recorded = None
        sums = compute_partial_sums(parts)
        gather = find_gather()
        if gather is not None and self._is_divided:
            mine = {key: vars(entry) for key, entry in recorded.items()}
            message = json.dumps([sums, mine, [*steps]]).encode()
            everyone = [json.loads(message) for message in gather(message, "logging with")]
            sums = [value for theirs, *_ in everyone for value in theirs]
            recorded = {}
            for rank, (_, entries, theirs) in enumerate(everyone):
                if theirs != everyone[0][2]:
                    raise UsageError(
                        f"ExactStrategy: training_step makes the steps {everyone[0][2]} on rank 0 "
                        f"and {theirs} on rank {rank}: decide by batch_idx, not by the data"
                    )
                for key, entry in entries.items():
                    merged = recorded.setdefault(
                        key, _Recorded(entry["options"], metric=entry["metric"])
                    )
                    merged.merge(entry)
        current = self.dataloader_idx, self.batch
        for entry in recorded.values():
            self._log_combined(entry, module, gather)
        self.dataloader_idx, self.batch = current
        return round_sum(sums)

    def _log_combined(self, entry: _Recorded, module: LightningModule, gather: Any) -> None:
        options = dict(entry.options)
        self.dataloader_idx = options.pop("dataloader_idx")
        if not entry.metric:
            value = torch.tensor(entry.compute(), device=module.device)
            super().log(value=value, **options, batch_size=entry.weight)
        elif gather is not None and not self.training:
            metric = attrgetter(entry.metric)(module)
            _merge_states(metric, gather)
            super().log(value=metric, **options, batch_size=1)


def _make_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `log` as values that can be sent, without Lightning's reduction."""
    names = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")
    reduction = options["reduce_fx"]
    name = reduction if isinstance(reduction, str) else reduction.__name__
    kept = {option: options[option] for option in names}
    kept["sync_dist"] = True  # by the default function, which does nothing; else there is a warning
    return {**kept, "reduce_fx": {"avg": "mean"}.get(name.lower(), name.lower())}


def _require_equal(fx: str, name: str, value: float) -> None:
    """Raise UsageError unless all ranks log the same value."""
    gather = find_gather()
    if gather is None:
        return
    values = [float.fromhex(m.decode()) for m in gather(value.hex().encode(), f"logging {name}")]
    for rank, other in enumerate(values):
        if other.hex() != values[0].hex():
            raise UsageError(
                f"ExactStrategy: {name} was logged in {fx} as {values[0]:g} on rank 0 and as "
                f"{other:g} on rank {rank}, each computed from its own batches: log a value of "
                "each batch in the step, or pass ExactStrategy(divide_evaluation=False), which "
                "computes evaluations on every rank"
            )


# --- objects of torchmetrics -------------------------------------------------------------------

EXACT: tuple[Callable[..., Any], ...] = (dim_zero_max, dim_zero_min)
"""The reductions whose results depend on no order."""


def _require_exact(metric: Metric, name: str, is_training: bool) -> None:
    """Raise UsageError if the value of a metric depends on how ranks divide the samples."""
    if find_gather() is None:
        return
    for part in metric.modules():
        if not isinstance(part, Metric):
            continue
        for state, reduction in part._reductions.items():
            default = part._defaults[state]
            is_counted = isinstance(default, torch.Tensor) and not default.is_floating_point()
            is_listed = reduction is dim_zero_cat and not is_training
            if reduction in EXACT or is_listed or (reduction is dim_zero_sum and is_counted):
                continue
            raise UsageError(
                f"ExactStrategy cannot log {name}, since {type(part).__name__} rounds {state} on "
                "each rank, and the result depends on the number of ranks: log a value of each "
                "batch by self.log(name, value, on_epoch=True)"
                + ", or pass ExactStrategy(divide_evaluation=False)"
                * (not is_training)
            )


@contextmanager
def refusing_inexact_syncs(module: LightningModule) -> Iterator[None]:
    """Let torchmetrics combine no states of the ranks in the body whose sums are rounded."""
    metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
    before = {name: metric.dist_sync_fn for name, metric in metrics.items()}

    def sync(name: str, metric: Metric, *args: Any, **options: Any) -> Any:
        _require_exact(metric, name, False)
        return (before[name] or gather_all_tensors)(*args, **options)

    for name, metric in metrics.items():
        metric.dist_sync_fn = partial(sync, name, metric)
    try:
        yield
    finally:
        for name, metric in metrics.items():
            metric.dist_sync_fn = before[name]


def _merge_states(metric: Metric, gather: GatherFn) -> None:
    """Give a metric the states of all ranks, in the order of the ranks."""
    for part in metric.modules():
        if not isinstance(part, Metric):
            continue
        states = {name: getattr(part, name) for name in part._reductions}
        exchanged = exchange_values(gather, (part._update_count, states), "merging metrics with")
        part._update_count = sum(count for count, _ in exchanged)
        everyone = [states for _, states in exchanged]
        for name, reduction in part._reductions.items():
            values = [states[name] for states in everyone]
            if isinstance(values[0], list):
                merged: Any = [tensor for value in values for tensor in value]
            elif reduction is dim_zero_cat:
                merged = torch.cat(values)
            else:
                merged = cast("Callable[[torch.Tensor], Any]", reduction)(torch.stack(values))
            setattr(part, name, merged)
        part._computed = None
        part._to_sync = False  # torchmetrics would add the ranks again
