"""The fingerprints of this processor, and what they cost at the start of a rank.

    python benchmarks/portable.py [--runs 5]

Each run is a new interpreter with an empty cache, in turn with default and with portable bits. It
prints the median of the processor time, without the import of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

PROGRAM = """
import json, os, sys, time
import torch
from lockstep.comm import native_module
from lockstep.portable import arithmetic
from lockstep.portable.kernels import choose_kernels

native_module.load_native()
os.environ["XDG_CACHE_HOME"] = sys.argv[2]
torch.set_num_threads(1)
times = []
for _ in range(2):  # computed, and read from the cache
    arithmetic.measure_arithmetic.cache_clear()
    begun = time.process_time()
    choose_kernels(sys.argv[1] == "portable", torch.device("cpu"), os.environ.__setitem__)
    times.append(time.process_time() - begun)
print(json.dumps([arithmetic.measure_arithmetic(), *times]))
"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="Runs per mode.")
    runs = parser.parse_args().runs
    found: dict[str, list[list[float]]] = {"default": [], "portable": []}
    for _ in range(runs):
        for mode, times in found.items():
            with tempfile.TemporaryDirectory() as cache:
                words = [sys.executable, "-c", PROGRAM, mode, cache]
                environ = {
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith(("NPY_", "OPENBLAS_"))
                }
                printed = subprocess.run(words, stdout=subprocess.PIPE, check=True, env=environ)
            fingerprint, *seconds = json.loads(printed.stdout)
            times.append(seconds)
            if len(times) == 1:
                print(f"{mode}: {fingerprint}")
    for mode, times in found.items():
        computed, cached = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        print(f"{mode}: {computed:.0f} ms computed, {cached:.1f} ms from the cache")


if __name__ == "__main__":
    main()
