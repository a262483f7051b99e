"""Train on four ranks with all features, and count the resources that each rank holds.

python -m tests.launch.soak [--minutes 60] > docs/results/soak.md

The first half has level bf16, the second half level fp8 (emulated on a CPU). Every 40 steps each
rank writes a checkpoint, trains, creates a new model, optimizer, guard and hook from the
checkpoint, and trains the same 40 steps again, which must be bit-identical. In some steps the loss
or a gradient of one rank is NaN, in some the loss is 10,000 times as large, and all ranks skip
them. After one step a weight of one rank is NaN, after another one of its bits is flipped, and all
ranks go back to a snapshot. The program prints the page, and returns 1 if a resource grew or a step
differed from the plan.
"""

import argparse
import ctypes
import gc
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
from distamp.errors import NonFiniteWeightsError, ReplicaMismatchError
from distamp.guard import Snapshots, StepGuard

RANKS = 4
STEPS = 40
# Gradient norms that the limit of a spike is computed from.
WINDOW = 16
LEVELS = ("bf16", "fp8")
SNAPSHOT_EVERY = 10
# Planted faults by step. A spike leaves the window before the next spike. A snapshot lies between
# each skipped step and the next rewind, so that the counts keep all skips.
FAULTS = {7: "loss", 17: "gradient", 23: "update", 32: "spike", 36: "bit"}
SKIPPED = ("loss", "gradient", "spike")
SPIKES = list(FAULTS.values()).count("spike")
# The error of the step that follows a fault, on every rank.
ERRORS = {"update": NonFiniteWeightsError, "bit": ReplicaMismatchError}
# The growth that is allowed for a checkpoint with its two stretches of steps. A copy of the weights
# has 294 KiB. Memory may grow by a sixth of a copy, because its pages vary by a MiB or two, and
# allocations of malloc by a fiftieth. An object for each step would be 80 blocks of Python.
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
# A half is divided into blocks of samples. The quantile of Student's t is for 95 % and 8 degrees.
BLOCKS = 10
STUDENT = 2.306
PAGE = f"""
Four ranks train under DDP with `StepGuard`, `step(max_norm=1.0, skip_norm_above=)`, `check_update`,
`check_replicas_every=1`, snapshots every {SNAPSHOT_EVERY} steps, an int8 hook in two levels (two
hosts of two ranks), an average of the weights and asynchronous checkpoints. Every {STEPS} steps
each rank creates all objects from a checkpoint again, and the same steps are bit-identical on all
ranks. After each stretch a rank counts its resources. Shared memory counts the files and maps of
the process in /dev/shm. Temporary files are counted in a folder of the run.

A slope is the growth in an hour, by least squares over {BLOCKS} means of consecutive samples,
without the first fifth of a half. The brackets contain its 95 % interval by Student's t. The limit
is the growth that is allowed for a checkpoint (`LIMITS`) times the checkpoints in an hour. A
resource is "flat" if the whole interval is below the limit, it "grows" if the whole interval is
above the limit, and otherwise the result is "not known".
"""


class Net(nn.Module):
    """A small transformer with sizes that the float8 kernels accept."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 64)
        self.blocks = nn.Sequential(
            nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True),
            nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True),
        )
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.tokens(tokens)))
        return logits


class History:
    """The average of the weights and the latest gradient norms, which a rewind takes back too.

    Args:
        model: The model with the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.average = [param.detach().clone() for param in model.parameters()]
        self.norms = torch.full((WINDOW,), math.nan)

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors, which later steps change in place."""
        return {"average": self.average, "norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the tensors of a state."""
        torch._foreach_copy_(self.average, state["average"])
        self.norms.copy_(state["norms"])


