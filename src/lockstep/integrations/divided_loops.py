"""Lightning's loops over evaluations and predictions, of which a rank computes some batches.

Every rank loops over all batches, so that Lightning's counts do not depend on the number of ranks,
and skips those of others (`evaluation_loader.ELSEWHERE`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loops import _EvaluationLoop, _PredictionLoop
from torchmetrics import Metric

from lockstep.integrations.evaluation_loader import ELSEWHERE, EvaluationLoader, evaluating
from lockstep.integrations.logged_values import LoggedValues
from lockstep.integrations.microbatch_loader import exchange_values, find_gather, find_rank
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import UsageError
from lockstep.model.collective_calls import CollectiveCallGuard

__all__ = ["DividedEvaluation", "DividedPrediction"]


@contextmanager
def computing(loop: Any, dataloader_idx: int, batch_idx: int) -> Iterator[None]:
    """Compute a batch of an evaluation in the body."""
    loader = loop._combined_loader.flattened[dataloader_idx]
    place = f"rank {find_rank()[0]}, evaluation batch {batch_idx}"
    buffers = Buffers({"": loop.trainer.model})
    is_ours = isinstance(loader, EvaluationLoader)
    batch = loader.computing(batch_idx, buffers) if is_ours else buffers.preserve()
    with CollectiveCallGuard(lambda: place), batch:
        yield


def limit_loaders(loop: Any, limits: list[int | float]) -> None:
    """Divide as many batches among the ranks as the loop will ask for."""
    for loader, limit in zip(loop._combined_loader.flattened, limits, strict=True):
        if isinstance(loader, EvaluationLoader):
            loader.limit = limit


class DividedEvaluation(_EvaluationLoop):
    """A loop of a validation or a test, of which each batch is computed by one rank."""

    _results: LoggedValues

    def run(self) -> Any:
        """Run the loop; afterwards metrics combine the ranks again."""
        module = self.trainer.lightning_module
        metrics = [part for part in module.modules() if isinstance(part, Metric)]
        for metric in metrics if not self.trainer.strategy.divide_evaluation else ():
            metric._to_sync = False  # each rank has seen all batches
        try:
            with evaluating():
                return super().run()
        finally:
            for metric in metrics:
                metric._to_sync = metric.sync_on_compute

    def setup_data(self) -> None:
        """Set the DataLoaders up, which are computed one after another."""
        super().setup_data()
        loader = self._combined_loader
        if loader is not None and loader._mode != "sequential":
            raise UsageError(
                f"ExactStrategy cannot evaluate a CombinedLoader of the mode {loader._mode}: pass "
                "a list of DataLoaders, which are evaluated one after another"
            )

    def reset(self) -> None:
        """Begin; divide the batches up to the limit of Lightning."""
        limit_loaders(self, self.max_batches)
        super().reset()

    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        if batch is not ELSEWHERE:
            recording = self._results.recording(batch)
            with computing(self, dataloader_idx, batch_idx), recording:
                super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        index = dataloader_idx if self.num_dataloaders > 1 else None
        self.trainer._logger_connector.on_batch_start(None, index)
        self.batch_progress.increment_ready()
        self.batch_progress.increment_started()
        self.batch_progress.increment_processed()
        self.batch_progress.increment_completed()
        self._has_run = not self.trainer.sanity_checking
        self._seen_batches_per_dataloader[dataloader_idx] += self._has_run

    def _store_dataloader_outputs(self) -> None:
        self._results.combine(self.trainer.lightning_module)
        super()._store_dataloader_outputs()


class DividedPrediction(_PredictionLoop):
    """A loop of predictions, of which each batch is computed by one rank."""

    _predictions: list[list[Any]]
    epoch_batch_indices: list[Any]

    def run(self) -> Any:
        """Run the loop."""
        with evaluating():
            return super().run()

    def reset(self) -> None:
        """Begin; divide the batches up to the limit of Lightning."""
        limit_loaders(self, self.max_batches)
        super().reset()

    def _predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        if batch is not ELSEWHERE:
            with computing(self, dataloader_idx, batch_idx):
                super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        self.batch_progress.increment_ready()
        self.batch_progress.increment_started()
        self.batch_progress.increment_processed()
        self.batch_progress.increment_completed()

    def _get_batch_indices(self, dataloader: object) -> list[list[int]]:
        """Return the samples of all batches, for a BasePredictionWriter."""
        if isinstance(dataloader, EvaluationLoader):
            return dataloader.lists
        indices: list[list[int]] = super()._get_batch_indices(dataloader)
        return indices

    def _on_predict_epoch_end(self) -> Any:
        """Give every rank all predictions, in the order of the batches."""
        gather = find_gather()
        loaders = self._combined_loader.flattened
        if gather is not None and self.trainer.strategy.divide_evaluation:
            everyone = exchange_values(gather, self._predictions, "predicting with")
            self._predictions = [
                loader.join([predictions[number] for predictions in everyone])
                for number, loader in enumerate(loaders)
            ]
            if any(self.epoch_batch_indices):
                self.epoch_batch_indices = [loader.lists for loader in loaders]
        return super()._on_predict_epoch_end()
