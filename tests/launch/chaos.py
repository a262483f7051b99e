"""Kill a run with SIGKILL at random points, resume it each time, and compare every record.

python -m tests.launch.chaos [--kills 30] [--seed 0] [--steps 600] [--flags="--shard -1"] [--faults]

Each kill hits one rank, or torchrun, whose ranks must then end by themselves. With --faults the run
also has updates that are NaN, flipped bits and poisoned batches, and goes back each time. Its last
weights must be equal to the weights of a run without the batches that it passed over.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from launch.folder import list_checkpoints
from tests.launch import jobs
from tests.launch.faults import ENVIRONMENT_VARIABLE

BASE = "--dropout 0.1 --save-every 2 --keep-checkpoints 3 --auto-resume"
FP16_RUN = f"{BASE} --precision fp16 --init-scale {2**26} --growth-interval 5 --eval-every 50"
FAULTY_RUN = f"""
{BASE} --precision bf16 --schedule constant --ema 0.9 --eval-every 1000 --check-replicas-every 2
--on-mismatch raise --rewind-every 4 --max-rewinds 1000
"""
RANKS = 2
# The folder of two runs that differ, in the root of the repository.
FAILED_RUNS = Path("build", "chaos")
# Seconds that ranks have to end after torchrun was killed.
GRACE_S = 20


def start(
    folder: Path, args: list[str], planted: dict[str, object] | None = None
) -> subprocess.Popen[bytes]:
    """Start or resume a run under torchrun, with planted faults if there are any.

    Its output is added to a file beside its folder.
    """
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS}"
    script = "launch/train.py" if planted is None else "tests/launch/faults.py"
    command = [sys.executable, *torchrun.split(), str(jobs.ROOT / script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
    environment[ENVIRONMENT_VARIABLE] = json.dumps(planted or {})
    command += [*args, "--run-dir", str(folder)]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of a run: torchrun and its ranks."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in (process.info["cmdline"] or []):
            processes.append(process)
    return processes


@dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Attributes:
        victim: "torchrun" or "a rank".
        num_survivors: Processes of the run that did not end by themselves.
    """

    victim: str
    num_survivors: int

    def __str__(self) -> str:
        if self.num_survivors:
            return f"{self.victim}, and {self.num_survivors} were LEFT BEHIND"
        return self.victim


def kill(job: subprocess.Popen[bytes], folder: Path, chance: random.Random) -> Kill:
    """Kill torchrun or one of its ranks, and wait until all processes of the run have ended."""
    ranks = [process for process in find_processes(folder) if process.pid != job.pid]
    victim = chance.choice(["torchrun", "a rank"]) if ranks else "torchrun"
    if victim == "torchrun":
        job.kill()
    else:
        chance.choice(ranks).kill()
    job.wait()
    end = time.monotonic() + GRACE_S
    survivors = find_processes(folder)
    while survivors and time.monotonic() < end:
        time.sleep(0.05)
        survivors = find_processes(folder)
    for process in survivors:
        process.kill()
    return Kill(victim, len(survivors))


def wait_until_under_way(
    job: subprocess.Popen[bytes], run: Path, chance: random.Random, seconds: float
) -> bool:
    """Wait until a run writes records again and a random time after that.

    Returns:
        Whether the run has not ended meanwhile. A resumed run first drops the records after its
        checkpoint, so their number changes when the run is under way.
    """
    num_records = len(jobs.records(run))
    while job.poll() is None and len(jobs.records(run)) in (0, num_records):
        time.sleep(0.01)
    time.sleep(chance.uniform(0, seconds))
    return job.poll() is None


def draw_faults(chance: random.Random, steps: int, folder: Path) -> dict[str, Any]:
    """Return planted faults, about one in 25 steps and at least 8 steps apart."""
    planted: dict[str, Any] = {"nan": [], "flip": [], "poison": [], "once": str(folder)}
    step = 6
    while step < steps - 12:
        kind = chance.choice(["nan", "flip", "poison"])
        # The guard of the launcher ends a run, or lets it go back, after three skips in a row.
        planted[kind] += [step, step + 1, step + 2] if kind == "poison" else [step]
        step += chance.randrange(12, 40)
    return planted


def find_skipped_steps(poisoned: list[int], dropped: list[int]) -> list[int]:
    """Return the poisoned steps that a run skipped, as steps of a run without the dropped ones.

    A kill between poisoned steps ends a series of skips, so the run may skip them and go on.
    """
    skipped = []
    for step in poisoned:
        if step not in dropped:
            num_dropped = sum(earlier < step for earlier in dropped)
            skipped.append(step - num_dropped)
    return skipped


def keep_runs(folder: Path) -> None:
    """Copy the records, checkpoints and output of two runs that differ."""
    destination = jobs.ROOT / FAILED_RUNS
    shutil.rmtree(destination, ignore_errors=True)
    shutil.copytree(folder, destination)