class Job:
    """The training of one rank, which is created again from each checkpoint.

    Args:
        level: The level of precision.
        path: The checkpoint to resume from, or None to start.
    """

    def __init__(self, level: str, path: Path | None) -> None:
        torch.manual_seed(dist.get_rank() if path else 0)
        # Unused parameters make DDP keep its buckets. Other buckets would round other sums.
        model = DistributedDataParallel(cast_model(Net(), level), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=level == "bf16")
        self.hook = comm_hooks.register_comm_hook(model, "int8", ranks_per_host=2)
        self.amp = initialize(
            model,
            optimizer,
            level,
            max_consecutive_skips=3,
            check_update=True,
            check_replicas_every=1,
        )
        self.guard = self.amp.scaler
        assert isinstance(self.guard, StepGuard)
        self.guard.attach_comm_hook(self.hook)
        self.history = History(model)
        self.level = level
        self.step = 0
        self.num_rewinds = 0
        self.loss = math.nan
        if path:
            self._read(path)

    def state(self) -> dict[str, Any]:
        """Return weights and optimizer state by name, and the state of this rank as bytes."""
        hook_state = self.hook.state_dict()
        history = self.history.state_dict()
        rank_state = (self.step, history, hook_state, torch.get_rng_state())
        file = io.BytesIO()
        torch.save(rank_state, file)
        state = self.amp.flat_state_dict()
        state[f"rank.{dist.get_rank()}"] = file.getvalue()
        return state

    def _read(self, path: Path) -> None:
        reader = dcp.FileSystemReader(path)
        saved = reader.read_metadata().state_dict_metadata
        state = self.amp.flat_state_dict(saved)
        rank_name = f"rank.{dist.get_rank()}"
        state[rank_name] = None
        dcp.load(state, storage_reader=reader)
        self.amp.load_flat_state_dict(state)
        rank_state = torch.load(io.BytesIO(state[rank_name]), weights_only=True)
        self.step, history, hook_state, rng_state = rank_state
        self.history.load_state_dict(history)
        self.hook.load_state_dict(hook_state)
        torch.set_rng_state(rng_state)

    def take_steps(self) -> None:
        """Train until the next checkpoint, and go back after the faults that demand it."""
        # New snapshots in each stretch, so that a repeated stretch goes back to the same steps.
        snapshots = self.amp.snapshots(every=SNAPSHOT_EVERY, extra=(self.history,))
        snapshots.record()
        self.num_rewinds = 0
        for _ in range(STEPS):
            expected_error = ERRORS.get(FAULTS.get(self.step % STEPS, ""))
            if expected_error is None:
                self._take_step()
                snapshots.record()
            else:
                self._go_back(snapshots, expected_error)
        self.guard.check_weights()

    def _go_back(self, snapshots: Snapshots, expected_error: type[Exception]) -> None:
        """Demand the error of a step on every rank, and go back to the newest snapshot."""
        try:
            self._take_step()
        except expected_error:
            snapshots.rewind()
            self.num_rewinds += 1
        else:
            raise AssertionError(f"step {self.step} did not raise {expected_error.__name__}")

    def _take_step(self) -> None:
        """Train one step, with the fault that is planted for it."""
        self.step += 1
        fault = FAULTS.get(self.step % STEPS)
        is_faulty_rank = self.step // 10 % RANKS == dist.get_rank()
        params = list(self.amp.model.parameters())
        self.amp.zero_grad()
        loss = self._compute_loss()
        if fault == "spike":
            self.amp.backward(loss * 1e4)
        elif fault == "loss" and is_faulty_rank:
            self.amp.backward(loss * math.nan)
        else:
            self.amp.backward(loss)
        faulty_param = params[self.step % len(params)].detach().view(-1)
        if fault == "gradient" and is_faulty_rank:
            # The gradients are reduced already, so that this rank alone has a NaN.
            grad = params[self.step % len(params)].grad
            grad.view(-1)[0] = math.nan
        limit = self._norm_limit()
        writes_nan = fault == "update" and is_faulty_rank
        taken = self._step_optimizer(limit, faulty_param if writes_nan else None)
        self._record_norm(limit)
        if fault in SKIPPED:
            assert not taken, f"step {self.step} was taken, with a planted {fault}"
        if taken:
            weights = [param.detach() for param in params]
            torch._foreach_lerp_(self.history.average, weights, 0.01)
            self.loss = loss.item()
        if fault == "bit" and is_faulty_rank:
            faulty_param.view(torch.int32)[0] ^= 8

    def _step_optimizer(self, limit: Tensor | float, nan_target: Tensor | None) -> bool:
        """Step, and return whether the step was taken; its update may write a NaN."""

        def write_nan(*_: Any) -> None:
            if nan_target is not None:
                nan_target[0] = math.nan

        handle = self.amp.optimizers[0].register_step_post_hook(write_nan)
        try:
            return bool(self.amp.step(max_norm=1.0, skip_norm_above=limit))
        finally:
            handle.remove()

    def _compute_loss(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.step * RANKS + dist.get_rank())
        start, increment = torch.randint(64, (2, 8, 1), generator=generator)
        tokens = (start + increment * torch.arange(17)) % 64
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        with self.amp.autocast():
            logits = self.amp.model(inputs)
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _recorded_norms(self) -> Tensor:
        return self.history.norms[~self.history.norms.isnan()]

    def _norm_limit(self) -> Tensor | float:
        norms = self._recorded_norms()
        if len(norms) <= 10:
            return 1e3
        mean = norms.mean()
        return mean + 6 * norms.std().clamp(min=0.01 * mean)

    def _record_norm(self, limit: Tensor | float) -> None:
        norm = self.guard.grad_norm()
        if not norm.isfinite():
            return
        if len(self._recorded_norms()) > 10:
            norm = min(norm, limit)
        self.history.norms[self.step % WINDOW] = norm

    def counts(self) -> dict[str, float]:
        """Return the loss, and the counts of skipped steps since the checkpoint."""
        counts = self.guard.step_counts(self.amp.optimizers[0])
        return {
            "loss": self.loss,
            "skips": counts.skipped,
            "rewinds": self.num_rewinds,
            "spikes": SPIKES,
            "unplanned": counts.norm_skips - SPIKES,
        }

    def digest(self) -> str:
        """Return a hash of the weights and their average, which are equal on all ranks."""
        state = (*self.amp.model.parameters(), *self.history.average)
        values = torch.cat([tensor.detach().flatten() for tensor in state])
        data = values.numpy().tobytes()
        return hashlib.sha256(data).hexdigest()


