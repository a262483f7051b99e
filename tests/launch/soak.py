"""Train on four ranks with everything on, and watch what each rank holds.

python -m tests.launch.soak [--minutes 60] > docs/results/soak.md

The first half is level bf16, the second fp8 (emulated on a CPU). Every 40 steps each rank writes a
checkpoint, trains, throws model, optimizer, guard and hook away, makes them anew from it and trains
the same 40 steps again, which end in the same bits. In some steps one rank's loss or one of its
gradients is NaN, in some the loss is 10,000 times as large. The page is printed; the exit code is 1
if something grew or a step went otherwise than planned.
"""

import argparse
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, comm_hooks, initialize
from distamp.guard import StepGuard

RANKS, STEPS, WINDOW = 4, 40, 16
LEVELS = ("bf16", "fp8")
# What goes wrong in which of the steps; a spike has left the window before the next one.
ILL = {7: "loss", 17: "gradient", 32: "spike"}
# What a checkpoint, with its two stretches of steps, may leave behind. A copy of the weights has
# 294 KiB: memory may grow by a sixth of one, for its pages come and go by a MiB or two, and what
# malloc gave out by a fiftieth. An object for each step would be 80 blocks of Python's.
LIMITS = {
    "memory (MiB)": 48 / 1024,
    "given out by malloc (MiB)": 6 / 1024,
    "Python's blocks": 20.0,
    "threads": 0.03,
    "open files": 0.03,
    "sockets": 0.03,
    "shared memory": 0.03,
    "temporary files": 0.03,
}
BLOCKS, STUDENT = 10, 2.306  # of a half's samples; for 95 % and 8 degrees of freedom
PAGE = f"""
Four ranks train under DDP with `StepGuard`, `step(max_norm=1.0, skip_norm_above=)`, an int8 hook in
two levels (two hosts of two ranks), an average of the weights and asynchronous checkpoints. Every
{STEPS} steps all objects are made anew from a checkpoint, and the same steps end in the same bits,
on all ranks. After each stretch a rank counts what it holds. Shared memory: files and maps of the
process in /dev/shm. Temporary files: in a folder of the run's own.

A slope is what comes on top in an hour, by least squares over {BLOCKS} means of samples in a row,
without the first fifth of a half; in brackets its 95 % interval by Student's t. The limit is what a
checkpoint may leave (`LIMITS`) times the checkpoints in an hour. "flat": the whole interval is
below it; "grows": the whole is above; "not known": neither.
"""