def find_difference(run: Path, steps: int, clean_run: Path, clean_steps: int) -> str:
    """Return how the last checkpoints of two runs differ; empty if they are equal to the bit."""
    for kind in ("model.", "ema.", "optimizer."):
        weights = jobs.weights(run, steps, kind)
        clean_weights = jobs.weights(clean_run, clean_steps, kind)
        if not torch.equal(weights, clean_weights):
            difference = (weights - clean_weights).abs().max()
            return f"{kind[:-1]} differs by {difference:.3g}"
    return ""


def run_with_faults(kills: int, seed: int, steps: int) -> int:
    """Kill a run with planted faults, and compare its end with a run of the batches that count."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        clean_run = folder / "clean"
        planted = draw_faults(chance, steps, folder)
        base = jobs.make_flags(jobs.text_file(folder), FAULTY_RUN)
        args = [*base, "--steps", str(steps)]
        num_kills = 0
        job = start(run, args, planted)
        while num_kills < kills and wait_until_under_way(job, run, chance, 2.0):
            killed = kill(job, run, chance)
            num_kills += 1
            num_records = len(jobs.records(run))
            print(f"kill {num_kills}: {killed}: {num_records} records", flush=True)
            job = start(run, args, planted)
        exit_code = job.wait()

        rows = jobs.records(run)
        dropped = jobs.passed_over(rows)
        errors = [row["error"] for row in rows if "rewound" in row]
        skipped = find_skipped_steps(planted["poison"], dropped)
        clean_steps = steps - len(dropped)
        clean_args = [*base, "--steps", str(clean_steps), "--save-every", str(clean_steps)]
        clean_faults = {"dropped": dropped, "poison": skipped}
        clean_exit_code = start(clean_run, clean_args, clean_faults).wait()
        difference = f"the runs ended with exit codes {exit_code} and {clean_exit_code}"
        if exit_code == clean_exit_code == 0:
            difference = find_difference(run, steps, clean_run, clean_steps)
        if difference:
            keep_runs(folder)
    counts = {error: errors.count(error) for error in sorted(set(errors))}
    print(f"{num_kills} kills; went back {len(errors)} times: {counts};")
    print(
        f"{len(dropped)} of {steps} steps passed over, {len(skipped)} more poisoned ones skipped;"
    )
    result = "bit-identical"
    if difference:
        result = f"NOT EQUAL: {difference}. Both runs are in {FAILED_RUNS}"
    print(f" weights, averages and state: {result}")
    return int(bool(difference))


def is_torn(run: Path) -> bool:
    """Return whether a kill has hit a save, and left a checkpoint that is not complete."""
    last_complete = max((path.name for path in list_checkpoints(run)), default="")
    return any(path.name > last_complete for path in run.glob("checkpoints/*"))


def run_without_faults(kills: int, seed: int, steps: int, flags: str) -> int:
    """Kill a run, and compare its records with the records of an uninterrupted run."""
    chance = random.Random(seed)
    hits: list[Kill] = []
    num_torn = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        uninterrupted_run = folder / "uninterrupted"
        args = jobs.make_flags(jobs.text_file(folder), f"{FP16_RUN} --steps {steps} {flags}")
        assert start(uninterrupted_run, args).wait() == 0
        uninterrupted = jobs.records(uninterrupted_run)
        for number in range(1, kills + 1):
            job = start(run, args)
            if not wait_until_under_way(job, run, chance, 1.0):
                print(f"The run ended by itself with exit code {job.returncode}.", flush=True)
                break
            killed = kill(job, run, chance)
            hits.append(killed)
            num_torn += is_torn(run)
            num_records = len(jobs.records(run))
            num_complete = len(list_checkpoints(run))
            counts = f"{num_records} records, {num_complete} whole"
            print(f"kill {number}: {killed}: {counts}", flush=True)
        exit_code = start(run, args).wait()
        is_equal = exit_code == 0 and jobs.records(run) == uninterrupted
        has_survivors = bool(find_processes(run))
        if not is_equal:
            keep_runs(folder)
    has_survivors = has_survivors or any(hit.num_survivors for hit in hits)
    num_skipped = sum(not row.get("taken", True) for row in uninterrupted)
    num_agents = sum(hit.victim == "torchrun" for hit in hits)
    result = "bit-identical" if is_equal else f"NOT EQUAL. Both runs are in {FAILED_RUNS}"
    print(f"{flags}: {len(hits)} kills, {num_agents} of torchrun, {num_torn} of them in a save;")
    print(f"{len(uninterrupted)} records, {num_skipped} of skipped steps: {result}", end="; ")
    print("PROCESSES LEFT" if has_survivors else "no process left")
    return int(not is_equal or has_survivors)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--flags", default="--comm-hook int8", help="more flags of the launcher")
    parser.add_argument("--faults", action="store_true", help="also plant faults")
    options = parser.parse_args()
    if options.faults:
        return run_with_faults(options.kills, options.seed, options.steps)
    return run_without_faults(options.kills, options.seed, options.steps, options.flags)


if __name__ == "__main__":
    sys.exit(main())
