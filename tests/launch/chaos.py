"""Kill a run with SIGKILL at random points, resume it each time, and compare every record.

python -m tests.launch.chaos [--kills 30] [--seed 0] [--steps 600] [--flags="--shard -1"]

Each kill hits one rank, or torchrun, whose ranks must then end by themselves.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from launch.folder import list_checkpoints
from tests.launch import jobs

RUN = (
    *(*jobs.TINY, "--precision", "fp16", "--init-scale", 2.0**26, "--growth-interval", 5),
    *("--dropout", 0.1, "--save-every", 2, "--eval-every", 50),
    *("--keep-checkpoints", 3, "--auto-resume"),
)
RANKS = 2


def start(folder: Path, args: list[str]) -> subprocess.Popen[bytes]:
    """Start the launcher under torchrun, or let it go on."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS}"
    command = [sys.executable, *torchrun.split(), str(jobs.ROOT / "launch" / "train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--flags", default="--comm-hook int8", help="of the launcher, after those here"
    )
    given = parser.parse_args()
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
