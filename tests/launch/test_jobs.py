"""The launcher as a job: killed, asked to end, and given a bad flag under torchrun."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import FP16, TINY
from tests.ranks import RankError, RankPool

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(600)]

RUN = (*TINY, *FP16, "--dropout", 0.1, "--steps", 15, "--save-every", 3)


def killed_after(
    pool: RankPool, run: Path, args: Sequence[object], done: Collection[int], seconds: float
) -> None:
    """Go on with a run; kill all ranks with SIGKILL when its records are no more in ``done``."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.005):
            if len(jobs.records(run)) not in done:
                time.sleep(seconds)
                pool.kill()
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(RankError, match="exit code -9"):
            pool.run(jobs.train, run, args)
    finally:
        over.set()
        killer.join()


@pytest.mark.parametrize("layout", ["--hook int8", "--shard -1 --async-save"])
def test_run_killed_anywhere_has_the_losses_of_one_that_was_not(
    ranks2, new_ranks, text, tmp_path, layout
):
    args = ("--data", text, *RUN, *layout.split(), "--auto-resume")
    whole = ranks2.run(jobs.train, tmp_path / "whole", args)[0]
    run, pool = tmp_path / "run", new_ranks(2)
    for count in (1, 9):  # the first time there is no checkpoint yet
        killed_after(pool, run, args, range(count), random.uniform(0, 0.02))
        assert count <= len(jobs.records(run)) < len(whole)
    assert pool.run(jobs.train, run, args)[0] == whole


def asked_to_end(run: Path, args: Sequence[object]) -> int:
    """Train on this rank; the last one is sent SIGTERM after five steps."""

    def ask() -> None:
        jobs.until(run, 5)
        os.kill(os.getpid(), signal.SIGTERM)

    if dist.get_rank() == 1:
        threading.Thread(target=ask, daemon=True).start()
    with jobs.here():
        return main([*map(str, args), "--run-dir", str(run)])


def test_run_that_one_rank_is_asked_to_end_saves_and_exits_with_0(new_ranks, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 100_000, "--async-save", "--save-every", 3)
    assert new_ranks(2).run(asked_to_end, tmp_path, args) == [0, 0]
    last = jobs.records(tmp_path)[-1]["step"]
    assert last < 100_000
    assert (tmp_path / "checkpoints" / f"step-{last:08d}" / ".metadata").exists()


def test_bad_flag_is_one_sentence_and_every_rank_exits_with_2(tmp_path):
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    command = [*torchrun.split(), str(jobs.ROOT / "launch" / "train.py"), "--lr", "x"]
    environment = {k: v for k, v in os.environ.items() if not k.endswith(("RANK", "WORLD_SIZE"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert job.stderr.count("error: ") == job.stderr.count("error: --lr: ") == 1
    assert re.findall(r"exitcode +: (\d+)", job.stderr) == ["2", "2"]
    assert not (tmp_path / "runs").exists()
