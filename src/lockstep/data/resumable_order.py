"""The order of an epoch, which is the same when the epoch is resumed in its middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.data.epoch_order import EpochOrder
from lockstep.data.loader_options import LoaderOptions
from lockstep.data.samplers import SamplerStates, restore_sampler_state, sampler_state
from lockstep.kernel.errors import DatasetError

__all__ = ["ResumableOrder"]


class ResumableOrder:
    """The order of an epoch, and the state of the sampler from which it was drawn.

    Args:
        options: The options of the loader.
        states: The states of samplers from epoch to epoch.

    Attributes:
        digest: A digest of the order, hexadecimal; "" before it is drawn.
    """

    def __init__(self, options: LoaderOptions, states: SamplerStates) -> None:
        self._options, self._states = options, states
        self.digest = ""
        self._drawn_from: Mapping[str, Any] | None = None
        self._saved: Mapping[str, Any] | None = None  # loaded, and not drawn again yet

    def state_dict(self) -> dict[str, Any]:
        """Return the digest, and the state of the sampler before the order was drawn."""
        sampler, drawn_from = self._options.given_sampler, self._drawn_from
        if drawn_from is None:
            drawn_from = {} if sampler is None else sampler_state(sampler)
        return {"order": self.digest, "sampler": drawn_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the order of a saved state next."""
        self._saved = {"order": state.get("order", ""), "sampler": state.get("sampler", {})}
        self.digest, self._drawn_from = self._saved["order"], self._saved["sampler"]

    def draw(self, epoch: int, start: int) -> EpochOrder:
        """Draw the order of an epoch, after restoring the saved state of the sampler, if any.

        Args:
            epoch: The epoch.
            start: The batch at which the epoch is resumed, for messages.

        Raises:
            DatasetError: The order differs from the saved one.
        """
        saved, self._saved = self._saved, None
        sampler = self._options.given_sampler
        if sampler is None:
            order = self._options.make_order(epoch)
        else:
            if saved is not None:
                restore_sampler_state(sampler, saved["sampler"])
            else:
                self._states.resume(sampler, epoch)
            self._drawn_from = sampler_state(sampler)
            order = self._options.make_order(epoch)
            self._states.record(epoch, dict(self._drawn_from), sampler_state(sampler))
        self.digest = order.digest().hex()
        if saved is not None and saved["order"] not in ("", self.digest):
            cause = (
                "the dataset or the version of torch has changed"
                if sampler is None
                else f"the sampler {type(sampler).__name__} has changed, or has state that cannot "
                "be restored: let it draw from the global generators of torch, Python or numpy, "
                "which are seeded for each epoch, or implement state_dict() and load_state_dict()"
            )
            raise DatasetError(
                f"the order of epoch {epoch} differs from that of the saved position before batch "
                f"{start}; {cause}"
            )
        return order
