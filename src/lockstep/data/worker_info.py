"""torch's information about the loader worker, hidden from code that would act on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils.data._utils import worker as torch_worker

__all__ = ["hidden_worker_info"]


@contextlib.contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info` return None in the body, as outside of workers."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
