"""Images per second of the loader, next to torch's DataLoader with the same dataset.

    python -m benchmarks.images [--rounds 15]     writes benchmarks/images.json and images.md
    python -m benchmarks.images --sizes 64 --workers 0 1      only these rows; keeps the others

The images are JPEG files of the size and detail of photographs, which the program generates. All
contenders load whole epochs in turn; the ratios are taken between neighbors, round by round. An
epoch includes the start and the end of the workers, except those that persist.
"""

import argparse
import gc
import itertools
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from examples.images import (
    MEAN,
    STD,
    ImageDataset,
    ImageFiles,
    choose_random_box,
    read_image_folder,
)
from lockstep.checksum import checksum
from lockstep.data.loader import Batches
from lockstep.malloc import keep_freed_memory
from lockstep.record.run_environment import describe_environment

SIZES = (64, 224)  # pixels
EPOCH = 768  # images
WORKERS = (0, 1, 2)
FILES = 256
BATCH = 64
MICROBATCHES = 8
CLASSES = 4
PHOTOGRAPHS = ((500, 375), (375, 500), (400, 500), (640, 480))  # width, height
HERE = Path(__file__).parent

OURS = "lockstep"  # fmt: skip
THEIRS = "DataLoader"
PERSISTENT = "DataLoader, workers persist"
USUAL = "DataLoader, usual transforms"


class UsualTransforms(Dataset[tuple[torch.Tensor, int]]):
    """Decodes the whole image, crops, resizes and flips it, as torchvision's transforms do."""

    def __init__(self, files: ImageFiles, size: int) -> None:
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files.path(index)) as image:
            whole = image.convert("RGB")
        part = whole.crop(tuple(map(int, choose_random_box(*whole.size))))
        part = part.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if torch.rand(()).item() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(numpy.array(part)).permute(2, 0, 1).contiguous()
        return pixels.float().div(255).sub_(MEAN).div_(STD), int(self.files.labels[index])


