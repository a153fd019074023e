"""The all-gather of torch's `fully_shard`, which requires that all ranks gather the same module.

Ranks that call other blocks, such as with layer dropout, would gather parts of different parameters
if these have the same size, and wait for each other otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.collectives import all_gather_bytes
from lockstep.kernel.errors import DisagreementError

__all__ = ["NamedAllGather"]


class NamedAllGather:
    """An all-gather of the parameters of one sharded module.

    Args:
        name: The name of the module, for messages.
        gather: The all-gather of torch, or of the user.
    """

    def __init__(self, name: str, gather: Any) -> None:
        self._name = name
        self._gather = gather

    # --- called by torch ----------------------------------------------------------------------

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the whole parameters."""
        memory: torch.Tensor = self._gather.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather the parameters.

        Raises:
            DisagreementError: The ranks do not gather the same module now; raised on every rank.
        """
        try:
            all_gather_bytes(b"", f"gathering the parameters of {self._name}", group)
        except DisagreementError as error:
            raise DisagreementError(
                f"{error}; with a sharded model, all ranks call the same blocks in the same order "
                "in each turn of micro-batches: do not skip blocks at random or by the data, or "
                "call every block and leave out its result"
            ) from None
        return self._gather(output_tensor, input_tensor, group, async_op)
