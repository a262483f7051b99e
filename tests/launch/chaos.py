"""A run that is killed again and again in every way, by chance but from a seed.

python -m tests.launch.chaos --kills 30 --seed 0 --write docs/results/launch_chaos.md
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.launch import jobs

STEPS_PER_KILL = 20
# Overflow on purpose: 2^40 is far above what fp16 gradients can hold, and growth every 20 clean
# steps overflows again later; dropout draws random numbers that differ between ranks.
FLAGS = (
    *jobs.TINY,
    *("--precision", "fp16", "--init-scale", 2.0**40, "--growth-interval", 20),
    *("--dropout", 0.1, "--checkpoint-every", 7, "--evaluate-every", 50),
)


@dataclass
class Troubled:
    """One run, whatever happens to it.

    Args:
        ranks: Number of ranks.
        arguments: The launcher's, with ``--run-dir folder`` among them.
        folder: The run's.
        seed: Fixes what happens, and after how many steps.
    """

    ranks: int
    arguments: tuple[object, ...]
    folder: Path
    seed: int
    shown: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    torchruns: int = 0

    def run(self, kills: int, seconds: float) -> list[dict[str, Any]]:
        """Kill the run so many times, let it end, and return its records."""
        chance = random.Random(self.seed)
        end = time.monotonic() + seconds
        started = self._start()
        for number in range(kills):
            target = self._step() + chance.randint(1, STEPS_PER_KILL)
            # Most ways leave torchrun alive, which starts the ranks again by itself.
            way = chance.choice(self.WAYS)
            started = self._wait_for_step(target, started, end)
            name = way.__name__.strip("_").replace("_", " ")
            if way(self, started, chance):
                self.done[name] += 1
            else:
                self.done["came too late"] += 1
            print(f"{number + 1}: {name} at step {self._step()}", flush=True)
        while self._wait_for_end(started, end) != 0:
            started = self._start()
        return jobs.without_speed(jobs.records(self.folder))

    # -- what can happen ------------------------------------------------------------------------

    def _sigkill_a_rank(self, started: jobs.Started, chance: random.Random) -> bool:
        workers = started.workers()
        return bool(workers) and _kill(chance.choice(workers), signal.SIGKILL)

    def _sigkill_every_rank(self, started: jobs.Started, chance: random.Random) -> bool:
        return sum(_kill(pid, signal.SIGKILL) for pid in started.workers()) > 0

    def _sigterm_a_rank(self, started: jobs.Started, chance: random.Random) -> bool:
        workers = started.workers()
        return bool(workers) and _kill(chance.choice(workers), signal.SIGTERM)

    def _sigterm_torchrun(self, started: jobs.Started, chance: random.Random) -> bool:
        return _kill(started.process.pid, signal.SIGTERM)

    def _sigkill_torchrun_and_every_rank(
        self, started: jobs.Started, chance: random.Random
    ) -> bool:
        workers = started.workers()
        killed = _kill(started.process.pid, signal.SIGKILL)
        for pid in workers:
            _kill(pid, signal.SIGKILL)
        return killed

    def _sigkill_every_rank_and_truncate_the_newest_checkpoint(
        self, started: jobs.Started, chance: random.Random
    ) -> bool:
        killed = self._sigkill_every_rank(started, chance)
        checkpoints = sorted((self.folder / "checkpoints").glob("step-*"))
        if killed and len(checkpoints) > 1:
            files = sorted(checkpoints[-1].iterdir())
            with chance.choice(files).open("r+b") as file:
                file.truncate(file.seek(0, os.SEEK_END) // 2)
        return killed

    WAYS = (
        *(_sigkill_a_rank, _sigkill_a_rank, _sigkill_every_rank, _sigterm_a_rank),
        *(_sigterm_torchrun, _sigkill_torchrun_and_every_rank),
        _sigkill_every_rank_and_truncate_the_newest_checkpoint,
    )

    # -- waiting --------------------------------------------------------------------------------

    def _start(self) -> jobs.Started:
        self.torchruns += 1
        arguments = (*self.arguments, "--auto-resume")
        with self.folder.with_name(f"{self.folder.name}.log").open("ab") as log:
            return jobs.start(self.ranks, *arguments, max_restarts=1000, output=log)

    def _step(self) -> int:
        steps = [row["step"] for row in jobs.records(self.folder) if "loss" in row]
        return max(steps, default=0)

    def _wait_for_step(self, step: int, started: jobs.Started, end: float) -> jobs.Started:
        while self._step() < step:
            if time.monotonic() > end:
                raise TimeoutError(f"no step {step}; it is at {self._step()}")
            if (code := started.process.poll()) is not None:
                if code == 0:
                    return started
                started = self._start()
            time.sleep(0.02)
        return started

    def _wait_for_end(self, started: jobs.Started, end: float) -> int:
        try:
            return started.process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run did not end; it is at {self._step()}") from None


def _kill(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def compare(root: Path, kills: int, seed: int, ranks: int, seconds: float) -> tuple[Troubled, bool]:
    """Do one run in peace and one in trouble; return the latter, and whether they agree."""
    text = jobs.text_file(root)
    steps = (kills + 1) * STEPS_PER_KILL
    flags = ("--data", text, *FLAGS, "--steps", steps)
    calm, troubled = root / "calm", root / "troubled"
    done = jobs.run(ranks, *flags, "--run-dir", calm, timeout=seconds)
    if done.returncode:
        raise RuntimeError(done.stderr)
    expected = jobs.without_speed(jobs.records(calm))
    run = Troubled(ranks, (*flags, "--run-dir", troubled), troubled, seed)
    return run, run.run(kills, seconds) == expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", type=Path, help="also write what happened there")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run, agree = compare(Path(folder), options.kills, options.seed, options.ranks, 7200)
        steps = len([r for r in jobs.records(run.folder) if "loss" in r])
        skipped = sum(not r.get("stepped", True) for r in jobs.records(run.folder))
    command = f"python -m tests.launch.chaos --kills {options.kills} --seed {options.seed}"
    lines = [
        "# A run killed again and again",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {os.cpu_count()} cores, gloo:"
        f" `{command}`",
        "",
        f"{options.ranks} ranks trained {steps} steps in fp16 ({skipped} of them skipped) under"
        f" `torchrun --max-restarts`, started {run.torchruns} times, in"
        f" {(time.monotonic() - began) / 60:.0f} minutes on a busy machine, and met with:",
        "",
        "| What | How often |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(run.done.items())),
        "",
        "Every record (loss, loss scale, skipped steps, gradient norm, learning rate, validations)"
        f" {'is that' if agree else 'IS NOT THAT'} of a run left in peace, to the bit.",
    ]
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