def write_photographs(folder: Path, count: int) -> None:
    """Write JPEG files: noise whose amplitude falls with the frequency, as in photographs."""
    generator = numpy.random.default_rng(0)
    for number in range(count):
        width, height = PHOTOGRAPHS[number % len(PHOTOGRAPHS)]
        y = numpy.fft.fftfreq(height)[:, None]
        x = numpy.fft.rfftfreq(width)[None]
        amplitude = 1 / numpy.maximum(numpy.hypot(x, y), 1 / max(width, height))
        waves = generator.normal(size=(3, height, width // 2 + 1, 2)).view(complex)[..., 0]
        waves[1:] = 0.8 * waves[0] + 0.2 * waves[1:]  # the channels are alike
        pixels = numpy.fft.irfft2(waves * amplitude, (height, width))
        pixels = 128 + 55 * pixels / pixels.std(axis=(1, 2), keepdims=True)
        path = folder / f"class{number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8).transpose(1, 2, 0).copy())
        image.save(path, quality=90)


@dataclass
class Contender:
    """A way to load the images: `epoch(number)` returns its batches."""

    name: str
    size: int
    workers: int
    images: int
    epoch: Callable[[int], Iterable[Any]]
    seconds: list[float]
    processor: list[float]
    first: list[float]

    def measure(self, number: int) -> None:
        """Load an epoch; note the seconds, those of the processor, and those to the first batch."""
        gc.collect()
        used = processor_seconds()
        begun = time.perf_counter()
        batches = iter(self.epoch(number))
        batch = next(batches)
        self.first.append(time.perf_counter() - begun)
        for batch in batches:  # noqa: B007  (keeps a batch until the next one, as a training does)
            pass
        del batches, batch
        self.seconds.append(time.perf_counter() - begun)
        self.processor.append(processor_seconds() - used)


def processor_seconds() -> float:
    """Return the processor time of this process and of its workers that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def load(dataset: Any, number: int, workers: int, **options: Any) -> Batches:
    """Return an epoch of Lockstep's loader."""
    return Batches(
        dataset,
        BATCH,
        microbatches=MICROBATCHES,
        epoch=number,
        num_workers=workers,
        **options,
    )


def make_contenders(files: ImageFiles, size: int, workers: int) -> list[Contender]:
    """Return the contenders for a size and number of workers, ours first."""
    images = EPOCH
    dataset = repeat(ImageDataset(files, size, augment=True), images)

    def theirs(data: Dataset[Any], persist: bool = False) -> Callable[[int], Iterable[Any]]:
        loader = DataLoader(
            data, BATCH, shuffle=True, num_workers=workers, persistent_workers=persist
        )
        return lambda number: loader

    ways = {OURS: lambda number: load(dataset, number, workers), THEIRS: theirs(dataset)}
    if workers:
        ways[PERSISTENT] = theirs(dataset, persist=True)
    ways[USUAL] = theirs(repeat(UsualTransforms(files, size), images))
    return [Contender(name, size, workers, images, way, [], [], []) for name, way in ways.items()]


def repeat(dataset: Dataset[Any], images: int) -> Subset[Any]:
    """Return a dataset of `images` images, so that an epoch is long enough."""
    return Subset(dataset, [number % FILES for number in range(images)])


def digest_epoch(dataset: Any, number: int, workers: int, replicas: int = 1) -> dict[Any, int]:
    """Return the checksum of each micro-batch of an epoch that all replicas load."""
    found = {}
    for replica in range(replicas):
        for place, batch in enumerate(
            load(dataset, number, workers, replicas=replicas, replica=replica)
        ):
            for part in batch.microbatches:
                found[place, part.index] = hash(tuple(checksum(each) for each in part.data))
    return found


def check_answers(files: ImageFiles, size: int) -> None:
    """Check that all layouts load the same bits, and both loaders the same samples."""
    dataset = ImageDataset(files, size, augment=True)
    whole = digest_epoch(dataset, 1, 0)
    for workers, replicas in ((1, 1), (2, 1), (0, 2), (1, 3)):
        if digest_epoch(dataset, 1, workers, replicas) != whole:
            raise AssertionError(f"{workers} workers on {replicas} replicas load other bits")
    if len(set(whole.values())) != len(whole) or digest_epoch(dataset, 2, 0) == whole:
        raise AssertionError("micro-batches or epochs repeat")
    plain = ImageDataset(files, size, augment=False)
    theirs = DataLoader(plain, BATCH, num_workers=1)
    for batch, (images, labels) in zip(load(plain, 0, 1, shuffle=False), theirs, strict=True):
        own = [part.data for part in batch.microbatches]
        if not torch.equal(torch.cat([part[0] for part in own]), images):
            raise AssertionError("the loaders yield other images")
        if not torch.equal(torch.cat([part[1] for part in own]), labels):
            raise AssertionError("the loaders yield other labels")


def measure(
    folder: Path, rounds: int, sizes: Sequence[int], workers: Sequence[int]
) -> dict[str, Any]:
    """Return the seconds of all epochs."""
    rows = []
    write_photographs(folder / "train", FILES)
    write_photographs(folder / "val", CLASSES)
    files, _ = read_image_folder(folder)
    assert len(files) == FILES
    for size in sizes:
        check_answers(files, size)
        contenders = [each for count in workers for each in make_contenders(files, size, count)]
        for number in range(-1, rounds):
            for _, group in itertools.groupby(contenders, lambda each: each.workers):
                several = list(group)
                start = number % len(several)
                order = several[start:] + several[:start]
                for each in order if number % 2 else reversed(order):
                    each.measure(number + 1)
            if number < 0:  # the first epochs read the files, start worker processes, and so on
                for each in contenders:
                    each.seconds.clear(), each.processor.clear(), each.first.clear()
            else:
                print(f"{size} px: round {number + 1}/{rounds}", flush=True)
        rows += [
            {
                "contender": each.name,
                "size": size,
                "workers": each.workers,
                "images": each.images,
                "seconds": each.seconds,
                "processor_seconds": each.processor if each.name != PERSISTENT else [],
                "first_batch_seconds": each.first,
            }
            for each in contenders
        ]
    kilobytes = [path.stat().st_size / 1e3 for path in folder.rglob("*.jpg")]
    return {
        "benchmark": "images",
        "environment": describe_environment(),
        "command": "python -m benchmarks.images",
        "batch_size": BATCH,
        "microbatches": MICROBATCHES,
        "file_kilobytes": statistics.median(kilobytes),
        "rows": rows,
    }


def keep_others(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Add the rows of an earlier result that this one does not have."""
    measured = {(row["size"], row["workers"]) for row in result["rows"]}
    rows = [row for row in earlier["rows"] if (row["size"], row["workers"]) not in measured]
    if rows:
        result["command"] = "python -m benchmarks.images --sizes N --workers N --rounds N"
    result["rows"] = sorted([*result["rows"], *rows], key=lambda row: (row["size"], row["workers"]))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def describe(result: dict[str, Any], is_provisional: bool) -> str:
    """Return the page."""
    lines = []
    for (size, workers), group in itertools.groupby(
        result["rows"], lambda row: (row["size"], row["workers"])
    ):
        ours, *others = group
        for row in (ours, *others):
            speed = row["images"] / statistics.median(row["seconds"])
            first = 1000 * statistics.median(row["first_batch_seconds"])
            cells = [f"{size}", f"{workers}", row["contender"], f"{speed:.0f}", f"{first:.0f}"]
            ratio = processor = ""
            if row is not ours:
                pairs = zip(row["seconds"], ours["seconds"], strict=True)
                low, middle, high = quartiles([theirs / own for theirs, own in pairs])
                ratio = f"**{middle:.2f}** ({low:.2f} to {high:.2f})"
            if row is not ours and row["processor_seconds"]:
                pairs = zip(row["processor_seconds"], ours["processor_seconds"], strict=True)
                processor = f"{statistics.median(theirs / own for theirs, own in pairs):.2f}"
            lines.append("| " + " | ".join([*cells, ratio, processor]) + " |")
    machine = result["environment"]
    fewest, *_, most = sorted(len(row["seconds"]) for row in result["rows"])
    rounds = f"{fewest} to {most}" if fewest < most else f"{most}"
    sizes = ", ".join(f"{width}x{height}" for width, height in PHOTOGRAPHS)
    columns = (
        "pixels",
        "workers",
        "loader",
        "images/s",
        "ms to the first batch",
        "speed",
        "processor",
    )
    lines[:0] = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    table = "\n".join(lines)
    note = (
        "\n*Provisional*: other programs used the machine. Compare the ratios within a row.\n"
        * is_provisional
    )
    return f"""# Images per second of the loader

Whole epochs of JPEG files ({result["file_kilobytes"]:.0f} kB at the median; {sizes}), in batches
of {BATCH}, for Lockstep in {MICROBATCHES} micro-batches. {rounds} epochs of each, in turn, after
one that is not measured. In that one Lockstep loads up to four samples twice to check them, and in
each later one a single sample.
"DataLoader" is torch's with the same dataset (`examples.images.ImageDataset`: decoding by
Pillow, random crop, flip, normalization). "Usual transforms" decodes whole images, crops and then
resizes them with Pillow, as torchvision does with Pillow's images.
{note}
`speed` is that of Lockstep relative to the loader of the row: the median (quartiles) of the ratios
of epochs in one turn. `processor` is the processor time of that loader relative to Lockstep's.

{table}

Checked before: Lockstep's epochs have the same bits with 0 to 2 workers and on 1 to 3 replicas;
without augmentation, both loaders yield the same bits.

All contenders keep freed memory in the process, as Lockstep's ranks do. Without that, DataLoader's
batches at 224 pixels are written to new pages each time: with no worker, Lockstep is then 1.15
times as fast (two runs of 16 batches).

Machine: {machine["processor"]}, {machine["cores"]} cores, torch {machine["torch"]},
Pillow {Image.__version__}. Command: `{result["command"]}`
"""


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15, help="epochs of each loader; default 15")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES, help="pixels")
    parser.add_argument("--workers", type=int, nargs="+", choices=WORKERS, default=WORKERS)
    parser.add_argument("--busy", action="store_true", help="note that the machine was busy")
    parser.add_argument("--dry", action="store_true", help="do not write the files")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as `ls.init` does, and like the next line for all contenders
    keep_freed_memory()
    random.seed(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.rounds, options.sizes, options.workers)
    if (HERE / "images.json").exists():
        keep_others(result, json.loads((HERE / "images.json").read_text()))
    page = describe(result, options.busy)
    if not options.dry:
        (HERE / "images.json").write_text(json.dumps(result, indent=1) + "\n")
        (HERE / "images.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