def count_shared_memory(process: psutil.Process) -> int:
    """Return the number of files and maps of this process in /dev/shm."""
    marker = f"_{process.pid}_"
    files = [name for name in os.listdir("/dev/shm") if marker in name]
    maps = process.memory_maps(grouped=False)
    shared_maps = [memory_map for memory_map in maps if "/dev/shm" in memory_map.path]
    return len(files) + len(shared_maps)


def count_resources() -> dict[str, float]:
    """Return the resources that this process holds, and the files that it left."""
    # Python frees objects that refer to each other at times of its own choice, and malloc returns
    # free pages to the system at times of its own.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    heap = psutil.heap_info()
    sockets = process.net_connections("all")
    temporary_files = 0
    for _, _, names in os.walk(tempfile.gettempdir()):
        temporary_files += len(names)
    return {
        "memory (MiB)": process.memory_info().rss / 2**20,
        "given out by malloc (MiB)": (heap.heap_used + heap.mmap_used) / 2**20,
        "Python's blocks": sys.getallocatedblocks(),
        "threads": process.num_threads(),
        "open files": process.num_fds(),
        "sockets": len(sockets),
        "shared memory": count_shared_memory(process),
        "temporary files": temporary_files,
    }


def train(rank: int, port: int, folder: Path, minutes: float) -> None:
    """Train as one rank, and write a line with its resources after each stretch of steps."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    saving_group = dist.new_group(backend="gloo")
    start = time.monotonic()
    job = Job(LEVELS[0], None)
    for index in itertools.count():
        # Rank 0 decides for all ranks when the half and the run are over.
        fraction = torch.tensor((time.monotonic() - start) / (60 * minutes))
        dist.broadcast(fraction, 0)
        if fraction >= 1:
            break
        level = LEVELS[int(fraction * len(LEVELS))]
        path = folder / "checkpoints" / str(index)
        saving = dcp.async_save(job.state(), checkpoint_id=path, process_group=saving_group)
        digests = []
        for is_repetition in (False, True):
            if is_repetition or level != job.level:
                saving.result()
                job.hook.close()
                job = Job(level, path)
            job.take_steps()
            digests.append(job.digest())
            hours = (time.monotonic() - start) / 3600
            row: dict[str, Any] = {"level": level, "hours": hours, "step": job.step}
            with (folder / f"{rank}.jsonl").open("a") as file:
                row.update(job.counts())
                row.update(count_resources())
                print(json.dumps(row), file=file)
        first, repeated = digests
        assert first == repeated, f"step {job.step}: the steps after the checkpoint differ"
        rank_digests: list[Any] = [None] * RANKS
        dist.all_gather_object(rank_digests, repeated)
        assert len(set(rank_digests)) == 1, f"step {job.step}: the weights differ between ranks"
        if rank == 0:
            shutil.rmtree(path)
    job.hook.close()
    dist.destroy_process_group()


def fit_slope(rows: list[dict[str, float]], resource: str) -> tuple[float, float]:
    """Return the growth in an hour, and half the width of its 95 % interval.

    Consecutive samples are similar, so the interval of their own slope would be too small. The
    means of blocks of samples do not have this fault.
    """
    hours = []
    counts = []
    for block in range(BLOCKS):
        start = len(rows) * block // BLOCKS
        end = len(rows) * (block + 1) // BLOCKS
        samples = rows[start:end]
        hours.append(statistics.fmean(row["hours"] for row in samples))
        counts.append(statistics.fmean(row[resource] for row in samples))
    slope, intercept = statistics.linear_regression(hours, counts)
    squares = 0.0
    for hour, count in zip(hours, counts, strict=True):
        residual = count - intercept - slope * hour
        squares += residual**2
    variance = squares / (BLOCKS - 2)
    standard_error = math.sqrt(variance / BLOCKS / statistics.pvariance(hours))
    return slope, STUDENT * standard_error


def run(minutes: float) -> list[list[dict[str, Any]]]:
    """Train, and return the samples of each rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        temporary_files = folder / "tmp"
        temporary_files.mkdir()
        os.environ.update(TMPDIR=str(temporary_files), OMP_NUM_THREADS="1")
        # The store is in a process of its own like that of torchrun, because a store keeps all
        # keys that groups ever used.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(train, (store.port, folder, minutes), RANKS)
        samples = []
        for rank in range(RANKS):
            lines = (folder / f"{rank}.jsonl").read_text().splitlines()
            samples.append([json.loads(line) for line in lines])
        return samples


