"""Kill a run with SIGKILL at random points, resume it each time, and compare every record.

python -m tests.launch.chaos [--kills 30] [--seed 0] [--steps 600] [--flags="--shard -1"] [--faults]

Each kill hits one rank, or torchrun, whose ranks must then end by themselves. With --faults the run
also meets updates that are NaN, flipped bits and poisoned batches, and goes back each time. Its
weights at the end must be those of a run without the batches that it passed over.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from launch.folder import list_checkpoints
from tests.launch import jobs
from tests.launch.faults import ENVIRONMENT_VARIABLE

RUN = (
    *(*jobs.TINY, "--precision", "fp16", "--init-scale", 2.0**26, "--growth-interval", 5),
    *("--dropout", 0.1, "--save-every", 2, "--eval-every", 50),
    *("--keep-checkpoints", 3, "--auto-resume"),
)
RANKS = 2
FAULTY_RUN = (
    *(*jobs.TINY, "--precision", "bf16", "--schedule", "constant", "--ema", 0.9),
    *("--dropout", 0.1, "--save-every", 2, "--eval-every", 1000, "--keep-checkpoints", 3),
    *("--check-replicas-every", 2, "--on-mismatch", "raise", "--rewind-every", 4),
    *("--max-rewinds", 1000, "--auto-resume"),
)


def start(
    folder: Path, args: list[str], planted: dict[str, object] | None = None
) -> subprocess.Popen[bytes]:
    """Start the launcher under torchrun, or let it go on; with planted faults if there are some."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS}"
    script = "launch/train.py" if planted is None else "tests/launch/faults.py"
    command = [sys.executable, *torchrun.split(), str(jobs.ROOT / script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
    environment[ENVIRONMENT_VARIABLE] = json.dumps(planted or {})
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, *args, "--run-dir", str(folder)], env=environment, **quiet)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process that works on a run: torchrun and its ranks."""
    every = psutil.process_iter(["cmdline"])
    return [each for each in every if str(folder) in (each.info["cmdline"] or [])]


def kill(job: subprocess.Popen[bytes], folder: Path, chance: random.Random) -> str:
    """Kill torchrun or one of its ranks; return which, and whether anyone was left behind."""
    ranks = [each for each in processes_of(folder) if each.pid != job.pid]
    what = chance.choice(["torchrun", "a rank"]) if ranks else "torchrun"
    (job if what == "torchrun" else chance.choice(ranks)).kill()
    job.wait()
    end = time.monotonic() + 20
    while (left := processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    for each in left:
        each.kill()
    return f"{what}, and {len(left)} were LEFT BEHIND" if left else what


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


def run_with_faults(kills: int, seed: int, steps: int) -> int:
    """Kill a run with planted faults, and compare its end with a run of the batches that count."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, clean = folder / "run", folder / "clean"
        text = jobs.text_file(folder)
        planted = draw_faults(chance, steps, folder)
        base = [*map(str, ("--data", text, *FAULTY_RUN))]
        args = [*base, "--steps", str(steps)]
        num_kills = 0
        job = start(run, args, planted)
        while num_kills < kills:
            rows_before = len(jobs.records(run))
            while job.poll() is None and len(jobs.records(run)) in (0, rows_before):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 2.0))
            if job.poll() is not None:
                break
            killed = kill(job, run, chance)
            num_kills += 1
            print(f"kill {num_kills}: {killed}: {len(jobs.records(run))} records", flush=True)
            job = start(run, args, planted)
        ended = job.wait()
        rows = jobs.records(run)
        dropped = jobs.passed_over(rows)
        errors = [row["error"] for row in rows if "rewound" in row]
        clean_steps = steps - len(dropped)
        last = ["--steps", str(clean_steps), "--save-every", str(clean_steps)]
        # A kill between poisoned steps ends a run of skips, so the run may skip them and go on.
        skipped: list[int] = []
        for step in planted["poison"]:
            if step not in dropped:
                skipped.append(step - sum(earlier < step for earlier in dropped))
        clean_faults = {"dropped": dropped, "poison": skipped}
        clean_ended = start(clean, [*base, *last], clean_faults).wait()
        is_equal = ended == clean_ended == 0
        for kind in ("model.", "ema.", "optimizer."):
            weights = jobs.weights(run, steps, kind)
            is_equal = is_equal and torch.equal(weights, jobs.weights(clean, clean_steps, kind))
    counts = {error: errors.count(error) for error in sorted(set(errors))}
    verdict = "equal to the bit" if is_equal else "NOT EQUAL"
    print(f"{num_kills} kills; went back {len(errors)} times: {counts};")
    print(
        f"{len(dropped)} of {steps} steps passed over, {len(skipped)} more poisoned ones skipped;"
    )
    print(f" weights, averages and state: {verdict}")
    return int(not is_equal)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--flags", default="--comm-hook int8", help="of the launcher, after those here"
    )
    parser.add_argument("--faults", action="store_true", help="plant faults beside the kills")
    given = parser.parse_args()
    if given.faults:
        return run_with_faults(given.kills, given.seed, given.steps)
    chance, torn, hit = random.Random(given.seed), 0, []
    with tempfile.TemporaryDirectory() as name:
        run, text = Path(name) / "run", jobs.text_file(Path(name))
        args = [*map(str, ("--data", text, *RUN, "--steps", given.steps)), *given.flags.split()]
        assert start(Path(name) / "peace", args).wait() == 0
        peace = jobs.records(Path(name) / "peace")
        for number in range(1, given.kills + 1):
            job, before = start(run, args), len(jobs.records(run))
            # Until it is under way again; then anywhere. A resumed run begins with fewer records.
            while job.poll() is None and len(jobs.records(run)) in (0, before):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 1.0))
            if job.poll() is not None:
                print(f"it ended by itself, with {job.returncode}", flush=True)
                break
            hit.append(kill(job, run, chance))
            whole = {path.name for path in list_checkpoints(run)}
            torn += any(path.name > max(whole, default="") for path in run.glob("checkpoints/*"))
            rows = len(jobs.records(run))
            print(f"kill {number}: {hit[-1]}: {rows} records, {len(whole)} whole", flush=True)
        ended = start(run, args).wait()
        equal = ended == 0 and jobs.records(run) == peace
        left = [each for each in hit if "LEFT" in each] or processes_of(run)
    skipped = sum(not row.get("taken", True) for row in peace)
    agents = sum("torchrun" in each for each in hit)
    print(f"{given.flags}: {len(hit)} kills, {agents} of torchrun, {torn} of them in a save;")
    verdict = "equal to the bit" if equal else "NOT EQUAL"
    print(f"{len(peace)} records, {skipped} of skipped steps: {verdict}", end="; ")
    print("PROCESSES LEFT" if left else "no process left")
    return int(not equal or bool(left))


if __name__ == "__main__":
    sys.exit(main())
