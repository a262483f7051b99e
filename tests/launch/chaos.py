"""Kill a run with SIGKILL at random points, resume it each time, and compare every record.

python -m tests.launch.chaos [--kills 15] [--seed 0] [--flags="--shard -1 --async-save"]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from launch.config import checkpoints_of
from tests.launch import jobs
from tests.launch.test_jobs import kill

RUN = (*jobs.TINY, "--precision", "fp16", "--init-scale", 2.0**26, "--growth-interval", 5)
RUN = (*RUN, "--dropout", 0.1, "--save-every", 2, "--eval-every", 50, "--keep", 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--flags", default="--hook int8")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ("--data", jobs.text_file(folder), *RUN, "--steps", given.steps)
        flags = (*flags, *given.flags.split(), "--auto-resume", "--run-dir")
        assert jobs.start(jobs.torchrun(2, *flags, folder / "peace")).wait() == 0
        command, run = jobs.torchrun(2, *flags, folder / "run"), folder / "run"
        kills = torn = 0
        while kills < given.kills:
            before = len(jobs.records(run))
            job = jobs.start(command)
            while job.poll() is None and len(jobs.records(run)) in (0, before):
                time.sleep(0.01)  # until it is under way; then anywhere
            time.sleep(chance.uniform(0, 1.0))
            assert job.poll() is None, "the run was over before it was killed often enough"
            kill(job)
            kills += 1
            whole = {path.name for path in checkpoints_of(run)}
            torn += any(path.name > max(whole, default="") for path in run.glob("checkpoints/*"))
            print(f"kill {kills}: {len(jobs.records(run))} records, {len(whole)} whole", flush=True)
        assert jobs.start(command).wait() == 0
        ours, theirs = jobs.records(run), jobs.records(folder / "peace")
        skipped = sum(not row.get("taken", True) for row in theirs)
        same = "equal to the bit" if ours == theirs else "NOT EQUAL"
        print(f"{given.flags}: {kills} kills, {torn} of them in a save; {len(theirs)} records,")
        print(f"{skipped} of skipped steps: {same}")
        sys.exit(ours != theirs)


if __name__ == "__main__":
    main()
