"""Every collective beside its peers, on 2 and 4 ranks.

    python benchmarks/collectives.py --vs gloo,mpi      writes collectives.json, .md and pictures

Runs `lockstep bench` for each collective. `--vs`, `--backend`, `--seconds` and `--bind`
are passed on. Close other programs first: with more programs
than cores the medians are theirs.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep.formatting import format_size
from lockstep.record.run_environment import describe_environment

HERE = Path(__file__).parent
RANKS = (2, 4)
SIZES = {"all_reduce": "4,1K,16K,256K,1M,4M,16M,64M", "send_recv": "4,1K,16K,256K,1M,4M,16M"}
OTHERS = ("reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all")
FEWER = "1K,256K,4M"
PICTURES = ("all_reduce", "send_recv")

Record = dict[str, Any]


def measured(collective: str, sizes: str | None, flags: list[str]) -> list[Record]:
    """Run one benchmark and return its records."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        command = [sys.executable, "-c", "from lockstep.cli import main; main()", "bench"]
        command += [collective, "-n", ",".join(map(str, RANKS)), *flags]
        command += ["--sizes", sizes] if sizes else []
        if collective in PICTURES:
            command += ["--plot", str(HERE / f"{collective}.svg")]
        subprocess.run([*command, "--json", str(file)], check=True)
        records: list[Record] = json.loads(file.read_text())
    shown = ["lockstep", "bench", collective, "-n", ",".join(map(str, RANKS)), *flags]
    shown += ["--sizes", sizes] if sizes else []
    return [record | {"command": shlex.join(shown)} for record in records]


def table(records: list[Record], collective: str, ranks: int) -> str:
    """Return one collective's times as a Markdown table, a line a size."""
    mine = [r for r in records if (r["collective"], r["nprocs"]) == (collective, ranks)]
    names = list(dict.fromkeys(record["backend"] for record in mine))
    rows = [f"| {collective}, {ranks} ranks | " + " | ".join(names) + " |"]
    rows.append("|---|" + "---|" * len(names))
    for size in dict.fromkeys(record["size_bytes"] for record in mine):
        found = {r["backend"]: cell(r) for r in mine if r["size_bytes"] == size}
        cells = [found.get(name, "") for name in names]
        rows.append(f"| {format_size(size)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def cell(record: Record) -> str:
    """Return a median with its tenth and nine tenths, in microseconds."""
    low, middle, high = (short(record[name]) for name in ("p10_us", "median_us", "p90_us"))
    return f"**{middle}** ({low}-{high})"


def short(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 99.5 else f"{microseconds:.3g}"


def page(records: list[Record], load: float) -> str:
    """Return the whole page."""
    machine = describe_environment()
    libraries = {r["backend"]: r["library"] for r in records}
    wrong = sum(record["wrong"] for record in records)
    lines = [
        "# Collectives",
        "",
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}; "
        + "; ".join(f"{name}: {library}" for name, library in libraries.items())
        + f". Load before the start: {load:.1f}"
        + (" (other programs were running: compare columns only)." if load > 0.5 else "."),
        "",
        "Values are microseconds, **median** (10th to 90th percentile) over calls, of the slowest "
        "rank. Inputs are rewritten before each call, ranks start together, and backends alternate "
        "in blocks of calls. "
        "`send_recv` is half a round trip. Calls are timed in `torch.distributed`, or in mpi4py "
        f"for MPI. Wrong elements in all checked calls: {wrong}.",
    ]
    for collective in dict.fromkeys(record["collective"] for record in records):
        command = next(r["command"] for r in records if r["collective"] == collective)
        lines += ["", f"## {collective}", "", f"    {command}"]
        if collective in PICTURES:
            lines += ["", f"![{collective}]({collective}.svg)"]
        for ranks in RANKS:
            lines += ["", table(records, collective, ranks)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--vs", "--backend", "--seconds"):
        parser.add_argument(name)
    parser.add_argument("--bind", action="store_true")
    given = vars(parser.parse_args())
    bind = ["--bind"] if given.pop("bind") else []
    flags = [part for name, value in given.items() if value for part in (f"--{name}", value)]
    flags += bind
    load = os.getloadavg()[0]
    records = []
    for collective, sizes in {**SIZES, **dict.fromkeys(OTHERS, FEWER), "barrier": None}.items():
        records += measured(collective, sizes, flags)
    (HERE / "collectives.json").write_text(json.dumps(records, indent=1) + "\n")
    (HERE / "collectives.md").write_text(page(records, load))


if __name__ == "__main__":
    main()