class Net(nn.Module):
    """A small transformer, whose sizes the float8 kernels take."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 64)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.tokens(tokens)))
        return logits


class Job:
    """One rank's part of the training: all that is made anew after a checkpoint.

    Args:
        level: Of precision.
        path: The checkpoint to go on from; None to begin.
    """

    def __init__(self, level: str, path: Path | None) -> None:
        torch.manual_seed(dist.get_rank() if path else 0)
        # So DDP keeps its buckets: other ones would round other sums.
        model = DistributedDataParallel(cast_model(Net(), level), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=level == "bf16")
        self.hook = comm_hooks.register_comm_hook(model, "int8", ranks_per_host=2)
        self.amp = initialize(model, optimizer, level, max_consecutive_skips=3)
        self.guard = self.amp.scaler
        assert isinstance(self.guard, StepGuard)
        self.guard.attach_comm_hook(self.hook)
        self.average = [p.detach().clone() for p in model.parameters()]
        self.norms = torch.full((WINDOW,), math.nan)
        self.level, self.step, self.loss = level, 0, math.nan
        if path:
            self._read(path)

    def state(self) -> dict[str, Any]:
        """Return weights and optimizer state by name, and as bytes what is a rank's own."""
        own = (self.step, self.norms, self.average, self.hook.state_dict(), torch.get_rng_state())
        file = io.BytesIO()
        torch.save(own, file)
        return self.amp.flat_state_dict() | {f"rank.{dist.get_rank()}": file.getvalue()}

    def _read(self, path: Path) -> None:
        reader, own = dcp.FileSystemReader(path), f"rank.{dist.get_rank()}"
        saved = reader.read_metadata().state_dict_metadata
        state = self.amp.flat_state_dict(saved) | {own: None}
        dcp.load(state, storage_reader=reader)
        self.amp.load_flat_state_dict(state)
        self.step, self.norms, self.average, hook, random = torch.load(
            io.BytesIO(state[own]), weights_only=True
        )
        self.hook.load_state_dict(hook)
        torch.set_rng_state(random)

    def take_step(self) -> None:
        self.step += 1
        rank, parameters = dist.get_rank(), list(self.amp.model.parameters())
        chosen = self.step // 10 % RANKS == rank
        ill = ILL.get(self.step % STEPS, "")
        generator = torch.Generator().manual_seed(self.step * RANKS + rank)
        begin, by = torch.randint(64, (2, 8, 1), generator=generator)
        tokens = (begin + by * torch.arange(17)) % 64
        self.amp.zero_grad()
        with self.amp.autocast():
            logits = self.amp.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.amp.backward(loss * {"loss": math.nan if chosen else 1, "spike": 1e4}.get(ill, 1))
        if ill == "gradient" and chosen:  # after the average: this rank alone has it
            parameters[self.step % len(parameters)].grad.view(-1)[0] = math.nan
        seen = self.norms[~self.norms.isnan()]
        limit = (
            seen.mean() + 6 * seen.std().clamp(min=0.01 * seen.mean()) if len(seen) > 10 else 1e3
        )
        taken = bool(self.amp.step(max_norm=1.0, skip_norm_above=limit))
        norm = self.guard.grad_norm()
        if norm.isfinite():
            self.norms[self.step % WINDOW] = norm if len(seen) <= 10 else min(norm, limit)
        if ill:
            assert not taken, f"step {self.step} was taken, with a planted {ill}"
        if taken:
            torch._foreach_lerp_(self.average, [p.detach() for p in parameters], 0.01)
            self.loss = loss.item()

    def counts(self) -> dict[str, float]:
        """Return what happened since the checkpoint."""
        counts = self.guard.step_counts(self.amp.optimizers[0])
        spikes = list(ILL.values()).count("spike")
        return {
            "loss": self.loss,
            "skips": counts.skipped,
            "spikes": spikes,
            "unplanned": counts.norm_skips - spikes,
        }

    def digest(self) -> str:
        """Return a hash of the weights and their average, which all ranks have alike."""
        state = (*self.amp.model.parameters(), *self.average)
        values = torch.cat([tensor.detach().flatten() for tensor in state])
        return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def held() -> dict[str, float]:
    """What this process holds now, and files that it left."""
    process, heap, own = psutil.Process(), psutil.heap_info(), f"_{os.getpid()}_"
    shared = [name for name in os.listdir("/dev/shm") if own in name]
    shared += [each.path for each in process.memory_maps(grouped=False) if "/dev/shm" in each.path]
    counts = (
        process.memory_info().rss / 2**20,
        (heap.heap_used + heap.mmap_used) / 2**20,
        sys.getallocatedblocks(),
        process.num_threads(),
        process.num_fds(),
        len(process.net_connections("all")),
        len(shared),
        sum(len(names) for _, _, names in os.walk(tempfile.gettempdir())),
    )
    return dict(zip(LIMITS, counts, strict=True))


