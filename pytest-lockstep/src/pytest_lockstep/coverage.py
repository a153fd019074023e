"""Line coverage in ranks, if pytest-cov or `coverage run` measures it in pytest's own process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["measure_lines", "read_settings"]


def read_settings() -> dict[str, Any] | None:
    """Return the settings of the measurement that runs in this process; None if none runs."""
    module = sys.modules.get("coverage")
    current = module.Coverage.current() if module is not None else None
    if current is None:
        return None
    config = current.config
    return {
        "data_file": config.data_file,
        "config_file": config.config_file or False,
        "branch": config.branch,
        "source": config.source,
    }


@contextlib.contextmanager
def measure_lines(settings: dict[str, Any] | None) -> Iterator[None]:
    """Measure the body; write a separate data file, which is combined with the others later."""
    if settings is None:
        yield
        return
    import coverage

    measurement = coverage.Coverage(data_suffix=True, **settings)
    # The template has already imported the measured modules, and a rank may run none of them.
    measurement.set_option("run:disable_warnings", ["module-not-measured", "no-data-collected"])
    measurement.start()
    try:
        yield
    finally:
        measurement.stop()
        measurement.save()
