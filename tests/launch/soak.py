"""Train on four ranks with everything on, watch what each rank holds, and compare a run in pieces.

python -m tests.launch.soak [--minutes 60] [--pieces 6] > docs/results/soak.md

Both runs go on at the same time. The page is printed; the exit code is 1 if something grew, the
loss scale left its place, or a record of the run in pieces is another.
"""

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from tests.launch import jobs

RUN = "--precision fp16 --growth-interval 200 --hook int8 --ema 0.999 --async-save --compile"
RUN += " --dropout 0.1 --accumulate 2 --lr 1e-3 --schedule constant --steps 200000"
RUN += " --save-every 100 --eval-every 500 --auto-resume"
RANKS = 4
# What may come on top from the second quarter of the hour to the last, as a part.
GROWTH = {"memory (MiB)": 0.03, "threads": 0.0, "open files": 0.0, "sockets": 0.0}


def start(folder: Path, minutes: float, flags: str) -> subprocess.Popen[bytes]:
    """Start the launcher, or let it go on; it saves and ends after some minutes."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS}"
    command = [sys.executable, *torchrun.split(), str(jobs.ROOT / "launch" / "train.py")]
    command += [*flags.split(), "--run-dir", str(folder), "--max-time", str(minutes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
    return subprocess.Popen(command, env=environment, stdout=sys.stderr)


def in_pieces(folder: Path, minutes: float, pieces: int, flags: str) -> None:
    """Train, stop and go on, until the minutes are over."""
    end = time.monotonic() + 60 * minutes
    for left in range(pieces, 0, -1):
        rest = (end - time.monotonic()) / 60 / left
        start(folder, max(rest, 0.1), flags).wait()


def ranks_of(torchrun: int) -> list[Path]:
    """Where Linux tells of the ranks that torchrun has started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    found = [Path("/proc") / child for child in children]
    return [path for path in found if b"train.py" in (path / "cmdline").read_bytes()]


def held(rank: Path) -> dict[str, float]:
    """What a process holds now."""
    status = dict(line.split(":", 1) for line in (rank / "status").read_text().splitlines())
    kinds = Counter[str]()
    for file in (rank / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kinds[os.readlink(file).split(":")[0]] += 1
    memory = int(status["VmRSS"].split()[0]) / 1024
    counts = (memory, int(status["Threads"]), kinds.total(), kinds["socket"])
    return dict(zip(GROWTH, counts, strict=True))


def watch(job: subprocess.Popen[bytes], folder: Path, every: float) -> list[list[dict[str, float]]]:
    """Sample every rank from the first record until the last; what starts and ends is no matter."""
    samples, records = [], folder / "metrics.jsonl"
    while job.poll() is None:
        time.sleep(every)
        size = records.stat().st_size if records.exists() else 0
        # A rank may end between two reads.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):
            ranks = ranks_of(job.pid)
            if size and len(ranks) == RANKS:
                samples.append((size, [held(rank) for rank in ranks]))
    return [sample for size, sample in samples if size < records.stat().st_size]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--pieces", type=int, default=6)
    parser.add_argument("--flags", default="", help="of the launcher, after those it has here")
    given = parser.parse_args()
    flags = f"{RUN} {given.flags}"
    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name) / "whole", Path(name) / "pieces"
        other = threading.Thread(target=in_pieces, args=(parts, given.minutes, given.pieces, flags))
        other.start()
        job = start(whole, given.minutes, flags)
        samples = watch(job, whole, given.minutes / 6)
        other.join()
        rows, again = jobs.records(whole), jobs.records(parts)

    print("# An hour of everything\n" if given.minutes == 60 else "# Some minutes of everything\n")
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {os.cpu_count()} cores, gloo.")
    print(f"`python -m tests.launch.soak {' '.join(sys.argv[1:])}`")
    print(f"trains on {RANKS} ranks with\n`{flags.strip()}`,\nand beside it again in pieces.\n")
    print(f"{len(samples)} samples of every rank; medians of a quarter of the time.\n")
    print(
        "| rank | holds | first quarter | second | third | last | |\n|---|---|---|---|---|---|---|"
    )
    quarter = max(1, len(samples) // 4)
    wrong = len(samples) < 8
    for rank in range(RANKS):
        for what, growth in GROWTH.items():
            values = [sample[rank][what] for sample in samples]
            medians = [
                statistics.median(values[part * quarter :][:quarter] or [math.nan])
                for part in range(4)
            ]
            flat = medians[3] <= medians[1] * (1 + growth)
            wrong |= not flat
            shown = " | ".join(f"{median:.0f}" for median in medians)
            print(f"| {rank} | {what} | {shown} | {'flat' if flat else '**grows**'} |")

    steps = [row for row in rows if "loss" in row]
    scales = [row["loss_scale"] for row in steps]
    skipped = sum(not row["taken"] for row in steps)
    healthy = skipped < len(steps) / 50 and min(scales[len(scales) // 2 :]) >= 1024
    print(f"\n{len(steps):,} steps, {skipped} skipped. Loss scale from {min(scales):g} to")
    shown = "healthy" if healthy else "**not healthy**"
    print(f"{max(scales):g}, {scales[-1]:g} at the end: {shown}.")
    print(f"Loss {steps[0]['loss']:.4f} at first, {steps[-1]['loss']:.4f} at last.")
    common = min(rows[-1]["step"], again[-1]["step"])
    pairs = zip(rows, again, strict=False)
    first = next((row for row, other in pairs if row != other), {"step": common + 1})["step"]
    equal = first > common
    print(f"\nThe run in {given.pieces} pieces got to step {again[-1]['step']:,}. Of the first")
    print(f"{common:,} steps, every record (loss, norm, rate, scale, validations) is")
    print("equal to the bit." if equal else f"equal **until step {first:,}**.")
    return int(wrong or not healthy or not equal or job.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