def train(rank: int, port: int, folder: Path, minutes: float) -> None:
    """Be one rank; what it held after each stretch of steps is a line of a file."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    saving = dist.new_group(backend="gloo")
    job, begun = Job(LEVELS[0], None), time.monotonic()
    for index in itertools.count():
        part = torch.tensor((time.monotonic() - begun) / (60 * minutes))
        dist.broadcast(part, 0)
        if part >= 1:
            break
        level, path = LEVELS[int(part * len(LEVELS))], folder / "checkpoints" / str(index)
        written = dcp.async_save(job.state(), checkpoint_id=path, process_group=saving)
        ends = []
        for again in (False, True):
            if again or level != job.level:
                written.result()
                job.hook.close()
                job = Job(level, path)
            for _ in range(STEPS):
                job.take_step()
            ends.append(job.digest())
            row = {"level": level, "hours": (time.monotonic() - begun) / 3600, "step": job.step}
            with (folder / f"{rank}.jsonl").open("a") as file:
                print(json.dumps(row | job.counts() | held()), file=file)
        assert ends[0] == ends[1], f"step {job.step}: after the checkpoint it went otherwise"
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, ends[1])
        assert len(set(everyone)) == 1, f"step {job.step}: ranks hold other weights"
        if rank == 0:
            shutil.rmtree(path)
    job.hook.close()
    dist.destroy_process_group()


def slope(rows: list[dict[str, float]], what: str) -> tuple[float, float]:
    """Return what comes on top in an hour, and how far its 95 % interval goes to each side.

    Samples in a row are alike, which would make the interval of their own slope too small; means
    of many in a row are not.
    """
    ends = [len(rows) * block // BLOCKS for block in range(BLOCKS + 1)]
    means = [
        [statistics.fmean(row[key] for row in rows[begin:end]) for key in ("hours", what)]
        for begin, end in itertools.pairwise(ends)
    ]
    hours, held = zip(*means, strict=True)
    by, start = statistics.linear_regression(hours, held)
    error = sum((y - start - by * x) ** 2 for x, y in means) / (BLOCKS - 2)
    return by, STUDENT * math.sqrt(error / BLOCKS / statistics.pvariance(hours))


def run(minutes: float) -> list[list[dict[str, Any]]]:
    """Train; return the samples of each rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ.update(TMPDIR=str(folder / "tmp"), OMP_NUM_THREADS="1")
        # As torchrun's: in a process of its own, for a store keeps all that groups ever met by.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(train, (store.port, folder, minutes), RANKS)
        files = [folder / f"{rank}.jsonl" for rank in range(RANKS)]
        return [[*map(json.loads, file.read_text().splitlines())] for file in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    minutes = parser.parse_args().minutes
    ranks = run(minutes)
    print("# An hour of everything\n" if minutes == 60 else "# Some minutes of everything\n")
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {os.cpu_count()} cores, gloo,")
    print(f"`python -m tests.launch.soak --minutes {minutes:g}`.\n{PAGE}")
    print("| level | rank | holds | median | slope, an hour | limit | |")
    print("|---|---|---|---|---|---|---|")
    wrong = False
    for level, (rank, rows) in itertools.product(LEVELS, enumerate(ranks)):
        half = [row for row in rows if row["level"] == level]
        half = half[len(half) // 5 :]
        rate = len(half) / 2 / (half[-1]["hours"] - half[0]["hours"])
        for what, left in LIMITS.items():
            median = statistics.median(row[what] for row in half)
            by, spread, limit = *slope(half, what), left * rate
            flat, grows = by + spread <= limit, by - spread > limit
            wrong |= not flat
            words = "flat" if flat else "**grows**" if grows else "**not known**"
            interval = f"{by:+,.2f} [{by - spread:+,.2f}, {by + spread:+,.2f}]"
            cells = (level, rank, what, f"{median:,.0f}", interval, f"{limit:,.1f}", words)
            print(f"| {' | '.join(map(str, cells))} |")
    rows = ranks[0]
    print(f"\n{rows[-1]['step']:,} steps, each taken twice, and {len(rows) - 1} resumes.")
    skips, spikes = (sum(row[what] for row in rows) for what in ("skips", "spikes"))
    print(f"{skips:,} steps with a planted NaN and {spikes:,} with a planted spike, all skipped;")
    unplanned = sum(row["unplanned"] for row in rows)
    print(f"{unplanned:,} others lay above the limit. Loss {rows[0]['loss']:.3f} after the first")
    print(f"{STEPS} steps, {rows[-1]['loss']:.3f} at the end.")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
