"""Train on four ranks with everything on, watch what each rank holds, and compare a run in pieces.

python -m tests.launch.soak [--minutes 60] [--pieces 6] > docs/results/soak.md

Both runs go on at the same time. The page is printed; the exit code is 1 if something grew, the
loss scale left its place, or a record of the run in pieces is another.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

from tests.launch import jobs

RUN = "--precision fp16 --growth-interval 200 --hook int8 --ema 0.999 --async-save --compile"
RUN += " --dropout 0.1 --accumulate 2 --lr 1e-3 --schedule constant --steps 200000"
RUN += " --save-every 100 --eval-every 500 --auto-resume"
RANKS = 4
# What may come on top from the second quarter of the hour to the last, as a part.
GROWTH = {"memory (MiB)": 0.03, "threads": 0.0, "open files": 0.0, "sockets": 0.0}

Held = dict[str, float]


def start(folder: Path, minutes: float, flags: str) -> psutil.Popen:
    """Start the launcher, or let it go on; it saves and ends after some minutes."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS}"
    command = [sys.executable, *torchrun.split(), str(jobs.ROOT / "launch" / "train.py")]
    command += [*flags.split(), "--run-dir", str(folder), "--max-time", str(minutes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
    return psutil.Popen(command, env=environment, stdout=sys.stderr)


def in_pieces(folder: Path, minutes: float, pieces: int, flags: str) -> None:
    """Train, stop and go on, until the minutes are over."""
    end = time.monotonic() + 60 * minutes
    for left in range(pieces, 0, -1):
        rest = (end - time.monotonic()) / 60 / left
        start(folder, max(rest, 0.1), flags).wait()


def held(rank: psutil.Process) -> Held:
    """What a process holds now."""
    with rank.oneshot():
        memory, sockets = rank.memory_info().rss / 2**20, len(rank.net_connections("all"))
        values = (memory, rank.num_threads(), rank.num_fds(), sockets)
    return dict(zip(GROWTH, values, strict=True))


def watch(job: psutil.Popen, folder: Path, every: float) -> list[list[Held]]:
    """Sample every rank while there are records; the last sample may be of ranks that end."""
    samples = []
    while job.poll() is None:
        time.sleep(every)
        # A rank may end between two reads.
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = [each for each in job.children() if "train.py" in " ".join(each.cmdline())]
            if jobs.records(folder) and len(ranks) == RANKS:
                samples.append([held(rank) for rank in ranks])
    return samples[:-1]


def growth(samples: list[list[Held]]) -> list[str]:
    """The rows of a table: medians of each quarter of the time."""
    quarter, rows = max(1, len(samples) // 4), []
    for rank in range(RANKS):
        for what, allowed in GROWTH.items():
            values = [sample[rank][what] for sample in samples]
            parts = [values[part * quarter :][:quarter] for part in range(4)]
            medians = [statistics.median(part) for part in parts]
            flat = medians[3] <= medians[1] * (1 + allowed)
            shown = " | ".join(f"{median:.0f}" for median in medians)
            rows.append(f"| {rank} | {what} | {shown} | {'flat' if flat else '**grows**'} |")
    return rows


def losses_and_scale(steps: jobs.Rows) -> list[str]:
    """What the run came to."""
    scales, skipped = [row["loss_scale"] for row in steps], steps[-1]["skipped"]
    healthy = skipped < len(steps) / 50 and min(scales[len(scales) // 2 :]) >= 1024
    ends = f"from {min(scales):g} to {max(scales):g}, {scales[-1]:g} at the end"
    return [
        f"{len(steps):,} steps, {skipped} skipped. Loss scale {ends}:",
        "healthy." if healthy else "**not healthy**.",
        f"Loss {steps[0]['loss']:.4f} at first, {steps[-1]['loss']:.4f} at last.",
    ]


def equality(whole: jobs.Rows, pieces: jobs.Rows) -> list[str]:
    """Whether a run in pieces has the records of the other, as far as both went."""
    common = min(whole[-1]["step"], pieces[-1]["step"])
    one, other = ([row for row in rows if row["step"] <= common] for rows in (whole, pieces))
    return [
        f"The run in pieces got to step {pieces[-1]['step']:,}. Of the first {common:,} steps,",
        "every record (loss, norm, rate, scale, validations) is",
        "equal to the bit." if one == other else "**not equal**.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--pieces", type=int, default=6)
    parser.add_argument("--flags", default="", help="of the launcher, after those it has here")
    given = parser.parse_args()
    flags = f"{RUN} {given.flags}".strip()
    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name) / "whole", Path(name) / "pieces"
        arguments = (parts, given.minutes, given.pieces, flags)
        other = threading.Thread(target=in_pieces, args=arguments)
        other.start()
        job = start(whole, given.minutes, flags)
        samples = watch(job, whole, given.minutes / 6)
        other.join()
        rows, again = jobs.records(whole), jobs.records(parts)
    page = [
        f"# {given.minutes:g} minutes of everything\n",
        f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {os.cpu_count()} cores, gloo.",
        f"`python -m tests.launch.soak {' '.join(sys.argv[1:])}`",
        f"trains on {RANKS} ranks with\n`{flags}`,\nand beside it again in pieces.\n",
        f"{len(samples)} samples of every rank; medians of a quarter of the time.\n",
        "| rank | holds | first quarter | second | third | last | |\n|---|---|---|---|---|---|---|",
        *growth(samples),
        "",
        *losses_and_scale([row for row in rows if "loss" in row]),
        "",
        *equality(rows, again),
    ]
    print("\n".join(page))
    return int("**" in "".join(page) or len(samples) < 8 or job.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
