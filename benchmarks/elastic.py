"""Elastic runs: what a killed rank costs, what elasticity costs without faults, what rounds leave.

    python benchmarks/elastic.py kills [--kills 20] [--steps 600] [--ranks 4]
    python benchmarks/elastic.py overhead [--pairs 30]
    python benchmarks/elastic.py rounds [--rounds 200] [--ranks 3]

- kills: one run of 4 replicas in which ranks are killed at random moments, by `lockstep chaos` and
  under `torchrun --max-restarts` with a checkpoint every 10 steps: the same model, data, seed of
  the kills. Time lost by a kill: until the interrupted step begins again, and what had been
  computed of it (and, from a checkpoint, of the steps before it).
- overhead: an elastic run without faults beside a plain one, 25 M parameters, blocks of steps in
  pairs whose order alternates; the median of the differences with its interval (at least 95%).
- rounds: memory, threads, descriptors and mappings of a rank that survives all rounds; each kill
  makes two, one without the dead rank and one with its replacement.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

WIDTH = 512
INPUTS = 64
BATCH = 64
CHECKPOINT_STEPS = 10
LARGE_WIDTH = 2048  # of the 25 M parameter model of step.md
BLOCK = 4  # steps
EPOCH = 100  # steps; runs have whole epochs
HERE = Path(__file__).resolve()
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def network():
    torch.manual_seed(0)
    hidden = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 10))


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EPOCH * BATCH, INPUTS, generator=generator)
    return inputs, torch.randint(0, 10, (EPOCH * BATCH,), generator=generator)


def interval(values):
    """Return median and the interval of the median by order statistics (at least 95%)."""
    ordered = sorted(values)
    count = len(ordered)
    k = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return statistics.median(ordered), ordered[k], ordered[count - 1 - k]


# --- jobs: what every rank runs -----------------------------------------------------------------


def train_lockstep(steps):
    import lockstep as ls

    ls.init()
    data = torch.utils.data.TensorDataset(*samples())
    config = ls.CheckpointConfig(every_steps=CHECKPOINT_STEPS)
    with ls.Trainer(
        network(), nn.CrossEntropyLoss(), SGD, microbatches=8, checkpoint=config, progress=False
    ) as trainer:
        for epoch in range(steps // EPOCH):
            for batch in trainer.batches(data, BATCH, epoch=epoch):
                trainer.step(batch)


def train_torch(steps, folder):
    """Train as PyTorch's tutorial on fault-tolerant training does."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    model = network()
    optimizer = SGD(model.parameters())
    snapshot = folder / "snapshot.pt"
    first = 0
    if snapshot.exists():
        state = torch.load(snapshot)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["steps"]
    parallel = nn.parallel.DistributedDataParallel(model)
    inputs, targets = samples()
    share = BATCH // ranks
    with (folder / "steps.jsonl").open("a", buffering=1) as log:
        for step in range(first, steps):
            if rank == 0:
                log.write(f"{json.dumps({'step': step, 'time': time.time()})}\n")
            begin = step % EPOCH * BATCH + rank * share
            here = slice(begin, begin + share)
            loss = nn.functional.cross_entropy(parallel(inputs[here]), targets[here])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and (step + 1) % CHECKPOINT_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"steps": step + 1}, folder / "new.pt")
                os.replace(folder / "new.pt", snapshot)
    if rank == 0:
        found = hashlib.sha256()
        for value in model.state_dict().values():
            found.update(value.numpy().tobytes())
        (folder / "digest").write_text(found.hexdigest())
    dist.destroy_process_group()


def train_in_turns(path):
    """Train blocks of steps when asked to, through a socket, and wait asleep in between."""
    import lockstep as ls

    ls.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(LARGE_WIDTH, LARGE_WIDTH) for _ in range(6)))
    inputs = torch.randn(BATCH, LARGE_WIDTH, generator=torch.Generator().manual_seed(0))
    trainer = ls.Trainer(
        model, nn.functional.mse_loss, partial(torch.optim.SGD, lr=1e-3), microbatches=2,
        progress=False,
    )  # fmt: skip
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        while channel.recv(1):
            begun = time.perf_counter()
            for _ in range(BLOCK):
                trainer.step((inputs, inputs.flip(1)))
            seconds = (time.perf_counter() - begun) / BLOCK
            channel.sendall(f"{seconds:.9f}\n".ljust(32).encode())
    trainer.finish()


# --- kills ----------------------------------------------------------------------------------------


def chaos(options, folder):
    """Return what `lockstep chaos` found."""
    command = [sys.executable, "-m", "lockstep", "chaos", "-n", options.ranks, "--json"]
    command += ["--kills", options.kills, "--seed", options.seed, "--runs", folder, HERE]
    command += ["job", "lockstep", options.steps]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"lockstep chaos failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