def print_resources(level: str, rank: int, samples: list[dict[str, Any]]) -> bool:
    """Print the rows of one rank at one level, and return whether all resources are flat."""
    half = [row for row in samples if row["level"] == level]
    half = half[len(half) // 5 :]
    if len(half) < BLOCKS:
        sys.exit(f"{len(half)} samples at level {level} are too few for a slope: run more minutes")
    hours = half[-1]["hours"] - half[0]["hours"]
    checkpoints_in_an_hour = len(half) / 2 / hours
    all_flat = True
    for resource, growth in LIMITS.items():
        limit = growth * checkpoints_in_an_hour
        median = statistics.median(row[resource] for row in half)
        slope, spread = fit_slope(half, resource)
        low = slope - spread
        high = slope + spread
        if high <= limit:
            result = "flat"
        elif low > limit:
            result = "**grows**"
        else:
            result = "**not known**"
        all_flat = all_flat and result == "flat"
        interval = f"{slope:+,.2f} [{low:+,.2f}, {high:+,.2f}]"
        numbers = f"{median:,.0f} | {interval} | {limit:,.1f}"
        print(f"| {level} | {rank} | {resource} | {numbers} | {result} |")
    return all_flat


def print_steps(samples: list[dict[str, Any]]) -> None:
    """Print the number of steps, the skipped steps and the loss."""
    first = samples[0]
    last = samples[-1]
    skips = sum(row["skips"] for row in samples)
    spikes = sum(row["spikes"] for row in samples)
    rewinds = sum(row["rewinds"] for row in samples)
    unplanned = sum(row["unplanned"] for row in samples)
    print(f"\n{last['step']:,} steps, each taken twice, and {len(samples) - 1} resumes.")
    print(f"{skips:,} steps with a planted NaN and {spikes:,} with a planted spike, all skipped;")
    print(f"{rewinds:,} rewinds, half after a NaN that one rank's update wrote, and half after a")
    print(f"flipped bit. {unplanned:,} steps lay above the limit.")
    print(f"Loss {first['loss']:.3f} after the first {STEPS} steps, {last['loss']:.3f} at the end.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    minutes = parser.parse_args().minutes
    samples_by_rank = run(minutes)
    print("# An hour of everything\n" if minutes == 60 else "# Some minutes of everything\n")
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {os.cpu_count()} cores, gloo,")
    print(f"`python -m tests.launch.soak --minutes {minutes:g}`.\n{PAGE}")
    print("| level | rank | holds | median | slope, an hour | limit | |")
    print("|---|---|---|---|---|---|---|")
    all_flat = True
    for level in LEVELS:
        for rank, samples in enumerate(samples_by_rank):
            is_flat = print_resources(level, rank, samples)
            all_flat = all_flat and is_flat
    print_steps(samples_by_rank[0])
    return int(not all_flat)


if __name__ == "__main__":
    sys.exit(main())
