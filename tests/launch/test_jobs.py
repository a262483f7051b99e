"""The launcher as a job of torchrun's: killed, stopped, and given bad input."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.launch.jobs import TINY
from tests.ranks import RankError, RankPool

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(600)]

RUN = (*TINY, "--precision", "fp16", "--init-scale", 2.0**26, "--growth-interval", 2)
RUN = (*RUN, "--dropout", 0.1, "--steps", 18, "--save-every", 3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def until(folder: Path, step: int) -> None:
    """Wait until a run has a record of this step."""
    end = time.monotonic() + jobs.TIMEOUT_S
    while not any(row["step"] >= step for row in jobs.records(folder)):
        assert time.monotonic() < end
        time.sleep(0.01)


def workers(job: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the ranks."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{job.pid}/task").glob("*/children"):
            found += [int(pid) for pid in task.read_text().split()]
    return found


def killed_after(
    pool: RankPool, run: Path, args: Sequence[object], ready: Callable[[int], bool], seconds: float
) -> None:
    """Go on with a run, and kill all ranks with SIGKILL some time after it has enough records."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.005):
            if ready(len(jobs.records(run))):
                time.sleep(seconds)
                pool.kill(0)
                pool.kill(1)
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
        killed_after(pool, run, args, count.__le__, random.uniform(0, 0.05))
        assert count <= len(jobs.records(run)) < len(whole)
    assert pool.run(jobs.train, run, args)[0] == whole


def test_run_that_one_rank_is_asked_to_end_saves_and_exits_with_0(text, tmp_path):
    log = tmp_path / "log"
    args = ("--data", text, *TINY, "--steps", 100000, "--run-dir", tmp_path / "run")
    job = jobs.start(jobs.torchrun(2, *args, "--async-save", "--save-every", 3), log)
    until(tmp_path / "run", 5)
    os.kill(workers(job)[-1], signal.SIGTERM)
    assert job.wait(jobs.TIMEOUT_S) == 0
    last = jobs.records(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}" / ".metadata").exists()
    assert f"--resume {tmp_path / 'run'}" in log.read_text()


def test_bad_flag_is_one_sentence_and_every_rank_exits_with_2(tmp_path):
    log = tmp_path / "log"
    assert jobs.start(jobs.torchrun(2, "--batch", 7), log).wait(jobs.TIMEOUT_S) != 0
    printed = log.read_text()
    assert printed.count("error: ") == printed.count("error: --batch 7") == 1
    exits = [
        line.split(":", 1)[1].split()[0] for line in printed.splitlines() if "exitcode  :" in line
    ]
    assert exits == ["2", "2"]
    assert not (tmp_path / "runs").exists()