class Torchrun:
    """A job under torchrun, with the begins of its steps."""

    def __init__(self, options, folder):
        self.folder = folder
        self._log = folder / "steps.jsonl"
        folder.mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", options.ranks]
        command += ["--max-restarts", 10 * options.kills, HERE, "job", "torch", options.steps]
        with (folder / "output.log").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command), str(folder)], stdout=output, stderr=output
            )

    def begins(self):
        """Return (step, time) of each step that has begun, in order."""
        with contextlib.suppress(FileNotFoundError):
            lines = self._log.read_text().splitlines(keepends=True)
            found = [json.loads(line) for line in lines if line.endswith("\n")]
            return [(line["step"], line["time"]) for line in found]
        return []

    def wait(self, condition):
        """Wait for a condition on the begins; return them, or None if the job has ended."""
        while self.process.poll() is None:
            begins = self.begins()
            if condition(begins):
                return begins
            time.sleep(0.002)
        return None

    def finish(self):
        """Wait for the end and return the digest."""
        if self.process.wait() != 0:
            raise SystemExit(f"torchrun failed: see {self.folder / 'output.log'}")
        return (self.folder / "digest").read_text()


def torchrun(options, folder):
    """Kill ranks under torchrun in the moments in which `lockstep chaos` does."""
    from lockstep.tools.check.killer import plan_kills

    begun = time.monotonic()
    undisturbed = Torchrun(options, folder / "undisturbed")
    baseline_digest = undisturbed.finish()
    baseline_seconds = time.monotonic() - begun
    times = [moment for _, moment in undisturbed.begins()]
    lengths = [after - before for before, after in itertools.pairwise(times)]
    lengths.append(statistics.median(lengths))
    begun = time.monotonic()
    job = Torchrun(options, folder / "killed")
    lost = []  # begins that were there at the last kill
    restarts_after = 0
    for planned in plan_kills(options.kills, options.steps, options.ranks, options.seed):

        def has_begun(begins, planned=planned, first=restarts_after):
            return len(begins) > first and begins[-1][0] >= planned.step

        if (begins := job.wait(has_begun)) is None:
            break
        time.sleep(max(0.0, begins[-1][1] + planned.part * lengths[planned.step] - time.time()))
        step, since = job.begins()[-1]
        killed = time.time()
        os.kill(int((job.folder / f"pid-{planned.rank}").read_text()), signal.SIGKILL)
        restarts_after = len(job.begins())

        def has_repeated(begins, step=step, killed=killed):
            return begins[-1][0] >= step and begins[-1][1] > killed + 0.5

        again = job.wait(has_repeated)
        if again is None:
            break
        restarts_after = len(again) - 1
        first = next(moment for number, moment in again if number >= step and moment > killed + 0.5)
        lost.append(first - killed + (killed - since))
        print(f"torchrun: kill {len(lost)} of {options.kills} in step {step}: {lost[-1]:.2f} s")
    digest = job.finish()
    return {
        "kills": len(lost), "median_seconds_lost": statistics.median(lost),
        "max_seconds_lost": max(lost), "seconds": time.monotonic() - begun,
        "baseline_seconds": baseline_seconds, "equal": digest == baseline_digest,
    }  # fmt: skip


def measure_kills(options):
    with tempfile.TemporaryDirectory() as place:
        found = {"lockstep": chaos(options, Path(place) / "runs")}
        if not options.alone:
            found["torchrun"] = torchrun(options, Path(place))
    head = f"{'':<10}{'kills':>6}{'median lost':>13}{'worst':>8}{'run':>9}{'undisturbed':>13}"
    print(f"\n{head}  same bits")
    for name, each in found.items():
        print(
            f"{name:<10}{each['kills']:>6}{each['median_seconds_lost'] or math.nan:>11.2f} s"
            f"{each['max_seconds_lost'] or math.nan:>6.2f} s{each['seconds']:>7.1f} s"
            f"{each['baseline_seconds']:>11.1f} s  {'yes' if each['equal'] else 'no'}"
        )
    if "torchrun" in found:
        ratio = found["torchrun"]["median_seconds_lost"] / found["lockstep"]["median_seconds_lost"]
        print(f"a kill costs {ratio:.1f} times less (medians)")


# --- overhead -------------------------------------------------------------------------------------


class Turns:
    """A launch whose ranks train in turns."""

    def __init__(self, name, ranks, folder, *flags):
        path = str(folder / name)
        command = [sys.executable, "-m", "lockstep", "run", *flags, "--log-dir", folder / "runs"]
        command += ["-r", "3", "-t", "0", HERE, "job", "turns", path]
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            listening.settimeout(120)
            self._process = subprocess.Popen(list(map(str, command)))
            self._channels = [listening.accept()[0] for _ in range(ranks)]

    def block(self):
        """Return the seconds per step of one block, on the slowest rank."""
        for channel in self._channels:
            channel.sendall(b"b")
        return max(float(channel.recv(32, socket.MSG_WAITALL)) for channel in self._channels)

    def close(self):
        for channel in self._channels:
            channel.close()
        self._process.wait()


