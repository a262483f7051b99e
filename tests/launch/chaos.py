"""Kill a run with SIGKILL at random points, resume it each time, and compare every record.

python -m tests.launch.chaos [--kills 30] [--seed 0] [--flags="--shard -1 --async-save"]
"""

import random
import sys
import tempfile
from pathlib import Path

from launch.folder import checkpoints_of
from tests.launch import jobs
from tests.launch.test_jobs import killed_after
from tests.ranks import RankPool

RUN = (*jobs.TINY, "--precision", "fp16", "--init-scale", 2.0**26, "--growth-interval", 5)
RUN = (*RUN, "--dropout", 0.1, "--save-every", 2, "--eval-every", 50, "--keep", 3, "--auto-resume")


def main(kills: int = 30, seed: int = 0, steps: int = 600, flags: str = "--hook int8") -> bool:
    """Say whether a run that is killed again and again has the records of one left in peace."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, RankPool(2, timeout=900) as pool:
        run, text = Path(name) / "run", jobs.text_file(Path(name))
        args = ("--data", text, *RUN, "--steps", steps, *flags.split())
        peace = pool.run(jobs.train, Path(name) / "peace", args)[0]
        torn = 0
        for kill in range(1, kills + 1):
            been = (0, len(jobs.records(run)))  # until it is under way again; then anywhere
            killed_after(pool, run, args, been, chance.uniform(0, 1.0))
            whole = {path.name for path in checkpoints_of(run)}
            torn += any(path.name > max(whole, default="") for path in run.glob("checkpoints/*"))
            print(f"kill {kill}: {len(jobs.records(run))} records, {len(whole)} whole", flush=True)
        same: bool = pool.run(jobs.train, run, args)[0] == peace
    skipped = sum(not row.get("taken", True) for row in peace)
    print(f"{flags}: {kills} kills, {torn} of them in a save; {len(peace)} records,")
    print(f"{skipped} of skipped steps: {'equal to the bit' if same else 'NOT EQUAL'}")
    return same


if __name__ == "__main__":
    sys.exit(not main())