def measure_overhead(options):
    with tempfile.TemporaryDirectory() as place:
        ranks = options.ranks
        folder = Path(place)
        plain = Turns("plain", ranks, folder, "-n", ranks)
        elastic = Turns("elastic", ranks, folder, "--min", 1, "--max", ranks)
        times = {plain: [], elastic: []}
        for each in (plain, elastic) * 2:
            each.block()
        for pair in range(options.pairs):
            for each in (plain, elastic) if pair % 2 else (elastic, plain):
                times[each].append(each.block())
        for each in times:
            each.close()
    relative = [b / a - 1 for a, b in zip(times[plain], times[elastic], strict=True)]
    middle, low, high = interval(relative)
    print(
        f"{options.pairs} pairs of {BLOCK} steps, {ranks} ranks: plain "
        f"{1e3 * statistics.median(times[plain]):.1f} ms, elastic "
        f"{1e3 * statistics.median(times[elastic]):.1f} ms per step (medians); overhead "
        f"{middle:+.2%} ({low:+.2%} to {high:+.2%})"
    )


# --- rounds ---------------------------------------------------------------------------------------


def read_process(pid):
    """Return what a process holds: bytes (proportional), threads, descriptors, mappings."""
    folder = Path(f"/proc/{pid}")
    rollup = (folder / "smaps_rollup").read_text().splitlines()
    size = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    counts = {name: len(os.listdir(folder / name)) for name in ("task", "fd")}
    maps = len((folder / "maps").read_text().splitlines())
    return {"PSS in MB": size / 1e3, "threads": counts["task"], "descriptors": counts["fd"],
            "mappings": maps}  # fmt: skip


class Attrition(threading.Thread):
    """Kills the youngest member as soon as all are there, and looks at the oldest."""

    def __init__(self, wanted, size, ranks, rounds, folder):
        super().__init__(daemon=True)
        self._wanted = wanted
        self._size = size
        self._ranks = ranks
        self._rounds = rounds
        self._record = folder / "record.jsonl"
        self.seen = []

    def run(self):
        while not self._record.exists() or self._record.read_bytes().count(b'"kind":"step"') < 5:
            time.sleep(0.1)
        while self._rounds.number < self._wanted:
            number = self._rounds.number
            members = self._rounds.members
            if len(members) == self._size:
                time.sleep(0.2)  # until the newcomer is under way
                self.seen.append((number, read_process(self._ranks.pids[0])))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._ranks.pids[members[-1]], signal.SIGKILL)
                while self._rounds.number == number:
                    time.sleep(0.01)
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)


def measure_rounds(options):
    from lockstep.elastic.elastic_launch import launch_elastic
    from lockstep.launcher.launch_config import LaunchConfig
    from lockstep.launcher.launch_script import Interrupted

    started = []

    def watch(ranks, rounds, folder):
        started.append(Attrition(options.rounds, options.ranks, ranks, rounds, folder))
        started[0].start()

    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            str(HERE), ("job", "lockstep", "1000000"), nprocs=options.ranks, min_nprocs=1,
            log_dir=folder, shown=frozenset(),
        )  # fmt: skip
        with contextlib.suppress(Interrupted):
            launch_elastic(config, watch)
    seen = started[0].seen
    print(f"\n{'round':>6}" + "".join(f"{name:>13}" for name in seen[0][1]))
    for number, values in seen[:: max(1, len(seen) // 10)]:
        print(f"{number:>6}" + "".join(f"{value:>13.0f}" for value in values.values()))


def main():
    if sys.argv[1:2] == ["job"]:
        kind, *rest = sys.argv[2:]
        if kind == "lockstep":
            train_lockstep(int(rest[0]))
        elif kind == "torch":
            train_torch(int(rest[0]), Path(rest[1]))
        else:
            train_in_turns(rest[0])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    kills = commands.add_parser("kills")
    kills.add_argument("--kills", type=int, default=20)
    kills.add_argument("--steps", type=int, default=600)
    kills.add_argument("--ranks", type=int, default=4)
    kills.add_argument("--seed", type=int, default=1)
    kills.add_argument("--alone", action="store_true", help="without torchrun")
    overhead = commands.add_parser("overhead")
    overhead.add_argument("--pairs", type=int, default=30)
    overhead.add_argument("--ranks", type=int, default=2)
    rounds = commands.add_parser("rounds")
    rounds.add_argument("--rounds", type=int, default=200)
    rounds.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    cores = os.cpu_count()
    memory = psutil.virtual_memory().total / 1e9
    print(f"# {' '.join(sys.argv)}\n# {cores} cores, {memory:.0f} GB, torch {torch.__version__}")
    measure = {"kills": measure_kills, "overhead": measure_overhead, "rounds": measure_rounds}
    measure[options.what](options)


if __name__ == "__main__":
    main()
